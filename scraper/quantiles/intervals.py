"""The scrapes of one histogram as rows: what fell into each bucket in one interval, and to what it added up.

Rows are cleaned of what no page can truly say, and cut into segments where the distribution changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sidelight.rundir.columns import Bools, Floats, Indices

JOIN_ROUNDS = 3
# Beyond this many observations counts are scaled down: their squares must stay finite.
MOST_OBSERVATIONS = 1e12
LEAST_OBSERVATION = 1e-9
# Beyond this many times the largest bound a sum is taken as unknown, for the same reason.
LARGEST_SUM = 1e100
SPLIT_DEPTH = 3
SPLIT_ROWS = 24
SPLIT_OBSERVATIONS = 50
SPLIT_CHI_SQUARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Intervals with observations, in units of `unit` (a power of two near the largest bound).

    lower, upper: [B] edges of the buckets, the lowest 0 or -inf; counts: [T, B]; sums: [T], NaN where unknown;
    last: [T] index of the last interval in a row, out of `intervals` that were given; tolerance: how far a sum may be
    off for its digits.
    """

    lower: Floats
    upper: Floats
    counts: Floats
    sums: Floats
    last: Indices
    intervals: int
    tolerance: float
    unit: float


def sound(counts: ArrayLike, buckets: int) -> tuple[Floats, Indices, float]:
    """Return the rows with finite, non-negative counts, their indices and scale: [T, B], [T].

    Absurdly many observations are scaled down, by a power of two; counts below 1e-9 are treated as zero.
    """
    rows = np.asarray(counts, dtype=np.float64)
    rows = rows.reshape(-1, buckets) if buckets else np.zeros((0, 0))
    if not rows.size:
        return np.zeros((0, buckets)), np.zeros(0, dtype=np.intp), 1.0
    valid = np.arange(len(rows))
    if not (rows.min() >= 0 and rows.max() < np.inf):
        valid = np.flatnonzero(((rows >= 0) & (rows < np.inf)).all(axis=1))
        rows = rows[valid]
    largest = float(rows.max(initial=0.0))
    scale = _power_of_two(MOST_OBSERVATIONS / largest) if largest > MOST_OBSERVATIONS else 1.0
    rows = rows if scale == 1 else rows * scale
    negligible = (rows > 0) & (rows < LEAST_OBSERVATION)
    return np.where(negligible, 0.0, rows) if negligible.any() else rows, valid, scale


def clean(bounds: ArrayLike, counts: ArrayLike, sums: ArrayLike, cumulative_sum: float | None = None) -> Rows:
    """Clean per-interval deltas: bounds[B], counts[T, B], sums[T] (anything of another length: all unknown).

    - A row with a negative, NaN or infinite count is dropped, as is one in which nothing happened.
    - The lowest bucket is open below if the first bound is negative, or the median sum is, or the first bound is 0 and
      some sum is negative. Otherwise it starts at 0, and a negative sum is unknown.
    - A row whose sum its buckets cannot hold (the page was read between an increment of the sum and of the bucket) is
      joined with the next; what stays impossible has an unknown sum.
    - `cumulative_sum`, the largest sum a page showed, tells how many digits the differences lost.
    """
    upper = np.asarray(bounds, dtype=np.float64).reshape(-1)
    rows, last, scale = sound(counts, len(upper))
    intervals = np.size(counts) // max(len(upper), 1)
    totals = np.asarray(sums, dtype=np.float64).reshape(-1)
    totals = totals[last] if len(totals) == intervals else np.full(len(rows), np.nan)
    totals = totals * scale
    unit = _unit(upper, rows, totals)
    upper, totals = upper / unit, totals / unit
    totals = np.where(np.abs(totals) <= LARGEST_SUM, totals, np.nan)
    happened = rows.any(axis=1) | (totals != 0) & ~np.isnan(totals)
    rows, totals, last = rows[happened], totals[happened], last[happened]
    lower = _lower(upper, totals)
    totals = np.where((totals < 0) & (lower[:1] == 0), np.nan, totals)
    tolerance = _tolerance(lower, upper, rows, totals, 0.0 if cumulative_sum is None else abs(cumulative_sum) / unit)
    rows, totals, last = _joined(lower, upper, rows, totals, last, tolerance)
    return Rows(
        lower=lower,
        upper=upper,
        counts=rows,
        sums=totals,
        last=last,
        intervals=intervals,
        tolerance=tolerance,
        unit=unit,
    )


