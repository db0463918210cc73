"""Intervals of quantiles: how often they hold the truth, and what values without much to say get."""

from __future__ import annotations

import numpy as np
import pytest
from autoregressive import autoregressive
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from queues import served, took
from scipy.special import ndtri

from sidelight.correlator.statistics import intervals
from sidelight.correlator.statistics.intervals import (
    LEAST_TAIL,
    QuantileInterval,
    autocorrelation_time,
    mean,
    of_sorted,
    quantile,
    quantiles,
    ratio,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)
QUANTILES = st.floats(0.01, 0.99)


def ends(interval: QuantileInterval) -> tuple[float, float]:
    """The ends of an interval that has both."""
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.high


@pytest.mark.parametrize(("phi", "size"), [(0.0, 4000), (0.5, 8000), (0.9, 20_000)])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_hold_the_truth_as_often_as_they_say(phi: float, size: int, level: float):
    """Of independent values, and of those that resemble their neighbours, of which it is sure to say too little."""
    random = np.random.default_rng(3)
    series = [autoregressive(random, size, phi) for _ in range(100)]
    held = [
        low <= float(ndtri(q)) <= high
        for q in (0.5, 0.9)
        for low, high in (ends(quantile(values, q, level)) for values in series)
    ]
    assert level - 0.05 <= np.mean(held) <= level + (0.2 if phi else 0.1)


def test_requests_that_queue_together_count_as_fewer():
    """At 80 % load: taken for independent, as many intervals miss the truth as hold it."""

    def times_s(seed: int, size: int) -> np.ndarray:
        random = np.random.default_rng([7, seed])
        arrived_s = np.cumsum(random.exponential(1 / 6.4, size))
        queue = served(arrived_s, took(random, size, 1.0, 1.0), servers=8)
        return (queue.ended_s - queue.arrived_s)[500:]

    truth = float(np.median(times_s(0, 200_000)))
    runs = [times_s(seed, 8500) for seed in range(1, 41)]
    held, shuffled = [], []
    for values in runs:
        low, high = ends(quantile(values, 0.5))
        held.append(low <= truth <= high)
        low, high = ends(quantile(np.random.default_rng(1).permutation(values), 0.5))
        shuffled.append(low <= truth <= high)
    assert np.mean(held) >= 0.85
    assert np.mean(shuffled) <= 0.6


def test_a_short_run_near_saturation_is_not_surer_than_it_can_be():
    """Of 3,000 requests at 90 % load, whose tau is hundreds: few have an interval, and few of all have a wrong one."""
    random = np.random.default_rng(11)

    def times_s(size: int) -> np.ndarray:
        arrived_s = np.cumsum(random.exponential(1 / 7.2, size))
        queue = served(arrived_s, took(random, size, 1.0, 1.0), servers=8)
        return (queue.ended_s - queue.arrived_s)[5000:]

    truth = float(np.median(times_s(400_000)))
    intervals = [quantile(times_s(8000), 0.5) for _ in range(40)]
    wrong = [each.is_known and not (each.low or 0) <= truth <= (each.high or 0) for each in intervals]
    assert sum(wrong) <= 5
    assert np.median([each.needed_n for each in intervals]) > 3000
    bounds = [each.low for each in intervals if not each.is_known and each.low is not None]
    assert np.mean(np.array(bounds) <= truth) >= 0.9


@given(VALUES, QUANTILES)
def test_an_interval_lies_about_its_estimate(values: list[float], q: float):
    """And its ends are values of the sample; without enough values it has one end at most."""
    interval = quantile(values, q)
    assert interval.estimate == np.quantile(values, q)
    low, high = interval.low, interval.high
    assert low is None or (low <= interval.estimate and (low in values or low == interval.estimate))
    assert high is None or (high >= interval.estimate and (high in values or high == interval.estimate))
    assert low is None or (1 - q) ** (len(values) / interval.tau) <= 0.025
    assert high is None or q ** (len(values) / interval.tau) <= 0.025
    assert interval.is_known == (len(values) >= interval.needed_n)
    assert interval.is_known == (round(interval.effective_tail, 6) >= LEAST_TAIL)


@given(VALUES, QUANTILES)
def test_a_higher_level_is_never_narrower(values: list[float], q: float):
    """The interval of 90 % lies in that of 99 %, which may have no end where that has one."""
    inner, outer = quantile(values, q, 0.9), quantile(values, q, 0.99)
    assert outer.low is None or (inner.low is not None and outer.low <= inner.low)
    assert outer.high is None or (inner.high is not None and outer.high >= inner.high)


@given(VALUES, QUANTILES)
def test_units_do_not_matter(values: list[float], q: float):
    """Doubling all values doubles the interval: it depends on their order alone."""
    once, twice = quantile(values, q), quantile([2 * value for value in values], q)
    assert once.tau == twice.tau
    for name in ("estimate", "low", "high"):
        value = getattr(once, name)
        assert getattr(twice, name) == (None if value is None else pytest.approx(2 * value))


