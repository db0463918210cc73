"""Estimate percentiles of histograms whose observations are known, with our estimator and Prometheus' linear one.

    python benchmarks/quantiles.py [PUBLIC.NPZ]

Two sets are scored: the recorded cases of the file, and cases drawn here, of other shapes and seeds, over its bucket
layouts. Relative error in percent, median and 95th percentile over cases; its denominator is the truth, and at least a
twentieth of the mean. "p1-p99" is the median over all percentiles of all cases, and the 95th percentile of each case's
mean. What is timed is one series: fit and ten percentiles, a timeslice, the error bars.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sidelight.scraper.quantiles import estimate, fit, read, read_rows
from sidelight.scraper.quantiles.intervals import sound

Float64 = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, float], Float64]

SHARED = Path(os.environ.get("SIDELIGHT_SHARED", Path(__file__).parents[2] / "shared"))
QS = np.append(np.arange(1, 100) / 100, 0.999)
TEN = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999])
COLUMNS = {"p50": 49, "p90": 89, "p95": 94, "p99": 98}
SEED = 7261
REPEATS = 3
LEAST_IN_A_SLICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scraped histogram and the quantiles of what it observed: in all [Q], and between slice edges [S, Q]."""

    name: str
    bounds: Float64
    counts: Float64
    sums: Float64
    scale: float
    truth: Float64
    edges: NDArray[np.int64]
    slice_truth: Float64


def main() -> None:
    """Print a table a set, then what a series costs."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED / "fixtures/quantiles/public.npz"
    print(f"Python {platform.python_version()}, numpy {version('numpy')}, scipy {version('scipy')}")
    recorded = list(recorded_cases(path))
    layouts = {case.name.partition(" ")[2]: case.bounds for case in recorded}
    drawn = list(unseen_cases(layouts, np.random.SeedSequence(SEED)))
    for name, cases in (("recorded", recorded), (f"drawn, seed {SEED}", drawn)):
        print(f"\n{name}: {len(cases)} cases, median / 95th percentile of the relative error in %")
        print("| method |", " | ".join((*COLUMNS, "p1-p99", "slices p1-p99")), "|")
        for method, whole, part in (("linear", _linear, _linear_slices), ("ours", _ours, _our_slices)):
            print(f"| {method} |", " | ".join(scores(cases, whole, part)), "|")
    print_times([case for case in recorded if 500 <= len(case.counts) <= 700])


def recorded_cases(path: Path) -> Iterator[Case]:
    """Give the cases of the file, each named by its family and layout."""
    with np.load(path) as file:
        for k in range(int(file["n_cases"])):
            yield Case(
                name=f"{file['families'][k]} {file['layouts'][k]}",
                bounds=file[f"c{k}_bounds"],
                counts=file[f"c{k}_counts"].astype(np.float64),
                sums=file[f"c{k}_sums"],
                scale=float(file["scale"][k]),
                truth=file[f"c{k}_truth"],
                edges=file[f"c{k}_slices"],
                slice_truth=file[f"c{k}_slice_truth"],
            )


def unseen_cases(layouts: dict[str, Float64], seed: np.random.SeedSequence) -> Iterator[Case]:
    """Draw cases of every shape over every engine's latency layout."""
    engines = sorted(name for name in layouts if name.startswith(("vllm_", "sgl_", "trt_")) and "token" not in name)
    kinds = [(shape, name) for shape in SHAPES for name in engines] * REPEATS
    for (shape, name), child in zip(kinds, seed.spawn(len(kinds)), strict=True):
        random = np.random.default_rng(child)
        bounds = layouts[name]
        finite = bounds[np.isfinite(bounds)]
        # A mean somewhere in the middle of the layout; above its end for what is to fall into +Inf.
        mean = float(finite[-1] * 0.6 if shape == "beyond" else np.exp(random.uniform(*np.log(finite[[3, -5]]))))
        yield _case(f"{shape} {name}", bounds, SHAPES[shape], mean, random)


