"""An append-only file of frames: length and CRC-32 of a payload (`<II`), then the payload.

What a killed process had written stays readable, up to the frame that was torn. A log that goes on for days is several
such files, so that the oldest can be deleted.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path

import msgspec

_PREFIX = struct.Struct("<II")


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """When a log goes on in another file: where one is so large, or so many seconds old."""

    most_bytes: int
    most_s: float


class FrameLog:
    """Owns the file."""

    def __init__(self, path: str | os.PathLike[str], rotation: Rotation | None = None) -> None:
        self._path, self._rotation = Path(path), rotation
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._bytes, self._since_s = os.fstat(self._fd).st_size, time.monotonic()

    def turn(self) -> bool:
        """Go on in the next file where it is time to; tell whether it was. NAME-0007 is followed by NAME-0008.

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
        """Write payloads one after another. Raises OSError when they cannot be written whole, as on a full disk."""
        rest = memoryview(b"".join(_PREFIX.pack(len(one), zlib.crc32(one)) + one for one in payloads))
        self._bytes += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def following(path: Path) -> Path:
    """Return the file that a log goes on in: its number is one more, as wide as before."""
    name, _, number = path.stem.rpartition("-")
    return path.with_name(f"{name}-{int(number) + 1:0{len(number)}d}{path.suffix}")
