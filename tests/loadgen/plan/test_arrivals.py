from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sidelight.loadgen.plan.arrivals import Arrival, expected, schedule

S = 1_000_000_000
POISSON = Arrival(kind="poisson", rate_per_s=50)
rates = st.floats(0.01, 5000)
seeds = st.integers(0, 2**32)
shapes = st.floats(0.05, 20)
levels = st.fixed_dictionaries({"kind": st.sampled_from(["poisson", "uniform"]), "rate_per_s": rates})
gammas = st.fixed_dictionaries({"kind": st.just("gamma"), "rate_per_s": rates, "burstiness": shapes})
ramps = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["poisson", "uniform", "gamma"]),
        "rate_per_s": rates,
        "ramp_to_per_s": rates,
    }
)
bursts = st.fixed_dictionaries(
    {
        "kind": st.just("burst"),
        "rate_per_s": rates,
        "burstiness": shapes,
    }
)
# Everything that draws random numbers or counts, a replay does neither; but for ramps, whose length is the load's.
arrivals = (levels | gammas | bursts).map(lambda fields: Arrival(**fields))


@given(arrivals, seeds, st.integers(0, 200), st.integers(0, 200))
def test_a_longer_schedule_begins_with_the_shorter(arrival: Arrival, seed: int, n: int, more: int):
    """A schedule does not depend on where it is cut."""
    long = schedule(arrival, seed=seed, count=n + more)
    assert schedule(arrival, seed=seed, count=n).tolist() == long[:n].tolist()


@given(arrivals, seeds, st.floats(0, 1))
def test_a_duration_takes_what_lies_strictly_before_it(arrival: Arrival, seed: int, share: float):
    """Cutting by duration is cutting the endless schedule, and a count cuts it further."""
    duration_s = share * 500 / arrival.rate_per_s
    by_time = schedule(arrival, seed=seed, duration_s=duration_s)
    longer = schedule(arrival, seed=seed, count=len(by_time) + 1)
    assert longer[:-1].tolist() == by_time.tolist()
    assert longer[-1] >= math.floor(duration_s * S)
    assert schedule(arrival, seed=seed, count=3, duration_s=duration_s).tolist() == by_time[:3].tolist()


@given(arrivals | ramps.map(lambda fields: Arrival(**fields)), seeds)
def test_offsets_ascend_from_the_start(arrival: Arrival, seed: int):
    """No arrival lies before the start or before its predecessor."""
    offsets = schedule(arrival, seed=seed, count=300)
    assert np.int64 == offsets.dtype
    assert offsets[0] >= 0
    assert (np.diff(offsets) >= 0).all()


@given(rates, seeds)
def test_gamma_arrivals_of_burstiness_one_are_poisson_arrivals(rate: float, seed: int):
    """Not only in distribution: it is the same schedule."""
    gamma = schedule(Arrival(kind="gamma", rate_per_s=rate), seed=seed, count=100)
    assert schedule(Arrival(kind="poisson", rate_per_s=rate), seed=seed, count=100).tolist() == gamma.tolist()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 4.0])
def test_gaps_are_accepted_as_gamma_by_kolmogorov_and_smirnov(burstiness: float, seed: int):
    """Shape `burstiness`, mean 1/rate, which at 1 is the exponential of a Poisson process."""
    arrival = Arrival(kind="gamma", rate_per_s=1, burstiness=burstiness)
    gaps_s = np.diff(schedule(arrival, seed=seed, count=5001)) / S
    assert stats.kstest(gaps_s, stats.gamma(burstiness, scale=1 / burstiness).cdf).pvalue > 0.01


