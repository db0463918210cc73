"""Laws of the simulated engine, in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_load import play

from sidelight.simulator.engine.history import EngineRequest, StepOutcome
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import (
    KV_HOST_BYTES_PER_S,
    KV_TOKEN_BYTES,
    POLICIES,
    PROFILES,
    EngineSettings,
    SettingsError,
    SpeedProfile,
)
from sidelight.simulator.telemetry.truth import line

LIMITS = st.builds(
    lambda seqs, spare, blocks, seed, policy, host_blocks: EngineSettings(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + spare,
        kv_blocks=16 + blocks,
        block_size=4,
        max_model_len=64,
        seed=seed,
        policy=policy,
        kv_host_blocks=host_blocks,
    ),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 40),
    blocks=st.integers(0, 30),
    seed=st.integers(0, 3),
    policy=st.sampled_from(POLICIES),
    host_blocks=st.sampled_from([0, 3, 1000]),
)
# Few different first tokens, so that prefixes are shared now and then.
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 300_000_000), st.integers(256, 258), st.integers(1, 40), st.integers(1, 24), st.booleans()
    ),
    min_size=1,
    max_size=14,
)
EXACT = SpeedProfile(step_s=0.01, prefill_token_s=0.001, sequence_s=0.002, kv_token_s=0.0001, jitter_ratio=0.0)


def requests_of(drawn: list[Any]) -> list[tuple[int, EngineRequest]]:
    """Turn drawn numbers into arrivals."""
    return [
        (at, ask(f"r{index}", [token] * length, max_tokens, ignore_eos=ignore_eos))
        for index, (at, token, length, max_tokens, ignore_eos) in enumerate(drawn)
    ]


def ask(name: str, token_ids: list[int], max_tokens: int, **fields: Any) -> EngineRequest:
    """Return a request."""
    return EngineRequest(request_id=name, prompt_token_ids=tuple(token_ids), max_tokens=max_tokens, **fields)


def scheduled_tokens(outcome: StepOutcome) -> int:
    """Return how many tokens a step computed."""
    return outcome.prefill.computed_tokens + outcome.decode_requests


@given(LIMITS, ARRIVALS)
@settings(max_examples=150, deadline=None)
def test_conservation(limits: EngineSettings, drawn: list[Any]):
    """All requests finish, in order of their stamps, with their tokens; no limit is passed; no block is lost."""
    arrivals = requests_of(drawn)
    played = play(limits, arrivals)
    asked = {request.request_id: request for _, request in arrivals}
    assert sorted(asked) == sorted(record.request_id for record in played.records)
    for record in played.records:
        request = asked[record.request_id]
        assert record.arrival_ns <= record.queued_ns <= record.scheduled_ns
        assert record.scheduled_ns < record.first_token_ns <= record.finished_ns
        assert 0 <= record.host_tokens <= record.cached_tokens
        assert record.cached_tokens < record.prompt_tokens == len(request.prompt_token_ids)
        assert 1 <= record.output_tokens <= record.max_tokens
        if request.ignore_eos or record.finish_reason == "length":
            assert (record.max_tokens, "length") == (record.output_tokens, record.finish_reason)
    assert sum(len(outcome.tokens) for outcome in played.outcomes) == sum(r.output_tokens for r in played.records)
    assert all(outcome.used_blocks <= limits.kv_blocks for outcome in played.outcomes)
    assert all(outcome.host_blocks <= limits.kv_host_blocks for outcome in played.outcomes)
    work = [outcome.prefill for outcome in played.outcomes]
    cached, in_host = sum(each.fresh_cached_tokens for each in work), sum(each.fresh_host_tokens for each in work)
    prompts = sum(len(request.prompt_token_ids) for request in asked.values())
    assert prompts == cached + sum(each.fresh_computed_tokens for each in work)
    assert sum(record.host_tokens for record in played.records) <= in_host <= cached
    assert (0, 0, 0) == (played.engine.pool.used, played.outcomes[-1].running, played.outcomes[-1].waiting)
    for outcome in played.outcomes:
        assert 1 <= scheduled_tokens(outcome) <= limits.max_num_batched_tokens
        assert outcome.running <= limits.max_num_seqs
        assert len(outcome.tokens) <= limits.max_num_seqs
        # Nothing is admitted in a step that preempts.
        assert len(outcome.retractions) <= outcome.waiting


@given(LIMITS, ARRIVALS)
@settings(max_examples=30, deadline=None)
def test_the_same_seed_gives_the_same_history(limits: EngineSettings, drawn: list[Any]):
    """Two runs of the same arrivals are equal in every stamp and token."""
    arrivals = requests_of(drawn)
    assert play(limits, arrivals).outcomes == play(limits, arrivals).outcomes


@given(LIMITS, ARRIVALS)
@settings(max_examples=30, deadline=None)
def test_queueing_is_first_come_first_served(limits: EngineSettings, drawn: list[Any]):
    """No request is scheduled for the first time before one that arrived earlier."""
    played = play(replace(limits, policy="fcfs"), requests_of(drawn))
    records = sorted(played.records, key=lambda record: int(record.request_id[1:]))
    by_arrival = sorted(records, key=lambda record: record.arrival_ns)
    stamps = [record.scheduled_ns for record in by_arrival]
    assert sorted(stamps) == stamps


def test_step_time_is_the_stated_sum():
    """10 ms + 1 ms a prompt token + 2 ms a sequence + 0.1 ms a KV token; the decode computes one token."""
    played = play(EngineSettings(speed=EXACT), [(0, ask("a", [256] * 20, 2))])
    prefill_ns = 10_000_000 + 20 * 1_000_000 + 2_000_000 + 20 * 100_000
    decode_ns = 10_000_000 + 2_000_000 + 21 * 100_000
    assert [prefill_ns, prefill_ns + decode_ns] == [outcome.at_ns for outcome in played.outcomes]


def test_the_wait_for_a_running_step_is_in_no_stage():
    """A request that arrives during a step is queued when the step ends, and scheduled in the same moment."""
    played = play(EngineSettings(speed=EXACT), [(0, ask("a", [256] * 20, 8)), (1_000_000, ask("b", [300] * 20, 1))])
    late = next(record for record in played.records if record.request_id == "b")
    step_end_ns = played.outcomes[0].at_ns
    assert (1_000_000, step_end_ns, step_end_ns) == (late.arrival_ns, late.queued_ns, late.scheduled_ns)


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes():
    """With a budget of 8, a prompt of 20 takes what a decode leaves: 7 tokens a step."""
    limits = EngineSettings(max_num_batched_tokens=8, max_num_seqs=4, speed=EXACT)
    played = play(limits, [(0, ask("a", [256], 9)), (1, ask("b", [300] * 20, 1))])
    assert [1, 8, 8, 7, 1] == [scheduled_tokens(outcome) for outcome in played.outcomes[:5]]


def test_a_known_prefix_is_not_computed_again():
    """Of a prompt of 32 tokens asked twice, one block is found: the last one is computed for its next token."""
    limits = EngineSettings(block_size=16, speed=EXACT)
    played = play(limits, [(0, ask("a", [256] * 32, 1)), (10**9, ask("b", [256] * 32, 1))])
    assert [0, 16] == [record.cached_tokens for record in played.records]
    assert [32, 16] == [scheduled_tokens(outcome) for outcome in played.outcomes]


def test_a_prefix_in_host_memory_is_loaded_and_not_computed_again():
    """The other prompt took its blocks; its step takes as long as that of a cached one, and the load of 12 tokens."""
    limits = EngineSettings(kv_blocks=4, block_size=4, max_model_len=16, speed=EXACT, kv_host_blocks=100)
    prompts = ([300] * 13, [400] * 13, [300] * 13)
    arrivals = [(at * 10**9, ask(f"r{at}", prompt, 1)) for at, prompt in enumerate(prompts)]
    *others, last = play(limits, arrivals).records
    assert [(0, 0), (0, 0), (12, 12)] == [(each.cached_tokens, each.host_tokens) for each in (*others, last)]
    assert 0.001 * 1 + 0.01 + 0.002 + 0.0001 * 13 + 12 * KV_TOKEN_BYTES / KV_HOST_BYTES_PER_S == pytest.approx(
        last.prefill_s, abs=2e-9
    )
    without = play(replace(limits, kv_host_blocks=0), arrivals).records
    assert [0, 0, 0] == [each.cached_tokens for each in without]
    assert "host" not in line(without[-1])
    assert 12 == json.loads(line(last))["host_cached_tokens"]


def test_host_memory_that_nothing_reaches_changes_nothing():
    arrivals = [(at * 10**8, ask(f"r{at}", [300 + at % 3] * 40, 9)) for at in range(9)]
    with_host, without = (play(EngineSettings(kv_host_blocks=blocks), arrivals) for blocks in (50, 0))
    assert with_host.records == without.records
    assert with_host.outcomes == without.outcomes


def test_preemption_recomputes_and_completes():
    """Two requests that outgrow a small cache both finish; the later one was preempted and keeps its first stamps."""
    limits = EngineSettings(kv_blocks=10, block_size=4, max_model_len=40, max_num_seqs=2, speed=EXACT)
    played = play(limits, [(0, ask("a", [256] * 16, 20)), (0, ask("b", [300] * 16, 20))])
    first, second = played.records
    assert ("a", 0, 20) == (first.request_id, first.preemptions, first.output_tokens)
    assert ("b", 1, 20) == (second.request_id, second.preemptions, second.output_tokens)
    assert (0, 0) == (second.queued_ns, second.scheduled_ns)
    assert 1 == sum(len(outcome.retractions) for outcome in played.outcomes)
    assert 32 == sum(admission.prompt_tokens for outcome in played.outcomes for admission in outcome.admissions)


def test_a_preempted_request_goes_back_before_those_that_wait():
    """A small request behind it, for which there would be room, waits until the preempted one has its blocks again."""
    limits = EngineSettings(kv_blocks=10, block_size=4, max_model_len=40, max_num_seqs=2, speed=EXACT)
    names = (("a", [256] * 16, 20), ("b", [300] * 16, 20), ("c", [400], 1))
    records = {record.request_id: record for record in play(limits, [(0, ask(*name)) for name in names]).records}
    assert (0, 1, 0) == tuple(records[name].preemptions for name in "abc")
    assert records["a"].finished_ns == records["c"].scheduled_ns


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("shortest-first", "adcb"), ("priority", "abdc")])
def test_a_policy_orders_those_that_wait(policy: str, order: str):
    """One seat: as they came, the shortest prompt first, or the lowest priority and of equal ones the earliest."""
    limits = EngineSettings(max_num_seqs=1, policy=policy, speed=EXACT)
    asked = (("a", 9, 0), ("b", 8, 1), ("c", 7, 5), ("d", 6, 1))
    arrivals = [(at, ask(name, [256 + at] * n, 3, priority=p)) for at, (name, n, p) in enumerate(asked)]
    assert order == "".join(record.request_id for record in play(limits, arrivals).records)


def test_with_priorities_the_least_urgent_gives_up_its_blocks_though_it_came_first():
    """Its share of the step is given back, and it finishes later with all its tokens; what it lost is known."""
    limits = EngineSettings(
        kv_blocks=10, block_size=4, max_model_len=40, max_num_seqs=2, policy="priority", speed=EXACT
    )
    played = play(limits, [(0, ask("a", [256] * 16, 20, priority=1)), (1, ask("b", [300] * 16, 20))])
    records = {record.request_id: record for record in played.records}
    assert (1, 0) == (records["a"].preemptions, records["b"].preemptions)
    assert (20, 20) == (records["a"].output_tokens, records["b"].output_tokens)
    assert records["a"].recovered
    assert records["a"].lost_tokens == 20
    assert records["b"].lost_tokens == 0
    assert records["b"].finished_ns < records["a"].finished_ns


def test_without_prefix_caching_nothing_is_found_again():
    """Of the same prompt twice each token is computed twice."""
    limits = EngineSettings(block_size=16, prefix_caching=False, speed=EXACT)
    played = play(limits, [(0, ask("a", [256] * 32, 1)), (10**9, ask("b", [256] * 32, 1))])
    assert [0, 0] == [record.cached_tokens for record in played.records]
    assert [0, 0] == [outcome.evictable_blocks for outcome in played.outcomes]


def test_only_requests_with_the_same_salt_share_a_prefix():
    """As vLLM's cache_salt: another salt, or none, finds nothing."""
    salts = ("", "x", "y", "x", "")
    arrivals = [(at * 10**9, ask(f"{at}", [256] * 32, 1, cache_salt=salt)) for at, salt in enumerate(salts)]
    records = play(EngineSettings(block_size=16, speed=EXACT), arrivals).records
    assert [0, 0, 0, 16, 16] == [record.cached_tokens for record in records]


