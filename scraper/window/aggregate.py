"""A canonical quantity over label sets and endpoints: counters and histograms add up, gauges combine by tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Floats
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.series.resets import amounts, restarts_of, rising_histogram
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.increase import (
    BucketCounts,
    CounterIncrease,
    GaugeSamples,
    HistogramIncrease,
    counter,
    histogram,
    nothing_counted,
)
from sidelight.scraper.window.window import ScrapeSelection

TOO_LARGE = "the values are too large to add up"
IMPOSSIBLE = "it states no value inside the window that can be"
MOST_SHARE = 1.001  # what rounding makes of a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointShare:
    """One endpoint's share of a quantity: its series, the scrapes that the window uses, and where the quantity is."""

    endpoint: EndpointSeries
    selection: ScrapeSelection
    source: CanonicalSource


def share_slices(parts: Sequence[EndpointShare]) -> bool:
    """Return whether all parts' slices are the same periods, so that they may be added."""
    first = parts[0].selection.edges_ns
    return all(np.array_equal(part.selection.edges_ns, first) for part in parts[1:])


def counters(parts: Sequence[EndpointShare]) -> CounterIncrease | Missing:
    """Add the increases of every label set of every endpoint. Missing: none of them is on a page of the window."""
    by_endpoint = [
        [counter(p.endpoint, column, p.selection) for column in p.source.columns]
        or [nothing_counted(p.endpoint, p.selection)]
        for p in parts
    ]
    increases = [
        increase for label_sets in by_endpoint for increase in label_sets if isinstance(increase, CounterIncrease)
    ]
    if not increases:
        return _first_reason(by_endpoint)
    return CounterIncrease(
        total=sum(increase.total for increase in increases),
        resets=_resets(by_endpoint),
        slices=_sum_slices([increase.slices for increase in increases], share=share_slices(parts)),
        fault=next((increase.fault for increase in increases if increase.fault), ""),
    )


def counter_rates(parts: Sequence[EndpointShare], total: CounterIncrease) -> tuple[float, Floats]:
    """Return a counter's rate per second, over the window and each slice (float64[S]).

    The counter's increase is from `counters`.

    Where scrapes of an endpoint ended early its own rate is over what they cover, and the rates add up.
    """
    if not any(part.selection.early_s for part in parts):
        selection = parts[0].selection
        return total.total / selection.rate_s, total.slices / selection.slice_s[: len(total.slices)]
    rate = 0.0
    slices: list[Floats] = []
    for part in parts:
        increase = counters([part])
        if isinstance(increase, CounterIncrease):
            rate += increase.total / part.selection.rate_s
            slices.append(increase.slices / part.selection.slice_s)
    return rate, _sum_slices(slices, share=share_slices(parts))


def histograms(parts: Sequence[EndpointShare]) -> HistogramIncrease | Missing:
    """Add the increases of every label set of every endpoint; the buckets only where all bounds agree.

    The scrape intervals of all of them stand under each other: each row is still one equation of counts and sum.
    """
    by_endpoint = [[histogram(p.endpoint, columns, p.selection) for columns in p.source.histograms] for p in parts]
    increases = [
        increase for label_sets in by_endpoint for increase in label_sets if isinstance(increase, HistogramIncrease)
    ]
    if not increases:
        return _first_reason(by_endpoint)
    share = share_slices(parts)
    return HistogramIncrease(
        count=sum(increase.count for increase in increases),
        sum=sum(increase.sum for increase in increases),
        resets=_resets(by_endpoint),
        sums=np.concatenate([increase.sums for increase in increases]),
        slice_counts=_sum_slices([increase.slice_counts for increase in increases], share=share),
        slice_sums=_sum_slices([increase.slice_sums for increase in increases], share=share),
        buckets=_sum_buckets([increase.buckets for increase in increases], share=share),
        intervals=tuple(part for increase in increases for part in increase.intervals),
        sum_fault=next((increase.sum_fault for increase in increases if increase.sum_fault), ""),
        fault=next((increase.fault for increase in increases if increase.fault), ""),
    )


