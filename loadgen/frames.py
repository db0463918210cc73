"""Self-delimiting records in an append-only file.

A frame is `<II` (length and CRC-32 of the payload) and the payload. What a killed process had written stays readable:
a reader stops quietly where a frame is torn or does not match its checksum.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from loadgen.records import PLAN_END, LogRecord, PlannedRequest

_PREFIX = struct.Struct("<II")
_BLOCK_BYTES = 1 << 18

_encode = msgspec.msgpack.Encoder().encode
# One record of a plan, one of a worker's log; they raise msgspec.DecodeError on anything else.
decode_planned = msgspec.msgpack.Decoder(PlannedRequest).decode
decode_log: Callable[[bytes], LogRecord] = msgspec.msgpack.Decoder(LogRecord).decode


def open_log(path: str | os.PathLike[str]) -> int:
    """Open (or create) a log for appending and return its file descriptor, the caller's to close."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def append_frame(fd: int, payload: bytes) -> None:
    """Append one frame, by one write unless the system splits it.

    Raises OSError when it cannot be written whole, as on a full disk.
    """
    rest = memoryview(_PREFIX.pack(len(payload), zlib.crc32(payload)) + payload)
    while rest:
        rest = rest[os.write(fd, rest) :]


def append_record(fd: int, record: PlannedRequest | LogRecord) -> None:
    """Append one record of the load generator."""
    append_frame(fd, _encode(record))


def split_frames(data: bytes | bytearray) -> tuple[list[bytes], int]:
    """Whole frames of `data`, and the position behind the last of them.

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
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115  # this object owns it
        self._pending = bytearray()

    def read_new(self) -> list[bytes]:
        """The payloads that became readable, in order."""
        # A frame may be longer than a block: go on until one is whole or the file ends.
        while block := self._file.read(_BLOCK_BYTES):
            self._pending += block
            payloads, end = split_frames(self._pending)
            if payloads:
                del self._pending[:end]
                return payloads
        return []

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_frames(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The payloads of a log up to its end or its tear."""
    with FrameTail(path) as tail:
        while payloads := tail.read_new():
            yield from payloads


def read_plan(path: str | os.PathLike[str]) -> Iterator[PlannedRequest]:
    """The requests of a plan, without its end record; fewer than planned where it was torn."""
    for payload in read_frames(path):
        planned = decode_planned(payload)
        if planned.index == PLAN_END:
            return
        yield planned


def read_log(path: str | os.PathLike[str]) -> Iterator[LogRecord]:
    """The records of a worker's log up to its end or its tear."""
    yield from map(decode_log, read_frames(path))
