"""Segments of a reply's body, read one by one. So no reply need be in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from loadgen.http1 import Dechunked, Dechunker, Head, ProtocolError, is_chunked
from loadgen.records import MOST_MESSAGE_BYTES

NO_BODY = Dechunked(data=b"", data_starts=[0], wire_starts=[0])


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of data to read at once: `data`, which begins at `begin` in the reply.

    piece    what of the reply came new; of it the segment may leave the rest to the next one, and begin before it
    is_last  nothing follows
    """

    data: bytes
    begin: int
    piece: Dechunked
    is_last: bool


NOTHING = Segment(data=b"", begin=0, piece=NO_BODY, is_last=True)


def plain(wire: bytes) -> Dechunked:
    """Wrap a piece that has no chunk framing."""
    return Dechunked(data=wire, data_starts=[0], wire_starts=[0])


def unframing(head: Head) -> Callable[[bytes], Dechunked]:
    """Return a function that removes the framing from a body's pieces, in order.

    It raises ProtocolError where the framing is malformed. Raises ProtocolError on a coding that was not requested.
    """
    encoding = head.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ProtocolError(f"content-encoding {encoding!r} was not asked for")
    return Dechunker().feed if is_chunked(head) else plain


def segments(pieces: Iterator[Dechunked], breaks: Sequence[bytes]) -> Iterator[Segment]:
    """Yield one segment per piece, ending at the last of `breaks`.

    An event begins behind a break. At the end of the pieces the segment takes all that is left.

    Raises ProtocolError where more than MOST_MESSAGE_BYTES lie between two of them.
    """
    begin, pending = 0, b""
    piece = next(pieces, None)
    while piece is not None:
        following = next(pieces, None)
        data = pending + piece.data
        cut = len(data) if following is None else _cut(data, breaks, len(pending))
        if len(data) - cut > MOST_MESSAGE_BYTES:
            raise ProtocolError(f"more than {MOST_MESSAGE_BYTES >> 20} MiB without the end of an event")
        yield Segment(data=data[:cut], begin=begin, piece=piece, is_last=following is None)
        begin, pending, piece = begin + cut, data[cut:], following


def _cut(data: bytes, breaks: Sequence[bytes], searched: int) -> int:
    """Return the end of the last of `breaks`, 0 without one. The first `searched` bytes hold none."""
    ends = (data.rfind(mark, max(0, searched - len(mark) + 1)) + len(mark) for mark in breaks)
    return max((end for end, mark in zip(ends, breaks, strict=True) if end >= len(mark)), default=0)