def _case(name: str, bounds: Float64, draw: Draw, mean: float, random: np.random.Generator) -> Case:
    rows = 40 if name.startswith("tiny") else int(random.choice([120, 300, 600, 1200]))
    rate = 1.0 if name.startswith("tiny") else float(np.exp(random.uniform(np.log(0.5), np.log(100))))
    sizes = random.poisson(rate, rows)
    sizes[-1] += sizes.sum() == 0
    row = np.repeat(np.arange(rows), sizes)
    values = draw(random, len(row), mean)
    if name.startswith("correlated"):
        values = values * np.exp(random.normal(0, 0.5, rows))[row]
    counts = np.zeros((rows, len(bounds)))
    np.add.at(counts, (row, np.searchsorted(bounds, values)), 1)
    edges = np.linspace(0, rows, 6).astype(np.int64)
    slices = [values[(row >= start) & (row < end)] for start, end in pairwise(edges)]
    unknown = np.full(len(QS), np.nan)
    return Case(
        name=name,
        bounds=bounds,
        counts=counts,
        sums=np.diff(np.cumsum(np.bincount(row, values, rows)), prepend=0.0),
        scale=float(np.abs(values).mean()),
        truth=np.quantile(values, QS),
        edges=edges,
        slice_truth=np.array([np.quantile(v, QS) if len(v) >= LEAST_IN_A_SLICE else unknown for v in slices]),
    )


def _lognormal(random: np.random.Generator, size: int, mean: float) -> Float64:
    return random.lognormal(np.log(mean), random.uniform(0.2, 1.1), size)


def _gamma(random: np.random.Generator, size: int, mean: float) -> Float64:
    shape = random.uniform(0.7, 8)
    return random.gamma(shape, mean / shape, size)


def _bimodal(random: np.random.Generator, size: int, mean: float) -> Float64:
    high = random.random(size) < random.uniform(0.1, 0.6)
    return random.lognormal(np.log(mean), 0.25, size) * np.where(high, random.uniform(3, 8), 1.0)


def _pareto(random: np.random.Generator, size: int, mean: float) -> Float64:
    return mean * (random.pareto(random.uniform(1.8, 4), size) + 1) / 2


def _drift(random: np.random.Generator, size: int, mean: float) -> Float64:
    return _lognormal(random, size, mean) * np.linspace(0.4, random.uniform(1.5, 4), size)


def _constant(random: np.random.Generator, size: int, mean: float) -> Float64:
    return np.full(size, mean) * random.normal(1, 0.002, size)


def _zero_mass(random: np.random.Generator, size: int, mean: float) -> Float64:
    waits = random.random(size) < random.uniform(0.2, 0.7)
    return np.where(waits, random.gamma(1.5, mean / 1.5, size), mean * 1e-5)


SHAPES: dict[str, Draw] = {
    "lognormal": _lognormal,
    "gamma": _gamma,
    "bimodal": _bimodal,
    "pareto": _pareto,
    "drift": _drift,
    "correlated": _lognormal,
    "constant": _constant,
    "tiny": _lognormal,
    "beyond": _gamma,
    "zero_mass": _zero_mass,
}


def linear(bounds: ArrayLike, counts: ArrayLike, qs: ArrayLike) -> Float64:
    """Interpolate linearly inside buckets, as Prometheus does: bounds[B], counts[T, B], qs[Q] -> [Q].

    Source: Prometheus `promql/quantile.go`. Special cases:
    - no observation, or a quantile outside 0..1: NaN;
    - a row with a negative, NaN or infinite count is left out;
    - the lowest bucket starts at 0, or, with a first bound at or below 0, holds that bound;
    - beyond the last finite bound: that bound, which is then a lower bound of the truth; with no finite bound, NaN.
    Never decreases in q.
    """
    edges = np.asarray(bounds, dtype=np.float64)
    totals = sound(counts, len(edges))[0].sum(axis=0)
    wanted = np.atleast_1d(np.asarray(qs, dtype=np.float64))
    result = np.full(wanted.shape, np.nan)
    total = float(totals.sum())
    valid = (wanted >= 0) & (wanted <= 1)
    if not total > 0 or not valid.any():
        return result
    cumulative = np.cumsum(totals)
    ranks = wanted[valid] * total
    occupied = np.flatnonzero(totals > 0)
    found = occupied[np.minimum(np.searchsorted(cumulative[occupied], ranks, side="left"), len(occupied) - 1)]
    finite = edges[np.isfinite(edges)]
    result[valid] = np.where(
        np.isfinite(edges[found]),
        _inside(edges, cumulative, totals, found, ranks),
        finite[-1] if len(finite) else np.nan,
    )
    return result


