"""Child processes that a test speaks to over pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@asynccontextmanager
async def piped(*arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run Python with these arguments and variables, its input and output as pipes; it is gone at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # asyncio leaves the pipes of a killed child to the garbage collector


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A command that was started, as an event loop waits for it."""

    command: subprocess.Popen[str]
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader | None

    @property
    def pid(self) -> int:
        return self.command.pid

    @property
    def returncode(self) -> int | None:
        return self.command.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self.command.send_signal(number)

    def kill(self) -> None:
        self.command.kill()

    async def wait(self) -> int:
        return await asyncio.to_thread(self.command.wait)


async def awaited(command: subprocess.Popen[str]) -> Child:
    """Return a command that was started with pipes, whose output this event loop reads from now on."""

    async def reader(pipe: IO[str]) -> asyncio.StreamReader:
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), pipe)
        return lines

    assert command.stdout is not None
    stderr = command.stderr and await reader(command.stderr)
    return Child(command=command, stdout=await reader(command.stdout), stderr=stderr)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has held so far; 0 where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
