"""What ends a run before its time: a signal, or its deadline.

The first signal stops the load; what is in flight is cancelled and recorded, the run is derived and reported, and the
command ends with 130. A second one is not waited for: the manifest is closed, and what was recorded can be derived by
`sidelight report`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sidecar.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@asynccontextmanager
async def stop_on_signals() -> AsyncIterator[asyncio.Event]:
    """Set an event at the first signal; the second, of whatever kind, is a KeyboardInterrupt.

    SIGHUP says that the terminal is gone, and is left alone where it is ignored, as under nohup.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number in SIGNALS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]

    def arrived(number: signal.Signals) -> None:
        stop.set()
        if number == signal.SIGHUP:
            _leave_dead_terminal()
        for other in heard:
            loop.remove_signal_handler(other)
            signal.signal(other, signal.default_int_handler)

    for number in heard:
        loop.add_signal_handler(number, arrived, number)
    try:
        yield stop
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


@asynccontextmanager
async def until_deadline(begun_s: float, seconds: float | None) -> AsyncIterator[None]:
    """Give up what a run prepares when so many seconds have passed since `begun_s`, in the loop's time.

    Raises Interrupted then.
    """
    try:
        async with asyncio.timeout_at(None if seconds is None else begun_s + seconds) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise Interrupted(f"the deadline of {seconds:g} s was reached before anything was measured") from None


def _leave_dead_terminal() -> None:
    """Let what is still said go nowhere: writing to a terminal that is gone fails, and would end the run as a crash."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
