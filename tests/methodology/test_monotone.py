"""The monotone fit through noisy levels, and where it reaches a bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.methodology.fits.monotone import crossing, curve

PLACES = st.lists(
    st.tuples(st.floats(0.1, 10), st.floats(-5, 5)), min_size=1, max_size=6, unique_by=lambda pair: pair[0]
)


@given(PLACES, st.floats(0, 1))
def test_a_bound_within_the_fit_is_reached_within_its_levels(places: list[tuple[float, float]], share: float) -> None:
    x, y = np.array(places).T
    sd = np.full(len(x), 0.1)
    knots, heights = curve(x, y, sd)
    bound = min(heights[-1], heights[0] + share * (heights[-1] - heights[0]))
    reached = crossing(x, y, sd, float(bound))
    assert reached is not None
    assert knots[0] <= reached[0] <= knots[-1]


def test_a_bound_at_the_height_of_the_last_level_is_reached_there() -> None:
    x, y = [0.16527636, 0.40973524, 6.65270843], [-3.79626441, -2.11120571, 0.36513248]
    reached = crossing(x, y, [0.1, 0.1, 0.1], y[-1])
    assert reached is not None
    assert reached[0] == pytest.approx(x[-1])


def test_one_level_measured_often_is_one_knot() -> None:
    """Their weighted means differ by rounding alone, which lets some descend."""
    at = 3.558132900000001
    weighted = [(at, 1.0, 0.1), (at, 1.1, 0.3), (at, 1.2, 0.7), (at, 1.3, 0.11), (at, 1.05, 0.13), (6.5, 2.0, 0.1)]
    for count in range(2, 6):
        x, y, sd = zip(*(weighted[:count] + weighted[-1:]), strict=True)
        knots, _ = curve(x, y, sd)
        assert (np.diff(knots) > 0).all()
        assert crossing(x, y, sd, 1.5) is not None
