"""A watch in virtual time: its conductor, scraper and receiver, clients and engines that send spans, and the next
collector, in one process. What goes wrong, and when, a seed decides.

The product's own code runs, but for what it starts and speaks through: processes, sockets, threads, disk and clocks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp.connector
from faults.schedules import calls, traffic
from faults.schedules.collector import PORT, Collector
from faults.schedules.disk import Death, Disk
from faults.schedules.engine import URL, Engine
from faults.schedules.network import HOST, Network, NetworkLoop, Weather
from faults.schedules.processes import Machine, Process, running
from faults.schedules.virtual_time import Task, Time
from grpc import aio

from sidelight.exporter.prometheus.page import LivePage
from sidelight.scraper.worker import __main__ as scraping
from sidelight.scraper.worker import process as worker
from sidelight.scraper.worker import spans
from sidelight.sidecar.options.watch import WatchOptions, check_watch
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run import manifest
from sidelight.sidecar.watch import service
from sidelight.sidecar.watch.view import WatchView

QUIET_S = 60.0  # after all is sent: estimates are made, what waits is forwarded
PORTS = {traffic.GRPC_PORT, traffic.HTTP_PORT, 9464}
FIRST_WRITES = 5
END_S = 60.0  # that a watch may take to end
RECEIVER, SCRAPER = "sidelight.scraper.worker.spans", "sidelight.scraper.worker"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens: drawn once, before it begins."""

    requests: list[traffic.Request]
    exports: list[traffic.Export]
    weather: Weather
    kills: list[tuple[float, str]] = field(default_factory=list)  # when, and who
    deaths: list[tuple[int, str]] = field(default_factory=list)  # of each receiver in turn: at which write, and how
    scraper_deaths: list[tuple[int, str]] = field(default_factory=list)  # likewise
    full: list[tuple[float, float]] = field(default_factory=list)  # when the disk is
    away: list[tuple[float, float]] = field(default_factory=list)  # when the collector is
    busy: float = 0.0
    forwards: bool = True
    has_page: bool = False
    cut: float = 0.0  # share of its pages
    engine_down: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # when the wall clock is set, and by how much, s


