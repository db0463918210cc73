"""Building blocks of a session's phases: driving a plan, watching it, settling; each to its end or until a signal or
the deadline stops it.

The first signal stops the load; what is in flight is cancelled and recorded, the run is derived and reported, and the
command ends with 130. A second one is not waited for: the manifest is closed, and what was recorded can be derived by
`sidelight report`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from sidelight.loadgen.driver import LoadRun, StopNow, is_share, shared_among
from sidelight.loadgen.host.cpu_steal import machine_load, read_ticks
from sidelight.loadgen.records import trace_id
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.directory import RAW, SCRAPES
from sidelight.recorded.errors import Interrupted, WorkerDied
from sidelight.recorded.events import CLOCK_LEFT, WORKER_LOST, Event, append_event
from sidelight.recorded.integrity import SCRAPED
from sidelight.rundir.clock import AnchoredClock, step_ns, step_text
from sidelight.rundir.columns import take
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.process import collecting_often
from sidelight.scraper.spans.spec import SETTLE_S
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.processes.child import Child
from sidelight.sidecar.run.processes.supervised import Supervised

if TYPE_CHECKING:
    from sidelight.exporter.prometheus.page import LivePage
    from sidelight.scraper.commands import Settle, SettleSpans
    from sidelight.sidecar.live.view import LiveRun

T = TypeVar("T")

LEAD_S = 0.1  # from the command to the first submission: the workers open their plan meanwhile
ROUND_TRIPS = 5  # as long at least, of the farthest worker
STOP_TIMEOUT_S = 10.0
OVERDUE_RATIO = 0.01  # of what was due: fewer do not change the load
WATCH_EVERY_S = 0.5
AWAITED_REQUESTS = 200  # an exporter keeps the order: with the last of them, all have their spans
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Shared state of the phases of one session. `listening` is where it receives spans over gRPC, as HOST:PORT. Load
    workers that are lost are in `lost`, by number with the reason, where the session `may_lose` some.
    """

    run_id: str
    path: Path
    clock: AnchoredClock
    progress: Progress
    stop: asyncio.Event
    live: LiveRun
    scraper: Supervised | None = None
    receiver: Supervised | None = None
    listening: str | None = None
    workers: tuple[Child, ...] = ()
    drain_s: float = 0.0
    may_lose: bool = False
    lost: dict[int, str] = field(default_factory=dict)
    page: LivePage | None = None
    plans: Path | None = None  # where plans with bodies are, of a run whose directory must not have these

    @property
    def supervised(self) -> tuple[Supervised, ...]:
        """Return the children that are started again where they die."""
        return tuple(each for each in (self.receiver, self.scraper) if each is not None)

    def plan(self, name: str) -> Path:
        """Return the plan that workers read."""
        return (self.plans or self.path / RAW) / f"plan-{name}.log"


class RunInProgress(Protocol):
    """A run in progress: the place of its events, and its clock."""

    @property
    def path(self) -> Path: ...
    @property
    def clock(self) -> AnchoredClock: ...


async def run_phase(
    session: Session,
    plan: Path,
    *,
    concurrency: int | None,
    cap: int | None = None,
    until_s: float | None = None,
) -> None:
    """Run one plan to its end, or until the user stops it. It ends when no more may be submitted and all is drained."""
    if session.stop.is_set():
        return
    name = plan.stem.removeprefix("plan-")
    command = LoadRun(plan="", start_ns=0, concurrency=concurrency, cap=cap, drain_s=session.drain_s)
    plans = await _delivered(session, plan, command)
    lead_s = max([LEAD_S, *(ROUND_TRIPS * worker.place.round_trip_s for worker in session.workers)])
    start_ns = session.clock.now_ns() + int(lead_s * 1e9)
    until_ns = None if until_s is None else start_ns + int(until_s * 1e9)
    session.live.enter(name, start_ns=start_ns)
    ticks = read_ticks()
    append_event(session.path, Event(at_ns=start_ns, name="phase_start", data={"phase": name}))
    order = msgspec.structs.replace(command, start_ns=start_ns, until_ns=until_ns)
    orders = (msgspec.structs.replace(order, plan=there) for there in plans)
    await asyncio.gather(*(worker.send(each) for worker, each in zip(session.workers, orders, strict=True)))
    tallies = await _drained(session, name, command)
    session.live.leave()
    started, overdue = (sum(int(tally[count]) for tally in tallies if tally) for count in ("started", "overdue"))
    machine = msgspec.to_builtins(machine_load(ticks, read_ticks()))
    record(session, "phase_end", phase=name, started=started, overdue=overdue, machine=machine, workers=tallies)
    if overdue > max(1.0, OVERDUE_RATIO * (started + overdue)):
        warn_and_record(
            session,
            f"{count_of(overdue, 'request')} not sent though due before the end of the load: the load generator stood "
            "still or had no processor there, and less load was sent than was asked for",
        )


