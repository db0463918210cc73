"""The `correlation` object of `summary.json`: where the TTFT went by run, slice, class and URL, and what it moves with.

Missing numbers are null beside a `missing` that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, UnsetType, structs

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.exact.clock_offset import ClockOffset
from sidelight.correlator.exact.matching import Matched
from sidelight.correlator.load.reuse import PrefixReuse
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.accuracy import PartError, agreement
from sidelight.correlator.statistics.association import Association, Rho
from sidelight.correlator.statistics.queueing import KvLoads, WhileWaiting
from sidelight.correlator.statistics.server_times import ServerMeans, ServerPercentiles
from sidelight.correlator.statistics.tail import TailShares
from sidelight.exporter.summary.breakdown import (
    UNTIMED,
    Breakdown,
    Coverage,
    ErrorMs,
    Explained,
    Group,
    Quality,
    counted,
    coverage,
    group,
    json_name,
    means_of,
    quality,
    why_impossible,
    with_fields,
    without_queued_loads,
)
from sidelight.exporter.summary.gateways import GatewaySummary, gateway_summaries
from sidelight.exporter.summary.slowest import EngineWork, SlowRequest
from sidelight.exporter.summary.tail import TailAttribution, tail_attribution
from sidelight.exporter.summary.timeline import Timeline
from sidelight.loadgen.requests.metrics import stamped_ms
from sidelight.rundir import fields
from sidelight.rundir.columns import Bools, Ints, Texts, take
from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Reason, StampNs, doc
from sidelight.rundir.stats import Missing, as_many, finite, quantiles_of
from sidelight.scraper.window.quantities import MOST_SLICES

SEVERAL_CLOCKS = "several engines, each with a clock of its own"
MOST_GROUPS = 200  # classes, or URLs
OF_MOST = f"of the {MOST_GROUPS} that had the most requests"

MeanMs = Annotated[float | None, doc("Mean over the requests with a breakdown; null where it is in none.", "ms")]


@with_fields(dict.fromkeys(map(json_name, TTFT_PARTS), MeanMs), after="ttft_ms")
class BreakdownSlice(Struct, frozen=True, kw_only=True):
    """The requests that were submitted in one slice; means of the parts add up to ttft_ms."""

    start_ns: Annotated[StampNs, doc("Start of the slice.", "ns")]
    end_ns: Annotated[StampNs, doc("End of the slice.", "ns")]
    requests: Annotated[Count, doc("Requests with a first token that were submitted in it.", "requests")]
    covered: Annotated[Count, doc("Those with a breakdown.", "requests")]
    ttft_ms: Annotated[float | None, doc("Mean TTFT of those with a breakdown; of all where none has one.", "ms")]
    error_ms: ErrorMs
    coverage: Annotated[Coverage, doc("Fractions of the requests with a first token, by source.", NO_UNIT)]
    quality: Annotated[Quality, doc("How certain their parts are, by count.", "requests")]
    missing: fields.Missing = UNSET

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> float | None:
            """Return the part of that name."""


class EngineClock(Struct, frozen=True, kw_only=True):
    """An engine's clock beside the run's, by causality."""

    offset_ms: Annotated[
        float | None,
        doc(
            "What to add to the engine's stamps for the run's clock.",
            "ms",
        ),
    ]
    error_ms: Annotated[Amount | None, doc("Its largest error; of several engines the largest of all.", "ms")]
    pairs: Annotated[Count, doc("Requests that bound it.", "requests")]
    left_out: Annotated[Count, doc("Requests whose spans are inconsistent with those.", "requests")]
    reason: Annotated[str | None, doc("Why it is not known.")]


class Clock(EngineClock, frozen=True, kw_only=True):
    """The only engine's clock, or those of several together."""

    engines: Annotated[
        dict[str, EngineClock], doc("Of several engines each clock, by process and URL; empty where there is one.")
    ]


