"""The options of `sidelight run` and `sidelight doctor`: the target, the load, the workload and the criteria."""

# No postponed annotations, as in sidecar.options.fields.
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from msgspec import Meta

from sidelight.loadgen.driver import is_closed_loop
from sidelight.loadgen.plan.leaving import FORM as LEAVE_FORM
from sidelight.loadgen.plan.leaving import leaving_of
from sidelight.loadgen.plan.rates import FORM, Pace, pace_of
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.protocols.table import Endpoint
from sidelight.sidecar.options.access import AccessOptions, ListenOpen
from sidelight.sidecar.options.fields import (
    BODY,
    CRITERIA,
    DEFAULT_FORMATS,
    HEADERS,
    MAPPING,
    OBJECTIVES,
    OUTPUT,
    SECRET,
    TARGET,
    TLS_FILE,
    ConfigFile,
    Duration,
    Formats,
    JsonProgress,
    Listen,
    Metrics,
    Out,
    Pause,
    Quiet,
    Rate,
    ScrapeInterval,
    SliceDuration,
    TraceUrl,
    Verbose,
    flag,
    option,
    repeatable,
    secret_option,
    several,
    time_option,
)
from sidelight.sidecar.options.spans import SPANS, ExportOptions, OtlpListen, SpanOptions

LOAD = Group("Load", sort_key=2)
MACHINES = Group("Many machines", sort_key=2.7)
ARRIVALS = Group("Open loop", sort_key=2.5)
WORKLOAD = Group("Workload", sort_key=3)

DRAFT, AFTER = "draft", "after:"  # of --warmup, as in loadgen.requests.warmup, which takes long to import
SHORT_WARM_UP = 10  # requests
DEFAULT_RATE_PER_S = 1.0
MOST_REQUESTS = 10_000_000


