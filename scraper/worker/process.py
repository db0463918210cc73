"""Start and end of the two processes: reading the specification, and the reason for a failure."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sidelight.rundir.access import UnusableFile
from sidelight.rundir.child import first_cause, open_input, read_spec, say
from sidelight.rundir.process import limit_errors, raise_limit
from sidelight.scraper.commands import LogSpec
from sidelight.scraper.spans.spec import CannotListen

Spec = TypeVar("Spec", bound=LogSpec)
Check = Callable[[bytes], Spec]
Run = Callable[[Spec, asyncio.StreamReader], Awaitable[None]]


def main(
    check: Check[Spec], run: Run[Spec], loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> int:
    """Run a process on a loop and return its exit code; the conductor decides what Ctrl-C means.

    `check` decodes its specification, or raises ValueError; `run` raises an ExceptionGroup of OSError when a log cannot
    be made, of CannotListen or of UnusableFile (a certificate).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_limit()
    limit_errors()
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(_main(check, run))


async def _main(check: Check[Spec], run: Run[Spec]) -> int:
    lines = await open_input()
    try:
        spec = await read_spec(lines, check)
    except ValueError as error:  # msgspec's errors are ValueErrors
        say("error", message=f"unusable spec: {error}")
        return 2
    except OSError as error:
        say("error", message=f"cannot write {error.filename}: {error.strerror}")
        return 1
    code = 0
    try:
        await run(spec, lines)
    except* (UnusableFile, CannotListen) as errors:
        say("error", message=f"unusable spec: {first_cause(errors)}")
        code = 2
    except* OSError as errors:
        say("error", message=f"cannot write {spec.out}: {first_cause(errors)}")
        code = 1
    return code