class EstimateAccuracy(Struct, frozen=True, kw_only=True):
    """Estimates from scrapes against exact times, where a run has both: the method measures itself."""

    missing: Annotated[str | UnsetType, doc("Why it is not known.")] = UNSET
    queue: Annotated[PartError | UnsetType, doc("Errors of the queue time.")] = UNSET
    prefill: Annotated[PartError | UnsetType, doc("Errors of the prefill time.")] = UNSET


class Interval(Struct, frozen=True, kw_only=True):
    """A 90 % interval."""

    low: Annotated[float | None, doc("Lower end.", "ms")]
    high: Annotated[float | None, doc("Upper end.", "ms")]


class TimePercentiles(Struct, frozen=True, kw_only=True):
    """Percentiles of one time of the server over the window; only `missing` where there are none."""

    missing: Annotated[str | UnsetType, doc("Why there are none.")] = UNSET
    p1: Annotated[float | UnsetType | None, doc("1st percentile.", "ms")] = UNSET
    p5: Annotated[float | UnsetType | None, doc("5th percentile.", "ms")] = UNSET
    p10: Annotated[float | UnsetType | None, doc("10th percentile.", "ms")] = UNSET
    p25: Annotated[float | UnsetType | None, doc("25th percentile.", "ms")] = UNSET
    p50: Annotated[float | UnsetType | None, doc("Median.", "ms")] = UNSET
    p75: Annotated[float | UnsetType | None, doc("75th percentile.", "ms")] = UNSET
    p90: Annotated[float | UnsetType | None, doc("90th percentile.", "ms")] = UNSET
    p95: Annotated[float | UnsetType | None, doc("95th percentile.", "ms")] = UNSET
    p99: Annotated[float | UnsetType | None, doc("99th percentile.", "ms")] = UNSET
    p99_9: Annotated[float | UnsetType | None, doc("99.9th percentile.", "ms")] = UNSET
    intervals: Annotated[
        dict[str, Interval] | UnsetType,
        Meta(extra_json_schema={"propertyNames": {"pattern": "^p[0-9_]+$"}}),
        doc("By percentile, its 90 % interval.", "ms"),
    ] = UNSET
    source: Annotated[
        Literal["client spans", "buckets and sums"] | UnsetType,
        doc(
            "`client spans`: times of the run's requests, within what the buckets allow; `buckets and sums`: the "
            "histogram alone, where over 5 % of the requests were others'."
        ),
    ] = UNSET
    covered_ratio: Annotated[
        Amount | UnsetType, doc("The run's requests over those that the server counted.", NO_UNIT)
    ] = UNSET


PERCENTILES = quantiles_of(TimePercentiles)


class ServerTimes(Struct, frozen=True, kw_only=True):
    """Percentiles of the server's own times, by our requests where buckets are too wide."""

    queue_ms: Annotated[TimePercentiles, doc("Wait in the engine's queue.", "ms")]
    prefill_ms: Annotated[TimePercentiles, doc("First scheduling to first token.", "ms")]


class ReceivedSpans(Struct, frozen=True, kw_only=True):
    """Counts of the span receivers."""

    exports: Annotated[Count, doc("Exports received.", "exports")]
    spans: Annotated[Count, doc("Spans in them.", "spans")]
    bad_spans: Annotated[Count, doc("Of these, not valid by OTLP and not read.", "spans")]
    malformed: Annotated[Count, doc("Exports that are not OTLP.", "exports")]
    too_large: Annotated[Count, doc("Exports beyond the size limit.", "exports")]
    turned_away: Annotated[Count, doc("Exports that the sender was asked to send again.", "exports")]
    forwarded: Annotated[Count, doc("Exports that the next collector accepted.", "exports")]
    forward_dropped: Annotated[Count, doc("Exports that it did not accept, or not in time.", "exports")]
    forward_unknown: Annotated[Count, doc("Exports that waited as a receiver died.", "exports")]
    off_clock: Annotated[Count, doc("Spans stamped by a clock far from ours, and not read.", "spans")]
    logs: Annotated[Count, doc("Exports of logs received; they are passed on, and not read.", "exports")]
    logs_dropped: Annotated[Count, doc("Of these, not passed on.", "exports")]
    metrics: Annotated[Count, doc("Exports of metrics received; they are passed on, and not read.", "exports")]
    metrics_dropped: Annotated[Count, doc("Of these, not passed on.", "exports")]
    request_spans: Annotated[Count, doc("Spans that describe a request of an engine.", "spans")]
    health_probes: Annotated[
        Count, doc("Spans of health probes that an engine served like requests: left out.", "spans")
    ]
    receiver_deaths: Annotated[Count, doc("Receivers that ended unexpectedly.", "receivers")]


