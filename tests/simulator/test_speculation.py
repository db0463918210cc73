"""Speculative decoding of the simulated engine: its replies, its page and its truth say the same, to the token."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import numpy as np
import pytest
from simulated_load import ask, client_of, samples_of

from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.settings import PROFILES, EngineSettings, SettingsError, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog, line
from sidelight.simulator.virtual import EPOCH_NS, Played, SimulatedLoad, VirtualServer

SETTINGS = EngineSettings(speed=PROFILES["fast"], draft_tokens=3, accept_ratio=0.7, max_num_seqs=4)
COUNTS = ("drafts", "draft_tokens", "draft_tokens_accepted")
NAMES = tuple(f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))


def played(settings: EngineSettings = SETTINGS, *, tokens: int = 60, requests: int = 40) -> Played:
    sent = [ask(f"{number}", 40, tokens, token=300 + number) for number in range(requests)]
    load = SimulatedLoad(requests=sent, offsets_ns=[number * 5_000_000 for number in range(requests)])
    return VirtualServer(SimulatorSettings(engine_settings=settings)).play(load, scrape_s=0.01, keep_steps=True)


def counted(body: bytes) -> tuple[float, ...]:
    """A page's counters of drafts, then of tokens accepted at each place."""
    samples = samples_of(body)
    places = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    keys = [(name, frozenset[tuple[str, str]]()) for name in NAMES]
    keys += [(places, frozenset({("position", f"{place}")})) for place in range(3)]
    return tuple(samples[key] for key in keys)


def test_every_window_of_the_page_has_the_drafts_of_its_steps():
    """Between any two scrapes: as many drafts, tokens and accepted ones, at each place, as the steps verified."""
    result = played()
    pages = [(page.response_ns, counted(page.body)) for page in result.pages]
    for (begin_ns, before), (end_ns, after) in pairwise(pages):
        drafts = [pair for step in result.steps if begin_ns < step.at_ns <= end_ns for pair in step.drafts]
        accepted = [taken for _, taken in drafts]
        expected = (len(drafts), sum(tokens for tokens, _ in drafts), sum(accepted))
        places = tuple(sum(taken > place for taken in accepted) for place in range(3))
        assert tuple(np.subtract(after, before)) == (*expected, *places)
    assert pages[-1][1][0] > 500


def test_tokens_are_those_of_the_engine_without_drafts():
    """Speculation changes when a token comes, never which; each step has 1 + accepted of them."""
    plain, drafted = played(EngineSettings(speed=PROFILES["fast"], max_num_seqs=4)), played()
    ids: list[list[list[int]]] = []
    for result in (plain, drafted):
        tokens: dict[int, list[int]] = {}
        for step in result.steps:
            for output in step.tokens:
                tokens.setdefault(output.number, []).append(output.token_id)
        ids.append(list(tokens.values()))
    assert ids[0] == ids[1]
    assert len(drafted.steps) < 0.6 * len(plain.steps)
    for step in drafted.steps:
        assert len(step.tokens) <= sum(1 + accepted for _, accepted in step.drafts) + len(step.first_tokens)


@pytest.mark.parametrize(("ratio", "a_step"), [(0.0, 1.0), (1.0, 4.0), (0.7, 1 + 0.7 + 0.49 + 0.343)])
def test_acceptance_is_as_stated(ratio: float, a_step: float):
    result = played(EngineSettings(speed=PROFILES["fast"], draft_tokens=3, accept_ratio=ratio), requests=100)
    records = [each.record for each in result.exchanges if each.record is not None]
    drafts = sum(sum(record.accepted) for record in records)
    accepted = sum(record.accepted_tokens for record in records)
    assert 1 + accepted / drafts == pytest.approx(a_step, rel=0.03)


