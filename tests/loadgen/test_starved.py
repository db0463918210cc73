from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen import log, records
from loadgen.clock import Clock
from loadgen.self_check import NOT_TRUSTED, self_check

if TYPE_CHECKING:
    from conftest import Peer, Serve, Wire

BOUND_S = 20.0
EVERY_NS = 10_000_000
REQUESTS = 60


def _plan(path: Path) -> None:
    """An open loop, a request each 10 ms."""
    fd = log.open_log(path)
    for index in range(REQUESTS):
        log.append_record(
            fd,
            log.PlannedRequest(
                index=index, phase="measure", workload_class="test", path="/v1/chat/completions", body=b"{}",
                input_tokens=10, max_tokens=5, offset_ns=index * EVERY_NS,
            ),
        )  # fmt: skip
    log.append_record(fd, records.plan_end("measure"))
    os.close(fd)


async def _tell(process: asyncio.subprocess.Process, **command: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    await process.stdin.drain()


async def _hear(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stdout is not None
    return json.loads(await asyncio.wait_for(process.stdout.readline(), BOUND_S))


async def _run_starved(process: asyncio.subprocess.Process, url: str, directory: Path, asked: asyncio.Event) -> None:
    """Drive the plan, and hold the worker from its first request to well after its last was due."""
    clock = Clock(offset_ns=time.time_ns() - time.monotonic_ns())
    await _tell(
        process, worker=0, workers=1, run_id="run", clock_offset_ns=clock.offset_ns, urls=[url], headers={},
        out=str(directory / "requests-0.log"), request_timeout_s=BOUND_S,
    )  # fmt: skip
    assert {"event": "ready"} == await _hear(process)
    start_ns = clock.now_ns()
    await _tell(process, cmd="run", plan=str(directory / "plan"), start_ns=start_ns)
    await asyncio.wait_for(asked.wait(), BOUND_S)
    process.send_signal(signal.SIGSTOP)
    released_ns = start_ns + (REQUESTS + 20) * EVERY_NS
    await asyncio.sleep(max(released_ns - clock.now_ns(), 0) / 1e9)  # starving takes as long as it takes
    process.send_signal(signal.SIGCONT)
    assert (await _hear(process))["event"] == "drained"
    await _tell(process, cmd="exit")
    await asyncio.wait_for(process.wait(), BOUND_S)


async def test_a_starved_generator_says_so(serve: Serve, wire: type[Wire], tmp_path: Path):
    """A worker that was held while the server was ready to answer: its own doing, in the first line."""
    asked = asyncio.Event()

    async def script(peer: Peer) -> None:
        asked.set()
        await peer.say(wire.answer(3))

    server = await serve(script)
    _plan(tmp_path / "plan")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen.worker", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        await _run_starved(process, server.url, tmp_path, asked)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # asyncio leaves the pipes of a killed child to the garbage collector
    logged = list(log.read_log(tmp_path / "requests-0.log"))
    parts = [record for record in logged if isinstance(record, log.RequestPart)]
    stats = [record for record in logged if isinstance(record, log.WorkerStat)]
    requests = log.assemble(log.read_plan(tmp_path / "plan"), parts, run_id="run")
    assert ["ok"] * REQUESTS == requests.status.tolist()
    got = self_check(requests, stats, open_loop=True)
    assert (NOT_TRUSTED, False) == (got["verdict"], got["trusted"])
    assert got["first_line"].startswith(f"The load generator {NOT_TRUSTED}: submissions were late by p99 ")
    # Of a phase alone, in which it is the loop that stood still, the same is told without any schedule.
    assert not self_check(requests, stats, open_loop=False)["trusted"]
