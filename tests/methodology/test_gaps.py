"""The shape of gaps: modes and tails of known distributions, and what ran in the steps of gaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sidelight.methodology.measures.gaps import Modes, TailShape, modes, tail, with_prefill
from sidelight.rundir.stats import Missing

Draw = Callable[[np.random.Generator, int], np.ndarray]
UNIMODAL: dict[str, Draw] = {
    "log-normal": lambda random, size: random.lognormal(3, 0.2, size),
    "shifted exponential": lambda random, size: 10 + random.exponential(5, size),
    "Pareto": lambda random, size: 10 + 5 * random.pareto(2, size),
}


def decode_and_prefill(random: np.random.Generator, size: int, share: float = 0.2) -> np.ndarray:
    """Gaps of steps about 9 ms, and of those with a prefill in them about 55 ms."""
    return np.where(random.random(size) < share, random.lognormal(4, 0.3, size), random.lognormal(2.2, 0.07, size))


def modes_of(gaps_ms: np.ndarray) -> Modes:
    shape = modes(gaps_ms)
    assert isinstance(shape, Modes)
    return shape


def test_a_single_mode_is_distinguished_from_two():
    """In 95 % of series of either kind."""
    random = np.random.default_rng(5)
    single = [len(modes_of(draw(random, 600)).at_ms) for draw in UNIMODAL.values() for _ in range(8)]
    double = [len(modes_of(decode_and_prefill(random, 600)).at_ms) for _ in range(20)]
    assert np.mean(np.array(single) == 1) >= 0.95
    assert np.mean(np.array(double) == 2) >= 0.95


def test_modes_are_where_the_gaps_are():
    """With the share of the gaps about each, and the valley between them."""
    shape = modes_of(decode_and_prefill(np.random.default_rng(3), 4000))
    assert shape.at_ms == pytest.approx((9.0, 55.0), rel=0.15)
    assert shape.shares == pytest.approx((0.8, 0.2), abs=0.02)
    assert shape.p < 0.01
    assert list(shape.of(np.array([8.0, 60.0]))) == [0, 1]


def test_gaps_that_drift_have_no_modes_of_their_own():
    """A load that is low for a while, then high, is two independent values: the same step seen often is one."""
    random = np.random.default_rng(2)
    levels = np.repeat(random.permutation([8.0, 8.5, 11.0, 11.5]), 2000)
    assert len(modes_of(levels * random.lognormal(0, 0.02, len(levels))).at_ms) == 1


def test_few_or_equal_gaps_have_no_shape():
    """It is missing, with a reason."""
    for gaps_ms in (np.empty(0), np.full(30, 9.0), np.full(1000, 9.0), np.zeros(500)):
        for shape in (modes(gaps_ms), tail(gaps_ms)):
            assert isinstance(shape, Missing)
            assert shape.reason


def characters(draw: Draw, *, size: int = 4000, series: int = 20) -> list[str]:
    random = np.random.default_rng(10)
    shapes = [tail(draw(random, size)) for _ in range(series)]
    return [shape.character for shape in shapes if isinstance(shape, TailShape)]


def test_exponential_tails_are_distinguished_from_heavy_ones():
    """In 95 % of series with 200 gaps beyond P95; and from those that end."""
    assert characters(UNIMODAL["shifted exponential"], series=100).count("exponential") >= 95
    assert characters(UNIMODAL["Pareto"]).count("heavy") >= 19
    assert characters(lambda random, size: random.uniform(5, 9, size)).count("light") >= 19


def test_gaps_of_one_batch_count_once():
    """Each step seen by sixteen requests says no more than once: the interval is as wide as that of the steps."""
    steps = 10 + np.random.default_rng(4).exponential(5, 4000)
    alone, repeated = tail(steps), tail(np.repeat(steps, 16))
    assert isinstance(alone, TailShape)
    assert isinstance(repeated, TailShape)
    assert repeated.effective == pytest.approx(alone.effective, rel=0.2)
    assert repeated.ci95[1] - repeated.ci95[0] >= 0.8 * (alone.ci95[1] - alone.ci95[0])


def test_a_prefill_ran_where_another_request_began():
    """Tokens of one step come in any order; the request's own first token is not in its first gap."""
    begin, end = np.array([0, 10, 20, 80, 90]) * 1_000_000, np.array([10, 20, 80, 90, 100]) * 1_000_000
    firsts = np.array([0, 81_000_000, 79_500_000, -1])
    assert with_prefill(begin, end, firsts).tolist() == [False, False, True, False, False]
    assert not with_prefill(begin[:0], end[:0], firsts).size
