"""The steps of the estimator by themselves: putting ends into intervals, exchange by tokens, conditioning on sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.correlator.estimate.assignment import IntervalTotals, assign, exchange_requests, find_lag
from sidelight.correlator.estimate.conditioning import Problem, solve
from sidelight.correlator.estimate.regression import TrainingSums, learn
from sidelight.correlator.estimate.waits import nearest_step, rest_features

Floats = npt.NDArray[np.float64]


def whole(at_s: Floats, tokens: npt.NDArray[np.int64], intervals: int, width_s: float) -> IntervalTotals:
    """What an engine that ends requests at at_s counts in intervals of one width."""
    edges = np.arange(intervals + 1) * width_s
    place = np.clip(np.searchsorted(edges, at_s) - 1, 0, intervals - 1)
    sums = np.zeros((intervals, tokens.shape[1]))
    np.add.at(sums, place, tokens)
    return IntervalTotals(
        start_s=edges[:-1],
        end_s=edges[1:],
        lost=np.zeros(intervals, dtype=np.bool_),
        count=np.bincount(place, minlength=intervals),
        tokens=sums,
    )


def problem(seed: int, size: int, intervals: int) -> Problem:
    """Members whose parts add up to what is known of them."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    truth = random.exponential([0.5, 0.05, 0.01], (size, 3))
    interval = np.concatenate([np.arange(intervals), random.integers(0, intervals, size - intervals)])
    sums = np.zeros((intervals, 2))
    np.add.at(sums, interval, truth[:, :2])
    wait = truth.sum(axis=1)
    return Problem(
        mean=truth * random.lognormal(0, 0.5, truth.shape),
        variance=(0.3 * truth + 0.001) ** 2,
        low=np.zeros((size, 3)),
        high=np.repeat(wait[:, None], 3, axis=1),
        wait=wait,
        wait_variance=np.full(size, 1e-8),
        interval=interval,
        sums=sums,
        noise=np.zeros((intervals, 2)),
    )


@given(st.integers(0, 2**32), st.integers(6, 60))
def test_conditioned_parts_add_up_to_sums_and_stay_in_the_box(seed: int, size: int):
    """Queue and prefill over each interval, to the nanosecond."""
    given_problem = problem(seed, size, 5)

    solution = solve(given_problem)

    sums = np.zeros((5, 2))
    np.add.at(sums, given_problem.interval, solution.value[:, :2])
    assert given_problem.sums == pytest.approx(sums, abs=1e-9)
    assert (given_problem.low <= solution.value + 1e-12).all()
    assert (solution.value[:, :2] <= given_problem.high[:, :2] + 1e-12).all()


def test_conditioning_is_that_of_the_normal_distribution():
    """In one interval of three, inside the box: m + V C' (C V C' + N)^-1 (d - C m), and its covariance.

    The covariance is scaled by (6 + chi-square) / 8, of the sums given the waits.
    """
    given_problem = replace(problem(3, 3, 1), low=np.full((3, 3), -9.0), high=np.full((3, 3), 9.0))
    mean, variance = given_problem.mean.ravel(), np.diag(given_problem.variance.ravel())
    rows = np.zeros((5, 9))
    for member in range(3):
        rows[member, 3 * member : 3 * member + 3] = 1
        rows[3, 3 * member] = rows[4, 3 * member + 1] = 1
    noise = np.diag([1e-8] * 3 + [0.0] * 2)
    gain = variance @ rows.T @ np.linalg.inv(rows @ variance @ rows.T + noise)
    known = np.concatenate([given_problem.wait, given_problem.sums[0]])

    solution = solve(given_problem)

    assert (mean + gain @ (known - rows @ mean)).reshape(3, 3) == pytest.approx(solution.value, abs=1e-7)
    waits, sums = rows[:3], rows[3:]
    by_waits = variance @ waits.T @ np.linalg.inv(waits @ variance @ waits.T + noise[:3, :3])
    missing = known[3:] - sums @ (mean + by_waits @ (known[:3] - waits @ mean))
    chi_square = missing @ np.linalg.inv(sums @ (variance - by_waits @ waits @ variance) @ sums.T) @ missing
    posterior = (variance - gain @ rows @ variance) * (6 + chi_square) / 8
    assert np.sqrt(np.diag(posterior)).reshape(3, 3) == pytest.approx(solution.sd, rel=1e-3, abs=1e-7)


