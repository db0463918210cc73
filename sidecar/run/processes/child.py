"""Child processes (load workers, the scraper, the receiver of spans, the simulator): JSON lines in, JSON lines out.

A child reads its specification from the first line of standard input and ends when that input ends, so that it never
outlives us. It runs in a session of its own: Ctrl-C reaches only the conductor, which stops its children. Where it
runs, its place says.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from sidelight.recorded.errors import WorkerDied
from sidelight.rundir.child import ChildSpec
from sidelight.rundir.printable.masking import registered
from sidelight.sidecar.run.processes.places import LOCAL, Place

T = TypeVar("T")

SCRAPER, RECEIVER = ("sidelight.scraper.worker",), ("sidelight.scraper.worker.spans",)  # their arguments
START_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 10.0  # a scraper whose input ends scrapes for 4 s more, a receiver forwards for 4 s
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)\b(?!Group)")


class Child:
    """One child process and its two pipes. An async context manager: leaving it ends the process.

    It can be started before its specification is known, since its imports take a quarter of a second; `begin` then
    sends the specification and the file of its standard error, which until then is ours. `heard` is called with each
    message. `unwritten` is how many records it has said that it could not write, as on a full disk.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        place: Place = LOCAL,
        stderr: Path | None = None,
        heard: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.name = name + place.where
        self.arguments = arguments
        self.place = place
        self.unwritten = 0
        self._heard = heard
        self._stderr = stderr
        self._idle = stderr is None

    async def __aenter__(self) -> Self:
        self._pipes = await self.place.start(self.arguments, self._stderr)
        return self

    async def begin(self, spec: ChildSpec, *, stderr: Path) -> None:
        """Send the child its specification, and the file of its standard error."""
        self._stderr = stderr
        self._idle = False
        await self.send(msgspec.structs.replace(spec, stderr=self.place.path_there(stderr), secrets=registered()))

    async def __aexit__(self, *_: object) -> None:
        self._pipes.close()
        if self._idle:
            self._pipes.kill()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._pipes.wait()
        except TimeoutError:
            self._pipes.kill()
            await self._pipes.wait()

    async def send(self, command: msgspec.Struct) -> None:
        """Write one command. That a child has ended is noticed by `expect`, which knows the reason."""
        await self._pipes.write(msgspec.json.encode(command) + b"\n")

    async def expect(self, event: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the next message of this kind, skipping others.

        Raises WorkerDied when the child reports an error, ends first, or takes longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._next_message()
                    if message.get("event") == "error":
                        raise WorkerDied("process.ended", f"{self.name}: {message.get('message')}")
                    if message.get("event") == event:
                        return message
        except TimeoutError:
            raise WorkerDied("process.ended", f"{self.name} was not {event} within {timeout_s:g} s") from None

    async def while_alive(self, work: Awaitable[T]) -> T:
        """Await something that goes on while the child lives. Raises WorkerDied when it ends, or says an error, first.

        Messages that come meanwhile are skipped.
        """
        dying = asyncio.ensure_future(self.expect("an end"))  # it says no such thing: this waits for its death
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([dying, working], return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                dying.result()
            return working.result()
        finally:
            for task in (dying, working):
                task.cancel()
            await asyncio.wait([dying, working])  # two cannot read its messages at once

    async def _next_message(self) -> dict[str, Any]:
        line = await self._pipes.readline()
        if not line:
            end = await self._pipes.wait()
            raise WorkerDied("process.ended", f"{self.name} {end}{self._last_error()}")
        message = json.loads(line)
        if not isinstance(message, dict):
            return {}
        if message.get("event") in ("unwritten", "written"):
            self.unwritten = int(message["count"])
        self._heard(message)
        return message

    def _last_error(self) -> str:
        if self._stderr is None or not self._stderr.exists():
            return ""
        lines = [line.strip(" |") for line in self._stderr.read_text(errors="replace").splitlines()]
        # The last line of a traceback names the error, but not that of an exception group.
        errors = [line for line in lines if ERROR_LINE.match(line)] or [line for line in lines if line]
        return f": {errors[-1]} (full output in {self._stderr})" if errors else ""
