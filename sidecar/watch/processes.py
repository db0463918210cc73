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

from sidelight.exporter.prometheus.page import LivePage
from sidelight.recorded import directory as run_directory
from sidelight.recorded import events as run_events
from sidelight.recorded.errors import WorkerDied
from sidelight.rundir.access import masked
from sidelight.rundir.clock import AnchoredClock, step_ns, step_text
from sidelight.rundir.frames import Rotation, next_number
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.printable.text import first_of
from sidelight.scraper.commands import SpanSpec, Spec
from sidelight.sidecar.live.sending import Browsers
from sidelight.sidecar.options.access import metrics_access
from sidelight.sidecar.options.spans import receiver_spec
from sidelight.sidecar.options.watch import WatchOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.processes.child import RECEIVER, SCRAPER, START_TIMEOUT_S, Child
from sidelight.sidecar.run.processes.supervised import keep_up
from sidelight.sidecar.watch.exports import SPANS
from sidelight.sidecar.watch.view import SCRAPES, WatchView

CLOCK_EVERY_S = 1.0
UNWRITABLE = "its logs cannot be written"
UNCOUNTED = "and those of its last second, which could not be written and are not counted"
UNRECORDED = "that the clock was set cannot be recorded"
_MOST_UNRECORDED = 1000  # the oldest of more are lost
_FILES_KEPT = 10  # the logs are as many files, so that a tenth of them is deleted at a time


@dataclass(slots=True, kw_only=True)
class Upkeep:
    """A process that is started again whenever it dies. `died` is the event of its death, `cost` the effect on others.

    `lives` counts those that came up, in the directory before too, `restarts` those that died; `child` is None while
    there is none, and `down_ns` then says since when one is down that died.
    """

    name: str
    died: str
    cost: str
    child: Child | None = None
    lives: int = 0
    restarts: int = 0
    down_ns: int | None = None


@dataclass(slots=True, kw_only=True)
class WatchReceiver(Upkeep):
    """The receiver of spans. `ports` are those that it listens at, `clock_step_ns` is the last step of the clock."""

    name: str = "receiver"
    died: str = run_events.RECEIVER_DIED
    cost: str = "exports in flight must be sent again"
    ports: tuple[int, int] | None = None
    clock_step_ns: int = 0


@dataclass(slots=True, kw_only=True)
class Scraper(Upkeep):
    """The scraper. `unwritten` scrapes could not be kept, `unwritten_before` of them by scrapers that ended."""

    name: str = "scraper"
    died: str = run_events.SCRAPER_DIED
    cost: str = "nothing is scraped meanwhile"
    unwritten: int = 0
    unwritten_before: int = 0


@dataclass(slots=True, kw_only=True)
class Watch:
    """Shared state of the tasks of one watch.

    `looking` is held by who reads the view. `looked_s` is when the logs were looked at last, by the monotonic clock.
    `not_ready` is what /readyz answers: why there is no receiver or scraper, why not all that came is counted, and why
    it, or that the clock was set, cannot be written; each empty where that is not so. `moved_ns` is by how much the
    wall clock was set, which ends the directory. `unrecorded` events wait for room on the disk.
    """

    path: Path
    clock: AnchoredClock
    options: WatchOptions
    pages: tuple[str, ...]
    progress: Progress
    view: WatchView
    page: LivePage
    browsers: Browsers
    begun_ns: int
    receiver: WatchReceiver
    scraper: Scraper
    stop: asyncio.Event
    reload: asyncio.Event
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    not_ready: dict[str, str] = field(
        default_factory=lambda: {"receiver": "starting", "scraper": "", "logs": "", "disk": "", "clock": ""}
    )
    looked_s: float = field(default_factory=time.monotonic)
    moved_ns: int = 0
    unrecorded: deque[run_events.Event] = field(default_factory=lambda: deque(maxlen=_MOST_UNRECORDED))

    def warn_and_record(self, text: str) -> None:
        """Warn of something that went wrong, and record it for the report."""
        self.progress.warn(text)
        self.record("note", text=text)

    def record(self, name: str, **data: Any) -> None:
        """Record an event of this moment, as soon as the disk has room for it."""
        self.unrecorded.append(run_events.Event(at_ns=self.clock.now_ns(), name=name, data=data))
        self.record_rest()

    def record_estimates(self) -> None:
        """Record headroom and changes of the engine as they were said last, if anything was."""
        if estimates := self.view.twin_estimates():
            self.record(run_events.ESTIMATED, **estimates)

    def record_rest(self) -> None:
        """Record the events that wait for room on the disk, if there is some now."""
        with suppress(OSError):
            while self.unrecorded:
                run_events.append_event(self.path, self.unrecorded[0])
                self.unrecorded.popleft()


async def keep_receiver_up(shared: Watch) -> None:
    """Keep a receiver up, whatever the cause of its death. The first of a watch has to come up."""
    await keep_up(partial(_live, shared, shared.receiver, _begin_receiver), partial(_on_death, shared, shared.receiver))


async def keep_scraper_up(shared: Watch) -> None:
    """Keep a scraper up."""
    await keep_up(partial(_live, shared, shared.scraper, _begin_scraper), partial(_on_death, shared, shared.scraper))


async def _live(shared: Watch, upkeep: Upkeep, begin: Callable[[Watch, Child], Awaitable[None]]) -> bool:
    """Start a process and wait for its death. Raises WorkerDied then."""
    arguments = RECEIVER if upkeep is shared.receiver else SCRAPER
    async with Child(f"the {upkeep.name}", arguments, heard=partial(_on_event, shared)) as child:
        try:
            await begin(shared, child)
            await child.expect("an end")  # it says no such thing: this waits for its death
        finally:
            upkeep.child = None
    return False