async def _delivered(session: Session, plan: Path, order: LoadRun) -> list[str]:
    """Return the path of the plan where each worker is; one elsewhere is sent its share."""
    shares = partial(is_share, workers=shared_among(order, len(session.workers)), seats=order.cap)
    each = (worker.place.deliver(plan, partial(shares, worker=number)) for number, worker in enumerate(session.workers))
    return await asyncio.gather(*each)


async def _tally(session: Session, number: int, phase: str, order: LoadRun) -> dict[str, Any] | None:
    """Return a worker's counts of the phase, and its machine's load.

    A lost worker has none: its share goes to no other, and is recorded.
    """
    try:
        if number not in session.lost:
            worker = session.workers[number]
            ticks = await worker.place.ticks()
            tally = await worker.expect("drained")
            return {**tally, "machine": msgspec.to_builtins(machine_load(ticks, await worker.place.ticks()))}
    except WorkerDied as death:
        if not session.may_lose or len(session.lost) + 1 == len(session.workers):
            raise
        session.lost[number] = str(death)
        with suppress(OSError):  # a terminal that is gone
            session.progress.warn(f"{death}; the load goes on without its share")
    share = {"workers": shared_among(order, len(session.workers)), "seats": order.cap}
    record(session, WORKER_LOST, worker=number, reason=session.lost[number], phase=phase, **share)
    return None


async def _drained(session: Session, phase: str, order: LoadRun) -> list[dict[str, Any] | None]:
    """Wait until all workers are done, or until the user stops them; return their counts.

    A worker is done when its requests are sent and recorded.
    """
    drained = asyncio.gather(*(_tally(session, number, phase, order) for number in range(len(session.workers))))
    stopped = asyncio.ensure_future(session.stop.wait())
    try:
        await _first(drained, stopped)
        if not drained.done():
            session.progress.stage("stopping: requests in flight are cancelled and recorded")
            for worker in session.workers:
                await worker.send(StopNow())
        return await asyncio.wait_for(drained, None if drained.done() else STOP_TIMEOUT_S)
    except TimeoutError:
        raise WorkerDied("process.ended", f"a load worker did not stop within {STOP_TIMEOUT_S:g} s") from None
    finally:
        stopped.cancel()


async def unless_stopped_for(stop: asyncio.Event, seconds: float | None) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def settle(session: Session, seconds: float, *, listening: str | None) -> None:
    """Scrape a moment longer, and wait for the last requests' spans. The last scrapes show the engine's latest counts.

    A process that cannot be kept up is not fatal: its end is recorded.
    """
    if not session.supervised:
        return
    from sidelight.scraper.commands import Settle, SettleSpans  # noqa: PLC0415  aiohttp, imported while processes start

    awaited = _awaited_spans(session) if listening else SettleSpans()
    scraped, received = await asyncio.gather(
        _settled(session.scraper, Settle(seconds=seconds), seconds),
        _settled(session.receiver, awaited, awaited.first_span_s + SETTLE_S),
    )
    if session.scraper is not None and scraped is not None:
        log = SCRAPES.format(session.scraper.deaths)
        record_if_possible(session, SCRAPED, log=log, scrapes=scraped["scrapes"], unwritten=scraped["unwritten"])
    if session.scraper is not None:
        dead, last = session.scraper.unwritten, scraped["unwritten"] if scraped is not None else 0
        if dead + last:
            least = "at least " * bool(dead)  # what one could not write just before it died is not known
            text = f"{least}{dead + last} scrapes and readings of hardware are lost: they could not be written"
            warn_and_record(session, text)
    if session.receiver is not None and received is not None:
        counts = {name: count for name, count in received.items() if name != "event"}
        record(session, "spans", awaited=len(awaited.trace_ids), **counts)
        # Where one died, these counts are the last one's alone, and spans may have come before.
        listened = None if session.receiver.deaths else listening
        for text in _span_notes(counts, listened, session.live.engines(), session.live.engine_version):
            record_note(session, text)