def _inside(edges: Float64, cumulative: Float64, totals: Float64, found: NDArray[np.intp], ranks: Float64) -> Float64:
    low = np.concatenate(([min(edges[0], 0.0)], edges[:-1]))[found]
    if edges[0] <= 0:
        low = np.where(found == 0, edges[0], low)
    before = cumulative[found] - totals[found]
    share = np.clip((ranks - before) / totals[found], 0.0, 1.0)
    high = np.where(np.isfinite(edges[found]), edges[found], low)
    with np.errstate(over="ignore"):
        # Halves, for the distance of two edges may be more than a number can hold.
        return np.asarray(np.minimum(low + (high / 2 - low / 2) * share * 2, high), dtype=np.float64)


def _linear(case: Case) -> Float64:
    return linear(case.bounds, case.counts, QS)


def _linear_slices(case: Case) -> list[Float64]:
    return [linear(case.bounds, case.counts[rows], QS) for rows in _slices(case)]


def _ours(case: Case) -> Float64:
    return estimate(case.bounds, case.counts, case.sums, QS)


def _our_slices(case: Case) -> list[Float64]:
    fitted = fit(case.bounds, case.counts, case.sums)
    return [read_rows([fitted], [rows], QS) for rows in _slices(case)]


def _slices(case: Case) -> list[slice]:
    return [slice(int(start), int(end)) for start, end in pairwise(case.edges)]


def scores(cases: list[Case], whole: Callable[[Case], Float64], part: Callable[[Case], list[Float64]]) -> Iterator[str]:
    """Give the figures of one method: a column each of COLUMNS, all percentiles, all percentiles of slices."""
    errors = np.array([_error(case, case.truth, whole(case)) for case in cases])
    sliced = [
        _error(case, truth, found)
        for case in cases
        for truth, found in zip(case.slice_truth, part(case), strict=True)
        if np.isfinite(truth).all()
    ]
    for column in COLUMNS.values():
        yield _pair(errors[:, column], errors[:, column])
    for each in (errors[:, :99], np.array(sliced)[:, :99]):
        yield _pair(each, each.mean(axis=1))


def _error(case: Case, truth: Float64, found: Float64) -> Float64:
    error: Float64 = 100 * np.abs(found - truth) / np.maximum(np.abs(truth), 0.05 * case.scale)
    return np.where(np.isnan(error), 100.0, error)


def _pair(each: Float64, means: Float64) -> str:
    return f"{np.median(each):.1f} / {np.percentile(means, 95):.1f}"


def print_times(cases: list[Case]) -> None:
    """Print what one series costs: CPU time of the process, median and 95th percentile over the cases."""
    works: dict[str, Callable[[Case], Callable[[], object]]] = {
        "linear, ten percentiles": lambda case: lambda: linear(case.bounds, case.counts, TEN),
        "fit and ten percentiles": lambda case: lambda: estimate(case.bounds, case.counts, case.sums, TEN),
        "ten percentiles of a slice": _slice_work,
        "ten percentiles with error bars": _bars_work,
    }
    print(f"\na series of 500 to 700 scrapes, {len(cases)} cases, ms, median / 95th percentile:")
    for name, work in works.items():
        times = [1e3 * _timed(work(case)) for case in cases]
        print(f"{name}: {statistics.median(times):.2f} / {np.percentile(times, 95):.2f}")


def _slice_work(case: Case) -> Callable[[], object]:
    fitted, rows = [fit(case.bounds, case.counts, case.sums)], [_slices(case)[0]]
    return lambda: read_rows(fitted, rows, TEN)


def _bars_work(case: Case) -> Callable[[], object]:
    fitted = [fit(case.bounds, case.counts, case.sums)]
    return lambda: read(fitted, TEN)


def _timed(work: Callable[[], object]) -> float:
    rounds = []
    for _ in range(7):
        start = time.process_time()
        work()
        rounds.append(time.process_time() - start)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
