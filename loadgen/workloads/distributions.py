"""Length distributions, and how a workload file writes them.

A draw is vectorised and a pure function of the generator. Lengths are whole numbers: a value is rounded to the nearest
one and then held within its floor and cap, as the draft's appendix has it (a cap gathers what lies beyond, it does not
draw again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.workloads.fields import Fields, WorkloadError

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

MOST_TOKENS = 10_000_000
KINDS = ("fixed", "uniform", "normal", "log-normal", "percentiles", "choice", "histogram")


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same value."""

    value: float

    def draw(self, _rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, float(self.value))

    def about(self) -> dict[str, Any]:
        return {"type": "fixed", "value": self.value}


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equally likely between both bounds, which are included; whole bounds give whole numbers."""

    least: float
    most: float

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        if float(self.least).is_integer() and float(self.most).is_integer():
            return rng.integers(int(self.least), int(self.most), count, endpoint=True).astype(np.float64)
        return rng.uniform(self.least, self.most, count)

    def about(self) -> dict[str, Any]:
        return {"type": "uniform", "min": self.least, "max": self.most}


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal, held within [least, most]."""

    mean: float
    std: float
    least: float = 1
    most: float = MOST_TOKENS

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.clip(rng.normal(self.mean, self.std, count), self.least, self.most)

    def about(self) -> dict[str, Any]:
        return {"type": "normal", "mean": self.mean, "std": self.std, "min": self.least, "max": self.most}


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with mu and sigma in log space, held within [least, most]."""

    mu: float
    sigma: float
    least: float = 1
    most: float = MOST_TOKENS

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        # The exponent of a wild sigma overflows to infinity, and the cap takes that too.
        with np.errstate(over="ignore"):
            return np.clip(rng.lognormal(self.mu, self.sigma, count), self.least, self.most)

    def about(self) -> dict[str, Any]:
        return {"type": "log-normal", "mu": self.mu, "sigma": self.sigma, "min": self.least, "max": self.most}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution through given percentiles: its logarithm is piecewise linear in the normal deviate.

    points  (percent, value), at least two, both ascending. Between them the quantile function is that of log-normals;
            below the first and above the last it goes on as in the nearest piece. So the given percentiles are met
            exactly, but for the floor and the cap.
    """

    points: tuple[tuple[float, float], ...]
    least: float = 1
    most: float = MOST_TOKENS

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        deviates = np.array([NormalDist().inv_cdf(percent / 100) for percent, _ in self.points])
        logs = np.log([value for _, value in self.points])
        slopes = np.diff(logs) / np.diff(deviates)
        drawn = rng.standard_normal(count)
        piece = np.clip(np.searchsorted(deviates, drawn) - 1, 0, len(slopes) - 1)
        values: Floats = np.exp(logs[piece] + slopes[piece] * (drawn - deviates[piece]))
        return np.clip(values, self.least, self.most)

    def about(self) -> dict[str, Any]:
        points = {f"p{percent:g}": value for percent, value in self.points}
        return {"type": "empirical, through percentiles", **points, "min": self.least, "max": self.most}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values, by weight."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.take(np.asarray(self.values, np.float64), pick(rng, self.weights, count))

    def about(self) -> dict[str, Any]:
        return {"type": "empirical, values", "values": list(self.values), "weights": list(self.weights)}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bins by count, uniform inside a bin: bin i is [edges[i], edges[i + 1]), of whole numbers where the edges are."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        edges = np.asarray(self.edges, np.float64)
        bins = pick(rng, self.counts, count)
        drawn = edges[bins] + rng.random(count) * (edges[bins + 1] - edges[bins])
        return np.floor(drawn) if bool(np.all(edges == np.rint(edges))) else drawn

    def about(self) -> dict[str, Any]:
        return {"type": "empirical, histogram", "edges": list(self.edges), "counts": list(self.counts)}


# Each draws float64[count], and tells what a report states of it.
Distribution = Fixed | Uniform | Normal | LogNormal | Percentiles | Choice | Histogram


def whole(distribution: Distribution, rng: np.random.Generator, count: int) -> Int64s:
    """Lengths int64[count], rounded to the nearest whole number, at least 0."""
    return np.maximum(np.rint(distribution.draw(rng, count)), 0).astype(np.int64)


def pick(rng: np.random.Generator, weights: tuple[float, ...], count: int) -> Int64s:
    """Positions int64[count], each as likely as its weight; one uniform number is drawn for each."""
    ends = np.cumsum(np.asarray(weights, np.float64))
    at = np.asarray(np.searchsorted(ends, rng.random(count) * ends[-1], side="right"), np.int64)
    # A product that rounds up to the whole falls to the last one that has a weight.
    last = int(np.flatnonzero(np.asarray(weights))[-1])
    return np.minimum(at, np.int64(last))


