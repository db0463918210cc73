"""A watch whose machine gets another time of day while it runs, whose receiver dies, or that fails itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from processes import child_processes
from sent_spans import MS, NOON, body, call, engine
from waiting import BOUND_S

from sidelight.correlator.live.window import TraceWindow
from sidelight.rundir.access import Access
from sidelight.scraper.spans.forward import CollectorConnection
from sidelight.sidecar.options.watch import WatchOptions, check_watch
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run import open_run
from sidelight.sidecar.watch import service
from sidelight.sidecar.watch.service import watch
from sidelight.sidecar.watch.view import WatchView


@dataclass
class Said(Progress):
    """What a watch says, kept."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__("quiet")

    def stage(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)

    async def until(self, pattern: str, *, times: int = 1) -> str:
        """Wait until it was said so often; return what the pattern holds."""
        async with asyncio.timeout(BOUND_S):
            while len(matches := re.findall(pattern, "\n".join(self.lines))) < times:  # noqa: ASYNC110  its threads too
                await asyncio.sleep(0.05)
        return str(matches[0])


async def test_it_goes_on_in_another_directory_once_the_clock_is_set(tmp_path: Path):
    """It was an hour slow at the start: that is said and recorded, no sender is blamed, and ports stay as they are."""
    slow_s = 3600
    said = Said()
    options = check_watch(WatchOptions(otlp_listen="127.0.0.1:0", listen="127.0.0.1:0", out=tmp_path / "watch"))
    watching = asyncio.ensure_future(
        watch(options, command=[], progress=said, wall_ns=lambda: time.time_ns() - slow_s * 10**9)
    )
    port = await said.until(r"gRPC at 127\.0\.0\.1:(\d+)")
    page = await said.until(r"http://\S+/metrics")
    slow_s = 0
    await said.until(r"the clock of this machine was set 3600\.\d s ahead.* goes on in another by the new time")
    await said.until("gRPC at", times=2)
    clock_ms = (time.time_ns() - NOON) / MS
    async with asyncio.timeout(BOUND_S), CollectorConnection(f"grpc://127.0.0.1:{port}", Access()) as wire:
        await wire.send(body([call(clock_ms=clock_ms), engine(clock_ms=clock_ms)]))
    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session:
        text = ""
        while 'sidelight_requests_total{source="trace"} 1.0\n' not in text:
            text = await (await session.get(page)).text()
            await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    _, path = await asyncio.wait_for(watching, BOUND_S)
    assert tmp_path / "watch-2" == path
    before, run = open_run(tmp_path / "watch"), open_run(path)
    (step,) = (event for event in before.events if event.name == "clock_left")
    assert 3600 == round(step.data["moved_ns"] / 1e9)
    assert any("the clock of this machine was set" in note for note in before.notes)
    assert ("complete", "complete") == (before.manifest["status"], run.manifest["status"])
    assert 1 == len(run.requests)
    assert run.span_counts is not None
    assert (0, 0) == (run.span_counts.off_clock, run.receiver_deaths)


async def test_it_goes_on_by_the_time_before_until_the_step_can_be_recorded(tmp_path: Path):
    """Senders are asked to come again, as long as that lasts: no directory has stamps of two clocks."""
    ahead_s = 0
    said = Said()
    options = check_watch(WatchOptions(otlp_listen="127.0.0.1:0", listen="127.0.0.1:0", out=tmp_path / "watch"))
    watching = asyncio.ensure_future(
        watch(options, command=[], progress=said, wall_ns=lambda: time.time_ns() + ahead_s * 10**9)
    )
    port = await said.until(r"gRPC at 127\.0\.0\.1:(\d+)")
    ready = (await said.until(r"http://\S+/metrics")).replace("/metrics", "/readyz")
    events, aside = tmp_path / "watch" / "raw" / "events.log", tmp_path / "events.log"
    async with asyncio.timeout(BOUND_S), CollectorConnection(f"grpc://127.0.0.1:{port}", Access()) as wire:
        await wire.deliver(body([engine(clock_ms=(time.time_ns() - NOON) / MS)]))
        events.rename(aside)
        events.mkdir()  # nothing can be recorded there now
        ahead_s = 100
        await said.until(r"set 100\.0 s ahead.*cannot be recorded")
        async with aiohttp.ClientSession() as session:
            answer = await (await session.get(ready)).text()
        assert "that the clock was set cannot be recorded: Is a directory\n" == answer
        events.rmdir()
        aside.rename(events)
        await said.until("gRPC at", times=2)
        await wire.deliver(body([call(clock_ms=(time.time_ns() - NOON) / MS + 100_000)]))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(watching, BOUND_S)
    assert [1, 1] == [open_run(tmp_path / name).span_counts.exports for name in ("watch", "watch-2")]