def test_poisson_counts_superpose():
    """Two Poisson schedules laid over each other count per second as one of the summed rate: variance equals mean."""
    both = np.sort(
        np.concatenate(
            [schedule(replace(POISSON, rate_per_s=rate), seed=seed, duration_s=5000) for rate, seed in ((3, 1), (7, 2))]
        )
    )
    counts = np.bincount(both // 10**9, minlength=5000)
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() == pytest.approx(10, rel=0.06)


def test_uniform_arrivals_are_evenly_spaced_from_zero():
    """At 4/s: 0, 250, 500, 750 ms."""
    offsets = schedule(Arrival(kind="uniform", rate_per_s=4), seed=1, count=4)
    assert offsets.tolist() == [0, 250_000_000, 500_000_000, 750_000_000]


@given(ramps, st.floats(0, 2))
def test_the_kth_arrival_of_an_even_ramp_is_where_k_are_expected(fields: dict[str, object], share: float):
    """The time change is exact, to within the rounding to nanoseconds."""
    arrival = Arrival(**(fields | {"kind": "uniform"}))
    count = 1 + math.ceil(share * 200)
    fastest = max(arrival.rate_per_s, arrival.ramp_to_per_s or 0.0)
    for k, offset in enumerate(schedule(arrival, seed=1, count=count).tolist()):
        assert k == pytest.approx(expected(arrival, offset / S, count=count), rel=1e-6, abs=fastest * 1e-9 + 1e-6)


@pytest.mark.parametrize(
    ("start", "end", "at_s", "count"),
    [
        (0.0, 10.0, 10.0, 50.0),  # a triangle
        (0.0, 10.0, 5.0, 12.5),
        (10.0, 2.0, 10.0, 60.0),  # downwards
        (5.0, 5.0, 10.0, 50.0),  # level
        (0.0, 10.0, 12.0, 70.0),  # and then 10/s
    ],
)
def test_a_ramp_promises_the_area_under_its_rate(start: float, end: float, at_s: float, count: float):
    """Within ten seconds from one rate to another."""
    arrival = Arrival(kind="poisson", rate_per_s=start, ramp_to_per_s=end)
    assert count == pytest.approx(expected(arrival, at_s, duration_s=10))


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_a_random_ramp_counts_what_it_promises(kind: str):
    """In each tenth of a ramp from 10/s to 100/s, within four standard deviations of a Poisson count."""
    arrival = Arrival(kind=kind, rate_per_s=10, ramp_to_per_s=100)
    offsets = schedule(arrival, seed=7, duration_s=100)
    edges_s = np.linspace(0, 100, 11)
    counted = np.histogram(offsets / S, edges_s)[0]
    promised = np.diff([expected(arrival, edge, duration_s=100) for edge in edges_s])
    assert (np.abs(counted - promised) < 4 * np.sqrt(promised)).all()


def test_a_ramp_without_a_time_takes_as_long_as_its_requests():
    """110 requests from 1/s to 10/s: that many are expected when it is over."""
    arrival = Arrival(kind="uniform", rate_per_s=1, ramp_to_per_s=10)
    assert expected(arrival, 20.0, count=110) == pytest.approx(110)
    assert schedule(arrival, seed=1, count=110)[-1] / S == pytest.approx(20.0, abs=0.2)


@given(bursts, seeds)
def test_bursts_are_silent_while_off(fields: dict[str, float], seed: int):
    """Every arrival lies in the first of two seconds, to the nanosecond."""
    into_s = schedule(Arrival(**fields), seed=seed, count=300) / S % 2
    assert ((into_s <= 1 + 2e-9) | (2 - into_s < 1e-6)).all()


def test_the_rate_of_bursts_is_their_mean():
    """At 30/s: 60/s while on, nothing while off, 30/s over whole cycles."""
    arrival = Arrival(kind="burst", rate_per_s=30)
    seconds = np.bincount(schedule(arrival, seed=5, duration_s=3000) // S, minlength=3000).reshape(-1, 2)
    assert seconds[:, 0].mean() == pytest.approx(60, rel=0.02)
    assert 0 == seconds[:, 1].sum()
    assert [0, 30, 60, 60, 90] == [expected(arrival, at_s) for at_s in (0, 0.5, 1, 2, 2.5)]


trace = np.array([0, 1 * S, 1 * S, 4 * S])


@pytest.mark.parametrize(
    ("fields", "limits", "expected_s"),
    [
        ({}, {}, [0, 1, 1, 4]),
        ({"speed": 2.0}, {}, [0, 0.5, 0.5, 2]),
        ({"rate_per_s": 1.5}, {}, [0, 0.5, 0.5, 2]),  # three gaps in two seconds
        ({}, {"count": 2}, [0, 1]),
        ({}, {"count": 9}, [0, 1, 1, 4]),
        ({}, {"duration_s": 4.0}, [0, 1, 1]),
        ({"speed": 2.0}, {"duration_s": 4.0, "count": 3}, [0, 0.5, 0.5]),
    ],
)
def test_a_replay_keeps_the_gaps_of_its_trace(fields: dict[str, float], limits: dict[str, float], expected_s: list):
    """As recorded, at a multiple of its speed, or at a mean rate; no more than it has."""
    offsets = schedule(Arrival(kind="replay", trace_ns=trace, **fields), seed=1, **limits)
    assert [round(at_s * S) for at_s in expected_s] == offsets.tolist()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rate_per_s": 0.0}, "must be positive"),
        ({"rate_per_s": -1.0}, "must be positive"),
        ({"rate_per_s": math.nan}, "must be positive"),
        ({"rate_per_s": math.inf}, "must be positive"),
        ({"kind": "gamma", "burstiness": 0.0}, "finite and at least 0.001"),
        ({"kind": "gamma", "burstiness": math.inf}, "finite and at least 0.001"),
        ({"ramp_to_per_s": 0.0}, "must be positive"),
        ({"kind": "burst", "ramp_to_per_s": 5.0}, "cannot ramp"),
        ({"kind": "replay", "trace_ns": trace, "rate_per_s": 0.0, "speed": 0.0}, "must be positive"),
        ({"kind": "replay", "trace_ns": trace[:1]}, "within one instant"),
    ],
)
def test_an_arrival_process_that_makes_no_sense_is_refused(fields: dict[str, object], says: str):
    """What is wrong stands in the message."""
    with pytest.raises(ValueError, match=says):
        Arrival(**({"kind": "poisson", "rate_per_s": 1.0} | fields))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({}, "number of requests or a duration"),
        ({"count": -1}, "must not be negative"),
        ({"duration_s": -0.5}, "must not be negative"),
        ({"duration_s": math.inf}, "must not be negative"),
    ],
)
def test_a_schedule_without_an_end_is_refused(limits: dict[str, float], says: str):
    """Neither backwards nor without a bound."""
    with pytest.raises(ValueError, match=says):
        schedule(Arrival(kind="uniform", rate_per_s=1), seed=1, **limits)


def test_a_ramp_from_standstill_begins_slowly():
    """From 0 to 8/s within 1 s, evenly: the k-th of four at the square root of k/4."""
    arrival = Arrival(kind="uniform", rate_per_s=0, ramp_to_per_s=8)
    assert [round(math.sqrt(k / 4) * S) for k in range(4)] == schedule(arrival, seed=1, count=4).tolist()
    assert [0] == schedule(arrival, seed=1, duration_s=0.1).tolist()