def test_a_slow_and_drifting_engine_takes_so_many_times_as_long():
    """Twice as long from the start, and half as long again an hour later."""
    arrivals = [(0, ask("a", [256] * 20, 1)), (3600 * 10**9, ask("b", [300] * 20, 1))]
    plain, drifting = (
        play(limits, arrivals).records
        for limits in (EngineSettings(speed=EXACT), EngineSettings(speed=EXACT, slow=2, drift_per_h=0.5))
    )
    ratios = [slow.prefill_s / fast.prefill_s for fast, slow in zip(plain, drifting, strict=True)]
    assert ratios == pytest.approx([2, 3])


def test_an_engine_without_memory_loses_what_it_has_and_goes_on():
    """The third sequence in a step is too many: all three end with an error, and the next request is served."""
    limits = EngineSettings(oom_at=3, speed=EXACT)
    arrivals = [(at, ask(name, [256 + at] * 8, 9)) for at, name in enumerate("abc")]
    played = play(limits, [*arrivals, (10**9, ask("d", [9], 2))])
    lost = [record for outcome in played.outcomes for _, record in outcome.lost]
    assert [("a", "error"), ("b", "error"), ("c", "error")] == [(each.request_id, each.finish_reason) for each in lost]
    assert [("d", 2)] == [(record.request_id, record.output_tokens) for record in played.records]
    assert 0 == played.engine.pool.used


