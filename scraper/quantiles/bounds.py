"""Certain bounds of an order statistic, by the buckets and sums of all rows.

A row cannot hold many values near the upper edge of a bucket: its sum has only so much to spare over the lower edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Floats, Indices
from sidelight.scraper.quantiles.fit import Fit
from sidelight.scraper.quantiles.intervals import extremes

BISECTIONS = 40
# Digits lost in a division must not cost an observation.
ROUNDING = 1 + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    """One histogram seen from above (or, negated, from below): counts [J, T], and slack [T], what sums have to spare.

    held: [J] observations; beyond: [J + 1] those in a bucket or above it.
    """

    lower: Floats
    upper: Floats
    counts: Floats
    slack: Floats
    held: Floats
    beyond: Floats
    whole: bool


def order_bounds(fits: Sequence[Fit], ranks: Floats) -> tuple[Floats, Floats]:
    """Return the least and the greatest values of order statistics (rank 0 is the least): [K] -> [K], [K]."""
    total = sum(float(fit.counts.sum()) for fit in fits)
    above, below = [], []
    for fit in fits:
        lowest, highest = extremes(fit.lower, fit.upper, fit.counts)
        above.append(_side(fit, fit.lower, fit.upper, fit.counts, fit.sums - lowest))
        below.append(_side(fit, -fit.upper[::-1], -fit.lower[::-1], fit.counts[:, ::-1], highest - fit.sums))
    greatest = _greatest(above, total - ranks)
    least = -_greatest(below, np.minimum(ranks + 1, total))
    return least, np.maximum(greatest, least)


def bucket_edges(lower: Floats, upper: Floats, held: Floats, ranks: Floats) -> tuple[Floats, Floats]:
    """Return the edges between which order statistics lie, by the buckets alone: [J] x 3, [K] -> [K], [K]."""
    total = held.sum()
    least = -_reached(-lower, held, np.minimum(ranks + 1, total))
    return least, _reached(upper, held, total - ranks)


def _side(fit: Fit, lower: Floats, upper: Floats, counts: Floats, slack: Floats) -> _Side:
    across = np.ascontiguousarray(counts.T)
    held = across.sum(axis=1)
    slack = np.where(np.isnan(slack), np.inf, np.maximum(slack, 0.0) + fit.tolerance)
    return _Side(
        lower=lower * fit.unit,
        upper=upper * fit.unit,
        counts=across,
        slack=slack * fit.unit,
        held=held,
        beyond=np.append(np.cumsum(held[::-1])[::-1], 0.0),
        whole=bool((across == np.floor(across)).all()),
    )


def _greatest(sides: Sequence[_Side], needed: Floats) -> Floats:
    """Return the largest x with `needed` values possible at or above it: [K] -> [K]. Found by 40 bisections."""
    lower = np.concatenate([side.lower for side in sides])
    held = np.concatenate([side.held for side in sides])
    low = _reached(lower, held, needed)
    high = _reached(np.concatenate([side.upper for side in sides]), held, needed)
    openings = [_opening(side) for side in sides]
    reach = max((reach for reach, _ in openings), default=-np.inf)
    endless = sum((unlimited for _, unlimited in openings), 0.0) >= needed
    open_ = np.isposinf(high) & ~endless
    high[open_] = np.maximum(reach, low[open_])
    # Where nothing bounds a value from either side there is nothing to bisect.
    settled = ~np.isfinite(low) | ~np.isfinite(high)
    low, result = low[~settled], high
    high, needed = high[~settled], needed[~settled]
    high_can = _possible(sides, high) >= needed
    low = np.where(high_can, high, low)
    for _ in range(BISECTIONS):
        middle = low / 2 + high / 2
        can = _possible(sides, middle) >= needed
        low, high = np.where(can, middle, low), np.where(can, high, middle)
    result[~settled] = high
    return result


def _reached(edges: Floats, held: Floats, needed: Floats) -> Floats:
    """Return the highest edge that as many observations as needed have: [J], [J], [K] -> [K]."""
    order = np.argsort(-edges, kind="stable")
    rank = np.searchsorted(np.cumsum(held[order]), needed * (1 - 1e-12))
    return np.asarray(edges[order[np.minimum(rank, len(order) - 1)]], dtype=np.float64)


def _opening(side: _Side) -> tuple[float, float]:
    """Return the open bucket's largest possible value and its number of unbounded observations.

    The value is the largest that its rows with a known sum have room for.
    """
    if not len(side.upper) or side.upper[-1] < np.inf:
        return -np.inf, 0.0
    held, endless = side.counts[-1], np.isinf(side.slack)
    room = side.slack[(held > 0) & ~endless]
    return float(side.lower[-1] + room.max(initial=0.0)), float(held[endless].sum())


def _possible(sides: Sequence[_Side], at: Floats) -> Floats:
    """Return the number of values possible at or above each point at once: [K] -> [K]."""
    result = np.zeros_like(at)
    for side in sides:
        bucket: Indices = np.searchsorted(side.upper, at)
        inside = np.flatnonzero(bucket < len(side.upper))
        bucket, distance = bucket[inside], at[inside] - side.lower[bucket[inside]]
        room = side.slack * ROUNDING / np.maximum(distance, 0.0)[:, None]
        if side.whole:
            room = np.floor(room)
        # An unknown sum over an infinite distance is NaN: it limits nothing.
        limited = np.fmin(side.counts[bucket], room).sum(axis=1)
        part = np.where(distance > 0, limited, side.held[bucket])
        result[inside] += part + side.beyond[bucket + 1]
    return result