def gauges(parts: Sequence[EndpointShare]) -> GaugeSamples | Missing:
    """Return label sets and endpoints combined at each tick, by the quantity's sum or maximum.

    A value that is not finite, or cannot be, is none, and so is a sum that no number can hold. A tick at which one of
    the endpoints has no value is left out: part of a sum is not the sum. Missing: no tick is left.
    """
    across = parts[0].source.quantity.across
    ticks: dict[int, list[tuple[int, float]]] = {}
    for part in parts:
        values = gauge_values(part.endpoint.values, part.source)
        taken = part.selection.inside & np.isfinite(values).any(axis=1)
        combined = np.nansum(values[taken], axis=1) if across == "sum" else np.nanmax(values[taken], axis=1)
        stamps = zip(part.endpoint.tick_ns[taken].tolist(), part.endpoint.at_ns[taken].tolist(), strict=True)
        for (tick_ns, at_ns), value in zip(stamps, combined.tolist(), strict=True):
            ticks.setdefault(tick_ns, []).append((at_ns, value))
    whole = [samples for _, samples in sorted(ticks.items()) if len(samples) == len(parts)]
    if not whole:
        if len(parts) > 1 and ticks:
            return Missing("no tick at which every endpoint answered")
        stated = any(np.isfinite(_samples(p.endpoint.values[p.selection.inside], p.source)).any() for p in parts)
        return Missing(IMPOSSIBLE if stated else "no value inside the window")
    fold = sum if across == "sum" else max
    at_ns = np.array([sum(at for at, _ in samples) // len(samples) for samples in whole], dtype=np.int64)
    folded = np.array([fold(value for _, value in samples) for samples in whole], dtype=np.float64)
    held = np.isfinite(folded)
    if not held.any():
        return Missing(TOO_LARGE)
    return GaugeSamples(at_ns=at_ns[held], values=folded[held])


def gauge_values(values: Floats, source: CanonicalSource) -> Floats:
    """Return a gauge's label sets (float64[T, K]) off a matrix, NaN where not possible; one column for a ratio of two.

    No amount is below 0, and no share over 1.
    """
    samples = _samples(values, source)
    most = MOST_SHARE if source.quantity.unit == "ratio" else np.finfo(np.float64).max
    return np.where((samples >= 0) & (samples <= most), samples, np.nan)


def impossible_values(endpoint: EndpointSeries) -> dict[str, list[float]]:
    """Return the finite but impossible values of an engine's gauges and counts, by metric."""
    refused: dict[str, list[float]] = {}
    for source in _sources(endpoint):
        if source.quantity.kind == "gauge":
            samples, possible = _samples(endpoint.values, source), gauge_values(endpoint.values, source)
        else:
            counts = [column for group in source.histograms for column in (group.count, *group.buckets) if column >= 0]
            samples = endpoint.values[:, [*source.columns, *counts]]
            possible = amounts(samples)
        refused[source.metric] = samples[np.isfinite(samples) & np.isnan(possible)].tolist()
    return {metric: values for metric, values in refused.items() if values}


def impossible_sums(endpoint: EndpointSeries) -> dict[str, str]:
    """Return the faults of the sums of an engine's histograms, by metric."""
    restarts = restarts_of(endpoint)
    faults = {
        source.metric: rising_histogram(endpoint, columns, restarts).sum_fault
        for source in _sources(endpoint)
        for columns in source.histograms
        if columns.count >= 0
    }
    return {metric: fault for metric, fault in faults.items() if fault}


def _sources(endpoint: EndpointSeries) -> list[CanonicalSource]:
    engine = detect(endpoint.series)
    sources = canonical(endpoint.series, engine.name).values() if engine else ()
    return [source for source in sources if isinstance(source, CanonicalSource)]


def _samples(values: Floats, source: CanonicalSource) -> Floats:
    samples = values[:, list(source.columns)]
    if source.over:
        whole = values[:, list(source.over)].sum(axis=1, keepdims=True)
        samples = np.divide(
            samples.sum(axis=1, keepdims=True), whole, out=np.full(whole.shape, np.nan), where=whole > 0
        )
    return np.asarray(samples)


def _sum_slices(slices: list[Floats], *, share: bool) -> Floats:
    """Add slice by slice: unknown where one series could not see it, none where the slices are other periods."""
    return np.asarray(np.sum(slices, axis=0)) if share else slices[0][:0]


def _sum_buckets(buckets: list[BucketCounts | Missing], *, share: bool) -> BucketCounts | Missing:
    known: list[BucketCounts] = []
    for histogram_buckets in buckets:
        if isinstance(histogram_buckets, Missing):
            return histogram_buckets
        known.append(histogram_buckets)
    if any(not np.array_equal(other.bounds, known[0].bounds) for other in known[1:]):
        return Missing("the bucket bounds differ between label sets or endpoints")
    return BucketCounts(
        bounds=known[0].bounds,
        le=known[0].le,
        totals=np.asarray(np.sum([summand.totals for summand in known], axis=0)),
        slices=_sum_slices([summand.slices for summand in known], share=share),
    )


def _resets(by_endpoint: Sequence[Sequence[CounterIncrease | HistogramIncrease | Missing]]) -> int:
    """Count the restarts of all endpoints: label sets of one page restart together."""
    return sum(
        max((increase.resets for increase in label_sets if not isinstance(increase, Missing)), default=0)
        for label_sets in by_endpoint
    )


def _first_reason(by_endpoint: Sequence[Sequence[object]]) -> Missing:
    reasons = (increase for label_sets in by_endpoint for increase in label_sets if isinstance(increase, Missing))
    return next(reasons, Missing("the page shows no such series"))
