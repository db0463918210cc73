"""The options of `sidelight scrape` and `sidelight watch`, which send no load; their checks; and which of a watch's a
reload of its configuration file changes.
"""

# No postponed annotations, as in sidecar.options.fields.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.scraper.targets.scrape import clock_of
from sidelight.sidecar.options import config
from sidelight.sidecar.options.access import check_access
from sidelight.sidecar.options.discovery import listed_pages, shard_of
from sidelight.sidecar.options.fields import (
    CRITERIA,
    DEFAULT_FORMATS,
    LONGEST_S,
    MASKED_URLS,
    OBJECTIVES,
    OUTPUT,
    SCRAPING,
    TARGET,
    ConfigFile,
    Duration,
    Formats,
    JsonProgress,
    Metrics,
    Out,
    Quiet,
    ScrapeInterval,
    SliceDuration,
    Verbose,
    check_bounds,
    check_formats,
    check_slo,
    flag_of,
    http_url,
    listen_address,
    option,
    repeatable,
    seconds,
    size_bytes,
    time_option,
)
from sidelight.sidecar.options.spans import SPANS, RemoteWriteOptions, SpanOptions, check_remote_write, check_spans

LEAST_KEPT = "1MB"  # of logs
LEAST_MEMORY = "128MB"  # what it takes before anything comes, and room for a forwarder's queue
CHANGEABLE = ("metrics", "metrics_from", "scrape_interval", "keep", "keep_bytes")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeOptions(SpanOptions):
    """All of `sidelight scrape`."""

    url: Annotated[str | None, option(TARGET, "OpenAI-compatible base URL, with or without /v1.")] = None
    metrics: Metrics = ()
    duration: Annotated[Duration | None, time_option(SCRAPING, "How long to scrape. Default: until Ctrl-C.")] = None
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    out: Out = None
    formats: Formats = DEFAULT_FORMATS
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None


def check_scrape(options: ScrapeOptions) -> ScrapeOptions:
    """Return the options. Raises ConfigurationError naming the option, its value and what would be valid."""
    if options.url is None and not options.metrics and options.otlp_listen is None:
        raise ConfigurationError(
            "option.missing", "--metrics is missing; give a Prometheus URL, or --url to have it discovered"
        )
    url = None if options.url is None else http_url("--url", options.url)
    pages = tuple(http_url("--metrics", url, user=True) for url in options.metrics)
    check_access(options)
    check_spans(options)
    check_bounds(options)
    check_formats(options.formats)
    return replace(options, url=url, metrics=pages)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(SpanOptions, RemoteWriteOptions):
    """All of `sidelight watch`."""

    otlp_listen: Annotated[
        str,
        option(
            SPANS,
            "Receive spans of clients, gateways and engines over OTLP: gRPC on HOST:PORT, HTTP/protobuf on PORT+1; "
            "port 0 picks free ports.",
        ),
    ] = "127.0.0.1:4317"
    memory: Annotated[
        str,
        option(
            SPANS,
            "Limit on the memory of the process that receives spans, e.g. 512MB, 1GiB. Above it, exports are refused, "
            "to be sent again; a process that takes still more is ended, and started anew.",
        ),
    ] = "512MB"
    metrics: Annotated[
        tuple[str, ...],
        repeatable(
            SCRAPING, "Prometheus page of an engine or gateway (repeatable). Default: none, only spans are used."
        ),
        MASKED_URLS,
    ] = ()
    metrics_from: Annotated[
        Path | None,
        option(
            SCRAPING,
            "File of Prometheus' service discovery (file_sd, JSON or YAML) with more pages; read again each 30 s.",
        ),
    ] = None
    shard: Annotated[
        str | None,
        option(
            SCRAPING,
            "K/N: one of N watches, 0 to N-1, that share the pages by a hash of the URL. Requests without an engine's "
            "span are not estimated.",
        ),
    ] = None
    scrape_interval: ScrapeInterval = 1.0
    slo: Annotated[
        str | None,
        option(
            CRITERIA,
            f"{OBJECTIVES}Judged over the last minute by clients' spans, else by the histograms of engines' pages; the "
            "exit code does not depend on them.",
        ),
    ] = None
    known: Annotated[
        str,
        option(CRITERIA, "For the headroom, settings of the engine that traffic may not show: max-num-seqs=64."),
    ] = ""
    baseline: Annotated[
        Path | None,
        option(
            CRITERIA,
            "Directory of a watch of 40 minutes or more that the engine is compared with, at equal batch and length. "
            "Default: the first hour of this watch.",
        ),
    ] = None
    listen: Annotated[
        str,
        option(
            OUTPUT,
            "HOST:PORT of the live page for browsers (/), of /metrics, /healthz and /readyz; port 0 picks a free port.",
        ),
    ] = "127.0.0.1:9464"
    keep: Annotated[str, option(OUTPUT, "Maximum age of raw logs, e.g. 90s, 30m, 1h, 2d. Older ones are deleted.")] = (
        "1h"
    )
    keep_bytes: Annotated[
        str, option(OUTPUT, "Maximum size of raw logs, e.g. 500MB, 2GiB. The oldest are deleted.")
    ] = "1GB"
    out: Out = None
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None

    @property
    def keep_s(self) -> float:
        """Return the maximum age of logs. Raises ConfigurationError."""
        return _seconds("--keep", self.keep)

    @property
    def kept_bytes(self) -> int:
        """Return the maximum size of logs. Raises ConfigurationError."""
        return size_bytes("keep_bytes", self.keep_bytes, least=LEAST_KEPT)

    @property
    def memory_bytes(self) -> int:
        """Return the memory limit of the receiver's process. Raises ConfigurationError."""
        return size_bytes("memory", self.memory, least=LEAST_MEMORY)


