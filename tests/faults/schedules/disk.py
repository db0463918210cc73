"""The disk as processes of a schedule see it: a directory of this machine, whose calls fail, fall short or are the last
thing that a process does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from faults.schedules.processes import Process, is_ghost, running
from faults.schedules.virtual_time import Time

_REAL = {
    name: getattr(os, name)
    for name in ("open", "write", "pwrite", "ftruncate", "unlink", "rename", "mkdir", "utime", "fsync")
}
_LASTING = ("unlink", "rename", "mkdir", "utime")


@dataclass(kw_only=True)
class Death:
    """That a process dies at its n-th write from now on: before it, in its midst, or behind it."""

    writes: int
    how: str


class Disk:
    """Owns what processes have open. `fails` tells of a write whether there is no room for it now."""

    def __init__(self, clock: Time, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self.fails: Callable[[Process], bool] = lambda _: False
        self.deaths: dict[Process, Death] = {}
        self.failures = 0
        self._owners: dict[int, Process] = {}

    def install(self) -> None:
        """Be the disk of all processes of the schedule; what is of none is not touched."""
        os.open, os.write, os.pwrite = self._open, self._write, self._pwrite
        os.ftruncate, os.fsync = self._ftruncate, self._fsync
        for name in _LASTING:
            setattr(os, name, self._living(_REAL[name]))

    def uninstall(self) -> None:
        """Give this machine's own calls back."""
        for name, call in _REAL.items():
            setattr(os, name, call)

    def release(self, process: Process) -> None:
        """Give the locks of a process back, as the system does when it dies."""
        for fd, owner in list(self._owners.items()):
            if owner is process:
                del self._owners[fd]
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)

    def _open(self, path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if is_ghost() and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EIO, "this process was killed", path)
        fd: int = _REAL["open"](path, flags, *arguments, **named)
        self._owners.pop(fd, None)
        process = running.get()
        if process is not None:
            self._owners[fd] = process
        return fd

    def _living(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def lasting(*arguments: Any, **named: Any) -> Any:
            if is_ghost():
                raise OSError(errno.EIO, "this process was killed")
            return call(*arguments, **named)

        return lasting

    def _write(self, fd: int, data: Any) -> int:
        return self._written(fd, data, lambda part: _REAL["write"](fd, part))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        # What is small and replaces what was there, the system writes whole, or not at all; it needs no more room.
        needs_room = os.fstat(fd).st_size < offset + len(data)
        write = partial(_REAL["pwrite"], fd)
        return self._written(fd, data, lambda part: write(part, offset), is_whole=True, needs_room=needs_room)

    def _written(
        self, fd: int, data: Any, write: Callable[[Any], int], *, is_whole: bool = False, needs_room: bool = True
    ) -> int:
        process = running.get()
        if process is None:
            return write(data)
        if process.is_dead:
            return len(data)
        death = self.deaths.get(process)
        if death is not None:
            death.writes -= 1
            if death.writes < 0:
                within = 0 if is_whole else self._rng.randrange(len(data) + 1)
                part = {"before": 0, "within": within, "behind": len(data)}[death.how]
                if part:
                    self._stamp(fd, write(data[:part]))
                process.kill()
                return len(data)
        if needs_room and self.fails(process):
            self.failures += 1
            if self._rng.random() < 0.5 and len(data) > 1:  # what fits is written; the rest is tried, and fails
                return self._stamp(fd, write(data[: self._rng.randrange(1, len(data))]))
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._stamp(fd, write(data))

    def _stamp(self, fd: int, size: int) -> int:
        """Let a file be as old as the virtual time says."""
        wall_ns = self._clock.wall_ns()
        _REAL["utime"](fd, ns=(wall_ns, wall_ns))
        return size

    def _ftruncate(self, fd: int, size: int) -> None:
        if not is_ghost():
            _REAL["ftruncate"](fd, size)

    def _fsync(self, fd: int) -> None:
        """Take no time: it is not this machine's disk that is looked at."""
