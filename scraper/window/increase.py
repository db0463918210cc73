"""From cumulative values to what happened in a window: increases, rates, gauge statistics, timeslices, resets.

The window is what the client measured, [start_ns, end_ns]; scraping went on for a while after it, so that the last
increments show.
- *Totals* run from the reference (the last scrape complete at or before the start) to the last scrape there is.
- *Rates* divide by the window's own duration, never by the tail in which the last increments settled; where scrapes
  ended in the middle of the window, by the part of it that they cover.
- *Gauges* are judged by scrapes inside the window only.
- A *slice* runs from the last scrape at or before its start to the last at or before its end; what settles later is
  the last slice's.
- After a *reset* (a cumulative value fell, or the page shows that the process or the series began anew) the increase
  counts from zero: what came between the last page and the restart is lost.
- A series absent at the reference counts from zero; one seen before, and absent for a while, goes on from where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rundir.columns import Bools, Floats, Indices, Ints
from rundir.stats import Missing
from scraper.series.resets import Named, created_columns, falls, moved, restarted, unrolled
from scraper.series.table import EndpointSeries, HistogramColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A measured period on the run's clock (int64 ns Unix), both ends included."""

    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        """Return its length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which scrapes of one endpoint a window uses: rows of its matrix.

    `reference` and `last` are rows; `late` says that no scrape precedes the window, so that the first one is the
    reference. `edges_ns` (int64[S+1]) bound the slices, `rows` (int[S+1]) are the scrapes at the edges, `complete`
    (bool[S]) is false for a slice that the window's end, or the end of scraping, cut short. `per_interval`: the slices
    asked for were shorter than the page's update interval, so every slice is one scrape interval. `inside` (bool[T])
    are the scrapes within the window.

    `covered_s` is the part of the window that scrapes cover: from its start (from the reference when late) to its end
    or the last scrape, whichever came first. `early_s` is by how much scrapes ended before the window did, 0 where that
    is no more than two of their intervals. `slice_s` (float64[S]) are the seconds that each slice's increase took.
    `restarted` (bool[T]) are the rows of that function, `created` the columns of `created_columns`.
    """

    window: Window
    reference: int
    last: int
    late: bool
    edges_ns: Ints
    rows: Indices
    complete: Bools
    per_interval: bool
    inside: Bools
    covered_s: float
    early_s: float
    slice_s: Floats
    restarted: Bools
    created: Mapping[Named, int]

    @property
    def rate_s(self) -> float:
        """Return what a total over the window is divided by, for its rate."""
        return self.covered_s if self.early_s else self.window.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterIncrease:
    """A counter's increase over a window, and over each slice (float64[S]; NaN where no scrape fell into the slice)."""

    total: float
    resets: int
    slices: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Observations by bucket, *not* cumulative over buckets.

    `totals` (float64[B]) in all, `slices` (float64[S, B]) by slice.
    """

    bounds: Floats
    le: tuple[str, ...]
    totals: Floats
    slices: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """What percentiles are read from: R scrape intervals of one histogram while its bounds were the same.

    `counts` (float64[R, B]) are observations by bucket, not cumulative over buckets, `sums` (float64[R]) what they add
    up to (NaN where the page shows no sum), `slices` (int[R]) the slice of each interval. `total` is the largest
    cumulative sum, of which a difference keeps so many digits.
    """

    bounds: Floats
    counts: Floats
    sums: Floats
    slices: Indices
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramIncrease:
    """A histogram's increase over a window: R scrape intervals after the reference, S slices.

    `sum` and `sums` are NaN where the page shows no sum; slices are NaN where no scrape fell into them.
    `buckets` is a reason where the bounds changed during the run or could not be matched; `intervals` has one part for
    each set of bounds, and none where there are no buckets.
    """

    count: float
    sum: float
    resets: int
    sums: Floats
    slice_counts: Floats
    slice_sums: Floats
    buckets: Buckets | Missing
    intervals: tuple[Intervals, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSamples:
    """A gauge's finite values inside the window and when they were read (int64[n], float64[n], n > 0)."""

    at_ns: Ints
    values: Floats