async def _settled(child: Supervised | None, command: Settle | SettleSpans, seconds: float) -> dict[str, Any] | None:
    """Return the report of a child that has settled, which takes `seconds`; None without a child."""
    return None if child is None else await child.finish(command, "settled", timeout_s=seconds + STOP_TIMEOUT_S)


def _awaited_spans(session: Session) -> SettleSpans:
    """Return the traces to wait for, and the remaining time for the first span."""
    from sidelight.scraper.commands import SettleSpans  # noqa: PLC0415  as above

    session.live.poll()
    indices, first_end_ns = last_answered(session.live.logs.requests.table(), AWAITED_REQUESTS)
    since_s = (session.clock.now_ns() - first_end_ns) / 1e9 if indices else SETTLE_S
    return SettleSpans(
        trace_ids=[trace_id(session.run_id, index) for index in indices], first_span_s=max(0.0, SETTLE_S - since_s)
    )


def last_answered(requests: RequestLog, most: int) -> tuple[list[int], int]:
    """Return the latest answered requests, oldest first, and the time of the first answer; -1 for none. The time is
    that of the first of all answers.

    They are `most` of those that ended with status 200 and no error.
    """
    answered = take(requests, (requests.end_ns >= 0) & (requests.http_status == 200) & (requests.error == ""))
    last = np.argsort(answered.end_ns, kind="stable")[-most:]
    return answered.index[last].tolist(), int(answered.end_ns.min()) if len(last) else -1


def _span_notes(
    counts: Mapping[str, int], listening: str | None, engines: Collection[str], version: str
) -> Iterator[str]:
    """Yield notes on missing or rejected spans. For missing ones, they give the reason or the cure; for those that
    violate the specification, the number.
    """
    names = ("malformed", "too_large", "turned_away", "unauthorized", "incomplete")
    kinds = {name.replace("_", " "): counts[name] for name in names}
    kinds["turned away"] -= counts["unwritten"]
    kinds |= {"not written to the disk": counts["unwritten"], "beyond the memory limit": counts["no_memory"]}
    refused = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    none = listening and not counts["spans"] and f"no span was received at {listening}, so no times come from spans"
    if refused and none:
        yield f"{none}: exports came and were refused ({refused}); raw/receiver.stderr says why"
    elif refused:
        yield f"exports of spans were refused ({refused}); raw/receiver.stderr says why"
    elif none:
        from sidelight.scraper.engines.catalogue import catalogue  # noqa: PLC0415  YAML, which no run need wait for

        known = [catalogue(name) for name in sorted(engines)]
        with_spans = [engine.tracing(version) for engine in known if engine.spans_switch(version) is not None]
        if known and not with_spans:
            yield f"{none}: {'; '.join(engine.tracing(version) for engine in known)}"
        else:
            switches = "; ".join(with_spans)
            yield f"{none}; switch tracing on in the engine ({switches or 'docs/reference/engines.md tells how'})"
    if counts["bad_spans"]:
        bad = f"{counts['bad_spans']} of {counts['spans']} spans"
        yield f"{bad} violate the OTLP specification and are not used; raw/receiver.stderr names them"
    if counts["off_clock"]:
        off = f"{counts['off_clock']} of {counts['spans']} spans"
        yield f"{off} are timed by a clock more than 10 minutes off ours and are not used; raw/receiver.stderr names it"


