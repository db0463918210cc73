"""What waits for the next collector: exports in files of a run directory, behind a cursor, and nowhere else.

Exports of spans wait in the logs in which they are anyway. Those of other signals, which no log has, wait in a queue
beside them, whose files are deleted as their exports leave. A receiver that was killed is followed by one that goes on
there, and a watch by the next watch of the same folder. The cursor is a file, written as each export leaves; it
stays, for what it counts that no log says. Processes that write such files hold a lock on their directory (`claimed`).
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec

from rundir.files import read_regular
from rundir.frames import FrameLog, LogTails, Rotation, next_number, number_of
from rundir.framing import GAP, inflate
from scraper.spans.log import BODY_BYTES, Counts, ExportRecord, ForwardQueue, StateRecord, last_counts
from scraper.spans.spec import TRACES

CURSOR = "forward.json"
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # others cannot be counted on in a log
SPANS, OTHERS = "spans-*.log", "others-*.queue"
_FILES = 8  # of a full queue of other signals, so that an eighth of it is deleted at a time
_NUMBERS_BYTES = 512  # of a cursor, without its URL


class Place(msgspec.Struct, order=True):
    """Up to where exports have left: earlier files, and the first `records` of the file of this number."""

    log: Number = 0
    records: Number = 0


class Taken(msgspec.Struct, kw_only=True):
    """The places of another directory, whose cursor has this `id`, up to which its exports are counted here."""

    id: Number
    spans: Place
    others: Place


class Cursor(msgspec.Struct, kw_only=True):
    """The places of a directory's two queues.

    url is that of the collector, masked; "" where no other watch goes on from here: of a run, and where nothing waits.
    `forwarded` and `dropped` are the exports of spans that receivers of this directory have passed on, and given up,
    also of the directories that they took over, of which `taken` is the last. `id` is drawn at random, 0 for none.
    """

    url: str
    spans: Place
    others: Place
    forwarded: Number = 0
    dropped: Number = 0
    id: Number = 0
    taken: Taken | None = None


class SignalRecord(msgspec.Struct, tag="signal", array_like=True, frozen=True, kw_only=True):
    """One export of another signal than spans, otherwise as ExportRecord has it."""

    received_ns: int
    signal: str
    packed: bytes


QueueRecord = ExportRecord | StateRecord | SignalRecord
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[QueueRecord] = msgspec.msgpack.Decoder(QueueRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One export that waits: when it came, its bytes, and how many these are in its file."""

    signal: str
    received_ns: int
    body: bytes
    size: int


class Queue:
    """The exports in files of a pattern, behind a place, in the order in which they came; owns the open files.

    `exports` wait, by signal, of `size_bytes` in their files; `most_bytes` may. `filled` is set as some come.
    `recorded` is what the last state in the files says of forwarding, once they were surveyed.
    """

    def __init__(self, raw: Path, pattern: str, place: Place, *, most_bytes: int) -> None:
        self.exports, self.size_bytes, self.most_bytes = Counter[str](), 0, most_bytes
        self.place, self.filled = place, asyncio.Event()
        self.recorded: ForwardQueue | None = None
        self._raw, self._pattern = raw, pattern
        self._tails, self._at = LogTails(raw, first=place.log), Place(log=place.log)
        self._reading: Iterator[QueueRecord] = iter(())
        self._head: Waiting | None = None

    def survey(self) -> None:
        """Count what waits. All of it is read; that may be done in a thread."""
        with LogTails(self._raw, first=self.place.log) as tails:
            for record in self._read(tails, Place(log=self.place.log)):
                if isinstance(record, StateRecord):
                    self.recorded = record.queue
                else:
                    self.add(_signal(record), len(record.packed))

    def add(self, signal: str, size: int) -> None:
        """Note that an export of so many bytes is in the files."""
        self.exports[signal] += 1
        self.size_bytes += size

    def head(self) -> Waiting | None:
        """Return the export that waits longest; None where there is none in the files.

        Raises OSError where they cannot be read; it can be tried again.
        """
        while self._head is None and self.exports.total() and (record := self._next()):
            if not isinstance(record, StateRecord):
                with suppress(ValueError):  # no receiver has written it
                    self._head = Waiting(
                        signal=_signal(record),
                        received_ns=record.received_ns,
                        body=inflate(record.packed, BODY_BYTES),
                        size=len(record.packed),
                    )
        return self._head

    def leave(self) -> None:
        """Take the head out of what waits."""
        if self._head is None:
            raise ValueError("nothing is at the head")
        self.exports[self._head.signal] -= 1
        self.size_bytes -= self._head.size
        self._head = None
        self._move()

    def give_up(self) -> Counter[str]:
        """Take all out of what waits, and return how many exports that is, by signal."""
        exports, self.exports, self.size_bytes, self._head = self.exports, Counter(), 0, None
        self._move()
        return exports

    def close(self) -> None:
        """Close the files."""
        self._tails.__exit__()

    def _move(self) -> None:
        """Let the place be where the reading is, if that has come so far again."""
        at = max(self.place, self._at)
        self.place.log, self.place.records = at.log, at.records

    def _next(self) -> QueueRecord | None:
        record = next(self._reading, None)
        if record is None:  # the files may have grown
            self._reading = self._read(self._tails, self._at)
            record = next(self._reading, None)
        return record

    def _read(self, tails: LogTails, at: Place) -> Iterator[QueueRecord]:
        """Yield what the files have gained: exports behind the place, and all states. `at` is where the reading is."""
        for path, payload in tails.news(self._pattern, in_turn=True):
            if number_of(path) != at.log:
                at.log, at.records = number_of(path), 0
            if payload is GAP:
                continue
            at.records += 1
            with suppress(ValueError, RecursionError):
                record = _decoder.decode(payload)
                if at > self.place or isinstance(record, StateRecord):
                    yield record


