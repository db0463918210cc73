"""Whole runs with an engine that sends spans: as users start them, over loopback, against the engine's own truth."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar.run import Run, open_run

LOAD = ("--rate", "20", "--duration", "2", "--warmup", "2", "--listen", "off", "--quiet")


def free_pair() -> int:
    """A port of the loopback that is free, as is the next one; below those that outgoing connections get."""
    while True:
        port = random.randrange(20_000, 32_000)
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port


async def sidelight(*arguments: str | Path) -> tuple[int, str]:
    """Run a command to its end: its exit code, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", *map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode is not None
    return process.returncode, said.decode()


@asynccontextmanager
async def simulated(*arguments: str | Path) -> AsyncIterator[str]:
    """The engine's process, by its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simulator", "--speed-profile", "fast", "--exit-on-eof", *map(str, arguments)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url: str = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["url"]
        yield url
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Whoever comes next in a pipeline: takes every export over HTTP, and keeps the requests."""
    taken: list[web.Request] = []

    async def take(request: web.Request) -> web.Response:
        await request.read()
        taken.append(request)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", taken
    await runner.cleanup()


def truth(path: Path) -> dict[str, dict[str, Any]]:
    """What the engine knows of each request, by the id in its reply."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["response_id"]: record for record in records}


def queue_and_prefill(run: Run) -> dict[str, tuple[float, float]]:
    return {
        str(name): (queue_s, prefill_s)
        for name, queue_s, prefill_s in zip(
            run.spans.request_id, run.spans.queue_s.tolist(), run.spans.prefill_s.tolist(), strict=True
        )
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_every_request_is_joined_by_its_trace(tmp_path: Path, engine: str):
    """Its queue and prefill are the engine's own to the bit; each export is passed on; all of it is counted."""
    port = free_pair()
    async with collector() as (behind, taken):
        spans = ("--otlp-listen", f"127.0.0.1:{port}", "--otlp-forward", behind, "--otlp-header", "X-Team: hush")
        told = ("--engine", engine, "--otlp-endpoint", f"http://127.0.0.1:{port}", "--truth", tmp_path / "truth")
        async with simulated(*told) as url:
            code, said = await sidelight("run", "--url", url, *LOAD, *spans, "--out", tmp_path / "run")
    assert 0 == code, said
    run = open_run(tmp_path / "run")
    true = truth(tmp_path / "truth")
    assert len(true) > 20
    assert {
        name: ((one["scheduled_ns"] - one["queued_ns"]) / 1e9, (one["first_token_ns"] - one["scheduled_ns"]) / 1e9)
        for name, one in true.items()
    } == queue_and_prefill(run)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"trace": 1.0, "response": 0.0, "histogram": 0.0, "none": 0.0} == summary["correlation"]["coverage"]
    assert run.span_counts is not None
    assert len(taken) == run.span_counts.exports == run.span_counts.forwarded
    assert {"hush"} == {request.headers["X-Team"] for request in taken}
    assert 0 == run.receiver_deaths
    (event,) = [event for event in run.events if event.name == "spans"]
    # One request was asked before the run, and is none of its own.
    assert (len(true) - 1, 0) == (event.data["awaited"], event.data["missing"])
    assert "hush" not in (tmp_path / "run" / "manifest.json").read_text()


async def test_an_engine_without_tracing_is_told_how(tmp_path: Path):
    """The run is whole without spans; it says that none came, where to, and the engine's own switch."""
    async with simulated() as url:
        code, said = await sidelight(
            "run", "--url", url, *LOAD, "--otlp-listen", "127.0.0.1:0", "--out", tmp_path / "r"
        )
    assert 0 == code, said
    run = open_run(tmp_path / "r")
    assert (0, 0) == (len(run.spans), run.receiver_deaths)
    (note,) = [note for note in run.notes if "no span came" in note]
    assert "127.0.0.1:0" not in note
    assert note.endswith("switch tracing on in the engine (vLLM: --otlp-traces-endpoint http://HOST:4317)")


async def test_a_scrape_may_receive_spans_alone(tmp_path: Path):
    """With no page at all; and a page that does not answer is a note, not the end."""
    code, said = await sidelight(
        *("scrape", "--otlp-listen", "127.0.0.1:0", "--duration", "0.2", "--quiet", "--out", tmp_path / "alone")
    )
    assert 0 == code, said
    assert (tmp_path / "alone/raw/spans-0.log").exists()
    code, said = await sidelight(
        *("scrape", "--otlp-listen", "127.0.0.1:0", "--metrics", f"http://127.0.0.1:{free_pair()}/metrics"),
        *("--duration", "0.2", "--quiet", "--out", tmp_path / "unanswered"),
    )
    assert 0 == code, said
    assert any("no server metrics" in note for note in open_run(tmp_path / "unanswered").notes)


@pytest.mark.parametrize("taken", [0, 1], ids=["grpc", "http"])
async def test_an_address_in_use_is_said_before_anything_is_recorded(tmp_path: Path, taken: int):
    """One line with the option, the address and the cure; exit 2; no run directory."""
    port = free_pair()
    address = f"127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port + taken)):
        code, said = await sidelight("scrape", "--otlp-listen", address, "--out", tmp_path / "run")
    assert 2 == code
    assert (
        f"sidelight: --otlp-listen {address}: cannot listen on 127.0.0.1:{port + taken}: Address already in use; "
        "end what listens there, or name another HOST:PORT (its PORT+1 is for HTTP) here and to the engine\n"
    ) == said
    assert not (tmp_path / "run").exists()
