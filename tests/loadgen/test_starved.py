from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from waiting import BOUND_S

from loadgen import records
from loadgen.requests.self_check import NOT_TRUSTED, self_check

if TYPE_CHECKING:
    from conftest import Peer, Serve, Start, Wire

EVERY_NS = 10_000_000
REQUESTS = 60


async def test_a_starved_generator_says_so(serve: Serve, wire: type[Wire], start: Start):
    """A worker that was held while the server was ready to answer: its own doing, in the first line."""
    asked, held = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        asked.set()
        await held.wait()
        await peer.say(wire.answer(3))

    server = await serve(script)
    worker = await start(server.url)
    start_ns = worker.clock.now_ns()
    await worker.run(0, start_ns=start_ns, close=False)
    await asyncio.wait_for(asked.wait(), BOUND_S)
    # Held from its first request, which is answered then, to well after its last was due.
    worker.process.send_signal(signal.SIGSTOP)
    held.set()
    now_ns = worker.clock.now_ns() - start_ns
    worker.plan(*range(now_ns, now_ns + (REQUESTS - 1) * EVERY_NS, EVERY_NS), first=1)
    await asyncio.sleep((REQUESTS + 20) * EVERY_NS / 1e9)  # starving takes as long as it takes
    worker.process.send_signal(signal.SIGCONT)
    assert (await worker.hear())["event"] == "drained"
    await worker.send(cmd="exit")
    await worker.exit_code()
    logged = records.read_log(worker.directory / "requests-0.log")
    stats = [record for record in logged if isinstance(record, records.WorkerStat)]
    requests = worker.log()
    assert ["ok"] * REQUESTS == requests.status.tolist()
    got = self_check(requests, stats, open_loop=True)
    assert (NOT_TRUSTED, False) == (got.verdict, got.trusted)
    assert got.first_line.startswith(f"The load generator {NOT_TRUSTED}: submissions were late by p99 ")
    # Of a phase alone, in which it is the loop that stood still, the same is told without any schedule.
    assert not self_check(requests, stats, open_loop=False).trusted