def _whole(_hint: Any, tokens: Any) -> int:
    """Convert to int without rounding. Raises ValueError."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r}: must be a whole number") from None


def _rate(_hint: Any, tokens: Any) -> float | str:
    """Convert the value of --rate. Raises ValueError."""
    text = str(tokens[0].value)
    try:
        return float(text)
    except ValueError:
        pace_of(text)
        return text


def _leave(_hint: Any, tokens: Any) -> str:
    """Convert the value of --leave. Raises ValueError."""
    text = str(tokens[0].value)
    leaving_of(text, 0)
    return text


def _warmup(_hint: Any, tokens: Any) -> int | str:
    """Convert the value of --warmup: a number of requests, `draft`, or the earlier warm-up of the target. Raises
    ValueError.
    """
    if tokens[0].value == DRAFT or tokens[0].value.startswith(AFTER):
        return str(tokens[0].value)
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r}: must be a whole number or '{DRAFT}'") from None


MODEL = "Model name; several, joined by commas, each for an even share. Default: the only one that the server lists."


# No slots: RunOptions has this beside another base, which slots forbid.
@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ContactOptions(AccessOptions):
    """Options of requests to a target, and the addresses of its metrics pages."""

    url: Annotated[
        tuple[str, ...],
        several(TARGET, "Base URL, with or without /v1 (several: requests alternate between them). Required."),
    ] = ()
    model: Annotated[str | None, option(TARGET, MODEL)] = None
    endpoint: Annotated[
        Endpoint,
        option(TARGET, "Which API to load. See docs/reference/protocols.md."),
    ] = "chat"
    api_key: Annotated[
        str | None,
        secret_option(
            TARGET, "Bearer token. Preferably set the environment variable instead.", env_var="SIDELIGHT_API_KEY"
        ),
        SECRET,
    ] = None
    header: Annotated[
        tuple[str, ...],
        repeatable(
            TARGET, "Additional header of every request, 'Name: value', or @FILE with a header a line (repeatable)."
        ),
        HEADERS,
    ] = ()
    extra_body: Annotated[
        str | None,
        option(
            TARGET,
            "JSON object merged into every request body, e.g. '{\"top_k\": 1}'; null removes a field. In a text "
            "{request} stands for the request's number.",
        ),
        BODY,
    ] = None
    ca: Annotated[
        Path | None,
        option(TARGET, "Trust only certificates signed by this authority (PEM). Default: the system's authorities."),
        TLS_FILE,
    ] = None
    cert: Annotated[Path | None, option(TARGET, "Client certificate (PEM; may include the key)."), TLS_FILE] = None
    key: Annotated[Path | None, option(TARGET, "Key of the client certificate (PEM, unencrypted)."), TLS_FILE] = None
    insecure: Annotated[bool, flag(TARGET, "Disable certificate verification.")] = False
    metrics: Metrics = ()


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(ContactOptions):
    """All of `sidelight doctor`: the options of `run` for the target, its metrics pages and spans; and a gateway."""

    gateway: Annotated[
        str | None,
        option(
            TARGET,
            "Base URL of a gateway before the engine: one request is sent through it. Needs --otlp-listen; --url "
            "is then the engine, if it can be asked without the gateway.",
        ),
    ] = None
    otlp_listen: OtlpListen = None
    listen_open: ListenOpen = False
    wait: Annotated[
        Pause,
        time_option(
            SPANS,
            "How long to wait for spans. Exporters send every 5 s; one that found no receiver before may wait "
            "two minutes.",
        ),
    ] = 12.0
    verbose: Verbose = False


def tags_of(tags: Sequence[str]) -> dict[str, str]:
    """Return the labels of --tag, by name, of values that were checked."""
    return dict(tag.split("=", 1) for tag in tags)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ContactOptions, SpanOptions, ExportOptions):
    """All of `sidelight run`."""

    reuse: Annotated[bool, option(TARGET, "Keep connections open for further requests.")] = True
    request_timeout: Annotated[Duration, time_option(TARGET, "Timeout of one request.")] = 600.0
    rate: Annotated[
        Rate | Annotated[str, Meta(pattern=f"^({FORM})$")] | None,
        option(
            LOAD,
            "Open loop: requests per second, whatever the server does; 4..20 rises over the whole load. With --trace "
            "the mean to which its gaps are stretched, or as in 2x its speed. Default: 1, of a trace its own.",
            converter=_rate,
        ),
    ] = None
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        option(
            LOAD,
            "Closed loop: requests in flight; a session keeps its slot during think time. With --rate or --trace: at "
            "most that many in flight, and what is due later waits.",
            converter=_whole,
        ),
    ] = None
    requests: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_REQUESTS)] | None,
        option(LOAD, "Stop after this many requests; with sessions, after this many sessions.", converter=_whole),
    ] = None
    duration: Annotated[
        Duration | None,
        time_option(
            LOAD,
            "Stop submitting after this time, as in 30s, 5m or 1h. Default: 30s; with --requests, --trace, --prompts "
            "or --replay-requests, when all of them are sent.",
        ),
    ] = None
    warmup: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_REQUESTS)] | Annotated[str, Meta(pattern=f"^({DRAFT}|{AFTER}.+)$")],
        option(
            LOAD,
            "Requests sent and drained before the measurement. 0: cold start. draft: 100 requests or 10,000 output "
            "tokens, whichever is more, then until the TTFT of probes agrees within 10 %. after:NAME: none, because "
            "the load of that name has warmed the target up.",
            converter=_warmup,
        ),
    ] = SHORT_WARM_UP
    drain_timeout: Annotated[
        Pause, time_option(LOAD, "How long to wait for responses in flight after the last submission.")
    ] = 120.0
    deadline: Annotated[
        Duration | None,
        time_option(LOAD, "Time after which the whole run, including its preparation, is stopped as by Ctrl-C."),
    ] = None
    leave: Annotated[
        Annotated[str, Meta(pattern=rf"^{LEAVE_FORM}$")] | None,
        option(
            LOAD,
            "Clients that leave: this share of the requests, drawn by --seed, is ended by its client that long after "
            "sending, as in 5%@2s. These count as left, not as failed.",
            converter=_leave,
        ),
    ] = None
    workers: Annotated[
        Annotated[int, Meta(ge=0, le=256)],
        option(LOAD, "Load workers, one process each; 0: one per core.", converter=_whole),
    ] = 1
    ray: Annotated[
        Annotated[str, Meta(pattern=r"^(auto|[\w.-]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5})$")] | None,
        option(
            MACHINES,
            "Run the load workers on nodes of this Ray cluster: HOST:PORT of its head, or auto on one of its nodes. "
            "--workers is then the number on each node. See docs/how-to/many-machines.md.",
        ),
    ] = None
    nodes: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None,
        option(
            MACHINES, "Nodes to use. Default: all with enough processors, and the labels, if any.", converter=_whole
        ),
    ] = None
    node_label: Annotated[
        tuple[str, ...], repeatable(MACHINES, "Use only nodes with this label of Ray's, KEY=VALUE (repeatable).")
    ] = ()
    on_loss: Annotated[
        Literal["continue", "stop"],
        option(
            MACHINES,
            "Where a node is lost: go on with the others, and report the share that was not sent; or end the run.",
        ),
    ] = "continue"
    arrival: Annotated[
        Literal["poisson", "uniform", "gamma", "burst", "replay"],
        option(ARRIVALS, "Arrival process of the requests. A burst is a second at twice the rate, then one of pause."),
    ] = "poisson"
    burstiness: Annotated[
        Annotated[float, Meta(ge=1e-3, le=1e6)],
        option(
            ARRIVALS,
            "Shape of gamma-distributed gaps, as in vllm bench serve: 1 is Poisson, smaller values are burstier.",
        ),
    ] = 1.0
    trace: Annotated[
        Path | None,
        option(ARRIVALS, "Trace whose arrivals are replayed: Azure, BurstGPT, Mooncake or WEKA; CSV or JSON lines."),
    ] = None
    workload: Annotated[
        str,
        option(
            WORKLOAD,
            f"What to send: {', '.join(workloads.NAMES)}, or a YAML file. See docs/reference/workloads.md. What stands "
            "in such a file may also be given as one JSON object, in --config as a mapping. Default: the first.",
            show_default=False,
        ),
        MAPPING,
    ] = "synthetic-uniform"
    input_tokens: Annotated[
        str | None,
        option(
            WORKLOAD,
            "Length of prompts in tokens: a number, or like normal:512,64, uniform:128-1024 or choice:512,2048. See "
            "docs/reference/workloads.md. Default: the workload's lengths.",
        ),
        MAPPING,
    ] = None
    output_tokens: Annotated[
        str | None, option(WORKLOAD, "Tokens to generate, in the same forms. Default: the workload's lengths."), MAPPING
    ] = None
    dataset: Annotated[
        Path | None,
        option(WORKLOAD, "Data set for --workload conversation (ShareGPT) or code-completion (The Stack)."),
    ] = None
    redact_bodies: Annotated[
        bool,
        flag(
            WORKLOAD,
            "Keep lengths and hashes in place of the texts of prompts and replies; all results are as before. "
            "What servers say of errors, and what spans hold, stays.",
        ),
    ] = False
    prompts: Annotated[
        Path | None,
        option(
            WORKLOAD,
            "Send your own prompts, in the file's order: JSON lines, a .txt file with a prompt a line, or "
            "ShareGPT. See docs/reference/workloads.md.",
        ),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)],
        option(WORKLOAD, "The same seed sends the same requests at the same times.", converter=_whole),
    ] = 42
    tokenizer: Annotated[
        str,
        option(
            WORKLOAD,
            "Tokenizer of the workload's lengths: auto, server, cl100k_base, or the path of a tokenizer.json. "
            "Server is its /tokenize, cl100k_base the draft's reference; auto is the server's if it has one.",
        ),
    ] = "auto"
    exact_tokens: Annotated[
        bool,
        flag(
            WORKLOAD,
            "Make each prompt exactly as long as planned, chat template included, and record its tokens.",
        ),
    ] = False
    ignore_eos: Annotated[
        bool, option(WORKLOAD, "Ask the engine to generate exactly the workload's output length.")
    ] = True
    sessions: Annotated[
        bool,
        flag(
            WORKLOAD,
            "Send the later messages of a conversation in --dataset, or in ShareGPT's --prompts, as later turns, with "
            "the replies as history.",
        ),
    ] = False
    think_time: Annotated[
        Pause, time_option(WORKLOAD, "With --sessions or --prompts: time from a reply to the next turn.")
    ] = 0.0
    replay_requests: Annotated[
        Path | None,
        option(WORKLOAD, "Send the measured requests of the run in this directory again, in their order."),
    ] = None
    scrape_interval: ScrapeInterval = 0.25
    slice_duration: SliceDuration = 2.0
    slo: Annotated[str | None, option(CRITERIA, f"{OBJECTIVES}A run that misses one exits with 1.")] = None
    sut: Annotated[
        str | None,
        option(
            CRITERIA,
            "YAML file that declares the system under test, in --config a mapping. See docs/reference/compliance.md.",
        ),
        MAPPING,
    ] = None
    out: Out = None
    formats: Formats = DEFAULT_FORMATS
    trace_url: TraceUrl = None
    listen: Listen = None
    price: Annotated[
        Annotated[float, Meta(ge=1e-6, le=1e9)] | None,
        option(
            OUTPUT,
            "Price of the measured system per hour, such as of all its GPUs, in any currency: the report says what a "
            "million output tokens and a good request cost.",
        ),
    ] = None
    tag: Annotated[
        tuple[str, ...],
        repeatable(OUTPUT, "Label of every series on the live page, NAME=VALUE (repeatable), e.g. build=1234."),
    ] = ()
    quiet: Quiet = False
    json: JsonProgress = False
    verbose: Verbose = False
    config: ConfigFile = None

    @property
    def tags(self) -> dict[str, str]:
        """Return the labels of --tag, by name."""
        return tags_of(self.tag)

    @property
    def pace(self) -> Pace:
        """Return the pace of --rate."""
        return pace_of(self.rate)

    @property
    def closed_loop(self) -> bool:
        """Return whether the load is a closed loop: replies alone trigger the next request, nothing is scheduled."""
        return is_closed_loop(concurrency=self.concurrency, rate=self.rate, trace=self.trace)

    @property
    def cap(self) -> int | None:
        """Return the cap on requests in flight of a schedule. None: any number, or nothing is scheduled."""
        return None if self.closed_loop else self.concurrency

    @property
    def worker_count(self) -> int:
        return self.workers or os.cpu_count() or 1