def cut(endpoint: EndpointSeries, window: Window, slice_ns: int) -> Cut | Missing:
    """Choose the scrapes that a window uses and lay its slices of `slice_ns` from its start.

    The reference is the last scrape whose `response_ns` is at or before the start: one under way at that moment may
    have seen what the window counts. Missing: no usable scrape, none after the reference, or a window without duration.
    """
    stamps = endpoint.response_ns
    if window.end_ns <= window.start_ns:
        return Missing("the window has no duration")
    if not len(stamps):
        return Missing("no scrape succeeded")
    before = int(np.searchsorted(stamps, window.start_ns, side="right")) - 1
    reference = max(before, 0)
    last = len(stamps) - 1
    if last <= reference:
        return Missing(
            "no scrape after the window opened" if before >= 0 else "a single scrape: nothing to compare with"
        )
    update_ns = update_interval_ns(endpoint)
    per_interval = update_ns is not None and slice_ns < update_ns
    if per_interval:
        final = min(int(np.searchsorted(stamps, window.end_ns, side="left")), last)
        rows = np.arange(reference, max(final, reference + 1) + 1)
        edges_ns = stamps[rows]
        complete = np.ones(len(rows) - 1, dtype=np.bool_)
    else:
        edges_ns, complete = slice_edges(window, slice_ns)
        rows = np.maximum(np.searchsorted(stamps, edges_ns, side="right") - 1, reference)
    rows = rows.copy()
    rows[-1] = last
    opened_ns = max(window.start_ns, int(stamps[reference]))
    covered_s = max(0, min(window.end_ns, int(stamps[last])) - opened_ns) / 1e9
    early_ns = window.end_ns - int(stamps[last])
    early_s = early_ns / 1e9 if covered_s > 0 and early_ns > 2 * float(np.median(np.diff(stamps))) else 0.0
    slice_s = np.diff(edges_ns) / 1e9
    if early_s and not per_interval:
        # The slice in which scraping ended: from the scrape that it counts from to the last one.
        ended = int(np.searchsorted(edges_ns, stamps[last], side="left")) - 1
        slice_s[ended] = (int(stamps[last]) - max(opened_ns, int(stamps[rows[ended]]))) / 1e9
        complete = complete & (edges_ns[1:] != edges_ns[ended + 1])
    return Cut(
        window=window,
        reference=reference,
        last=last,
        late=before < 0,
        edges_ns=edges_ns,
        rows=rows,
        complete=complete,
        per_interval=per_interval,
        inside=(endpoint.at_ns >= window.start_ns) & (endpoint.at_ns <= window.end_ns),
        covered_s=covered_s,
        early_s=early_s,
        slice_s=slice_s,
        restarted=restarted(endpoint),
        created=created_columns(endpoint.series),
    )


def slice_edges(window: Window, slice_ns: int) -> tuple[Ints, Bools]:
    """Return the edges (int64[S+1]) of slices laid from the window's start, and which are whole (bool[S])."""
    starts = np.arange(window.start_ns, window.end_ns, slice_ns, dtype=np.int64)
    edges_ns = np.append(starts, np.int64(window.end_ns))
    return edges_ns, np.diff(edges_ns) == slice_ns


def update_interval_ns(endpoint: EndpointSeries) -> float | None:
    """Return the median time between pages that differ; None with fewer than two such intervals."""
    updates = endpoint.response_ns[endpoint.changed]
    return float(np.median(np.diff(updates))) if len(updates) > 2 else None


def counter(endpoint: EndpointSeries, column: int, chosen: Cut) -> CounterIncrease | Missing:
    """Return the increase of one counter over a window. Missing: it is on no page of the window."""
    values = endpoint.values[:, [column]]
    if not np.isfinite(values[chosen.reference : chosen.last + 1]).any():
        return Missing("the series is on no page of the window")
    one = endpoint.series[column]
    named = one.name.removesuffix("_total")
    rising, resets = unrolled(values, own_falls(endpoint, values, (named, one.labels), chosen))
    np.maximum.accumulate(rising, axis=0, out=rising)
    span = slice(chosen.reference + 1, chosen.last + 1)
    return CounterIncrease(
        total=float(rising[chosen.last, 0] - rising[chosen.reference, 0]),
        resets=int(resets[span].sum()),
        slices=_by_slice(rising, chosen)[:, 0],
    )


def nothing_counted(endpoint: EndpointSeries, chosen: Cut) -> CounterIncrease:
    """Return the increase of a counter that its engine has not created yet: none; NaN where no scrape could tell."""
    none = np.zeros((len(endpoint.values), 1))
    resets = int(chosen.restarted[chosen.reference + 1 : chosen.last + 1].sum())
    return CounterIncrease(total=0.0, resets=resets, slices=_by_slice(none, chosen)[:, 0])


def histogram(endpoint: EndpointSeries, columns: HistogramColumns, chosen: Cut) -> HistogramIncrease | Missing:
    """Return the increase of one histogram over a window.

    A reset is a row where the count or a bucket fell (see `falls`): all of its columns then count from zero.
    Missing: no count on any page of the window.
    """
    values = endpoint.values
    counted = columns.count if columns.count >= 0 else (columns.buckets[-1] if columns.buckets else -1)
    if counted < 0 or not np.isfinite(values[chosen.reference : chosen.last + 1, counted]).any():
        return Missing("the series is on no page of the window")
    picked = values[:, [counted, *columns.buckets]]
    fell = own_falls(endpoint, picked, (columns.family, columns.labels), chosen)
    rising = np.maximum.accumulate(unrolled(picked, fell)[0], axis=0)
    sums = rising_sum(endpoint, columns, fell)
    span = slice(chosen.reference, chosen.last + 1)
    slice_totals = _by_slice(np.column_stack((rising, sums)), chosen)
    return HistogramIncrease(
        count=float(rising[chosen.last, 0] - rising[chosen.reference, 0]),
        sum=float(sums[chosen.last] - sums[chosen.reference]),
        resets=int(fell[chosen.reference + 1 : chosen.last + 1].sum()),
        sums=np.diff(sums[span]),
        slice_counts=slice_totals[:, 0],
        slice_sums=slice_totals[:, -1],
        buckets=_buckets(picked, rising, columns, chosen),
        intervals=_intervals(picked[:, 1:], sums, fell, columns, chosen),
    )


