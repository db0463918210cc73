"""Increases of counters and histograms in a window, from cumulative values; samples of gauges.

Which scrapes count, and what a slice is, is decided by `window`; where a series was reset, by `series.resets`.
A series absent at the reference counts from zero; one seen before, and absent for a while, goes on from where it was.
The increase of one that is renamed within the window is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Floats, Indices, Ints
from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import HistogramColumns
from sidelight.scraper.series.resets import Rising, RisingHistogram, rising, rising_histogram
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import ScrapeSelection

ABSENT = "the series is on no page of the window"


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterIncrease:
    """A counter's increase over a window, and over each slice (float64[S]; NaN where no scrape fell into the slice).

    With a `fault` the total is NaN, and so is the slice in which it lies.
    """

    total: float
    resets: int
    slices: Floats
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCounts:
    """Observations by bucket, *not* cumulative over buckets.

    `totals` (float64[B]) in all, `slices` (float64[S, B]) by slice.
    """

    bounds: Floats
    le: tuple[str, ...]
    totals: Floats
    slices: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramIntervals:
    """Data for percentiles: R scrape intervals of one histogram with the same bounds.

    `counts` (float64[R, B]) are observations by bucket, not cumulative over buckets, `sums` (float64[R]) what they add
    up to (NaN where the page shows no sum), `slices` (int[R]) the slice of each interval. `total` is the largest
    cumulative sum, of which a difference keeps that many digits.
    """

    bounds: Floats
    counts: Floats
    sums: Floats
    slices: Indices
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramIncrease:
    """A histogram's increase over a window: R scrape intervals after the reference, S slices.

    `sum` and `sums` are NaN where the page shows no sum, or one that cannot be (`sum_fault`); slices are NaN where no
    scrape fell into them. `buckets` is a reason where the bounds changed during the run or could not be matched;
    `intervals` has one part for each set of bounds, and none where there are no buckets. With a `fault` count and sum
    are NaN, and so is the slice in which it lies.
    """

    count: float
    sum: float
    resets: int
    sums: Floats
    slice_counts: Floats
    slice_sums: Floats
    buckets: BucketCounts | Missing
    intervals: tuple[HistogramIntervals, ...]
    sum_fault: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSamples:
    """A gauge's finite values inside the window, with their stamps (int64[n], float64[n], n > 0)."""

    at_ns: Ints
    values: Floats


def counter(endpoint: EndpointSeries, column: int, selection: ScrapeSelection) -> CounterIncrease | Missing:
    """Return the increase of one counter over a window. Missing: no page of the window has it, or one that can be."""
    shown = endpoint.values[selection.reference : selection.last + 1, column]
    shown = shown[np.isfinite(shown)]
    if not (shown >= 0).any():
        return Missing("the series is below 0, which cannot be" if len(shown) else ABSENT)
    series = rising(endpoint, column, selection.restarts)
    resets, fault = _breaks(series, selection)
    return CounterIncrease(
        total=np.nan if fault else float(series.values[selection.last] - series.values[selection.reference]),
        resets=resets,
        slices=_by_slice(series.values, selection, series.renames),
        fault=fault,
    )


def _breaks(series: Rising | RisingHistogram, selection: ScrapeSelection) -> tuple[int, str]:
    """Return a window's resets without renames, and the reason for an unknown increase or ''."""
    changes = [change for row, change in series.renames.items() if selection.reference < row <= selection.last]
    resets = int(series.resets[selection.reference + 1 : selection.last + 1].sum()) - len(changes)
    return resets, f"{changes[0]} while it counted on, so its increase is not known" if changes else ""


def nothing_counted(endpoint: EndpointSeries, selection: ScrapeSelection) -> CounterIncrease:
    """Return the increase of a counter that its engine has not created yet: none; NaN where no scrape could tell."""
    resets = int(selection.restarts.process[selection.reference + 1 : selection.last + 1].sum())
    return CounterIncrease(total=0.0, resets=resets, slices=_by_slice(np.zeros(len(endpoint.values)), selection))


