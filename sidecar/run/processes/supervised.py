"""Supervision of a child process: it is started again where it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import msgspec

from sidelight.recorded.errors import WorkerDied
from sidelight.sidecar.run.processes.child import START_TIMEOUT_S, Child

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before one that died is started again
SOUND_S = 60.0  # one that has lived so long died of something new
MOST_LATE_DEATHS = 2  # of a child that is to finish


async def keep_up(
    life: Callable[[], Awaitable[bool]],
    died: Callable[[WorkerDied], None],
    *,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Restart a child whenever it dies, with growing pauses, until one has finished its work.

    `life` starts one and returns whether all is done; if not, the next follows at once. `died` is called with each
    death, and may raise to give up.
    """
    deaths_in_a_row = 0
    while True:
        begun_s = asyncio.get_running_loop().time()
        try:
            if await life():
                return
            continue
        except WorkerDied as death:
            died(death)
        lived_s = asyncio.get_running_loop().time() - begun_s
        deaths_in_a_row = 1 if lived_s > SOUND_S else deaths_in_a_row + 1
        await pause(min(FIRST_PAUSE_S * 2 ** min(deaths_in_a_row - 1, 10), LONGEST_PAUSE_S))


class Supervised:
    """A child that is started again whenever it dies, until it is asked to finish. An async context manager; the first
    child, which `begin` was done for, is the caller's.

    `begin` makes another one ready. `died` is called with each death, `restarted` when one is up again after it.
    `unwritten` is how many records those that died had said that they could not write; of the last second before a
    death nothing is said.
    """

    def __init__(
        self,
        child: Child,
        *,
        begin: Callable[[Child], Awaitable[None]],
        died: Callable[[WorkerDied], None],
        restarted: Callable[[], None],
    ) -> None:
        self.deaths = 0
        self.unwritten = 0
        self._first, self._begin, self._died, self._restarted = child, begin, died, restarted
        self._asked = asyncio.Event()
        self._command: tuple[msgspec.Struct, str, float] | None = None
        self._answer: dict[str, Any] | None = None
        self._late_deaths = 0  # since it was asked to finish
        self._up: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._up is not None:
            self._up.cancel()
            with suppress(asyncio.CancelledError):
                await self._up

    async def ready(self) -> None:
        """Wait until the first child is ready; from then on another follows it. Raises WorkerDied where it is not."""
        await self._first.expect("ready", timeout_s=START_TIMEOUT_S)
        self._up = asyncio.create_task(keep_up(self._live, self._on_death, pause=self._pause))

    async def finish(self, command: msgspec.Struct, event: str, *, timeout_s: float) -> dict[str, Any] | None:
        """Send a last command, and return the event that answers it. None where it is not answered in time, neither by
        the child nor by the one that is started in its place. No other is started after that.
        """
        if self._up is None:
            raise AssertionError("a child is ready before it finishes")
        self._command = command, event, timeout_s
        self._asked.set()
        await self._up
        return self._answer

    async def _live(self) -> bool:
        if self._late_deaths >= MOST_LATE_DEATHS:
            return True
        async with AsyncExitStack() as stack:
            child = self._first
            stack.push_async_exit(child)  # one that hangs has to end, too: the next one listens where it did
            if self.deaths:
                child = await stack.enter_async_context(Child(self._first.name, self._first.arguments))
                await self._begin(child)
                await child.expect("ready", timeout_s=START_TIMEOUT_S)
                self._restarted()
            try:
                await self._finished(child)
            except WorkerDied:
                self.unwritten += child.unwritten
                raise
        return True

    async def _finished(self, child: Child) -> None:
        """Wait for the request to finish, and for a child's answer. Raises WorkerDied."""
        await child.while_alive(self._asked.wait())
        if self._command is None:
            raise AssertionError("what is asked for is known")
        command, event, timeout_s = self._command
        await child.send(command)
        self._answer = await child.expect(event, timeout_s=timeout_s)

    def _on_death(self, death: WorkerDied) -> None:
        self.deaths += 1
        self._late_deaths += self._asked.is_set()
        self._died(death)

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the child is to finish."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), seconds)
