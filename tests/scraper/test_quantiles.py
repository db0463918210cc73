"""The linear estimate is Prometheus' own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scraper.quantiles import linear
from scraper.quantiles.intervals import sound

INF = float("inf")
BOUNDS = [0.1, 0.5, 1.0, 5.0, INF]


@pytest.mark.parametrize(
    ("bounds", "counts", "q", "expected"),
    [
        ([1, 2, INF], [[4, 0, 0]], 0.5, 0.5),
        ([1, 2, INF], [[2, 2, 0]], 0.75, 1.5),
        ([1, 2, INF], [[1, 1, 0], [1, 1, 0]], 0.75, 1.5),
        ([1, 2, INF], [[2, 0, 2]], 0.99, 2.0),
        ([1, 2, INF], [[0, 2, 0]], 0.0, 1.0),
        ([1, 2, INF], [[0, 2, 0]], 1.0, 2.0),
        ([1, 2, INF], [[0.5, 0.25, 0.25]], 0.75, 2.0),
        ([0, 1, INF], [[3, 1, 0]], 0.5, 0.0),
        ([-1, 1, INF], [[1, 1, 0]], 0.25, -1.0),
        ([-1, 1, INF], [[0, 2, 0]], 0.5, 0.0),
    ],
)
def test_linear(bounds: list[float], counts: list[list[float]], q: float, expected: float):
    """Linear inside a bucket; beyond the last bound that bound; below a first bound of zero or less that bound."""
    assert expected == linear(bounds, counts, [q])[0]


@pytest.mark.parametrize(
    ("bounds", "counts", "q"),
    [
        ([1, INF], [[0, 0]], 0.5),
        ([1, INF], np.zeros((0, 2)), 0.5),
        ([1, INF], [[1, 1]], 1.5),
        ([1, INF], [[1, 1]], np.nan),
        ([1, INF], [[-1, 1], [np.nan, 1], [INF, 1]], 0.5),
        ([INF], [[3]], 0.5),
    ],
)
def test_no_answer_is_nan(bounds: list[float], counts: list[list[float]], q: float):
    """No observation, no such quantile, no sound row, no finite bound: NaN."""
    assert np.isnan(linear(bounds, counts, [q])).all()


@given(st.lists(st.floats(0, 5), min_size=5, max_size=5), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_linear_never_decreases(counts: list[float], qs: list[float]):
    """Nor leaves the finite bounds, for fractional counts too."""
    found = linear(BOUNDS, [counts], sorted(qs))
    assert np.isnan(found).all() == (not sound([counts], 5)[0].any())
    known = found[~np.isnan(found)]
    assert (np.diff(known) >= 0).all()
    assert ((known >= 0) & (known <= 5)).all()