async def test_it_is_not_ready_while_what_comes_cannot_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For a defect of ours, which does not end it; it is ready again when that is over."""
    forget, is_broken = TraceWindow._forget, True

    def fail(window: TraceWindow, now_ns: int, before_ns: int) -> None:
        if is_broken:
            raise ZeroDivisionError
        forget(window, now_ns, before_ns)

    monkeypatch.setattr(TraceWindow, "_forget", fail)
    said = Said()
    options = check_watch(WatchOptions(otlp_listen="127.0.0.1:0", listen="127.0.0.1:0", out=tmp_path / "watch"))
    watching = asyncio.ensure_future(watch(options, command=[], progress=said))
    ready = (await said.until(r"http://\S+/metrics")).replace("/metrics", "/readyz")
    await said.until("gRPC at")
    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session:
        while (answer := await (await session.get(ready)).text()) == "ready\n":  # noqa: ASYNC110  a thread of the watch
            await asyncio.sleep(0.05)
        assert "a defect of Sidelight's: not all that came is counted\n" == answer
        is_broken = False
        while (await session.get(ready)).status != 200:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(watching, BOUND_S)


async def test_nothing_is_noted_while_the_logs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are read in a thread: what notes that a receiver runs again goes through the same spans, and waits."""
    reading, noted, overlaps = threading.Event(), threading.Event(), []
    poll, missed = WatchView.poll, WatchView.missed

    def read_long(view: WatchView, *moment: int, **how: Any) -> None:
        reading.set()
        noted.wait(1.0 if "restarted" in "".join(said.lines) else 0.0)
        poll(view, *moment, **how)
        reading.clear()

    def note(view: WatchView, back_ns: int) -> None:
        overlaps.append(reading.is_set())
        noted.set()
        missed(view, back_ns)

    monkeypatch.setattr(WatchView, "poll", read_long)
    monkeypatch.setattr(WatchView, "missed", note)
    said = Said()
    options = check_watch(WatchOptions(otlp_listen="127.0.0.1:0", listen="127.0.0.1:0", out=tmp_path / "watch"))
    watching = asyncio.ensure_future(watch(options, command=[], progress=said))
    await said.until("gRPC at")
    (receiver,) = child_processes(os.getpid(), "sidelight.scraper.worker.spans")
    os.kill(receiver, signal.SIGKILL)
    await said.until("the receiver runs again")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(watching, BOUND_S)
    assert [False] == overlaps


async def test_it_says_which_process_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The scraper, before another is started; spans are taken meanwhile."""
    monkeypatch.setattr("sidelight.sidecar.run.processes.supervised.FIRST_PAUSE_S", BOUND_S)
    said = Said()
    options = check_watch(WatchOptions(otlp_listen="127.0.0.1:0", listen="127.0.0.1:0", out=tmp_path / "watch"))
    watching = asyncio.ensure_future(watch(options, command=[], progress=said))
    ready = (await said.until(r"http://\S+/metrics")).replace("/metrics", "/readyz")
    port = await said.until(r"gRPC at 127\.0\.0\.1:(\d+)")
    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session:
        assert "ready\n" == await (await session.get(ready)).text()
        await said.until("scraping no page")  # one that dies before it is up ends the watch
        (scraper,) = child_processes(os.getpid(), "sidelight.scraper.worker")
        os.kill(scraper, signal.SIGKILL)
        await said.until("the scraper ended with code -9")
        assert "the scraper is down\n" == await (await session.get(ready)).text()
        async with CollectorConnection(f"grpc://127.0.0.1:{port}", Access()) as wire:
            await wire.send(body([call()]))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(watching, BOUND_S)


async def test_a_watch_that_looks_at_nothing_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its page answers all the same, and its health is good again once it goes on."""
    halted, poll = threading.Event(), WatchView.poll
    halted.set()

    def wait(view: WatchView, *moment: int, **how: Any) -> None:
        halted.wait(BOUND_S)
        poll(view, *moment, **how)

    async def until(status: int) -> str:
        async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session:
            while True:
                async with session.get(page.replace("/metrics", "/healthz")) as response:
                    if response.status == status:
                        return await response.text()
                await asyncio.sleep(0.05)

    monkeypatch.setattr(WatchView, "poll", wait)
    said = Said()
    options = check_watch(WatchOptions(otlp_listen="127.0.0.1:0", listen="127.0.0.1:0", out=tmp_path / "watch"))
    watching = asyncio.ensure_future(watch(options, command=[], progress=said))
    await said.until("gRPC at")
    page = await said.until(r"http://\S+/metrics")
    assert "ok\n" == await until(200)
    monkeypatch.setattr(service, "HALTED_S", 0.5)
    halted.clear()
    assert re.fullmatch(r"the logs have not been looked at for \d+ s\n", await until(503))
    monkeypatch.setattr(service, "HALTED_S", BOUND_S)
    halted.set()
    assert "ok\n" == await until(200)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(watching, BOUND_S)
