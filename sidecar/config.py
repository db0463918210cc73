"""One definition of what can be configured: it serves YAML, the command line, the environment and `sidelight schema`.

`RunOptions` is what a user says; `resolve` checks it as a whole and fills in what depends on something else.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from cyclopts import Group, Parameter

from loadgen import workloads
from scraper.access import masked
from sidecar.access import AccessOptions, check_access, header_names
from sidecar.errors import ConfigurationError

TARGET = Group("Target", sort_key=1)
LOAD = Group("Load", sort_key=2)
WORKLOAD = Group("Workload", sort_key=3)
SCRAPING = Group("Scraping", sort_key=4)
OUTPUT = Group("Output", sort_key=5)

DEFAULT_RATE_PER_S = 1.0
DEFAULT_DURATION_S = 30.0
SECRETS = ("api_key", "metrics_token", "metrics_user")
ALIASES = {"metrics_timeout": "scrape_timeout"}
FORMATS = ("json", "csv", "jsonl", "parquet", "text")
DEFAULT_FORMATS = ("json", "csv", "text")

LONGEST_S = 1e7  # four months
MOST_REQUESTS = 10_000_000
ACCESS_BOUNDS = {"scrape_timeout": (0.01, 3600.0)}
SCRAPE_BOUNDS = {
    **ACCESS_BOUNDS,
    "duration": (1e-3, LONGEST_S),
    "scrape_interval": (0.01, 3600.0),
    "slice_duration": (0.01, LONGEST_S),
}
RUN_BOUNDS = {
    **SCRAPE_BOUNDS,
    "rate": (1e-6, 1e6),
    "request_timeout": (1e-3, LONGEST_S),
    "drain_timeout": (0.0, LONGEST_S),
    "concurrency": (1, 100_000),
    "requests": (1, MOST_REQUESTS),
    "warmup": (0, MOST_REQUESTS),
    "seed": (0, 2**63 - 1),
}


def _split(_hint: Any, tokens: Any) -> tuple[str, ...]:
    """Convert a,b and several tokens alike; which names are valid is `check_formats`' business."""
    return tuple(name.strip() for token in tokens for name in token.value.split(",") if name.strip())


# Each option is written once and shared by the commands that take it.
Url = Annotated[str | None, Parameter(group=TARGET, help="OpenAI-compatible base URL, with or without /v1. Required.")]
Model = Annotated[str | None, Parameter(group=TARGET, help="Model to ask for. Default: the only one the server lists.")]
Endpoint = Annotated[Literal["chat", "completions"], Parameter(group=TARGET, help="Which API to load.")]
ApiKey = Annotated[
    str | None,
    Parameter(group=TARGET, env_var="SIDELIGHT_API_KEY", help="Bearer token. Prefer the environment variable."),
]
Metrics = Annotated[
    tuple[str, ...],
    Parameter(
        group=SCRAPING,
        negative="",
        show_default=False,
        help="Prometheus URL (repeatable). Default: discovered from --url.",
    ),
]
ScrapeInterval = Annotated[float, Parameter(group=SCRAPING, help="Seconds between scrapes.")]
SliceDuration = Annotated[float, Parameter(group=SCRAPING, help="Length of a time slice, in seconds.")]
Out = Annotated[
    Path | None, Parameter(group=OUTPUT, help="Run directory; must not hold a run. Default: a new one under runs/.")
]
Listen = Annotated[
    str | None,
    Parameter(
        group=OUTPUT,
        help="HOST:PORT of the live Prometheus page; port 0 takes a free one, 'off' serves none. Default: "
        "127.0.0.1:9464, or a free port where that is taken.",
    ),
]
Formats = Annotated[
    tuple[str, ...],
    Parameter(
        group=OUTPUT,
        negative="",
        converter=_split,
        show_default=False,
        help="Files to write besides summary.json, separated by commas: json, csv, jsonl, parquet (the export of "
        "server metrics; the last two hold every scrape), text (report.txt). Default: json,csv,text.",
    ),
]
Quiet = Annotated[
    bool, Parameter(group=OUTPUT, negative="", show_default=False, help="No live panel, only the result.")
]
JsonProgress = Annotated[
    bool,
    Parameter(
        group=OUTPUT,
        negative="",
        show_default=False,
        help="Machine-readable progress: a JSON line an event, on stderr.",
    ),
]
Verbose = Annotated[
    bool, Parameter(group=OUTPUT, negative="", show_default=False, help="Show the traceback behind an error line.")
]
ConfigFile = Annotated[
    Path | None, Parameter(group=OUTPUT, help="YAML file with any of these options; the command line wins.")
]