class RecordsOfRequests(Struct, frozen=True, kw_only=True):
    """TensorRT-LLM's records of requests over the whole run."""

    records: Annotated[Count, doc("Records read.", "records")]
    matched: Annotated[Count, doc("Of these, matched to one of our requests.", "records")]
    unmatched_records: Annotated[Count, doc("The others.", "records")]
    ambiguous_requests: Annotated[
        Count, doc("Requests that several records fit, or whose record fits several requests.", "requests")
    ]
    unmatched_requests: Annotated[Count, doc("Requests that succeeded and that no record fits.", "requests")]
    refused: Annotated[dict[str, int], doc("Records that could not be used, by reason.", "records")]
    failed_readings: Annotated[
        dict[str, int], doc("Readings that failed, by reason; the records in them are lost.", "readings")
    ]
    clock_error_ms: Annotated[
        Amount | None, doc("Largest error of the engine's clock; null where it is not known.", "ms")
    ]
    clock_missing: Annotated[str | None, doc("Why a clock is not known; null where all are.")]


class Evidence(Struct, frozen=True, kw_only=True):
    """Quantities observed during the wait, from which the report's advice follows."""

    while_waiting: Annotated[WhileWaiting, doc("What engines showed while requests waited; of pools, the prefill's.")]
    prefill_input_tokens_rho: Annotated[
        Rho | None,
        doc(
            "Spearman's rank correlation of a request's prefill time and its input tokens; null below 10 requests.",
            NO_UNIT,
        ),
    ]
    kv_loads: Annotated[KvLoads | UnsetType, doc("What loads of KV caches took; absent without a gauge.")] = UNSET
    reuse: Annotated[PrefixReuse | UnsetType, doc("What of the prompts was found in prefix caches.")] = UNSET