def zipf_weights(count: int, exponent: float) -> tuple[float, ...]:
    """Weights of Zipf's law, float[count], the first the largest: proportional to rank**-exponent, of sum 1."""
    ranks = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return tuple((ranks / ranks.sum()).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What values of a distribution may be, and whether only whole ones."""

    least: float = 0
    most: float = MOST_TOKENS
    whole: bool = True


def read_distribution(fields: Fields, key: str, bounds: Bounds) -> Distribution:
    """The distribution under a key: a number (fixed), or a mapping of one kind to its parameters.

    Raises WorkloadError naming the field, its value and the cure.
    """
    value = fields.take(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Fixed(fields.number(key, least=bounds.least, most=bounds.most, whole=bounds.whole))
    if not (isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS):
        raise WorkloadError(
            f"{fields.place(key)}: {value!r} is no distribution; write a number, or one of {', '.join(KINDS)} with its "
            f"parameters, e.g. {key}: {{uniform: {{min: 64, max: 256}}}}"
        )
    kind, given = next(iter(value.items()))
    inner = fields.within(key)
    if kind == "fixed":
        return Fixed(inner.number("fixed", least=bounds.least, most=bounds.most, whole=bounds.whole))
    if not isinstance(given, dict):
        raise WorkloadError(f"{inner.place(kind)}: {given!r} must be a mapping; {_EXAMPLES[kind]}")
    read = _read_table(inner.within(kind), kind, bounds)
    inner.within(kind).refuse_others(_PARAMETERS[kind])
    return read


_EXAMPLES = {
    "uniform": "e.g. {min: 64, max: 256}",
    "normal": "e.g. {mean: 100, std: 20}",
    "log-normal": "e.g. {mu: 5.5, sigma: 1.0, min: 32, max: 4096}",
    "percentiles": "e.g. {50: 156, 95: 892, 99: 2134}",
    "choice": "e.g. {values: [8192, 16384], weights: [1, 1]}",
    "histogram": "e.g. {edges: [0, 100, 500], counts: [30, 70]}",
}
_PARAMETERS = {
    "uniform": ("min", "max"),
    "normal": ("mean", "std", "min", "max"),
    "log-normal": ("mu", "sigma", "min", "max"),
    "choice": ("values", "weights"),
    "histogram": ("edges", "counts"),
    "percentiles": (),
}


def _read_table(fields: Fields, kind: str, bounds: Bounds) -> Distribution:
    if kind == "percentiles":
        return _read_percentiles(fields, bounds)
    if kind == "choice":
        values = fields.numbers("values", least=bounds.least, most=bounds.most, whole=bounds.whole)
        weights = fields.numbers("weights", least=0, default=(1.0,) * len(values))
        return Choice(values, _matching(fields, "weights", weights, len(values)))
    if kind == "histogram":
        edges = fields.numbers("edges", least=bounds.least, most=bounds.most)
        if len(edges) < 2 or any(low >= high for low, high in pairwise(edges)):
            raise WorkloadError(f"{fields.place('edges')}: {list(edges)} must be two or more, each above the last")
        return Histogram(edges, _matching(fields, "counts", fields.numbers("counts", least=0), len(edges) - 1))
    least = fields.number(
        "min", least=bounds.least, most=bounds.most, default=None if kind == "uniform" else bounds.least
    )
    most = fields.number(
        "max", least=bounds.least, most=bounds.most, default=None if kind == "uniform" else bounds.most
    )
    if least > most:
        raise WorkloadError(f"{fields.place('min')}: {least:g} is above max {most:g}; make it at most that")
    if kind == "uniform":
        return Uniform(least, most)
    if kind == "normal":
        return Normal(fields.number("mean"), fields.number("std", least=0), least, most)
    return LogNormal(fields.number("mu", least=-50, most=50), fields.number("sigma", least=0, most=50), least, most)


def _read_percentiles(fields: Fields, bounds: Bounds) -> Percentiles:
    least = fields.number(
        "min", least=bounds.least, most=bounds.most, default=max(bounds.least, 1 if bounds.whole else 0)
    )
    most = fields.number("max", least=least, most=bounds.most, default=bounds.most)
    points = []
    for percent in fields.data:
        if percent in ("min", "max"):
            continue
        if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 < percent < 100:
            raise WorkloadError(
                f"{fields.place(percent)}: {percent!r} must be a percentile between 0 and 100, as in 95"
            )
        value = fields.number(percent, least=0, most=bounds.most)
        if not value > 0:
            raise WorkloadError(f"{fields.place(percent)}: {value:g} must be greater than 0")
        points.append((float(percent), value))
    points.sort()
    values = [value for _, value in points]
    if len(points) < 2 or any(low >= high for low, high in pairwise(values)):
        raise WorkloadError(
            f"{fields.place()}: {dict(points)} must be two or more percentiles whose values ascend; "
            f"{_EXAMPLES['percentiles']}"
        )
    return Percentiles(tuple(points), least, most)


def _matching(fields: Fields, key: str, weights: tuple[float, ...], count: int) -> tuple[float, ...]:
    if len(weights) != count:
        raise WorkloadError(
            f"{fields.place(key)}: {len(weights)} of them for {count} values or bins; give one for each"
        )
    if not math.isfinite(sum(weights)) or not sum(weights) > 0:
        raise WorkloadError(f"{fields.place(key)}: {list(weights)} must have a positive sum")
    return weights
