"""The log of timings: each reply of a `/perf_metrics` as it came, and of the clock that its stamps are by.

Raw bytes rather than columns, as with spans: reading `/perf_metrics` empties it, so what was not kept is gone for good.
What the bytes mean is `perf_metrics`' business.
"""

from __future__ import annotations

import os
import zlib

import msgspec

from rundir.frames import FrameLog
from scraper.targets.fetch import Scrape

_COMPRESSION_LEVEL = 1


class ReplyRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One reply, or why there was none: stamps are int64 ns Unix, `packed` is the body in zlib, empty with an error.

    `url` is masked; `status` is that of HTTP, 0 where there was no reply.
    """

    url: str
    request_ns: int
    response_ns: int
    status: int
    error: str
    packed: bytes

    def body(self) -> bytes:
        """Return the bytes of the reply. Raises zlib.error for what `TimingLog` has not written."""
        return zlib.decompress(self.packed) if self.packed else b""


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[ReplyRecord] = msgspec.msgpack.Decoder(ReplyRecord)


class TimingLog:
    """Owns an append-only file of replies."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._frames = FrameLog(path)

    def append(self, scrape: Scrape) -> str:
        """Write one reply, unless it is an empty list; return its error.

        Raises OSError when it cannot be written whole, as on a full disk.
        """
        if scrape.error or scrape.body.strip() != b"[]":
            self._frames.append(_encode(record_of(scrape)))
        return scrape.error

    def close(self) -> None:
        """Close the file."""
        self._frames.close()


def record_of(scrape: Scrape) -> ReplyRecord:
    """Return the record of one reply."""
    return ReplyRecord(
        url=scrape.url,
        request_ns=scrape.request_ns,
        response_ns=scrape.response_ns,
        status=scrape.status,
        error=scrape.error,
        packed=b"" if scrape.error else zlib.compress(scrape.body, _COMPRESSION_LEVEL),
    )


def decode(payload: bytes) -> ReplyRecord:
    """Return what one payload of the log says. Raises msgspec.DecodeError on what `TimingLog` has not written."""
    return _decoder.decode(payload)
