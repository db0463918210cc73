"""Percentiles of a histogram's observations, and how far they can be known from its buckets.

`estimate` is linear inside buckets (Prometheus `promql/quantile.go`); `bracket` cannot be wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def estimate(bounds: ArrayLike, counts: ArrayLike, sums: ArrayLike, qs: ArrayLike) -> Float64:
    """Estimate quantiles from per-bucket deltas: bounds[B], counts[T, B], sums[T], qs[Q] (0 to 1) -> [Q].

    Bounds ascend and end in +inf; counts are not cumulative over buckets and may be fractional; `sums` are not used by
    this estimate. Special cases:
    - no observation, or a quantile outside 0..1: NaN;
    - a row with a negative, NaN or infinite count is left out;
    - the lowest bucket starts at 0, or, with a first bound at or below 0, holds that bound;
    - beyond the last finite bound: that bound, which is then a lower bound of the truth (`bracket` says so); with no
      finite bound, NaN.
    Never decreases in q, and always lies inside `bracket`.
    """
    del sums
    edges = np.asarray(bounds, dtype=np.float64)
    totals = _totals(counts, len(edges))
    wanted = np.atleast_1d(np.asarray(qs, dtype=np.float64))
    result = np.full(wanted.shape, np.nan)
    total = float(totals.sum())
    valid = (wanted >= 0) & (wanted <= 1)
    if not total > 0 or not valid.any():
        return result
    cumulative = np.cumsum(totals)
    ranks = wanted[valid] * total
    found = _bucket_at(cumulative, totals, ranks)
    finite = edges[np.isfinite(edges)]
    result[valid] = np.where(
        np.isfinite(edges[found]),
        _inside(edges, cumulative, totals, found, ranks),
        finite[-1] if len(finite) else np.nan,
    )
    return result


def bracket(bounds: ArrayLike, counts: ArrayLike, qs: ArrayLike) -> Float64:
    """Return the bucket edges between which each quantile of the observations must lie: [Q, 2].

    The quantile is numpy's default (between the order statistics around q(N - 1)). Beyond the last finite bound the
    upper edge is +inf. The lowest edge is 0 unless the first bound is negative: then -inf. NaN where `estimate` has no
    observation to go by.
    """
    edges = np.asarray(bounds, dtype=np.float64)
    totals = _totals(counts, len(edges))
    wanted = np.atleast_1d(np.asarray(qs, dtype=np.float64))
    result = np.full((*wanted.shape, 2), np.nan)
    total = float(totals.sum())
    valid = (wanted >= 0) & (wanted <= 1)
    if not total > 0 or not valid.any():
        return result
    cumulative = np.cumsum(totals)
    position = wanted[valid] * max(total - 1.0, 0.0)
    lower = _bucket_at(cumulative, totals, np.minimum(np.floor(position) + 1.0, total))
    upper = _bucket_at(cumulative, totals, np.minimum(np.ceil(position) + 1.0, total))
    # Linear interpolation reads rank q N, which may already be in the next bucket when counts are fractional.
    read = _bucket_at(cumulative, totals, wanted[valid] * total)
    result[valid, 0] = _lower_edges(edges)[np.minimum(lower, read)]
    result[valid, 1] = edges[np.maximum(upper, read)]
    return result


def _totals(counts: ArrayLike, buckets: int) -> Float64:
    rows = np.asarray(counts, dtype=np.float64).reshape(-1, buckets)
    sound = np.isfinite(rows).all(axis=1) & (rows >= 0).all(axis=1)
    return np.asarray(rows[sound].sum(axis=0), dtype=np.float64)


def _bucket_at(cumulative: Float64, totals: Float64, ranks: Float64) -> NDArray[np.intp]:
    """Return the occupied bucket in which each rank (0 to N) falls."""
    occupied = np.flatnonzero(totals > 0)
    found = np.searchsorted(cumulative[occupied], ranks, side="left")
    return occupied[np.minimum(found, len(occupied) - 1)]


def _lower_edges(edges: Float64) -> Float64:
    first = -np.inf if edges[0] < 0 else 0.0
    return np.concatenate(([first], edges[:-1]))


def _inside(edges: Float64, cumulative: Float64, totals: Float64, found: NDArray[np.intp], ranks: Float64) -> Float64:
    low = np.concatenate(([min(edges[0], 0.0)], edges[:-1]))[found]
    if edges[0] <= 0:
        low = np.where(found == 0, edges[0], low)
    before = cumulative[found] - totals[found]
    share = np.clip((ranks - before) / totals[found], 0.0, 1.0)
    high = np.where(np.isfinite(edges[found]), edges[found], low)
    return np.asarray(low + (high - low) * share, dtype=np.float64)
