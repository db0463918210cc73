"""Snapshot of the live page: frozen counts since the start of a run, and the making of histograms.

The conductor derives a `Snapshot` from the run's logs about once a second. How it is written for Prometheus is
left to `page`; every number here is plain and None means that it is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sidelight.rundir.columns import Ints, Texts

if TYPE_CHECKING:
    from sidelight.exporter.summary.verdict import RunVerdict
    from sidelight.loadgen.requests.slo.results import SloResult

# No bound is more than 1.1 times the one before, from 1 ms to 10 minutes: a quantile that Prometheus interpolates is at
# most 10 % off, however requests lie. Bounds on which objectives are usually stated are among them.
_DECADE = (
    1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.75, 1.9, 2.0, 2.15, 2.3, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75, 4.0, 4.3, 4.65, 5.0,
    5.5, 6.0, 6.5, 7.0, 7.5, 8.1, 8.7, 9.3,
)  # fmt: skip
_LADDER = tuple(float(f"{step}e{power}") for power in range(-3, 3) for step in _DECADE)


# fmt: off
LATENCY_BOUNDS_S = tuple(bound_s for bound_s in _LADDER if bound_s <= 600.0)
TOKEN_BOUNDS_S = (0.0001, 0.0002, 0.0005, *(bound_s for bound_s in _LADDER if bound_s <= 10.0))
# Of what dashboards show the means of: the parts of an end-to-end time.
MEAN_BOUNDS_S = (0.1, 1.0, 10.0, 60.0)
LATENESS_BOUNDS_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0,
)
# fmt: on
SAID_S = 30.0
OTHER_SIGNALS = ("logs", "metrics")  # that a receiver takes beside spans
# The counts of a receiver that are of exports (bad_spans, off_clock: spans) not used.
REFUSED = (
    "bad_spans", "off_clock", "malformed", "too_large", "turned_away", "no_memory", "unauthorized", "incomplete",
)  # fmt: skip
# In s by quantity, quantile ("0.99") and bound: estimate, or low and high, the ends of its 90 % interval.
EngineQuantiles = Mapping[tuple[str, str, str], float]


class Exemplar(NamedTuple):
    """One request of a bucket: its trace (hex), its value, and when it was observed, s Unix."""

    trace_id: str
    value_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cumulative:
    """A histogram of seconds since the start of the run.

    `bounds_s` are the finite upper bounds, strictly ascending, inclusive; `counts` has one entry a bucket (not
    cumulative over buckets) and one more for +Inf; `sum_s` is the sum of what was observed; `exemplars` has the latest
    request of a bucket, by its place, where traces are known.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]
    sum_s: float
    exemplars: Mapping[int, Exemplar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCounts:
    """Counts of the client since the start of the run; None where nothing is known yet.

    `requests` counts finished requests by status. Give every status from the first snapshot on, with 0 where none
    ended that way: Prometheus cannot see the first increase of a series that begins above zero. `scheduled` are those
    whose time has come (of an open loop), `submitted` those that were sent. `quantiles` are exact, in s, by what they
    are of and which. With --slo, `good` requests met every objective of a latency, and `slo` says how each objective
    stands, which may be some seconds old. `rates` are per second, by what is counted.
    `class_requests` and `class_quantiles` are those that ended ok, by the class that the workload gave them, where it
    has several.
    """

    requests: Mapping[str, int]
    scheduled: int | None = None
    submitted: int | None = None
    in_flight: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    ttft: Cumulative | None = None
    inter_token: Cumulative | None = None
    time_per_output_token: Cumulative | None = None
    e2e: Cumulative | None = None
    quantiles: Mapping[tuple[str, str], float] = field(default_factory=dict)
    good: int | None = None
    slo: SloResult | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    class_requests: Mapping[str, int] = field(default_factory=dict)
    class_quantiles: Mapping[tuple[str, str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorCounts:
    """The load generator's own cost and error since the start of the run. `lateness_quantiles_s` are exact.

    `cpu_seconds` maps a process ("worker-0", "scraper", "conductor") to its CPU time; `loop_delay_max_s` is the
    latest that any worker's tick came. `live_errors` counts what could not be read or counted, and is not on the page.
    """

    schedule_lateness: Cumulative | None = None
    lateness_quantiles_s: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    loop_delay_max_s: float | None = None
    live_errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Canonical quantities of a page by name. Label sets are already added up (or, for usage, their maximum).
    Quantities without a metric on the page and values that are not finite are left out.
    """

    histograms: Mapping[str, Cumulative] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCounts(PageCounts):
    """Quantities of a gateway's page; times are in s. `own_s` is the mean time that the gateway took of a request
    itself, over those that ended since the first scrape; None where none did, or the page does not tell.
    """

    gateway: str
    own_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts(PageCounts):
    """Counts of one scraped endpoint, as an engine's. Those of its `gateway` stand beside them where it is a gateway's.
    `role` is prefill or decode of an engine that shares requests with others.

    `scrapes` counts by outcome ("ok", or the kind of failure); `last_answer_s` is when the last page came, s Unix.
    `quantiles` are estimates of a period, unlike the histograms; `highest` is what each gauge was at most, by scrapes
    that a page is too seldom read for.
    """

    endpoint: str
    engine: str = ""
    version: str = ""
    role: str = ""
    gateway: GatewayCounts | None = None
    quantiles: EngineQuantiles = field(default_factory=dict)
    highest: Mapping[str, float] = field(default_factory=dict)
    scrapes: Mapping[str, int] = field(default_factory=dict)
    last_scrape_duration_s: float | None = None
    last_answer_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """Requests broken down since the start, one by one: `counts` counts them.

    `pending` requests have ended and wait for their spans, or for an estimate.

    `ttft` and `e2e` are keyed by (part, source); of one source, the sums of all parts add up to the whole. `inner` are
    what parts consist of, where that is known, with the same keys. `requests` counts by source, `quality` by how good
    a breakdown is, `gateways` by how the outermost gateway's first output is known, `missing` by why a TTFT was not
    broken down. `ttft_means_s` are by part, over all sources; None: `mean_parts` of `ttft`, which on the last page of
    a run may be above the report's, since no counter falls. `largest` has the largest part of the mean TTFT of the
    latest requests and its share, where it is certain. `engine_only` are queue and prefill of requests that are in none
    of the others, by their engines' spans.
    """

    ttft: Mapping[tuple[str, str], Cumulative]
    e2e: Mapping[tuple[str, str], Cumulative]
    inner: Mapping[tuple[str, str], Cumulative]
    requests: Mapping[str, int]
    quality: Mapping[str, int]
    gateways: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    pending: int | None = None
    ttft_means_s: Mapping[str, float] | None = None
    largest: Mapping[str, float] = field(default_factory=dict)
    engine_only: Mapping[tuple[str, str], Cumulative] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCounts:
    """Counts of a resident sidecar since its start, and the size of its windows.

    `receiver` maps the receiver's counts (`scraper.spans.log.Counts`) to those of all its lives, `restarts` of them
    ended on their own, as did `scraper_restarts` scrapers; `unwritten` scrapes could not be kept. `forward_queue` is
    what waits for the next collector by `exports`, `bytes` and `limit_bytes`, empty where nothing is forwarded. `sizes`
    is what the windows hold; `repeated` spans came again, `evicted` were too many, `probes` are of health probes.
    `whole_traces` are requests whose client and engine are in one trace, `broken_traces` others by the service at which
    it breaks and how. `errors` are our defects that cost what had just come; `cpu_s` is of the process that serves
    the page. `headroom` is by bound: the estimate, low and high; `drift` by process, part and bound, with the begin of
    changes that last. `read_to_s` is the moment, by the monotonic clock, up to which all that was logged was read.
    """

    receiver: Mapping[str, int]
    forward_queue: Mapping[str, int]
    restarts: int
    errors: int
    cpu_s: float
    sizes: Mapping[str, int]
    repeated: int
    evicted: int
    scraper_restarts: int = 0
    unwritten: int = 0
    probes: int = 0
    whole_traces: int = 0
    broken_traces: Mapping[tuple[str, str], int] = field(default_factory=dict)
    headroom: Mapping[str, float] = field(default_factory=dict)
    drift: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    drift_since_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    read_to_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything the page shows, at one moment. `about` says what is measured; `labels` are those of every series;
    `verdicts` are those of a run that has ended, by what is judged; `verdict` is the one now, as it is `said`.
    """

    version: str
    run_id: str
    phase: str
    client: ClientCounts | None = None
    generator: GeneratorCounts | None = None
    engines: tuple[EngineCounts, ...] = ()
    parts: PartCounts | None = None
    watch: WatchCounts | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    verdict: RunVerdict | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class SaidVerdict(NamedTuple):
    """Verdict on the page, and since when it stands there."""

    verdict: RunVerdict
    at_ns: int


def said(before: SaidVerdict | None, verdict: RunVerdict, at_ns: int) -> SaidVerdict:
    """Return the verdict for the page: for SAID_S the one before, of the same state and cause.

    Its sentences are values of labels, of which each new figure would make another series.
    """
    if before is None or at_ns >= before.at_ns + round(1e9 * SAID_S):
        return SaidVerdict(verdict, at_ns)
    is_same = (before.verdict.state, before.verdict.cause) == (verdict.state, verdict.cause)
    return before if is_same else SaidVerdict(verdict, at_ns)


def bucketize(values_s: NDArray[np.float64] | Sequence[float], bounds_s: Sequence[float]) -> Cumulative:
    """Count durations into buckets.

    `values_s` [n] seconds; NaN means "missing" and is left out. `bounds_s` finite, ascending, inclusive as
    Prometheus' `le`. No values give all zeros, which is what a run that has just begun has observed.
    """
    values = np.asarray(values_s, dtype=np.float64)
    values = values[~np.isnan(values)]
    buckets = np.searchsorted(np.asarray(bounds_s, dtype=np.float64), values, side="left")
    counts = np.bincount(buckets, minlength=len(bounds_s) + 1)
    return Cumulative(
        bounds_s=tuple(float(bound) for bound in bounds_s),
        counts=tuple(float(count) for count in counts),
        sum_s=float(values.sum()),
    )


def traced(values_s: NDArray[np.float64], bounds_s: Sequence[float], trace_ids: Texts, at_ns: Ints) -> Cumulative:
    """Count durations [n] as `bucketize` does, with the latest of each bucket as its exemplar.

    `trace_ids` [n] are hex, "" where there is none; `at_ns` [n] are int64 ns Unix.
    """
    known = np.flatnonzero(~np.isnan(values_s) & (trace_ids != ""))
    latest_first = known[np.argsort(at_ns[known], kind="stable")][::-1]
    buckets = np.searchsorted(np.asarray(bounds_s, dtype=np.float64), values_s[latest_first], side="left")
    places, firsts = np.unique(buckets, return_index=True)
    exemplars = {
        place: Exemplar(str(trace_ids[row]), float(values_s[row]), int(at_ns[row]) / 1e9)
        for place, row in zip(places.tolist(), latest_first[firsts].tolist(), strict=True)
    }
    return replace(bucketize(values_s, bounds_s), exemplars=exemplars)


def add(a: Cumulative, b: Cumulative) -> Cumulative:
    """Add two histograms over the same bounds. Raises ValueError where the bounds differ."""
    if a.bounds_s != b.bounds_s:
        raise ValueError(f"histograms with different bounds cannot be added: {a.bounds_s} and {b.bounds_s}")
    return Cumulative(
        bounds_s=a.bounds_s,
        counts=tuple(left + right for left, right in zip(a.counts, b.counts, strict=True)),
        sum_s=a.sum_s + b.sum_s,
        exemplars={
            place: max((some[place] for some in (a.exemplars, b.exemplars) if place in some), key=_moment)
            for place in (*a.exemplars, *b.exemplars)
        },
    )


_moment = attrgetter("at_s")


def mean_parts(histograms: Mapping[tuple[str, str], Cumulative]) -> dict[str, float]:
    """Return the mean of each part over the requests of all sources, s; of parts keyed by (part, source).

    A part that a source does not tell apart counts as nothing, so that the means add up to that of the whole; one that
    none has is left out.
    """
    totals: dict[str, float] = {}
    requests: dict[str, float] = {}
    seen: dict[str, float] = {}
    for (part, source), histogram in histograms.items():
        totals[part] = totals.get(part, 0.0) + histogram.sum_s
        known = sum(histogram.counts)
        seen[part] = seen.get(part, 0.0) + known
        requests[source] = max(requests.get(source, 0.0), known)
    count = sum(requests.values())
    return {part: total / count for part, total in totals.items() if seen[part]}