def _whole(_hint: Any, tokens: Any) -> int:
    """Convert to int without rounding. Raises ValueError."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError("must be a whole number") from None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(AccessOptions):
    """All of `sidelight run`."""

    url: Url = None
    model: Model = None
    endpoint: Endpoint = "chat"
    api_key: ApiKey = None
    request_timeout: Annotated[float, Parameter(group=TARGET, help="Seconds until one request is given up.")] = 600.0
    rate: Annotated[
        float | None,
        Parameter(group=LOAD, help="Open loop: requests per second, whatever the server does. Default: 1."),
    ] = None
    arrival: Annotated[Literal["poisson", "uniform"], Parameter(group=LOAD, help="Spacing of an open loop.")] = (
        "poisson"
    )
    concurrency: Annotated[
        int | None, Parameter(converter=_whole, group=LOAD, help="Closed loop: requests in flight. Excludes --rate.")
    ] = None
    requests: Annotated[int | None, Parameter(converter=_whole, group=LOAD, help="Stop after so many requests.")] = None
    duration: Annotated[
        float | None,
        Parameter(group=LOAD, help="Stop submitting after so many seconds. Default: 30 unless --requests."),
    ] = None
    warmup: Annotated[
        int, Parameter(converter=_whole, group=LOAD, help="Requests sent and drained before the measurement.")
    ] = 10
    drain_timeout: Annotated[
        float, Parameter(group=LOAD, help="Seconds to wait for open responses after the last submission.")
    ] = 120.0
    workload: Annotated[str, Parameter(group=WORKLOAD, help=f"What to send. One of: {', '.join(workloads.NAMES)}.")] = (
        "synthetic-uniform"
    )
    seed: Annotated[
        int,
        Parameter(converter=_whole, group=WORKLOAD, help="The same seed sends the same requests at the same times."),
    ] = 42
    tokenizer: Annotated[
        Literal["auto", "server", "cl100k_base"],
        Parameter(
            group=WORKLOAD,
            help="Whose tokens the workload's lengths are: the server's (/tokenize) or cl100k_base, the draft's "
            "reference. auto: the server's where it offers one.",
        ),
    ] = "auto"
    ignore_eos: Annotated[
        bool, Parameter(group=WORKLOAD, help="Ask the engine to generate to the workload's output length.")
    ] = True
    metrics: Metrics = ()
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    out: Out = None
    formats: Formats = DEFAULT_FORMATS
    listen: Listen = None
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeOptions(AccessOptions):
    """All of `sidelight scrape`."""

    url: Url = None
    metrics: Metrics = ()
    duration: Annotated[float | None, Parameter(group=SCRAPING, help="Seconds to scrape. Default: until Ctrl-C.")] = (
        None
    )
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    out: Out = None
    formats: Formats = DEFAULT_FORMATS
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None


def load_yaml(path: Path, options: type = RunOptions) -> dict[str, Any]:
    """Read a configuration file: a mapping of option names (with - or _) to values.

    Raises ConfigurationError: unreadable, not YAML (with line and column), not a mapping, or a key that is no option
    (names the key and the nearest valid one).
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}; give the path of a YAML file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"--config {path}{where}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigurationError(f"--config {path}: must be a mapping of options, but is a {type(data).__name__}")
    known = {field.name for field in dataclasses.fields(options)} - {"config"}
    named = {_known_key(str(key), known, path): value for key, value in data.items()}
    # YAML 1.1 reads a bare off as false.
    return {**named, "listen": "off"} if named.get("listen") is False else named


def _known_key(key: str, known: set[str], path: Path) -> str:
    name = key.replace("-", "_")
    name = ALIASES.get(name, name)
    if name in known:
        return name
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    raise ConfigurationError(f"--config {path}: unknown key '{key}'; did you mean '{near[0]}'?")


