"""The one clock of a run: the monotonic clock, anchored once to the wall clock.

Differences are never negative, and since CLOCK_MONOTONIC is one for the whole machine, stamps of all our processes
compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

ANCHOR_TRIES = 25
# Slewing moves both clocks alike; the wall clock is further from the monotonic one only when it was set, or after a
# suspension of the machine, in which the monotonic clock stands still.
STEP_NS = 500_000_000
_STEP_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredClock:
    """A monotonic clock anchored once to the wall clock.

    offset_ns     what the conductor measured once: Unix epoch minus monotonic
    error_ns      a bound of how far the anchor may be off; 0 where the offset was handed over by another process
    monotonic_ns  replaced where time is virtual
    """

    offset_ns: int
    error_ns: int = 0
    monotonic_ns: Callable[[], int] = time.monotonic_ns

    def now_ns(self) -> int:
        """Return the time of the run."""
        return self.monotonic_ns() + self.offset_ns


def time_of_day_ns() -> int:
    """Return the wall clock, ns since the Unix epoch; the only place that reads it."""
    return time.time_ns()


def utc_now() -> datetime:
    """Return the wall clock as a date."""
    return datetime.fromtimestamp(time_of_day_ns() / 1e9, tz=UTC)


def anchor(wall_ns: Callable[[], int] = time_of_day_ns) -> AnchoredClock:
    """Read the wall clock between two monotonic reads, several times, and keep the tightest."""
    width_ns, offset_ns = _offset_ns(ANCHOR_TRIES, wall_ns)
    return AnchoredClock(offset_ns=offset_ns, error_ns=width_ns // 2 + 1)


def step_ns(clock: AnchoredClock, wall_ns: Callable[[], int] = time_of_day_ns) -> int:
    """Return the step of the wall clock since a clock was anchored, ns; 0 up to STEP_NS.

    What a process that waits for a processor reads may be off by half of what the reading took.
    """
    width_ns, offset_ns = _offset_ns(_STEP_TRIES, wall_ns)
    moved_ns = offset_ns - clock.offset_ns
    return moved_ns if abs(moved_ns) > STEP_NS + width_ns // 2 else 0


def step_text(moved_ns: int) -> str:
    """Return a sentence on a step of the wall clock."""
    where = "ahead" if moved_ns > 0 else "back"
    return f"the clock of this machine was set {abs(moved_ns) / 1e9:.1f} s {where}, or it was suspended"


def _offset_ns(tries: int, wall_ns: Callable[[], int]) -> tuple[int, int]:
    """Return the width and the offset (wall minus monotonic clock) of the tightest reading."""

    def reading() -> tuple[int, int]:
        before = time.monotonic_ns()
        wall = wall_ns()
        after = time.monotonic_ns()
        return after - before, wall - (before + after) // 2

    return min(reading() for _ in range(tries))


def iso_ms(stamp_ns: int) -> str:
    """Return a Unix stamp as ISO 8601 in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(stamp_ns // 1_000_000 / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
