"""Places where a child process runs, and the pipes to it. This machine is one; a node behind an agent is the other."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from sidelight.loadgen.host.cpu_steal import CpuTicks, read_ticks
from sidelight.loadgen.records import PlannedRequest
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.frames import open_append
from sidelight.rundir.printable.masking import secret_variables
from sidelight.rundir.stats import Missing

# Whether a planned request is one of a worker's share.
Share = Callable[[PlannedRequest], bool]


class Pipes(Protocol):
    """The two pipes of a child process, and its end."""

    async def readline(self) -> bytes:
        """Return the next line that it printed, b"" at its end."""

    async def write(self, line: bytes) -> None:
        """Write a line to it. That it has ended shows in `readline`."""

    def close(self) -> None:
        """End its input, at which it leaves."""

    def kill(self) -> None:
        """Kill it, if it lives."""

    async def wait(self) -> str:
        """Wait until it has ended and its files are here; return how, as in `ended with code 1`."""


class Place(Protocol):
    """Where a child runs: it starts there, and reads and writes its files there."""

    @property
    def where(self) -> str:
        """Its node, as a name of a child ends; "" here."""

    @property
    def round_trip_s(self) -> float:
        """How long a line takes there and back, at worst."""

    async def start(self, arguments: Sequence[str], stderr: Path | None) -> Pipes:
        """Start Python there with `-m` and these arguments. Its standard error is ours, or a file."""

    def path_there(self, path: Path) -> str:
        """Return the path there of a file here, which it becomes as it grows."""

    def offset_ns(self, clock: AnchoredClock) -> int:
        """Return the time of the run minus the monotonic clock there."""

    async def deliver(self, plan: Path, share: Share) -> str:
        """Return the path there of a plan, or of a share of it."""

    async def ticks(self) -> CpuTicks | Missing:
        """Return the clock ticks of the processors there."""


class LocalPipes:
    """The pipes of a process on this machine."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._stdin = cast("asyncio.StreamWriter", process.stdin)
        self._stdout = cast("asyncio.StreamReader", process.stdout)

    async def readline(self) -> bytes:
        return await self._stdout.readline()

    async def write(self, line: bytes) -> None:
        with suppress(ConnectionResetError, BrokenPipeError):
            self._stdin.write(line)
            await self._stdin.drain()

    def close(self) -> None:
        self._stdin.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended before
            self.process.kill()

    async def wait(self) -> str:
        return f"ended with code {await self.process.wait()}"


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """This machine: files and clock are the conductor's."""

    where: str = ""
    round_trip_s: float = 0.0

    async def start(self, arguments: Sequence[str], stderr: Path | None) -> LocalPipes:
        with nullcontext() if stderr is None else os.fdopen(open_append(stderr), "ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a module that lies in the current directory is not imported
                "-m",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env=environment(),
            )
        return LocalPipes(process)

    def path_there(self, path: Path) -> str:
        return str(path)

    def offset_ns(self, clock: AnchoredClock) -> int:
        return clock.offset_ns

    async def deliver(self, plan: Path, _: Share) -> str:
        return str(plan)

    async def ticks(self) -> CpuTicks | Missing:
        return read_ticks()


LOCAL = LocalPlace()


def environment() -> dict[str, str]:
    """Return the environment of a child, without our secrets. Its specification has those that it needs."""
    secret = frozenset(secret_variables(os.environ))
    return {name: value for name, value in os.environ.items() if name not in secret}
