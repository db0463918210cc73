"""A worker's side of its pipes to the conductor: JSON lines in, JSON lines out.

The first line in is the worker's specification, then come commands; each line out is an event. When standard input
ends, the conductor is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, TextIO, TypeVar, cast

import msgspec

from sidelight.rundir.frames import open_append
from sidelight.rundir.printable.masking import register, without_secrets, without_secrets_all

_LINE_BYTES = 4 * 1024 * 1024  # a specification with many targets is one line


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a specification common to all workers.

    `stderr` is the file for its standard error, empty to leave it, and `secrets` must stand in nothing that it writes.
    """

    stderr: str = ""
    secrets: tuple[str, ...] = ()


class _WithoutSecrets:
    """Standard error as tracebacks and logs are written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(without_secrets(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


Spec = TypeVar("Spec", bound=ChildSpec)
Command = TypeVar("Command")


async def open_input() -> asyncio.StreamReader:
    """Return standard input as a stream of lines."""
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    return lines


async def read_spec(lines: asyncio.StreamReader, decode: Callable[[bytes], Spec]) -> Spec:
    """Read the specification, and redirect standard error as it says.

    Raises ValueError as `decode` does, and OSError when the file of standard error cannot be opened.
    """
    spec = decode(await lines.readline())
    register(*spec.secrets)
    sys.stderr = cast("TextIO", _WithoutSecrets(sys.stderr))
    if spec.stderr:
        os.dup2(open_append(spec.stderr), sys.stderr.fileno())
    return spec


async def commands(lines: asyncio.StreamReader, decode: Callable[[bytes], Command]) -> AsyncGenerator[Command, None]:
    """Yield commands up to the end of input; an invalid line is answered with an `error` event."""
    while line := await lines.readline():
        try:
            command = decode(line)
        except msgspec.ValidationError:
            say("error", message=f"unknown command {line.decode(errors='replace').rstrip()}")
        except ValueError as error:
            say("error", message=f"a command is not JSON: {error}")
        else:
            yield command


def say(event: str, **data: object) -> None:
    """Write one event to standard output."""
    try:
        sys.stdout.write(json.dumps({"event": event, **without_secrets_all(data)}) + "\n")
        sys.stdout.flush()
    except OSError:
        # The reader has gone; the end of standard input says so too. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def first_cause(error: BaseException) -> BaseException:
    """Return the first error within groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