class Correlation(Struct, frozen=True, kw_only=True):
    """Where the time to first token went, by client and server together."""

    missing: Annotated[str | UnsetType, doc("Why there is no breakdown; absent where there is one.")] = UNSET
    requests: Annotated[Count, doc("Requests with a first token.", "requests")]
    coverage: Annotated[Coverage, doc("Fractions of them by the source of their breakdown.", NO_UNIT)]
    quality: Annotated[Quality, doc("How certain their parts are, by count.", "requests")]
    breakdown: Annotated[Breakdown, doc("Where their TTFT and end-to-end time went.", "ms")]
    gateways: Annotated[
        list[GatewaySummary],
        doc("The gateways that requests passed, outermost first; empty where no span of one came."),
    ]
    not_ok: Annotated[
        Count, doc("Requests with a first token that did not succeed: in none of the client's statistics.", "requests")
    ]
    none_reasons: Annotated[dict[str, int], doc("Why requests have no breakdown, by count.", "requests")]
    estimated_reasons: Annotated[
        dict[str, int], doc("Why requests are estimated and not joined, or never observed, by count.", "requests")
    ]
    refused_reasons: Annotated[
        dict[str, int], doc("Why times that came of requests that succeeded are not used, by count.", "requests")
    ]
    client_requests: Annotated[
        Count, doc("Requests with a first token that succeeded in the window while servers were scraped.", "requests")
    ]
    server_requests: Annotated[Count, doc("Requests whose end the engine counted.", "requests")]
    server_over_client: Annotated[
        Amount | None, doc("server_requests over client_requests; above 1 the engine served others too.", NO_UNIT)
    ]
    comparable: Annotated[
        bool,
        doc(
            "Whether the engine finished as many requests (`server_requests`) as succeeded here (`requests` `ok` "
            "of the client), within 2 %."
        ),
    ]
    classes: Annotated[dict[str, Group], doc(f"The same by workload class, {OF_MOST}; empty where there is only one.")]
    urls: Annotated[dict[str, Group], doc(f"The same by the asked URL, {OF_MOST}; empty where there is only one.")]
    timeslices: Annotated[
        list[BreakdownSlice],
        Meta(
            description="The same in short, by the slice of submission, up to "
            f"{MOST_SLICES} (timeslices.parquet has all).",
            extra_json_schema={"maxItems": MOST_SLICES},
        ),
    ]
    timeslices_missing: Annotated[Reason | UnsetType, doc("Why there are none here; absent where there are.")] = UNSET
    timeline: Annotated[Timeline | UnsetType, doc("TTFT and the engines' load over the window.")] = UNSET
    clock: Annotated[Clock, doc("The engine's clock beside the run's, by causality.")]
    estimate_accuracy: Annotated[EstimateAccuracy, doc("Errors of the estimates, where a run has exact times too.")]
    server_percentiles: Annotated[ServerTimes, doc("Percentiles of the server's own times.", "ms")]
    spans: Annotated[ReceivedSpans | None, doc("What the receivers of spans counted; null where none listened.")]
    perf_metrics: Annotated[RecordsOfRequests | None, doc("Records of requests; null where no /perf_metrics was read.")]
    association: Annotated[
        list[Association], doc("How client measures move with quantities of the engine: Spearman's rank correlation.")
    ]
    tail_attribution: Annotated[TailAttribution, doc("Which part the TTFT, its variance and its tail are made of.")]
    slowest: Annotated[list[SlowRequest], doc("The five requests with the longest TTFT, the longest first.")]
    work: Annotated[EngineWork, doc("What the engines did while requests waited for them, by the spans of all.")]
    evidence: Annotated[Evidence, doc("What stood beside the wait, from which the report's advice follows.")]
    models: Annotated[dict[str, Group] | UnsetType, doc("As `classes`, by the model; absent of one alone.")] = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Explained):
    """Findings on n measured requests: columns [n] in their order, and facts on all of them.

    means         what the histograms' sums give for the run as a whole
    clocks        of the engines, by their names; at least one
    ok            which requests succeeded
    edges_ns      of the slices, ascending; a request belongs to the slice that it was submitted in
    percentiles   of the server's queue and prefill times
    refusal       why times that came are not used [n], "" where they are, or none came
    """

    means: ServerMeans
    ok: Bools
    submit_ns: Ints
    workload_class: Texts
    endpoint_url: Texts
    model: Texts
    edges_ns: Sequence[int]
    percentiles: Mapping[Literal["queue_ms", "prefill_ms"], ServerPercentiles | Missing]
    refusal: Texts
    spans: ReceivedSpans | None
    records: Matched | None
    associations: Sequence[Association]
    tail: TailShares | Missing
    slowest: Sequence[SlowRequest]
    work: EngineWork
    evidence: Evidence
    timeline: Timeline | UnsetType = UNSET