def own_falls(endpoint: EndpointSeries, values: Floats, named: Named, chosen: Cut) -> Bools:
    """Return `falls` of columns (float64[T, K]) that restart together, by the process's start time and their own
    `_created` (found by name and labels) too.
    """
    created = chosen.created.get(named)
    own = [] if created is None else [moved(endpoint.values[:, created])]
    return falls(values, chosen.restarted, *own)


def rising_sum(endpoint: EndpointSeries, columns: HistogramColumns, fell: Bools) -> Floats:
    """Return a histogram's sum (float64[T]) across resets, what a formula takes off it already off; NaN without one."""
    if columns.sum < 0:
        return np.full(len(endpoint.values), np.nan)
    total = unrolled(endpoint.values[:, [columns.sum]], fell)[0][:, 0]
    if columns.less >= 0:
        total = total - unrolled(endpoint.values[:, [columns.less]], fell)[0][:, 0]
    return total


def _buckets(picked: Floats, rising: Floats, columns: HistogramColumns, chosen: Cut) -> Buckets | Missing:
    present = np.isfinite(picked[chosen.reference : chosen.last + 1])
    shown = present[present[:, 0], 1:]  # the pages that have the histogram at all
    if not columns.buckets:
        return Missing("the histogram has no buckets")
    if columns.bounds[-1] != np.inf:
        return Missing("the histogram has no +Inf bucket")
    if not shown.all():
        return Missing("the bucket bounds changed during the run")
    cumulative = rising[:, 1:]
    return Buckets(
        bounds=np.array(columns.bounds),
        le=columns.le,
        totals=_apart(cumulative[chosen.last] - cumulative[chosen.reference]),
        slices=_apart(_by_slice(cumulative, chosen)),
    )


def _intervals(
    buckets: Floats, sums: Floats, fell: Bools, columns: HistogramColumns, chosen: Cut
) -> tuple[Intervals, ...]:
    """Gather the scrape intervals by the bounds that their pages show, both the page before and the page itself.

    At a reset the page is the interval; intervals in which nothing was observed are left out.
    """
    at = np.arange(chosen.reference + 1, chosen.last + 1)
    known = np.isfinite(buckets)
    shown = np.asarray(known.any(axis=1))
    before = np.maximum.accumulate(np.where(shown, np.arange(len(buckets)), -1))[at - 1]  # the last page that shows it
    fresh = fell[at] | (before < 0)
    usable = at[shown[at] & (fresh | np.equal(known[at], known[before]).all(axis=1))]
    found = []
    for bounds in np.unique(known[usable].astype(np.int8), axis=0).astype(np.bool_):
        edges = np.array(columns.bounds)[bounds]
        rows = usable[np.equal(known[usable], bounds).all(axis=1)]
        if not len(edges) or edges[-1] != np.inf:
            continue
        first = fresh[rows - at[0]]
        start = np.where(first[:, None], 0.0, buckets[before[rows - at[0]]][:, bounds])
        counts = _apart(buckets[rows][:, bounds] - start)
        increase = sums[rows] - np.where(first & ~fell[rows], 0.0, sums[rows - 1])
        busy = counts.any(axis=1)
        found.append(
            Intervals(
                bounds=edges,
                counts=counts[busy],
                sums=increase[busy],
                slices=np.searchsorted(chosen.rows[1:], rows[busy], side="left"),
                total=float(np.abs(sums[rows]).max(initial=0.0)),
            )
        )
    return tuple(found)


def _apart(cumulative: Floats) -> Floats:
    """Undo the accumulation over buckets (the last axis)."""
    return np.diff(cumulative, axis=-1, prepend=0.0)


def _by_slice(rising: Floats, chosen: Cut) -> Floats:
    """Return the increase over each slice (float64[S, K]); NaN where no scrape fell into it."""
    totals = np.diff(rising[chosen.rows], axis=0)
    totals[np.diff(chosen.rows) == 0] = np.nan
    return totals


def gauge(endpoint: EndpointSeries, column: int, chosen: Cut) -> GaugeSamples | Missing:
    """Return one gauge's finite values inside the window, unweighted. Missing: there is none."""
    values = endpoint.values[:, column]
    taken = chosen.inside & np.isfinite(values)
    if not taken.any():
        inside = bool(chosen.inside.any())
        return Missing("the series is on no page inside the window" if inside else "no scrape fell inside the window")
    return GaugeSamples(at_ns=endpoint.at_ns[taken], values=values[taken])


def slice_of(at_ns: Ints, edges_ns: Ints) -> Indices:
    """Return the slice (0..S-1) of each stamp, -1 before them and S after them; the last edge is the last slice's."""
    where = np.searchsorted(edges_ns, at_ns, side="right") - 1
    where[at_ns == edges_ns[-1]] = len(edges_ns) - 2
    return where
