"""Append-only logs of self-delimiting frames: writing, rotation, following while they grow, and reading.

A frame is `<II` (length and CRC-32 of the payload) and the payload. What a killed process had written stays readable: a
reader stops where a frame is torn or does not match its checksum. A log that goes on for days is several such files, so
that the oldest can be deleted.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from rundir.files import open_regular

_PREFIX = struct.Struct("<II")
_BLOCK_BYTES = 1 << 18


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a log goes on in another file: where one is so large, or so many seconds old."""

    most_bytes: int
    most_s: float


class FrameLog:
    """Writes a log; owns its file. A context manager, with `close` for those that are none."""

    def __init__(self, path: str | os.PathLike[str], rotation: Rotation | None = None) -> None:
        self._path, self._rotation = Path(path), rotation
        self._open()

    def _open(self) -> None:
        self._fd = open_append(self._path)
        self._bytes, self._since_s = os.fstat(self._fd).st_size, time.monotonic()

    def rotate(self) -> bool:
        """Go on in the next file where it is due, and return whether it was. NAME-0007 is followed by NAME-0008.

        Raises OSError when the next file cannot be made; the one before then stays in use.
        """
        limits = self._rotation
        if limits is None or (self._bytes < limits.most_bytes and time.monotonic() < self._since_s + limits.most_s):
            return False
        before, self._path = (self._fd, self._path), following(self._path)
        try:
            self._open()
        except OSError:
            self._fd, self._path = before
            raise
        os.close(before[0])
        return True

    def append(self, *payloads: bytes) -> None:
        """Append payloads, by one write unless the system splits it.

        Raises OSError when they cannot be written whole, as on a full disk.
        """
        rest = memoryview(b"".join(_PREFIX.pack(len(payload), zlib.crc32(payload)) + payload for payload in payloads))
        self._bytes += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_append(path: str | os.PathLike[str]) -> int:
    """Open (or create) a file for appending and return its descriptor, the caller's to close."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def following(path: Path) -> Path:
    """Return the file that a log goes on in: its number is one more, as wide as before."""
    name, _, number = path.stem.rpartition("-")
    return path.with_name(f"{name}-{int(number) + 1:0{len(number)}d}{path.suffix}")


def next_number(directory: Path, pattern: str) -> int:
    """Return the number of the file that comes after those that are there."""
    numbers = [int(path.stem.rpartition("-")[2]) for path in directory.glob(pattern)]
    return max(numbers, default=-1) + 1


def split_frames(data: bytes | bytearray) -> tuple[list[bytes], int]:
    """Return the whole frames of `data`, and the position behind the last of them.

    Stops at the first frame that is torn (more bytes may come) or does not match its checksum (they will not help).
    """
    payloads: list[bytes] = []
    at = 0
    while at + _PREFIX.size <= len(data):
        length, crc = _PREFIX.unpack_from(data, at)
        begin = at + _PREFIX.size
        # Length 0 is never written, but is what a file shows whose blocks did not reach the disk.
        if length == 0 or begin + length > len(data):
            break
        payload = bytes(data[begin : begin + length])
        if zlib.crc32(payload) != crc:
            break
        payloads.append(payload)
        at = begin + length
    return payloads, at


class FrameTail:
    """Reads a log while another process appends to it; owns the file.

    `read_new` returns what became whole since the last call, about 256 KiB at a time; nothing when nothing did.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_regular(path)
        self._pending = bytearray()

    def read_new(self) -> list[bytes]:
        """Return the payloads that became readable, in order."""
        # A frame may be longer than a block: go on until one is whole or the file ends.
        while block := self._file.read(_BLOCK_BYTES):
            self._pending += block
            payloads, end = split_frames(self._pending)
            if payloads:
                del self._pending[:end]
                return payloads
        return []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_frames(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Give the payloads of a log up to its end or its tear."""
    with FrameTail(path) as tail:
        while payloads := tail.read_new():
            yield from payloads


class LogTails:
    """Follows all logs of a directory while they grow; owns the open files. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[Path, FrameTail] = {}
        self._done: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tail in self._tails.values():
            tail.close()

    def news(self, pattern: str, *, in_turn: bool = False) -> Iterator[tuple[Path, bytes]]:
        """Give the payloads that are new, in order, each with its file.

        Files grow side by side, but where they are written `in_turn`: one that another follows is then closed.
        """
        paths = sorted(self._directory.glob(pattern))
        for path in paths:
            if path in self._done:
                continue
            if path not in self._tails:
                self._tails[path] = FrameTail(path)
            while payloads := self._tails[path].read_new():
                for payload in payloads:
                    yield path, payload
            if in_turn and path != paths[-1]:  # which was there before we read to the end: nothing more comes
                self._tails.pop(path).close()
                self._done.add(path)

    def clock_moved(self, patterns: Sequence[str], moved_ns: int) -> None:
        """Let files be as old as they were before the wall clock was set by so much, which `prune` goes by."""
        for path in (path for pattern in patterns for path in self._directory.glob(pattern)):
            stat = path.stat()
            os.utime(path, ns=(stat.st_atime_ns + moved_ns, stat.st_mtime_ns + moved_ns))

    def prune(self, patterns: Sequence[str], *, keep_s: float, keep_bytes: int) -> None:
        """Delete the files that were written to last longer ago, and the oldest of those beyond so many bytes.

        The newest of each pattern stays, and so does what was not read.
        """
        files = [path for pattern in patterns for path in sorted(self._directory.glob(pattern))]
        stats = {path: path.stat() for path in files}
        total = sum(stat.st_size for stat in stats.values())
        old_s = time.time() - keep_s
        for path in sorted(self._done & stats.keys(), key=lambda path: stats[path].st_mtime):
            if stats[path].st_mtime < old_s or total > keep_bytes:
                path.unlink(missing_ok=True)
                total -= stats[path].st_size
        self._done = {path for path in self._done if path.exists()}
