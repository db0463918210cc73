"""The router before a prefill engine and a decode engine, over loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from waiting import BOUND_S

from sidelight.simulator.router import routing
from sidelight.simulator.server import running
from sidelight.simulator.settings import EngineSettings, RouterSettings, SimulatorSettings, speed_profile
from sidelight.simulator.telemetry.truth import TruthLog

FAST = EngineSettings(speed=speed_profile("fast"))
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
BODY: dict[str, Any] = {"prompt": "hello " * 40, "max_tokens": 7, "ignore_eos": True, "stream": True}


class Pair:
    """Both engines' truth, the router's, and a client with its URL."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = TruthLog(None), TruthLog(None)
        self.truth = folder / "router.jsonl"

    async def start(self, stack: AsyncExitStack, *, hold_s: float) -> None:
        urls = [
            await stack.enter_async_context(
                running(SimulatorSettings(engine_settings=replace(FAST, kv_role=role, kv_latency_s=0.03)), truth=truth)
            )
            for role, truth in (("prefill", self.prefill), ("decode", self.decode))
        ]
        router = RouterSettings(prefill_url=urls[0], decode_url=urls[1], hold_s=hold_s, truth=self.truth)
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
