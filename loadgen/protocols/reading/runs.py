"""Runs of events that differ in one text alone: read at once, not event by event.

Nearly all events of a stream are in such runs.

A stream repeats an event's JSON around the text that is new. Where that frame is known from one event, splitting the
body by it gives the texts of all that follow. What does not fit ends the run and is read like any other event, so that
a run says exactly what its events would say one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, count
from operator import add

import msgspec

from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.failures import UNREADABLE

# Where an event may hold its text: a string that is not empty.
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)": ?"(?=[^"])')
# The inside of a JSON string; the second, of several that line feeds separate, which no string may hold as they are.
_STRING = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+')
_STRINGS = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f]|\n)*+')
_FIELD, _BLANK = b"data: ", b"\n\n"
_KEY_BYTES = 16
# A run is no longer than a session's next turn may hold up the event loop, and looks no further ahead than that takes.
_MOST_EVENTS, _TEXT_BYTES = 24, 256
PROBE = "probe"

_decode = msgspec.json.Decoder(list[str]).decode


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The bytes of an event before and after its text. They begin with the field's name and end with the blank line.

    `at` is where the next event of the stream begins, which has the same frame.
    """

    before: bytes
    after: bytes
    at: int

    @property
    def probe(self) -> bytes:
        """Return an event's data with PROBE for its text: decoding it tells what the frame makes of a text."""
        return probe_in(self.before.removeprefix(_FIELD), self.after.removesuffix(_BLANK))


class PlainEvent(msgspec.Struct, frozen=True, gc=False):
    """The meaning of an event that carries one choice's text alone: its reply's id, its choice, the kind of text."""

    response_id: str
    choice: int
    reasoning: bool


class EventRun(msgspec.Struct, frozen=True, gc=False):
    """Events behind one another in one frame: where the data line of each ends, and its text."""

    ends: list[int]
    texts: list[str]


def probe_in(before: bytes, after: bytes) -> bytes:
    """Return PROBE between the bytes before and after a text."""
    return before + PROBE.encode() + after


def around_text(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the bytes of an event's data before and after its text; None without a text."""
    if (text := _TEXT.search(data)) is None:
        return None
    string = _STRING.match(data, text.end())
    return data[: text.end()], data[string.end() if string else text.end() :]


def texts_of(strings: Sequence[bytes]) -> list[str | None]:
    """Return the texts of JSON strings given without their quotes; None for those that are none."""
    joined = b"\n".join(strings)
    if _STRINGS.fullmatch(joined):
        with suppress(*UNREADABLE):
            return list(_decode(b'["' + joined.replace(b"\n", b'","') + b'"]'))
    return [None] if len(strings) == 1 else [text for string in strings for text in texts_of([string])]


def frame_of(stream: bytes, event: SseEvent) -> Frame | None:
    """Return the frame of an event's text if the next event shares it, else None."""
    raw, at = event.data, event.end + 1
    line = _FIELD + raw + _BLANK
    if event.name or stream[at - len(line) : at] != line or (around := around_text(raw)) is None:
        return None
    before, after = _FIELD + around[0], around[1] + _BLANK
    if not stream.startswith(before, at):
        return None
    stop = stream.find(_BLANK, at) + len(_BLANK)
    return Frame(before, after, at) if stream.startswith(after, stop - len(after)) else None


def run_of(stream: bytes, frame: Frame) -> EventRun | None:
    """Return the next events in a frame, 25 at most; None where their texts cannot be read."""
    first, key = frame.at + len(frame.before), frame.before[-_KEY_BYTES:]
    rest = frame.after + frame.before.removesuffix(key)
    # By a few bytes of the frame, which costs half as much as by all of them; the others are compared in one go.
    ahead = stream[first : first + _MOST_EVENTS * (len(rest) + len(key) + _TEXT_BYTES)]
    *between, last = ahead.split(key, _MOST_EVENTS)
    pieces = [piece[: -len(rest)] for piece in between]
    if rest.join([*pieces, b""]) != b"".join(between) or b"\n" in b"".join(pieces):
        # Something else stood between two events, or one was broken off.
        odd = next(n for n, piece in enumerate(between) if not piece.endswith(rest) or b"\n" in pieces[n])
        pieces, last = pieces[:odd], between[odd]
    text, closed, _ = last.partition(frame.after)
    if closed and b"\n" not in text:
        pieces.append(text)
    joined = b"\n".join(pieces)
    whole = _STRINGS.match(joined)
    if whole is not None and whole.end() < len(joined):
        pieces = pieces[: joined.count(b"\n", 0, whole.end())]
        joined = b"\n".join(pieces)
    if not pieces:
        return None
    try:
        texts = _decode(b'["' + joined.replace(b"\n", b'","') + b'"]')
    except UNREADABLE:
        return None
    step = len(frame.after) + len(frame.before)
    ends = map(add, accumulate(map(len, pieces)), count(frame.at - 1 + step, step))
    return EventRun(list(ends), texts)
