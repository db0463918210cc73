"""A canonical quantity over the measured window as types, by its kind: statistics, timeslices, and what is missing.

What cannot be computed is absent, and `missing` says why, by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct, UnsetType

from sidelight.rundir.fields import UNSET, Count, Reasons, StampNs, doc
from sidelight.rundir.stats import quantiles_of

MOST_SLICES = 120  # in summary.json
SLICES = Meta(
    description=f"Slices of the window, up to {MOST_SLICES}: timeslices.parquet has all. Empty where there are more, "
    "or where endpoints share none: `missing` says which.",
    extra_json_schema={"maxItems": MOST_SLICES},
)
UNIT = "unit of the quantity"
RATE = "unit of the quantity/s"


class SampleStatistics(Struct, frozen=True, kw_only=True):
    """Statistics over the window of a histogram's observations or of a gauge's scrapes.

    Percentiles of observations are estimates.
    """

    count: Annotated[int | float | UnsetType, doc("Number of observations, or of scrapes.", "observations")] = UNSET
    sum: Annotated[float | UnsetType, doc("Sum of a histogram's observations.", UNIT)] = UNSET
    mean: Annotated[float | UnsetType, doc("Arithmetic mean; of a gauge not weighted by time.", UNIT)] = UNSET
    std: Annotated[float | UnsetType, doc("Standard deviation of a gauge's samples (ddof 1).", UNIT)] = UNSET
    min: Annotated[float | UnsetType, doc("Smallest value of a gauge.", UNIT)] = UNSET
    max: Annotated[float | UnsetType, doc("Largest value of a gauge.", UNIT)] = UNSET
    p1: Annotated[float | UnsetType, doc("1st percentile.", UNIT)] = UNSET
    p5: Annotated[float | UnsetType, doc("5th percentile.", UNIT)] = UNSET
    p10: Annotated[float | UnsetType, doc("10th percentile.", UNIT)] = UNSET
    p25: Annotated[float | UnsetType, doc("25th percentile.", UNIT)] = UNSET
    p50: Annotated[float | UnsetType, doc("Median.", UNIT)] = UNSET
    p75: Annotated[float | UnsetType, doc("75th percentile.", UNIT)] = UNSET
    p90: Annotated[float | UnsetType, doc("90th percentile.", UNIT)] = UNSET
    p95: Annotated[float | UnsetType, doc("95th percentile.", UNIT)] = UNSET
    p99: Annotated[float | UnsetType, doc("99th percentile.", UNIT)] = UNSET
    p99_9: Annotated[float | UnsetType, doc("99.9th percentile.", UNIT)] = UNSET


class CounterStatistics(Struct, frozen=True, kw_only=True):
    """Increase and rate of a counter over the window."""

    total: Annotated[float | UnsetType, doc("Increase over the window.", UNIT)] = UNSET
    rate_per_s: Annotated[float | UnsetType, doc("The same over the window's duration.", RATE)] = UNSET


class Range(Struct, frozen=True, kw_only=True):
    """A range in which a percentile lies."""

    low: Annotated[float | UnsetType, doc("Lower end; absent where nothing bounds it.", UNIT)] = UNSET
    high: Annotated[float | UnsetType, doc("Upper end; absent where nothing bounds it.", UNIT)] = UNSET


PERCENTILES = quantiles_of(SampleStatistics)
Ranges = Annotated[dict[str, Range] | UnsetType, Meta(extra_json_schema={"propertyNames": {"enum": list(PERCENTILES)}})]


class Slice(Struct, frozen=True, kw_only=True):
    """One timeslice."""

    start_ns: Annotated[StampNs, doc("First moment of the slice.", "ns")]
    end_ns: Annotated[StampNs, doc("Last moment of the slice.", "ns")]
    is_complete: Annotated[
        bool | UnsetType, doc("False where the end of the window cut the slice short; absent otherwise.")
    ] = UNSET


class HistogramSlice(Slice, frozen=True, kw_only=True):
    """Observations of a histogram in a slice."""

    count: Annotated[int | float | UnsetType, doc("Number of observations.", "observations")] = UNSET
    sum: Annotated[float | UnsetType, doc("Their sum.", UNIT)] = UNSET
    mean: Annotated[float | UnsetType, doc("Sum over count.", UNIT)] = UNSET
    missing: Annotated[str | UnsetType, doc("Why a number is absent.")] = UNSET
    p50: Annotated[float | UnsetType, doc("Median, an estimate.", UNIT)] = UNSET
    p90: Annotated[float | UnsetType, doc("90th percentile, an estimate.", UNIT)] = UNSET
    p99: Annotated[float | UnsetType, doc("99th percentile, an estimate.", UNIT)] = UNSET


class GaugeSlice(Slice, frozen=True, kw_only=True):
    """A gauge at the scrapes of a slice."""

    mean: Annotated[float | UnsetType, doc("Arithmetic mean.", UNIT)] = UNSET
    min: Annotated[float | UnsetType, doc("Smallest value.", UNIT)] = UNSET
    max: Annotated[float | UnsetType, doc("Largest value.", UNIT)] = UNSET
    missing: Annotated[str | UnsetType, doc("Why the numbers are absent.")] = UNSET


class CounterSlice(Slice, frozen=True, kw_only=True):
    """Increase and rate of a counter in a slice."""

    total: Annotated[float | UnsetType, doc("Increase over the slice.", UNIT)] = UNSET
    rate_per_s: Annotated[float | UnsetType, doc("Increase per second.", RATE)] = UNSET
    missing: Annotated[str | UnsetType, doc("Why the numbers are absent.")] = UNSET


SLICE_PERCENTILES = quantiles_of(HistogramSlice)
Notes = Annotated[list[str] | UnsetType, doc("What else to know of these numbers.")]
Resets = Annotated[
    Count | UnsetType,
    doc("Number of resets, as at a restart; what was counted since the last scrape is lost.", "resets"),
]


class Quantity(Struct, frozen=True, kw_only=True):
    """A canonical quantity of an engine."""

    metric: Annotated[str, doc("The exposed metric that it is read from.")]
    type: Annotated[Literal["histogram", "gauge", "counter"], doc("Kind of that metric.")]
    unit: Annotated[str, doc("Unit of every value here, as exposed.")]
    observed: Annotated[str, doc("When the engine records a value: finish, first_token, output or step.")]


class Histogram(Quantity, frozen=True, kw_only=True):
    """A quantity that the engine observes in buckets."""

    stats: Annotated[SampleStatistics, doc("Over the window; percentiles are estimates from buckets and sums.")]
    intervals: Annotated[Ranges, doc("By percentile, the range that holds it nine times in ten.")] = UNSET
    brackets: Annotated[Ranges, doc("By percentile, the range that holds it for certain, unless a page was torn.")] = (
        UNSET
    )
    unresolved: Annotated[
        list[str] | UnsetType, doc("Percentiles whose interval is wider than the value: buckets and sums do not tell.")
    ] = UNSET
    resets: Resets = UNSET
    missing: Reasons = UNSET
    timeslices: Annotated[list[HistogramSlice], SLICES]
    notes: Notes = UNSET


class Gauge(Quantity, frozen=True, kw_only=True):
    """A quantity that is read at each scrape."""

    across: Annotated[Literal["sum", "max"], doc("How label sets and endpoints combine.")]
    stats: Annotated[SampleStatistics, doc("Over the scrapes inside the window, not weighted by time.")]
    timeslices: Annotated[list[GaugeSlice], SLICES]
    missing: Reasons = UNSET
    notes: Notes = UNSET


class Counter(Quantity, frozen=True, kw_only=True):
    """A quantity that only rises."""

    stats: Annotated[CounterStatistics, doc("Over the window.")]
    resets: Resets = UNSET
    timeslices: Annotated[list[CounterSlice], SLICES]
    missing: Reasons = UNSET
    notes: Notes = UNSET


class Quantities(Struct, frozen=True, kw_only=True):
    """All canonical quantities of a page or of a run; an absent one has its reason in `missing`."""

    queue_time: Annotated[Histogram | UnsetType, doc("Wait in the engine's queue until first scheduled.", "s")] = UNSET
    prefill_time: Annotated[Histogram | UnsetType, doc("First scheduling to first token.", "s")] = UNSET
    decode_time: Annotated[Histogram | UnsetType, doc("First to last token.", "s")] = UNSET
    inference_time: Annotated[Histogram | UnsetType, doc("Prefill and decode together.", "s")] = UNSET
    ttft: Annotated[Histogram | UnsetType, doc("Arrival at the engine to its first token.", "s")] = UNSET
    inter_token_latency: Annotated[Histogram | UnsetType, doc("Between consecutive outputs of a request.", "s")] = UNSET
    tpot_per_request: Annotated[
        Histogram | UnsetType, doc("Decode time over tokens but the first, by request.", "s")
    ] = UNSET
    e2e_latency: Annotated[Histogram | UnsetType, doc("Arrival at the engine to its last output.", "s")] = UNSET
    requests_running: Annotated[Gauge | UnsetType, doc("Requests in the running batch.", "requests")] = UNSET
    requests_waiting: Annotated[Gauge | UnsetType, doc("Requests that wait for a place in the batch.", "requests")] = (
        UNSET
    )
    kv_cache_usage: Annotated[Gauge | UnsetType, doc("Used share of the KV cache, 0 to 1.", "ratio")] = UNSET
    prompt_tokens: Annotated[Counter | UnsetType, doc("Prompt tokens processed.", "tokens")] = UNSET
    generation_tokens: Annotated[Counter | UnsetType, doc("Tokens generated.", "tokens")] = UNSET
    preemptions: Annotated[Counter | UnsetType, doc("Requests preempted for want of KV cache.", "requests")] = UNSET
    prefix_cache_queries: Annotated[
        Counter | UnsetType, doc("Prompt tokens looked up in the prefix cache.", "tokens")
    ] = UNSET
    prefix_cache_hits: Annotated[Counter | UnsetType, doc("Prompt tokens found in the prefix cache.", "tokens")] = UNSET
    draft_tokens: Annotated[Counter | UnsetType, doc("Tokens that speculative decoding proposed.", "tokens")] = UNSET
    draft_tokens_accepted: Annotated[Counter | UnsetType, doc("Draft tokens that were accepted.", "tokens")] = UNSET
    requests_finished: Annotated[Counter | UnsetType, doc("Requests that ended in success.", "requests")] = UNSET
    # Of what many engines run without, or do not tell (catalogue.FEATURES).
    requests_waiting_capacity: Annotated[
        Gauge | UnsetType, doc("Requests that wait for a place in the batch, tokens or KV cache.", "requests")
    ] = UNSET
    requests_waiting_deferred: Annotated[
        Gauge | UnsetType,
        doc("Requests that wait for KV cache from elsewhere, a LoRA adapter or the like.", "requests"),
    ] = UNSET
    kv_fetch_waiting_to_start: Annotated[
        Gauge | UnsetType, doc("Requests whose KV cache is not being fetched from elsewhere yet.", "requests")
    ] = UNSET
    kv_fetch_in_progress: Annotated[
        Gauge | UnsetType, doc("Requests whose KV cache is being fetched from elsewhere.", "requests")
    ] = UNSET
    kv_fetch_completed_waiting: Annotated[
        Gauge | UnsetType, doc("Requests whose KV cache has come and that still wait.", "requests")
    ] = UNSET
    kv_transfer_time: Annotated[Histogram | UnsetType, doc("Transfers of KV cache between engines.", "s")] = UNSET
    kv_transfer_failures: Annotated[Counter | UnsetType, doc("Transfers that failed.", "transfers")] = UNSET
    prefix_cache_hits_host: Annotated[Counter | UnsetType, doc("Prompt tokens found in host memory.", "tokens")] = UNSET
    prefix_cache_hits_disk: Annotated[Counter | UnsetType, doc("Prompt tokens found on a disk.", "tokens")] = UNSET
    prefix_cache_hits_remote: Annotated[
        Counter | UnsetType, doc("Prompt tokens that came from another engine or store.", "tokens")
    ] = UNSET
    host_cache_usage: Annotated[Gauge | UnsetType, doc("Used share of the KV cache in host memory.", "ratio")] = UNSET
    drafts: Annotated[Counter | UnsetType, doc("Drafts of speculative decoding that were verified.", "drafts")] = UNSET
    draft_tokens_accepted_at_1: Annotated[Counter | UnsetType, doc("First draft tokens accepted.", "tokens")] = UNSET
    draft_tokens_accepted_at_2: Annotated[Counter | UnsetType, doc("Second draft tokens accepted.", "tokens")] = UNSET
    draft_tokens_accepted_at_3: Annotated[Counter | UnsetType, doc("Third draft tokens accepted.", "tokens")] = UNSET
    draft_tokens_accepted_at_4: Annotated[Counter | UnsetType, doc("Fourth draft tokens accepted.", "tokens")] = UNSET
    acceptance_length: Annotated[
        Gauge | UnsetType, doc("Tokens of a verified draft, the model's own included, as the engine has it.", "tokens")
    ] = UNSET
    lora_usage: Annotated[Gauge | UnsetType, doc("Used share of the places for LoRA adapters.", "ratio")] = UNSET
    mm_cache_queries: Annotated[Counter | UnsetType, doc("Images and the like looked up in their cache.", "items")] = (
        UNSET
    )
    mm_cache_hits: Annotated[Counter | UnsetType, doc("Of those, the ones found there.", "items")] = UNSET
    admission_rejections: Annotated[
        Counter | UnsetType, doc("Requests refused for a limit of the engine's queue.", "requests")
    ] = UNSET
    scheduler_idle_time: Annotated[Counter | UnsetType, doc("Time with nothing to schedule.", "s")] = UNSET
    scheduler_exposed_time: Annotated[
        Counter | UnsetType,
        doc("Time of the scheduler outside of batches with no forward pass seen, idle or not.", "s"),
    ] = UNSET
    iteration_time: Annotated[Gauge | UnsetType, doc("Duration of the last iteration.", "s")] = UNSET
    expert_passes: Annotated[Counter | UnsetType, doc("Forward passes with a known load of experts.", "passes")] = UNSET
    expert_balance: Annotated[
        Counter | UnsetType, doc("Sum over these of the GPUs' mean load with experts over the largest.", "passes")
    ] = UNSET
    preprocess_time: Annotated[Histogram | UnsetType, doc("Chat template and tokenisation in the frontend.", "s")] = (
        UNSET
    )
    route_time: Annotated[Histogram | UnsetType, doc("Choice of a worker by the frontend.", "s")] = UNSET
    router_overhead: Annotated[Histogram | UnsetType, doc("The same by the KV-aware router alone.", "s")] = UNSET
    missing: Reasons = UNSET


class GatewayPage(Struct, frozen=True, kw_only=True):
    """Metrics of one gateway's page over the window; an absent quantity has its reason in `missing`."""

    url: Annotated[str, doc("The page that was scraped.")]
    gateway: Annotated[str, doc("The gateway, by its name in docs/reference/gateways.md.")]
    detected_by: Annotated[str, doc("The metric by which it was recognised.")]
    own_ms: Annotated[
        float | None,
        doc("Mean time of a request that is its own: `request_time` less `upstream_time`, over the requests.", "ms"),
    ]
    own_error_ms: Annotated[
        float | None,
        doc("Its standard error where the page rounds times (Envoy: to two digits); else 0.", "ms"),
    ]
    own_until: Annotated[
        Literal["first_output", "end"] | None, doc("Until when: a request's first output, or its end.")
    ]
    queue_ms: Annotated[
        float | None,
        doc(
            "Mean of `queue_time`; else what the window's requests waited, from the change of `recent_queue_time`.",
            "ms",
        ),
    ]
    queue_error_ms: Annotated[
        float | None, doc("Its standard error, from the steps of `recent_queue_time`; else 0.", "ms")
    ]
    requests: Annotated[Counter | UnsetType, doc("Requests that it answered.", "requests")] = UNSET
    request_time: Annotated[Histogram | UnsetType, doc("How long it had requests.", "s")] = UNSET
    upstream_time: Annotated[Histogram | UnsetType, doc("How long its calls of the next server took.", "s")] = UNSET
    queue_time: Annotated[Histogram | UnsetType, doc("Wait in it before its call.", "s")] = UNSET
    recent_queue_time: Annotated[Gauge | UnsetType, doc("The same, a mean over its last requests.", "s")] = UNSET
    requests_waiting: Annotated[Gauge | UnsetType, doc("Requests that wait in it.", "requests")] = UNSET
    requests_in_flight: Annotated[Gauge | UnsetType, doc("Requests that it has.", "requests")] = UNSET
    retries: Annotated[Counter | UnsetType, doc("Calls of the next server that it made again.", "requests")] = UNSET
    upstream_errors: Annotated[Counter | UnsetType, doc("Calls of the next server that failed.", "requests")] = UNSET
    missing: Reasons = UNSET


def quantities_of(page: Struct) -> Iterator[tuple[str, Histogram | Gauge | Counter]]:
    """Yield the quantities that a page, or all pages together, show: name and value."""
    for name in page.__struct_fields__:
        if isinstance(quantity := getattr(page, name), Histogram | Gauge | Counter):
            yield name, quantity
