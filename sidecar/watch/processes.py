"""Processes of a watch, and the state that its tasks share. One process receives spans, the other scrapes.

Each is started again whenever it dies, later and later, and each such death is counted and recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from exporter.html.live import LiveColumns
from exporter.prometheus.page import LivePage
from recorded import directory as run_directory
from recorded import events as run_events
from recorded.errors import WorkerDied
from rundir.access import masked
from rundir.clock import Clock, anchor, step_ns, step_text, time_of_day_ns
from rundir.frames import Rotation, next_number
from scraper.commands import SpanSpec, Spec
from sidecar.options.access import metrics_access
from sidecar.options.spans import receiver_spec
from sidecar.options.watch import WatchOptions
from sidecar.progress import Progress
from sidecar.run.processes import RECEIVER, SCRAPER, START_TIMEOUT_S, Child, keep_up
from sidecar.watch.view import SCRAPES, SPANS, WatchView

CLOCK_EVERY_S = 1.0
UNWRITABLE = "its logs cannot be written"
UNCOUNTED = "and those of its last second, which could not be written and are not counted"
UNRECORDED = "that the clock was set cannot be recorded"
_MOST_UNRECORDED = 1000  # the oldest of more are lost
_SPARE_LOGS = 10  # that processes may still begin by the old time, between the record of a step and their end
_FILES_KEPT = 10  # the logs are as many files, so that a tenth of them is deleted at a time


@dataclass(slots=True, kw_only=True)
class Upkeep:
    """A process that is started again whenever it dies. `died` is the event of its death, `cost` the effect on others.

    `lives` counts those that came up, `restarts` those that died; `child` is None while there is none, and `down_ns`
    then says since when one is down that died.
    """

    name: str
    died: str
    cost: str
    child: Child | None = None
    lives: int = 0
    restarts: int = 0
    down_ns: int | None = None


@dataclass(slots=True, kw_only=True)
class Watch:
    """Shared state of the tasks of one watch.

    `clock` is another after the wall clock was set and that was recorded; `wall_ns` reads that one. It is `ahead_ns`
    ahead of the view's until all is read that was logged by the old time; the first of what is logged by the new time
    is in the logs of the number `first_log`. `looking` is held by who reads the view. `looked_s` is when the logs were
    looked at last, by the monotonic clock. `clock_step_ns` is by how much the wall clock was set last. `ports` are
    those at which spans are received. `unwritten` scrapes could not be kept, `unwritten_before` of them by scrapers
    that ended. `not_ready` is what /readyz answers: why there is no receiver or scraper, why not all that came is
    counted, and why it, or that the clock was set, cannot be written; each empty where that is not so. `unrecorded`
    events wait for room on the disk.
    """

    path: Path
    clock: Clock
    options: WatchOptions
    given: Sequence[str]
    progress: Progress
    view: WatchView
    page: LivePage
    columns: LiveColumns
    begun_ns: int
    wall_ns: Callable[[], int] = time_of_day_ns
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reload: asyncio.Event = field(default_factory=asyncio.Event)
    receiver: Upkeep = field(
        default_factory=lambda: Upkeep(
            name="receiver", died=run_events.RECEIVER_DIED, cost="exports in flight must be sent again"
        )
    )
    scraper: Upkeep = field(
        default_factory=lambda: Upkeep(
            name="scraper", died=run_events.SCRAPER_DIED, cost="nothing is scraped meanwhile"
        )
    )
    ports: tuple[int, int] | None = None
    not_ready: dict[str, str] = field(
        default_factory=lambda: {"receiver": "starting", "scraper": "", "logs": "", "disk": "", "clock": ""}
    )
    unwritten: int = 0
    unwritten_before: int = 0
    looked_s: float = field(default_factory=time.monotonic)
    clock_step_ns: int = 0
    ahead_ns: int = 0
    first_log: int = 0
    unrecorded: deque[run_events.Event] = field(default_factory=lambda: deque(maxlen=_MOST_UNRECORDED))

    def view_ns(self) -> int:
        """Return the time by the view's clock."""
        return self.clock.now_ns() - self.ahead_ns

    def warn_and_record(self, text: str) -> None:
        """Warn of something that went wrong, and record it for the report."""
        self.progress.warn(text)
        self.record("note", text=text)

    def record(self, name: str, **data: Any) -> None:
        """Record an event of this moment, as soon as the disk has room for it."""
        self.unrecorded.append(run_events.Event(at_ns=self.clock.now_ns(), name=name, data=data))
        self.record_rest()

    def record_rest(self) -> None:
        """Record the events that wait for room on the disk, if there is some now."""
        with suppress(OSError):
            while self.unrecorded:
                run_events.append_event(self.path, self.unrecorded[0])
                self.unrecorded.popleft()