def pages_of(options: WatchOptions) -> tuple[str, ...]:
    """Return the pages to scrape: those of --metrics, then those listed in --metrics-from now; of them the --shard's.

    Raises ConfigurationError for a file, or a page in it, that cannot be used.
    """
    listed = () if options.metrics_from is None else listed_pages(options.metrics_from)
    _require_pages(listed)
    pages = dict.fromkeys((*options.metrics, *listed))
    shard = None if options.shard is None else shard_of(options.shard)
    return tuple(url for url in pages if shard is None or shard.has(url))


def check_watch(options: WatchOptions) -> WatchOptions:
    """Return the options. Raises ConfigurationError naming the option, its value and what would be valid."""
    options = replace(options, metrics=tuple(http_url("--metrics", url, user=True) for url in options.metrics))
    check_access(options)
    check_spans(options, listen=options.listen)
    check_remote_write(options)
    check_bounds(options)
    check_slo(options.slo)
    if options.known:
        from sidelight.twin.scenario import settings_of  # noqa: PLC0415  numpy, for which no help waits

        settings_of("--known", options.known)
    if listen_address(options.listen) is None:
        raise ConfigurationError("option.value", "--listen off: a watch always serves its page; give HOST:PORT")
    _require_pages(options.metrics)
    _ = options.keep_s, options.kept_bytes, options.memory_bytes  # which raise
    options = replace(options, metrics=tuple(_page(url) for url in options.metrics))
    pages_of(options)
    return options


def _seconds(flag: str, text: str) -> float:
    try:
        age_s = seconds(text)
    except ValueError as error:
        raise ConfigurationError("option.value", f"{flag} {text}: {error}") from error
    if not 1 <= age_s <= LONGEST_S:
        raise ConfigurationError("option.value", f"{flag} {text}: must be 1s to {LONGEST_S:g}s")
    return age_s


def _require_pages(urls: Sequence[str]) -> None:
    """Reject pages with records that each reading removes for all other readers."""
    for url in filter(clock_of, urls):
        raise ConfigurationError(
            "watch.perf-metrics",
            f"--metrics {masked(url)}: a watch does not read /perf_metrics, since each reading removes the records for "
            "all other readers; use `sidelight run` or `sidelight scrape`, or send the engine's spans to the watch",
        )


def _page(url: str) -> str:
    """Return the page that a bare HOST:PORT means."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else urlunsplit(parts._replace(path="/metrics"))


def reloaded(options: WatchOptions, given: Sequence[str]) -> tuple[WatchOptions, tuple[str, ...]]:
    """Return the options of the configuration file read again, and the changes refused. There is one line for each
    refused change.

    `given` are the arguments of the command line, which take precedence over the file. An option that the file no
    longer names gets its default. Raises ConfigurationError for a file, or a value, that cannot be used.
    """
    if options.config is None:
        if options.metrics_from is not None:
            return options, ()
        raise ConfigurationError("option.missing", "there is no --config or --metrics-from file to reload")
    settings = config.load_yaml(options.config, WatchOptions)
    read = _convert(settings, options.config)
    named = {argument.partition("=")[0] for argument in given}
    changes = {name: getattr(read, name) for name in CHANGEABLE if flag_of(name) not in named}
    refused = tuple(
        f"{name} cannot change while the watch runs; restart the watch to apply it"
        for name in settings
        if not (name in CHANGEABLE or flag_of(name) in named or getattr(read, name) == getattr(options, name))
    )
    return check_watch(replace(options, **changes)), refused


def _convert(settings: dict[str, Any], path: Path) -> WatchOptions:
    """Convert the values of a configuration file as at the start."""
    app = App(config=Dict(settings, source=str(path), use_commands_as_keys=False))
    app.default(WatchOptions)
    try:
        options: WatchOptions = app([], exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ConfigurationError("option.value", " ".join(str(error).split())) from error
    return options
