"""How times grow with the length: exponents and models that are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sidelight.methodology.measures.scaling import AtLength, exponent, models
from sidelight.rundir.stats import Missing

LENGTHS = [1024 * 2**at for at in range(8)]
TRUTHS: dict[str, Callable[[float], float]] = {
    "linear": lambda tokens: 0.07 * tokens,
    "affine": lambda tokens: 30 + 0.07 * tokens,
    "quadratic": lambda tokens: 20 + 0.06 * tokens + 4e-7 * tokens**2,
    "power": lambda tokens: 0.01 * tokens**1.2,
}


def measured(
    time_ms: Callable[[float], float], random: np.random.Generator, *, lengths: list[int] | None = None
) -> list[AtLength]:
    """Twenty requests a length, whose times vary by 5 %."""
    return [
        AtLength(tokens=np.full(20, float(length)), times_ms=time_ms(length) * random.lognormal(0, 0.05, 20))
        for length in lengths or LENGTHS
    ]


@pytest.mark.parametrize("name", TRUTHS)
def test_the_model_that_is_true_is_chosen(name: str):
    """In 95 % of studies; its exponent is within 0.03, and its interval holds it as often as it says."""
    random = np.random.default_rng(8)
    truth = TRUTHS[name]
    slope = float(np.polyfit(np.log(LENGTHS), np.log([truth(length) for length in LENGTHS]), 1)[0])
    chosen, near, held = [], [], []
    for _ in range(60):
        study = measured(truth, random)
        fitted, ends = models(study), exponent(study)
        assert not isinstance(fitted, Missing)
        assert not isinstance(ends, Missing)
        k, low, high = ends
        assert low is not None
        assert high is not None
        chosen.append(fitted[0].name == name)
        near.append(abs(k - slope) <= 0.03)
        held.append(low <= slope <= high)
    assert np.mean(chosen) >= 0.95
    assert np.mean(near) >= 0.95
    assert np.mean(held) >= 0.88


def test_a_fit_is_worded_as_the_draft_does():
    """With the coefficient per token."""
    fitted = models(measured(TRUTHS["linear"], np.random.default_rng(1)))
    assert not isinstance(fitted, Missing)
    assert fitted[0].words.startswith("Linear (R^2 = 0.9")
    assert fitted[0].words.endswith("microseconds per input token")
    assert fitted[0].at([1000])[0] == pytest.approx(70, rel=0.02)


def test_no_coefficient_is_negative():
    """Times that fall with the length are no reason for one."""
    fitted = models(measured(lambda tokens: 500 - 0.003 * tokens, np.random.default_rng(1)))
    assert not isinstance(fitted, Missing)
    assert min(value for model in fitted for value in model.coefficients) >= 0


def test_few_lengths_tell_no_model():
    """Of two there is an exponent, of one none; of single requests it has no interval."""
    random = np.random.default_rng(1)
    two = measured(TRUTHS["linear"], random, lengths=LENGTHS[:2])
    assert isinstance(models(two), Missing)
    assert isinstance(exponent(two[:1]), Missing)
    assert not isinstance(exponent(two), Missing)
    single = [AtLength(tokens=each.tokens[:1], times_ms=each.times_ms[:1]) for each in two]
    ends = exponent(single)
    assert not isinstance(ends, Missing)
    assert ends[1:] == (None, None)


def test_times_without_spread_are_fitted_exactly():
    """A simulated engine may answer alike each time."""
    exact = [
        AtLength(tokens=np.full(3, float(each)), times_ms=np.full(3, TRUTHS["quadratic"](each))) for each in LENGTHS
    ]
    fitted, ends = models(exact), exponent(exact)
    assert not isinstance(fitted, Missing)
    assert fitted[0].name == "quadratic"
    assert not isinstance(ends, Missing)
    assert ends[0] == ends[1] == ends[2]
