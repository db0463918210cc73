"""Intervals of quantiles that suppose no distribution, of values that resemble their neighbours.

The ends are order statistics, at ranks by the binomial distribution (Clopper and Pearson; David and Nagaraja 2003,
"Order Statistics", 7.1). Requests that queue together are slow together, so that n of them say as much about a
quantile as n / tau independent ones would (Heidelberger and Lewis 1984, "Quantile estimation in dependent sequences").

tau is the largest of those of whether a value is above the quantile, of whether it is above the median, and of its
rank, by Geyer's initial positive sequence (1992, "Practical Markov chain Monte Carlo"): the few values above a high
quantile show too little of it. Of each it is not the estimate but the upper end of its one-sided 95 % interval (Sokal
1997, "Monte Carlo methods in statistical mechanics"): a short run at a high load shows too little of its own tau. A
bound that stands alone, of too few values for both ends, is by the estimate: of P90 to P99 it held in 99 %. How
often these intervals hold the truth stands in benchmarks/RESULTS.md; by the estimates of the first two it was 94 % in
all, and 76 % at 95 % load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.fields import Amount, Count, doc
from sidelight.rundir.stats import OF_VALUES

LEAST_TAIL = 20.0  # effective values beyond a quantile; with fewer, intervals cover the truth in as little as half
_ONE_SIDED_95 = 1.645
_TOO_WIDE = math.log(10.0)  # of a ratio, either way
_MOST_POINTS = 2**16  # of a series whose autocorrelation is taken
_AT_ONCE = 2**20  # values of a series in memory


# An estimate and the ends of its interval, None of one that is not known.
Ends = tuple[float, float | None, float | None]


class QuantileInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile and the interval that holds the true one; an end that the values cannot say is null."""

    estimate: Annotated[float | None, doc("The quantile, by linear interpolation; null without values.", OF_VALUES)]
    low: Annotated[
        float | None,
        doc("Lower end of its interval; null of too few values.", OF_VALUES),
    ]
    high: Annotated[
        float | None,
        doc("Upper end of its interval; null of too few values.", OF_VALUES),
    ]
    tau: Annotated[
        Amount,
        doc("How many values in a row count as one independent value, at most.", "values"),
    ]
    effective_tail: Annotated[
        Amount, doc("Independent values beyond the quantile, on its thinner side; below 20 an end is null.", "values")
    ]
    needed_n: Annotated[
        Count,
        doc("Least number of values from which on both ends are known.", "values"),
    ]

    @property
    def is_known(self) -> bool:
        """Return whether both ends are known."""
        return self.low is not None and self.high is not None


def quantile(values_in_order: npt.ArrayLike, q: float, level: float = 0.95) -> QuantileInterval:
    """Return the q-quantile of values [n], in order of arrival, and its interval.

    - With fewer than 20 effective values beyond the quantile, only the end on its thicker side is given: of a p99 a
      lower bound; of very few values neither, as of a median of less than 6.
    - No values: nothing but how many are needed. All equal: an interval without width.

    Raises ValueError for a value that is not finite, and for q or level not between 0 and 1.
    """
    return quantiles(values_in_order, [q], level)[0]


def quantiles(
    values_in_order: npt.ArrayLike, qs: Sequence[float], level: float = 0.95, *, of_itself: bool = False
) -> list[QuantileInterval]:
    """Return several quantiles as `quantile` does, sorting once.

    of_itself  take tau of whether a value is above each quantile alone: where what is beyond it is of another kind, and
               does not follow the slow changes of the others
    """
    values = np.asarray(values_in_order, np.float64).ravel()
    for q in qs:
        if not (0 < q < 1 and 0 < level < 1):
            raise ValueError(f"a quantile {q:g} at level {level:g}: both must lie between 0 and 1")
    if not np.isfinite(values).all():
        raise ValueError("values must be finite: leave out, or replace, what is missing")
    if not len(values):
        needed = [_needed(1.0, min(q, 1 - q)) for q in qs]
        return [
            QuantileInterval(estimate=None, low=None, high=None, tau=1.0, effective_tail=0.0, needed_n=count)
            for count in needed
        ]
    ascending = np.sort(values)
    of_all = [partial(np.greater_equal, _quantile(ascending, 0.5)), partial(_ranked, ascending)]
    least = np.max([np.ones(2), *(_taus(values, of) for of in of_all if not of_itself)], axis=0)
    return [_interval(values, ascending, q, level, least) for q in qs]


