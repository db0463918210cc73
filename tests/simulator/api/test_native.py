"""The engines' own endpoints of the simulator, byte for byte as a client of theirs reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from simulated_load import ask, client_of, play

from sidelight.simulator.api.dialects.sglang import DIALECT
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog

ENGINE = EngineSettings(speed=PROFILES["fast"], max_model_len=512, seed=5)
TRUTH = TruthLog(None)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a simulator that runs for one test and says a request's own times."""
    settings = SimulatorSettings(engine_settings=ENGINE, per_request_metrics=True)
    async with client_of(settings, truth=TRUTH) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str, str]:
    """Return status, content type and text of a reply."""
    async with client.post(path, json=body, headers={"X-Request-Id": "q"}) as response:
        return response.status, response.content_type, await response.text()


def truth() -> RequestRecord:
    """Return the record of the last request."""
    return TRUTH.records[-1]


def payloads(stream: str) -> list[Any]:
    """Return the JSON of every event of a stream."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_sglang_repeats_the_text_so_far(client: aiohttp.ClientSession):
    """Each event begins with the one before it; the last has the reason and the times; [DONE] ends the stream."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "stream": True}
    status, kind, stream = await post(client, "/generate", body)
    events = payloads(stream)
    texts = [event["text"] for event in events]
    assert (200, "text/event-stream", 3) == (status, kind, len(events))
    assert stream.endswith("data: [DONE]\n\n")
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[1])
    metas = [event["meta_info"] for event in events]
    assert [1, 2, 3] == [meta["completion_tokens"] for meta in metas]
    assert [None, None, {"type": "length", "length": 3}] == [meta["finish_reason"] for meta in metas]
    assert (metas[0]["id"], truth().cached_tokens) == ("rid-q", metas[2]["cached_tokens"])
    assert metas[2]["queue_time"] == (truth().scheduled_ns - truth().queued_ns) / 1e9
    assert (0, truth().dispatched_ns / 1e9) == (
        metas[2]["num_retractions"],
        metas[2]["api_server_dispatch_finish_ts"],
    )


def test_sglangs_queue_time_has_the_waits_after_a_retraction_too():
    """As a real one's: 494 ms of queue were 2,277. So what reads it has to look at num_retractions."""
    (_, retracted) = play(
        EngineSettings(kv_blocks=10, block_size=4, max_model_len=40, max_num_seqs=2, speed=PROFILES["fast"]),
        [(0, ask(name, 16, 20, token=token)) for name, token in (("a", 256), ("b", 300))],
    ).records
    info = ReplyInfo(response_id="b", model="m", created_s=0, prompt_tokens=16)
    meta = json.loads(DIALECT.whole(info, [], retracted))["meta_info"]
    assert 1 == meta["num_retractions"] == retracted.preemptions
    assert meta["queue_time"] == pytest.approx(retracted.queue_s + retracted.later_wait_ns / 1e9)
    assert retracted.later_wait_ns > 0


async def test_tgi_says_a_token_an_event(client: aiohttp.ClientSession):
    """The last one holds the whole text and the details; the same request to /generate gets only those."""
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
    _, _, stream = await post(client, "/generate_stream", body)
    events = payloads(stream)
    assert ["index", "token", "generated_text", "details"] == list(events[0])
    assert [None, None] == [event["generated_text"] for event in events[:-1]]
    text = "".join(event["token"]["text"] for event in events)
    details = {"finish_reason": "length", "generated_tokens": 3, "input_length": 2, "seed": None}
    assert (text, details) == (events[-1]["generated_text"], events[-1]["details"])
    _, kind, whole = await post(client, "/generate", body)
    assert ("application/json", {"generated_text": text, "details": details}) == (kind, json.loads(whole))
    refused = await post(client, "/generate_stream", {"inputs": "hello " * 1000})
    assert (422, "validation") == (refused[0], json.loads(refused[2])["error_type"])


