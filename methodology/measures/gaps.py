"""The shape of the gaps between tokens: how many modes they have, how heavy their tail is, and what ran meanwhile.

- Modes: Silverman 1981, "Using kernel density estimates to investigate multimodality", on logarithms; that there is one
  alone is tested by the calibration of Hall and York 2001, "On the calibration of Silverman's test for multimodality".
- Tail: the generalised Pareto distribution of what lies beyond P95 (Pickands 1975).
Requests of one batch get their tokens together, so that neighbouring gaps are the same step seen several times: both
count gaps as `correlator.statistics.intervals` does, tau of them as one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sidelight.correlator.statistics.intervals import LEAST_TAIL, autocorrelation_time
from sidelight.correlator.statistics.server_load import leading_endpoints
from sidelight.methodology.study.model import StepData
from sidelight.methodology.study.server_side import cumulative
from sidelight.rundir.columns import Bools, Floats, Ints
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.stats import Missing

LEAST_GAPS, MOST_GAPS = 50, 2000  # independent ones, whose modes are tested
MOST_MODES = 4
LEVEL = 0.01
RESAMPLES = 200
TAIL_FROM = 0.95
_HALL_YORK = 1.1488  # times the critical bandwidth of one mode, at that level
_OUTSIDE = 5  # gaps at either end, where no mode is counted: each of the last is a bump of its own
_BINS, _BISECTIONS = 2048, 25
_ROUNDING = 1e-9  # of the highest density

Character = Literal["exponential", "heavy", "light"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """The modes of gaps: where they are, ms, ascending; and the share of the gaps about each."""

    at_ms: tuple[float, ...]
    valleys_ms: tuple[float, ...]  # between them; one fewer
    shares: tuple[float, ...]
    p: float  # of the test that there is one mode alone: below 0.01 there are more
    gaps: int  # independent ones that it rests on

    def of(self, gaps_ms: Floats) -> Ints:
        """Return the mode, from 0 on, that each gap [n] belongs to."""
        return np.searchsorted(self.valleys_ms, gaps_ms).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailShape:
    """The tail beyond P95: the shape of its generalised Pareto distribution, 0 of an exponential one."""

    shape: float
    ci95: tuple[float, float]
    character: Character
    effective: float


def modes(gaps_ms: Floats) -> Modes | Missing:
    """Return the modes of gaps [n] in the order in which they ended; gaps of 0 are left out. Deterministic.

    - Up to four are distinguished. Modes are separate where independent gaps say so: tau is that of whether a gap is
      above the valley between them.
    - Missing: fewer than 50 gaps, or gaps that are all equal.
    """
    logs = np.log(gaps_ms[gaps_ms > 0])
    if len(logs) < LEAST_GAPS:
        return Missing(f"too few to tell modes: {count_of(len(logs), 'gap')} of {LEAST_GAPS} that are needed")
    if np.ptp(logs) < _ROUNDING:
        return Missing("all gaps are equal")
    thinned = logs[:: math.ceil(len(logs) / MOST_GAPS)]
    grid, count = _grid(thinned), 1
    first_p = p = _more_modes(grid, thinned, 1)
    while p < LEVEL and count < MOST_MODES:
        _, valleys = _extremes(grid, thinned, count + 1)
        tau = max((autocorrelation_time(logs > valley) for valley in valleys), default=1.0)
        thinner = logs[:: math.ceil(max(tau, len(logs) / MOST_GAPS))]
        if len(thinner) < len(thinned):
            p = _more_modes(grid, thinner, count) if len(thinner) >= LEAST_GAPS else 1.0
            first_p = p if count == 1 else first_p
        if p < LEVEL:
            count += 1
            p = _more_modes(grid, thinned, count)
    peaks, valleys = _extremes(grid, thinned, count)
    shares = np.bincount(np.searchsorted(valleys, logs), minlength=len(peaks)) / len(logs)
    return Modes(
        at_ms=tuple(np.exp(peaks).tolist()),
        valleys_ms=tuple(np.exp(valleys).tolist()),
        shares=tuple(shares.tolist()),
        p=first_p,
        gaps=len(thinned),
    )


def tail(gaps_ms: Floats) -> TailShape | Missing:
    """Return the character of the tail of gaps [n]: exponential if the shape's interval holds 0.

    Missing: fewer than 20 independent gaps beyond P95.
    """
    if not len(gaps_ms):
        return Missing("there are no gaps")
    threshold = np.quantile(gaps_ms, TAIL_FROM)
    beyond = gaps_ms > threshold
    effective = float(beyond.sum()) / autocorrelation_time(beyond)
    if effective < LEAST_TAIL:
        return Missing(
            f"{beyond.sum():,} gaps beyond P95 say as much as {effective:.0f} independent ones; 20 are needed"
        )
    from scipy.stats import genpareto  # noqa: PLC0415  half a second

    excess = gaps_ms[beyond] - threshold
    shape = float(genpareto.fit(excess / excess.mean(), floc=0)[0])
    # Bias and variance of the likelihood's maximum (Giles, Feng and Godwin 2016; Smith 1987), not below those of an
    # exponential tail; it strays farther down than up, so that the interval reaches farther up.
    least = max(shape, 0.0)
    shape += (1 + least) * (3 + least) / (1 + 3 * least) / effective
    error = (1 + least) / math.sqrt(effective)
    low, high = shape - 1.96 * error, shape + 2.6 * error
    character: Character = "heavy" if low > 0 else "light" if high < 0 else "exponential"
    return TailShape(shape=shape, ci95=(low, high), character=character, effective=effective)


def with_prefill(begin_ns: Ints, end_ns: Ints, first_token_ns: Ints) -> Bools:
    """Return a mask of gaps [n] with the first token of another request: their step had a prefill.

    Tokens of one step arrive within a fraction of a step of each other, in any order: half a median gap is allowed.
    """
    firsts = np.sort(first_token_ns[first_token_ns >= 0])
    slack = int(np.median(end_ns - begin_ns)) // 2 if len(end_ns) else 0
    after, until = (np.searchsorted(firsts, stamps + slack, side="right") for stamps in (begin_ns, end_ns))
    return np.asarray(until > after)


def _more_modes(grid: _Grid, values: Floats, count: int) -> float:
    """Return the probability that values [n] with `count` modes would show more.

    They are smoothed until they have no more than that.
    """
    bandwidth = _critical_bandwidth(grid, grid.counts(values[None]), count)
    random = np.random.default_rng(np.random.SeedSequence([16, count, len(values)]))
    shape = (RESAMPLES, len(values))
    drawn = random.choice(values, shape) + bandwidth * random.standard_normal(shape)
    # Smoothing widens a sample, which would make its modes fewer.
    middle = values.mean()
    samples = middle + (drawn - middle) / math.sqrt(1 + (bandwidth / values.std()) ** 2)
    calibrated = bandwidth * (_HALL_YORK if count == 1 else 1.0)
    return float((grid.peaks(grid.counts(samples), calibrated).sum(axis=1) > count).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Bins over values, with as much room again on both sides; modes are counted at the points that are `inside`."""

    low: float
    step: float
    inside: Bools

    def counts(self, samples: Floats) -> Floats:
        """Return the number of values of each sample [R, n] in each bin [R, B]."""
        bins = np.clip((samples - self.low) / self.step, 0, _BINS - 1).astype(np.int64)
        bins += _BINS * np.arange(len(samples))[:, None]
        return np.bincount(bins.ravel(), minlength=_BINS * len(samples)).reshape(-1, _BINS).astype(np.float64)

    def density(self, counts: Floats, bandwidth: float) -> Floats:
        """Return the Gaussian kernel density of counts [R, B], but for a factor."""
        frequencies = 2 * math.pi * np.fft.rfftfreq(_BINS, self.step)
        return np.fft.irfft(np.fft.rfft(counts) * np.exp(-0.5 * (bandwidth * frequencies) ** 2), _BINS)

    def peaks(self, counts: Floats, bandwidth: float) -> Bools:
        """Return a mask of the maxima of that density [R, B], rounding aside."""
        density = self.density(counts, bandwidth)
        slope = np.diff(density) / density.max(axis=1, keepdims=True)
        peaks = np.zeros(density.shape, dtype=np.bool_)
        peaks[:, 1:-1] = (slope[:, :-1] > _ROUNDING) & (slope[:, 1:] < -_ROUNDING)
        return np.asarray(peaks & self.inside)


