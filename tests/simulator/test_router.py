"""The router before a prefill engine and a decode engine, over loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recordings
from aiohttp import ClientSession
from waiting import BOUND_S

from sidelight.correlator.breakdown import break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.clock_offset import clock_offsets
from sidelight.correlator.exact.join import join
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.scraper.spans.log import packed
from sidelight.scraper.spans.requests import engine_spans
from sidelight.simulator.router import routing
from sidelight.simulator.server import running
from sidelight.simulator.settings import EngineSettings, RouterSettings, SimulatorSettings, speed_profile
from sidelight.simulator.telemetry.spans import export
from sidelight.simulator.telemetry.truth import TruthLog

SHARED_NAMES = ("queue", "prefill", "kv_transfer", "decode_queue", "first_step")
FAST = EngineSettings(speed=speed_profile("fast"))
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
BODY: dict[str, Any] = {"prompt": "hello " * 40, "max_tokens": 7, "ignore_eos": True, "stream": True}


class Pair:
    """Both engines' settings and truth, the router's, and a client with its URL."""

    def __init__(self, folder: Path, engine: str = "vllm") -> None:
        self.engine = engine
        self.prefill, self.decode = TruthLog(None), TruthLog(None)
        self.truth = folder / "router.jsonl"

    async def start(self, stack: AsyncExitStack, *, hold_s: float, **limits: Any) -> None:
        each = [replace(FAST, kv_role=role, **{"kv_latency_s": 0.03} | limits) for role in ("prefill", "decode")]
        self.settings = [SimulatorSettings(engine=self.engine, engine_settings=engine) for engine in each]
        self.urls = [
            await stack.enter_async_context(running(settings, truth=truth))
            for settings, truth in zip(self.settings, (self.prefill, self.decode), strict=True)
        ]
        router = RouterSettings(
            prefill_url=self.urls[0],
            decode_url=self.urls[1],
            at_once=self.engine == "sglang",
            hold_s=hold_s,
            truth=self.truth,
        )
        self.url = await stack.enter_async_context(routing(router))
        self.client = await stack.enter_async_context(ClientSession())


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    engines = Pair(tmp_path)
    async with AsyncExitStack() as stack:
        await engines.start(stack, hold_s=0.05)
        yield engines


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_is_prefilled_here_and_decoded_there(pair: Pair, path: str):
    """One token of the first engine, all of the second, which computes nothing of the prompt and waits for its load."""
    prompt = {"messages": [{"role": "user", "content": BODY["prompt"]}], "max_completion_tokens": 7}
    body = BODY if path == "/v1/completions" else {name: BODY[name] for name in BODY if "_t" not in name} | prompt
    headers = {"X-Request-Id": "r1", "traceparent": TRACEPARENT}
    async with pair.client.post(pair.url + path, json=body, headers=headers) as response:
        text = await response.text()
    assert (200, "text/event-stream") == (response.status, response.content_type)
    assert text.endswith("data: [DONE]\n\n")
    ((prefill,), (decode,)) = (pair.prefill.records, pair.decode.records)
    assert (1, 1, False, -1) == (prefill.max_tokens, prefill.output_tokens, prefill.streamed, prefill.load_ns)
    assert (7, True) == (decode.output_tokens, decode.streamed)
    assert decode.prompt_tokens == decode.loaded_tokens == prefill.prompt_tokens
    for record in (prefill, decode):
        assert ("r1", TRACEPARENT) == (record.client_id, record.traceparent)
    (stamps,) = (json.loads(line) for line in pair.truth.read_text().splitlines())
    assert "r1" == stamps.pop("request_id")
    assert list(stamps.values()) == sorted(stamps.values())
    known_ns = [decode.arrival_ns, decode.queued_ns, decode.load_ns, decode.loaded_ns, decode.scheduled_ns]
    assert known_ns == sorted(known_ns)
    assert stamps["decode_call_ns"] - stamps["prefill_reply_ns"] > 49_000_000
    assert 30_000_000 == decode.loaded_ns - decode.load_ns


async def test_what_is_not_for_two_engines_is_the_decode_engines(pair: Pair):
    """Its models, its tokenizer, and a reply in one piece."""
    async with pair.client.get(f"{pair.url}/v1/models") as response:
        assert "sim-llama" == (await response.json())["data"][0]["id"]
    async with pair.client.post(f"{pair.url}/tokenize", json={"prompt": "hello"}) as response:
        assert 0 < (await response.json())["count"]
    async with pair.client.post(f"{pair.url}/v1/completions", json=BODY | {"stream": False}) as response:
        assert 7 == (await response.json())["usage"]["completion_tokens"]


async def test_a_refusal_of_the_prefill_engine_is_the_answer(pair: Pair):
    """With its status and its words; the decode engine hears nothing of it."""
    async with pair.client.post(f"{pair.url}/v1/completions", json=BODY | {"model": "other"}) as response:
        assert (404, "NotFoundError") == (response.status, (await response.json())["error"]["type"])
    async with pair.client.post(f"{pair.url}/v1/completions", data=b"[1]") as response:
        assert 400 == response.status
    assert not pair.decode.records


async def test_a_client_that_leaves_ends_the_load(pair: Pair):
    """The decode engine's request is aborted, whatever it was doing."""
    async with pair.client.post(f"{pair.url}/v1/completions", json=BODY | {"max_tokens": 4000}) as response:
        await response.content.readline()
    async with asyncio.timeout(BOUND_S):
        while not pair.decode.records:
            await pair.client.get(f"{pair.url}/health")
    assert ["abort"] == [record.finish_reason for record in pair.decode.records]


