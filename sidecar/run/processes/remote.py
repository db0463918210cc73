"""Load workers behind an agent on another node: their pipes, plans and files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidelight.loadgen.host.cpu_steal import CpuTicks
from sidelight.loadgen.records import PLAN_END, decode_planned
from sidelight.recorded.errors import WorkerDied
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.frames import open_append, read_frames
from sidelight.rundir.framing import Framer
from sidelight.rundir.stats import Missing
from sidelight.sidecar.run.processes.agent import BLOCK_BYTES
from sidelight.sidecar.run.processes.places import Share

WATCH_EVERY_S = 0.25
_LINE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Calls of an agent's methods by name. Both raise WorkerDied.

    stream    of a method that yields: its arguments are asked for again wherever it begins anew
    lost      how its node was lost, as a call has shown; "" before
    """

    node: str
    lost: Callable[[], str]
    call: Callable[..., Awaitable[Any]]
    stream: Callable[[str, Callable[[], tuple[Any, ...]]], AsyncIterator[Any]]


@dataclass(slots=True, kw_only=True, eq=False)
class RemotePlace:
    """The place of one load worker behind an agent.

    apart_ns      the conductor's monotonic clock minus the node's
    files         the files here of those there, by name
    """

    link: Link
    apart_ns: int = 0
    round_trip_s: float = 0.0
    files: dict[str, Path] = field(default_factory=dict)
    number: int = -1
    folder: str = ""

    @property
    def where(self) -> str:
        return f" on node {self.link.node}"

    async def start(self, arguments: Sequence[str], _: Path | None) -> RemotePipes:
        self.number, self.folder = await self.link.call("start", list(arguments))
        return RemotePipes(self)

    def path_there(self, path: Path) -> str:
        self.files[path.name] = path
        return f"{self.folder}/{path.name}"

    def offset_ns(self, clock: AnchoredClock) -> int:
        return clock.offset_ns + self.apart_ns

    async def deliver(self, plan: Path, share: Share) -> str:
        at, blocks = 0, _share_of(plan, share)
        with suppress(WorkerDied):  # which the worker's end says
            while block := await asyncio.to_thread(next, blocks, b""):
                await self.link.call("put", self.number, plan.name, at, block)
                at += len(block)
        return f"{self.folder}/{plan.name}"

    async def ticks(self) -> CpuTicks | Missing:
        try:
            read: CpuTicks | Missing = await self.link.call("ticks")
        except WorkerDied as lost:
            return Missing(reason=str(lost))
        return read


class RemotePipes:
    """The pipes of a worker behind an agent, and the way home of its files. Both tasks end with the worker."""

    def __init__(self, place: RemotePlace) -> None:
        self._place, self._link = place, place.link
        self._lines = asyncio.StreamReader(limit=_LINE_BYTES)
        self._received = self._written = 0
        self._end = ""
        self._tasks = [asyncio.create_task(work) for work in (self._receive(), self._bring_home())]
        self._tasks.append(asyncio.create_task(self._watch(*self._tasks)))

    async def readline(self) -> bytes:
        return await self._lines.readline()

    async def write(self, line: bytes) -> None:
        self._written += 1
        with suppress(WorkerDied):
            await self._link.call("write", self._place.number, self._written, line)

    def close(self) -> None:
        self._tasks.append(asyncio.create_task(self._ask("close")))

    def kill(self) -> None:
        self._tasks.append(asyncio.create_task(self._ask("kill")))

    async def wait(self) -> str:
        while not all(task.done() for task in self._tasks):
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()
        return self._end

    async def _ask(self, what: str) -> None:
        with suppress(WorkerDied):
            await self._link.call(what, self._place.number)

    async def _watch(self, *streams: asyncio.Task[None]) -> None:
        """End the streams of a node that a call found lost: they would wait until Ray declares it dead.

        Its clock is asked for twice a second.
        """
        while not streams[0].done():
            if lost := self._link.lost():
                self._end = lost
                for stream in streams:
                    stream.cancel()
            await asyncio.wait(streams[:1], timeout=WATCH_EVERY_S)

    async def _receive(self) -> None:
        end = ""
        try:
            async for line in self._link.stream("lines", lambda: (self._place.number, self._received)):
                self._received += 1
                if line.endswith(b"\n"):
                    self._lines.feed_data(line)
                else:
                    end = line.decode()
        except WorkerDied as lost:
            end = str(lost)
        finally:
            self._end = self._end or end
            self._lines.feed_eof()

    async def _bring_home(self) -> None:
        """Append the growth of the worker's files to those here. Where that fails, the worker is killed."""
        files = self._place.files

        def sizes() -> tuple[Any, ...]:
            there = {name: path.stat().st_size for name, path in files.items() if path.exists()}
            return self._place.number, there

        try:
            async for name, block in self._link.stream("files", sizes):
                if name in files:
                    _append(files[name], block)
            await self._link.call("forget", self._place.number)
        except WorkerDied:
            return
        except OSError as error:
            self._end = f"was ended: {error.filename or files}: {error.strerror}"
            await self._ask("kill")


def _append(path: Path, block: bytes) -> None:
    try:
        with os.fdopen(open_append(path), "ab") as file:
            file.write(block)
    except OSError as error:
        error.filename = path
        raise


def _share_of(plan: Path, share: Share) -> Iterator[bytes]:
    """Yield the blocks of a worker's plan: its share of a whole one, and the end."""
    framer, block = Framer(), bytearray()
    for payload in read_frames(plan):
        planned = decode_planned(payload)
        if planned.index == PLAN_END or share(planned):
            block += framer.frame(payload)
        if len(block) >= BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    yield bytes(block + framer.end())