def test_the_lag_is_by_how_much_ends_come_late():
    """40 ms, to the middle of what the counts allow."""
    random = np.random.default_rng(np.random.SeedSequence(1))
    at_s = np.sort(random.uniform(0, 60, 400))
    counted = whole(at_s, np.zeros((400, 0), dtype=np.int64), 600, 0.1)

    assert 0.040 == pytest.approx(find_lag(at_s + 0.040, counted), abs=0.002)


def test_tokens_put_requests_that_came_out_of_order_into_their_intervals():
    """Delays of up to 150 ms on intervals of 100 ms: by rank many are wrong, by tokens few, and they are known."""
    random = np.random.default_rng(np.random.SeedSequence(2))
    at_s = np.sort(random.uniform(0, 20, 200))
    tokens = random.integers(10, 2000, (200, 2))
    counted = whole(at_s, tokens, 200, 0.1)
    seen_s = at_s + random.uniform(0, 0.15, 200)

    by_rank = assign(seen_s, tokens[:, :0], counted, stamp_error_s=0.001)
    by_tokens = assign(seen_s, tokens, counted, stamp_error_s=0.001)

    truth = np.clip(np.searchsorted(np.arange(201) * 0.1, at_s) - 1, 0, 199)
    right = by_tokens.interval == truth
    assert right.mean() > 0.95
    assert (by_rank.interval == truth).mean() < 0.9
    assert right[by_tokens.verified[by_tokens.interval]].all()
    assert not by_rank.verified.any()


def test_an_exchange_that_proves_nothing_is_not_made():
    """Intervals whose sums agree keep their members, however odd their times."""
    tokens = np.array([[10.0], [20.0], [30.0]])
    counted = whole(np.array([0.5, 1.5, 2.5]), tokens.astype(np.int64), 3, 1.0)

    placed = exchange_requests(np.array([0, 1, 2]), np.array([2.5, 0.5, 1.5]), tokens, counted, 0.01, moves=False)

    assert [0, 1, 2] == placed.tolist()


def test_a_model_is_learned_from_sums_alone():
    """2 ms a request and 3 ms a unit, from 40 sums over five each, one of them a stall of a second."""
    random = np.random.default_rng(np.random.SeedSequence(4))
    interval = np.repeat(np.arange(40), 5)
    features = np.column_stack((np.ones(200), random.uniform(1, 20, 200)))
    sums = np.bincount(interval, features @ [0.002, 0.003]) + random.normal(0, 1e-4, 40)
    sums[7] += 1.0

    model = learn(
        TrainingSums(interval=interval, features=features, sums=sums, unmatched=np.zeros(40)),
        features,
        floor_share=0.1,
        least_s=1e-4,
    )

    assert [0.002, 0.003] == pytest.approx(model.weights.tolist(), rel=0.1)


def test_an_unmatched_request_in_every_sum_is_taken_for_ours():
    random = np.random.default_rng(np.random.SeedSequence(5))
    interval = np.repeat(np.arange(100), 4)
    features = np.column_stack((np.ones(400), random.uniform(1, 20, 400)))
    sums = np.bincount(interval, features @ [0.002, 0.003])
    ours = np.arange(400) % 4 != 0

    model = learn(
        TrainingSums(interval=interval[ours], features=features[ours], sums=sums, unmatched=np.ones(100)),
        features,
        floor_share=0.1,
        least_s=1e-4,
    )

    assert float(model.weights @ [1, 10]) == pytest.approx(0.032, rel=0.1)


def test_the_step_clock_finds_the_step_that_is_nearest_to_what_is_expected():
    """Steps ended 12, 40 and 100 ms before the first token; a chunk 1 ms before belongs to its own step."""
    chunk_s = np.array([0.9, 0.96, 0.988, 0.999])

    nearest = nearest_step(np.full(3, 1.0), np.full(3, 0.5), chunk_s, np.array([0.02, 0.05, 0.4]))

    assert [0.012, 0.04, 0.5] == pytest.approx(nearest.tolist())


def test_a_request_waits_for_the_step_that_runs_when_it_comes():
    """Until the next chunk of any stream; not at all on an idle engine, nor for the step of its own first token."""
    features = rest_features(
        np.array([0.1, 5.0, 0.1]),
        np.array([0.9, 5.5, 0.19]),
        np.array([0.05, 0.18, 5.5]),
        np.array([[0.0, 1.0], [0.1, 0.95]]),
        np.array([10.0, 10.0, 10.0]),
        0.0,
    )

    assert [0.08, 0.0, 0.08] == pytest.approx(features[:, 2].tolist())
