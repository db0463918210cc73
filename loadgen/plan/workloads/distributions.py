"""Length distributions.

A draw is vectorised and a pure function of the generator. Lengths are whole numbers: a value is rounded to the nearest
one and then held within its floor and cap, as the draft's appendix has it (a cap gathers what lies beyond, it does not
draw again, unless it is `truncated`).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from sidelight.rundir.columns import Floats, Ints

MOST_TOKENS = 10_000_000

# Of any size that is finite; what a file writes as a whole number stays one.
_Number = Annotated[int, Meta(ge=-(2**53), le=2**53)] | Annotated[float, Meta(ge=-1e300, le=1e300)]
_Positive = Annotated[float, Meta(ge=0, le=1e300)]


class _Drawn(msgspec.Struct, frozen=True, tag_field="type", rename={"least": "min", "most": "max"}):
    """The limits of a distribution: `least` and `most` here, `min` and `max` in a file."""


class Fixed(_Drawn, frozen=True, tag="fixed"):
    """Always the same value."""

    value: _Number

    def draw(self, _rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, float(self.value))


class Uniform(_Drawn, frozen=True, tag="uniform"):
    """Equally likely between both bounds, which are included; whole bounds give whole numbers."""

    least: _Number
    most: _Number

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        if float(self.least).is_integer() and float(self.most).is_integer():
            return rng.integers(int(self.least), int(self.most), count, endpoint=True).astype(np.float64)
        return rng.uniform(self.least, self.most, count)


class Normal(_Drawn, frozen=True, tag="normal"):
    """Normal, held within [least, most]."""

    mean: _Number
    std: _Positive
    least: _Number = 1
    most: _Number = MOST_TOKENS

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.clip(rng.normal(self.mean, self.std, count), self.least, self.most)


class LogNormal(_Drawn, frozen=True, tag="log-normal"):
    """Log-normal with mu and sigma in log space, held within [least, most]; `truncated`: drawn again outside of it."""

    mu: Annotated[float, Meta(ge=-50, le=50)]
    sigma: Annotated[float, Meta(ge=0, le=50)]
    least: _Number = 1
    most: _Number = MOST_TOKENS
    truncated: bool = False

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        # The exponent of a wild sigma overflows to infinity, and the cap takes that too.
        with np.errstate(over="ignore"):
            values = rng.lognormal(self.mu, self.sigma, count)
            while self.truncated and len(outside := np.flatnonzero((values < self.least) | (values > self.most))):
                values[outside] = rng.lognormal(self.mu, self.sigma, len(outside))
        return np.clip(values, self.least, self.most)

    @property
    def inside(self) -> float:
        """Return the share of the untruncated distribution that lies within [least, most]."""
        if not self.sigma:
            return float(self.least <= math.exp(self.mu) <= self.most)
        bounds = (math.log(bound) if bound > 0 else -math.inf for bound in (self.least, self.most))
        low, high = (NormalDist(self.mu, self.sigma).cdf(bound) for bound in bounds)
        return high - low


class Percentiles(_Drawn, frozen=True, tag="empirical, through percentiles"):
    """A distribution through given percentiles: its logarithm is piecewise linear in the normal deviate.

    points  (percent, value), at least two, both ascending. Between them the quantile function is that of log-normals;
            below the first and above the last it goes on as in the nearest piece. So the given percentiles are met
            exactly, but for the floor and the cap.
    """

    points: tuple[tuple[float, float], ...]
    least: _Number = 1
    most: _Number = MOST_TOKENS

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        deviates = np.array([NormalDist().inv_cdf(percent / 100) for percent, _ in self.points])
        logs = np.log([value for _, value in self.points])
        slopes = np.diff(logs) / np.diff(deviates)
        drawn = rng.standard_normal(count)
        piece = np.clip(np.searchsorted(deviates, drawn) - 1, 0, len(slopes) - 1)
        values: Floats = np.exp(logs[piece] + slopes[piece] * (drawn - deviates[piece]))
        return np.clip(values, self.least, self.most)


class Choice(_Drawn, frozen=True, tag="empirical, values"):
    """One of some values, by weight."""

    values: Annotated[tuple[_Number, ...], Meta(min_length=1)]
    weights: tuple[_Positive, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.take(np.asarray(self.values, np.float64), pick(rng, self.weights, count))


class BinnedDistribution(_Drawn, frozen=True, tag="empirical, histogram"):
    """Bins by count, uniform inside a bin: bin i is [edges[i], edges[i + 1]), of whole numbers where the edges are."""

    edges: tuple[_Number, ...]
    counts: tuple[_Positive, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        edges = np.asarray(self.edges, np.float64)
        bins = pick(rng, self.counts, count)
        drawn = edges[bins] + rng.random(count) * (edges[bins + 1] - edges[bins])
        return np.floor(drawn) if bool(np.all(edges == np.rint(edges))) else drawn


# Each draws float64[count].
Distribution = Fixed | Uniform | Normal | LogNormal | Percentiles | Choice | BinnedDistribution


def about(distribution: Distribution) -> dict[str, Any]:
    """Return the report's description of a distribution: its type, and its fields as in a file."""
    stated: dict[str, Any] = msgspec.to_builtins(distribution)
    points = stated.pop("points", ())
    return stated | {f"p{percent:g}": value for percent, value in points}


def whole(distribution: Distribution, rng: np.random.Generator, count: int) -> Ints:
    """Return lengths int64[count], rounded to the nearest whole number, at least 0."""
    return np.maximum(np.rint(distribution.draw(rng, count)), 0).astype(np.int64)


def pick(rng: np.random.Generator, weights: tuple[float, ...], count: int) -> Ints:
    """Return positions int64[count], each as likely as its weight; one uniform number is drawn for each."""
    ends = np.cumsum(np.asarray(weights, np.float64))
    at = np.asarray(np.searchsorted(ends, rng.random(count) * ends[-1], side="right"), np.int64)
    # A product that rounds up to the whole falls to the last one that has a weight.
    last = int(np.flatnonzero(np.asarray(weights))[-1])
    return np.minimum(at, np.int64(last))


def zipf_weights(count: int, exponent: float) -> tuple[float, ...]:
    """Return weights of Zipf's law, float[count], the first the largest: proportional to rank**-exponent, of sum 1."""
    ranks = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return tuple((ranks / ranks.sum()).tolist())
