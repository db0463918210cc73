"""A wall clock that tests set and slew for all processes at once, those that start later too.

What moves it lies in a file that each process maps. Only what reads the wall clock is moved, and the kernel's receive
stamps, which are by it: not the times of files, nor what other programs read. It imports nothing of ours.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

VARIABLE = "CLOCK_INJECTED"
# How far off it is at first (ns); from which moment of the monotonic clock on (ns; 0: never) by how much more, and by
# which share of the time since then.
_STATE = struct.Struct("@qqqd")
_TIMESPEC = struct.Struct("@ll")
_SO_TIMESTAMPNS = 35
_S = 10**9


class WallClock:
    """How far the wall clock is off at each moment."""

    def __init__(self, path: Path, *, ahead_s: float = 0.0) -> None:
        """Map a file, made where there is none."""
        if not path.exists():
            path.write_bytes(_STATE.pack(round(ahead_s * _S), 0, 0, 0.0))
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STATE.size)

    def move(self, *, by_s: float = 0.0, slew: float = 0.0) -> None:
        """Set it, or let it go faster by a share of the time, from now on; once."""
        ahead_ns, *_ = _STATE.unpack(self._map)
        self._map[:] = _STATE.pack(ahead_ns, 0, round(by_s * _S), slew)
        self._map[:] = _STATE.pack(ahead_ns, time.monotonic_ns(), round(by_s * _S), slew)

    def ahead_ns(self, monotonic_ns: int) -> int:
        """Return how far off it is at a moment of the monotonic clock."""
        ahead_ns, at_ns, by_ns, slew = _STATE.unpack(self._map)
        if not 0 < at_ns <= monotonic_ns:
            return int(ahead_ns)
        return int(ahead_ns + by_ns + round(slew * (monotonic_ns - at_ns)))

    def variables(self) -> Mapping[str, str]:
        """Return the variables of a command all processes of which go by it."""
        return {"PYTHONPATH": str(Path(__file__).parent), VARIABLE: str(self.path)}


def install(clock: WallClock) -> None:
    """Let this process go by it from now on."""
    wall_ns, monotonic_ns = time.time_ns, time.monotonic_ns
    receive = socket.socket.recvmsg

    def read_ns() -> int:
        return wall_ns() + clock.ahead_ns(monotonic_ns())

    def read() -> float:
        return read_ns() / _S

    def recvmsg(self: socket.socket, *sizes: int) -> Any:
        data, control, flags, address = receive(self, *sizes)
        return data, [(level, kind, stamped(kind, value)) for level, kind, value in control], flags, address

    def stamped(kind: int, value: bytes) -> bytes:
        if kind != _SO_TIMESTAMPNS:
            return value
        seconds, nanoseconds = _TIMESPEC.unpack(value)
        at_ns = seconds * _S + nanoseconds
        return _TIMESPEC.pack(*divmod(at_ns + clock.ahead_ns(at_ns - wall_ns() + monotonic_ns()), _S))

    time.time_ns, time.time = read_ns, read
    socket.socket.recvmsg = recvmsg  # type: ignore[method-assign]


def install_where_asked() -> None:
    """Go by the clock that the environment names; a process that was forked from one that does so does it already."""
    if VARIABLE in os.environ and isinstance(time.time_ns, BuiltinFunctionType):
        install(WallClock(Path(os.environ[VARIABLE])))


@contextmanager
def inherited(clock: WallClock) -> Iterator[None]:
    """Let processes that are started meanwhile go by it."""
    before = dict(os.environ)
    os.environ.update(clock.variables())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
