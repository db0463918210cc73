"""Representative points for the observations of a fitted histogram, and the quantiles read off them.

A point is a value with a weight. A row with a single observation gives its value, and a point is pinned
there; the rest of a bucket is represented by a distribution with the fitted mean and variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices
from sidelight.scraper.quantiles.fit import Fit

POINTS = 24
# Segments share the buckets: together they have points enough with fewer each.
POINTS_A_SEGMENT = 8
PINNED_SHARE = 0.5
EMPIRICAL = 40
MASS_DEVIATION = 1e-6
MASS_WEIGHT = 3.0
MOST_VARIANCE = 0.95
HEAVIEST_TAIL = 0.45
# With both parameters from here on, a Beta distribution is a normal one for any purpose, and that is cheaper.
NORMAL_FROM = 50.0
# What a Beta distribution puts closer to the lower bound than this share of the bucket's width is put there: 1e-300 s
# would pretend to know something.
CLOSE = 1e-6
# Gamma distributions are not asked for less spread than this shape gives.
LARGEST_SHAPE = 1e8
# The distance of two values must be a number, too.
LARGEST = float(np.finfo(np.float64).max) / 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepresentativePoints:
    """Values that represent observations, all arrays [P].

    weight    the number of observations that a point represents
    rest      the observations of its bucket that are not pinned
    error     the standard deviation of its value's error
    """

    value: Floats
    weight: Floats
    rest: Floats
    error: Floats


@cache
def cells(most: int) -> tuple[Floats, Floats]:
    """Return the middles and sizes of the probability cells for 0 to `most` points: [most + 1, most] each.

    Cells are equal; the largest number of them is finer towards the ends.
    """
    middles, sizes = np.zeros((2, most + 1, most))
    for number in range(1, most + 1):
        edges = np.linspace(0, 1, number + 1)
        if number == most:
            edges = (1 - np.cos(np.pi * edges)) / 2
        middles[number, :number] = (edges[1:] + edges[:-1]) / 2
        sizes[number, :number] = np.diff(edges)
    return middles, sizes


def representative_points(fit: Fit, rows: slice | Indices = slice(None)) -> RepresentativePoints:
    """Return points for the observations of the given rows."""
    counts, segment, shares = fit.counts[rows], fit.segment[rows], fit.shares[rows]
    row, bucket, pinned, error = _pinned(fit, counts, segment, shares, ~np.isnan(fit.sums[rows]))
    weight, total = np.zeros((2, *fit.mean.shape))
    for number in np.unique(segment).tolist():
        part = segment == number
        weight[number], total[number] = counts[part].sum(axis=0), shares[part].sum(axis=0)
    place = (segment[row], bucket)
    np.subtract.at(weight, place, 1.0)
    np.subtract.at(total, place, pinned)
    value, size, where = _rest(fit, weight, total, place, pinned)
    rest = weight.ravel()
    at = np.concatenate((np.ravel_multi_index(place, weight.shape), where))
    spread = np.sqrt(np.maximum(fit.error, 0.0)).ravel()
    return RepresentativePoints(
        value=np.clip(np.concatenate((pinned, value)) * fit.unit, -LARGEST, LARGEST),
        weight=np.concatenate((np.ones(len(pinned)), size)),
        rest=rest[at],
        error=np.concatenate((error, spread[where])) * fit.unit,
    )


def read(points: RepresentativePoints, ranks: Floats) -> Floats:
    """Interpolate sorted points at ranks (0 to the sum of all weights): [K] -> [K]; NaN if there is none."""
    if not len(points.value):
        return np.full(ranks.shape, np.nan)
    # The rank of a point: the weights before it and half of its own.
    places = np.cumsum(points.weight) - points.weight / 2
    return np.asarray(np.interp(ranks, places, points.value), dtype=np.float64)


def union(parts: Sequence[RepresentativePoints]) -> RepresentativePoints:
    """Put points together, sorted by value; those without a value (NaN) come last."""
    order = np.argsort(np.concatenate([part.value for part in parts]), kind="stable")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in RepresentativePoints.__slots__}
    return RepresentativePoints(**{name: column[order] for name, column in columns.items()})


def _pinned(
    fit: Fit, counts: Floats, segment: Indices, shares: Floats, known: Bools
) -> tuple[Indices, Indices, Floats, Floats]:
    """Find single observations that make up most of their row's variance: row, bucket, value, deviation: [K] each."""
    row, bucket = np.nonzero((counts == 1) & known[:, None])
    variance = fit.variance[segment[row], bucket]
    whole = np.einsum("ij,ij->i", counts, fit.variance[segment])[row]
    share = np.minimum(variance / whole, 1.0)
    alone = counts.sum(axis=1)[row] == 1
    share[alone] = 1.0
    pinned = share >= PINNED_SHARE
    row, bucket, share, variance = row[pinned], bucket[pinned], share[pinned], variance[pinned]
    mean, expected = fit.mean[segment[row], bucket], shares[row, bucket]
    # Expected values lie closer together than values do: the root gives their spread back (Louis).
    value = np.where(share == 1, expected, mean + (expected - mean) / np.sqrt(share))
    return row, bucket, np.clip(value, fit.lower[bucket], fit.upper[bucket]), np.sqrt(variance * (1 - share))


