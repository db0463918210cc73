"""Resources of a process: descriptors, memory, and room for its standard error."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ERRORS_EVERY_S = 60.0
MOST_ERROR_BYTES = 1_000_000
TRIM_EVERY_S = 1.0
COLLECT_EVERY = 2_000  # objects that may refer to each other: half a megabyte
_STATM = "/proc/self/statm"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOOK_EVERY_S = 0.02


def raise_limit() -> int:
    """Raise this process's limit of open files to its maximum, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            # macOS names a hard limit that it does not grant.
            return _count(soft)
    return _count(hard)


def descriptor_limit() -> int:
    """Return the maximum number of open files of a process started by this one."""
    return _count(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def resident_bytes() -> int:
    """Return the resident memory of this process, -1 if the system does not say."""
    return _size_bytes(1)


def limit_growth(most_bytes: int) -> None:
    """Limit the growth of this process's memory from now on; on Linux alone."""
    now_bytes = _size_bytes(5)
    if now_bytes >= 0:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_DATA, (min(now_bytes + most_bytes, most), hard))


def _size_bytes(field: int) -> int:
    """Return a field of /proc/self/statm in bytes, -1 without one."""
    try:
        descriptor = os.open(_STATM, os.O_RDONLY)  # half of what a file object takes
    except OSError:
        return -1
    try:
        return int(os.read(descriptor, 256).split()[field]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


class MemoryLimit:
    """A soft limit of this process's memory; at the limit, free memory returns to the system.

    `resident` is read at most every 20 ms.
    """

    def __init__(self, most_bytes: int, *, resident: Callable[[], int] = resident_bytes) -> None:
        self.most_bytes = most_bytes
        self._resident, self._is_reached = resident, False
        self._looked_s = self._trimmed_s = -1e9

    def is_reached(self) -> bool:
        """Return whether the process is above its memory limit."""
        now_s = time.monotonic()
        if now_s < self._looked_s + _LOOK_EVERY_S:
            return self._is_reached
        self._looked_s = now_s
        self._is_reached = self._resident() > self.most_bytes
        if self._is_reached and now_s >= self._trimmed_s + TRIM_EVERY_S:
            self._trimmed_s = now_s
            _trim()
            self._is_reached = self._resident() > self.most_bytes
        return self._is_reached


def _trim() -> None:
    """Return free memory to the system.

    Cyclic garbage is collected first: a few objects may hold many bytes. Then come the free pages that glibc keeps.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def collecting_often() -> Iterator[None]:
    """Collect cyclic garbage often while the context is open.

    A process of some hours would hold some 30 MB of it. What exists by now stays, and is not looked through again:
    nearly all of it are modules.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class SparingErrors(logging.Handler):
    """Log handler for standard error with limits by kind and in all.

    Each kind is written once in ERRORS_EVERY_S, and MOST_ERROR_BYTES in all. A kind is what one line of code says of
    one kind of error. How often it came meanwhile stands before the next.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: dict[tuple[str, int, object], tuple[float, int]] = {}
        self._room = MOST_ERROR_BYTES

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        kind = record.pathname, record.lineno, record.exc_info and record.exc_info[0]
        now_s = time.monotonic()
        said_s, count = self._said.get(kind, (-1e9, 0))
        if now_s < said_s + ERRORS_EVERY_S or self._room <= 0:
            self._said[kind] = said_s, count + 1
            return
        self._said[kind] = now_s, 0
        text = f"{f'({count} times more) ' if count else ''}{self.format(record)}\n"
        self._room -= len(text)
        sys.stderr.write(text if self._room > 0 else "more errors follow, and are not written\n")
        sys.stderr.flush()


def limit_errors() -> None:
    """Limit the output of libraries to standard error as SparingErrors does."""
    logging.getLogger().handlers = [SparingErrors()]


def _count(limit: int) -> int:
    return 1 << 31 if limit == resource.RLIM_INFINITY else limit