def test_a_step_is_a_prefill_a_decode_or_both():
    """The second prompt is computed beside the first one's output."""
    played = play(EngineSettings(speed=EXACT), [(0, ask("a", [256] * 20, 3)), (1, ask("b", [300] * 20, 3))])
    assert ["prefill", "mixed", "decode", "decode"] == [outcome.kind for outcome in played.outcomes]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_leaves_nothing_behind(steps: int):
    """Wherever it was, its blocks are free and no token of it comes after."""
    engine = SimulatedEngine(EngineSettings(max_num_seqs=1, speed=EXACT))
    numbers = [engine.submit(ask(name, [256] * 40, 50), 0) for name in ("a", "b")]
    for step in range(steps):
        engine.begin_step(2 * step)
        engine.finish_step(2 * step + 1)
    engine.begin_step(100)
    records = [engine.abort(number, 101) for number in numbers]
    assert [("a", steps, "abort"), ("b", 0, "abort")] == [
        (record.request_id, record.output_tokens, record.finish_reason) for record in records if record
    ]
    outcome = engine.finish_step(102)
    left = (outcome.tokens, outcome.finished, outcome.running, outcome.waiting, outcome.used_blocks)
    assert ((), (), 0, 0, 0) == left
    assert engine.begin_step(103) is None
    assert engine.abort(numbers[0], 104) is None