class Backlog:
    """Owns the cursor of a directory and its lock, and both queues behind the cursor."""

    def __init__(self, raw: Path, cursor: Cursor, lock: int, *, most_bytes: int, most_other_bytes: int) -> None:
        """Go on from a cursor. Raises OSError where it cannot be opened."""
        self.spans = Queue(raw, SPANS, cursor.spans, most_bytes=most_bytes)
        self.others = Queue(raw, OTHERS, cursor.others, most_bytes=most_other_bytes)
        self.cursor = cursor
        self.cursor.id = cursor.id or secrets.randbits(62)
        self._raw, self._lock = raw, lock
        self._writing: FrameLog | None = None
        self._width = _NUMBERS_BYTES + len(msgspec.json.encode(cursor.url))
        self._fd = os.open(raw / CURSOR, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.save()

    @classmethod
    def resume(cls, log: Path, url: str, **limits: int) -> Self:
        """Go on where the last receiver of a directory was; the first begins at its own log.

        Raises OSError where there can be no cursor.
        """
        raw, lock = log.parent, _folder(log.parent)
        with suppress(OSError):  # without locks, no other watch goes on with what this one leaves
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            number = 0 if (raw / CURSOR).exists() else number_of(log)
            cursor = _cursor(raw) or Cursor(url=url, spans=Place(log=number), others=Place())
            cursor.url = url
            return cls(raw, cursor, lock, **limits)
        except OSError:
            os.close(lock)
            raise

    @classmethod
    def take_over(cls, raw: Path, url: str, **limits: int) -> Self | None:
        """Go on with what a watch that is dead has left for this collector; None where there is no such thing."""
        cursor = _cursor(raw)
        if cursor is None or cursor.url != url:
            return None
        lock = -1
        with suppress(OSError):  # a process of it lives, or there are no locks here
            lock = _folder(raw)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cursor = _cursor(raw)  # as its processes have left it
            if cursor is not None and os.fstat(lock).st_uid == os.geteuid():
                _advance(cursor, raw)
                return cls(raw, cursor, lock, **limits)
        if lock >= 0:
            os.close(lock)
        return None

    @property
    def queues(self) -> tuple[Queue, Queue]:
        """Return that of spans, and that of other signals."""
        return self.spans, self.others

    def survey(self) -> None:
        """Count what waits, as Queue.survey does."""
        for queue in self.queues:
            queue.survey()

    def unrecorded(self) -> tuple[int, int]:
        """Return how many exports of spans were forwarded and dropped of which no surveyed state says so, because its
        receiver was killed.
        """
        return _beyond(self.cursor, self.spans.recorded) if self.spans.recorded else (0, 0)

    def put(self, signal: str, packed: bytes, now_ns: int) -> bool:
        """Queue an export that no log has; return whether it fits. Raises OSError where it cannot be written."""
        if self.others.size_bytes + len(packed) > self.others.most_bytes:
            return False
        if self._writing is None:
            number = max(next_number(self._raw, OTHERS), self.others.place.log + 1)
            path = self._raw / OTHERS.replace("*", f"{number:06d}")
            rotation = Rotation(most_bytes=self.others.most_bytes // _FILES, most_s=math.inf)
            self._writing = FrameLog(path, rotation)
        self._writing.rotate()
        self._writing.append(_encode(SignalRecord(received_ns=now_ns, signal=signal, packed=packed)))
        self.others.add(signal, len(packed))
        self.others.filled.set()
        return True

    def leave(self, queue: Queue) -> None:
        """Take the head of a queue out of what waits; what is done with it is then counted, and saved."""
        number = queue.place.log
        queue.leave()
        if queue is self.others and queue.place.log != number:
            self._delete(before=queue.place.log)

    def save(self, taken: Backlog | None = None) -> None:
        """Write the cursor, and then that of a directory that is taken over, whose exports are counted here.

        What is counted, and up to where, is one write, to this cursor: after a kill between the two, who takes the
        directory over next goes by it. Where it cannot be written, as on a full disk, a receiver that follows a killed
        one sends some again.
        """
        if taken is not None:
            other = taken.cursor
            self.cursor.taken = Taken(id=other.id, spans=other.spans, others=other.others)
        with suppress(OSError):
            os.pwrite(self._fd, msgspec.json.encode(self.cursor).ljust(self._width), 0)
            if taken is not None:
                taken.save()

    def close(self) -> None:
        """Leave all to who comes next where something waits, else remove the queue's files; the cursor says so."""
        if self._writing is not None:
            self._writing.close()
        if not self.others.exports.total():
            self._delete()
        if not any(queue.exports.total() for queue in self.queues):
            self.cursor.url = ""  # where that cannot be written, it costs the next a look
            self.save()
        for queue in self.queues:
            queue.close()
        for fd in (self._fd, self._lock):
            os.close(fd)

    def _delete(self, *, before: float = math.inf) -> None:
        for path in self._raw.glob(OTHERS):
            if number_of(path) < before:
                with suppress(OSError):  # it is passed over
                    path.unlink()


@contextmanager
def claimed(raw: Path) -> Iterator[None]:
    """Keep other watches from what waits in a folder of logs, for as long as the block lasts."""
    fd = _folder(raw)
    try:
        with suppress(OSError):  # without locks, no other watch goes on with anything
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def left_beside(log: Path) -> list[Path]:
    """Return the folders of logs in which exports may wait, of all directories beside that of a log, by name."""
    raw = log.absolute().parent
    return sorted(folder for folder, cursor in _cursors_beside(raw) if folder != raw and cursor.url)


def final_counts(raw: Path, states: Sequence[StateRecord]) -> tuple[Counts | None, int]:
    """Return the counts of all receivers of a folder of logs added up, None without one, and how many of them died.

    What the last has forwarded and dropped since its last state, as a killed one has, is as the cursor says.
    """
    if not states:
        return None, 0
    counts, deaths = last_counts(states)
    cursor = _cursor(raw)
    forwarded, dropped = _beyond(cursor, states[-1].queue) if cursor else (0, 0)
    whole = {"forwarded": counts.forwarded + forwarded, "forward_dropped": counts.forward_dropped + dropped}
    return msgspec.structs.replace(counts, **whole), deaths


def _beyond(cursor: Cursor, recorded: ForwardQueue) -> tuple[int, int]:
    return max(0, cursor.forwarded - recorded.forwarded), max(0, cursor.dropped - recorded.dropped)


def _cursors_beside(raw: Path) -> Iterator[tuple[Path, Cursor]]:
    """Give those of all directories beside that of a folder of logs, of itself too, each with its folder."""
    for path in raw.parent.parent.glob(f"*/{raw.name}/{CURSOR}"):
        if (cursor := _cursor(path.parent)) is not None:
            yield path.parent, cursor


def _advance(cursor: Cursor, raw: Path) -> None:
    """Move a cursor, whose directory is locked, on to where those that took it over before have counted its exports."""
    for _, taker in _cursors_beside(raw):
        if taker.taken is not None and taker.taken.id == cursor.id != 0:
            cursor.spans = max(cursor.spans, taker.taken.spans)
            cursor.others = max(cursor.others, taker.taken.others)


def _folder(raw: Path) -> int:
    return os.open(raw, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _cursor(raw: Path) -> Cursor | None:
    try:
        return msgspec.json.decode(read_regular(raw / CURSOR), type=Cursor)
    except (OSError, ValueError, RecursionError):  # others may have written it
        return None


def _signal(record: ExportRecord | SignalRecord) -> str:
    return record.signal if isinstance(record, SignalRecord) else TRACES
