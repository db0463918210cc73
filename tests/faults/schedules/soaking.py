"""A watch for hours of virtual time, beside what goes wrong in production: what its process holds at some moments.

The engine starts again every half minute, the next collector is away a third of the time, the configuration is read
again every three seconds and the page every nine, every tenth export comes twice. Blocks of memory are counted, those
in use and those that wait to be collected, so that neither windows of some minutes nor free memory count. The
clients, the collector and the engine, which are of this process too, keep nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from faults.schedules import traffic
from faults.schedules.collector import PORT
from faults.schedules.engine import URL, Engine
from faults.schedules.network import HOST, Weather
from faults.schedules.virtual_time import Time
from faults.schedules.watching import END_S, QUIET_S, Schedule, Stage
from sent_spans import body
from series import counter, gauge

from sidelight.exporter.prometheus.page import LivePage
from sidelight.sidecar.__main__ import GC_THRESHOLD
from sidelight.sidecar.options.watch import WatchOptions, check_watch
from sidelight.sidecar.progress.reporter import MOST_REMEMBERED, Progress
from sidelight.sidecar.watch import service
from sidelight.sidecar.watch.view import WatchView

PAGE_PORT = 9464
RELOAD_EVERY_S, SCRAPE_EVERY_S, LIFE_S, TWICE_EVERY = 3, 9, 30, 10
LINES = 10  # of what a process says, so many are looked at
AWAY_S = range(10, 20)  # of each life of the engine
INTERVALS = ("0.5", "1", "[[")  # the last is refused
REQUEST = traffic.Request(
    number=0,
    start_ms=0.0,
    network_ms=40.0,
    gateway_ms=60.0,
    frontend_ms=50.0,
    queue_ms=50.0,
    prefill_ms=100.0,
    decode_ms=700.0,
    sides=frozenset(("client", "gateway", "engine")),
)


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds at a minute: blocks of memory in use, and of garbage that waits to be collected."""

    minute: int
    live: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """What came of it: what was held, how many requests were sent, the result of the watch, and what went wrong."""

    held: list[Held]
    sent: int
    line: str
    trouble: list[str]


class Restarting(Engine):
    """An engine whose counters begin anew with each of its lives; which pages it served is not noted."""

    def _page(self) -> bytes:
        life, age_s = divmod(traffic.now_ms(self.clock) / 1e3, LIFE_S)
        text = counter("vllm:request_success_total", int(age_s), labels=('model_name="m",finished_reason="stop"',))
        text += counter("vllm:prompt_tokens_total", int(1000 * age_s), labels=('model_name="m"',))
        text += gauge("vllm:num_requests_running", 3, labels=('model_name="m"',))
        return (text + gauge("process_start_time_seconds", 1e9 + life)).encode()


class LongStage(Stage):
    """Owns the virtual machine of one watch that goes on for hours."""

    def __init__(self, clock: Time, place: Path) -> None:
        super().__init__(clock, random.Random(0), Schedule(requests=[], exports=[], weather=Weather()), place)
        self.engine = Restarting(network=self.network, clock=clock, rng=random.Random(0), requests=())
        self.config = place / "watch.yaml"
        self.sent, self.line = 0, ""
        self._doing: set[asyncio.Task[None]] = set()

    def _view(self, *arguments: Any, **named: Any) -> WatchView:
        return WatchView(*arguments, **named)

    def _page(self) -> LivePage:
        return LivePage()

    def begin_watch(self) -> None:
        """Start the watch as one that has gone on for days: with as many warnings as it remembers."""
        options = check_watch(
            WatchOptions(
                otlp_listen=f"{HOST}:{traffic.GRPC_PORT}",
                listen=f"{HOST}:{PAGE_PORT}",
                otlp_forward=f"http://{HOST}:{PORT}",
                metrics=(URL,),
                memory="100GB",
                config=self.config,
                out=self.place / "watch",
            )
        )

        progress = Progress("json")
        progress.warned.extend(f"warning {number}" for number in range(MOST_REMEMBERED))

        async def main(_: object) -> int:
            self.line, _ = await service.watch(options, command=[], progress=progress, wall_ns=self.clock.wall_ns)
            return 0

        _, self._watch = self.machine.start("watch", main)

    async def soak(self, minutes: Sequence[int]) -> list[Held]:
        """Let the watch go on up to the last of some minutes; return what was held at each of them."""
        self._configure(INTERVALS[0])
        await self.collector.come()
        await self.engine.begin()
        self.begin_watch()
        await asyncio.sleep(LIFE_S)
        held: list[Held] = []
        begun_s = self._now_s()
        for second in range(60 * minutes[-1] + 1):
            await asyncio.sleep(max(0.0, begun_s + second - self._now_s()))
            if second % 60 == 0 and second // 60 in minutes:
                held.append(_look(second // 60))
            await self._go_on(second)
        self.network.is_calm = True
        await asyncio.sleep(QUIET_S)
        self.loop.signals[signal.SIGTERM]()
        assert self._watch is not None
        async with asyncio.timeout(END_S):
            await self._watch
        return held

    async def _go_on(self, second: int) -> None:
        """Do what is due at a second."""
        self._send()
        self.collector.taken.clear()
        if second % LIFE_S == 0:
            self.engine.end()
            await self.engine.begin()
        self.collector.busy = float(second % LIFE_S in AWAY_S)
        if second % RELOAD_EVERY_S == 0:
            for process in self.machine.processes:
                process.errors = deque(process.errors, maxlen=LINES)
            self._configure(INTERVALS[second // RELOAD_EVERY_S % len(INTERVALS)])
            self.loop.signals[signal.SIGHUP]()
        if second % SCRAPE_EVERY_S == 0:
            self._do(self._scrape())

    def _configure(self, interval_s: str) -> None:
        self.config.write_text(f"metrics: ['{URL}']\nscrape-interval: {interval_s}\nkeep: 2m\n")

    def _send(self) -> None:
        self.sent += 1
        start_ms = traffic.now_ms(self.clock) - REQUEST.end_ms
        request = replace(REQUEST, number=self.sent, start_ms=start_ms)
        export = traffic.Export(
            number=self.sent,
            due_s=self._now_s(),
            over="grpc" if self.sent % 2 else "http",
            data=body([*request.spans().values()]),
            parts=(),
            again_s=() if self.sent % TWICE_EVERY else (5.0,),
        )
        self._do(self.exporter.send_all([export]))

    async def _scrape(self) -> None:
        """Read the page, as Prometheus does."""
        reader, writer = await asyncio.open_connection(HOST, PAGE_PORT)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        if b"sidelight_requests_total" not in await reader.read():
            self.loop.trouble.append("the page is not there")
        writer.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)


def _look(minute: int) -> Held:
    before = sys.getallocatedblocks()
    gc.collect()
    live = sys.getallocatedblocks()
    return Held(minute=minute, live=live, waiting=before - live)


def answer_minutes(clock: Time, minutes: Sequence[int]) -> int:
    """Let a watch go on in a directory below the first argument; write what came of it as JSON."""
    answers = sys.__stdout__
    assert answers is not None
    gc.set_threshold(GC_THRESHOLD)  # as the command does
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as scratch:
        stage = LongStage(clock, Path(scratch))
        with stage.installed() as records:
            held = stage.loop.run_until_complete(stage.soak(minutes))
        soaked = Soaked(held=held, sent=stage.sent, line=stage.line, trouble=[*stage.loop.trouble, *records])
        answers.write(json.dumps(asdict(soaked)) + "\n")
    return 0
