"""How long tests wait for what must happen: a bound that only a defect reaches, however busy the machine is. Time-outs
that must run out are not waited for: the time of the test's loop is moved on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

# Five minutes, not one: beside two processes that spin, at the lowest priority, a process takes 20 s to start, and a
# closed loop of 4,000 requests as long. No test takes longer for it that does not hang.
BOUND_S = 300.0


def movable_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves the time of the running loop on, by seconds."""
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    real_s = loop.time

    def move(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds

    monkeypatch.setattr(loop, "time", lambda: real_s() + ahead_s)
    return move
