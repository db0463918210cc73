"""How close estimated percentiles come to those of the observations behind the histograms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sidelight.scraper.quantiles import fit, read, read_rows
from sidelight.scraper.quantiles.fit import Fit

Float64 = NDArray[np.float64]

# A case of each family of the shared file, at most 361 intervals each.
CUT = Path(__file__).parents[1] / "data/quantiles.npz"
COLUMNS = {"p50": 49, "p90": 89, "p95": 94, "p99": 98}
BARS = [9, 24, 49, 74, 89, 94, 98]
# Percent: the median and the 95th percentile over cases; the mean of a case's slices for the last.
ALL = {"p50": (1.5, 10.0), "p90": (1.6, 16.0), "p95": (2.0, 15.0), "p99": (2.2, 18.0), "slices": (2.0, 19.0)}
OF_THE_CUT = {"p50": (1.2, 8.0), "p90": (1.4, 14.0), "p95": (1.7, 12.0), "p99": (3.6, 14.0), "slices": (1.9, 16.0)}


def relative(estimated: Float64, truth: Float64, scale: float) -> Float64:
    """Return the error in percent of the truth, and of a twentieth of the mean where the truth is smaller."""
    return np.asarray(100 * np.abs(estimated - truth) / np.maximum(np.abs(truth), 0.05 * scale))


def slice_errors(case: int, file: dict[str, Float64], fitted: Fit, scale: float) -> Iterator[Float64]:
    """Give the errors of each timeslice with a known truth, [99]."""
    edges = file[f"c{case}_slices"]
    for start, end, truth in zip(edges[:-1], edges[1:], file[f"c{case}_slice_truth"], strict=True):
        if np.isfinite(truth).all():
            estimated = read_rows([fitted], [slice(int(start), int(end))], file["qs"][:99])
            yield relative(estimated, truth[:99], scale)


def score(path: Path) -> dict[str, tuple[float, float]]:
    """Return the figures of ALL for one file, and the share of truths inside range and interval."""
    with np.load(path) as archive:
        file = dict(archive)
    whole, slices, inside, covered = [], [], [], []
    for case in range(int(file["n_cases"])):
        scale, truth = float(file["scale"][case]), file[f"c{case}_truth"]
        fitted = fit(file[f"c{case}_bounds"], file[f"c{case}_counts"], file[f"c{case}_sums"])
        whole.append(relative(read_rows([fitted], [slice(None)], file["qs"]), truth, scale))
        slices.extend(slice_errors(case, file, fitted, scale))
        taken, truth = read([fitted], file["qs"][BARS]), truth[BARS]
        slack = 1e-6 * np.abs(truth) + 1e-12 * scale
        inside.append((taken.lowest - slack <= truth) & (truth <= taken.highest + slack))
        covered.append((taken.low <= truth) & (truth <= taken.high))
    errors = np.array(whole)
    result = {
        name: (float(np.median(errors[:, column])), float(np.percentile(errors[:, column], 95)))
        for name, column in COLUMNS.items()
    }
    result["slices"] = (float(np.median(slices)), float(np.percentile(np.mean(slices, axis=1), 95)))
    result["covered"] = (float(np.mean(inside)), float(np.mean(covered)))
    return result


def accept(errors: dict[str, tuple[float, float]], allowed: dict[str, tuple[float, float]]) -> None:
    """Hold the figures against what is asked for."""
    for name, most in allowed.items():
        assert errors[name][0] <= most[0], name
        assert errors[name][1] <= most[1], name
    inside, covered = errors["covered"]
    assert inside > 0.998
    assert covered > 0.85


def test_a_case_of_each_kind():
    """A few per cent at most at the median; the range holds all but torn pages, the interval nine in ten."""
    accept(score(CUT), OF_THE_CUT)


def test_all_cases(shared: Path):
    """The same for every case of the shared file, closer."""
    path = shared / "fixtures/quantiles/public.npz"
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    accept(score(path), ALL)
