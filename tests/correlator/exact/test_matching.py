"""Records matched to requests by time alone: a simulated engine batches, and each joined request has a known truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from time import process_time

import numpy as np
import pytest
from engine_records import URL, Played, World, played
from hypothesis import given, settings
from hypothesis import strategies as st

from sidelight.correlator.exact import matching as by_time
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.matching import Matched, matched
from sidelight.correlator.exact.table import RECORD_BY_TIME
from sidelight.rundir.columns import take
from sidelight.scraper import perf_metrics
from sidelight.scraper.spans.requests import engine_spans

WORLDS = st.builds(
    World,
    requests=st.integers(40, 300),
    rate_per_s=st.sampled_from([10.0, 50.0, 200.0]),
    batch=st.sampled_from([1, 8]),
    concurrency=st.sampled_from([0, 0, 40]),
    slots=st.sampled_from([4, 32]),
    prefill_s=st.sampled_from([(0.0, 0.03), (0.01, 0.01)]),
    tokens=st.sampled_from([(20, 60), (20, 21)]),
    network_s=st.sampled_from([(0.3e-3, 0.3e-3), (30e-3, 1e-3), (1e-3, 5e-3)]),
    stalls_per_s=st.sampled_from([0.0, 2.0]),
    unmatched=st.sampled_from([0.0, 0.3]),
    cancelled=st.sampled_from([0.0, 0.2]),
    clock_s=st.sampled_from([0.0, 1e-3]),
    streamed=st.booleans(),
)

SPACED = World(requests=40, rate_per_s=10, gap_s=0.02)


def wrong(trial: Played, matches: Matched) -> int:
    """Return how many joined requests have a queue or prefill that is off by more than 2 ms."""
    here = matches.row >= 0
    rows = matches.row[here]
    got_s = np.column_stack([matches.timings.queue_s[rows], matches.timings.prefill_s[rows]])
    return int((np.abs(got_s - trial.true_s[here]) > 2e-3).any(axis=1).sum())


@settings(max_examples=60)
@given(WORLDS, st.integers(0, 2**32))
def test_one_record_is_for_one_request(world: World, seed: int):
    """No record is used twice, a cancelled request gets none, and each without one has a reason. Whatever the network,
    batches and other clients are like, hardly any of what is joined is off by 2 ms.
    """
    trial = played(world, seed)
    matches = matched(trial.requests, trial.timings)
    rows = matches.row[matches.row >= 0]
    assert len(rows) == len(set(rows.tolist()))
    ok = trial.requests.status == "ok"
    assert {-1} >= set(matches.row[~ok].tolist())
    assert ((matches.row >= 0) == (ok & (matches.reason == ""))).all()
    assert wrong(trial, matches) <= 2 + len(rows) / 200


def test_what_is_joined_is_right():
    """Of all that is joined in 160 runs of many kinds, at most one in 1,000 is off by 2 ms; one in 200 may be."""
    kinds = product((1, 8), (0, 40), ((20, 60), (20, 21)), ((0.3e-3, 0.3e-3), (30e-3, 1e-3)), (0.0, 2.0), range(5))
    runs = []
    for seed, (batch, concurrency, tokens, network_s, stalls_per_s, _) in enumerate(kinds):
        world = World(
            requests=150,
            rate_per_s=50,
            batch=batch,
            concurrency=concurrency,
            tokens=tokens,
            network_s=network_s,
            stalls_per_s=stalls_per_s,
            unmatched=0.3 * (seed % 2),
            cancelled=0.1 * (seed % 3),
        )
        trial = played(world, seed)
        runs.append((trial, matched(trial.requests, trial.timings)))
    joined = sum(int((matches.row >= 0).sum()) for _, matches in runs)
    assert joined > 10_000
    assert 1000 * sum(wrong(*run) for run in runs) <= joined


@pytest.mark.parametrize(
    "world",
    [
        World(rate_per_s=100, slots=64, stalls_per_s=2, unmatched=0.3, lost=0.2),
        World(requests=1000, concurrency=200, slots=64, unmatched=0.3, lost=0.3, cancelled=0.2),
        World(rate_per_s=50, batch=20, unmatched=0.5, lost=0.3, stalls_per_s=5, network_s=(1e-3, 3e-3)),
        World(rate_per_s=50, requests=40, slots=8, unmatched=0.5, lost=0.5, network_s=(1e-3, 3e-3)),
        World(streamed=False, unmatched=0.3, lost=0.3),
    ],
)
def test_a_record_of_another_client_is_not_taken_for_a_lost_one(world: World):
    """Readings that failed, a queue of records that overflowed: of what is joined over ten runs, at most one in 200."""
    runs = [(trial, matched(trial.requests, trial.timings)) for trial in (played(world, seed) for seed in range(10))]
    assert 200 * sum(wrong(*run) for run in runs) <= sum(int((matches.row >= 0).sum()) for _, matches in runs)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_requests_that_arrive_apart_are_all_joined(seed: int, unmatched: float):
    """By 20 ms at least, whatever else is served; 40 requests are enough to estimate the network's times."""
    trial = played(World(requests=80, rate_per_s=10, gap_s=0.02, unmatched=unmatched), seed)
    matches = matched(trial.requests, trial.timings)
    assert len(matches.row) == int((matches.row >= 0).sum())
    assert 0 == wrong(trial, matches)


