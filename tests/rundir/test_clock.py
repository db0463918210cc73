from __future__ import annotations

import time

import pytest

from sidelight.rundir import clock as clocks
from sidelight.rundir.clock import STEP_NS, AnchoredClock, anchor, step_ns


@pytest.mark.parametrize("moved_s", [-3600, -1, 1, 3600])
def test_a_step_of_the_wall_clock_is_seen(moved_s: int):
    """Of a second, too: whether one of just a second was seen had been left to chance."""
    clock = anchor()
    assert moved_s == round(step_ns(clock, lambda: time.time_ns() + moved_s * 10**9) / 1e9, 3)
    assert 0 == step_ns(clock, lambda: time.time_ns() + STEP_NS // 2)


def test_a_reading_that_took_long_shows_no_step(monkeypatch: pytest.MonkeyPatch):
    """The process had no processor for 4 s between its readings, and which of them that parted is not known."""
    monotonic_ns, wall_ns = 10**15, 10**18

    def read_monotonic() -> int:
        nonlocal monotonic_ns
        monotonic_ns += 4 * 10**9
        return monotonic_ns

    monkeypatch.setattr(clocks.time, "monotonic_ns", read_monotonic)
    clock = AnchoredClock(offset_ns=wall_ns - monotonic_ns)
    assert 0 == step_ns(clock, lambda: wall_ns + monotonic_ns - 10**15)
