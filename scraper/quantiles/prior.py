"""Mean and variance inside each bucket, as the counts of the buckets alone suggest them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Bools, Floats

LEAST_VARIANCE = 0.02
SPREAD = 0.15
OPEN_SPREAD = 3.0
# Widths of nothing, which would divide by zero: a bucket from 0 to 0, an open bucket whose values are all at its edge.
NARROWEST = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketPrior:
    """A first estimate of the mean, variance and width of each bucket.

    Also of the standard deviation of the mean; all for each segment and bucket, [S, B].

    An open bucket has its mean excess as its width; it is blank where nothing tells how far it reaches.
    """

    mean: Floats
    variance: Floats
    width: Floats
    spread: Floats
    blank: Bools


def prior(lower: Floats, upper: Floats, counts: Floats, known: Floats, sums: Floats) -> BucketPrior:
    """Return a first estimate of each bucket's mean, variance and width.

    From counts[S, B] of whole segments, and known[S, B], sums[S] of their rows with a known sum.
    """
    mean, variance, width = _closed(lower, upper, counts)
    width = np.tile(width, (len(counts), 1))
    spread = SPREAD * width
    blank = np.zeros(counts.shape, dtype=np.bool_)
    for bucket in np.flatnonzero(np.isinf(upper - lower)).tolist():
        for segment in range(len(counts)):
            total = float(sums[segment])
            edge, sign = _edge(float(lower[bucket]), float(upper[bucket]), total)
            excess = _excess(upper - lower, counts[segment], bucket, edge)
            held = float(known[segment, bucket])
            if held > 0:
                others = known[segment] @ mean[segment] - held * mean[segment, bucket]
                measured = sign * ((total - float(others)) / held - edge)
                only = np.count_nonzero(counts[segment]) == 1
                if measured > 0:
                    excess = measured if only or excess <= 0 else min(max(measured, 0.1 * excess), 100 * excess)
            # Below a first bound of 0 such a bucket holds its bound, as with linear interpolation.
            blank[segment, bucket] = sign > 0 and excess <= 0 and held <= 0
            excess = max(excess, NARROWEST)
            mean[segment, bucket] = edge + sign * excess
            variance[segment, bucket] = excess * excess
            width[segment, bucket] = excess
            spread[segment, bucket] = OPEN_SPREAD * excess
    return BucketPrior(mean=mean, variance=variance, width=width, spread=spread, blank=blank)


def _closed(lower: Floats, upper: Floats, counts: Floats) -> tuple[Floats, Floats, Floats]:
    """Give each bucket a quadratic density that meets its neighbours' halfway, in the geometric mean; [S, B] each."""
    closed = np.isfinite(upper - lower)
    width = np.where(closed, np.maximum(upper - lower, NARROWEST), 1.0)
    dense = closed & (upper > lower)
    density = np.where(dense, counts / width, 0.0)
    between = np.sqrt(density[:, :-1] * density[:, 1:])
    at_lower, at_upper = np.ones((2, *counts.shape))
    np.divide(between, density[:, 1:], out=at_lower[:, 1:], where=density[:, 1:] > 0)
    np.divide(between, density[:, :-1], out=at_upper[:, :-1], where=density[:, :-1] > 0)
    at_lower, at_upper = np.clip(at_lower, 0.0, 3.0), np.clip(at_upper, 0.0, 3.0)
    edgeless = np.concatenate(([True], ~dense[:-1]))
    at_lower = np.where(edgeless, np.clip(2.0 - at_upper, 0.0, 3.0), at_lower)
    share = 0.5 + (at_upper - at_lower) / 12
    spread = np.maximum(0.3 - at_lower / 15 + at_upper / 10 - share**2, LEAST_VARIANCE)
    start = np.where(np.isfinite(lower), lower, np.where(np.isfinite(upper), upper, 0.0))
    return start + share * np.where(closed, upper - start, 0.0), spread * width**2, width


def _edge(lower: float, upper: float, total: float) -> tuple[float, float]:
    """Return the closed edge of an open bucket and its open side. If both are open, 0 and the side of the sum."""
    if math.isfinite(lower):
        return lower, 1.0
    if math.isfinite(upper):
        return upper, -1.0
    return 0.0, -1.0 if total < 0 else 1.0


def _excess(width: Floats, counts: Floats, bucket: int, edge: float) -> float:
    """Return the mean excess of the exponential tail beyond the next occupied bucket."""
    occupied = np.flatnonzero(counts > 0)
    inner = occupied[occupied < bucket][-1:] if bucket else occupied[occupied > bucket][:1]
    if len(inner) and counts[bucket] > 0 and 0 < width[inner[0]] < np.inf:
        return float(width[inner[0]]) / math.log1p(float(counts[inner[0]] / counts[bucket]))
    return abs(edge) / 2