def correlation(of: Findings) -> Correlation:
    """Return the `correlation` object; docs/reference/metrics/correlation.md defines its names.

    Where no request has a breakdown, the histograms' means stand in, if the engine finished as many as succeeded here.
    """
    parts, means = of.parts, of.means
    timed = np.isfinite(parts.ttft_s)
    ok = int(of.ok.sum())
    comparable = means.missing is None and as_many(means.server_requests, ok, slack=0)
    whole = group(of, np.ones(len(parts), dtype=np.bool_))
    breakdown = whole.breakdown
    missing = None
    if not parts.covered.any():
        missing = _why_none(of, timed, comparable=comparable)
        if missing is None:
            why = means.proof or _commonest(of.attribution.reason[timed])
            breakdown = structs.replace(breakdown, **means_of(means, why), means_only=why)
    if of.evidence.kv_loads and of.evidence.kv_loads.are_unseen:
        breakdown = without_queued_loads(breakdown)
    return Correlation(
        missing=missing or UNSET,
        requests=whole.requests,
        coverage=whole.coverage,
        quality=whole.quality,
        breakdown=breakdown,
        gateways=gateway_summaries(parts, parts.covered),
        not_ok=int((timed & ~of.ok).sum()),
        none_reasons=counted(parts.reason[timed & (parts.source == "none")]),
        estimated_reasons=counted(parts.reason[timed & (parts.source == "histogram")]),
        refused_reasons=counted(of.refusal[of.refusal != ""]),
        client_requests=means.client_requests,
        server_requests=means.server_requests,
        server_over_client=means.ratio,
        comparable=comparable,
        classes=_groups(of, of.workload_class),
        urls=_groups(of, of.endpoint_url),
        models=_groups(of, of.model) or UNSET,
        timeslices=list(_slices(of, timed)),
        timeline=of.timeline,
        clock=_clocks(of.clocks),
        estimate_accuracy=_accuracy(of),
        server_percentiles=ServerTimes(**{name: _percentiles(times) for name, times in of.percentiles.items()}),
        spans=of.spans,
        perf_metrics=None if of.records is None else _records(of.records),
        association=list(of.associations),
        tail_attribution=tail_attribution(of.tail),
        slowest=list(of.slowest),
        work=of.work,
        evidence=of.evidence,
    )


def _groups(of: Findings, names: Texts) -> dict[str, Group]:
    several = Counter(map(str, names))
    most = sorted(name for name, _ in several.most_common(MOST_GROUPS))
    return {name: group(of, names == name) for name in most} if len(several) > 1 else {}


def _why_none(of: Findings, timed: Bools, *, comparable: bool) -> str | None:
    """Return the reason if even a breakdown of means is missing, else None."""
    if comparable and of.means.client_requests:
        return why_impossible(of.means)
    if not timed.any():
        return of.means.missing or UNTIMED
    if not (timed & of.ok).any():
        return (
            f"none of the {timed.sum()} requests that had a first token succeeded, and engines report only requests "
            "that they finished"
        )
    if of.means.missing and (refusal := of.refusal[of.refusal != ""]).size:
        return f"requests whose times are not used: {len(refusal)}, most often because {_commonest(refusal)}"
    if of.means.missing:
        return of.means.missing
    return (
        f"{_commonest(of.attribution.reason[timed])}; and the engine finished {of.means.server_requests} "
        f"requests where {of.ok.sum()} of ours succeeded, so its means are not theirs"
    )


def _commonest(reasons: Texts) -> str:
    return str(Counter(reasons.tolist()).most_common(1)[0][0])


def _slices(of: Findings, timed: Bools) -> Iterator[BreakdownSlice]:
    """Yield the mean parts of each slice's requests, by submission; the last slice includes its end."""
    if len(of.edges_ns) == 0:
        return
    edges, submit_ns = np.array(of.edges_ns, dtype=np.int64), of.submit_ns
    rows = np.flatnonzero(timed & (submit_ns >= edges[0]) & (submit_ns <= edges[-1]))
    numbers = np.minimum(np.searchsorted(edges, submit_ns[rows], side="right") - 1, len(edges) - 2)
    rows = rows[np.argsort(numbers, kind="stable")]
    bounds = np.searchsorted(np.sort(numbers), np.arange(len(edges))).tolist()
    empty = _slice(take(of.parts, rows[:0]), 0, 0)  # as most are of a long run in short ones
    for (start_ns, end_ns), (first, last) in zip(pairwise(of.edges_ns), pairwise(bounds), strict=True):
        if first == last:
            yield structs.replace(empty, start_ns=start_ns, end_ns=end_ns)
        else:
            yield _slice(take(of.parts, rows[first:last]), start_ns, end_ns)


