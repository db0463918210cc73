"""Pages of a fleet: those in a file of Prometheus' service discovery, and the share of a shard.

Format of the file (`file_sd_configs`), JSON or YAML: prometheus.io, configuration, `<file_sd_config>`. Of the labels of
a group those count that make a URL: `__scheme__`, `__metrics_path__` and `__param_<name>`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from sidelight.loadgen.plan.workloads.fields import WorkloadError, read_yaml
from sidelight.recorded.errors import ConfigurationError
from sidelight.sidecar.options.fields import http_url

FLAG = "--metrics-from"
_USUAL = {"__scheme__": "http", "__metrics_path__": "/metrics"}
_PARAMETER = "__param_"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several watches that share the pages of a fleet."""

    number: int
    total: int

    def has(self, url: str) -> bool:
        """Return whether a page is this shard's: by a hash of its URL, as with Prometheus' `hashmod`."""
        digest = hashlib.blake2b(url.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.total == self.number


def shard_of(text: str) -> Shard:
    """Return the shard that K/N names. Raises ConfigurationError."""
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ConfigurationError("option.value", f"--shard {text}: must be K/N, K from 0 to N-1, such as 0/4")
    return Shard(int(match[1]), int(match[2]))


class _TargetGroup(msgspec.Struct, frozen=True):
    """Targets of one group as HOST:PORT, with the labels that they share."""

    targets: list[str]
    labels: dict[str, str | int | float] = {}


def listed_pages(path: Path) -> tuple[str, ...]:
    """Return the URLs of the pages that a file lists, each once, in its order.

    Raises ConfigurationError naming the file, and the group and field that cannot be used.
    """
    try:
        groups = msgspec.convert(read_yaml(path) or [], list[_TargetGroup])
    except WorkloadError as error:
        raise ConfigurationError(error.code, f"{FLAG} {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            "file.not-targets",
            f"{FLAG} {path}: {error}; write a list of groups, such as "
            '[{"targets": ["10.0.0.1:8000"], "labels": {"__metrics_path__": "/metrics"}}]',
        ) from error
    return tuple(dict.fromkeys(_url(path, target, group.labels) for group in groups for target in group.targets))


def _url(path: Path, target: str, labels: dict[str, str | int | float]) -> str:
    scheme, page = (str(labels.get(name, usual)) for name, usual in _USUAL.items())
    given = {name.removeprefix(_PARAMETER): value for name, value in labels.items() if name.startswith(_PARAMETER)}
    query = f"?{urlencode(given)}" if given else ""
    return http_url(f"{FLAG} {path}: target", f"{scheme}://{target}/{page.lstrip('/')}{query}", user=True)
