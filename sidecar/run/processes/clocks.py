"""Exchanges of stamps with the agents of nodes: before the load, during and after it, each recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from sidelight.recorded.directory import RAW
from sidelight.recorded.errors import WorkerDied
from sidelight.recorded.nodes import EDGE, LOG, ClockExchange, NodeClock, encode_clock, tightest
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.frames import FrameLog
from sidelight.sidecar.run.processes.remote import Link, RemotePlace

EVERY_S = 0.5


@asynccontextmanager
async def compared(path: Path, clock: AnchoredClock, places: Sequence[RemotePlace]) -> AsyncIterator[None]:
    """Compare the clocks of nodes with the run's while the context is open. Raises WorkerDied where one is lost before.

    The places then have the offset of their node, and the worst round trip to it. A place's worker is known by its
    position.
    """
    by_link: dict[int, list[int]] = {}
    for worker, place in enumerate(places):
        by_link.setdefault(id(place.link), []).append(worker)
    async with AsyncExitStack() as stack:
        for number, workers in enumerate(by_link.values()):
            log = stack.enter_context(FrameLog(path / RAW / LOG.format(number)))
            link = places[workers[0]].link
            exchanges = [await _exchange(link, clock) for _ in range(EDGE)]
            best = tightest(exchanges)
            for place in (places[worker] for worker in workers):
                place.apart_ns = best.offset_ns - clock.offset_ns
                place.round_trip_s = max(2 * exchange.error_ns for exchange in exchanges) / 1e9
            clock_of_node = NodeClock(node=link.node, workers=tuple(workers), offset_ns=best.offset_ns)
            log.append(encode_clock(clock_of_node), *map(encode_clock, exchanges))
            await stack.enter_async_context(_comparing(link, clock, log))
        yield


@asynccontextmanager
async def _comparing(link: Link, clock: AnchoredClock, log: FrameLog) -> AsyncIterator[None]:
    """Record an exchange twice a second while the context is open. More follow at its end."""

    async def compare(count: int | None, every_s: float) -> None:
        with suppress(WorkerDied, OSError):  # a lost node shows in its workers, a full disk in their logs
            while count is None or (count := count - 1) >= 0:
                log.append(encode_clock(await _exchange(link, clock)))
                await asyncio.sleep(every_s)

    comparing = asyncio.create_task(compare(None, EVERY_S))
    try:
        yield
    finally:
        comparing.cancel()
        await asyncio.wait([comparing])
        await compare(EDGE, 0.0)


async def _exchange(link: Link, clock: AnchoredClock) -> ClockExchange:
    asked_ns = clock.now_ns()
    node_ns = await link.call("now_ns")
    return ClockExchange(asked_ns, node_ns, clock.now_ns())