def _slice(parts: Parts, start_ns: int, end_ns: int) -> BreakdownSlice:
    rows, covered = np.ones(len(parts), dtype=np.bool_), parts.covered
    size = int(covered.sum())
    means: dict[str, float | None] = {}
    for part in TTFT_PARTS:
        values_ms = 1e3 * parts.seconds(part)[covered]
        means[json_name(part)] = float(np.nansum(values_ms)) / size if np.isfinite(values_ms).any() else None
    shown = covered if size else rows
    return BreakdownSlice(
        start_ns=start_ns,
        end_ns=end_ns,
        requests=int(rows.sum()),
        covered=size,
        ttft_ms=float(stamped_ms(parts.ttft_s[shown]).mean()) if shown.any() else None,
        **means,
        error_ms=float(np.sqrt(((1e3 * parts.error_s[covered]) ** 2).mean())) if size else None,
        coverage=coverage(parts, rows),
        quality=quality(parts, rows),
        missing=UNTIMED if not rows.any() else UNSET if size else _commonest(parts.reason[rows]),
    )


def _clocks(clocks: Mapping[str, ClockOffset]) -> Clock:
    """Return the offset of the only engine; of several each one's, and of all together the largest error."""
    engines = {name: _clock(offset) for name, offset in sorted(clocks.items())}
    if len(engines) == 1:
        return Clock(**structs.asdict(next(iter(engines.values()))), engines={})
    return Clock(
        offset_ms=None,
        error_ms=max((clock.error_ms for clock in engines.values() if clock.error_ms is not None), default=None),
        pairs=sum(clock.pairs for clock in engines.values()),
        left_out=sum(clock.left_out for clock in engines.values()),
        reason=SEVERAL_CLOCKS,
        engines=engines,
    )


def _clock(offset: ClockOffset) -> EngineClock:
    return EngineClock(
        offset_ms=None if offset.offset_ns is None else offset.offset_ns / 1e6,
        error_ms=None if offset.error_ns is None else offset.error_ns / 1e6,
        pairs=offset.pairs,
        left_out=offset.left_out,
        reason=offset.reason or None,
    )


def _accuracy(of: Findings) -> EstimateAccuracy:
    errors = agreement(of.parts, of.attribution)
    if isinstance(errors, Missing):
        return EstimateAccuracy(missing=errors.reason)
    return EstimateAccuracy(queue=errors.get("queue", UNSET), prefill=errors.get("prefill", UNSET))


def _percentiles(times: ServerPercentiles | Missing) -> TimePercentiles:
    if isinstance(times, Missing):
        return TimePercentiles(missing=times.reason)
    values, lows, highs = ((1e3 * column).tolist() for column in (times.values_s, times.low_s, times.high_s))
    percentiles: dict[str, Any] = dict(zip(PERCENTILES, map(finite, values), strict=True))
    return TimePercentiles(
        **percentiles,
        intervals={
            name: Interval(low=finite(low), high=finite(high))
            for name, low, high in zip(PERCENTILES, lows, highs, strict=True)
        },
        source=times.source,
        covered_ratio=times.covered_ratio,
    )


def _records(matched: Matched) -> RecordsOfRequests:
    timings, ours = matched.timings, int((matched.row >= 0).sum())
    clocks = timings.clocks.values()
    errors_ns = [clock.error_ns for clock in clocks if not isinstance(clock, Missing)]
    return RecordsOfRequests(
        records=len(timings),
        matched=ours,
        unmatched_records=len(timings) - ours,
        ambiguous_requests=int(matched.ambiguous.sum()),
        unmatched_requests=int(np.sum((matched.reason != "") & ~matched.ambiguous)),
        refused=dict(timings.refused),
        failed_readings=dict(timings.failures),
        clock_error_ms=max(errors_ns) / 1e6 if errors_ns else None,
        clock_missing="; ".join(dict.fromkeys(clock.reason for clock in clocks if isinstance(clock, Missing))) or None,
    )
