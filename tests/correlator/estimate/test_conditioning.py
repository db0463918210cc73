"""What conditioning on sums says of how sure it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.correlator.estimate.conditioning import Problem, solve

seconds = st.floats(0.01, 1.0)


@given(seconds, seconds, st.floats(0.02, 0.5))
def test_of_two_whose_sum_is_known_neither_is_surer_than_the_other(first: float, other: float, edge: float):
    """Also where the box holds one of them at its edge: what is then left for the other is not surer."""
    prefill = np.array([first, other])
    solution = solve(
        Problem(
            mean=np.column_stack((np.full(2, 2.0), prefill, np.full(2, 0.01))),
            variance=np.tile([1.0, 0.01, 1e-4], (2, 1)),
            low=np.zeros((2, 3)),
            high=np.array([[9.0, edge, 9.0], [9.0, 9.0, 9.0]]),
            wait=2.0 + prefill + 0.01,
            wait_variance=np.full(2, 1e-6),
            interval=np.array([0, 0]),
            sums=np.array([[4.0, prefill.sum()]]),
            noise=np.zeros((1, 2)),
        )
    )

    assert prefill.sum() == pytest.approx(solution.value[:, 1].sum())
    assert solution.sd[0, 1] == pytest.approx(solution.sd[1, 1], rel=1e-6)
    assert solution.sd[0, 1] > 1e-3
