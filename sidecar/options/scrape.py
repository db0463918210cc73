"""The options of `sidelight scrape`, and their checks."""

# No postponed annotations, as in sidecar.options.fields.
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from sidecar.errors import ConfigurationError
from sidecar.options.access import check_access
from sidecar.options.fields import (
    DEFAULT_FORMATS,
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
    http_url,
    option,
    time_option,
)
from sidecar.options.spans import SpanOptions, check_spans


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
        raise ConfigurationError("--metrics is missing; give a Prometheus URL, or --url to have it discovered")
    if options.url is not None:
        http_url("--url", options.url)
    for url in options.metrics:
        http_url("--metrics", url, user=True)
    check_access(options)
    check_spans(options)
    check_bounds(options)
    check_formats(options.formats)
    return options
