"""Agent of a node: it starts load workers there, passes their lines, takes plans and gives the files that they write.

Whatever it is asked may be asked again where an answer was lost: lines and blocks are numbered.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import msgspec

from sidelight.loadgen.host.clock_sync import clock_state, clock_summary
from sidelight.loadgen.host.cpu_steal import CpuTicks, read_ticks
from sidelight.loadgen.host.limits import shortage
from sidelight.loadgen.host.round_trip import measure_rtt, round_trip
from sidelight.rundir.process import descriptor_limit
from sidelight.rundir.stats import Missing
from sidelight.sidecar.run.processes.places import LOCAL, LocalPipes
from sidelight.sidecar.version import VERSION

BLOCK_BYTES = 4 * 1024 * 1024
EVERY_S = 0.25
PLANS = "plan-"  # how the names of files begin that are not to be given


@dataclass(slots=True, kw_only=True, eq=False)
class _AgentWorker:
    """A worker that an agent has started: its folder, its lines so far and how it ended."""

    folder: Path
    pipes: LocalPipes
    lines: list[bytes] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    written: int = 0
    end: str = ""


def _as_parent() -> int:
    """Take the niceness of the parent process where it is permitted; return the niceness, which workers inherit.

    Ray starts what it runs at niceness 15, at which a load is late wherever another process wants the processor.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
    return os.getpriority(os.PRIO_PROCESS, 0)


class Agent:
    """Owner of the load workers of one node and of their folder. Its methods are called from another machine.

    Where the agent dies, its workers' input ends: they cancel what is in flight, record it and leave.
    """

    def __init__(self) -> None:
        self._folder = Path(mkdtemp(prefix="sidelight-agent-"))
        self._workers: list[_AgentWorker] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def about(self, urls: Sequence[str], workers: int, connections: int) -> dict[str, Any]:
        """Return the facts of the node: its versions, limits, clock and round trips; what it is short of for a load."""
        round_trips = [round_trip(url, await measure_rtt(url)) for url in urls]
        return {
            "host": socket.gethostname(),
            "sidelight": VERSION,
            "ray": version("ray"),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "niceness": _as_parent(),
            "open_files": descriptor_limit(),
            "shortage": shortage(connections, workers=workers, targets=len(urls)),
            "clock_state": msgspec.to_builtins(clock_summary(await asyncio.to_thread(clock_state))),
            "network_rtt_ms": msgspec.to_builtins(round_trips),
        }

    async def now_ns(self) -> int:
        """Return the monotonic clock of the node."""
        return time.monotonic_ns()

    async def ticks(self) -> CpuTicks | Missing:
        """Return the clock ticks of the processors of the node."""
        return read_ticks()

    async def start(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Start a worker; return its number here, and the folder of its files."""
        pipes = await LOCAL.start(arguments, None)
        number = len(self._workers)
        folder = self._folder / str(number)
        folder.mkdir()
        self._workers.append(_AgentWorker(folder=folder, pipes=pipes))
        self._tasks.append(asyncio.create_task(self._read(self._workers[number])))
        return number, str(folder)

    async def _read(self, worker: _AgentWorker) -> None:
        while line := await worker.pipes.readline():
            async with worker.changed:
                worker.lines.append(line)
                worker.changed.notify_all()
        end = await worker.pipes.wait()
        async with worker.changed:
            worker.end = end
            worker.changed.notify_all()

    async def write(self, number: int, count: int, line: bytes) -> int:
        """Write a worker's line number `count`, once; return when, by the node's clock."""
        worker = self._workers[number]
        if count > worker.written:
            worker.written = count
            await worker.pipes.write(line)
        return time.monotonic_ns()

    async def put(self, number: int, name: str, at: int, block: bytes) -> None:
        """Write a block of a file of a worker's folder."""
        with os.fdopen(os.open(self._workers[number].folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.seek(at)
            file.write(block)

    async def lines(self, number: int, after: int) -> AsyncIterator[bytes]:
        """Yield a worker's lines behind the first `after`, and at last how it ended."""
        worker = self._workers[number]
        while True:
            async with worker.changed:
                while after >= len(worker.lines) and not worker.end:
                    await worker.changed.wait()
            for line in worker.lines[after:]:
                after += 1
                yield line
            if worker.end and after >= len(worker.lines):
                yield worker.end.encode()
                return

    async def files(self, number: int, sizes: Mapping[str, int]) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the growth of a worker's files beyond `sizes`, by name, until it has ended."""
        worker, given = self._workers[number], dict(sizes)
        while True:
            is_over, more = bool(worker.end), False
            for path in sorted(worker.folder.iterdir()):
                if path.name.startswith(PLANS):
                    continue
                with path.open("rb") as file:
                    file.seek(given.get(path.name, 0))
                    block = file.read(BLOCK_BYTES)
                if block:
                    given[path.name] = given.get(path.name, 0) + len(block)
                    more |= len(block) == BLOCK_BYTES
                    yield path.name, block
            if is_over and not more:
                return
            if not more:
                await self._rest(worker)

    async def _rest(self, worker: _AgentWorker) -> None:
        """Wait for the next look at a worker's files; its end is one."""
        try:
            async with asyncio.timeout(EVERY_S), worker.changed:
                await worker.changed.wait_for(lambda: worker.end)
        except TimeoutError:
            return

    async def close(self, number: int) -> None:
        """End a worker's input."""
        self._workers[number].pipes.close()

    async def kill(self, number: int) -> None:
        """Kill a worker."""
        self._workers[number].pipes.kill()

    async def forget(self, number: int) -> None:
        """Delete the files of a worker: they are at home."""
        rmtree(self._workers[number].folder, ignore_errors=True)

    async def leave(self) -> None:
        """End all workers and delete the folder."""
        for worker in self._workers:
            worker.pipes.kill()
        await asyncio.gather(*self._tasks)
        rmtree(self._folder, ignore_errors=True)