@pytest.mark.parametrize(
    ("world", "share"),
    [
        (World(requests=1000), 0.99),
        (World(requests=1000, unmatched=0.3), 0.99),
        (World(requests=1000, concurrency=200, slots=64), 0.98),
        (World(requests=1000, rate_per_s=100, slots=64, stalls_per_s=2), 0.9),
    ],
)
def test_most_are_joined(world: World, share: float):
    """Also at a concurrency of 200, and where server and client stall."""
    trial = played(world, 0)
    matches = matched(trial.requests, trial.timings)
    ok = int((trial.requests.status == "ok").sum())
    assert int((matches.row >= 0).sum()) >= share * ok


def test_equal_records_of_a_batch_are_joined_and_different_ones_are_not():
    """Which of two equal records a request gets does not matter; where their times differ, it gets none."""
    trial = played(World(requests=100, rate_per_s=50, batch=4, tokens=(20, 21), prefill_s=(0.01, 0.01), slots=64), 0)
    matches = matched(trial.requests, trial.timings)
    assert int((matches.row >= 0).sum()) > 90
    apart = replace(trial.timings, queue_s=trial.timings.queue_s + 0.01 * np.arange(100))
    matches = matched(trial.requests, apart)
    several = matches.reason[matches.ambiguous]
    assert len(several) > 50
    assert any(str(reason).endswith(" records of /perf_metrics fit it") for reason in several)


def test_a_request_without_a_record_has_a_reason():
    """No record at all, none that fits, too few requests to know what is usual."""
    trial = played(SPACED, 0)
    assert {"no record of /perf_metrics came"} == set(matched(trial.requests, perf_metrics.none()).reason)
    late = replace(trial.timings, arrival_ns=trial.timings.arrival_ns + 10**10)
    assert {by_time.TOO_FEW} == set(matched(trial.requests, late).reason)
    late.arrival_ns[1:] -= 10**10
    assert {"", "no record of /perf_metrics fits it"} == set(matched(trial.requests, late).reason)
    few = take(trial.requests, np.arange(40) < by_time.LEAST_REQUESTS - 1)
    assert {by_time.TOO_FEW} == set(matched(few, trial.timings).reason)


def test_records_of_an_engine_are_for_requests_to_it():
    """By its host, where requests went there; else, as behind a gateway, for all."""
    trial = played(SPACED, 0)
    assert 40 == int((matched(trial.requests, trial.timings).row >= 0).sum())
    other = np.where(np.arange(40) % 2 == 0, "http://other.test:8000", URL).astype(np.object_)
    matches = matched(replace(trial.requests, endpoint_url=other), trial.timings)
    assert {-1} == set(matches.row[::2].tolist())
    assert (matches.row[1::2] >= 0).all()
    gateway = np.full(40, "http://gateway.test", dtype=np.object_)
    assert 40 == int((matched(replace(trial.requests, endpoint_url=gateway), trial.timings).row >= 0).sum())


def test_joined_times_are_those_of_the_record():
    """Source, stamps and all five times; a request that has them from its span or reply keeps those."""
    trial = played(SPACED, 0)
    trial.requests.server_queue_ms[0], trial.requests.server_prefill_ms[0] = 1.0, 2.0
    matches = matched(trial.requests, trial.timings)
    joined = join(trial.requests, engine_spans([]), matches)
    assert ({"response", RECORD_BY_TIME}, {""}) == (set(joined.source), set(joined.reason))
    assert [False, *[True] * 39] == joined.by_time.tolist()
    for part in ("queue", "prefill", "decode", "ttft", "e2e"):
        expected = getattr(trial.timings, f"{part}_s")[matches.row]
        assert (expected[1:] == getattr(joined, f"{part}_s")[1:]).all()
    assert (0.001, 0.002, -1) == (joined.queue_s[0], joined.prefill_s[0], joined.arrival_ns[0])
    assert (trial.timings.arrival_ns[matches.row][1:] == joined.arrival_ns[1:]).all()
    assert (trial.timings.last_token_ns[matches.row][1:] == joined.end_ns[1:]).all()


def test_without_a_record_the_request_says_so():
    """After what else is missing of it."""
    trial = played(SPACED, 0)
    joined = join(trial.requests, engine_spans([]), matched(trial.requests, perf_metrics.none()))
    reason = "no spans came; its reply tells neither queue nor prefill; no record of /perf_metrics came"
    assert {reason} == set(joined.reason)


def test_work_grows_with_the_requests_and_not_with_their_square():
    """Pairs are formed of what is near in time only: eight times as many requests take about ten times the CPU time,
    and far from 64 times.
    """

    def matching_s(trial: Played) -> float:
        begun_s = process_time()
        matches = matched(trial.requests, trial.timings)
        assert (matches.row >= 0).mean() > 0.9
        return process_time() - begun_s

    dense = World(requests=1_000, rate_per_s=500, slots=400, tokens=(5, 40), prefill_s=(0, 1e-3))
    few, many = played(dense, 0), played(replace(dense, requests=8_000), 0)
    assert matching_s(many) < 25 * min(matching_s(few) for _ in range(3))
