"""Faults of a histogram's sum: by itself, and by the histogram's count and buckets."""

from __future__ import annotations

import numpy as np

from sidelight.rundir.columns import Floats

ROUNDING = 1e-9  # of a value: a fall within it is of several processes' values added up in another order
MOST_FALL = 0.01  # s, or tokens, of a sum: by which times of two clocks may be below 0
LARGEST = 1e305  # s: beyond it no time in ms is finite, nor are sums of several histograms
APART = 0.05  # of a count, by which two readings of it may differ: pages are written while requests end

NO_NUMBER = "is no finite number"
FALLS = "falls while its count rises"
OVERFLOWS = "is too large to add up"
OUTSIDE = "lies outside of what its buckets hold"
MISCOUNTED = "stands beside a count that is not that of its buckets"


def sum_fault(total: Floats, counts: Floats, bounds: tuple[float, ...]) -> str:
    """Return the fault of a histogram's sum (float64[T], NaN where unknown), '' for none.

    `counts` (float64[T, 1 + B]) are its count and its cumulative buckets, NaN where a page has none; both are across
    resets.
    """
    known = np.isfinite(total)
    numbers = total[known]
    with np.errstate(over="ignore"):
        if (np.diff(numbers) < -MOST_FALL - ROUNDING * np.abs(numbers[:-1])).any():
            return FALLS
    rows = np.flatnonzero(known & np.isfinite(counts).all(axis=1))
    if not bounds or bounds[-1] != np.inf or len(rows) < 2:
        return ""
    first, last = rows[0], rows[-1]
    increase = float(total[last]) - float(total[first])
    with np.errstate(over="ignore", invalid="ignore"):
        cumulative = counts[last] - counts[first]
        held = np.diff(cumulative[1:], prepend=0.0)
    if (held < -0.5).any():  # bounds that changed
        return ""
    if abs(cumulative[0] - cumulative[-1]) > 1 + APART * max(cumulative[0], cumulative[-1]):
        return MISCOUNTED
    if _can_hold(increase, np.maximum(held, 0.0), np.array(bounds)):
        return ""
    return OVERFLOWS if increase > LARGEST else OUTSIDE


def _can_hold(increase: float, counts: Floats, bounds: Floats) -> bool:
    """Return whether a sum fits the contents of the buckets; one observation may be in one of the two alone."""
    upper = bounds[counts > 0]
    lower = np.concatenate(([min(0.0, bounds[0])], bounds[:-1]))[counts > 0]
    counts = counts[counts > 0]
    with np.errstate(over="ignore", invalid="ignore"):
        least, most = float(counts @ lower) - lower.max(initial=0.0), float(counts @ upper) + upper.max(initial=0.0)
    return bool(least - MOST_FALL <= increase <= most + MOST_FALL)
