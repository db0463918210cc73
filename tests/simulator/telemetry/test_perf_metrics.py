"""The simulated TensorRT-LLM's records of requests: bounded, returned once, and true."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from simulated_load import client_of

from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog

ENGINE = EngineSettings(speed=PROFILES["fast"])


async def get_json(client: aiohttp.ClientSession, path: str) -> Any:
    async with client.get(path) as response:
        assert 200 == response.status
        return await response.json()


async def ask(client: aiohttp.ClientSession, count: int) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    for _ in range(count):
        async with client.post("/v1/chat/completions", json=body) as response:
            await response.read()


async def test_records_are_true_and_returned_once():
    """By a clock that is not ours: its offset, which it states, gives the true stamps back to a microsecond."""
    truth = TruthLog(None)
    settings = SimulatorSettings(engine="trtllm", perf_metrics_max_requests=100, engine_settings=ENGINE)
    async with client_of(settings, truth=truth) as client:
        await ask(client, 3)
        records = await get_json(client, "/perf_metrics")
        assert [] == await get_json(client, "/perf_metrics")
        exchange = await get_json(client, "/steady_clock_offset")
    assert exchange["receive_ts"] <= exchange["transmit_ts"]
    assert [1, 2, 3] == [record["request_id"] for record in records]
    times = [record["perf_metrics"]["timing_metrics"] for record in records]
    offset_s = truth.records[0].arrival_ns / 1e9 - times[0]["server_arrival_time"]
    assert abs(offset_s) > 1e6
    for reported, true in zip(times, truth.records, strict=True):
        stamps = [true.arrival_ns, true.scheduled_ns, true.first_token_ns, true.finished_ns]
        names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
        since_s = [reported[name] - times[0]["arrival_time"] for name in names]
        assert [(stamp - truth.records[0].arrival_ns) / 1e9 for stamp in stamps] == pytest.approx(since_s, abs=1e-6)


async def test_only_the_newest_are_kept():
    """As many as were asked for; an abort leaves none."""
    settings = SimulatorSettings(engine="trtllm", perf_metrics_max_requests=2, engine_settings=ENGINE)
    async with client_of(settings) as client:
        await ask(client, 4)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4000, "stream": True}
        async with client.post("/v1/chat/completions", json=body) as response:
            await response.content.readany()
        await asyncio.sleep(0)
        assert [3, 4] == [record["request_id"] for record in await get_json(client, "/perf_metrics")]


async def test_off_by_default():
    """As TensorRT-LLM's: the page is there, and empty."""
    async with client_of(SimulatorSettings(engine="trtllm", engine_settings=ENGINE)) as client:
        await ask(client, 1)
        assert [] == await get_json(client, "/perf_metrics")


async def test_other_engines_have_none():
    """Neither the page nor the clock."""
    async with client_of(SimulatorSettings(engine_settings=ENGINE, perf_metrics_max_requests=9)) as client:
        for path in ("/perf_metrics", "/steady_clock_offset"):
            async with client.get(path) as response:
                assert (404, {"detail": "Not Found"}) == (response.status, json.loads(await response.read()))
