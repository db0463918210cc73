"""Waiting for a moment of the run, within microseconds: Linux's timerfd, armed a little early, then a short spin.

The event loop's own timers will not do: they count milliseconds, and may fire 1.4 ms too early (libuv) or late (epoll).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import struct
import sys
import time
from typing import Self

from sidelight.rundir.clock import AnchoredClock

# epoll rounds a timeout up to the next millisecond, so a timer alone is up to that much late.
_APPROACH_NS = 1_000_000
# A timer fires 40 to 70 us late at the median; what is left is spent spinning.
_EARLY_NS = 60_000
_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
# struct itimerspec: interval (seconds, nanoseconds) and first expiry (seconds, nanoseconds).
_ITIMERSPEC = struct.Struct("@llll")


class Alarm:
    """Timer that wakes a waiting task at a moment of the monotonic clock. It owns a timerfd where there is one.

    Used by one event loop. `precise` tells whether there is a timerfd; without, `until` must not be called.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        if sys.platform == "linux":
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tickets = itertools.count()
        self._armed_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    @property
    def precise(self) -> bool:
        """Return whether this machine has timerfd."""
        return self._fd >= 0

    async def until(self, monotonic_ns: int) -> None:
        """Wait until a moment of the monotonic clock. It returns then, or as soon after it as the loop has time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._fired)
        woken = self._loop.create_future()
        heapq.heappush(self._waiting, (monotonic_ns, next(self._tickets), woken))
        if self._waiting[0][2] is woken:
            self._arm(monotonic_ns)
        await woken

    def _arm(self, monotonic_ns: int) -> None:
        at_ns = max(1, monotonic_ns - _EARLY_NS)  # nothing would disarm it
        seconds, nanoseconds = divmod(at_ns, 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, _ITIMERSPEC.pack(0, 0, seconds, nanoseconds), None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        waiting = self._waiting
        while waiting:
            due_ns, _, woken = waiting[0]
            if woken.done():  # cancelled
                heapq.heappop(waiting)
                continue
            if due_ns - time.monotonic_ns() > _EARLY_NS:
                self._arm(due_ns)
                return
            heapq.heappop(waiting)
            while time.monotonic_ns() < due_ns:
                pass
            woken.set_result(None)


async def wait_until(clock: AnchoredClock, due_ns: int, alarm: Alarm | None = None) -> None:
    """Return at `due_ns`, or at once when it has passed. Each wait is computed from the clock: lateness never adds up.

    With a precise alarm that is all; without, a timer wakes up to one millisecond early, and the rest is spent going
    round the event loop without blocking, so sockets are still served.
    """
    if alarm is not None and alarm.precise:
        if due_ns > clock.now_ns():
            await alarm.until(due_ns - clock.offset_ns)
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