async def keep_processes_up(shared: Watch, look_through: Callable[[], None]) -> None:
    """Keep a receiver and a scraper up, whatever the cause of their death. The first of each has to come up.

    When the wall clock was set, and that is recorded, the next ones stamp by the new time, once `look_through` has read
    all that is stamped by the old one.
    """
    lives = (
        (shared.receiver, partial(_live, shared, shared.receiver, RECEIVER, _begin_receiver)),
        (shared.scraper, partial(_live, shared, shared.scraper, SCRAPER, _begin_scraper)),
    )
    while True:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_up(life, partial(_on_death, shared, upkeep))) for upkeep, life in lives]
            await _clock_step(shared)
            for upkeep, _ in lives:
                shared.not_ready[upkeep.name] = f"the clock was set, and the {upkeep.name} starts again"
            for task in tasks:
                task.cancel()
        async with shared.looking:
            await asyncio.to_thread(look_through)
            moved_ns, shared.ahead_ns = shared.ahead_ns, 0
            shared.view.clock_moved(moved_ns)


async def _live(
    shared: Watch, upkeep: Upkeep, arguments: Sequence[str], begin: Callable[[Watch, Child], Awaitable[None]]
) -> bool:
    """Start a process and wait for its death. Raises WorkerDied then."""
    async with Child(f"the {upkeep.name}", arguments, heard=partial(_on_event, shared)) as child:
        try:
            await begin(shared, child)
            await child.expect("an end")  # it says no such thing: this waits for its death
        finally:
            upkeep.child = None
    return False


async def _begin_receiver(shared: Watch, child: Child) -> None:
    options, raw = shared.options, shared.path / run_directory.RAW
    host = options.otlp_listen.rpartition(":")[0]
    spans = receiver_spec(options, shared.clock)
    if spans is None:
        raise AssertionError("a watch receives spans")
    spans = msgspec.structs.replace(
        spans, restarts_at_clock_step=True, is_awaited=False, clock_step_ns=shared.clock_step_ns
    )
    if shared.ports is not None:  # senders know these, where any free ones were asked for
        spans = msgspec.structs.replace(spans, grpc=f"{host}:{shared.ports[0]}", http=f"{host}:{shared.ports[1]}")
    spec = SpanSpec(receiver=spans, out=str(raw / _log(shared, SPANS)), rotation=_rotation(shared))
    await child.begin(spec, stderr=raw / "receiver.stderr")
    ports = await child.expect("listening", timeout_s=START_TIMEOUT_S)
    shared.ports = ports["grpc_port"], ports["http_port"]
    if shared.receiver.down_ns is not None:
        async with shared.looking:
            shared.view.missed(shared.view_ns())
    _on_begun(shared, shared.receiver, child)
    shared.progress.stage(f"spans: gRPC at {host}:{shared.ports[0]}, HTTP/protobuf at {host}:{shared.ports[1]}")


async def _begin_scraper(shared: Watch, child: Child) -> None:
    options, raw = shared.options, shared.path / run_directory.RAW
    shared.unwritten_before, shared.not_ready["disk"] = shared.unwritten, ""
    spec = Spec(
        targets=list(options.metrics),
        interval_s=options.scrape_interval,
        timeout_s=options.scrape_timeout,
        clock_offset_ns=shared.clock.offset_ns,
        out=str(raw / _log(shared, SCRAPES)),
        access=metrics_access(options),
        rotation=_rotation(shared),
    )
    shared.scraper.child = child  # what is scraped may change before all was scraped once
    await child.begin(spec, stderr=raw / "scraper.stderr")
    await child.expect("ready", timeout_s=START_TIMEOUT_S)
    if shared.scraper.down_ns is not None:
        shared.record(run_events.SCRAPER_RESTARTED)
    _on_begun(shared, shared.scraper, child)
    shared.progress.stage(scraped_line(options))


def scraped_line(options: WatchOptions) -> str:
    """Return a line on the scraped pages and the scrape interval."""
    pages = ", ".join(masked(url) for url in options.metrics)
    return f"scraping {pages} every {options.scrape_interval:g} s" if pages else "scraping no page"


def _on_begun(shared: Watch, upkeep: Upkeep, child: Child) -> None:
    upkeep.child, upkeep.lives = child, upkeep.lives + 1
    if upkeep.down_ns is not None:
        down_s = (shared.clock.now_ns() - upkeep.down_ns) / 1e9
        upkeep.down_ns = None
        shared.warn_and_record(f"the {upkeep.name} runs again after {down_s:.1f} s")
    shared.not_ready[upkeep.name] = ""


