"""What stands before the simulated engine, and its prefix cache, over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from simulated_load import client_of
from waiting import BOUND_S

from sidelight.simulator.settings import PROFILES, EngineSettings, GatewaySettings, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog

FAST = EngineSettings(speed=PROFILES["fast"])
PROMPT = {"prompt": [256] * 64, "max_tokens": 4, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {
        "model": "sim-llama",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": False,
    },
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
    "/api/chat": {"model": "sim-llama", "messages": [{"role": "user", "content": "hello"}], "stream": False},
}


def settings(engine_settings: EngineSettings = FAST, **fields: Any) -> SimulatorSettings:
    return SimulatorSettings(engine_settings=engine_settings, **fields)


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    async with client.post(path, json=body) as response:
        return response.status, await response.text()


async def flush(client: aiohttp.ClientSession) -> int:
    async with client.get("/flush_cache") as response:
        return response.status


async def cached(client: aiohttp.ClientSession, truth: TruthLog, **fields: Any) -> int:
    """Send the prompt and return how much of it was cached."""
    status, text = await post(client, "/v1/completions", {**PROMPT, **fields})
    assert status == 200, text
    return truth.records[-1].cached_tokens


async def test_vllms_reset_empties_the_cache_and_says_nothing():
    """A repeated prompt is found, until the cache is reset: HTTP 200 without a word."""
    truth = TruthLog(None)
    async with client_of(settings(), truth=truth) as client:
        assert [0, 48] == [await cached(client, truth) for _ in range(2)]
        assert (200, "") == await post(client, "/reset_prefix_cache", None)
        assert 0 == await cached(client, truth)


async def test_a_running_request_keeps_the_cache_and_sglang_says_so():
    """While a request holds blocks nothing is flushed: HTTP 400; then it is, by GET too."""
    truth = TruthLog(None)
    slow = EngineSettings(slow=5)
    async with client_of(settings(slow, engine="sglang"), truth=truth) as client:
        body = {**PROMPT, "max_tokens": 2000, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            status, text = await post(client, "/flush_cache", None)
            assert (400, True) == (status, text.startswith("Cache flushed.\nPlease check backend logs"))
        # The client is gone, which the engine sees with its next output.
        async with asyncio.timeout(BOUND_S):
            while (await flush(client)) == 400:
                pass
        assert 0 == await cached(client, truth)


async def test_a_salt_separates_caches_and_must_not_be_empty():
    """The same prompt is found with the same salt alone."""
    truth = TruthLog(None)
    async with client_of(settings(), truth=truth) as client:
        salts = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
        assert [0, 0, 0, 48, 48] == [await cached(client, truth, **salt) for salt in salts]
        status, text = await post(client, "/v1/completions", {**PROMPT, "cache_salt": ""})
        assert 400 == status
        assert "Parameter 'cache_salt' must be a non-empty string if provided." in text


async def test_without_prefix_caching_the_page_counts_no_queries_and_says_that_it_is_off():
    """As vLLM: neither hits nor queries move, and the configuration says so."""
    truth = TruthLog(None)
    async with client_of(settings(EngineSettings(speed=PROFILES["fast"], prefix_caching=False)), truth=truth) as client:
        assert [0, 0] == [await cached(client, truth) for _ in range(2)]
        async with client.get("/metrics") as response:
            page = await response.text()
    assert 'enable_prefix_caching="False"' in page
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="sim-llama"} 0.0' in page


async def test_a_priority_is_refused_where_there_are_none():
    """As vLLM: 0 is what everybody has."""
    async with client_of(settings()) as client:
        assert 200 == (await post(client, "/v1/completions", {**PROMPT, "priority": 0}))[0]
        status, text = await post(client, "/v1/completions", {**PROMPT, "priority": -1})
        assert 400 == status
        assert "Got priority -1 but Priority scheduling is not enabled." in text
    async with client_of(settings(EngineSettings(speed=PROFILES["fast"], policy="priority"))) as client:
        assert 200 == (await post(client, "/v1/completions", {**PROMPT, "priority": -1}))[0]


@pytest.mark.parametrize("path", BODIES)
async def test_a_guardrail_refuses_in_each_dialect(path: str):
    """HTTP 400, as a content filter has it, and the engine never sees the request."""
    truth = TruthLog(None)
    async with client_of(settings(gateway=GatewaySettings(refuse_ratio=1)), truth=truth) as client:
        status, text = await post(client, path, BODIES[path])
    assert 400 == status
    assert "refused by the content filter" in text
    assert not truth.records


async def test_a_refusal_over_a_websocket_is_a_message():
    """It has the status that HTTP would have; the connection stays for the next request."""
    simulated = settings(gateway=GatewaySettings(refuse_ratio=1))
    async with client_of(simulated) as client, client.ws_connect("/v1/stream") as socket:
        for _ in range(2):
            await socket.send_json({"messages": [{"role": "user", "content": "hello"}]})
            message = await socket.receive_json(timeout=BOUND_S)
            assert ("error", 400) == (message["type"], message["code"])


async def test_guardrails_take_their_time_outside_the_engine():
    """Before its arrival, which is by the engine's clock, and behind its last token; streamed or whole."""
    truth = TruthLog(None)
    gateway = GatewaySettings(input_s=0.2, input_token_s=1e-3, hold_tokens=3, hold_s=0.1)
    async with client_of(settings(gateway=gateway), truth=truth) as client:
        loop = asyncio.get_running_loop()
        for stream, least_s in ((False, 0.264 + 0.1), (True, 0.264 + 2 * 0.1)):
            began_s = loop.time()
            status, text = await post(client, "/v1/completions", {**PROMPT, "stream": stream})
            assert 200 == status
            # A timer may fire earlier by the clock's resolution.
            assert loop.time() - began_s - truth.records[-1].e2e_s >= least_s - 0.01
            assert text.count("data: {") == (4 if stream else 0)