def extremes(lower: Floats, upper: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return the least and the greatest sum that the counts of each row allow: [T], [T]."""
    edges = np.stack((lower, upper), axis=1)
    sums = counts @ np.where(np.isfinite(edges), edges, 0.0)
    least, greatest = sums[:, 0], sums[:, 1]
    if len(lower) and lower[0] == -np.inf:
        least[counts[:, 0] > 0] = -np.inf
    if len(upper) and upper[-1] == np.inf:
        greatest[counts[:, -1] > 0] = np.inf
    return least, greatest


def segments(counts: Floats) -> Indices:
    """Cut rows where their distribution over the buckets changes: counts[T, J] -> index of each segment's first row.

    Halves that a chi-square test of their bucket counts tells apart are looked at on their own: a load ramp moves the
    means inside the buckets, too.
    """
    running = np.vstack((np.zeros((1, counts.shape[1])), np.cumsum(counts, axis=0)))

    def cut(first: int, end: int, depth: int) -> list[int]:
        middle = (first + end) // 2
        if depth == 0 or middle - first < SPLIT_ROWS:
            return [first]
        table = np.stack((running[middle] - running[first], running[end] - running[middle]))
        table = table[:, table[0] + table[1] > 0]
        before, after = (float(size) for size in table.sum(axis=1))
        total = before + after
        if min(before, after) < SPLIT_OBSERVATIONS:
            return [first]
        # Of two rows, the squared differences of the scaled counts are the whole of it.
        apart = table[0] * (after / before) ** 0.5 - table[1] * (before / after) ** 0.5
        chi_square = float((apart**2 / table.sum(axis=0)).sum())
        if chi_square - 3 * table.shape[1] <= SPLIT_CHI_SQUARE * total:
            return [first]
        return cut(first, middle, depth - 1) + cut(middle, end, depth - 1)

    return np.array(cut(0, len(counts), SPLIT_DEPTH), dtype=np.intp)


def _unit(upper: Floats, counts: Floats, sums: Floats) -> float:
    """Return a power of two near the largest bound, else near the values' mean."""
    finite = np.abs(upper[np.isfinite(upper)])
    size = float(finite.max(initial=0.0))
    if size == 0:
        known = np.isfinite(sums) & counts.any(axis=1)
        means = np.abs(sums[known]) / counts[known].sum(axis=1)
        means = means[(means > 0) & (means < np.inf)]
        size = float(np.median(means)) if len(means) else 1.0
    return _power_of_two(size)


def _power_of_two(size: float) -> float:
    return math.ldexp(1.0, max(-1000, min(1000, math.frexp(size)[1])))


def _lower(upper: Floats, sums: Floats) -> Floats:
    if not len(upper):
        return upper
    known = sums[~np.isnan(sums)]
    negative = upper[0] < 0
    if len(known) and known.min() < 0:
        negative = negative or np.median(known) < 0 or upper[0] == 0
    return np.concatenate(([-np.inf if negative else 0.0], upper[:-1]))


def _tolerance(lower: Floats, upper: Floats, counts: Floats, sums: Floats, cumulative_sum: float) -> float:
    # Only sums that are possible to nine digits of their own have a say: an absurd one would excuse all others.
    least, greatest = extremes(lower, upper, counts)
    slack = 1e-9 * np.abs(sums)
    sizes = np.abs(sums[(least - slack <= sums) & (sums <= greatest + slack)])
    return 1e-9 * float(sizes.max(initial=0.0)) + 4e-16 * max(cumulative_sum, float(sizes.sum()))


def _joined(
    lower: Floats, upper: Floats, counts: Floats, sums: Floats, last: Indices, tolerance: float
) -> tuple[Floats, Floats, Indices]:
    torn = _torn(lower, upper, counts, sums, tolerance)
    for _ in range(JOIN_ROUNDS):
        if not torn[:-1].any():
            break
        # The next row lacks what this one has too much, and often is impossible itself: join in pairs, not in chains.
        place = np.arange(len(torn))
        behind = place - np.maximum.accumulate(np.where(torn, -1, place))
        first = np.flatnonzero(np.concatenate(([True], ~(torn & (behind % 2 == 1))[:-1])))
        counts, sums = np.add.reduceat(counts, first), np.add.reduceat(sums, first)
        last = last[np.concatenate((first[1:], [len(last)])) - 1]
        torn = _torn(lower, upper, counts, sums, tolerance)
    sums = np.where(torn, np.nan, sums)
    held = counts.any(axis=1)
    return counts[held], sums[held], last[held]


def _torn(lower: Floats, upper: Floats, counts: Floats, sums: Floats, tolerance: float) -> Bools:
    least, greatest = extremes(lower, upper, counts)
    return (sums < least - tolerance) | (sums > greatest + tolerance)