async def test_an_engine_that_is_not_there_is_a_bad_gateway():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    router = RouterSettings(prefill_url=url, decode_url=url)
    async with (
        routing(router) as router_url,
        ClientSession() as client,
        client.post(f"{router_url}/v1/completions", json=BODY) as response,
    ):
        assert 502 == response.status


async def test_the_engines_know_their_roles_only_by_request():
    """Without a router the prefill engine decodes, and the decode engine prefills; neither speaks of a transfer."""
    for role in ("prefill", "decode"):
        truth = TruthLog(None)
        async with (
            running(SimulatorSettings(engine_settings=replace(FAST, kv_role=role)), truth=truth) as url,
            ClientSession() as client,
            client.post(f"{url}/v1/completions", json=BODY | {"stream": False}) as response,
        ):
            assert "kv_transfer_params" not in await response.json()
        assert [(7, -1)] == [(record.output_tokens, record.load_ns) for record in truth.records]


async def send(pair: Pair, number: int, words: int) -> dict[str, Any]:
    """Send a request with a trace of its own, and return what its client saw."""
    trace = f"{number + 1:032x}"
    body, submit_ns = BODY | {"prompt": "hello " * words}, time.time_ns()
    headers = {"traceparent": f"00-{trace}-{'b' * 16}-01"}
    async with pair.client.post(f"{pair.url}/v1/completions", json=body, headers=headers) as response:
        first_ns, end_ns = await response.content.readany() and time.time_ns(), await response.read() and time.time_ns()
    stamps = {"submit_ns": submit_ns, "end_ns": end_ns, "first_output_ns": first_ns, "first_token_ns": first_ns}
    return {"trace_id": trace, "status": "ok", "http_status": response.status, **stamps}


async def test_the_stages_of_sglangs_engines_are_the_parts_of_each_request(tmp_path: Path):
    """By the spans that they send: as true, though no stamps of the two are compared; the sum is the client's TTFT."""
    engines = Pair(tmp_path, "sglang")
    async with AsyncExitStack() as stack:
        await engines.start(stack, hold_s=0.0, max_num_seqs=1)
        sent = await asyncio.gather(*(send(engines, number, 40 + 30 * number) for number in range(5)))
    exports = [
        packed(time.time_ns(), "grpc", export(tuple(log.records), settings).SerializeToString())
        for log, settings in ((engines.prefill, engines.settings[0]), (engines.decode, engines.settings[1]))
    ]
    log = recordings.request_log(sent)
    joined = join(log, engine_spans(exports))
    parts = break_down(log, joined, nothing(len(log), ""), clock_offsets(log, joined))
    assert {"exact"} == set(parts.quality.tolist())
    known_ns = np.array([parts.seconds(part) for part in TTFT_PARTS]) * 1e9
    assert np.nansum(known_ns, axis=0) == pytest.approx(1e9 * parts.ttft_s, abs=1)
    by_trace = [
        {record.traceparent[3:35]: record for record in log.records} for log in (engines.prefill, engines.decode)
    ]
    for row, trace in enumerate(log.trace_id.tolist()):
        first, second = (records[trace] for records in by_trace)
        assert first.meeting
        assert second.meeting
        assert first.meeting.number == second.meeting.number
        assert {
            "queue": first.scheduled_ns - first.queued_ns,
            "prefill": first.first_token_ns - first.scheduled_ns,
            "kv_transfer": first.queued_ns - first.meeting.begun_ns + first.meeting.send_ns,
            "decode_queue": second.scheduled_ns - second.queued_ns,
            "first_step": second.first_token_ns - second.scheduled_ns,
        } == pytest.approx({name: 1e9 * getattr(parts, f"{name}_s")[row] for name in SHARED_NAMES}, abs=1)
        # The decode engine has the cache no sooner than it was computed and sent.
        assert second.dispatched_ns >= first.finished_ns + first.meeting.send_ns


async def test_a_request_without_a_room_is_refused_by_sglangs_engines(tmp_path: Path):
    """With status and words of SGLang; as by its router, where a model's length is exceeded."""
    engines = Pair(tmp_path, "sglang")
    async with AsyncExitStack() as stack:
        await engines.start(stack, hold_s=0.0)
        for url in engines.urls:
            async with engines.client.post(f"{url}/v1/completions", json=BODY) as response:
                assert (400, True) == (response.status, "without bootstrap room id" in await response.text())
        async with engines.client.post(f"{engines.url}/v1/completions", json=BODY | {"max_tokens": 10**6}) as response:
            assert 400 == response.status
    assert not engines.prefill.records
