"""Our own processes (load workers, the scraper, the simulator): JSON lines in, JSON lines out.

A child gets its specification as its first line of standard input and ends when that input does, so that it never
outlives us. It runs in a session of its own: Ctrl-C reaches only the conductor, which decides what happens to whom.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Self, cast

from sidecar.errors import WorkerDied

START_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 10.0  # a scraper that is ended without a word scrapes for 4 s more, and passes spans on for 4 s
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)\b(?!Group)")


class Child:
    """One child process and its two pipes. An async context manager: leaving it ends the process.

    It can be started before there is anything to tell it, since a quarter of a second goes into its imports; `begin`
    then says what to do and where its standard error goes, which until then is ours.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, stderr: Path | None = None) -> None:
        self.name = name
        self._arguments = arguments
        self._stderr = stderr
        self._waits = stderr is None

    async def __aenter__(self) -> Self:
        with nullcontext() if self._stderr is None else self._stderr.open("ab") as stderr:
            self._process: Process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._stdin = cast("asyncio.StreamWriter", self._process.stdin)
        self._stdout = cast("asyncio.StreamReader", self._process.stdout)
        return self

    async def begin(self, spec: Mapping[str, Any], *, stderr: Path) -> None:
        """Tell the child what to do: its specification, and the file of its standard error."""
        self._stderr = stderr
        self._waits = False
        await self.send({**spec, "stderr": str(stderr)})

    async def __aexit__(self, *_: object) -> None:
        self._stdin.close()
        if self._waits:
            self._process.kill()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def send(self, command: Mapping[str, Any]) -> None:
        """Write one command. A child that has ended is noticed by `expect`, which can say why."""
        with suppress(ConnectionResetError, BrokenPipeError):
            self._stdin.write(json.dumps(dict(command)).encode() + b"\n")
            await self._stdin.drain()

    async def expect(self, event: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the next message of this kind, passing over others.

        Raises WorkerDied when the child reports an error, ends first, or takes longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._next_message()
                    if message.get("event") == "error":
                        raise WorkerDied(f"{self.name}: {message.get('message')}")
                    if message.get("event") == event:
                        return message
        except TimeoutError:
            raise WorkerDied(f"{self.name} was not {event} within {timeout_s:g} s") from None

    async def _next_message(self) -> dict[str, Any]:
        line = await self._stdout.readline()
        if not line:
            code = await self._process.wait()
            raise WorkerDied(f"{self.name} ended with code {code}: {self._last_words()}")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def _last_words(self) -> str:
        if self._stderr is None or not self._stderr.exists():
            return "it said nothing"
        lines = [line.strip(" |") for line in self._stderr.read_text(errors="replace").splitlines()]
        # The last line of a traceback names the error, but not that of an exception group.
        telling = [line for line in lines if ERROR_LINE.match(line)] or [line for line in lines if line]
        return f"{telling[-1]} (all of it in {self._stderr})" if telling else f"it said nothing in {self._stderr}"