def _on_death(shared: Watch, upkeep: Upkeep, death: WorkerDied) -> None:
    if upkeep.lives == 0:
        raise death
    upkeep.restarts += 1
    if upkeep.down_ns is None:
        upkeep.down_ns = shared.clock.now_ns()
    shared.not_ready[upkeep.name] = f"the {upkeep.name} is down"
    shared.record(upkeep.died, reason=str(death), restarts=upkeep.restarts)
    text = f"{death}; it is restarted (restart {upkeep.restarts}); {upkeep.cost}"
    if upkeep is shared.scraper and shared.not_ready["disk"]:
        text += f"; {shared.unwritten} scrapes are lost since the start, {UNCOUNTED}"
    shared.warn_and_record(text)


def _on_event(shared: Watch, said: Mapping[str, Any]) -> None:
    """Follow whether the scraper can write its logs."""
    if said.get("event") not in ("unwritten", "written"):
        return
    shared.unwritten = shared.unwritten_before + said["count"]
    if said["event"] == "unwritten" and not shared.not_ready["disk"]:
        shared.not_ready["disk"] = f"{UNWRITABLE}: {said['reason']}"
        shared.warn_and_record(
            f"{UNWRITABLE} ({said['reason']}); the watch goes on, counts what is lost, and refuses spans so that they "
            "are sent again; make room on the disk"
        )
    elif said["event"] == "written" and shared.not_ready["disk"]:
        shared.not_ready["disk"] = ""
        shared.warn_and_record(f"logs are written again; {shared.unwritten} scrapes are lost since the start")


async def _clock_step(shared: Watch) -> None:
    """Wait until the wall clock is set and that is recorded. `shared` then goes by the new time.

    A report that does not know of it would mix stamps of two clocks. Where it cannot be recorded, as on a full disk,
    all goes on by the old time, and it is tried again.
    """
    while True:
        shared.record_rest()
        if not step_ns(shared.clock, shared.wall_ns):
            shared.not_ready["clock"] = ""  # it may have been set back again
        elif _follow_clock(shared):
            return
        await asyncio.sleep(CLOCK_EVERY_S)


def _follow_clock(shared: Watch) -> bool:
    """Record a step of the wall clock, and go on by the new time. Returns whether it could be recorded."""
    before, after = shared.clock, anchor(shared.wall_ns)
    moved_ns, first_log = after.offset_ns - before.offset_ns, _next_log(shared) + _SPARE_LOGS
    step = {"moved_ns": moved_ns, "first_log": first_log, "offset_ns": after.offset_ns}
    event = run_events.Event(at_ns=after.now_ns(), name=run_events.CLOCK_SET, data=step)
    try:
        run_events.append_event(shared.path, event)
    except OSError as error:
        if not shared.not_ready["clock"]:
            shared.not_ready["clock"] = f"{UNRECORDED}: {error.strerror}"
            shared.progress.warn(
                f"{step_text(moved_ns)}; {UNRECORDED} ({error.strerror}), so stamps are by the time before until it "
                "can be; make room on the disk"
            )
        return False
    shared.clock_step_ns = moved_ns
    shared.clock, shared.ahead_ns, shared.first_log = after, moved_ns, first_log
    shared.begun_ns += moved_ns
    for _ in range(len(shared.unrecorded)):  # they are behind the step in the log, so that no reader moves them
        event = shared.unrecorded.popleft()
        shared.unrecorded.append(msgspec.structs.replace(event, at_ns=event.at_ns + moved_ns))
    for upkeep in (shared.receiver, shared.scraper):
        upkeep.down_ns = None if upkeep.down_ns is None else upkeep.down_ns + moved_ns
    shared.not_ready["clock"] = ""
    shared.warn_and_record(
        f"{step_text(moved_ns)}; stamps are by the new time from here on, and earlier ones are moved by as much"
    )
    return True


def _next_log(shared: Watch) -> int:
    """Return the number of the next logs of starting processes."""
    numbers = (next_number(shared.path / run_directory.RAW, pattern) for pattern in (SPANS, SCRAPES))
    return max(shared.first_log, *numbers)


def _log(shared: Watch, pattern: str) -> str:
    return pattern.replace("*", f"{_next_log(shared):06d}")


def _rotation(shared: Watch) -> Rotation:
    options = shared.options
    return Rotation(most_bytes=options.kept_bytes // _FILES_KEPT, most_s=options.keep_s / _FILES_KEPT)