@asynccontextmanager
async def watching(session: Session) -> AsyncIterator[None]:
    """Show the run while the block goes on, and follow changes of the wall clock."""
    warned, wall = False, session.clock
    session.live.shows_parts = session.progress.mode in ("panel", "json")

    def look() -> None:
        nonlocal warned, wall
        wall = _followed(session, wall)
        session.live.poll()
        with session.live.failures.guard():
            session.progress.update(session.live.view())
            if session.page is not None:
                session.page.update(session.live.snapshot())
                session.live.publish()
        if session.live.errors and not warned:
            warned = True
            with suppress(OSError):  # a terminal that is gone is what failed
                session.progress.warn("the live view cannot show all of the run; the report is not affected")

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(WATCH_EVERY_S)

    watching = asyncio.ensure_future(watch())
    try:
        with collecting_often():
            yield
            look()
    finally:
        watching.cancel()
        session.progress.close()
        with suppress(asyncio.CancelledError):
            await watching


def _followed(session: Session, wall: AnchoredClock) -> AnchoredClock:
    """Return the clock by the current wall clock. Where that was set since `wall` was anchored, a warning is printed
    and recorded.

    Where it cannot be recorded, as on a full disk, `wall` is returned, so that it is tried again.
    """
    moved_ns = step_ns(wall)
    if not moved_ns:
        return wall
    try:
        record(session, CLOCK_LEFT, moved_ns=moved_ns)
    except OSError:
        return wall
    text = f"{step_text(moved_ns)}; this run goes on by the time before, and spans of this machine may not fit it"
    with suppress(OSError):  # a full disk or a terminal that is gone ends nothing
        warn_and_record(session, text)
    return replace(wall, offset_ns=wall.offset_ns + moved_ns)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Await something, unless the user stops. Raises Interrupted then."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await _first(working, stopped)
        if not working.done():
            raise Interrupted("interrupted.user", "interrupted before anything was measured")
        return await working
    finally:
        stopped.cancel()
        working.cancel()


async def _first(*work: asyncio.Future[Any]) -> None:
    """Wait for one of several, whatever becomes of it."""
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)


def record(run: RunInProgress, name: str, **data: Any) -> None:
    """Append an event of this moment to the run's log."""
    append_event(run.path, Event(at_ns=run.clock.now_ns(), name=name, data=data))


def record_if_possible(run: RunInProgress, name: str, **data: Any) -> None:
    """Append an event; a full disk costs the event, and ends nothing."""
    with suppress(OSError):
        record(run, name, **data)


def record_note(run: RunInProgress, text: str) -> None:
    """Record a note that a reader of the report must know."""
    record(run, "note", text=text)


def warn_and_record(session: Session, text: str) -> None:
    """Print a warning, and record it as a note of the report."""
    session.progress.warn(text)
    record_note(session, text)


@asynccontextmanager
async def stop_on_signals() -> AsyncIterator[asyncio.Event]:
    """Set an event at the first signal; the second, of whatever kind, is a KeyboardInterrupt.

    SIGHUP says that the terminal is gone, and is left alone where it is ignored, as under nohup.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number in SIGNALS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]

    def arrived(number: signal.Signals) -> None:
        stop.set()
        if number == signal.SIGHUP:
            _leave_dead_terminal()
        for other in heard:
            loop.remove_signal_handler(other)
            signal.signal(other, signal.default_int_handler)

    for number in heard:
        loop.add_signal_handler(number, arrived, number)
    try:
        yield stop
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


@asynccontextmanager
async def until_deadline(begun_s: float, seconds: float | None) -> AsyncIterator[None]:
    """Interrupt the preparation of a run `seconds` after `begun_s`, in the loop's time.

    Raises Interrupted then.
    """
    try:
        async with asyncio.timeout_at(None if seconds is None else begun_s + seconds) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise Interrupted(
            "interrupted.deadline", f"the deadline of {seconds:g} s was reached before anything was measured"
        ) from None


def _leave_dead_terminal() -> None:
    """Redirect output to a dead terminal to nowhere. Writing to a terminal that is gone fails, and would end the run as
    a crash.
    """
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