@pytest.mark.parametrize(
    "limits",
    [{"max_model_len": 64}, {"kv_blocks": 24, "max_model_len": 128}, {"max_num_batched_tokens": 4}],
    ids=["no room behind the reply", "preempted", "a small budget"],
)
def test_drafts_keep_to_the_engines_limits(limits: dict[str, int]):
    """All replies are whole, no step has more tokens than its budget, and none goes beyond the model's length."""
    settings = EngineSettings(
        **{"speed": PROFILES["fast"], "draft_tokens": 3, "accept_ratio": 0.7, "max_num_seqs": 4} | limits
    )
    result = played(settings, tokens=24)
    records = [each.record for each in result.exchanges if each.record is not None]
    assert [(24, "length")] * 40 == [(record.output_tokens, record.finish_reason) for record in records]
    for step in result.steps:
        drafted = sum(tokens for tokens, _ in step.drafts)
        assert step.decode_requests + step.prefill.computed_tokens + drafted <= settings.max_num_batched_tokens
    assert result.end_ns > EPOCH_NS


async def _reply(settings: SimulatorSettings, truth: TruthLog, count: int) -> tuple[list[Reply], bytes]:
    """The replies to some chats at once, and the page behind them."""
    async with client_of(settings, truth=truth) as client:

        async def send(number: int) -> Reply:
            body = {
                "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 30, "ignore_eos": True,
                "stream": number % 2 == 0, "stream_options": {"include_usage": True} if number % 2 == 0 else None,
            }  # fmt: skip
            headers = {"X-Request-Id": f"{number}"}
            async with client.post("/v1/chat/completions", json=body, headers=headers) as response:
                whole = await response.read()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: {response.content_type}\r\n\r\n".encode()
            return PROTOCOLS["chat"].read_reply(200, head, whole, np.array([1]), np.array([len(whole)]))

        replies = await asyncio.gather(*map(send, range(count)))
        async with client.get("/metrics") as response:
            return replies, await response.read()


async def test_replies_state_the_drafts_of_the_truth():
    """Streamed or not; a stream has an event for a step's tokens; over all, what the page counts."""
    truth = TruthLog(None)
    settings = SimulatorSettings(engine_settings=SETTINGS, per_request_spec_decode_metrics=True)
    replies, page = await _reply(settings, truth, 12)
    records = {record.client_id: record for record in truth.records}
    total = np.zeros(3)
    for number, reply in enumerate(replies):
        record = records[f"{number}"]
        stated = json.loads(line(record))
        assert reply.timings is not None
        assert [stated[name] for name in COUNTS] == [getattr(reply.timings, name) for name in COUNTS]
        if number % 2 == 0:
            assert len(reply.chunk_ns) == 1 + sum(record.accepted)
        total += [stated[name] for name in COUNTS]
    assert tuple(total) == counted(page)[:3]


async def test_nothing_is_stated_that_was_not_asked_for():
    """Without the option no reply states drafts; without speculation neither reply, page nor truth does."""
    truth = TruthLog(None)
    replies, page = await _reply(SimulatorSettings(engine_settings=SETTINGS), truth, 1)
    assert replies[0].timings is None
    settings = SimulatorSettings(per_request_spec_decode_metrics=True)
    replies, page = await _reply(settings, truth, 1)
    assert replies[0].timings is None
    assert b"spec_decode" not in page
    last: RequestRecord = truth.records[-1]
    assert "drafts" not in json.loads(line(last))


@pytest.mark.parametrize(
    "wrong",
    [{"draft_tokens": -1}, {"accept_ratio": 1.1}, {"accept_ratio": -0.1}],
    ids=["fewer than none", "more than all", "less than none"],
)
def test_what_cannot_be_accepted(wrong: dict[str, float]):
    with pytest.raises(SettingsError, match=r"^--speculation "):
        EngineSettings(**wrong)


def test_other_engines_do_not_speculate():
    with pytest.raises(SettingsError, match=r"^--speculation: not with --engine sglang"):
        SimulatorSettings(engine="sglang", engine_settings=SETTINGS)
