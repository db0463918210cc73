"""Rank correlation of latency and load: found at its lag, separated from other loads, with an interval that covers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from autoregressive import autoregressive
from engine_series import engine, requests
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from scipy.stats import spearmanr

from sidelight.correlator.statistics.association import LAGS_S, Association, associations, ranks

FEW = "only {} requests with both a value and a sample; at least 10 are needed"


def associated(sent: Any, values: np.ndarray, *engines: Any, client: str = "ttft_ms") -> dict[str, Association]:
    """The associations of one measure, by quantity."""
    return {association.server: association for association in associations(sent, {client: values}, engines)}


def walk(seed: int, size: int) -> np.ndarray:
    return lifted(np.cumsum(np.random.default_rng(seed).normal(size=size)))


def lifted(values: np.ndarray) -> np.ndarray:
    """The same, raised so that the least is 0."""
    lifted_values: np.ndarray = values - values.min()
    return lifted_values


def test_latency_that_follows_the_queue_half_a_second_later_is_found_at_that_lag():
    """Requests wait as the gauge stands half a second later: the lag is found, and its interval excludes zero."""
    gauge_s = np.arange(0, 60, 0.25)
    gauge = walk(7, len(gauge_s))
    at_s = np.sort(np.random.default_rng(7).uniform(2, 55, 300))
    ttft = 50 + 10 * np.interp(at_s + 0.4, gauge_s, gauge)

    association = associated(requests(at_s), ttft, engine(gauge_s, waiting=gauge))["requests_waiting"]

    assert association.lag_s == 0.5
    assert association.rho > 0.95
    assert 0 < association.ci95[0] < association.rho < association.ci95[1] <= 1
    assert association.rho_lag0 < association.rho
    assert (300, "one", UNSET) == (association.pairs, association.combined, association.missing)
    assert 0 < association.blocks < 300


def test_without_lag_the_pairs_are_those_of_the_last_scrape_before_submission():
    gauge_s = np.arange(0, 100, 1.0)
    gauge = np.random.default_rng(1).integers(0, 9, len(gauge_s)).astype(float)
    at_s = np.random.default_rng(2).uniform(0, 99, 80)
    ttft = np.random.default_rng(3).normal(size=80)

    association = associated(requests(at_s), ttft, engine(gauge_s, waiting=gauge))["requests_waiting"]

    assert spearmanr(ttft, gauge[at_s.astype(int)]).statistic == pytest.approx(association.rho_lag0)


def test_lags_are_from_eight_seconds_before_to_eight_after():
    assert (-8.0, 8.0, 33) == (LAGS_S[0], LAGS_S[-1], len(LAGS_S))
    assert 0.0 in LAGS_S


def test_requests_may_stand_in_any_order():
    gauge_s, at_s = np.arange(0, 60, 0.5), np.random.default_rng(1).uniform(2, 55, 100)
    shown = engine(gauge_s, waiting=walk(1, len(gauge_s)))
    ttft = walk(2, 100)
    mixed = np.random.default_rng(4).permutation(100)

    assert associated(requests(at_s), ttft, shown) == associated(requests(at_s[mixed]), ttft[mixed], shown)


def test_what_moves_latency_only_through_the_queue_has_no_partial_correlation():
    """Running follows waiting, and latency only waiting: with waiting given, running has nothing left to say."""
    random = np.random.default_rng(11)
    gauge_s = np.arange(0, 2000, 0.5)
    waiting = random.normal(size=len(gauge_s))
    running = waiting + random.normal(size=len(gauge_s))
    at_s = gauge_s[20:-20] + 0.1
    ttft = waiting[20:-20] + 0.5 * random.normal(size=len(at_s))

    by_quantity = associated(requests(at_s), ttft, engine(gauge_s, waiting=lifted(waiting), running=lifted(running)))

    assert by_quantity["requests_running"].rho_lag0 == pytest.approx(0.62, abs=0.05)
    assert by_quantity["requests_running"].partial_rho == pytest.approx(0.0, abs=0.06)
    assert ("requests_waiting",) == by_quantity["requests_running"].given
    assert by_quantity["requests_waiting"].partial_rho == pytest.approx(0.8, abs=0.04)
    low, high = by_quantity["requests_running"].ci95_partial or (1.0, 1.0)
    assert low < 0 < high
    low, high = by_quantity["requests_waiting"].ci95_partial or (0.0, 0.0)
    assert 0.75 < low < 0.8 < high < 0.85


@pytest.mark.parametrize(
    ("client", "given"), [("ttft_ms", ("input_tokens",)), ("e2e_ms", ("input_tokens", "output_tokens"))]
)
def test_tokens_are_given_too(client: str, given: tuple[str, ...]):
    """How long the reply became says nothing of its first token."""
    random = np.random.default_rng(11)
    at_s = np.arange(10, 90, 0.25)
    tokens = random.integers(1, 1000, len(at_s))
    sent = replace(requests(at_s), input_tokens=tokens, output_tokens=tokens[::-1].copy())
    shown = engine(np.arange(100), waiting=lifted(random.normal(size=100)))

    assert given == associated(sent, random.normal(size=len(at_s)), shown, client=client)["requests_waiting"].given


def test_two_gauges_that_say_the_same_have_no_partial_correlation():
    """Nothing is left of one once the other is given: unknown, not zero."""
    gauge_s, at_s = np.arange(100.0), np.arange(10, 90, 0.5)
    gauge = walk(3, 100)
    by_quantity = associated(requests(at_s), walk(4, len(at_s)), engine(gauge_s, waiting=gauge, running=2 * gauge))

    assert by_quantity["requests_waiting"].rho is not None
    assert (None, None) == (by_quantity["requests_waiting"].partial_rho, by_quantity["requests_waiting"].ci95_partial)


@pytest.mark.parametrize(
    ("count", "gauge", "values", "reason"),
    [
        (5, np.arange(40.0), np.arange(5.0), FEW.format(5)),
        (20, np.zeros(40), np.arange(20.0), "the quantity never changed"),
        (20, np.arange(40.0), np.zeros(20), "the client measure never changed"),
        (20, np.full(40, np.nan), np.arange(20.0), FEW.format(0)),
        (20, np.arange(40.0), np.full(20, np.nan), FEW.format(0)),
    ],
)
def test_no_answer_is_a_reason(count: int, gauge: np.ndarray, values: np.ndarray, reason: str):
    shown = engine(np.arange(0, 10, 0.25), waiting=gauge)
    association = associated(requests(np.linspace(3, 7, count)), values, shown)["requests_waiting"]

    assert reason == association.missing
    assert (None, None, None, 0) == (association.rho, association.rho_lag0, association.ci95, association.blocks)


def test_every_measure_is_correlated_with_every_quantity():
    shown = engine(np.arange(0, 10, 0.25), waiting=walk(1, 40))
    measures = {"ttft_ms": walk(1, 20), "e2e_ms": walk(2, 20)}
    table = associations(requests(np.linspace(3, 7, 20)), measures, [shown])

    assert 10 == len({(association.client, association.server) for association in table})


def test_no_requests_are_no_error():
    by_quantity = associated(requests([]), np.zeros(0), engine(np.arange(0, 10), waiting=np.arange(10)))
    assert (by_quantity["requests_waiting"].missing or "").startswith("only 0 requests")


def test_a_lag_that_loses_its_pairs_is_not_the_best():
    """A dozen early requests agree with the gauge 8 s later perfectly, but the run had ended by then for the others."""
    gauge_s = np.arange(0, 20, 0.5)
    random = np.random.default_rng(9)
    gauge = random.permutation(len(gauge_s)).astype(float)
    at_s = np.concatenate([np.arange(0, 11.5, 1.0), np.arange(11.6, 19.4, 0.1)])
    ttft = random.normal(size=len(at_s))
    ttft[:12] = gauge[((at_s[:12] + 8) / 0.5).astype(int)]

    association = associated(requests(at_s), ttft, engine(gauge_s, waiting=lifted(gauge)))["requests_waiting"]

    assert association.rho < 0.9
    assert 8 != association.lag_s


@pytest.mark.parametrize(("rho", "phi"), [(0.0, 0.9), (0.7, 0.9), (0.5, 0.95), (0.0, 0.0)])
def test_intervals_cover_what_they_claim(rho: float, phi: float):
    """60 runs of 400 requests whose neighbours resemble each other: the true rank correlation is inside in nine of ten,
    and where neighbours do not resemble each other the interval is at most a quarter wider than the textbook's.
    """
    truth = 6 / math.pi * math.asin(rho / 2)
    at_s = np.arange(10, 410) + 0.5
    covered, widths = [], []
    for seed in range(60):
        random = np.random.default_rng(np.random.SeedSequence(seed))
        gauge = autoregressive(random, 420, phi)
        ttft = rho * gauge[10:410] + math.sqrt(1 - rho * rho) * autoregressive(random, 400, phi)
        association = associated(requests(at_s), ttft, engine(np.arange(420), waiting=lifted(gauge)))[
            "requests_waiting"
        ]
        covered.append(association.ci95_lag0[0] <= truth <= association.ci95_lag0[1])
        widths.append(association.ci95_lag0[1] - association.ci95_lag0[0])

    assert np.mean(covered) >= 0.88
    assert phi > 0 or np.mean(widths) < 1.25 * 2 * 1.96 / math.sqrt(400)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60))
def test_ranks_are_those_of_the_textbook(values: list[int]):
    """One more than the number below it, plus half of its other equals."""
    expected = [1 + sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    assert expected == ranks(np.array(values, dtype=np.float64)).tolist()


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 30)), min_size=20, max_size=60))
def test_rank_correlation_is_the_same_of_any_rising_function(pairs: list[tuple[int, int]]):
    """Of either side, at every lag: seconds or their cube, waiting requests or their root."""
    table = np.array(pairs, dtype=np.float64)
    at_s = np.arange(10, 10 + len(table)) + 0.5
    gauge = np.resize(table[:, 1], len(table) + 20)
    plain = associated(requests(at_s), table[:, 0], engine(np.arange(len(gauge)), waiting=gauge))
    bent = associated(requests(at_s), table[:, 0] ** 3, engine(np.arange(len(gauge)), waiting=np.sqrt(gauge)))
    first, second = plain["requests_waiting"], bent["requests_waiting"]

    assert (first.lag_s, first.missing) == (second.lag_s, second.missing)
    assert first.rho == pytest.approx(second.rho)
    assert first.rho_lag0 == pytest.approx(second.rho_lag0)
    assert first.partial_rho == pytest.approx(second.partial_rho)


def test_a_correlation_that_is_perfect_has_an_interval_up_to_it():
    gauge_s, at_s = np.arange(100.0), np.arange(10, 90) + 0.5
    gauge = np.random.default_rng(3).permutation(100).astype(float)
    association = associated(requests(at_s), gauge[10:90], engine(gauge_s, waiting=lifted(gauge)))["requests_waiting"]

    assert 1.0 == pytest.approx(association.rho_lag0)
    assert 0.999 < association.ci95_lag0[0] <= association.ci95_lag0[1] <= 1.0
