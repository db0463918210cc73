"""The non-negative least squares of the estimator, beside SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from sidelight.correlator.estimate.regression import nonnegative_least_squares


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 60),
    size=st.integers(1, 6),
    lean=st.floats(-2, 2),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    twins=st.booleans(),
)
def test_it_fits_as_well_as_scipy(seed: int, rows: int, size: int, lean: float, scale: float, *, twins: bool):
    """Whatever bounds the target runs into, with more unknowns than rows or with two columns alike."""
    random = np.random.default_rng(seed)
    design = random.random((rows, size))
    if twins:
        design[:, -1] = design[:, 0]
    target = scale * (design @ random.normal(lean, 1.0, size) + 0.1 * random.normal(size=rows))
    x = nonnegative_least_squares(design, target)
    expected, distance = nnls(design, target)
    assert (x >= 0).all()
    assert float(np.linalg.norm(design @ x - target)) <= distance * (1 + 1e-9) + 1e-12 * np.linalg.norm(target)
    if rows >= size and np.linalg.cond(design) < 1e4:  # there is but one best x
        assert x == pytest.approx(expected, rel=1e-8, abs=1e-9 * scale)


@pytest.mark.parametrize(
    ("design", "target", "expected"),
    [
        ([[1, 0], [1, 0], [0, 1]], [2, 1, 1], [1.5, 1]),
        ([[1, 0], [1, 0], [0, 1]], [-1, -1, -1], [0, 0]),
        ([[1, 1], [1, 2], [1, 3]], [3, 2, 1], [2, 0]),
        ([[0, 0], [0, 0]], [1, 1], [0, 0]),
        ([[0, 1], [0, 1]], [2, 2], [0, 2]),
    ],
)
def test_small_problems_by_hand(design: list[list[float]], target: list[float], expected: list[float]):
    """A free solution, one at the corner, one on an edge, and columns that say nothing."""
    assert nonnegative_least_squares(np.array(design, float), np.array(target, float)) == pytest.approx(expected)
