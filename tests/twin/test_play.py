"""The twin plays a load as the simulated engine does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from played_runs import arrivals, engine, lengths, simulated

from sidelight.rundir.columns import Floats
from sidelight.simulator.settings import PROFILES, EngineSettings
from sidelight.simulator.virtual import VirtualExchange
from sidelight.twin.engine.play import EngineLoad, play

EVEN = replace(PROFILES["demo"], jitter_ratio=0.0)
ROUNDING_S = 1e-6  # the simulated engine rounds each step to a nanosecond


def _times(exchanges: list[VirtualExchange]) -> tuple[Floats, Floats]:
    origin_ns = exchanges[0].submit_ns
    return (
        np.array([each.token_ns[0] - origin_ns for each in exchanges]) / 1e9,
        np.array([each.token_ns[-1] - origin_ns for each in exchanges]) / 1e9,
    )


def _comes_with_the_end_of_a_step(exchanges: list[VirtualExchange]) -> bool:
    """Return whether rounding decides which step a request is in."""
    ends_ns = np.unique(np.concatenate([each.token_ns for each in exchanges]))
    arrivals_ns = np.array([each.submit_ns for each in exchanges])
    place = np.clip(np.searchsorted(ends_ns, arrivals_ns), 1, len(ends_ns) - 1)
    apart_ns = np.minimum(np.abs(ends_ns[place] - arrivals_ns), np.abs(ends_ns[place - 1] - arrivals_ns))
    return bool((apart_ns < 1e9 * ROUNDING_S).any())


@given(
    seats=st.integers(1, 40),
    budget=st.sampled_from([64, 256, 2048]),
    rate_per_s=st.floats(0.5, 30),
    profile=st.sampled_from(sorted(PROFILES)),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=10)
def test_an_open_loop_has_the_times_of_the_simulated_engine(
    seats: int, budget: int, rate_per_s: float, profile: str, seed: int
) -> None:
    chosen = engine(max_num_seqs=seats, max_num_batched_tokens=budget, speed=PROFILES[profile], seed=seed)
    prompts, outputs = lengths(60, seed)
    at_s = arrivals(60, rate_per_s, seed)
    expected = simulated(chosen, prompts, outputs, at_s=at_s, network_s=0.0)
    assume(not _comes_with_the_end_of_a_step(expected))
    played = play(_load(prompts, outputs, at_s), chosen)
    first_s, last_s = _times(expected)
    # The origin is the first submission here, and the start of the load there.
    offset_s = round(float(at_s[0]) * 1e9) / 1e9
    assert np.abs(played.first_s - offset_s - first_s).max() < ROUNDING_S
    assert np.abs(played.last_s - offset_s - last_s).max() < ROUNDING_S
    assert played.preemptions == 0


def test_a_closed_loop_has_the_times_of_the_simulated_engine() -> None:
    prompts, outputs = lengths(120, 3)
    for concurrency in (1, 7, 30):
        expected = simulated(engine(), prompts, outputs, concurrency=concurrency, network_s=0.0)
        played = play(_load(prompts, outputs, None, concurrency), engine())
        first_s, last_s = _times(expected)
        assert np.abs(played.first_s - first_s).max() < ROUNDING_S
        assert np.abs(played.last_s - last_s).max() < ROUNDING_S


def test_scarce_blocks_preempt_as_those_of_the_simulated_engine() -> None:
    scarce = EngineSettings(
        kv_blocks=300, max_model_len=2048, eos_chance=0.0, prefix_caching=False, max_num_batched_tokens=1024
    )
    prompts, outputs = lengths(200, 5)
    prompts, outputs = np.minimum(prompts, 1000), np.minimum(outputs, 1000)
    at_s = arrivals(200, 6.0, 5)
    expected = simulated(scarce, prompts, outputs, at_s=at_s, network_s=0.0)
    played = play(_load(prompts, outputs, at_s), scarce)
    preemptions = sum(each.record.preemptions for each in expected if each.record)
    assert played.preemptions == preemptions > 20
    first_s, last_s = _times(expected)
    offset_s = round(float(at_s[0]) * 1e9) / 1e9
    assert np.abs(played.first_s - offset_s - first_s).max() < ROUNDING_S
    assert np.abs(played.last_s - offset_s - last_s).max() < ROUNDING_S
    assert played.waited_s["kv-blocks"] > 0


def test_cached_tokens_are_not_computed_again() -> None:
    prompts, outputs = np.full(20, 800), np.full(20, 2)
    at_s = np.arange(20) * 1.0
    alone = EngineLoad(prompt_tokens=prompts, cached_tokens=np.full(20, 600), output_tokens=outputs, arrival_s=at_s)
    whole = play(_load(prompts, outputs, at_s), engine())
    cached = play(alone, engine())
    saved_s = (whole.first_s - cached.first_s).mean()
    assert abs(saved_s / (600 * engine().speed.prefill_token_s) - 1) < 0.05


def test_the_limit_that_requests_wait_for_is_named() -> None:
    prompts, outputs = lengths(100, 8)
    at_s = arrivals(100, 20.0, 8)
    few_seats = play(_load(prompts, outputs, at_s), engine(max_num_seqs=2))
    small_budget = play(_load(prompts, np.full(100, 2), at_s), engine(max_num_batched_tokens=64))
    assert few_seats.waited_s["max-num-seqs"] > 0.8 * few_seats.busy_s
    assert small_budget.waited_s["max-num-batched-tokens"] > 0.5 * small_budget.busy_s


def test_replicas_by_turns_are_engines_of_their_own() -> None:
    prompts, outputs = lengths(90, 6)
    at_s = arrivals(90, 12.0, 6)
    together = play(_load(prompts, outputs, at_s), engine(speed=EVEN), replicas=3)
    for turn in range(3):
        turns = slice(turn, None, 3)
        alone = play(_load(prompts[turns], outputs[turns], at_s[turns]), engine(speed=EVEN))
        assert (together.first_s[turns] == alone.first_s).all()
        assert (together.last_s[turns] == alone.last_s).all()


def test_a_request_goes_to_the_replica_that_has_the_fewest() -> None:
    """Beside a long request on the one, short ones after each other are all alone on the other."""
    prompts, outputs = np.full(4, 100), np.array([2000, 20, 20, 20])
    at_s = np.array([0.0, 0.1, 2.0, 4.0])
    alone = play(_load(prompts[:1], np.full(1, 20), np.zeros(1)), engine(speed=EVEN))
    balanced, by_turns = (
        play(_load(prompts, outputs, at_s), engine(speed=EVEN), replicas=2, router=router)
        for router in ("least-requests", "round-robin")
    )
    short_s = np.array([(each.last_s - at_s)[1:] for each in (balanced, by_turns)])
    assert short_s[0] == pytest.approx(float(alone.last_s[0]), abs=1e-9)
    assert short_s[1, 1] > 1.01 * float(alone.last_s[0])


@given(rate_per_s=st.floats(1, 40), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=10)
def test_one_replica_has_nothing_to_choose(rate_per_s: float, seed: int) -> None:
    prompts, outputs = lengths(40, seed)
    load = _load(prompts, outputs, arrivals(40, rate_per_s, seed))
    balanced, alone = (play(load, engine(seed=seed), router=router) for router in ("least-requests", "round-robin"))
    assert balanced.last_s == pytest.approx(alone.last_s, abs=1e-9)


def _load(prompts: Floats, outputs: Floats, at_s: Floats | None, concurrency: int = 1) -> EngineLoad:
    exact_s = None if at_s is None else np.rint(at_s * 1e9) / 1e9
    return EngineLoad(
        prompt_tokens=prompts.astype(np.int64),
        cached_tokens=np.zeros(len(prompts), np.int64),
        output_tokens=outputs.astype(np.int64),
        arrival_s=exact_s,
        concurrency=concurrency,
    )