def test_too_few_values_give_a_bound():
    """Of a p99 a lower one, of a p1 an upper one; and how many values it takes."""
    values = np.random.default_rng(1).exponential(size=1000)
    high, low = quantile(values, 0.99), quantile(values, 0.01)
    assert high.low is not None
    assert high.high is None
    assert low.low is None
    assert low.high is not None
    assert high.needed_n == pytest.approx(2000 * high.tau, abs=1)
    assert quantile(np.arange(200) % 2, 0.9).needed_n == 200


@pytest.mark.parametrize(("size", "q", "has_low"), [(1, 0.5, False), (5, 0.5, False), (6, 0.5, True), (1, 0.95, False)])
def test_the_least_value_is_a_bound_only_where_that_is_sure(size: int, q: float, has_low: bool):
    """It is below the median of where it comes from in half of all cases, if it is the only one."""
    assert (quantile([1.0] * size, q).low is not None) == has_low


def test_equal_values_have_an_interval_without_width():
    """Nothing about them varies."""
    interval = quantile([5.0] * 100, 0.5)
    assert (interval.low, interval.estimate, interval.high, interval.tau) == (5.0, 5.0, 5.0, 1.0)


def test_no_values_say_how_many_are_needed():
    """Nothing else is known."""
    interval = quantile([], 0.99)
    assert (interval.estimate, interval.low, interval.high, interval.needed_n) == (None, None, None, 2000)


@pytest.mark.parametrize(
    ("values", "q", "level"),
    [([1.0, np.nan], 0.5, 0.95), ([np.inf], 0.5, 0.95), ([1.0], 0.0, 0.95), ([1.0], 1.0, 0.95), ([1.0], 0.5, 1.0)],
)
def test_what_has_no_quantile_is_refused(values: list[float], q: float, level: float):
    """A missing value, and quantiles and levels that are none."""
    with pytest.raises(ValueError, match="must"):
        quantile(values, q, level)


def test_the_autocorrelation_time_of_a_long_series_is_taken_from_stretches_of_it():
    """That of an AR(1) is (1 + phi) / (1 - phi), of 2,000 values and of 200,000."""
    random = np.random.default_rng(2)
    assert autocorrelation_time(autoregressive(random, 20_000, 0.8)) == pytest.approx(9, rel=0.2)
    assert autocorrelation_time(autoregressive(random, 500_000, 0.8)) == pytest.approx(9, rel=0.1)


def test_a_long_series_is_looked_at_part_by_part(monkeypatch: pytest.MonkeyPatch):
    """With the same intervals as at once: of 300,000 values, many of them equal, in parts of 10,000 and the rest."""
    values = np.round(autoregressive(np.random.default_rng(3), 300_007, 0.9), 1)
    whole = quantiles(values, [0.5, 0.9, 0.99])
    monkeypatch.setattr(intervals, "_AT_ONCE", 10_000)
    for at_once, in_parts in zip(whole, quantiles(values, [0.5, 0.9, 0.99]), strict=True):
        assert asdict(in_parts) == pytest.approx(asdict(at_once), rel=1e-9)


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says():
    """Of values that resemble their neighbours."""
    random = np.random.default_rng(5)
    means = [mean(autoregressive(random, 4000, 0.8)) for _ in range(200)]
    held = [low is not None and high is not None and low <= 0 <= high for _, low, high in means]
    assert 0.9 <= np.mean(held) <= 0.99


def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says():
    """The mean wait in a queue at 70 % load, by counts and sums of 240 stretches; nothing of waits that are all 0."""
    random = np.random.default_rng(17)
    runs = []
    for _ in range(200):
        arrived_s = np.cumsum(random.exponential(1 / 0.7, 2000))
        waits_s = served(arrived_s, took(random, 2000, 1.0, 0.5), servers=1).begun_s - arrived_s
        places = (arrived_s / arrived_s[-1] * 239.999).astype(np.int64)
        runs.append((np.bincount(places, waits_s, 240), np.bincount(places, minlength=240)))
    truth = np.mean([sums.sum() / counts.sum() for sums, counts in runs])
    intervals = [ratio(sums, counts) for sums, counts in runs]
    assert 0.86 <= np.mean([ends is not None and ends[0] <= truth <= ends[1] for ends in intervals]) <= 0.94
    sums, counts = runs[0]
    assert [None] * 3 == [ratio(0 * sums, counts), ratio(sums[:2], counts[:2]), ratio(sums, 0 * counts)]


def test_the_mean_of_two_values_has_no_interval():
    """Two values do not show how they vary."""
    assert mean([1.0, 3.0]) == (2.0, None, None)


def test_a_lone_bound_is_of_tau_as_it_is_estimated():
    """It lies nearer to the percentile than by the tau that is surely enough, and holds as often as it says."""
    runs = [autoregressive(np.random.default_rng(seed), 1000, 0.9) for seed in range(200)]
    intervals = [quantile(values, 0.99) for values in runs]
    assert all(interval.high is None for interval in intervals)
    held = [interval.low is None or interval.low <= float(ndtri(0.99)) for interval in intervals]
    assert np.mean(held) >= 0.95
    interval, surely = intervals[0], of_sorted(np.sort(runs[0]), 0.99, intervals[0].tau)
    assert interval.low is not None
    assert surely.low is not None
    assert surely.low < interval.low < interval.estimate
