"""Streams of a JSON object a line (NDJSON)."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.protocols.sse import SseEvent


def lines(stream: bytes) -> Iterator[SseEvent]:
    """Give the lines of a stream that may be torn anywhere, as events without a name.

    A line ends with LF, or CRLF; blank ones are left out; one without its end was not received, and is not used.
    """
    at = 0
    while (stop := stream.find(b"\n", at)) >= 0:
        line = stream[at:stop].strip()
        at = stop + 1
        if line:
            yield SseEvent("", line, at)
