"""The load at which a share of the requests is beyond a bound."""

from __future__ import annotations

import numpy as np
import pytest

from sidelight.methodology.fits.logistic import share_crossing


def test_the_place_is_right_on_the_mean_and_its_interval_holds_it():
    """1 % at a load of 4, from steps whose shares vary by chance as those of 200 independent requests."""
    loads, held, errors = np.linspace(3, 5.5, 8), 0, []
    truth = 1 / (1 + 99 * np.exp(-3 * (loads - 4)))
    for seed in range(200):
        shares = np.random.default_rng(seed).binomial(200, truth) / 200
        reached = share_crossing(loads, shares, np.full(8, 200.0), 0.01)
        assert reached is not None
        at, low, high = reached
        errors.append(at - 4)
        held += (low or 0) <= 4 <= (high or np.inf)
    assert abs(np.mean(errors)) < 0.05
    assert np.std(errors) < 0.2
    assert 185 <= held <= 199


@pytest.mark.parametrize(
    ("shares", "at"),
    [((0.0, 1.0), 4.0), ((0.0, 0.0, 1.0, 1.0), 4.0)],
)
def test_none_below_and_all_above_has_a_curve(shares: tuple[float, ...], at: float):
    """It is reached between the two."""
    reached = share_crossing(np.linspace(3, 5, len(shares)), shares, np.full(len(shares), 100.0), 0.01)
    assert reached is not None
    assert reached[0] == pytest.approx(at, abs=1)


def test_a_share_that_falls_with_the_load_reaches_nothing():
    """The slope may be 0: no place, and no interval."""
    assert share_crossing([3, 4, 5], [0.05, 0.04, 0.03], [1000.0] * 3, 0.01) is None
    flat = share_crossing([3, 4, 5], [0.01, 0.01, 0.011], [100.0] * 3, 0.02)
    assert flat is not None
    assert flat[1:] == (None, None)
