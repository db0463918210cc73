"""Mean and variance inside each bucket of a histogram, from the sums of its rows.

Every row of counts and its sum is one linear equation in the bucket means, and its squared error one in the bucket
variances. All segments are fitted at once, as a stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices
from sidelight.scraper.quantiles.intervals import Rows, segments
from sidelight.scraper.quantiles.prior import BucketPrior, prior

ROUNDS = 5
BOUND_ROUNDS = 8
SHARE_ROUNDS = 4
VARIANCE_PRIOR = 0.5
LEAST_DEVIATION = 1e-7
MOST_VARIANCE = 0.75
HUGE = 1e300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """One histogram, fitted: J occupied buckets, S segments, T rows, values in units of `unit`.

    lower, upper: [J]; counts: [T, J]; sums: [T], NaN where unknown; last: [T] the interval in which a row ends, out of
    `intervals`; segment: [T]; shares: [T, J] what each bucket has of a row's sum; mean, variance, width: [S, J];
    error: [S, J] variance of the error of a mean; tolerance: how far a sum may be off.
    """

    lower: Floats
    upper: Floats
    counts: Floats
    sums: Floats
    last: Indices
    segment: Indices
    shares: Floats
    mean: Floats
    variance: Floats
    width: Floats
    error: Floats
    intervals: int
    tolerance: float
    unit: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    """The rows of all segments side by side, filled up with empty ones: counts [S, L, J], sums and effect [S, L]."""

    counts: Floats
    sums: Floats
    effect: Floats


def fit_rows(rows: Rows) -> Fit:
    """Fit bucket means and variances to cleaned rows, one set a segment."""
    first = segments(rows.counts)
    sizes = np.diff(np.append(first, len(rows.counts)))
    segment = np.repeat(np.arange(len(first)), sizes)
    known = ~np.isnan(rows.sums)
    totals = np.add.reduceat(rows.counts, first) if len(rows.counts) else np.zeros((1, len(rows.upper)))
    alone = [slice(start, start + size) for start, size in zip(first.tolist(), sizes.tolist(), strict=True)]
    guess = prior(
        rows.lower,
        rows.upper,
        totals,
        known=np.array([rows.counts[part][known[part]].sum(axis=0) for part in alone]),
        sums=np.array([rows.sums[part][known[part]].sum() for part in alone]),
    )
    held = np.flatnonzero(totals.any(axis=0))
    lower, upper, counts, totals = rows.lower[held], rows.upper[held], rows.counts[:, held], totals[:, held]
    guess = BucketPrior(**{name: getattr(guess, name)[:, held] for name in BucketPrior.__slots__})
    stack = _stacked(counts, rows.sums, first, sizes)
    mean, variance, error = _regress(stack, lower, upper, totals > 0, guess)
    shares = _shares(lower, upper, counts, rows.sums, mean[segment], variance[segment])
    mean[guess.blank] = np.nan
    shares[guess.blank[segment]] = np.nan
    return Fit(
        lower=lower,
        upper=upper,
        counts=counts,
        sums=rows.sums,
        last=rows.last,
        segment=segment,
        shares=shares,
        mean=mean,
        variance=variance,
        width=guess.width,
        error=error,
        intervals=rows.intervals,
        tolerance=rows.tolerance,
        unit=rows.unit,
    )


def design_effect(counts: Floats, rows: Indices) -> Floats:
    """Return by how much dependence inside rows inflates the variance of their sums: counts[S, L, J] -> [S, L], >= 1.

    One engine step gives all running requests the same inter-token latency; their bucket counts show it (Kish).
    rows: [S] how many of the L rows a segment fills.
    """
    sizes = counts.sum(axis=2)
    total = sizes.sum(axis=1)
    pairs = (sizes * (sizes - 1)).sum(axis=1)
    share = counts.sum(axis=1) / total[:, None]
    mixed = 1 - (share**2).sum(axis=1)
    expected = (sizes * _times(counts, share)).sum(axis=1)
    squares = np.einsum("slj,slj->s", counts, counts) - 2 * expected + (sizes**2).sum(axis=1) * (1 - mixed)
    ratio = (squares - mixed * total * (1 - 1 / rows)) / (mixed * pairs)
    ratio = np.where((mixed > 1e-12) & (pairs > 0), np.minimum(np.maximum(ratio, 0.0), 1.0), 0.0)
    return np.asarray(np.maximum(1 + (sizes - 1) * ratio[:, None], 1.0), dtype=np.float64)


def _stacked(counts: Floats, sums: Floats, first: Indices, sizes: Indices) -> _Stack:
    if len(first) == 1:
        counts, sums = counts[None], sums[None]
    else:
        place = np.arange(sizes.max())
        real = place < sizes[:, None]
        index = np.where(real, first[:, None] + place, 0)
        counts, sums = counts[index] * real[..., None], np.where(real, sums[index], 0.0)
    effect = design_effect(counts, sizes)
    unknown = np.isnan(sums)
    if unknown.any():
        counts, sums = np.where(unknown[..., None], 0.0, counts), np.where(unknown, 0.0, sums)
    return _Stack(counts=counts, sums=sums, effect=effect)


def _regress(
    rows: _Stack, lower: Floats, upper: Floats, held: Bools, guess: BucketPrior
) -> tuple[Floats, Floats, Floats]:
    """Estimate bucket means from sums and variances from squared errors, in turns: [S, J] each.

    Both are regressed on counts.

    The spreads of the priors are estimated as well, from how far the closed buckets are from them (empirical Bayes).
    """
    counts, across = rows.counts, np.ascontiguousarray(rows.counts.swapaxes(1, 2))
    closed = np.isfinite(upper - lower) & (upper > lower)
    judged = held & closed
    judges = np.maximum(judged.sum(axis=1), 1)
    has_judges = np.asarray(judged.any(axis=1))
    judging = closed & has_judges[:, None]
    variance, spread = guess.variance, guess.spread
    log_guess = np.log(guess.variance)
    ratio = np.full((len(counts), 1), VARIANCE_PRIOR)
    unit, place = np.eye(counts.shape[2]), np.arange(counts.shape[2])
    floor = (LEAST_DEVIATION * guess.width) ** 2
    for _ in range(ROUNDS):
        whole = _times(counts, variance)
        inverse = np.divide(1.0, whole, out=np.zeros_like(whole), where=whole > 0)
        weight = inverse / rows.effect
        precision = 1 / spread**2
        normal = (across * weight[:, None]) @ counts + unit * precision[:, None]
        doubt = _inverse(normal)
        right = _times(across, rows.sums * weight) + guess.mean * precision
        mean = _bounded(normal, doubt, right, lower, upper)
        error = doubt[:, place, place]
        excess = (rows.sums - _times(counts, mean)) ** 2 * weight - 1
        information = (across * (inverse**2)[:, None]) @ counts * (0.5 * variance[:, :, None] * variance[:, None])
        spare = _inverse(information + unit / ratio[..., None])
        off = np.log(variance) - log_guess
        step = _times(spare, 0.5 * variance * _times(across, inverse * excess) - off / ratio)
        variance = variance * np.minimum(np.maximum(1 + step, 1e-5), 20.0)
        most = np.where(closed, MOST_VARIANCE * (mean - lower) * (upper - mean), np.inf)
        variance = np.maximum(np.minimum(variance, most), floor)
        drift = np.where(judged, ((mean - guess.mean) ** 2 + error) / guess.width**2, 0.0).sum(axis=1) / judges
        near = guess.width * np.minimum(np.maximum(np.sqrt(drift), 0.03), 0.4)[:, None]
        spread = np.where(judging, near, guess.spread)
        off = (np.log(variance) - log_guess) ** 2 + spare[:, place, place]
        drift = np.where(judged, off, 0.0).sum(axis=1) / judges
        ratio = np.where(has_judges, np.minimum(np.maximum(drift, 0.02), 25.0), VARIANCE_PRIOR)[:, None]
    lost = ~np.isfinite(mean + variance + error).all(axis=1, keepdims=True)
    return (
        np.where(lost, guess.mean, mean),
        np.where(lost, guess.variance, variance),
        np.where(lost, guess.spread**2, error),
    )


def _inverse(matrix: Floats) -> Floats:
    """Invert positive definite matrices [S, J, J]; where one has lost too many digits for it, its diagonal alone."""
    place = np.arange(matrix.shape[1])
    diagonal = matrix[:, place, place]
    # A diagonal of ones keeps bins of a microsecond beside bins of an hour in reach of one another.
    scale = 1 / np.sqrt(diagonal)
    scale = scale[:, :, None] * scale[:, None]
    try:
        inverse = np.linalg.inv(matrix * scale) * scale
    except np.linalg.LinAlgError:
        return np.asarray(np.eye(matrix.shape[1]) / diagonal[:, None], dtype=np.float64)
    return np.asarray(inverse, dtype=np.float64)


def _times(matrix: Floats, vector: Floats) -> Floats:
    return (matrix @ vector[..., None])[..., 0]


def _bounded(normal: Floats, inverse: Floats, right: Floats, lower: Floats, upper: Floats) -> Floats:
    """Minimise x'Hx/2 - g'x with x inside the buckets: solve, fix what is outside at its edge, repeat."""
    mean = _times(inverse, right)
    outside = (mean < lower) | (mean > upper)
    fixed, value = np.zeros_like(outside), np.zeros_like(mean)
    for _ in range(BOUND_ROUNDS):
        if not outside.any():
            break
        value = np.where(outside, np.minimum(np.maximum(mean, lower), upper), value)
        fixed = fixed | outside
        free = ~fixed
        left = np.where(free[:, :, None] & free[:, None], normal, np.eye(len(lower)))
        wanted = np.where(fixed, value, right - _times(normal, value))
        mean = _times(_inverse(left), wanted)
        outside = free & ((mean < lower) | (mean > upper))
    return np.minimum(np.maximum(mean, lower), upper)


def _shares(lower: Floats, upper: Floats, counts: Floats, sums: Floats, mean: Floats, variance: Floats) -> Floats:
    """Split each known sum among the buckets of its row: the expected value, and the rest in proportion to variance.

    What a bucket cannot hold goes to the others (best linear unbiased prediction, Henderson); all arguments by row.
    """
    # Finite edges keep an empty open bucket from holding 0 x infinity.
    lower, upper = np.maximum(lower, -HUGE), np.minimum(upper, HUGE)
    shares, known = counts * mean, ~np.isnan(sums)
    lone = known & (counts.sum(axis=1) == 1) & (counts.max(axis=1, initial=0.0) == 1)
    bucket = counts[lone].argmax(axis=1) if len(lower) else np.zeros(0, dtype=np.intp)
    shares[lone, bucket] = np.clip(sums[lone], lower[bucket], upper[bucket])
    rest = np.flatnonzero(known & ~lone)
    now, held, left = shares[rest], counts[rest], sums[rest]
    weight = held * variance[rest]
    for _ in range(SHARE_ROUNDS):
        whole = weight.sum(axis=1)
        ratio = np.divide(left - now.sum(axis=1), whole, out=np.zeros_like(whole), where=whole > 0)
        given = now + weight * ratio[:, None]
        now = np.minimum(np.maximum(given, held * lower), held * upper)
        shares[rest] = now
        stuck = now != given
        again = stuck.any(axis=1)
        if not again.any():
            break
        weight = np.where(stuck, 0.0, weight)[again]
        rest, now, held, left = rest[again], now[again], held[again], left[again]
    return shares
