"""How long tests wait for what must happen: a bound that only a defect reaches, however busy the machine is. Time-outs
that must run out are not waited for: the time of the test's loop is moved on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sidelight.loadgen.transports.transport import Exchange

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


class Turns:
    """Watches how many bytes of a reply come in one turn of the event loop: `most` of them, until it has ended."""

    def __init__(self, exchange: Exchange) -> None:
        self.most = 0
        self._exchange = exchange
        self._before = 0

    def watch(self) -> None:
        """Look in each turn of the running loop."""
        received = self._exchange.received_bytes
        self.most, self._before = max(self.most, received - self._before), received
        if self._exchange.end_ns < 0:
            asyncio.get_running_loop().call_soon(self.watch)