async def _begin_receiver(shared: Watch, child: Child) -> None:
    options, raw, receiver = shared.options, shared.path / run_directory.RAW, shared.receiver
    host = options.otlp_listen.rpartition(":")[0]
    spans = receiver_spec(options, shared.clock)
    if spans is None:
        raise AssertionError("a watch receives spans")
    spans = msgspec.structs.replace(
        spans,
        restarts_at_clock_step=True,
        is_awaited=False,
        clock_step_ns=receiver.clock_step_ns,
        memory_bytes=options.memory_bytes,
    )
    if receiver.ports is not None:  # senders know these, where any free ones were asked for
        spans = msgspec.structs.replace(spans, grpc=f"{host}:{receiver.ports[0]}", http=f"{host}:{receiver.ports[1]}")
    spec = SpanSpec(receiver=spans, out=_log(shared, SPANS), rotation=_rotation(shared))
    await child.begin(spec, stderr=raw / "receiver.stderr")
    ports = await child.expect("listening", timeout_s=START_TIMEOUT_S)
    receiver.ports = ports["grpc_port"], ports["http_port"]
    if receiver.down_ns is not None:
        async with shared.looking:
            shared.view.missed(shared.clock.now_ns())
    _on_begun(shared, receiver, child)
    shared.progress.stage(f"spans: gRPC at {host}:{receiver.ports[0]}, HTTP/protobuf at {host}:{receiver.ports[1]}")


async def _begin_scraper(shared: Watch, child: Child) -> None:
    options, raw, scraper = shared.options, shared.path / run_directory.RAW, shared.scraper
    scraper.unwritten_before, shared.not_ready["disk"] = scraper.unwritten, ""
    spec = Spec(
        targets=list(shared.pages),
        interval_s=options.scrape_interval,
        timeout_s=options.scrape_timeout,
        clock_offset_ns=shared.clock.offset_ns,
        out=_log(shared, SCRAPES),
        access=metrics_access(options),
        rotation=_rotation(shared),
    )
    scraper.child = child  # what is scraped may change before all was scraped once
    await child.begin(spec, stderr=raw / "scraper.stderr")
    await child.expect("ready", timeout_s=START_TIMEOUT_S)
    if scraper.down_ns is not None:
        shared.record(run_events.SCRAPER_RESTARTED)
    _on_begun(shared, scraper, child)
    shared.progress.stage(scraped_line(shared.pages, options))


def scraped_line(pages: Sequence[str], options: WatchOptions) -> str:
    """Return a line on the scraped pages and the scrape interval."""
    named = first_of([masked(url) for url in pages])
    return f"scraping {named} every {options.scrape_interval:g} s" if pages else "scraping no page"


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
        text += f"; {count_of(shared.scraper.unwritten, 'scrape')} lost since the start, {UNCOUNTED}"
    shared.warn_and_record(text)


def _on_event(shared: Watch, said: Mapping[str, Any]) -> None:
    """Follow whether the scraper can write its logs."""
    if said.get("event") not in ("unwritten", "written"):
        return
    scraper = shared.scraper
    scraper.unwritten = scraper.unwritten_before + said["count"]
    if said["event"] == "unwritten" and not shared.not_ready["disk"]:
        shared.not_ready["disk"] = f"{UNWRITABLE}: {said['reason']}"
        shared.warn_and_record(
            f"{UNWRITABLE} ({said['reason']}); the watch goes on, counts what is lost, and refuses spans so that they "
            "are sent again; make room on the disk"
        )
    elif said["event"] == "written" and shared.not_ready["disk"]:
        shared.not_ready["disk"] = ""
        shared.warn_and_record(f"logs are written again; {count_of(scraper.unwritten, 'scrape')} lost since the start")


async def end_at_clock_step(shared: Watch, wall_ns: Callable[[], int]) -> None:
    """Stop the watch after a recorded step of the wall clock: a directory has one clock.

    Where it cannot be recorded, as on a full disk, all goes on by the time before, and it is tried again.
    """
    while not shared.moved_ns:
        shared.record_rest()
        moved_ns = step_ns(shared.clock, wall_ns)
        if not moved_ns:
            shared.not_ready["clock"] = ""  # it may have been set back again
        elif not shared.stop.is_set() and _is_recorded(shared, moved_ns):
            shared.moved_ns = moved_ns
            shared.stop.set()
        await asyncio.sleep(CLOCK_EVERY_S)


def _is_recorded(shared: Watch, moved_ns: int) -> bool:
    """Record a step of the wall clock. Returns whether that could be done."""
    step = run_events.Event(at_ns=shared.clock.now_ns(), name=run_events.CLOCK_LEFT, data={"moved_ns": moved_ns})
    try:
        run_events.append_event(shared.path, step)
    except OSError as error:
        if not shared.not_ready["clock"]:
            shared.not_ready["clock"] = f"{UNRECORDED}: {error.strerror}"
            shared.progress.warn(
                f"{step_text(moved_ns)}; {UNRECORDED} ({error.strerror}), so stamps are by the time before until it "
                "can be; make room on the disk"
            )
        return False
    shared.warn_and_record(
        f"{step_text(moved_ns)}; the watch ends this directory, and goes on in another by the new time"
    )
    return True


def _log(shared: Watch, pattern: str) -> str:
    raw = shared.path / run_directory.RAW
    return str(raw / pattern.replace("*", f"{next_number(raw, pattern):06d}"))


def _rotation(shared: Watch) -> Rotation:
    options = shared.options
    return Rotation(most_bytes=options.kept_bytes // _FILES_KEPT, most_s=options.keep_s / _FILES_KEPT)
