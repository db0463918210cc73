"""Append-only logs of frames (`framing`): writing, rotation, following while they grow, and reading.

What a killed process had written stays readable, up to the tear. A log that goes on for days is several files, so that
the oldest can be deleted. A process that is to go on where the disk is full counts what it could not write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Self, TypeVar

import msgspec

from sidelight.rundir.files import NotRegular, mode_in, open_regular
from sidelight.rundir.framing import END_BYTES, GAP, Extent, Framer, LogEnd, Unframer

_BLOCK_BYTES = 1 << 18
_SAY_EVERY_S = 1.0

Record = TypeVar("Record")


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a log's file, by size and age in seconds, before its successor begins."""

    most_bytes: int
    most_s: float


class FrameLog:
    """Writer of a log, owner of its file: a context manager with `close`."""

    def __init__(self, path: str | os.PathLike[str], rotation: Rotation | None = None) -> None:
        self._path, self._rotation = Path(path), rotation
        self._open()

    def _open(self) -> None:
        self._fd = open_append(self._path)
        self._bytes, self._since_s = os.fstat(self._fd).st_size, time.monotonic()
        self._framer = Framer(_extent_of(self._path) if self._bytes else None)

    def rotate(self) -> bool:
        """Begin the next file if it is due, and return whether it was.

        NAME-0007 is followed by NAME-0008. Raises OSError when the next file cannot be made; the one before then stays
        in use.
        """
        limits = self._rotation
        if limits is None or (self._bytes < limits.most_bytes and time.monotonic() < self._since_s + limits.most_s):
            return False
        before = self._fd, self._path, self._framer, self._bytes
        try:
            self._path = following(self._path)
            self._open()
        except OSError:
            self._fd, self._path, self._framer, self._bytes = before
            raise
        _end(before[0], before[2], before[3])
        return True

    def append(self, *payloads: bytes) -> None:
        """Append payloads, by one write unless the system splits it.

        Raises OSError when they cannot be written whole, as on a full disk: then none of them is, and the log goes on
        where there is room again.
        """
        before = self._framer.extent
        try:
            data = b"".join(map(self._framer.frame, payloads))
            _append(self._fd, self._bytes, data)
        except (OSError, ValueError):
            self._framer = Framer(before)
            raise
        self._bytes += len(data)

    def close(self) -> None:
        """Write the log's end, where there is room for it, and close the file."""
        _end(self._fd, self._framer, self._bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unwritten:
    """Counter of a process's records that could not be written, as on a full disk.

    Says `unwritten`, once a second at most, and `written` when records are kept again.
    """

    def __init__(self, say: Callable[..., object]) -> None:
        self.count = 0
        self._say = say
        self._said_s: float | None = None  # since records are kept

    def add(self, error: OSError) -> None:
        """Count one more."""
        self.count += 1
        now_s = time.monotonic()
        if self._said_s is None or now_s >= self._said_s + _SAY_EVERY_S:
            self._said_s = now_s
            self._say("unwritten", count=self.count, reason=error.strerror or str(error))

    def end(self) -> None:
        """Report that records can be written again."""
        if self._said_s is not None:
            self._said_s = None
            self._say("written", count=self.count)


class PatientLog(Generic[Record]):
    """A log that survives a full disk; `written` is the number of its records."""

    def __init__(self, append: Callable[[Record], str | None], unwritten: Unwritten) -> None:
        self.written = 0
        self._append, self._unwritten = append, unwritten

    def append(self, record: Record, /) -> str:
        """Write a record or count it as lost; return its fault, "" if unknown or none."""
        try:
            fault = self._append(record)
        except OSError as full:
            self._unwritten.add(full)
            return ""
        self.written += 1
        self._unwritten.end()
        return fault or ""


def _append(fd: int, size: int, data: bytes) -> None:
    """Append to a file of this size, all or nothing. Raises OSError."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        with suppress(OSError):  # no plain file; what is left there is read as torn
            os.ftruncate(fd, size)
        raise


def _end(fd: int, framer: Framer, size: int) -> None:
    try:
        with suppress(OSError):  # a log without an end is read as one that was cut short, which it is
            _append(fd, size, framer.end())
    finally:
        os.close(fd)


def _extent_of(path: Path) -> LogEnd:
    """Return the extent of an existing log file, lost frames included."""
    with FrameTail(path) as tail:
        while tail.read_block() or tail.read_rest():
            pass
        extent = tail.extent
    return LogEnd(frames=extent.frames + extent.lost_frames, bytes=extent.bytes, checksum=extent.checksum)


def log_end(path: Path) -> LogEnd | None:
    """Return the end of a closed log; None if it was not closed, or is another file.

    Only its last bytes are read. Raises OSError as `open_regular` does.
    """
    with open_regular(path) as file:
        file.seek(-min(END_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        unframer = Unframer()
        unframer.feed(file.readall())
        return unframer.extent.end


def open_append(path: str | os.PathLike[str]) -> int:
    """Open a file for appending and return its descriptor, the caller's to close.

    A new file has the readers of its directory.
    """
    mode = 0o600
    with suppress(FileNotFoundError, NotADirectoryError):  # which opening the file says of the file
        mode = mode_in(Path(path).parent.stat())
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)


def following(path: Path) -> Path:
    """Return the next file of a log: its number plus one, of the same width."""
    name, _, number = path.stem.rpartition("-")
    return path.with_name(f"{name}-{int(number) + 1:0{len(number)}d}{path.suffix}")


def next_number(directory: Path, pattern: str) -> int:
    """Return the number of the file that comes after those that are there."""
    return max(map(number_of, directory.glob(pattern)), default=-1) + 1


def number_of(path: Path) -> int:
    """Return the number of a rotated log's file; -1 of another file with a similar name."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Return logs by name, and those of one name by number: NAME, NAME-2, NAME-10."""

    def place(path: Path) -> tuple[str, int]:
        name, _, number = path.stem.rpartition("-")
        return (name, int(number)) if name and number.isdecimal() else (path.stem, -1)

    return sorted(paths, key=lambda path: (*place(path), path.name))


class FrameTail:
    """Reader of a log that another process appends to; owns the file. A context manager.

    `read_new` returns what became whole since the last call, about 256 KiB at a time; nothing when nothing did.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_regular(path)
        self._unframer = Unframer()

    @property
    def extent(self) -> Extent:
        """Return the extent read so far, with its losses."""
        return self._unframer.extent

    def read_new(self) -> list[bytes]:
        """Return the payloads that became readable, in order."""
        return [payload for payload in self.read_block() if payload is not GAP]

    def read_block(self) -> list[bytes]:
        """Return the payloads that became readable, in order, with a GAP wherever some are lost."""
        # A frame may be longer than a block: go on until one is whole or the file ends.
        while not self._unframer.is_hopeless and (block := self._file.read(_BLOCK_BYTES)):
            if payloads := self._unframer.feed(block):
                return payloads
        self._file.seek(-self._unframer.put_back(), os.SEEK_CUR)  # its writer may take it back, too
        return []

    def read_rest(self) -> list[bytes]:
        """Return the payloads behind a damaged end, where nothing more comes."""
        if self._unframer.is_hopeless:
            at = self._file.tell()
            self._unframer.skip(self._file.seek(0, os.SEEK_END) - at)
            return []
        return [*self._unframer.feed(self._file.readall()), *self._unframer.finish()]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_frames(path: str | os.PathLike[str], *, gaps: bool = False) -> Iterator[bytes]:
    """Yield the payloads of a log that are neither damaged nor torn.

    With `gaps`, a GAP wherever some are lost.
    """
    with FrameTail(path) as tail:
        while payloads := tail.read_block() or tail.read_rest():
            yield from (payload for payload in payloads if gaps or payload is not GAP)


class LogTails:
    """Reader of a directory's growing logs, owner of the open files: a context manager.

    A file is open until it was read with `last`, or another follows it. `refused` are the names that are not regular
    files (links, FIFOs, devices), each with the reason.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[Path, FrameTail] = {}
        self._done: set[Path] = set()
        self._extents: dict[Path, Extent] = {}
        self.refused: dict[Path, str] = {}

    @property
    def extents(self) -> Mapping[Path, Extent]:
        """Return the extent read of each file that is open or was read with `last`."""
        return self._extents | {path: tail.extent for path, tail in self._tails.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tail in self._tails.values():
            tail.close()

    def news(self, pattern: str, *, in_turn: bool = False, last: bool = False) -> Iterator[tuple[Path, bytes]]:
        """Yield the new payloads in order, each with its file, and a GAP for losses.

        With `last`, also those behind a damaged end.

        Files grow side by side, but where they are written `in_turn`: one that another follows is then closed.
        """
        paths = in_order(self._directory.glob(pattern))
        # What others delete is forgotten: a log that goes on for months is hundreds of thousands of files.
        self._done -= {path for path in self._done if path.match(pattern)}.difference(paths)
        for path in paths:
            if path in self._done or path in self.refused:
                continue
            if path not in self._tails:
                try:
                    self._tails[path] = FrameTail(path)
                except NotRegular as refused:
                    self.refused[path] = refused.strerror
                    continue
                except FileNotFoundError:  # a watch deletes its oldest
                    continue
            tail = self._tails[path]
            is_followed = in_turn and path != paths[-1]  # the next was there before we read to the end of this one
            while payloads := tail.read_block():
                yield from ((path, payload) for payload in payloads)
            if last or is_followed:
                yield from ((path, payload) for payload in tail.read_rest())
            if last:
                self._extents[path] = tail.extent
            if last or is_followed:  # a directory of others may have more logs than a process may open
                self._tails.pop(path).close()
                self._done.add(path)

    def prune(self, patterns: Sequence[str], *, now_ns: int, keep_s: float, keep_bytes: int) -> None:
        """Delete the files last written before `now_ns` - `keep_s`, and the oldest beyond a size.

        The newest of each pattern stays, and so does what was not read.
        """
        files = [path for pattern in patterns for path in in_order(self._directory.glob(pattern))]
        stats = {path: path.stat() for path in files}
        total = sum(stat.st_size for stat in stats.values())
        old_s = now_ns / 1e9 - keep_s
        for path in sorted(self._done & stats.keys(), key=lambda path: stats[path].st_mtime):
            if stats[path].st_mtime < old_s or total > keep_bytes:
                path.unlink(missing_ok=True)
                self._done.discard(path)
                total -= stats[path].st_size