def histogram(
    endpoint: EndpointSeries, columns: HistogramColumns, selection: ScrapeSelection
) -> HistogramIncrease | Missing:
    """Return the increase of one histogram over a window. Missing: no count on any page of the window."""
    counted = columns.count if columns.count >= 0 else (columns.buckets[-1] if columns.buckets else -1)
    if counted < 0 or not np.isfinite(endpoint.values[selection.reference : selection.last + 1, counted]).any():
        return Missing(ABSENT)
    series = rising_histogram(endpoint, columns, selection.restarts)
    resets, fault = _breaks(series, selection)
    span = slice(selection.reference, selection.last + 1)
    buckets = endpoint.values[:, columns.buckets]
    shown = np.isfinite(endpoint.values[span, counted])
    return HistogramIncrease(
        count=np.nan if fault else float(series.count[selection.last] - series.count[selection.reference]),
        sum=np.nan if fault else float(series.sum[selection.last] - series.sum[selection.reference]),
        resets=resets,
        sums=np.diff(series.sum[span]),
        slice_counts=_by_slice(series.count, selection, series.renames),
        slice_sums=_by_slice(series.sum, selection, series.renames),
        buckets=_buckets(buckets[span][shown], series.buckets, columns, selection),
        intervals=_intervals(buckets, series, columns, selection),
        sum_fault=series.sum_fault,
        fault=fault,
    )


def _buckets(
    pages: Floats, cumulative: Floats, columns: HistogramColumns, selection: ScrapeSelection
) -> BucketCounts | Missing:
    """Return the increase by bucket; `pages` are the buckets as shown, by the pages of the window that have them."""
    if not columns.buckets:
        return Missing("the histogram has no buckets")
    if columns.bounds[-1] != np.inf:
        return Missing("the histogram has no +Inf bucket")
    if not np.isfinite(pages).all():
        return Missing("the bucket bounds changed during the run")
    return BucketCounts(
        bounds=np.array(columns.bounds),
        le=columns.le,
        totals=_by_bucket(cumulative[selection.last] - cumulative[selection.reference]),
        slices=_by_bucket(_by_slice(cumulative, selection)),
    )


def _intervals(
    buckets: Floats, series: RisingHistogram, columns: HistogramColumns, selection: ScrapeSelection
) -> tuple[HistogramIntervals, ...]:
    """Return the scrape intervals, grouped by the bounds of their two pages.

    The bounds are those that both the page before and the page itself show.

    At a reset the page is the interval; intervals in which nothing was observed, or that end in a rename, are left out.
    """
    sums, resets = series.sum, series.resets
    at = np.arange(selection.reference + 1, selection.last + 1)
    known = np.isfinite(buckets)
    shown = np.asarray(known.any(axis=1))
    before = np.maximum.accumulate(np.where(shown, np.arange(len(buckets)), -1))[at - 1]  # the last page that shows it
    fresh = resets[at] | (before < 0)
    renamed = np.isin(at, list(series.renames))
    usable = at[shown[at] & ~renamed & (fresh | np.equal(known[at], known[before]).all(axis=1))]
    parts = []
    for bounds in np.unique(known[usable].astype(np.int8), axis=0).astype(np.bool_):
        edges = np.array(columns.bounds)[bounds]
        rows = usable[np.equal(known[usable], bounds).all(axis=1)]
        if not len(edges) or edges[-1] != np.inf:
            continue
        first = fresh[rows - at[0]]
        start = np.where(first[:, None], 0.0, buckets[before[rows - at[0]]][:, bounds])
        counts = _by_bucket(buckets[rows][:, bounds] - start)
        increase = sums[rows] - np.where(first & ~resets[rows], 0.0, sums[rows - 1])
        busy = counts.any(axis=1)
        parts.append(
            HistogramIntervals(
                bounds=edges,
                counts=counts[busy],
                sums=increase[busy],
                slices=np.searchsorted(selection.rows[1:], rows[busy], side="left"),
                total=float(np.abs(sums[rows]).max(initial=0.0)),
            )
        )
    return tuple(parts)


def _by_bucket(cumulative: Floats) -> Floats:
    """Undo the accumulation over buckets (the last axis)."""
    return np.diff(cumulative, axis=-1, prepend=0.0)


def _by_slice(rising: Floats, selection: ScrapeSelection, renames: Iterable[int] = ()) -> Floats:
    """Return the increase of values (float64[T, ...]) over each slice; NaN where no scrape or a rename fell into it."""
    totals = np.diff(rising[selection.rows], axis=0)
    totals[np.diff(selection.rows) == 0] = np.nan
    for row in renames:
        totals[(selection.rows[:-1] < row) & (row <= selection.rows[1:])] = np.nan
    return totals


def gauge(endpoint: EndpointSeries, column: int, selection: ScrapeSelection) -> GaugeSamples | Missing:
    """Return one gauge's finite values inside the window, unweighted. Missing: there is none."""
    values = endpoint.values[:, column]
    taken = selection.inside & np.isfinite(values)
    if not taken.any():
        inside = bool(selection.inside.any())
        return Missing("the series is on no page inside the window" if inside else "no scrape fell inside the window")
    return GaugeSamples(at_ns=endpoint.at_ns[taken], values=values[taken])
