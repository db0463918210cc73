"""Lateness of this process: reads behind the kernel's receive stamps, and pauses of the garbage collector.

A histogram over all reads of a run must cost next to nothing a read: 4 buckets an octave, so that a quantile is known
to within 19 % below 1 s and counting is two shifts and an addition.
"""

from __future__ import annotations

import gc
import math
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Self

from sidelight.rundir.clock import AnchoredClock, time_of_day_ns

# What the kernel gives: struct timespec; where it gives nothing, this.
TIMESPEC = struct.Struct("@ll")
NO_STAMP = bytes(TIMESPEC.size)

_STEPS_BITS = 2
_STEPS = 1 << _STEPS_BITS
_SMALLEST_BITS = 10  # all below 1.024 us is one bucket
_LARGEST_BITS = 40  # all from 18 minutes on is another
BUCKETS = (_LARGEST_BITS - _SMALLEST_BITS) * _STEPS + 2


def bucket_index(late_ns: int) -> int:
    """Return the bucket of a lateness in nanoseconds; negative counts as none."""
    bits = late_ns.bit_length()
    if late_ns < 0 or bits <= _SMALLEST_BITS:
        return 0
    if bits > _LARGEST_BITS:
        return BUCKETS - 1
    step = (late_ns >> (bits - 1 - _STEPS_BITS)) & (_STEPS - 1)
    return 1 + ((bits - 1 - _SMALLEST_BITS) << _STEPS_BITS) + step


def bucket_bounds(index: int) -> tuple[int, float]:
    """Return the bounds of a bucket of lateness, ns: the first inclusive, the second exclusive."""
    if index == 0:
        return 0, 1 << _SMALLEST_BITS
    if index == BUCKETS - 1:
        return 1 << _LARGEST_BITS, math.inf
    return _begin_ns(index), _begin_ns(index + 1)


def _begin_ns(index: int) -> int:
    octave, step = divmod(index - 1, _STEPS)
    return (_STEPS + step) << (_SMALLEST_BITS + octave - _STEPS_BITS)


# The bucket of every lateness below a millisecond, at the finest step there is: what nearly all reads need.
_FINE_BITS = _SMALLEST_BITS - _STEPS_BITS
_FINE_NS = 1 << 20
_FINE = [bucket_index(late_ns) for late_ns in range(0, _FINE_NS, 1 << _FINE_BITS)]


def add_counts(several: Iterable[Sequence[int]]) -> list[int]:
    """Return the histogram of several workers together; one that counted nothing may be empty."""
    total = [0] * BUCKETS
    for counts in several:
        for index, count in enumerate(counts):
            total[index] += count
    return total


def quantile_ns(counts: Sequence[int], q: float, *, max_ns: int | None = None) -> float:
    """Return the q-quantile (0 to 1) of a histogram, in nanoseconds: where its bucket ends, so never too small.

    NaN when nothing was counted. Given the largest value seen, no quantile exceeds it.
    """
    wanted = q * sum(counts)
    if not sum(counts):
        return math.nan
    seen = 0
    for index, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            end_ns = bucket_bounds(index)[1]
            return end_ns if max_ns is None else min(end_ns, max_ns)
    raise AssertionError("a quantile lies within its histogram")