async def test_ollama_says_a_line_a_token_and_then_its_durations(client: aiohttp.ClientSession):
    """In integer ns, of the truth; it streams unless it is asked not to."""
    body = {"model": "sim-llama", "messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 3}}
    status, kind, stream = await post(client, "/api/chat", body)
    lines = [json.loads(line) for line in stream.splitlines()]
    assert (200, "application/x-ndjson", 4) == (status, kind, len(lines))
    assert [False, False, False, True] == [line["done"] for line in lines]
    record, last = truth(), lines[-1]
    assert ("length", 3, record.prompt_tokens) == (last["done_reason"], last["eval_count"], last["prompt_eval_count"])
    assert record.finished_ns - record.arrival_ns == last["total_duration"]
    assert record.first_token_ns - record.scheduled_ns == last["prompt_eval_duration"]
    assert record.finished_ns - record.first_token_ns == last["eval_duration"]
    whole = json.loads((await post(client, "/api/chat", body | {"stream": False}))[2])
    assert (True, 12) == (whole["done"], len(whole["message"]["content"]))
    unknown = await post(client, "/api/chat", body | {"model": "other"})
    assert (404, '{"error":"model \'other\' not found"}') == (unknown[0], unknown[2])


async def test_responses_come_as_typed_events(client: aiohttp.ClientSession):
    """Created, in progress, an item, a delta a token, and how it ended; each event is named for its type."""
    body = {"model": "sim-llama", "input": "hello", "max_output_tokens": 2, "ignore_eos": True, "stream": True}
    _, _, stream = await post(client, "/v1/responses", body)
    kinds = [line.removeprefix("event: ") for line in stream.splitlines() if line.startswith("event: ")]
    events = payloads(stream)
    assert kinds == [event["type"] for event in events]
    assert [
        "response.created", "response.in_progress", "response.output_item.added", "response.output_text.delta",
        "response.output_text.delta", "response.output_text.done", "response.incomplete",
    ] == kinds  # fmt: skip
    last = events[-1]["response"]
    assert ("resp-q", {"reason": "max_output_tokens"}) == (last["id"], last["incomplete_details"])
    assert (2, truth().prompt_tokens) == (last["usage"]["output_tokens"], last["usage"]["input_tokens"])
    whole = json.loads((await post(client, "/v1/responses", body | {"stream": False}))[2])
    assert last["output"] == whole["output"]


async def test_messages_come_as_typed_events(client: aiohttp.ClientSession):
    """A message, a block, a delta a token, the end of each; input tokens are without those of the cache, as in vLLM."""
    said = {"role": "user", "content": "hello " * 20}
    body = {"model": "sim-llama", "messages": [said], "max_tokens": 2, "system": "Be brief.", "stream": True}
    await post(client, "/v1/messages", body)
    _, _, stream = await post(client, "/v1/messages", body)
    kinds = [line.removeprefix("event: ") for line in stream.splitlines() if line.startswith("event: ")]
    events, record = payloads(stream), truth()
    assert kinds == [event["type"] for event in events]
    assert [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ] == kinds  # fmt: skip
    assert {"input_tokens": record.prompt_tokens, "output_tokens": 0} == events[0]["message"]["usage"]
    counts = {"output_tokens": 2, "cache_read_input_tokens": record.cached_tokens}
    assert counts | {"input_tokens": record.prompt_tokens - record.cached_tokens} == events[5]["usage"]
    assert 0 < record.cached_tokens
    whole = json.loads((await post(client, "/v1/messages", body | {"stream": False}))[2])
    assert ("max_tokens", "".join(event["delta"]["text"] for event in events[2:4])) == (
        whole["stop_reason"],
        whole["content"][0]["text"],
    )


async def test_exos_bench_never_streams(client: aiohttp.ClientSession):
    """And never stops before max_tokens; its rates are by its own definition."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}
    status, kind, text = await post(client, "/bench/chat/completions", body)
    stats, record = json.loads(text)["generation_stats"], truth()
    assert (200, "application/json", 5) == (status, kind, stats["generation_tokens"])
    assert stats["generation_tps"] == pytest.approx(4e9 / (record.finished_ns - record.first_token_ns))
    assert stats["prompt_tps"] == pytest.approx(
        record.prompt_tokens * 1e9 / (record.first_token_ns - record.scheduled_ns)
    )


async def test_a_chats_own_times_are_in_its_usage(client: aiohttp.ClientSession):
    """As with vLLM's --enable-per-request-metrics, whose first token time begins with the scheduling."""
    body = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    _, _, stream = await post(client, "/v1/chat/completions", body)
    last, record = payloads(stream)[-1], truth()
    assert last["metrics"]["time_to_first_token_ms"] == (record.first_token_ns - record.scheduled_ns) / 1e6
    assert last["metrics"]["queue_time_ms"] == (record.scheduled_ns - record.queued_ns) / 1e6
    assert last["metrics"]["generation_time_ms"] == (record.finished_ns - record.first_token_ns) / 1e6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": record.cached_tokens}
    whole = json.loads((await post(client, "/v1/chat/completions", body | {"stream": False}))[2])
    assert last["metrics"].keys() == whole["metrics"].keys()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/tags", {"models": [{"name": "sim-llama", "model": "sim-llama"}]}),
        ("/info", {"model_id": "sim-llama", "max_input_tokens": 511, "max_total_tokens": 512}),
    ],
)
async def test_where_the_model_is_named(client: aiohttp.ClientSession, path: str, expected: object):
    """Ollama's and TGI's ways to say it."""
    async with client.get(path) as response:
        assert expected == await response.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ""}),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}}),
        ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": -1}}),
        ("/api/chat", {"model": "sim-llama", "messages": [], "options": {}}),
        ("/v1/responses", {"input": []}),
        ("/v1/responses", {"nothing": 1}),
        ("/v1/messages", {"model": "sim-llama", "messages": [], "max_tokens": 3}),
        ("/v1/messages", {"model": "sim-llama", "messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_what_cannot_be_run_is_refused(client: aiohttp.ClientSession, path: str, body: object):
    """With a 4xx and a message."""
    status, _, text = await post(client, path, body)
    assert status in {400, 422}
    assert json.loads(text)["error"]