def _interval(values: Floats, ascending: Floats, q: float, level: float, least: Floats) -> QuantileInterval:
    tau, most = np.maximum(least, _taus(values, partial(np.greater_equal, _quantile(ascending, q)))).tolist()
    whole = of_sorted(ascending, q, most, level)
    if whole.is_known or (whole.low, whole.high) == (None, None) or q == 0.5:
        return whole
    # A lone bound holds the truth often enough by tau as it is estimated, and lies nearer to it.
    lone = of_sorted(ascending, q, tau, level)
    return msgspec.structs.replace(whole, **({"low": lone.low} if q > 0.5 else {"high": lone.high}))


def of_sorted(ascending: Floats, q: float, tau: float, level: float = 0.95) -> QuantileInterval:
    """Return the q-quantile of ascending values [n > 0], and its interval.

    `tau` of the values say as much as an independent one.
    """
    size, thin = len(ascending), min(q, 1 - q)
    estimate = _quantile(ascending, q)
    needed = _needed(tau, thin)
    low, high = ascending[_ranks(size, size / tau, q, level)].tolist()
    # Nor is the least or the greatest value an end, where all values lie beyond the quantile more often than `level`.
    has_low, has_high = (share ** (size / tau) <= (1 - level) / 2 for share in (1 - q, q))
    return QuantileInterval(
        estimate=estimate,
        low=min(low, estimate) if has_low and (size >= needed or q >= 0.5) else None,
        high=max(high, estimate) if has_high and (size >= needed or q < 0.5) else None,
        tau=tau,
        effective_tail=size / tau * thin,
        needed_n=needed,
    )


def _quantile(ascending: Floats, q: float) -> float:
    """Return the q-quantile of ascending values [n > 0]. `np.quantile` gives the same to the bit, in a hundred times as
    long.
    """
    place = (len(ascending) - 1) * q
    below = math.floor(place)
    low, high, share = float(ascending[below]), float(ascending[min(below + 1, len(ascending) - 1)]), place - below
    return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share


def _needed(tau: float, thin: float) -> int:
    """Return from how many values on there are enough beyond a quantile."""
    return math.ceil(round(LEAST_TAIL * tau / thin, 6))


def mean(values_in_order: npt.ArrayLike, level: float = 0.95) -> Ends:
    """Return the mean of finite values [n > 0], and its interval by Student's t.

    The values are in the order in which they came. The interval's ends are None below three effective values.
    """
    values = np.asarray(values_in_order, np.float64).ravel()
    middle, effective = float(values.mean()), len(values) / autocorrelation_time(values)
    if effective < 3:
        return middle, None, None
    from scipy.special import stdtrit  # noqa: PLC0415  as below

    half = float(stdtrit(effective - 1, (1 + level) / 2) * values.std(ddof=1)) / math.sqrt(effective)
    return middle, middle - half, middle + half


def ratio(sums: Floats, counts: Floats | Ints, level: float = 0.9) -> tuple[float, float] | None:
    """Return the interval of a ratio over a long time: of sums [n] over counts [n].

    They are of n stretches in a row. It is by Student's t on the logarithm. tau is of each sum's excess over its
    count's share, raised by its standard error: queues are long in few bursts, of which a run sees too few rather than
    too many. None of a ratio of 0, below three effective stretches, and of ends that would be a hundred times apart.
    How often it holds the truth stands in benchmarks/RESULTS.md.
    """
    total = float(counts.sum())
    middle = float(sums.sum()) / total if total else 0.0
    if middle <= 0:
        return None
    above = sums - middle * counts
    tau, error = _autocorrelation(above)
    effective = len(above) / float(np.clip(tau * (1 + error), 1.0, len(above)))
    if effective < 3:
        return None
    from scipy.special import stdtrit  # noqa: PLC0415  as below

    spread = float(above.std(ddof=1)) * len(above) / math.sqrt(effective)
    width = float(stdtrit(effective - 1, (1 + level) / 2)) * spread / total / middle
    return (middle * math.exp(-width), middle * math.exp(width)) if width < _TOO_WIDE else None


