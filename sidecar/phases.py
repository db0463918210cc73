"""The phases of a session: prepare the requests, warm up, drain, measure, settle; each to its end or until the user
stops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from exporter.prometheus import LivePage
from loadgen.plan import Planned
from sidecar.clock import Clock
from sidecar.config import RunOptions
from sidecar.errors import Interrupted, WorkerDied
from sidecar.live import LiveRun
from sidecar.prepare import Prepared, measure_plan, planned_requests, warmup_plan, write_plan
from sidecar.processes import Child
from sidecar.progress import Progress
from sidecar.run import RAW, Event, append_event

T = TypeVar("T")

log = logging.getLogger(__name__)

LEAD_S = 0.3  # from the command to the first submission: the workers read their plan meanwhile
STOP_TIMEOUT_S = 10.0
WATCH_EVERY_S = 0.5
WARMUP_CONCURRENCY = 4
SETTLE_LEAST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What the phases of one session share."""

    path: Path
    clock: Clock
    progress: Progress
    stop: asyncio.Event
    workers: tuple[Child, ...]
    scraper: Child | None
    live: LiveRun
    page: LivePage | None


async def load(session: Session, options: RunOptions, found: Prepared) -> None:
    """Warm a target up and measure it. All requests are made before the first is sent.

    Raises SidelightError when one of our processes, or /tokenize, fails.
    """
    raw = session.path / RAW
    warmup, measure = raw / "plan-warmup.log", raw / "plan-measure.log"
    settle_s = max(2 * options.scrape_interval, SETTLE_LEAST_S)
    session.progress.stage("preparing requests")
    if options.warmup:
        await unless_stopped(session.stop, _plan(session, warmup_plan(options, found), warmup))
    await unless_stopped(session.stop, _plan(session, measure_plan(options, found), measure))
    async with watching(session.live, session.progress, session.page):
        if options.warmup:
            width = min(options.concurrency or WARMUP_CONCURRENCY, options.warmup)
            await _phase(session, warmup, concurrency=width, until_s=None, drain_s=options.drain_timeout)
            # The reference scrape lies between the end of the warm-up and the first measured request.
            await unless_stopped_for(session.stop, settle_s)
        started_ns = session.clock.now_ns()
        until_s, drain_s = options.duration, options.drain_timeout
        await _phase(session, measure, concurrency=options.concurrency, until_s=until_s, drain_s=drain_s)
        _note_if_used_up(session, options, elapsed_s=(session.clock.now_ns() - started_ns) / 1e9)
        if session.scraper is not None:
            await settle(session.scraper, session.path, session.clock, seconds=settle_s)


def _note_if_used_up(session: Session, options: RunOptions, *, elapsed_s: float) -> None:
    """Say when a closed loop ended because all that was prepared for its duration was sent."""
    if options.requests is not None or options.concurrency is None or options.duration is None:
        return
    if elapsed_s < options.duration and not session.stop.is_set():
        of_all = f"{elapsed_s:.1f} of {options.duration:g} s"
        text = f"all {planned_requests(options)} prepared requests were used up after {of_all}; name --requests"
        session.progress.warn(text)
        note(session.path, session.clock, text)


async def _plan(session: Session, requests: AsyncGenerator[Planned, None], plan: Path) -> None:
    about = await write_plan(requests, plan, progress=session.progress)
    record(session.path, session.clock, "planned", **about)


async def _phase(
    session: Session,
    plan: Path,
    *,
    concurrency: int | None,
    until_s: float | None,
    drain_s: float,
) -> None:
    """Run one plan to its end, until no more may be submitted and all is drained, or until the user stops it."""
    if session.stop.is_set():
        return
    name = plan.stem.removeprefix("plan-")
    start_ns = session.clock.now_ns() + int(LEAD_S * 1e9)
    until_ns = None if until_s is None else start_ns + int(until_s * 1e9)
    command = {
        "cmd": "run",
        "plan": str(plan),
        "start_ns": start_ns,
        "concurrency": concurrency,
        "until_ns": until_ns,
        "drain_s": drain_s,
    }
    session.live.enter(name)
    append_event(session.path, Event(at_ns=start_ns, name="phase_start", data={"phase": name}))
    for worker in session.workers:
        await worker.send(command)
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
    record(session.path, session.clock, "phase_end", phase=name)


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
