"""Events of a stream and the positions of their ends.

They are server-sent ones by the WHATWG standard, and JSON lines.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

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
