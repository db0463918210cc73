"""An append-only file of frames: length and CRC-32 of a payload (`<II`), then the payload.

What a killed process had written stays readable, up to the frame that was torn.
"""

from __future__ import annotations

import os
import struct
import zlib

_PREFIX = struct.Struct("<II")


class FrameLog:
    """Owns the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, *payloads: bytes) -> None:
        """Write payloads one after another. Raises OSError when they cannot be written whole, as on a full disk."""
        rest = memoryview(b"".join(_PREFIX.pack(len(one), zlib.crc32(one)) + one for one in payloads))
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
