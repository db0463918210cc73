from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import KINDS, offsets_ns

rates = st.floats(0.01, 5000)
seeds = st.integers(0, 2**32)


@given(st.sampled_from(KINDS), rates, seeds, st.integers(0, 200), st.integers(0, 200))
def test_a_longer_schedule_begins_with_the_shorter(kind: str, rate: float, seed: int, n: int, more: int):
    """A schedule does not depend on where it is cut."""
    long = offsets_ns(kind, rate, seed=seed, count=n + more)
    assert offsets_ns(kind, rate, seed=seed, count=n).tolist() == long[:n].tolist()


@given(st.sampled_from(KINDS), st.floats(0.5, 500), seeds, st.floats(0, 20))
def test_a_duration_takes_what_lies_strictly_before_it(kind: str, rate: float, seed: int, duration_s: float):
    """Cutting by duration is cutting the endless schedule, and a count cuts it further."""
    by_time = offsets_ns(kind, rate, seed=seed, duration_s=duration_s)
    longer = offsets_ns(kind, rate, seed=seed, count=len(by_time) + 1)
    assert longer[:-1].tolist() == by_time.tolist()
    assert longer[-1] >= round(duration_s * 1e9)
    assert offsets_ns(kind, rate, seed=seed, count=3, duration_s=duration_s).tolist() == by_time[:3].tolist()


@given(st.sampled_from(KINDS), rates, seeds)
def test_offsets_ascend_from_the_start(kind: str, rate: float, seed: int):
    """No arrival lies before the start or before its predecessor."""
    offsets = offsets_ns(kind, rate, seed=seed, count=100)
    assert np.int64 == offsets.dtype
    assert offsets[0] >= 0
    assert (np.diff(offsets) >= 0).all()


def test_poisson_gaps_have_the_moments_of_an_exponential():
    """Mean and standard deviation of 200,000 gaps at 50/s lie within 1 % of 20 ms."""
    gaps_ms = np.diff(offsets_ns("poisson", 50, seed=42, count=200_001)) / 1e6
    assert gaps_ms.mean() == pytest.approx(20, rel=0.01)
    assert gaps_ms.std() == pytest.approx(20, rel=0.01)


def test_poisson_counts_superpose():
    """Two Poisson schedules laid over each other count per second as one of the summed rate: variance equals mean."""
    both = np.sort(
        np.concatenate([offsets_ns("poisson", rate, seed=seed, duration_s=5000) for rate, seed in ((3, 1), (7, 2))])
    )
    counts = np.bincount(both // 10**9, minlength=5000)
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() == pytest.approx(10, rel=0.06)


def test_uniform_arrivals_are_evenly_spaced_from_zero():
    """At 4/s: 0, 250, 500, 750 ms."""
    assert offsets_ns("uniform", 4, seed=1, count=4).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]


def test_seeds_differ():
    """Another seed is another schedule."""
    first, second = (offsets_ns("poisson", 10, seed=seed, count=5).tolist() for seed in (1, 2))
    assert first != second


@pytest.mark.parametrize(
    ("kind", "rate", "limits", "says"),
    [
        ("poison", 1.0, {"count": 1}, "poisson, uniform"),
        ("poisson", 0.0, {"count": 1}, "must be positive"),
        ("poisson", -1.0, {"count": 1}, "must be positive"),
        ("poisson", float("nan"), {"count": 1}, "must be positive"),
        ("poisson", float("inf"), {"count": 1}, "must be positive"),
        ("poisson", 1.0, {}, "number of requests or a duration"),
        ("poisson", 1.0, {"count": -1}, "must not be negative"),
        ("uniform", 1.0, {"duration_s": -0.5}, "must not be negative"),
    ],
)
def test_bad_arguments_are_named(kind: str, rate: float, limits: dict[str, float], says: str):
    """What is wrong stands in the message."""
    with pytest.raises(ValueError, match=says):
        offsets_ns(kind, rate, seed=1, **limits)
