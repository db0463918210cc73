"""The run's clock: nanoseconds since the Unix epoch that never step back, and waiting for one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.alarm import Alarm

# epoll rounds a timeout up to the next millisecond, so a timer alone is up to that much late.
_APPROACH_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A monotonic clock anchored once to the wall clock.

    offset_ns     what the conductor measured once: Unix epoch minus monotonic
    monotonic_ns  replaced where time is virtual
    alarm         what wakes at a moment to within microseconds, where there is one and time is real
    """

    offset_ns: int
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    alarm: Alarm | None = None

    def now_ns(self) -> int:
        """The time of the run."""
        return self.monotonic_ns() + self.offset_ns


async def wait_until(clock: Clock, due_ns: int) -> None:
    """Return at `due_ns`, or at once when it has passed. Each wait is computed from the clock: lateness never adds up.

    With an alarm that is all; without, a timer wakes up to one millisecond early, and the rest is spent going round the
    event loop without blocking, so sockets are still served.
    """
    if clock.alarm is not None and clock.alarm.precise:
        if due_ns > clock.now_ns():
            await clock.alarm.until(due_ns - clock.offset_ns)
        return
    loop = asyncio.get_running_loop()
    while (left_ns := due_ns - clock.now_ns()) > 0:
        if left_ns <= _APPROACH_NS:
            await asyncio.sleep(0)
            continue
        woken = loop.create_future()
        timer = loop.call_at(loop.time() + (left_ns - _APPROACH_NS) / 1e9, woken.set_result, None)
        try:
            await woken
        finally:
            timer.cancel()
