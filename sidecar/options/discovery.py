"""Pages listed in a file of Prometheus' file-based service discovery (`file_sd_configs`), JSON or YAML.

Format: prometheus.io, configuration, `<file_sd_config>`. Of the labels of a group those count that make a URL:
`__scheme__`, `__metrics_path__` and `__param_<name>`.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import msgspec

from loadgen.plan.workloads.fields import WorkloadError, read_yaml
from recorded.errors import ConfigurationError
from sidecar.options.fields import http_url

FLAG = "--metrics-from"
_USUAL = {"__scheme__": "http", "__metrics_path__": "/metrics"}
_PARAMETER = "__param_"


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
