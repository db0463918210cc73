from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from correlator.associate import Association, associate, ranks, spearman

SECOND = 10**9


def series(seconds: np.ndarray) -> np.ndarray:
    return (seconds * SECOND).astype(np.int64)


def test_latency_that_follows_the_queue_half_a_second_later_is_found_at_that_lag():
    """Requests wait as the gauge stands half a second later: the lag is found, and its interval excludes zero."""
    rng = np.random.default_rng(7)
    gauge_s = np.arange(0, 60, 0.25)
    gauge = np.cumsum(rng.normal(size=len(gauge_s)))
    at_s = np.sort(rng.uniform(2, 55, 300))
    ttft = 50 + 10 * np.interp(at_s + 0.4, gauge_s, gauge)

    found = associate(
        client="ttft_ms",
        at_ns=series(at_s),
        values=ttft,
        server="requests_waiting",
        gauge_ns=series(gauge_s),
        gauge=gauge,
    )

    assert isinstance(found, Association)
    assert found.lag_s == 0.5
    assert found.rho > 0.95
    assert found.ci95 is not None
    assert 0 < found.ci95[0] < found.rho < found.ci95[1] <= 1


@pytest.mark.parametrize(
    ("count", "gauge", "reason"),
    [
        (5, np.arange(40.0), "only 5 requests have a gauge sample beside them; at least 10 are needed"),
        (20, np.zeros(40), "the gauge never changed"),
    ],
)
def test_no_answer_is_a_reason(count: int, gauge: np.ndarray, reason: str):
    at_s = np.linspace(3, 7, count)

    found = associate(
        client="c",
        at_ns=series(at_s),
        values=np.arange(float(count)),
        server="s",
        gauge_ns=series(np.arange(0, 10, 0.25)),
        gauge=gauge,
    )

    assert reason == found


def test_a_gauge_is_unknown_after_its_last_scrape():
    found = associate(
        client="c",
        at_ns=series(np.linspace(100, 120, 50)),
        values=np.arange(50.0),
        server="s",
        gauge_ns=series(np.arange(0, 10, 0.25)),
        gauge=np.arange(40.0),
    )

    assert isinstance(found, str)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60))
def test_ranks_are_those_of_the_textbook(values: list[int]):
    """One more than the number below it, plus half of its other equals."""
    expected = [1 + sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    assert expected == ranks(np.array(values, dtype=np.float64)).tolist()


@given(st.lists(st.floats(-1e3, 1e3), min_size=10, max_size=60))
def test_a_series_is_in_perfect_rank_agreement_with_any_rising_function_of_itself(values: list[float]):
    x = np.array(values)
    rho = spearman(x, np.arctan(x / 1e4) + x)

    assert rho is None or rho == pytest.approx(1.0)
