"""Admission of bodies to a receiver: those being read, and whole ones awaiting their turn.

A slow sender holds neither a turn nor a place for long: where there is no room, the body that has been read for longest
gives way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Self, cast

from scraper.spans.export import Refusal, turned_away

WHOLE_S = 10.0  # an exporter's own patience; after this its answer comes too late
PATIENCE_S = 5.0
LEAST_BYTES_PER_S = 1000.0
SLICE_S = 0.005
_NEVER = float("inf")
_LOOK_EVERY_S = 0.002  # at most so often; a body may be late by as much
_FULL = "too much is sent at once"
_SMALL_BYTES = 16 * 1024
_SMALL_AT_ONCE, _LARGE_AT_ONCE = 12, 2  # parsed at once: a large one may take ten times its bytes

# Of gRPC, which holds the metadata of calls before any token is seen: a byte of HPACK can stand for 4 kB of it, and
# gRPC's own limits of metadata come too late. Calls are bounded for each connection, and in all while none was read.
CALL_BOUNDS = {
    "grpc.max_concurrent_streams": 32,
    "grpc.server.max_pending_requests": 512,
    "grpc.server.max_pending_requests_hard_limit": 512,
    "grpc.http.tarpit": 0,  # a refused call would keep its metadata for up to a second
}


class Reading:
    """One body, in flight while its context is open.

    Call `hold` before anything is waited for, `grow` with each piece of it, `finish` when it is whole, `begin` when its
    turn has come. `due_s` is when it is refused, by the clock of the loop.

    The context raises Refusal where the body comes too slowly, waits too long, or gives way.
    """

    __slots__ = "_begun_s", "_cancelling", "_is_whole", "_readings", "_refusal", "_task", "due_s", "size_bytes"

    def __init__(self, readings: Readings) -> None:
        self.size_bytes, self.due_s = 0, _NEVER
        self._readings, self._is_whole = readings, False
        self._task: asyncio.Task[object] | None = None
        self._refusal: Refusal | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = self._task
        if task is None:
            return
        self._readings.release(self)
        # As asyncio.timeout has it: what else cancels the task goes on.
        if self._refusal and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._refusal from None

    def hold(self) -> None:
        """Mark the body as waited for, so that it is bounded from now on. A body that came whole and has its turn at
        once is never held: turns bound it. Raises Refusal as `grow` does.
        """
        if self._task is not None:
            return
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._cancelling = self._task.cancelling()
        self._begun_s = asyncio.get_running_loop().time()
        self.due_s = self._begun_s + min(WHOLE_S, PATIENCE_S)
        self._readings.hold(self)
        if self.size_bytes:
            self._readings.add(self, self.size_bytes)

    def grow(self, size_bytes: int) -> None:
        """Count more bytes of the body. Raises Refusal where nothing can give way to them."""
        self.size_bytes += size_bytes
        if self._task is not None:
            self._readings.add(self, size_bytes)
        if self.due_s != _NEVER:
            self.due_s = self._begun_s + min(WHOLE_S, PATIENCE_S + self.size_bytes / LEAST_BYTES_PER_S)

    def finish(self) -> None:
        """Mark the body as whole: it gives way no more, and may wait for its turn."""
        self._is_whole = True
        if self._task is not None:
            self._readings.keep(self)
            self.due_s = self._begun_s + WHOLE_S

    def begin(self) -> None:
        """Mark the beginning of the body's turn."""
        self.due_s = _NEVER

    def give_way(self, refusal: Refusal) -> None:
        """Refuse the body, from another task; its sender may send it again."""
        if self._task is not None and self._refusal is None:
            self._refusal, self.due_s = refusal, _NEVER
            self._task.cancel()

    def end_late(self) -> None:
        """Refuse the body because it is overdue."""
        slow = f"no whole export within {WHOLE_S:g} s, or less than {LEAST_BYTES_PER_S / 1000:g} kB/s"
        waited = f"no turn within {WHOLE_S:g} s: too many exports at once"
        self.give_way(turned_away(waited if self._is_whole else slow))


class Readings:
    """The bodies in flight on one wire: at most `most` that are being read, and `most_bytes` of all.

    One timer looks for those that are over their time: one of its own for each body took half of what guards cost.
    """

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0
        self._held: dict[Reading, None] = {}
        self._read: dict[Reading, None] = {}  # those that are not whole, the oldest first
        self._look: asyncio.TimerHandle | None = None

    def reading(self) -> Reading:
        """Return a new, empty body."""
        return Reading(self)

    @property
    def are_any_read(self) -> bool:
        """Return whether any body is incomplete."""
        return bool(self._read)

    @property
    def are_any_held(self) -> bool:
        """Return whether any body in hand is being waited for."""
        return bool(self._held)

    def hold(self, reading: Reading) -> None:
        """Add a body to those in flight; the oldest gives way where there are too many."""
        if len(self._read) >= self._most:
            self._let_oldest_give_way()
        self._read[reading] = self._held[reading] = None
        if self._look is None or reading.due_s < self._look.when():
            self._look_at(reading.due_s)

    def release(self, reading: Reading) -> None:
        """Remove a body from those in flight."""
        self._read.pop(reading, None)
        self._held.pop(reading, None)
        self._bytes -= reading.size_bytes

    def keep(self, reading: Reading) -> None:
        """Exempt a body from giving way."""
        self._read.pop(reading, None)

    def let_all_give_way(self, refusal: Refusal) -> None:
        """Refuse all bodies that are not whole."""
        while self._read:
            self._let_oldest_give_way(refusal)

    def add(self, reading: Reading, size_bytes: int) -> None:
        """Count bytes that are in hand now, and make room for them. Raises Refusal where no other body can give way."""
        self._bytes += size_bytes
        while self._bytes > self._most_bytes:
            if next(iter(self._read), reading) is reading:
                raise turned_away(_FULL)
            self._let_oldest_give_way()

    def _let_oldest_give_way(self, refusal: Refusal | None = None) -> None:
        oldest = next(iter(self._read))
        del self._read[oldest]
        self._bytes -= oldest.size_bytes
        oldest.size_bytes = 0
        oldest.give_way(refusal or turned_away(_FULL))

    def _look_at(self, due_s: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look = asyncio.get_running_loop().call_at(due_s, self._look_through)

    def _look_through(self) -> None:
        """End the overdue bodies, and schedule the next check."""
        self._look = None
        now_s = asyncio.get_running_loop().time()
        for reading in [each for each in self._held if each.due_s <= now_s]:
            reading.end_late()
        due_s = min((each.due_s for each in self._held), default=_NEVER)
        if due_s != _NEVER:
            self._look_at(max(due_s, now_s + _LOOK_EVERY_S))


class Turns:
    """Whole exports take turns, in the order in which they came; large ones do not keep small ones waiting.

    What is computed of those whose turn it is, is done in slices of SLICE_S, between which others are read and stamped.
    """

    def __init__(self) -> None:
        self._small, self._large = asyncio.Semaphore(_SMALL_AT_ONCE), asyncio.Semaphore(_LARGE_AT_ONCE)

    def of(self, size_bytes: int) -> asyncio.Semaphore:
        """Return the semaphore to hold during the turn of a body."""
        return self._small if size_bytes <= _SMALL_BYTES else self._large

    async def in_slices(self, steps: Iterator[object]) -> None:
        """Run an iterator to its end, a slice at a time. Raises what it does."""
        while True:
            until_s = time.perf_counter() + SLICE_S
            for _ in steps:
                if time.perf_counter() >= until_s:
                    break
            else:
                return
            await asyncio.sleep(0)