def _ranks(size: int, effective: float, q: float, level: float) -> list[int]:
    """Return the places, from 0 on, of the interval's ends among `size` ascending values."""
    from scipy.special import betaincinv  # noqa: PLC0415  150 ms, and a run without requests needs none of SciPy

    below, above, outside = effective * q, effective * (1 - q), (1 - level) / 2
    low = math.floor(size * float(betaincinv(below, above + 1, outside))) - 1
    high = math.ceil(size * float(betaincinv(below + 1, above, 1 - outside)))
    return [max(0, low), min(size - 1, high)]


def autocorrelation_time(values: npt.ArrayLike) -> float:
    """Return the autocorrelation time of values [n > 0], from 1 to n.

    It is the number of values in a row that say as much about their mean as an independent one. Sums of neighbouring
    pairs of autocorrelations are added up until the first that is not positive.
    """
    tau, _ = _autocorrelation(values)
    return float(np.clip(tau, 1.0, np.size(values)))


def _taus(values: npt.ArrayLike, of: Callable[[Floats], npt.ArrayLike]) -> Floats:
    """Return the autocorrelation time of `of(values)`, and its upper bound: one-sided, at 95 %."""
    tau, error = _autocorrelation(values, of)
    return np.clip([tau, tau * (1 + _ONE_SIDED_95 * error)], 1.0, np.size(values))


def _ranked(ascending: Floats, values: Floats) -> Floats:
    """Return the rank of each value among ascending ones. Equal values share their mean rank."""
    some, place = np.unique(values, return_inverse=True)
    ranks: Floats = (np.searchsorted(ascending, some, "left") + np.searchsorted(ascending, some, "right"))[place] / 2
    return ranks


def _autocorrelation(values: npt.ArrayLike, of: Callable[[Floats], npt.ArrayLike] = np.positive) -> tuple[float, float]:
    """Return the autocorrelation time of a series [n > 0], and its relative standard error.

    The series is `of(values)`, made of some of the values at a time.
    """
    everything: Floats = np.asarray(values, np.float64)
    # Of a long series, means over equal stretches: the variance of the mean of all follows from theirs alike.
    stretch = math.ceil(len(everything) / _MOST_POINTS)
    at_once = _AT_ONCE // stretch * stretch or stretch
    by_part = []
    for begin in range(0, len(everything), at_once):
        series: Floats = np.asarray(of(everything[begin : begin + at_once]), np.float64)
        whole = series[: len(series) // stretch * stretch].reshape(-1, stretch)
        by_part.append((len(series) / len(everything), series.mean(), series.var(), whole.mean(axis=1)))
    share, middle, within, part_means = zip(*by_part, strict=True)
    variance = float(np.dot(share, within) + np.dot(share, (np.array(middle) - np.dot(share, middle)) ** 2))
    if variance == 0:
        return 1.0, 0.0
    means = np.concatenate(part_means)
    centred = means - means.mean()
    spectrum = np.fft.rfft(centred, 2 ** math.ceil(math.log2(2 * len(means))))
    covariances = np.fft.irfft(np.abs(spectrum) ** 2)[: len(means) // 2 * 2] / len(means)
    pairs = covariances.reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    last = int(ends[0]) if len(ends) else len(pairs)
    total = 2 * float(pairs[:last].sum()) - float(covariances[:1].sum())
    return stretch * total / variance, math.sqrt((8 * last + 2) / len(means))
