"""From what a user says to what is run: options read from YAML, checked as a whole, defaults filled in that depend on
something else.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rundir.access import masked
from sidecar.errors import ConfigurationError
from sidecar.options.access import AccessOptions, check_access, flag_of, header_names
from sidecar.options.load import DEFAULT_RATE_PER_S, ContactOptions, DoctorOptions, RunOptions
from sidecar.options.scrape import ScrapeOptions
from sidecar.options.spans import SpanOptions, check_collector, check_spans

DEFAULT_DURATION_S = 30.0
SECRETS = ("api_key", "metrics_token", "metrics_user")
ALIASES = {"metrics_timeout": "scrape_timeout"}
FORMATS = ("json", "csv", "jsonl", "parquet", "text")

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
    "deadline": (1e-3, LONGEST_S),
    "workers": (0, 256),
    "burstiness": (1e-3, 1e6),
    "burst_on": (1e-6, LONGEST_S),
    "burst_off": (0.0, LONGEST_S),
    "ramp_to": (1e-6, 1e6),
    "ramp_duration": (1e-3, LONGEST_S),
    "replay_speed": (1e-6, 1e6),
    "think_time": (0.0, LONGEST_S),
    "seed": (0, 2**63 - 1),
}


def load_yaml(path: Path, options: type = RunOptions) -> dict[str, Any]:
    """Read a configuration file: a mapping of option names (with - or _) to values.

    Raises ConfigurationError: unreadable, not YAML (with line and column), not a mapping, or a key that is no option
    (names the key and the nearest valid one).
    """
    import yaml  # noqa: PLC0415  15 ms, where no file is read

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
    from sidecar.options.checks import check_load  # noqa: PLC0415  numpy, which --help and --version need not wait for

    _check_target(options)
    check_spans(options)
    if options.otlp_export is not None:
        check_collector("--otlp-export", options.otlp_export)
    require_bounds(options, RUN_BOUNDS)
    check_load(options)
    check_formats(options.formats)
    if (options.rate or 0) * (options.duration or 0) > MOST_REQUESTS:
        raise ConfigurationError(
            f"--rate {options.rate:g} --duration {options.duration:g}: more than {MOST_REQUESTS:,} requests; lower one"
        )
    if options.listen is not None:
        listen_address(options.listen)
    scheduled = options.concurrency is not None or options.trace is not None or options.replay_requests is not None
    ends = options.requests is not None or options.trace is not None or options.replay_requests is not None
    return dataclasses.replace(
        options,
        rate=options.rate if options.rate is not None or scheduled else DEFAULT_RATE_PER_S,
        duration=DEFAULT_DURATION_S if options.duration is None and not ends else options.duration,
    )


def check_doctor(options: DoctorOptions) -> DoctorOptions:
    """Return the options of a look at an endpoint. Raises ConfigurationError as `check` does."""
    from sidecar.options.checks import check_contact  # noqa: PLC0415  as above

    _check_target(options)
    require_bounds(options, ACCESS_BOUNDS)
    check_contact(options)
    return options


def _check_target(options: ContactOptions) -> None:
    if not options.url:
        raise ConfigurationError("--url is missing; give the engine's base URL, e.g. --url http://127.0.0.1:8000")
    for url in options.url:
        http_url("--url", url)
    for url in options.metrics:
        http_url("--metrics", url, user=True)
    check_access(options)


def check_scrape(options: ScrapeOptions) -> ScrapeOptions:
    """Return the options of a scrape. Raises ConfigurationError as `check` does."""
    if options.url is None and not options.metrics and options.otlp_listen is None:
        raise ConfigurationError("--metrics is missing; give a Prometheus URL, or --url to have it discovered")
    for flag, url in (("--url", options.url), *(("--metrics", url) for url in options.metrics)):
        if url is not None:
            http_url(flag, url, user=flag == "--metrics")
    check_access(options)
    check_spans(options)
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
        if value is None or isinstance(value, str) or least <= value <= most:
            continue
        if value > most:
            raise ConfigurationError(f"{flag_of(name)} {value:g}: must be at most {most:g}")
        positive = isinstance(value, float) and least > 0 and not value > 0
        need = "greater than 0" if positive else f"at least {least:g}"
        raise ConfigurationError(f"{flag_of(name)} {value:g}: must be {need}")


def as_recorded(options: SpanOptions) -> dict[str, Any]:
    """Return the options as they stand in the manifest: plain JSON values, secrets masked."""
    return {field.name: _plain(field.name, getattr(options, field.name)) for field in dataclasses.fields(options)}


def _plain(name: str, value: object) -> object:
    if name in SECRETS and value is not None:
        return "***"
    if isinstance(value, Path):
        return str(value)
    if name in {"metrics_header", "header", "otlp_header"} and isinstance(value, tuple):
        return header_names(value)
    if name == "metrics" and isinstance(value, tuple):
        return [masked(url) for url in value]
    if name in {"otlp_forward", "otlp_export"} and isinstance(value, str):
        return masked(value)
    return list(value) if isinstance(value, tuple) else value