class PauseCounter:
    """Counter of the garbage collector's pauses in this process; owns its callback."""

    def __init__(self) -> None:
        self.max_ns = 0
        self.total_ns = 0
        self._began_ns = 0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_phase)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_phase)

    def _on_phase(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began_ns = time.monotonic_ns()
            return
        pause_ns = time.monotonic_ns() - self._began_ns
        self.max_ns = max(self.max_ns, pause_ns)
        self.total_ns += pause_ns


class ReceiveStamps:
    """Converter of the kernel's receive stamps to the run's clock.

    It also counts the lateness of each read behind its stamp.

    The kernel stamps by the wall clock. Its distance from the run's clock is measured anew several times a second, the
    tightest of a few readings. Stamps are moved up to a second after the read, in batches, so that the hot path need
    not: where the wall clock has been stepped since the stamp, the read's own time stands.
    """

    __slots__ = ("_anchored_ns", "_clock", "_offset_ns", "_settled", "_stepped_ns", "counts", "max_ns", "seen")

    _ANCHOR_NS = 50_000_000
    _STEP_NS = 50_000  # beyond what readings may be off by; self_check.STAMP_MS
    _LATE_NS = 1_000_000
    _TRIES = 3

    def __init__(self, clock: AnchoredClock) -> None:
        self.counts = [0] * BUCKETS
        self.max_ns = 0
        self.seen = False
        self._clock = clock
        self._anchored_ns, self._stepped_ns = clock.now_ns(), 0
        self._settled = self._measure()
        self._offset_ns = self._settled[1]

    def moved(self, stamps: bytes | bytearray, reads_ns: Sequence[int], *, floor_ns: int = -1) -> list[int]:
        """Convert the kernel's stamps of reads to the run's clock. Each stamp is a TIMESPEC, NO_STAMP where missing.

        `reads_ns` is when each read returned: no stamp is later than that. None is earlier than the one before it, nor
        than `floor_ns`, which has precedence.
        """
        self._look_for_steps(stamps, reads_ns)
        offset_ns, stepped_ns, counts, max_ns = self._offset_ns, self._stepped_ns, self.counts, self.max_ns
        moved = []
        for (seconds, nanoseconds), read_ns in zip(TIMESPEC.iter_unpack(stamps), reads_ns, strict=True):
            late_ns = 0
            if seconds and read_ns >= stepped_ns:
                late_ns = read_ns - offset_ns - seconds * 1_000_000_000 - nanoseconds
                if late_ns < 0:  # noqa: PLR1730  # max() costs five times as much, and this is done once a read
                    late_ns = 0
                if late_ns > read_ns - stepped_ns:  # it came before the step
                    late_ns = 0
                else:
                    counts[_FINE[late_ns >> _FINE_BITS] if late_ns < _FINE_NS else bucket_index(late_ns)] += 1
                    if late_ns > max_ns:  # noqa: PLR1730  # as above
                        max_ns = late_ns
                    self.seen = True
            if read_ns - late_ns > floor_ns:  # noqa: PLR1730  # as above
                floor_ns = read_ns - late_ns
            moved.append(floor_ns)
        self.max_ns = max_ns
        return moved

    def _look_for_steps(self, stamps: bytes | bytearray, reads_ns: Sequence[int]) -> None:
        """Measure the clock offset anew if due, or if a step is suspected.

        It is suspected if the last read seems to have been very late.
        """
        now_ns = self._clock.now_ns()
        if now_ns - self._anchored_ns <= self._ANCHOR_NS:
            seconds, nanoseconds = TIMESPEC.unpack_from(stamps, len(stamps) - TIMESPEC.size)
            late_ns = reads_ns[-1] - self._offset_ns - seconds * 1_000_000_000 - nanoseconds
            if not seconds or abs(late_ns) <= self._LATE_NS:
                return
        width_ns, offset_ns = measured = self._measure()
        self._anchored_ns = now_ns
        settled_width_ns, settled_ns = self._settled
        # Also by little steps one after another, of which stamps up to a second old have seen but some.
        if abs(offset_ns - settled_ns) > self._STEP_NS + (width_ns + settled_width_ns) // 2:
            self._settled, self._stepped_ns = measured, self._clock.now_ns()
        elif width_ns > max(2 * self._STEP_NS, settled_width_ns):
            return  # this process had no processor meanwhile: the distance measured before is closer
        elif width_ns < settled_width_ns:
            self._settled = measured
        self._offset_ns = offset_ns

    def _measure(self) -> tuple[int, int]:
        """Return the tightest reading's duration, and its run clock minus wall clock, ns."""
        readings = []
        for _ in range(self._TRIES):
            before = self._clock.now_ns()
            wall = time_of_day_ns()
            after = self._clock.now_ns()
            readings.append((after - before, (before + after) // 2 - wall))
        return min(readings)