class Said(Progress):
    """What a watch says, without a terminal."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.lines: list[str] = []

    def stage(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)


@dataclass(kw_only=True)
class Watched:
    """One directory of a watch, what it said and counted, and how its process ended."""

    path: Path
    process: Process
    said: Said
    views: list[WatchView] = field(default_factory=list)
    pages: list[LivePage] = field(default_factory=list)
    line: str = ""


@dataclass(kw_only=True)
class Played:
    """What came of a schedule."""

    schedule: Schedule
    watches: list[Watched]
    receivers: list[Process]
    scrapers: list[Process]
    collector: Collector
    engine: Engine
    disk: Disk
    trouble: list[str]
    left: list[str]
    seconds: float


class Stage:
    """Owns the virtual machine that a schedule is played on."""

    def __init__(self, clock: Time, rng: random.Random, schedule: Schedule, place: Path) -> None:
        self.clock, self.schedule, self.place = clock, schedule, place
        clock.reset()

        def child() -> random.Random:
            return random.Random(rng.getrandbits(64))

        self.loop = NetworkLoop(clock, child())
        self.network = Network(self.loop, child(), schedule.weather)
        self.disk = Disk(clock, child())
        self.machine = Machine(self.loop, {SCRAPER: _scraper, RECEIVER: _receiver})
        self.machine.born = self._born
        self.collector = Collector(network=self.network, rng=child(), busy=schedule.busy)
        self.engine = Engine(
            network=self.network, clock=clock, rng=child(), requests=schedule.requests, cut=schedule.cut
        )
        self.exporter = traffic.Exporter(self.network, clock, child())
        self.watches: list[Watched] = []
        self._watch: Task | None = None
        self._deaths = {RECEIVER: list(schedule.deaths), SCRAPER: list(schedule.scraper_deaths)}
        self.disk.fails = lambda _: any(begin <= self._now_s() < end for begin, end in schedule.full)

    def _now_s(self) -> float:
        return traffic.now_ms(self.clock) / 1e3

    def _born(self, process: Process) -> None:
        process.at_death.append(lambda: self.disk.release(process))
        deaths, is_first = self._deaths.get(process.name), len(self.machine.named(process.name)) == 1
        if deaths and not self.network.is_calm and (is_first or self._has_come_up(process.name)):
            writes, how = deaths.pop(0)
            if is_first:
                writes += FIRST_WRITES
            self.disk.deaths[process] = Death(writes=writes, how=how)

    def _has_come_up(self, name: str) -> bool:
        """Tell whether a receiver, or a scraper, of the last watch is up, or was: a watch without a first one ends."""
        begin = {RECEIVER: "spans: ", SCRAPER: "scraping http"}[name]
        return any(line.startswith(begin) for line in self.watches[-1].said.lines)

    @contextmanager
    def installed(self) -> Iterator[list[str]]:
        """Let the product meet this machine; give what it logs of defects."""
        records: list[str] = []
        heard = _Heard(records)
        calls.Server.network = self.network
        with ExitStack() as stack:
            for target, name, stand_in in (
                (socket, "create_server", self.network.listen),
                (asyncio, "create_subprocess_exec", self.machine.spawn),
                (aio, "server", calls.Server),
                (aiohttp.connector.aiohappyeyeballs, "start_connection", self._connected),
                (worker, "open_input", _input),
                (worker, "read_spec", _spec),
                (scraping, "_say_if_read", scraping.say),
                (manifest, "LogSync", lambda _: nullcontext()),
                (service, "WatchView", self._view),
                (service, "LivePage", self._page),
            ):
                stack.enter_context(mock.patch.object(target, name, stand_in))
            self.disk.install()
            stack.callback(self.disk.uninstall)
            root = logging.getLogger()
            stack.enter_context(mock.patch.object(root, "handlers", [heard]))
            yield records

    async def _connected(self, *, addr_infos: Any, **_: Any) -> Any:
        return await self.network.connect(addr_infos[0][4][1])

    def _view(self, raw: Path, **named: Any) -> WatchView:
        view, last = WatchView(raw, **named), self.watches[-1]
        if last.views:  # the clock was set, and it goes on in another directory
            self.watches.append(Watched(path=raw.parent, process=last.process, said=last.said))
            self.watches[-1].pages.append(last.pages.pop())
        self.watches[-1].views.append(view)
        return view

    def _page(self) -> LivePage:
        page = LivePage()
        self.watches[-1].pages.append(page)
        return page

    def begin_watch(self) -> None:
        """Start a watch in a directory of its own."""
        path, said = self.place / f"watch-{len(self.watches)}", Said()
        options = check_watch(
            WatchOptions(
                otlp_listen=f"{HOST}:{traffic.GRPC_PORT}",
                listen=f"{HOST}:9464",
                otlp_forward=f"http://{HOST}:{PORT}" if self.schedule.forwards else None,
                metrics=(URL,) if self.schedule.has_page else (),
                memory="100GB",
                out=path,
            )
        )

        async def main(_: Process) -> int:
            line, _ = await service.watch(options, command=[], progress=said, wall_ns=self.clock.wall_ns)
            self.watches[-1].line = line
            return 0

        process, self._watch = self.machine.start("watch", main)
        self.watches.append(Watched(path=path, process=process, said=said))

    async def play(self) -> None:
        """Play the schedule to its end."""
        await self.collector.come()
        await self.engine.begin()
        self.begin_watch()
        async with asyncio.TaskGroup() as group:
            for at_s, who in self.schedule.kills:
                group.create_task(self._kill(at_s, who))
            for begin_s, end_s in self.schedule.away:
                group.create_task(self._without(begin_s, end_s, self.collector.go, self.collector.come))
            for begin_s, end_s in self.schedule.engine_down:
                group.create_task(self._without(begin_s, end_s, self.engine.end, self.engine.begin))
            for at_s, step_s in self.schedule.steps:
                group.create_task(self._set_clock(at_s, step_s))
            await self.exporter.send_all(self.schedule.exports)
        self.network.is_calm = True
        self.disk.deaths.clear()
        await asyncio.sleep(QUIET_S)
        self.loop.signals[signal.SIGTERM]()
        assert self._watch is not None
        async with asyncio.timeout(END_S):
            await self._watch

    async def _kill(self, at_s: float, who: str) -> None:
        await asyncio.sleep(at_s - self._now_s())
        if who == "watch":
            self.watches[-1].process.kill()
            while self.network.listeners.keys() & PORTS:  # noqa: ASYNC110  its children end when their input does
                await asyncio.sleep(0.5)
            self.begin_watch()
            return
        if who == "scraper" and not self._has_come_up(SCRAPER):
            return
        for process in self.machine.named({"receiver": RECEIVER, "scraper": SCRAPER}[who]):
            process.kill()

    async def _without(
        self, begin_s: float, end_s: float, end: Callable[[], None], begin: Callable[[], Awaitable[None]]
    ) -> None:
        await asyncio.sleep(begin_s - self._now_s())
        end()
        await asyncio.sleep(end_s - begin_s)
        await begin()

    async def _set_clock(self, at_s: float, step_s: float) -> None:
        await asyncio.sleep(at_s - self._now_s())
        self.clock.ahead_ns += round(step_s * 1e9)


class _Heard(logging.Handler):
    """Keeps what is logged of defects, but for that of ghosts."""

    def __init__(self, records: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._records = records
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        process = running.get()
        if process is None or not process.is_dead:
            self._records.append(self.format(record))


async def _scraper(_: Process) -> int:
    return await worker._main(scraping._check, scraping.run)


async def _receiver(_: Process) -> int:
    return await worker._main(spans._check, spans.run)


async def _input() -> asyncio.StreamReader:
    process = running.get()
    assert process is not None
    return process.standard_input


async def _spec(lines: asyncio.StreamReader, decode: Callable[[bytes], Any]) -> Any:
    return decode(await lines.readline())


def play(clock: Time, rng: random.Random, schedule: Schedule, place: Path) -> Played:
    """Play a schedule; what is left behind of it is ended, and named."""
    stage = Stage(clock, rng, schedule, place)
    loop = stage.loop
    with stage.installed() as records:
        try:
            loop.run_until_complete(stage.play())
        finally:
            stage.collector.go()
            stage.engine.end()
            tasks = [task for task in stage.machine.tasks() if not task.done()]
            left = [repr(task.get_coro()) for task in tasks]
            left += [f"connection of {name}" for name in stage.network.names()]
            trouble = [*loop.trouble, *records]
            _end(loop)
            seconds = stage._now_s()
            loop.close()
    return Played(
        schedule=schedule,
        watches=stage.watches,
        receivers=stage.machine.named(RECEIVER),
        scrapers=stage.machine.named(SCRAPER),
        collector=stage.collector,
        engine=stage.engine,
        disk=stage.disk,
        trouble=trouble,
        left=left,
        seconds=seconds,
    )


def _end(loop: NetworkLoop) -> None:
    """End what ghosts still do, and what was left."""
    for _ in range(20):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=30))
