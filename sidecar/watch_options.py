"""All that can be said to `sidelight watch`, and what of it can be said again while it goes on."""

# No postponed annotations, as in sidecar.options.
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

from cyclopts import Parameter

from sidecar import config
from sidecar.access import check_access
from sidecar.errors import ConfigurationError
from sidecar.options import OUTPUT, SCRAPING, ConfigFile, JsonProgress, Out, Quiet, Verbose
from sidecar.span_options import SPANS, SpanOptions, check_spans

CHANGEABLE = ("metrics", "scrape_interval", "keep", "keep_bytes")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
LEAST_BYTES = 10**6


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(SpanOptions):
    """All of `sidelight watch`."""

    otlp_listen: Annotated[
        str,
        Parameter(
            group=SPANS,
            help="Receive the spans of clients, gateways and engines by OTLP: gRPC at HOST:PORT, HTTP/protobuf at "
            "PORT+1; port 0 takes free ones.",
        ),
    ] = "127.0.0.1:4317"
    metrics: Annotated[
        tuple[str, ...],
        Parameter(
            group=SCRAPING,
            negative="",
            show_default=False,
            help="Prometheus page of an engine (repeatable). Default: none; spans alone tell.",
        ),
    ] = ()
    scrape_interval: Annotated[float, Parameter(group=SCRAPING, help="Seconds between scrapes.")] = 1.0
    listen: Annotated[
        str,
        Parameter(group=OUTPUT, help="HOST:PORT of /metrics, /healthz and /readyz; port 0 takes a free one."),
    ] = "127.0.0.1:9464"
    keep: Annotated[
        str, Parameter(group=OUTPUT, help="How long raw logs are kept: 90s, 30m, 1h, 2d. Older ones are deleted.")
    ] = "1h"
    keep_bytes: Annotated[
        str, Parameter(group=OUTPUT, help="How much of them is kept: 500MB, 2GiB. The oldest are deleted.")
    ] = "1GB"
    out: Out = None
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None

    @property
    def keep_s(self) -> float:
        """Return how long logs are kept."""
        return _seconds(self.keep)

    @property
    def kept_bytes(self) -> int:
        """Return how much of them is kept."""
        return _bytes(self.keep_bytes)


def check_watch(options: WatchOptions) -> WatchOptions:
    """Return the options. Raises ConfigurationError naming the option, its value and what would be valid."""
    for url in options.metrics:
        config.http_url("--metrics", url, user=True)
    check_access(options)
    check_spans(options)
    config.require_bounds(options, {**config.ACCESS_BOUNDS, "scrape_interval": (0.01, 3600.0)})
    if config.listen_address(options.listen) is None:
        raise ConfigurationError("--listen off: the page is what a watch is for; give HOST:PORT")
    if not 1 <= options.keep_s <= config.LONGEST_S:
        raise ConfigurationError(f"--keep {options.keep}: must be 1s to {config.LONGEST_S:g}s")
    if options.kept_bytes < LEAST_BYTES:
        raise ConfigurationError(f"--keep-bytes {options.keep_bytes}: must be at least 1MB")
    return replace(options, metrics=tuple(_page(url) for url in options.metrics))


def _page(url: str) -> str:
    """Return the page that a bare HOST:PORT means."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else urlunsplit(parts._replace(path="/metrics"))


def reloaded(options: WatchOptions, given: Sequence[str]) -> tuple[WatchOptions, tuple[str, ...]]:
    """Read the configuration file again; return the options by it, and one line for each change that is refused.

    `given` are the arguments of the command line, which win over the file. What the file no longer names is as it is by
    default. Raises ConfigurationError for a file, or a value, that cannot be used.
    """
    if options.config is None:
        raise ConfigurationError("there is no --config file to read again")
    named = {one.partition("=")[0] for one in given}
    defaults = {one.name: one.default for one in fields(WatchOptions)}
    found = config.load_yaml(options.config, WatchOptions)
    changes, refused = {}, []
    for name in CHANGEABLE:
        if _flag(name) not in named:
            changes[name] = _value(name, found.get(name, defaults[name]))
    for name, value in found.items():
        if name not in CHANGEABLE and _flag(name) not in named and not _same(getattr(options, name), value):
            refused.append(f"{name} cannot change while it goes on; end the watch and start it again")
    return check_watch(replace(options, **_checked(changes))), tuple(refused)


def _checked(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(changes.get("scrape_interval", 1.0), float):
        raise ConfigurationError(f"scrape_interval {changes['scrape_interval']}: must be a number of seconds")
    return changes


def _value(name: str, value: object) -> object:
    if name == "metrics":
        return (
            (value,) if isinstance(value, str) else tuple(str(one) for one in value) if isinstance(value, list) else ()
        )
    if name == "scrape_interval":
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    return str(value)


def _same(now: object, value: object) -> bool:
    if isinstance(now, tuple):
        return list(map(str, now)) == ([str(value)] if not isinstance(value, list) else list(map(str, value)))
    return str(now) == str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not found:
        raise ConfigurationError(f"--keep {text}: must be a number and s, m, h or d, e.g. 1h")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(|k|M|G|Ki|Mi|Gi)B?", text)
    if not found:
        raise ConfigurationError(f"--keep-bytes {text}: must be a number and kB, MB, GB, MiB or GiB, e.g. 500MB")
    return int(float(found[1]) * _BYTES[found[2]])