def _grid(values: Floats) -> _Grid:
    low, high = float(values.min()), float(values.max())
    step = 3 * (high - low) / _BINS
    points = low - (high - low) + step * (np.arange(_BINS) + 0.5)
    first, last = np.sort(values)[[_OUTSIDE, -1 - _OUTSIDE]]
    return _Grid(low=low - (high - low), step=step, inside=(points >= first) & (points <= last))


def _critical_bandwidth(grid: _Grid, counts: Floats, most: int) -> float:
    """Return the least bandwidth at which the density has no more modes than that."""
    low, high = grid.step, grid.step * _BINS / 3
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        if grid.peaks(counts, middle).sum() > most:
            low = middle
        else:
            high = middle
    return high


def _extremes(grid: _Grid, values: Floats, most: int) -> tuple[Floats, Floats]:
    """Return the positions of at most `most` modes of values, and the valleys between them."""
    counts = grid.counts(values[None])
    bandwidth = _critical_bandwidth(grid, counts, most)
    density, peaks = grid.density(counts, bandwidth)[0], np.flatnonzero(grid.peaks(counts, bandwidth)[0])
    valleys = [first + int(np.argmin(density[first:last])) for first, last in itertools.pairwise(peaks.tolist())]
    at_peaks, at_valleys = (grid.low + grid.step * (np.asarray(places) + 0.5) for places in (peaks, valleys))
    return at_peaks, at_valleys


def foreign_prefill(data: StepData, begin_ns: Ints, end_ns: Ints) -> Bools:
    """Return a mask of gaps [n] with a prefill that was not ours.

    They fell between scrapes that saw prompt tokens rise, though none of our requests began.
    """
    unknown = np.zeros(len(end_ns), dtype=np.bool_)
    slack = int(np.median(end_ns - begin_ns)) if len(end_ns) else 0
    firsts = np.sort(data.requests.first_token_ns[data.requests.first_token_ns >= 0])
    for page, sources in leading_endpoints(data.endpoints):
        total = cumulative(page, sources, "prompt_tokens")
        if total is None:
            continue
        at_ns = page.at_ns
        ours = np.searchsorted(firsts, at_ns[1:] + slack, side="right") > np.searchsorted(firsts, at_ns[:-1] - slack)
        moved = np.flatnonzero((np.diff(total) > 0) & ~ours)
        unknown |= np.isin(np.searchsorted(at_ns, end_ns) - 1, moved)
    return unknown
