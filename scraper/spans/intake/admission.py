"""What a receiver has in hand: bodies that are being read, and whole ones that wait for their turn.

A slow sender holds neither a turn nor a place for long: where there is no room, the body that has been read for longest
gives way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from scraper.spans.export import Refusal, turned_away

WHOLE_S = 10.0  # an exporter's own patience; after this its answer comes too late
PATIENCE_S = 5.0
LEAST_BYTES_PER_S = 1000.0
SLICE_S = 0.005
_FULL = "too much is sent at once"
_SMALL_BYTES = 16 * 1024
_SMALL_AT_ONCE, _LARGE_AT_ONCE = 12, 2  # parsed at once: a large one may take ten times its bytes


class Reading:
    """One body that is in hand: `grow` with each piece of it, `finish` when it is whole."""

    def __init__(self, readings: Readings, timeout: asyncio.Timeout) -> None:
        self.size_bytes = 0
        self.refusal = turned_away(
            f"no whole export within {WHOLE_S:g} s, or less than {LEAST_BYTES_PER_S / 1000:g} kB/s"
        )
        self._readings, self._timeout = readings, timeout
        self._begun_s = asyncio.get_running_loop().time()
        self._set_due()

    def grow(self, size_bytes: int) -> None:
        """Count so many more bytes. Raises Refusal where nothing can give way to them."""
        self.size_bytes += size_bytes
        self._readings.add(self, size_bytes)
        self._set_due()

    def finish(self) -> None:
        """Note that the body is whole: it gives way no more, and may wait for its turn."""
        self._readings.keep(self)
        self.refusal = turned_away(f"no turn within {WHOLE_S:g} s: too many exports at once")
        self._reschedule(self._begun_s + WHOLE_S)

    def begin(self) -> None:
        """Note that its turn has come."""
        self._reschedule(None)

    def give_way(self, refusal: Refusal) -> None:
        """Let it be refused; its sender may send it again."""
        self.refusal = refusal
        self._reschedule(self._begun_s)

    def _set_due(self) -> None:
        self._reschedule(self._begun_s + min(WHOLE_S, PATIENCE_S + self.size_bytes / LEAST_BYTES_PER_S))

    def _reschedule(self, due_s: float | None) -> None:
        if not self._timeout.expired():
            self._timeout.reschedule(due_s)


class Readings:
    """The bodies in hand that come over one wire: at most `most` that are being read, and `most_bytes` of all."""

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0
        self._read: dict[Reading, None] = {}  # those that are not whole, the oldest first

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Reading]:
        """Have a body in hand. Raises Refusal where it comes too slowly, waits too long, or gives way."""
        if len(self._read) >= self._most:
            self._let_oldest_give_way()
        reading: Reading | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                reading = Reading(self, timeout)
                self._read[reading] = None
                yield reading
        except TimeoutError:
            raise (reading.refusal if reading else turned_away("")) from None
        finally:
            if reading is not None:
                self._read.pop(reading, None)
                self._bytes -= reading.size_bytes

    @property
    def are_any_read(self) -> bool:
        """Tell whether there is a body that is not whole."""
        return bool(self._read)

    def keep(self, reading: Reading) -> None:
        """Let a body give way no more."""
        self._read.pop(reading, None)

    def let_all_give_way(self, refusal: Refusal) -> None:
        """Let all bodies give way that are not whole."""
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


class Turns:
    """Whole exports take turns, in the order in which they came; large ones do not keep small ones waiting.

    What is computed of those whose turn it is, is done in slices of SLICE_S, between which others are read and stamped.
    """

    def __init__(self) -> None:
        self._small, self._large = asyncio.Semaphore(_SMALL_AT_ONCE), asyncio.Semaphore(_LARGE_AT_ONCE)
        self._slice = asyncio.Lock()

    def of(self, size_bytes: int) -> asyncio.Semaphore:
        """Return what is held during the turn of a body."""
        return self._small if size_bytes <= _SMALL_BYTES else self._large

    async def in_slices(self, steps: Iterator[object]) -> None:
        """Run an iterator to its end, a slice at a time. Raises what it does."""
        while True:
            async with self._slice:
                until_s = time.perf_counter() + SLICE_S
                for _ in steps:
                    if time.perf_counter() >= until_s:
                        break
                else:
                    return
            await asyncio.sleep(0)
