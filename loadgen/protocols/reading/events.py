"""Events of a stream with the positions of their ends, and segments of a body.

Events are server-sent ones by the WHATWG standard, and JSON lines. A body is read for them segment by segment, so that
no reply need be in memory as a whole.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sidelight.loadgen.http1 import Dechunked, Dechunker, Head, ProtocolError, is_chunked
from sidelight.loadgen.records import MOST_MESSAGE_BYTES

_LINE_END = re.compile(rb"\r\n|\n|\r")
# What nearly every event is: one line of data. Read at once, since a report reads millions.
_PLAIN = re.compile(rb"data: ([^\r\n]*)\n\n")
# Each ends an event, whatever stands before it, in the way that all of a stream's lines end.
BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ERROR = "error"


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One event; `end` is the position behind its last data line, line end included."""

    name: str
    data: bytes
    end: int


def events(stream: bytes, at: int = 0) -> Iterator[SseEvent]:
    """Yield the events of a stream from position `at` on. An event begins at `at`; the stream may be torn anywhere.

    - lines end with CRLF, LF or CR; a byte order mark at the start is skipped
    - comments (keep-alives) and the fields id and retry are ignored; several data lines are joined by a newline
    - a field `error` (llama.cpp until September 2025), and the comments of an `event: error` without data (Dynamo), are
      the data of an event named error (the standard would drop both)
    - a line without its end was not received, and is not used
    - whole data lines at the end of the stream count even without the blank line that should follow: the draft takes
      T_first from the complete data line (the standard would drop the event)
    """
    at = at or (len(_BYTE_ORDER_MARK) if stream.startswith(_BYTE_ORDER_MARK) else 0)
    name = ""
    data: list[bytes] = []
    comments: list[bytes] = []
    end = at
    while True:
        while not (data or name) and (plain := _PLAIN.match(stream, at)):
            at = plain.end()
            yield SseEvent("", plain[1], at - 1)
        if (match := _LINE_END.search(stream, at)) is None:
            break
        line = stream[at : match.start()]
        at = match.end()
        if not line:
            if data or name == _ERROR:
                yield SseEvent(name, b"\n".join(data or comments), end if data else at)
            name, data, comments = "", [], []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
            end = at
        elif not field:
            comments.append(value)
        elif field == b"error":
            name, data, end = _ERROR, [*data, value], at
        elif field == b"event":
            name = value.decode(errors="replace")
    if data or name == _ERROR:
        yield SseEvent(name, b"\n".join(data or comments), end if data else at)


def lines(stream: bytes, at: int = 0) -> Iterator[SseEvent]:
    """Yield the lines of a stream from `at` on, as events without a name. The stream may be torn anywhere.

    A line ends with LF, or CRLF; blank ones are left out; one without its end was not received, and is not used.
    """
    while (stop := stream.find(b"\n", at)) >= 0:
        line = stream[at:stop].strip()
        at = stop + 1
        if line:
            yield SseEvent("", line, at)


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