def _rest(
    fit: Fit, weight: Floats, total: Floats, place: tuple[Indices, Indices], pinned: Floats
) -> tuple[Floats, Floats, Indices]:
    """Return representative points of the unpinned values: values, weights, flat index of segment and bucket.

    They are given by [S, J] weights and totals.
    """
    where = np.flatnonzero(weight.ravel() > 1e-9)
    bucket = where % len(fit.lower)
    weight, width = weight.ravel()[where], fit.width.ravel()[where]
    lower, upper = fit.lower[bucket], fit.upper[bucket]
    mean = np.clip(total.ravel()[where] / weight, lower, upper)
    closed = np.isfinite(upper - lower)
    most = np.where(closed, MOST_VARIANCE * (mean - lower) * (upper - mean), np.inf)
    variance = np.minimum(fit.variance.ravel()[where], most)
    points = max(POINTS // len(fit.mean), POINTS_A_SEGMENT)
    cell_middles, cell_sizes = cells(points)
    number = np.clip(np.rint(weight), 1, points).astype(np.intp)
    mass = ~(np.sqrt(variance) > MASS_DEVIATION * width) | (number == 1)
    heavy = mass & (weight > MASS_WEIGHT)
    number[heavy] = 3
    size = cell_sizes[number] * weight[:, None]
    size[heavy, :3] = np.stack((np.ones(heavy.sum()), weight[heavy] - 2, np.ones(heavy.sum())), axis=1)
    value = np.repeat(mean[:, None], points, axis=1)
    real = np.arange(points) < number[:, None]
    shaped = np.flatnonzero(~mass)
    which, cell = np.nonzero(real[shaped])
    which = shaped[which]
    chance = cell_middles[number[which], cell]
    value[which, cell] = _shape(chance, lower[which], upper[which], mean[which], variance[which])
    flat = np.ravel_multi_index(place, fit.mean.shape)
    often = np.flatnonzero(np.bincount(flat, minlength=1) >= EMPIRICAL)
    for index in shaped[np.isin(where[shaped], often)].tolist():
        chance = cell_middles[number[index], : number[index]]
        deviation = float(np.sqrt(variance[index]))
        value[index, : number[index]] = mean[index] + deviation * _seen(pinned[flat == where[index]], chance)
    value = np.clip(value, lower[:, None], upper[:, None])
    return value[real], size[real], np.repeat(where, number)


def _seen(pinned: Floats, chance: Floats) -> Floats:
    """Return the quantiles of a bucket's pinned values, standardised to mean 0 and variance 1."""
    values = np.interp(chance * len(pinned), np.arange(len(pinned)) + 0.5, np.sort(pinned))
    return np.asarray((values - pinned.mean()) / max(float(pinned.std()), 1e-300), dtype=np.float64)


def _shape(chance: Floats, lower: Floats, upper: Floats, mean: Floats, variance: Floats) -> Floats:
    """Return quantiles of a bucket's distribution: Beta, or Gamma or Pareto beyond the last bound; [K] each."""
    value = np.empty_like(chance)
    closed = np.isfinite(upper - lower)
    width = (upper - lower)[closed]
    share = (mean - lower)[closed] / width
    mass = share * (1 - share) * width**2 / variance[closed] - 1
    value[closed] = lower[closed] + width * _beta(share, mass, chance[closed])
    if not closed.all():
        open_ = ~closed
        value[open_] = _tail(chance[open_], lower[open_], upper[open_], mean[open_], variance[open_])
    return value


def _beta(mean: Floats, mass: Floats, chance: Floats) -> Floats:
    from scipy.special import betaincinv, ndtri  # noqa: PLC0415  150 ms, and a run without histograms needs none of it

    value = mean + ndtri(chance) * np.sqrt(mean * (1 - mean) / (mass + 1))
    skewed = np.minimum(mean, 1 - mean) * mass < NORMAL_FROM
    mean, mass = mean[skewed], mass[skewed]
    quantile = betaincinv(mean * mass, (1 - mean) * mass, chance[skewed])
    value[skewed] = np.where(quantile < CLOSE, 0.0, quantile)
    return np.asarray(value, dtype=np.float64)


def _tail(chance: Floats, lower: Floats, upper: Floats, mean: Floats, variance: Floats) -> Floats:
    """Return quantiles beyond an edge: generalised Pareto if heavier than exponential, else Gamma."""
    from scipy.special import gammaincinv  # noqa: PLC0415  as above

    above = np.isfinite(lower) | ~np.isfinite(upper) & (mean >= 0)
    edge = np.where(np.isfinite(lower), lower, np.where(np.isfinite(upper), upper, 0.0))
    excess = np.abs(mean - edge)
    chance = np.where(above, chance, 1 - chance)
    value = np.empty_like(chance)
    heavy = variance > excess**2
    shape = np.minimum((1 - excess[heavy] ** 2 / variance[heavy]) / 2, HEAVIEST_TAIL)
    value[heavy] = excess[heavy] * (1 - shape) / shape * np.expm1(-shape * np.log1p(-chance[heavy]))
    light = ~heavy
    shape = np.minimum(excess[light] ** 2 / variance[light], LARGEST_SHAPE)
    value[light] = gammaincinv(shape, chance[light]) / shape * excess[light]
    return np.where(above, edge + value, edge - value)