@pytest.mark.parametrize(("steps", "tokens"), [(0, 2), (1, 2), (4, 5)])
def test_an_abandoned_request_ends_with_its_next_output_but_not_the_first(steps: int, tokens: int):
    """Until then it takes part as others do, and its record is among those that finished."""
    engine = SimulatedEngine(EngineSettings(speed=EXACT))
    number = engine.submit(ask("a", [256] * 8, 50), 0)
    for step in range(50):
        if step == steps:
            engine.abandon(number)
            assert (number,) == engine.abandoned
        engine.begin_step(2 * step)
        for record in engine.finish_step(2 * step + 1).finished:
            assert (tokens, "abort", ()) == (record.output_tokens, record.finish_reason, engine.abandoned)
            assert engine.begin_step(200) is None
            return
    raise AssertionError("the request did not end")


def test_the_wait_after_a_retraction_is_known():
    """From giving up its blocks to being scheduled again; with every step of its work, where that was asked for."""
    limits = EngineSettings(kv_blocks=10, block_size=4, max_model_len=40, max_num_seqs=2, speed=EXACT)
    asked = [(0, ask(name, [token] * 16, 20)) for name, token in (("a", 256), ("b", 300))]
    first, again = play(limits, asked, keep_steps=True).records
    assert (0, 0, 1) == (first.preemptions, first.later_wait_ns, again.preemptions)
    waits = [later.begin_ns - earlier.end_ns for earlier, later in pairwise(again.steps)]
    assert [again.later_wait_ns] == [wait for wait in waits if wait]
    assert (20, 20) == (len(first.steps), len(again.steps))
    assert not play(limits, asked).records[0].steps


def test_an_abort_before_the_first_step_is_never_queued():
    """A request dropped on arrival has no stamps but its own two."""
    engine = SimulatedEngine(EngineSettings())
    record = engine.abort(engine.submit(ask("a", [256], 1), 5), 6)
    assert record is not None
    assert (5, -1, -1, -1, 6) == (
        record.arrival_ns,
        record.queued_ns,
        record.scheduled_ns,
        record.first_token_ns,
        record.finished_ns,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs 0: must be 1 or more"),
        ({"max_num_batched_tokens": 15}, "--max-num-batched-tokens 15: must be at least --max-num-seqs 16"),
        ({"kv_blocks": 511}, "--kv-blocks 511: one request of --max-model-len 8192 needs 512"),
        ({"max_model_len": 1}, "--max-model-len 1: must be 2 or more"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
    ],
)
def test_limits_that_cannot_work_name_the_option(wrong: dict[str, int], message: str):
    """One line says what is wrong and what would be valid."""
    with pytest.raises(SettingsError, match=message):
        EngineSettings(**wrong)


def test_a_step_of_the_demo_profile_takes_10_to_15_ms():
    """Sixteen sequences of some 400 tokens decode in that time, so that waits are visible."""
    limits = EngineSettings(speed=PROFILES["demo"], max_num_batched_tokens=8192)
    played = play(limits, [(0, ask(str(index), [256 + index] * 400, 60)) for index in range(16)])
    stamps = [outcome.at_ns for outcome in played.outcomes]
    mean_ms = (stamps[-1] - stamps[0]) / (len(stamps) - 1) / 1e6
    assert 10 < mean_ms < 15
