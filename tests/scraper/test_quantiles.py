"""The linear estimate is Prometheus' own, and the bracket is never wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scraper.quantiles import bracket, linear

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


observations = st.lists(st.one_of(st.floats(0, 8), st.sampled_from([0.0, 0.1, 0.5, 5.0])), min_size=1, max_size=60)
fractions = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(observations, fractions)
def test_bracket_holds_the_truth_and_the_estimate(values: list[float], qs: list[float]):
    """numpy's quantile of the observations lies in the bracket, so does the estimate, which never decreases in q."""
    buckets = np.searchsorted(BOUNDS, values, side="left")
    counts = np.zeros((len(values), len(BOUNDS)))
    counts[np.arange(len(values)), buckets] = 1
    qs = sorted(qs)
    edges = bracket(BOUNDS, counts, qs)
    truth = np.quantile(values, qs)
    assert (edges[:, 0] <= truth + 1e-12).all()
    assert (truth <= edges[:, 1] + 1e-12).all()
    read = linear(BOUNDS, counts, qs)
    assert (edges[:, 0] <= read).all()
    assert (read <= edges[:, 1]).all()
    assert (np.diff(read) >= 0).all()


@given(st.lists(st.floats(0, 5), min_size=5, max_size=5), fractions)
def test_fractional_counts_keep_the_bracket(counts: list[float], qs: list[float]):
    """The estimate lies in the bracket for fractional counts too; neither exists without observations."""
    edges = bracket(BOUNDS, [counts], qs)
    read = linear(BOUNDS, [counts], qs)
    assert (np.isnan(read) == np.isnan(edges[:, 0])).all()
    known = ~np.isnan(read)
    assert (edges[known, 0] <= read[known]).all()
    assert (read[known] <= edges[known, 1]).all()


def test_bracket_of_the_ends():
    """Beyond the last bound the bracket is open above; below a negative first bound, open below."""
    assert [[2.0, INF]] == bracket([1, 2, INF], [[0, 0, 3]], [0.5]).tolist()
    assert [[-INF, -1.0]] == bracket([-1, 2, INF], [[3, 0, 0]], [0.5]).tolist()
    assert [[0.0, 0.0]] == bracket([0, 2, INF], [[3, 0, 0]], [0.5]).tolist()
