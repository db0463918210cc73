"""Lets the n-th call of a process that writes below a directory fail, as a full or broken disk does, or be its last.

Python imports a module of this name first of all where it stands in PYTHONPATH, so that every child of a command has
it; which process and which call is meant stands in FAULT_INJECTED, as JSON. It imports nothing of ours.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FAULT_INJECTED"
DEADLY = ("KILL", "TORN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Which call fails: the n-th, from 1, of its kind that writes below `under`, in the process that runs a module.

    error     its errno; "SHORT": only half of what is written; "KILL": the process dies before it, and "TORN": in the
              middle of it, and no other process does
    lasting   whether all calls after it fail, too
    """

    under: str
    process: str
    call: str
    nth: int
    error: str
    lasting: bool

    @property
    def marker(self) -> Path:
        """Return the file that says that it has happened."""
        return Path(f"{self.under}.failed")


class _Through(io.RawIOBase):
    """A file that is written by os.write, whichever function that is at the time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def install(fault: Fault) -> Callable[[], None]:
    """Let a call fail from now on, and return what ends that."""
    calls = {name: getattr(os, name) for name in ("open", "write", "pwrite", "fsync", "rename", "fdopen")}
    count = 0

    def fails(call: str) -> bool:
        nonlocal count
        if call != fault.call:
            return False
        count += 1
        if count == fault.nth or (fault.lasting and count > fault.nth):
            dies = fault.error in DEADLY
            try:
                os.close(calls["open"](fault.marker, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if dies else 0), 0o600))
            except OSError:
                return not dies  # another process of that module has died
            if dies and (fault.error == "KILL" or call != "write"):
                os.kill(os.getpid(), signal.SIGKILL)
            return True
        return False

    def is_below(path: Any, dir_fd: int | None = None) -> bool:
        fd = path if isinstance(path, int) else dir_fd
        place = path if fd is None else Path(f"/proc/self/fd/{fd}").readlink()
        return str(place).startswith(fault.under)

    def error() -> OSError:
        number = getattr(errno, fault.error)
        return OSError(number, os.strerror(number))

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and is_below(path, dir_fd) and fails("open"):
            raise error()
        return calls["open"](path, flags, mode, dir_fd=dir_fd)

    def written(fd: int, data: Any) -> int:
        if is_below(fd) and fails("write"):
            if fault.error not in ("SHORT", "TORN"):
                raise error()
            data = memoryview(data)[: max(1, len(data) // 2)]
            if fault.error == "TORN":
                calls["write"](fd, data)
                os.kill(os.getpid(), signal.SIGKILL)
        return calls["write"](fd, data)

    def placed(fd: int, data: Any, at: int) -> int:
        if is_below(fd) and fails("pwrite"):
            raise error()
        return calls["pwrite"](fd, data, at)

    def synced(fd: int) -> None:
        if is_below(fd) and fails("fsync"):
            raise error()
        calls["fsync"](fd)

    def renamed(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        if is_below(source, src_dir_fd) and fails("rename"):
            raise error()
        calls["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def file_of(fd: int, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if mode == "wb" and is_below(fd):
            return io.BufferedWriter(_Through(fd))
        return calls["fdopen"](fd, mode, *rest, **named)

    def uninstall() -> None:
        for name, call in calls.items():
            setattr(os, name, call)

    os.open, os.write, os.fsync, os.rename, os.fdopen = opened, written, synced, renamed, file_of  # type: ignore[assignment]
    os.pwrite = placed
    return uninstall


def environment(fault: Fault) -> dict[str, str]:
    """Return the variables of a command some process of which is to fail."""
    return {"PYTHONPATH": str(Path(__file__).parent), VARIABLE: json.dumps(asdict(fault))}


def _install_where_asked() -> None:
    if VARIABLE in os.environ:
        fault = Fault(**json.loads(os.environ[VARIABLE]))
        if fault.process in sys.orig_argv:
            install(fault)


_install_where_asked()
if "CLOCK_INJECTED" in os.environ:
    importlib.import_module("wall_clock").install_where_asked()
