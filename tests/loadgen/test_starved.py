from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from waiting import BOUND_S

from sidelight.loadgen import records
from sidelight.loadgen.requests.self_check.check import self_check

if TYPE_CHECKING:
    from conftest import Peer, Serve, Start, Wire

EVERY_NS = 10_000_000
REQUESTS = 60


async def test_a_starved_generator_says_so(serve: Serve, wire: type[Wire], start: Start):
    """A worker that was held while requests were due: they left in a bunch, which changes the load."""
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
    check = self_check(requests, stats, open_loop=True)
    assert check.arrivals is not None
    assert (True, REQUESTS) == (check.arrivals.distorted, check.arrivals.late_ms.count)
    assert check.arrivals.late_ms.max > 20 * EVERY_NS / 1e6
    assert "left in bunches that were not asked for" in (check.arrivals.sentence or "")
    # The request that was answered meanwhile was read late and all at once: when its first token came is not known.
    assert check.trusted is False
    assert check.first_line.startswith("TTFT may be wrong by up to ")
