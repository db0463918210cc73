"""All that `sidelight run` can be told: the target, the load, what is sent, and what is asked of the results."""

# No postponed annotations, as in sidecar.options.
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from loadgen import workloads
from sidecar.access import AccessOptions
from sidecar.options import (
    DEFAULT_FORMATS,
    TARGET,
    ApiKey,
    ConfigFile,
    Formats,
    JsonProgress,
    Listen,
    Metrics,
    Model,
    Out,
    Quiet,
    ScrapeInterval,
    SliceDuration,
    Verbose,
)
from sidecar.span_options import OtlpExport, SpanOptions

LOAD = Group("Load", sort_key=2)
ARRIVALS = Group("Open loop", sort_key=2.5)
WORKLOAD = Group("Workload", sort_key=3)
CRITERIA = Group("Criteria", sort_key=4.8)

DRAFT = "draft"
DEFAULT_RATE_PER_S = 1.0


def _whole(_hint: Any, tokens: Any) -> int:
    """Convert to int without rounding. Raises ValueError."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r}: must be a whole number") from None


def _warmup(_hint: Any, tokens: Any) -> int | str:
    """Convert a number of requests, or the word. Raises ValueError."""
    if tokens[0].value == DRAFT:
        return DRAFT
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r}: must be a whole number or '{DRAFT}'") from None


# How a target is spoken to: written once, for `run` and for `doctor`.
Urls = Annotated[
    tuple[str, ...],
    Parameter(
        group=TARGET,
        negative="",
        show_default=False,
        help="Base URL, with or without /v1 (repeatable: requests take them in turn). Required.",
    ),
]
Api = Annotated[
    Literal["chat", "completions", "responses", "websocket", "grpc", "sglang", "tgi", "ollama", "exo"],
    Parameter(group=TARGET, help="Which API to load; docs/protocols.md describes each."),
]
Header = Annotated[
    tuple[str, ...],
    Parameter(
        group=TARGET,
        negative="",
        show_default=False,
        help="A further header of every request, 'Name: value' (repeatable).",
    ),
]
ExtraBody = Annotated[
    str | None,
    Parameter(
        group=TARGET,
        help="JSON object merged into every request's body, e.g. '{\"top_k\": 1}'; null leaves a field out.",
    ),
]
Ca = Annotated[
    Path | None, Parameter(group=TARGET, help="Trust only what this authority signed (PEM). Default: the system's.")
]
Cert = Annotated[Path | None, Parameter(group=TARGET, help="Client certificate (PEM; may hold its key as well).")]
Key = Annotated[Path | None, Parameter(group=TARGET, help="Key of the client certificate (PEM, without a password).")]
Insecure = Annotated[
    bool,
    Parameter(group=TARGET, negative="", show_default=False, help="Take any certificate, whoever presents it."),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(AccessOptions):
    """All of `sidelight doctor`: what `run` is told of the target and of its pages."""

    url: Urls = ()
    model: Model = None
    endpoint: Api = "chat"
    api_key: ApiKey = None
    header: Header = ()
    extra_body: ExtraBody = None
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    insecure: Insecure = False
    metrics: Metrics = ()
    verbose: Verbose = False


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SpanOptions):
    """All of `sidelight run`."""

    url: Urls = ()
    model: Model = None
    endpoint: Api = "chat"
    api_key: ApiKey = None
    header: Header = ()
    extra_body: ExtraBody = None
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    insecure: Insecure = False
    reuse: Annotated[bool, Parameter(group=TARGET, help="Keep connections open for further requests.")] = True
    request_timeout: Annotated[float, Parameter(group=TARGET, help="Seconds until one request is given up.")] = 600.0
    rate: Annotated[
        float | None,
        Parameter(group=LOAD, help="Open loop: requests per second, whatever the server does. Default: 1."),
    ] = None
    concurrency: Annotated[
        int | None,
        Parameter(
            converter=_whole,
            group=LOAD,
            help="Closed loop: requests in flight. A session holds its place also while it thinks. Excludes --rate.",
        ),
    ] = None
    barrier: Annotated[
        bool,
        Parameter(
            group=LOAD,
            negative="",
            show_default=False,
            help="Closed loop in rounds: --concurrency requests at one instant, the next when all have ended.",
        ),
    ] = False
    requests: Annotated[
        int | None,
        Parameter(
            converter=_whole, group=LOAD, help="Stop after so many requests; of sessions, after so many sessions."
        ),
    ] = None
    duration: Annotated[
        float | None,
        Parameter(
            group=LOAD,
            help="Stop submitting after so many seconds. Default: 30; with --requests, --trace or --replay-requests, "
            "when those are sent.",
        ),
    ] = None
    warmup: Annotated[
        int | Literal["draft"],
        Parameter(
            converter=_warmup,
            group=LOAD,
            help="Requests sent and drained before the measurement; 0: a cold start; draft: 100 requests or 10,000 "
            "output tokens, whichever is more, until probes agree within 10 %.",
        ),
    ] = 10
    drain_timeout: Annotated[
        float, Parameter(group=LOAD, help="Seconds to wait for open responses after the last submission.")
    ] = 120.0
    deadline: Annotated[
        float | None,
        Parameter(
            group=LOAD,
            help="Seconds after which the whole run, its preparation included, is stopped as by Ctrl-C.",
        ),
    ] = None
    workers: Annotated[
        int, Parameter(converter=_whole, group=LOAD, help="Load workers, a process each; 0: one for each core.")
    ] = 1
    arrival: Annotated[
        Literal["poisson", "uniform", "gamma", "burst", "replay"],
        Parameter(group=ARRIVALS, help="Spacing of the requests."),
    ] = "poisson"
    burstiness: Annotated[
        float,
        Parameter(group=ARRIVALS, help="Shape of gamma gaps, as in vllm bench serve: 1 is Poisson, less is burstier."),
    ] = 1.0
    burst_on: Annotated[
        float | None,
        Parameter(group=ARRIVALS, help="Seconds of a burst; --rate is the mean over bursts and pauses. Default: 1."),
    ] = None
    burst_off: Annotated[float | None, Parameter(group=ARRIVALS, help="Seconds between bursts. Default: 1.")] = None
    ramp: Annotated[
        Literal["none", "linear", "exponential"], Parameter(group=ARRIVALS, help="From --rate to --ramp-to.")
    ] = "none"
    ramp_to: Annotated[float | None, Parameter(group=ARRIVALS, help="Requests per second at the ramp's end.")] = None
    ramp_duration: Annotated[
        float | None,
        Parameter(group=ARRIVALS, help="Seconds of the ramp; the rate stays then. Default: the whole run"),
    ] = None
    trace: Annotated[
        Path | None,
        Parameter(group=ARRIVALS, help="Arrivals to replay: Azure, BurstGPT or Mooncake; CSV or JSON lines."),
    ] = None
    replay_speed: Annotated[
        float, Parameter(group=ARRIVALS, help="2 halves every gap of the trace. Excludes --rate.")
    ] = 1.0
    workload: Annotated[
        str,
        Parameter(
            group=WORKLOAD,
            help=f"What to send: a YAML file (docs/workloads.md), or one of: {', '.join(workloads.NAMES)}.",
        ),
    ] = "synthetic-uniform"
    dataset: Annotated[
        Path | None,
        Parameter(group=WORKLOAD, help="The real file of conversation (ShareGPT) or code-completion (The Stack)."),
    ] = None
    seed: Annotated[
        int,
        Parameter(converter=_whole, group=WORKLOAD, help="The same seed sends the same requests at the same times."),
    ] = 42
    tokenizer: Annotated[
        str,
        Parameter(
            group=WORKLOAD,
            help="Whose tokens the workload's lengths are: server (its /tokenize), cl100k_base (the draft's "
            "reference), or the path of a tokenizer.json. auto: the server's where it offers one.",
        ),
    ] = "auto"
    exact_tokens: Annotated[
        bool,
        Parameter(
            group=WORKLOAD,
            negative="",
            show_default=False,
            help="Fit each prompt to its exact number of tokens, the chat template included, and record the count.",
        ),
    ] = False
    ignore_eos: Annotated[
        bool, Parameter(group=WORKLOAD, help="Ask the engine to generate to the workload's output length.")
    ] = True
    sessions: Annotated[
        bool,
        Parameter(
            group=WORKLOAD,
            negative="",
            show_default=False,
            help="Send the later messages of a --dataset's conversations as later turns, with the replies as history.",
        ),
    ] = False
    think_time: Annotated[
        float, Parameter(group=WORKLOAD, help="Seconds from a reply to the next turn of such a conversation.")
    ] = 0.0
    save_requests: Annotated[
        Path | None, Parameter(group=WORKLOAD, help="Write the exact requests to this file (JSON lines).")
    ] = None
    replay_requests: Annotated[
        Path | None, Parameter(group=WORKLOAD, help="Send the requests of such a file, in its order.")
    ] = None
    metrics: Metrics = ()
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    slo: Annotated[
        str | None,
        Parameter(
            group=CRITERIA,
            help='Objectives, e.g. "ttft_p99<500ms,tpot_p99<50ms": goodput counts by them, and a run that misses one '
            "exits with 1.",
        ),
    ] = None
    out: Out = None
    formats: Formats = DEFAULT_FORMATS
    otlp_export: OtlpExport = None
    listen: Listen = None
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None

    @property
    def worker_count(self) -> int:
        """Return how many load workers there are."""
        return self.workers or os.cpu_count() or 1
