"""The options that commands share, each with its group and its help, once; and all of `scrape`.

`sidecar.options.config` reads them from YAML and checks them as a whole.
"""

# No postponed annotations: cyclopts resolves those of a subclass where the subclass stands, without our names.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from sidecar.options.access import given, option
from sidecar.options.spans import SpanOptions

TARGET = Group("Target", sort_key=1)
SCRAPING = Group("Scraping", sort_key=4)
OUTPUT = Group("Output", sort_key=5)

DEFAULT_FORMATS = ("json", "csv", "text")


def _split(_hint: Any, tokens: Any) -> tuple[str, ...]:
    """Convert a,b and several tokens alike; which names are valid is `check_formats`' business."""
    return tuple(name.strip() for token in tokens for name in token.value.split(",") if name.strip())


# Each option is written once and shared by the commands that take it.
Url = Annotated[str | None, option(TARGET, "OpenAI-compatible base URL, with or without /v1. Required.")]
Model = Annotated[str | None, option(TARGET, "Model to ask for. Default: the only one the server lists.")]
ApiKey = Annotated[
    str | None, option(TARGET, "Bearer token. Prefer the environment variable.", env_var="SIDELIGHT_API_KEY")
]
Metrics = Annotated[
    tuple[str, ...],
    given(
        SCRAPING,
        "Prometheus URL (repeatable). Default: discovered from --url. That of TensorRT-LLM's /perf_metrics comes "
        "on top: it tells the times of each request, and is empty for others once read.",
    ),
]
ScrapeInterval = Annotated[float, option(SCRAPING, "Seconds between scrapes.")]
SliceDuration = Annotated[float, option(SCRAPING, "Length of a time slice, in seconds.")]
Out = Annotated[Path | None, option(OUTPUT, "Run directory; must not hold a run. Default: a new one under runs/.")]
Listen = Annotated[
    str | None,
    option(
        OUTPUT,
        "HOST:PORT of the live Prometheus page; port 0 takes a free one, 'off' serves none. Default: "
        "127.0.0.1:9464, or a free port where that is taken.",
    ),
]
Formats = Annotated[
    tuple[str, ...],
    given(
        OUTPUT,
        "Files to write besides summary.json, separated by commas: json, csv, jsonl, parquet (the export of "
        "server metrics; the last two hold every scrape), text (report.txt). Default: json,csv,text.",
        converter=_split,
    ),
]
Quiet = Annotated[bool, given(OUTPUT, "No live panel, only the result.")]
JsonProgress = Annotated[bool, given(OUTPUT, "Machine-readable progress: a JSON line an event, on stderr.")]
Verbose = Annotated[bool, given(OUTPUT, "Show the traceback behind an error line.")]
ConfigFile = Annotated[Path | None, option(OUTPUT, "YAML file with any of these options; the command line wins.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeOptions(SpanOptions):
    """All of `sidelight scrape`."""

    url: Url = None
    metrics: Metrics = ()
    duration: Annotated[float | None, option(SCRAPING, "Seconds to scrape. Default: until Ctrl-C.")] = None
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    out: Out = None
    formats: Formats = DEFAULT_FORMATS
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None