def check(options: RunOptions) -> RunOptions:
    """Return the options with defaults that depend on each other filled in.

    Raises ConfigurationError naming the option, its value and what would be valid.
    """
    if options.url is None:
        raise ConfigurationError("--url is missing; give the engine's base URL, e.g. --url http://127.0.0.1:8000")
    http_url("--url", options.url)
    for url in options.metrics:
        http_url("--metrics", url, user=True)
    check_access(options)
    if options.rate is not None and options.concurrency is not None:
        raise ConfigurationError("--rate and --concurrency exclude each other: one is open loop, the other closed loop")
    require_bounds(options, RUN_BOUNDS)
    check_formats(options.formats)
    if (options.rate or 0) * (options.duration or 0) > MOST_REQUESTS:
        raise ConfigurationError(
            f"--rate {options.rate:g} --duration {options.duration:g}: more than {MOST_REQUESTS:,} requests; lower one"
        )
    try:
        workloads.requests(options.workload, seed=options.seed)
    except ValueError as error:
        raise ConfigurationError(f"--workload {options.workload}: {error}") from error
    if options.listen is not None:
        listen_address(options.listen)
    open_loop = options.concurrency is None
    return dataclasses.replace(
        options,
        rate=(options.rate or DEFAULT_RATE_PER_S) if open_loop else None,
        duration=DEFAULT_DURATION_S if options.duration is None and options.requests is None else options.duration,
    )


def check_scrape(options: ScrapeOptions) -> ScrapeOptions:
    """Return the options of a scrape. Raises ConfigurationError as `check` does."""
    if options.url is None and not options.metrics:
        raise ConfigurationError("--metrics is missing; give a Prometheus URL, or --url to have it discovered")
    for flag, url in (("--url", options.url), *(("--metrics", url) for url in options.metrics)):
        if url is not None:
            http_url(flag, url, user=flag == "--metrics")
    check_access(options)
    require_bounds(options, SCRAPE_BOUNDS)
    check_formats(options.formats)
    return options


def check_formats(formats: Sequence[str]) -> None:
    """Raise ConfigurationError naming the first format that is none, or is not written yet."""
    for name in formats:
        if name not in FORMATS:
            wrong = "is not written yet" if name == "html" else "no such format"
            raise ConfigurationError(f"--formats {name}: {wrong}; choose from {', '.join(FORMATS)}")


def http_url(flag: str, url: str, *, user: bool = False) -> None:
    """Raise ConfigurationError unless the URL is http(s) with a host; a password in it only with `user`."""
    secret = False
    try:
        parts = urlsplit(url)
        secret = bool(parts.username or parts.password)
        usable = parts.scheme in {"http", "https"} and parts.hostname is not None and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if secret and not user:
        raise ConfigurationError(
            f"{flag}: a user name or password in the URL would stand in every file of the run; "
            "put the key into SIDELIGHT_API_KEY"
        )
    if not usable:
        raise ConfigurationError(
            f"{flag} {masked(url)}: must be an http:// or https:// URL, e.g. http://127.0.0.1:8000"
        )


def listen_address(listen: str) -> tuple[str, int] | None:
    """Return host and port of a HOST:PORT option, or None for 'off'."""
    if listen == "off":
        return None
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"--listen {listen}: must be HOST:PORT (port 0 picks a free one) or 'off'")
    return host.strip("[]"), int(port)


def require_bounds(options: AccessOptions, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigurationError naming the first option that is out of its bounds, and the bound."""
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is None or least <= value <= most:
            continue
        if value > most:
            raise ConfigurationError(f"{_flag(name)} {value:g}: must be at most {most:g}")
        positive = isinstance(value, float) and least > 0 and not value > 0
        need = "greater than 0" if positive else f"at least {least:g}"
        raise ConfigurationError(f"{_flag(name)} {value:g}: must be {need}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_recorded(options: RunOptions | ScrapeOptions) -> dict[str, Any]:
    """Return the options as they stand in the manifest: plain JSON values, secrets masked."""
    return {field.name: _plain(field.name, getattr(options, field.name)) for field in dataclasses.fields(options)}


def _plain(name: str, value: object) -> object:
    if name in SECRETS and value is not None:
        return "***"
    if isinstance(value, Path):
        return str(value)
    if name == "metrics_header" and isinstance(value, tuple):
        return header_names(value)
    if name == "metrics" and isinstance(value, tuple):
        return [masked(url) for url in value]
    return list(value) if isinstance(value, tuple) else value
