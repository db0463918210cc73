"""Processes that are tasks of one loop: what they write, send and say is theirs, and ends when they are killed.

A killed process goes on as a ghost: its tasks are cancelled and clean up, but nothing that they do has an effect any
more, neither on the disk nor on the network. What is outside sees a process that was ended by kill -9.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from faults.schedules.virtual_time import Task, VirtualLoop


@dataclass(eq=False)
class Process:
    """One process: its tasks, what it has open, and its standard streams."""

    name: str
    tasks: dict[Task, None] = field(default_factory=dict)
    at_death: list[Callable[[], object]] = field(default_factory=list)
    standard_input: asyncio.StreamReader = field(default_factory=asyncio.StreamReader)
    heard: Callable[[bytes], object] = lambda _: None
    errors: list[str] | deque[str] = field(default_factory=list)
    is_dead: bool = False
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    died_ns: int = 0  # by the monotonic clock; 0: it was not killed

    def kill(self, code: int = -9) -> None:
        """End it as kill -9 does."""
        if self.code is not None:
            return
        self.is_dead, self.code, self.died_ns = True, code, time.monotonic_ns()
        for undo in list(self.at_death):
            undo()
        for task in list(self.tasks):
            task.cancel()
        self.ended.set()

    def end(self, code: int) -> None:
        """Note that it has come to its end."""
        if self.code is None:
            self.code = code
            self.ended.set()


running: contextvars.ContextVar[Process | None] = contextvars.ContextVar("running", default=None)


def is_ghost() -> bool:
    """Tell whether what runs now is of a process that was killed."""
    process = running.get()
    return process is not None and process.is_dead


class _Stream(io.TextIOBase):
    """Standard output or standard error: of the process that writes to it."""

    def __init__(self, real: Any, *, is_output: bool) -> None:
        self._real, self._is_output = real, is_output

    def write(self, text: str) -> int:
        process = running.get()
        if process is None:
            return int(self._real.write(text))
        if not process.is_dead:
            if self._is_output:
                process.heard(text.encode())
            else:
                process.errors.append(text)
        return len(text)

    def flush(self) -> None:
        self._real.flush()

    def fileno(self) -> int:
        return int(self._real.fileno())


class _Input:
    """The end of a pipe that a process is spoken to by."""

    def __init__(self, process: Process) -> None:
        self._process, self._is_closed = process, False

    def write(self, data: bytes) -> None:
        if is_ghost() or self._is_closed:
            return
        if self._process.code is not None:
            raise BrokenPipeError
        self._process.standard_input.feed_data(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.standard_input.feed_eof()


class Handle:
    """A child process as its parent has it: what `asyncio.create_subprocess_exec` returns."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.stdin, self.stdout = _Input(process), asyncio.StreamReader()
        process.heard = self.stdout.feed_data

    @property
    def returncode(self) -> int | None:
        return self.process.code

    def kill(self) -> None:
        if not is_ghost():
            self.process.kill()

    async def wait(self) -> int:
        await self.process.ended.wait()
        assert self.process.code is not None
        return self.process.code


Main = Callable[[Process], Awaitable[int]]


class Machine:
    """Starts processes, and knows which there were."""

    def __init__(self, loop: VirtualLoop, children: dict[str, Main]) -> None:
        self._children = children
        self.processes: list[Process] = []
        self.born: Callable[[Process], object] = lambda _: None
        self._loop = loop
        loop.started = _enlist
        loop.is_ghost = lambda task: bool((owner := getattr(task, "owner", None)) and owner.is_dead) or is_ghost()
        sys.stdout, sys.stderr = _Stream(sys.__stdout__, is_output=True), _Stream(sys.__stderr__, is_output=False)

    def tasks(self) -> list[Task]:
        """Return the tasks of the processes that were not killed."""
        return [task for process in self.processes if not process.is_dead for task in process.tasks]

    def named(self, name: str) -> list[Process]:
        """Return the processes of a name, those that have ended too."""
        return [process for process in self.processes if process.name == name]

    def start(self, name: str, main: Main) -> tuple[Process, Task]:
        """Start a process; its task ends with it, or goes on as a ghost."""
        process = Process(name)
        context = contextvars.copy_context()
        context.run(running.set, process)
        self.processes.append(process)
        self.born(process)
        task = context.run(self._loop.create_task, self._live(process, main))
        return process, task

    async def spawn(self, *command: str, **_: Any) -> Handle:
        """Stand in for `asyncio.create_subprocess_exec`."""
        parent, module = running.get(), command[command.index("-m") + 1]
        await asyncio.sleep(0.2)  # imports
        process, _ = self.start(module, self._children[module])
        handle = Handle(process)

        async def wait() -> None:
            await process.ended.wait()
            handle.stdout.feed_eof()

        self._loop.create_task(wait(), context=contextvars.Context())
        if parent is not None:
            parent.at_death.append(handle.stdin.close)
            if parent.is_dead:
                handle.stdin.close()
        return handle

    async def _live(self, process: Process, main: Main) -> int:
        try:
            code = await main(process)
        except asyncio.CancelledError:
            if not process.is_dead:
                raise
            code = -9
        except BaseException as error:  # noqa: BLE001  as an interpreter does
            if not process.is_dead:
                process.errors.append(f"{type(error).__name__}: {error}\n")
            code = 1
        process.end(code)
        return code


def _enlist(task: Task) -> None:
    process = running.get()
    if process is not None:
        task.owner = process
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
        if process.is_dead:
            task.cancel()
