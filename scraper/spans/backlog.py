"""The exports of spans that wait for the next collector: they lie in the logs of spans, behind a cursor.

A receiver that was killed is followed by one that goes on there, and a watch by the next watch of the same folder. The
cursor is a file beside the logs, written as each export leaves; it is there while exports may wait, and locked by the
process that passes them on. Who starts such processes holds a lock on the folder of the logs (`claimed`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Self

import msgspec

from rundir.files import read_regular
from rundir.frames import LogTails, in_order, number_of, read_frames
from rundir.framing import GAP
from scraper.spans.log import ExportRecord, ForwardQueue, StateRecord, decode
from scraper.spans.spec import TRACES, ForwardKeep

CURSOR = "forward.json"
_LOGS = "spans-*.log"
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # others cannot be counted on in a log
_NUMBERS_BYTES = 256  # of a cursor, without its URL


class Cursor(msgspec.Struct, kw_only=True):
    """Up to where exports have left: earlier logs, and the first `records` of the log of this number.

    url is that of the collector, masked; "" where only receivers of this directory go on from here. `forwarded` and
    `dropped` are all exports of spans that have left since the directory was made.
    """

    url: str
    log: Number
    records: Number = 0
    forwarded: Number = 0
    dropped: Number = 0


class Backlog:
    """Owns a cursor and the reading of the logs behind it: exports in the order in which they came.

    `exports` wait, of `size_bytes` as they are logged. `unrecorded` are those forwarded and dropped of which no state
    in the log says so, because its receiver was killed.
    """

    def __init__(self, raw: Path, cursor: Cursor, keep: ForwardKeep | None, *fds: int) -> None:
        self.exports = self.size_bytes = 0
        self.unrecorded = (0, 0)
        self._raw, self._cursor, self._keep, self._fds = raw, cursor, keep, fds
        self._width = _NUMBERS_BYTES + len(msgspec.json.encode(cursor.url))
        self._tails = LogTails(raw, first=cursor.log)
        self._number, self._records = cursor.log, 0  # up to where it was read
        self._reading = self._read()
        self._head: tuple[ExportRecord, bytes] | None = None

    @classmethod
    def resume(cls, log: Path, url: str, keep: ForwardKeep | None) -> Self:
        """Go on where the last receiver of a directory was; the first begins at its own log.

        Raises OSError where the cursor cannot be made.
        """
        path = log.parent / CURSOR
        is_first = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # without locks, no other watch goes on with what this one leaves
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = Cursor(url=url if keep else "", log=number_of(log) if is_first else 0)
        backlog = cls(log.parent, _cursor(log.parent) or begin, keep, fd)
        backlog.count()
        return backlog

    @classmethod
    def take_over(cls, raw: Path, url: str, keep: ForwardKeep) -> Self | None:
        """Go on with what a watch that is dead has left for this collector; None where there is no such thing."""
        cursor, fds = _cursor(raw), list[int]()
        if cursor is None or cursor.url != url:
            return None
        try:
            for path, flags in ((raw, os.O_RDONLY | os.O_DIRECTORY), (raw / CURSOR, os.O_RDWR)):
                fds.append(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC))
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            cursor = _cursor(raw)  # as its process has left it
            if cursor is not None and os.fstat(fds[0]).st_uid == os.geteuid():
                backlog = cls(raw, cursor, keep, *reversed(fds))
                fds.clear()
                return backlog
        except OSError:  # its process lives, or there are no locks here
            return None
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def survey(self) -> None:
        """Count what waits. All of it is read, once; it may be done in a thread."""
        recorded: ForwardQueue | None = None
        for path in in_order(self._raw.glob(_LOGS)):
            behind = self._cursor.records if number_of(path) == self._cursor.log else 0
            with suppress(OSError):  # it was deleted, or is a link
                frames = read_frames(path) if number_of(path) >= self._cursor.log else ()
                for number, record in enumerate(map(_record, frames)):
                    if isinstance(record, StateRecord):
                        recorded = record.queue
                    elif record is not None and number >= behind:
                        self.logged(len(record.packed))
        if recorded is not None:
            forwarded, dropped = self._cursor.forwarded - recorded.forwarded, self._cursor.dropped - recorded.dropped
            self.unrecorded = max(0, forwarded), max(0, dropped)

    def logged(self, size: int) -> None:
        """Note that an export of so many bytes is in the log."""
        self.exports += 1
        self.size_bytes += size

    def head(self) -> tuple[str, bytes] | None:
        """Return the export that waits longest, with its signal; None where there is none in the logs.

        Raises OSError where they cannot be read; it can be tried again.
        """
        try:
            while self._head is None and self.exports and (record := next(self._reading)) is not None:
                with suppress(ValueError):  # no receiver has written it
                    self._head = record, record.body()
        except OSError:
            self._reading = self._read()  # it goes on behind what it has given
            raise
        return None if self._head is None else (TRACES, self._head[1])

    def is_outdated(self, now_ns: int) -> bool:
        """Tell whether the head has waited for too long, or too much waits."""
        if self._head is None or self._keep is None:
            return False
        came_ns = self._head[0].received_ns
        came_ns += sum(moved_ns for first_log, moved_ns in self._keep.clock_steps if self._number < first_log)
        return now_ns - came_ns > self._keep.seconds * 1e9 or self.size_bytes > self._keep.most_bytes

    def leave(self, *, forwarded: bool) -> None:
        """Take the head out of what waits."""
        if self._head is None:
            raise ValueError("nothing is at the head")
        self.exports -= 1
        self.size_bytes -= len(self._head[0].packed)
        self._head = None
        self._cursor.log, self._cursor.records = self._number, self._records
        self.count(forwarded=int(forwarded), dropped=int(not forwarded))

    def give_up(self) -> int:
        """Take all out of what waits, and return how many exports that is."""
        exports, self.exports, self.size_bytes, self._head = self.exports, 0, 0, None
        self.count(dropped=exports)
        return exports

    def count(self, *, forwarded: int = 0, dropped: int = 0) -> None:
        """Count exports that have left, and write the cursor.

        Where that cannot be done, as on a full disk, a receiver that follows a killed one sends some again.
        """
        self._cursor.forwarded += forwarded
        self._cursor.dropped += dropped
        with suppress(OSError):
            os.pwrite(self._fds[0], msgspec.json.encode(self._cursor).ljust(self._width), 0)

    def queue(self) -> ForwardQueue:
        """Return what waits and what has left, as a state records it."""
        return ForwardQueue(
            exports=self.exports,
            size_bytes=self.size_bytes,
            limit_bytes=self._keep.most_bytes if self._keep else 0,
            first_log=self._cursor.log,
            forwarded=self._cursor.forwarded,
            dropped=self._cursor.dropped,
        )

    def close(self) -> None:
        """Leave the cursor to who comes next where something waits, else remove it."""
        if not self.exports:
            with suppress(OSError):  # one that stays costs the next a look
                (self._raw / CURSOR).unlink()
        self._reading.close()
        self._tails.__exit__()
        for fd in self._fds:
            os.close(fd)

    def _read(self) -> Generator[ExportRecord | None]:
        """Give the exports behind the cursor, and None whenever the logs have no more."""
        while True:
            is_end = True
            for path, payload in self._tails.news(_LOGS, in_turn=True):
                is_end = False
                if number_of(path) != self._number:
                    self._number, self._records = number_of(path), 0
                if payload is GAP:
                    continue
                self._records += 1
                if self._number == self._cursor.log and self._records <= self._cursor.records:
                    continue
                record = _record(payload)
                if isinstance(record, ExportRecord):
                    yield record
            if is_end:
                yield None


@contextmanager
def claimed(raw: Path) -> Iterator[None]:
    """Keep other watches from what waits in a folder of logs, for as long as the block lasts."""
    fd = os.open(raw, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # without locks, no other watch goes on with anything
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def left_beside(log: Path) -> list[Path]:
    """Return the folders of logs with a cursor, of all directories beside that of a log, by name."""
    raw = log.absolute().parent
    return sorted(path.parent for path in raw.parent.parent.glob(f"*/{raw.name}/{CURSOR}") if path.parent != raw)


def _cursor(raw: Path) -> Cursor | None:
    try:
        return msgspec.json.decode(read_regular(raw / CURSOR), type=Cursor)
    except (OSError, ValueError, RecursionError):  # others may have written it
        return None


def _record(payload: bytes) -> ExportRecord | StateRecord | None:
    try:
        return decode(payload)
    except (ValueError, RecursionError):
        return None
