"""The format of a log on disk: numbered frames, and an end with the log's totals.

Format 2, little-endian: a magic word of 4 bytes, `uint32` number of the frame in its file, `uint32` payload length,
`uint32` CRC-32 of number, length and payload, payload. A writer that closes its log adds an end: a frame of another
magic word whose payload states how many frames there were, their bytes, and the CRC-32 of their CRCs. A log may go on
behind an end, which then counted only what came before it. A reader goes on behind what is damaged at the next magic
word, and knows by the numbers how many frames it missed.

Format 1 is read no more: `uint32` length, `uint32` CRC-32 of the payload, payload.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import msgspec

# What reading a record raises that its writer has not written.
UNREADABLE = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError, zlib.error)
GAP = b""  # among payloads: here something was lost; no payload is empty
MOST_BYTES = 64 * 1024 * 1024  # of a payload
MOST_INFLATED_BYTES = 64 * 1024 * 1024  # of one part of a record
_INFLATED_AT_ONCE = 1024 * 1024
_RECORD, _END = b"\xf5SLr", b"\xf5SLe"
_MAGIC = _RECORD[:3]
_HEAD = struct.Struct("<4sII")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CRC.size
_END_PAYLOAD = struct.Struct("<IQI")
_HEAD_1 = struct.Struct("<II")
END_BYTES = _HEAD_BYTES + _END_PAYLOAD.size
# What may be looked at in vain behind damage: a file of magic words alone, or of terabytes of nothing, would keep a
# reader for hours.
_MOST_VAIN_BYTES = 8 * MOST_BYTES


def is_format_1(data: bytes) -> bool:
    """Return whether a log's first frame is of format 1."""
    if len(data) < _HEAD_1.size or data.startswith(_MAGIC):
        return False
    length, crc = _HEAD_1.unpack_from(data)
    return bool(length) and zlib.crc32(data[_HEAD_1.size : _HEAD_1.size + length]) == crc


def inflate(packed: bytes, most_bytes: int = MOST_INFLATED_BYTES) -> bytes:
    """Return data decompressed by zlib, of at most `most_bytes`.

    Raises ValueError for what is larger, cut off, or not packed by zlib: a few kilobytes may unpack to gigabytes.
    """
    inflating, pieces, left_bytes = zlib.decompressobj(), list[bytes](), most_bytes
    try:
        # In pieces: as a whole, zlib would hold it twice before its size is known.
        while not inflating.eof and (piece := inflating.decompress(packed, _INFLATED_AT_ONCE)):
            pieces.append(piece)
            packed, left_bytes = inflating.unconsumed_tail, left_bytes - len(piece)
            if left_bytes < 0:
                raise ValueError(f"unpacks to more than {most_bytes} bytes")
    except zlib.error as error:
        raise ValueError(f"cannot be unpacked: {error}") from None
    if not inflating.eof:
        raise ValueError("cannot be unpacked: it is cut off")
    return b"".join(pieces)


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a closed log: frames, bytes with heads, CRC-32 of the frames' CRCs."""

    frames: int
    bytes: int
    checksum: int


class Framer:
    """Encoder of one log's payloads as frames, in order; keeps the totals for its end."""

    def __init__(self, before: LogEnd | None = None) -> None:
        """Continue behind a file's existing contents; None: an empty file."""
        before = before or LogEnd(frames=0, bytes=0, checksum=0)
        self._frames, self._bytes, self._checksum = before.frames, before.bytes, before.checksum

    def frame(self, payload: bytes) -> bytes:
        """Return the frame of a payload. Raises ValueError for a size outside the limits."""
        if not 0 < len(payload) <= MOST_BYTES:
            raise ValueError(f"a record of {len(payload)} bytes, not 1 to {MOST_BYTES}")
        head = _HEAD.pack(_RECORD, self._frames, len(payload))
        crc = _CRC.pack(zlib.crc32(payload, zlib.crc32(head)))
        self._frames += 1
        self._bytes += _HEAD_BYTES + len(payload)
        self._checksum = zlib.crc32(crc, self._checksum)
        return head + crc + payload

    @property
    def extent(self) -> LogEnd:
        """Return the totals of the frames so far."""
        return LogEnd(frames=self._frames, bytes=self._bytes, checksum=self._checksum)

    def end(self) -> bytes:
        """Return the end of the log as it is now."""
        payload = _END_PAYLOAD.pack(self._frames, self._bytes, self._checksum)
        head = _HEAD.pack(_END, self._frames, len(payload))
        return head + _CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload


