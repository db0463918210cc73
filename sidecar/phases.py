"""What the phases of a session are made of: driving a plan, watching it, settling; each to its end or until the user
stops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from exporter.prometheus import LivePage
from loadgen.steal import read_ticks, steal_json
from sidecar.clock import Clock
from sidecar.errors import Interrupted, WorkerDied
from sidecar.live import LiveRun
from sidecar.processes import Child
from sidecar.progress import Progress
from sidecar.run import Event, append_event

T = TypeVar("T")

log = logging.getLogger(__name__)

LEAD_S = 0.1  # from the command to the first submission: the workers open their plan meanwhile
STOP_TIMEOUT_S = 10.0
WATCH_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What the phases of one session share."""

    path: Path
    clock: Clock
    progress: Progress
    stop: asyncio.Event
    workers: tuple[Child, ...]
    drain_s: float
    scraper: Child | None
    live: LiveRun
    page: LivePage | None


async def run_phase(
    session: Session, plan: Path, *, concurrency: int | None, until_s: float | None = None, barrier: bool = False
) -> None:
    """Run one plan to its end, until no more may be submitted and all is drained, or until the user stops it."""
    if session.stop.is_set():
        return
    name = plan.stem.removeprefix("plan-")
    start_ns = session.clock.now_ns() + int(LEAD_S * 1e9)
    command = {
        "cmd": "run",
        "plan": str(plan),
        "start_ns": start_ns,
        "concurrency": concurrency,
        "barrier": barrier,
        "until_ns": None if until_s is None else start_ns + int(until_s * 1e9),
        "drain_s": session.drain_s,
    }
    session.live.enter(name)
    ticks = read_ticks()
    append_event(session.path, Event(at_ns=start_ns, name="phase_start", data={"phase": name}))
    for worker in session.workers:
        await worker.send(command)
    await _drained(session)
    record(session.path, session.clock, "phase_end", phase=name, machine=steal_json(ticks, read_ticks()))


async def _drained(session: Session) -> None:
    """Wait until all workers have sent and recorded what they had, or until the user stops them."""
    drained = asyncio.gather(*(worker.expect("drained") for worker in session.workers))
    stopped = asyncio.ensure_future(session.stop.wait())
    try:
        await _first(drained, stopped)
        if not drained.done():
            session.progress.stage("stopping: what is in flight is cancelled and recorded")
            for worker in session.workers:
                await worker.send({"cmd": "stop"})
        await asyncio.wait_for(drained, None if drained.done() else STOP_TIMEOUT_S)
    except TimeoutError:
        raise WorkerDied(f"a load worker did not stop within {STOP_TIMEOUT_S:g} s") from None
    finally:
        stopped.cancel()


async def unless_stopped_for(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def settle(scraper: Child, path: Path, clock: Clock, *, seconds: float) -> None:
    """Scrape a moment longer, so that what the engine has just counted shows. A dead scraper is noted, not fatal."""
    try:
        await scraper.send({"cmd": "settle", "seconds": seconds})
        await scraper.expect("settled", timeout_s=seconds + STOP_TIMEOUT_S)
    except WorkerDied as error:
        note(path, clock, f"the scraper did not finish ({error}); server numbers end where its log does")


@asynccontextmanager
async def watching(live: LiveRun, progress: Progress, page: LivePage | None) -> AsyncIterator[None]:
    """Show the run while the block goes on."""

    failed = False

    def look() -> None:
        nonlocal failed
        try:
            live.poll()
            progress.update(live.view())
            if page is not None:
                page.update(live.snapshot())
        except Exception:  # a view is a sink: what it stumbles over must not end a measurement
            if not failed:
                log.exception("the live view failed; the run goes on")
            failed = True

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(WATCH_EVERY_S)

    watching = asyncio.ensure_future(watch())
    try:
        yield
        look()
    finally:
        watching.cancel()
        progress.close()
        with suppress(asyncio.CancelledError):
            await watching


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Await something, but give it up when the user stops. Raises Interrupted then."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await _first(working, stopped)
        if not working.done():
            raise Interrupted("interrupted before anything was measured")
        return await working
    finally:
        stopped.cancel()
        working.cancel()


async def _first(*work: asyncio.Future[Any]) -> None:
    """Wait for one of several, whatever becomes of it."""
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)


def record(path: Path, clock: Clock, name: str, **data: Any) -> None:
    """Append an event of this moment to the run's log."""
    append_event(path, Event(at_ns=clock.now_ns(), name=name, data=data))


def note(path: Path, clock: Clock, text: str) -> None:
    """Record something that a reader of the report must be told."""
    record(path, clock, "note", text=text)