async def test_beyond_the_limit_requests_are_turned_away():
    """While one of at most one is in flight, the next gets HTTP 503; afterwards one is served again."""
    async with client_of(settings(EngineSettings(slow=5), gateway=GatewaySettings(fail_above=1))) as client:
        body = {**PROMPT, "max_tokens": 2000, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            status, text = await post(client, "/v1/completions", PROMPT)
            assert 503 == status
            assert "The server is overloaded: 1 requests are in flight" in text
        async with asyncio.timeout(BOUND_S):
            while (await post(client, "/v1/completions", PROMPT))[0] == 503:
                pass


async def test_out_of_memory_ends_all_that_run_and_the_server_goes_on():
    """Whole replies get HTTP 500 with CUDA's words, streams an event with them; then a single request is served."""
    truth = TruthLog(None)
    async with client_of(settings(EngineSettings(oom_at=2)), truth=truth) as client:
        body = {**PROMPT, "max_tokens": 100}
        (status, text), (streamed_status, streamed) = await asyncio.gather(
            post(client, "/v1/completions", body), post(client, "/v1/completions", {**body, "stream": True})
        )
        assert (500, 200) == (status, streamed_status)
        assert "CUDA out of memory" in text
        assert "CUDA out of memory" in streamed
        assert ["error", "error"] == [record.finish_reason for record in truth.records]
        assert 200 == (await post(client, "/v1/completions", PROMPT))[0]


async def test_each_step_is_a_line_of_its_file(tmp_path: Path):
    """A prompt of 64 tokens is one prefill; its other three tokens are decodes."""
    path = tmp_path / "steps.jsonl"
    async with client_of(settings(truth_steps=path)) as client:
        await post(client, "/v1/completions", PROMPT)
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [("prefill", 64)] + 3 * [("decode", 0)] == [(step["kind"], step["prefill_tokens"]) for step in steps]
    assert {1} == {step["sequences"] for step in steps}
    assert all(step["begin_ns"] < step["end_ns"] for step in steps)