@dataclass(slots=True, kw_only=True)
class Extent:
    """The readable part of a log: frames, bytes, and the CRC-32 of the frames' CRCs.

    lost_frames   are missing by their numbers
    lost_bytes    belong to no whole frame, before the last one that was read; torn_bytes: behind it
    end           what the log was closed with, None where there is nothing of the kind at its end
    """

    frames: int = 0
    bytes: int = 0
    checksum: int = 0
    lost_frames: int = 0
    lost_bytes: int = 0
    torn_bytes: int = 0
    end: LogEnd | None = None


class Unframer:
    """Decoder of a log's bytes, in pieces of any size, into payloads; keeps its `extent`.

    Before the first payload behind something that was lost stands a GAP.
    """

    def __init__(self) -> None:
        self.extent = Extent()
        self._pending = bytearray()
        self._next = 0  # number of the next frame
        self._vain_bytes = 0
        self._is_behind_gap = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add the next bytes and return the completed payloads."""
        self._pending += data
        return self._take(last=False)

    def finish(self) -> list[bytes]:
        """Return the payloads behind an incomplete frame at the end of the log.

        Nothing more comes: the bytes only looked like the beginning of a frame.

        More may be fed all the same, where a log was read that still grows.
        """
        return self._take(last=True)

    @property
    def is_hopeless(self) -> bool:
        """Return whether the rest of the log is unreadable at any length."""
        return self._vain_bytes >= _MOST_VAIN_BYTES

    def put_back(self) -> int:
        """Drop the bytes of an incomplete last frame, to be fed again; return their number."""
        size = len(self._pending)
        self._pending.clear()
        return size

    def skip(self, size: int) -> None:
        """Count unread bytes as lost."""
        self._lose(size)

    def _take(self, *, last: bool) -> list[bytes]:
        payloads: list[bytes] = []
        del self._pending[: self._take_frames(payloads, last=last)]
        if last:
            self._lose(len(self._pending))
            self._pending.clear()
        return payloads

    def _take_frames(self, payloads: list[bytes], *, last: bool) -> int:
        data, at = self._pending, 0
        while len(data) - at >= _HEAD_BYTES:
            magic, number, length = _HEAD.unpack_from(data, at)
            end = at + _HEAD_BYTES + length
            if magic in (_RECORD, _END) and 0 < length <= MOST_BYTES:
                if end > len(data) and not last:
                    return at  # the rest of it may come
                if end <= len(data) and self._accept(at, end, magic, number, payloads):
                    at = end
                    continue
            following = data.find(_MAGIC, at + 1) if self._vain_bytes < _MOST_VAIN_BYTES else -1
            if following < 0:
                following = len(data) if last else max(at + 1, len(data) - len(_MAGIC))
            self._vain_bytes += following - at
            self._lose(following - at)
            at = following
        return at

    def _accept(self, begin: int, end: int, magic: bytes, number: int, payloads: list[bytes]) -> bool:
        """Take the frame of these bytes if its checksum is right; return whether it is."""
        data = memoryview(self._pending)
        head_end = begin + _HEAD.size
        crc, payload = bytes(data[head_end : begin + _HEAD_BYTES]), bytes(data[begin + _HEAD_BYTES : end])
        right = zlib.crc32(payload, zlib.crc32(data[begin:head_end]))
        data.release()
        if _CRC.pack(right) != crc:
            self._vain_bytes += end - begin
            return False
        extent = self.extent
        if magic == _END:
            extent.lost_frames += max(0, number - self._next)
            self._next = max(self._next, number)
            frames, size, checksum = _END_PAYLOAD.unpack(payload) if len(payload) == _END_PAYLOAD.size else (0, 0, 0)
            extent.end = LogEnd(frames=frames, bytes=size, checksum=checksum)
            extent.lost_bytes, extent.torn_bytes = extent.lost_bytes + extent.torn_bytes, 0
        elif number < self._next:  # it came before
            self._lose(end - begin)
        else:
            if number > self._next or self._is_behind_gap:
                payloads.append(GAP)
                self._is_behind_gap = False
            extent.lost_frames += number - self._next
            self._next = number + 1
            payloads.append(payload)
            self._keep(end - begin, crc)
        return True

    def _keep(self, size: int, crc: bytes) -> None:
        extent = self.extent
        extent.frames += 1
        extent.bytes += size
        extent.checksum = zlib.crc32(crc, extent.checksum)
        extent.lost_bytes, extent.torn_bytes, extent.end = extent.lost_bytes + extent.torn_bytes, 0, None

    def _lose(self, size: int) -> None:
        if size:
            self.extent.torn_bytes += size
            self.extent.end = None
            self._is_behind_gap = True
