"""The steady part of a load: what is left out of it, what was served in it, and how sure that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from queues import Served, loaded

from sidelight.correlator.load.steady import (
    SteadyWindow,
    in_flight,
    is_steady,
    little_residual,
    mser5,
    rate,
    steady_throughput,
    steady_window,
    token_arrivals,
    von_neumann_ratio,
)

S = 1_000_000_000


def stamps_ns(moments_s: np.ndarray) -> np.ndarray:
    """Seconds as stamps."""
    return np.rint(moments_s * S).astype(np.int64)


def window_of(queue: Served, seconds: float) -> SteadyWindow:
    """The steady window of a load from moment 0 on."""
    return steady_window(0, round(seconds * S), stamps_ns(queue.ended_s))


def test_the_first_tenth_and_the_drain_are_left_out():
    """Of a load of 100 s whose last requests end 20 s later."""
    window = steady_window(5 * S, 105 * S, np.arange(5 * S, 125 * S, S // 2))
    assert (window.start_ns, window.end_ns, window.left_out, window.enough) == (15 * S, 105 * S, 0.1, True)
    assert window.duration_s == 90


def test_a_long_ramp_is_too_much_for_a_tenth():
    """Completions came five times as slowly for the first 40 s of 100."""
    ended_s = np.concatenate([np.arange(0.5, 40, 0.5), np.arange(40, 100, 0.1)])
    window = steady_window(0, 100 * S, stamps_ns(ended_s))
    assert window.enough is False
    assert window.mser5_left_out == pytest.approx(0.4, abs=0.03)


def test_a_steady_load_needs_no_more_than_its_first_tenth():
    """Of queues of five minutes, nearly always."""
    enough = [window_of(loaded(0.8, seconds=300, seed=seed), 300).enough for seed in range(20)]
    assert enough.count(True) >= 18


@pytest.mark.parametrize("count", [0, 1, 49])
def test_mser_does_not_judge_a_few_completions(count: int):
    """Fewer than ten batches of five."""
    assert steady_window(0, 100 * S, np.arange(count) * S).enough is None


@pytest.mark.parametrize("end_ns", [0, -5])
def test_a_load_of_one_moment_has_no_rate(end_ns: int):
    """Its window has no length."""
    window = steady_window(0, end_ns, [])
    assert (window.duration_s, window.enough) == (0, None)
    assert rate([0], 1, window) == (None, None)
    assert is_steady([0], 1, window) is None
    assert in_flight([0], [1], window) is None
    assert little_residual([0], [1], window) is None


def test_mser_is_the_minimum_of_its_definition():
    """Variance of what is left over its number, over batches of five, the last five batches aside."""
    random = np.random.default_rng(4)
    values = random.exponential(size=203) + np.where(np.arange(203) < 60, 3.0, 0.0)
    means = values[:200].reshape(40, 5).mean(axis=1)
    errors = [((means[d:] - means[d:].mean()) ** 2).sum() / (40 - d) ** 2 for d in range(36)]
    assert mser5(values) == 5 * int(np.argmin(errors)) == 60
    assert mser5([1.0] * 9) == 0


@pytest.mark.parametrize("load", [0.5, 0.8, 1.5])
def test_the_interval_of_a_rate_holds_it_as_often_as_it_says(load: float):
    """Of queues below and above their capacity, at five minutes."""
    truth, held = 6.0 * min(1, load), 0
    for seed in range(100):
        queue = loaded(load, seconds=300, seed=seed)
        per_s, ends = rate(stamps_ns(queue.ended_s), 1, window_of(queue, 300))
        assert per_s is not None
        assert ends is not None
        held += ends[0] <= truth <= ends[1]
    assert 90 <= held <= 99


def test_the_rate_of_a_load_counts_neither_ramp_nor_drain():
    """Requests of 4 s, ten a second for a minute: over the whole time it would be 6 % less."""
    begun_s = np.arange(0, 60, 0.1)
    window = steady_window(0, 60 * S, stamps_ns(begun_s + 4))
    per_s, ends = rate(stamps_ns(begun_s + 4), 1, window)
    assert per_s == pytest.approx(10, rel=0.01)
    assert ends is not None
    assert ends[0] <= 10 <= ends[1]
    assert in_flight(stamps_ns(begun_s), stamps_ns(begun_s + 4), window) == pytest.approx(40, rel=0.01)
    assert little_residual(stamps_ns(begun_s), stamps_ns(begun_s + 4), window) == pytest.approx(0, abs=0.01)


@given(st.lists(st.tuples(st.integers(-10, 120), st.floats(0, 1e6)), max_size=60))
def test_a_rate_is_what_came_over_the_time(events: list[tuple[int, float]]):
    """What came outside of the window does not count; the interval lies about the rate."""
    window = SteadyWindow(start_ns=10 * S, end_ns=100 * S, left_out=0.1, enough=None)
    at_s, amounts = [at for at, _ in events], [amount for _, amount in events]
    per_s, ends = rate(np.array(at_s, np.int64) * S, amounts, window)
    inside = [amount for at, amount in events if 10 < at <= 100]
    assert per_s == pytest.approx(sum(inside) / 90)
    assert (ends is None) == (len(inside) < 20)
    assert ends is None or (0 <= ends[0] <= per_s <= ends[1])


def test_a_throughput_that_rises_is_not_steady():
    """And one that is served at random moments mostly is."""
    random, window = np.random.default_rng(2), SteadyWindow(start_ns=0, end_ns=100 * S, left_out=0.1, enough=None)
    rising_s = 100 * np.sqrt(random.uniform(size=600))
    assert is_steady(stamps_ns(rising_s), 1, window) is False
    steady = [is_steady(stamps_ns(random.uniform(0, 100, 600)), 1, window) for _ in range(40)]
    assert steady.count(True) >= 34
    assert is_steady(stamps_ns(rising_s[:19]), 1, window) is None


def test_von_neumann_is_two_of_independent_values():
    """Less of neighbours that resemble each other; equal values, and a single one, have none."""
    random = np.random.default_rng(3)
    assert von_neumann_ratio(random.normal(size=10_000)) == pytest.approx(2, abs=0.1)
    assert von_neumann_ratio(np.arange(10.0)) == pytest.approx(9 / 82.5)
    assert von_neumann_ratio([1.0, 1.0]) is None
    assert von_neumann_ratio([1.0]) is None


def test_requests_without_an_end_are_in_flight_and_without_a_begin_are_not():
    """Of a window of 10 s: one through all of it, one from its middle on, one that was never sent."""
    window = SteadyWindow(start_ns=0, end_ns=10 * S, left_out=0.1, enough=None)
    assert in_flight([0, 5 * S, -1], [-1, -1, 3 * S], window) == 1.5
    assert little_residual([0, 5 * S, -1], [-1, -1, 3 * S], window) is None


def test_the_steady_throughput_counts_tokens_that_arrived_in_it():
    """Requests of 4 s and 8 tokens, ten a second for a minute: also of those that had not ended."""
    rows = [
        {"dispatch": 100 * n, "submit": 100 * n, "first": 100 * n + 500, "last": 100 * n + 4000, "end": 100 * n + 4000,
         "output": 8, "input": 5, "chunks": tuple(range(100 * n + 500, 100 * n + 4001, 500))}
        for n in range(600)
    ]  # fmt: skip
    steady = steady_throughput(request_log(*rows), 0)
    assert steady is not None
    assert steady.duration_s == pytest.approx(0.9 * 59.9)
    assert steady.requests_per_s == pytest.approx(10, rel=0.01)
    assert steady.output_tokens_per_s == pytest.approx(80, rel=0.01)
    assert steady.input_tokens_per_s == pytest.approx(50, rel=0.01)
    assert steady.requests_per_s_ci95 is not None
    assert steady.requests_per_s_ci95[1] < 10.2
    assert steady.steady is True
    assert steady_throughput(request_log(rows[0]), 0) is None


def test_tokens_of_replies_that_contradict_their_usage_have_no_rate():
    """Chunks are no tokens."""
    row = {"dispatch": 0, "submit": 0, "first": 500, "last": 4000, "end": 4000, "output": 8, "chunks": (500, 4000)}
    lied = {**row, "dispatch": 9000, "output": -1, "output_tokens_source": "contradicted"}
    steady = steady_throughput(request_log(row, lied), 0)
    assert steady is not None
    assert (None, None) == (steady.output_tokens_per_s, steady.output_tokens_per_s_ci95)


def test_a_reply_without_chunks_arrives_whole():
    """Of one that did not end, each chunk counts as many tokens as a chunk of the others has."""
    log = request_log(
        {"end": 10, "output": 7, "chunks": ()},
        {"end": 20, "output": 6, "chunks": (5, 8)},
        {"end": -1, "status": "in_flight", "output": -1, "chunks": (9,)},
    )
    stamps, tokens = token_arrivals(log)
    assert sorted(zip((stamps // 1_000_000).tolist(), tokens.tolist(), strict=True)) == [
        (5, 3),
        (8, 3),
        (9, 3),
        (10, 7),
    ]
