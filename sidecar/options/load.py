"""All that `sidelight run` can be told: the target, the load, what is sent, and what is asked of the results."""

# No postponed annotations, as in sidecar.options.scrape.
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from loadgen.plan import workloads
from sidecar.options.access import AccessOptions, given, option
from sidecar.options.scrape import (
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
from sidecar.options.spans import OtlpExport, SpanOptions

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


# No slots: RunOptions has this beside another base, which slots forbid.
@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ContactOptions(AccessOptions):
    """How a target is spoken to, and where its pages are."""

    url: Annotated[
        tuple[str, ...],
        given(TARGET, "Base URL, with or without /v1 (repeatable: requests take them in turn). Required."),
    ] = ()
    model: Model = None
    endpoint: Annotated[
        Literal["chat", "completions", "responses", "websocket", "grpc", "sglang", "tgi", "ollama", "exo"],
        option(TARGET, "Which API to load; docs/protocols.md describes each."),
    ] = "chat"
    api_key: ApiKey = None
    header: Annotated[
        tuple[str, ...], given(TARGET, "A further header of every request, 'Name: value' (repeatable).")
    ] = ()
    extra_body: Annotated[
        str | None,
        option(TARGET, "JSON object merged into every request's body, e.g. '{\"top_k\": 1}'; null leaves a field out."),
    ] = None
    ca: Annotated[
        Path | None, option(TARGET, "Trust only what this authority signed (PEM). Default: the system's.")
    ] = None
    cert: Annotated[Path | None, option(TARGET, "Client certificate (PEM; may hold its key as well).")] = None
    key: Annotated[Path | None, option(TARGET, "Key of the client certificate (PEM, without a password).")] = None
    insecure: Annotated[bool, given(TARGET, "Take any certificate, whoever presents it.")] = False
    metrics: Metrics = ()


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(ContactOptions):
    """All of `sidelight doctor`: what `run` is told of the target and of its pages."""

    verbose: Verbose = False


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ContactOptions, SpanOptions):
    """All of `sidelight run`."""

    reuse: Annotated[bool, option(TARGET, "Keep connections open for further requests.")] = True
    request_timeout: Annotated[float, option(TARGET, "Seconds until one request is given up.")] = 600.0
    rate: Annotated[
        float | None, option(LOAD, "Open loop: requests per second, whatever the server does. Default: 1.")
    ] = None
    concurrency: Annotated[
        int | None,
        option(
            LOAD,
            "Closed loop: requests in flight. A session holds its place also while it thinks. Excludes --rate.",
            converter=_whole,
        ),
    ] = None
    barrier: Annotated[
        bool, given(LOAD, "Closed loop in rounds: --concurrency requests at one instant, the next when all have ended.")
    ] = False
    requests: Annotated[
        int | None, option(LOAD, "Stop after so many requests; of sessions, after so many sessions.", converter=_whole)
    ] = None
    duration: Annotated[
        float | None,
        option(
            LOAD,
            "Stop submitting after so many seconds. Default: 30; with --requests, --trace or --replay-requests, "
            "when those are sent.",
        ),
    ] = None
    warmup: Annotated[
        int | Literal["draft"],
        option(
            LOAD,
            "Requests sent and drained before the measurement; 0: a cold start; draft: 100 requests or 10,000 "
            "output tokens, whichever is more, until probes agree within 10 %.",
            converter=_warmup,
        ),
    ] = 10
    drain_timeout: Annotated[float, option(LOAD, "Seconds to wait for open responses after the last submission.")] = (
        120.0
    )
    deadline: Annotated[
        float | None,
        option(LOAD, "Seconds after which the whole run, its preparation included, is stopped as by Ctrl-C."),
    ] = None
    workers: Annotated[int, option(LOAD, "Load workers, a process each; 0: one for each core.", converter=_whole)] = 1
    arrival: Annotated[
        Literal["poisson", "uniform", "gamma", "burst", "replay"], option(ARRIVALS, "Spacing of the requests.")
    ] = "poisson"
    burstiness: Annotated[
        float, option(ARRIVALS, "Shape of gamma gaps, as in vllm bench serve: 1 is Poisson, less is burstier.")
    ] = 1.0
    burst_on: Annotated[
        float | None, option(ARRIVALS, "Seconds of a burst; --rate is the mean over bursts and pauses. Default: 1.")
    ] = None
    burst_off: Annotated[float | None, option(ARRIVALS, "Seconds between bursts. Default: 1.")] = None
    ramp: Annotated[Literal["none", "linear", "exponential"], option(ARRIVALS, "From --rate to --ramp-to.")] = "none"
    ramp_to: Annotated[float | None, option(ARRIVALS, "Requests per second at the ramp's end.")] = None
    ramp_duration: Annotated[
        float | None, option(ARRIVALS, "Seconds of the ramp; the rate stays then. Default: the whole run")
    ] = None
    trace: Annotated[
        Path | None, option(ARRIVALS, "Arrivals to replay: Azure, BurstGPT or Mooncake; CSV or JSON lines.")
    ] = None
    replay_speed: Annotated[float, option(ARRIVALS, "2 halves every gap of the trace. Excludes --rate.")] = 1.0
    workload: Annotated[
        str,
        option(WORKLOAD, f"What to send: a YAML file (docs/workloads.md), or one of: {', '.join(workloads.NAMES)}."),
    ] = "synthetic-uniform"
    dataset: Annotated[
        Path | None, option(WORKLOAD, "The real file of conversation (ShareGPT) or code-completion (The Stack).")
    ] = None
    seed: Annotated[
        int, option(WORKLOAD, "The same seed sends the same requests at the same times.", converter=_whole)
    ] = 42
    tokenizer: Annotated[
        str,
        option(
            WORKLOAD,
            "Whose tokens the workload's lengths are: server (its /tokenize), cl100k_base (the draft's "
            "reference), or the path of a tokenizer.json. auto: the server's where it offers one.",
        ),
    ] = "auto"
    exact_tokens: Annotated[
        bool,
        given(
            WORKLOAD, "Fit each prompt to its exact number of tokens, the chat template included, and record the count."
        ),
    ] = False
    ignore_eos: Annotated[bool, option(WORKLOAD, "Ask the engine to generate to the workload's output length.")] = True
    sessions: Annotated[
        bool,
        given(
            WORKLOAD,
            "Send the later messages of a --dataset's conversations as later turns, with the replies as history.",
        ),
    ] = False
    think_time: Annotated[float, option(WORKLOAD, "Seconds from a reply to the next turn of such a conversation.")] = (
        0.0
    )
    save_requests: Annotated[Path | None, option(WORKLOAD, "Write the exact requests to this file (JSON lines).")] = (
        None
    )
    replay_requests: Annotated[Path | None, option(WORKLOAD, "Send the requests of such a file, in its order.")] = None
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    slo: Annotated[
        str | None,
        option(
            CRITERIA,
            'Objectives, e.g. "ttft_p99<500ms,tpot_p99<50ms": goodput counts by them, and a run that misses one '
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
        return self.workers or os.cpu_count() or 1
