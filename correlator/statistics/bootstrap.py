"""Resampling of autocorrelated series: the circular block bootstrap.

Politis and Romano 1992, "A circular block-resampling procedure for stationary data". What is resampled are sums over
blocks, so that any statistic made of means and covariances costs one product of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sidelight.rundir.columns import Floats, Indices

RESAMPLES = 1000
_AT_ONCE, _MOST_AT_ONCE = 100, 1 << 22  # resamples, and their rows


def block_length(values: Floats) -> int:
    """Return the block length: twice the lag at which the autocorrelation falls below 0.1, from 1 to a fifth of the
    series.

    NaN is taken for the mean.
    """
    size = len(values)
    most = max(1, size // 5)
    known = np.isfinite(values)
    if size < 2 or not known.any():
        return 1
    centred = np.where(known, values - values[known].mean(), 0.0)
    total = float(centred @ centred)
    if total == 0:
        return 1
    # Padding to twice the length keeps the ends from meeting.
    spectrum = np.fft.rfft(centred, 2 ** math.ceil(math.log2(2 * size)))
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:size] / total
    below = np.flatnonzero(correlation < 0.1)
    return min(most, 2 * int(below[0]) if len(below) else most)


def block_count(size: int, block: int) -> int:
    """Return the number of whole blocks; below 10 an interval made from them is a guess."""
    return size // block


def resampled_sums(columns: Floats, block: int, *, resamples: int = RESAMPLES, seed: int = 1) -> Floats:
    """Return the column sums [R, M] of block resamples of columns[N, M]; deterministic.

    Blocks may wrap round. A resample holds as many blocks as cover N rows.
    """
    size = len(columns)
    sums = _block_sums(columns, block)
    draws = math.ceil(size / block)
    few = draws * columns.shape[1] <= 2 * size  # then picking rows costs less than counting how often each is drawn
    random = np.random.default_rng(np.random.SeedSequence(seed))
    parts = []
    at_once = max(1, min(_AT_ONCE, _MOST_AT_ONCE // max(size, 1)))
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        starts = random.integers(size, size=(count, draws))
        if few:
            parts.append(sums[starts].sum(axis=1))
        else:
            drawn = (starts + size * np.arange(count)[:, None]).ravel()
            times = np.bincount(drawn, minlength=count * size).reshape(count, size)
            parts.append(times.astype(np.float64) @ sums)
    return np.concatenate(parts)


def resampled_rows(size: int, block: int, *, resamples: int = RESAMPLES, seed: int = 1) -> Iterator[Indices]:
    """Give the rows [N] of each resample, for statistics that are not made of sums; deterministic, as above."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    for _ in range(resamples):
        starts = random.integers(size, size=math.ceil(size / block))
        yield ((starts[:, None] + np.arange(block)).ravel()[:size]) % size


def degrees_of_freedom(influence: Floats, block: int) -> Floats:
    """Return the degrees of freedom [M] of the spread of resamples.

    The rows of influence[N, M] add up to the statistics. k blocks have k - 1 degrees of freedom where their sums are
    normal, and down to 1 where few outweigh all others. Satterthwaite 1946, "An approximate distribution of estimates
    of variance components".
    """
    squares = _block_sums(influence, block) ** 2
    blocks = block_count(len(influence), block)
    most = np.full(influence.shape[1], max(blocks - 1.0, 1.0))
    spread = squares.var(axis=0)
    freedom: Floats = np.divide(2 * blocks * squares.mean(axis=0) ** 2, spread, out=most.copy(), where=spread > 0)
    return np.clip(freedom, 1.0, most)


def _block_sums(columns: Floats, block: int) -> Floats:
    """Return the column sums of the block that begins at each row, wrapping round."""
    size = len(columns)
    summed = np.concatenate([np.zeros((1, columns.shape[1])), np.cumsum(np.vstack([columns, columns[:block]]), axis=0)])
    return np.asarray(summed[block : block + size] - summed[:size])


def interval95(
    centre: float, resampled: Floats, blocks: int, degrees: float | None = None
) -> tuple[float, float] | None:
    """Return a 95 % interval about a statistic from its resamples [R].

    It is by Student's t with these degrees of freedom, or one for each block but one; None with fewer than two blocks.

    Of 5 to 11 blocks of an AR(1), percentiles of resampled rank correlations cover the truth in 81 to 89 % of the runs,
    these (on Fisher's z) in 91 to 95 %.
    """
    known = resampled[np.isfinite(resampled)]
    if blocks < 2 or len(known) < 2:
        return None
    from scipy.special import stdtrit  # noqa: PLC0415  150 ms, and a run without server metrics needs none of SciPy

    # The spread of k blocks about their own mean is too small by (k - 1) / k.
    sd = float(known.std()) * math.sqrt(blocks / (blocks - 1))
    half = float(stdtrit(blocks - 1 if degrees is None else degrees, 0.975)) * sd
    return centre - half, centre + half
