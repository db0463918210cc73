"""Whole streamed replies, many at once: lines, chunks, frames and texts as arrays.

A stream repeats an event's JSON around the text that is new. Events in one frame are found by comparing rows of bytes;
any other event goes to `Form.take`, in its place. A reply that does not consist of whole events, in whole chunks where
it is chunked, is read by `read_parts`. So each reply is the same as when it is read alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from sidelight.loadgen.http1 import ProtocolError, is_chunked
from sidelight.loadgen.protocols.reading.content import is_blank, is_unseen
from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.reply import Reads, Reply, read_parts, reply_of
from sidelight.loadgen.protocols.reading.runs import PlainEvent, around_text, probe_in, texts_of
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState, content_type, parse_known_head, take_event
from sidelight.rundir.columns import Bools, Indices, Ints

Bytes = NDArray[np.uint8]

# Kinds of lines, each without its line feed: data; none; the end of a chunk; a chunk's size, or what else ends with CR.
_OTHER, _DATA, _EMPTY, _CLOSE, _SIZE = range(5)
# Kinds that may follow one another within a reply.
_FOLLOWS = np.zeros((5, 5), np.bool_)
_FOLLOWS[
    [_DATA, _EMPTY, _EMPTY, _CLOSE, _SIZE, _SIZE], [_EMPTY, _DATA, _CLOSE, _SIZE, _DATA, _CLOSE]
] = True  # fmt: skip
_LINE_FEED, _CARRIAGE_RETURN = b"\n\r"
_FIELD = np.frombuffer(b"data: ", np.uint8)
_BLANK, _LAST_CHUNK = b"\n\n", b"\r\n0\r\n\r\n"
_SIZE_DIGITS = 6
_DIGITS = np.full(256, -(1 << 30), np.int64)  # anything but digits makes a size negative
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = range(16)
_DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = range(10, 16)
# Of the bytes of a text: those that show as they are, those that do not, and those that need decoding.
_SHOWS, _DECODED = 1, 2
_CLASSES = np.full(256, _DECODED, np.uint8)
_CLASSES[0x20], _CLASSES[0x21:0x7F] = 0, _SHOWS
_CLASSES[np.frombuffer(b'"\\', np.uint8)] = _DECODED
_ID = re.compile(rb'"id": ?"([\w.:-]+)"')
# A reply has one frame, or one for its reasoning and one for its content; fewer events than this are taken singly.
_MOST_FRAMES, _LEAST_EVENTS = 3, 6

LEAST_REPLIES = 6  # for fewer, arrays cost more than they save


class WholeReply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One reply in memory: its HTTP status, its raw head, and all reads of its body."""

    http_status: int
    head: bytes
    reads: Reads


@lru_cache(maxsize=64)
def _is_chunked(kinds: frozenset[str], head: bytes) -> bool | None:
    """Return whether the body of a stream of these kinds is in chunks; None for any other reply."""
    try:
        parsed = parse_known_head(head)
    except ProtocolError:
        return None
    is_plain = parsed.headers.get("content-encoding", "identity").lower() == "identity"
    return is_chunked(parsed) if is_plain and content_type(parsed) in kinds else None


def may_join(form: Form, reply: WholeReply) -> bool:
    """Return whether a reply may be read together with others: it is a stream that came to its end."""
    reads = reply.reads
    if form.plain is None or reply.http_status != 200 or not len(reads.ends) == len(reads.stamps_ns) > 0:
        return False
    chunked = _is_chunked(form.kinds, reply.head)
    return chunked is not None and reads.body.endswith(_LAST_CHUNK if chunked else _BLANK)


def read_whole(form: Form, replies: Sequence[WholeReply]) -> list[Reply]:
    """Read replies that each `may_join`, as `read_parts` does."""
    if len(replies) < LEAST_REPLIES:
        return [read_parts(form, reply.http_status, reply.head, [reply.reads]) for reply in replies]
    events = _events(form, replies)
    stamps_ns = events.stamps_ns.tolist()
    return [
        read_parts(form, reply.http_status, reply.head, [reply.reads])
        if (seen := _state(form, events, number)) is None
        else _reply(seen, events.stamps_ns, stamps_ns)
        for number, reply in enumerate(replies)
    ]


def _reply(seen: ReplyState, stamps_ns: Ints, listed_ns: list[int]) -> Reply:
    """Return the reply of a state with numbers of events for positions. The stamps of events are given twice."""
    ends, seen.settled, seen.ends = np.array(seen.ends, np.int64), len(seen.ends), []
    outputs_ns = {number: [listed_ns[first], listed_ns[last]] for number, (first, last) in seen.outputs.items()}
    choice_of = np.array(seen.choice_of, np.int64) if len(seen.choices) > 1 else np.zeros(len(ends), np.int64)
    columns = stamps_ns[ends], np.array(seen.chars, np.int64), choice_of
    return reply_of(seen, columns, outputs_ns, listed_ns[seen.done_end] if seen.done_end >= 0 else -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Lines of several bodies behind one another; those of body i lie between entries i and i + 1 of `firsts`."""

    begins: Indices
    stops: Indices
    kinds: NDArray[np.int8]
    firsts: Indices

    @property
    def owners(self) -> Indices:
        return np.repeat(np.arange(len(self.firsts) - 1), np.diff(self.firsts))


def _lines(wire: Bytes, bounds: Ints) -> _Lines:
    """Return the lines of bodies. Each body ends with a line."""
    stops = np.flatnonzero(wire == _LINE_FEED)
    begins = np.append(0, stops[:-1] + 1)
    lengths = stops - begins
    returns = wire[stops - 1] == _CARRIAGE_RETURN
    kinds = np.full(len(stops), _OTHER, np.int8)
    kinds[lengths == 0] = _EMPTY
    kinds[returns] = np.where(lengths[returns] == 1, _CLOSE, _SIZE)
    data = np.flatnonzero((lengths >= len(_FIELD)) & ~returns)
    kinds[data[(_rows(wire, begins[data], len(_FIELD)) == _FIELD).all(axis=1)]] = _DATA
    return _Lines(begins=begins, stops=stops, kinds=kinds, firsts=stops.searchsorted(bounds))


def _rows(wire: Bytes, begins: Indices, length: int) -> NDArray[np.uint8]:
    """Return the bytes from each position on, uint8[len(begins), length]."""
    windows = np.lib.stride_tricks.as_strided(wire, (max(0, len(wire) - length + 1), length), (1, 1), writeable=False)
    rows: NDArray[np.uint8] = windows[begins]
    return rows


def _counts(places: Indices, bounds: Indices | Ints) -> Ints:
    """Return the number of places between each two bounds."""
    return np.diff(places.searchsorted(bounds))


def _shaped(wire: Bytes, bounds: Ints, lines: _Lines, chunked: Bools) -> Bools:
    """Return a flag for each body: it consists of whole events, in whole chunks where it is chunked."""
    kinds, firsts = lines.kinds, lines.firsts
    follows = _FOLLOWS[kinds[:-1], kinds[1:]]
    follows[firsts[1:-1] - 1] = True
    last_chunks = np.flatnonzero((kinds[:-1] == _SIZE) & (kinds[1:] == _CLOSE))
    returns = _counts(np.flatnonzero(wire == _CARRIAGE_RETURN), bounds)
    shaped: Bools = (
        (_counts(np.flatnonzero(~follows), firsts) == 0)
        & (kinds[firsts[:-1]] == np.where(chunked, _SIZE, _DATA))
        & (kinds[firsts[1:] - 1] == np.where(chunked, _CLOSE, _EMPTY))
        & (_counts(last_chunks, firsts) == chunked)
        # A carriage return elsewhere ends a line as well.
        & (returns == np.where(chunked, _counts(np.flatnonzero(kinds >= _CLOSE), firsts), 0))
    )
    owners = lines.owners
    sizes, closes = (np.flatnonzero((kinds == kind) & shaped[owners]) for kind in (_SIZE, _CLOSE))
    stated = _stated(wire, lines.begins[sizes], lines.stops[sizes] - 1 - lines.begins[sizes])
    shaped[owners[sizes[stated != lines.begins[closes] - lines.stops[sizes] - 1]]] = False
    return shaped


def _stated(wire: Bytes, begins: Indices, digits: Indices) -> Ints:
    """Return the numbers in hexadecimal digits; a negative one for other bytes and for too many digits."""
    numbers = np.where(digits > _SIZE_DIGITS, -1, 0)
    for place in range(min(_SIZE_DIGITS, int(digits.max(initial=0)))):
        longer = np.flatnonzero((digits > place) & (digits <= _SIZE_DIGITS))
        numbers[longer] = numbers[longer] * 16 + _DIGITS[wire[begins[longer] + place]]
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """The frames of events: the number of each event's frame, -1 of none, and the place of its text."""

    plain: list[PlainEvent]
    of: Ints
    begins: Indices
    lengths: Indices


def _frames(form: Form, stream: bytes, begins: Indices, stops: Indices, firsts: Indices) -> _Frames:
    """Return the frames of events: in each reply that of the middle event, then of the middle one of the others."""
    wire = np.frombuffer(stream, np.uint8)
    owners = np.repeat(np.arange(len(firsts) - 1), np.diff(firsts))
    frames = _Frames(plain=[], of=np.full(len(begins), -1), begins=begins.copy(), lengths=np.zeros_like(begins))
    known: dict[tuple[bytes, ...], PlainEvent] = {}
    for _ in range(_MOST_FRAMES):
        others = np.flatnonzero(frames.of < 0)
        bounds = others.searchsorted(firsts)
        replies = np.flatnonzero(np.diff(bounds) >= _LEAST_EVENTS)
        # Of each reply: the event with which its others are compared, and the bytes before and after its text.
        model, before, after, number = (np.full(len(firsts) - 1, -1) for _ in range(4))
        model[replies] = events = others[(bounds[replies] + bounds[replies + 1]) // 2]
        cuts = (begins[events] + len(_FIELD)).tolist(), stops[events].tolist()
        for reply, begin, stop in zip(replies.tolist(), *cuts, strict=True):
            around = around_text(stream[begin:stop])
            if around is not None and (plain := _meaning(form, *around, known)) is not None:
                before[reply], after[reply] = len(_FIELD) + len(around[0]), len(around[1])
                number[reply] = len(frames.plain)
                frames.plain.append(plain)
        framed = others[number[owners[others]] >= 0]
        if not len(framed):
            break
        framed = framed[stops[framed] - begins[framed] >= (before + after)[owners[framed]]]
        for length in np.unique(before[before >= 0]):
            framed = _without(framed, wire, begins, begins[model], owners, before, length)
        for length in np.unique(after[after >= 0]):
            framed = _without(framed, wire, stops - length, stops[model] - length, owners, after, length)
        of = owners[framed]
        frames.of[framed] = number[of]
        frames.begins[framed] += before[of]
        frames.lengths[framed] = stops[framed] - after[of] - frames.begins[framed]
    return frames


def _meaning(form: Form, before: bytes, after: bytes, known: dict[tuple[bytes, ...], PlainEvent]) -> PlainEvent | None:
    """Return the meaning of a frame, None where it is not plain.

    Frames that differ in the reply's id alone are decoded once. The id's place is certain where a frame has no other
    `id`, and no escape.
    """
    stated = _ID.search(before)
    key = (before[: stated.start(1)], before[stated.end(1) :], after) if stated else (before, after)
    if stated and (plain := known.get(key)):
        return PlainEvent(stated[1].decode(), plain.choice, plain.reasoning)
    plain = form.plain(probe_in(before, after)) if form.plain else None
    if plain and stated and plain.response_id == stated[1].decode():
        whole = before + after
        if whole.count(b'"id"') == 1 and b"\\" not in whole:
            known[key] = plain
    return plain


def _without(
    events: Indices, wire: Bytes, begins: Indices, models: Indices, owners: Indices, lengths: Ints, length: int
) -> Indices:
    """Return the events without those that differ from their reply's model.

    Compared are `length` bytes, in replies with this one of `lengths`.
    """
    concerned = np.flatnonzero(lengths[owners[events]] == length)
    places = events[concerned]
    rows, model_rows = _rows(wire, begins[places], length), _rows(wire, models[owners[places]], length)
    return np.delete(events, concerned[(rows != model_rows).any(axis=1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Events:
    """The events of several replies, and of those in a frame their texts.

    stream     the bodies behind one another; an event's data lies between `begins` and `stops`
    stamps_ns  when each event was read
    firsts     the place in `runs` at which each reply begins; a reply without events is to be read alone
    runs       the first event of each stretch in one frame, and each event without a frame; last the number of events
    frames     the frame of each event, a place in `plain`; -1 of none
    filled     the number of `texts` before each event
    texts      the events in a frame with a text; `chars` are its characters
    visible, unseen  of these, the events with visible text, and with unseen characters only
    """

    stream: bytes
    begins: list[int]
    stops: list[int]
    stamps_ns: Ints
    firsts: list[int]
    runs: list[int]
    frames: list[int]
    plain: list[PlainEvent]
    filled: list[int]
    texts: list[int]
    chars: list[int]
    visible: list[int]
    unseen: list[int]


def _events(form: Form, replies: Sequence[WholeReply]) -> _Events:
    bodies = [reply.reads.body for reply in replies]
    stream = b"".join(bodies)
    wire = np.frombuffer(stream, np.uint8)
    bounds = np.array([0, *accumulate(map(len, bodies))])
    lines = _lines(wire, bounds)
    chunked = np.array([_is_chunked(form.kinds, reply.head) for reply in replies], np.bool_)
    shaped = _shaped(wire, bounds, lines, chunked)
    stamps_ns, ends = _reads(replies, bounds, shaped)
    data = np.flatnonzero((lines.kinds == _DATA) & shaped[lines.owners])
    begins, stops, firsts = lines.begins[data], lines.stops[data], data.searchsorted(lines.firsts)
    frames = _frames(form, stream, begins, stops, firsts)
    texts, chars, visible, unseen = _texts(stream, frames)
    # No two replies share a frame's number.
    is_first = (frames.of[1:] < 0) | (frames.of[1:] != frames.of[:-1])
    runs = np.concatenate([[0], np.flatnonzero(is_first) + 1, [len(begins)]])
    return _Events(
        stream=stream,
        begins=(begins + len(_FIELD)).tolist(),
        stops=stops.tolist(),
        stamps_ns=stamps_ns[ends.searchsorted(stops + 1)],
        firsts=runs.searchsorted(firsts).tolist(),
        runs=runs.tolist(),
        frames=frames.of.tolist(),
        plain=frames.plain,
        filled=texts.searchsorted(np.arange(len(begins) + 1)).tolist(),
        texts=texts.tolist(),
        chars=chars.tolist(),
        visible=texts[visible].tolist(),
        unseen=texts[unseen].tolist(),
    )


def _reads(replies: Sequence[WholeReply], bounds: Ints, shaped: Bools) -> tuple[Ints, Ints]:
    """Return the stamp of each read, and how far all bodies had come by then.

    Replies whose reads are not in order are marked as not `shaped`.
    """
    counts = [len(reply.reads.ends) for reply in replies]
    stated = np.concatenate([reply.reads.ends for reply in replies]) + np.repeat(bounds[:-1], counts)
    ends = np.maximum.accumulate(np.minimum(stated, np.repeat(bounds[1:], counts)))
    shaped[np.repeat(np.arange(len(replies)), counts)[ends != stated]] = False
    shaped[stated[np.cumsum(counts) - 1] != bounds[1:]] = False
    return np.concatenate([reply.reads.stamps_ns for reply in replies]), ends


def _texts(stream: bytes, frames: _Frames) -> tuple[Indices, Ints, Bools, Bools]:
    """Return the events with a text, its characters, and whether it is visible or unseen.

    An event whose text cannot be read is taken out of its frame.
    """
    full = np.flatnonzero((frames.of >= 0) & (frames.lengths > 0))
    chars = frames.lengths[full]
    starts = np.cumsum(chars) - chars
    places = np.arange(chars.sum()) + np.repeat(frames.begins[full] - starts, chars)
    classes = np.bitwise_or.reduceat(_CLASSES[np.frombuffer(stream, np.uint8)[places]], starts)
    visible, unseen, readable = classes & _SHOWS > 0, np.zeros(len(full), np.bool_), np.ones(len(full), np.bool_)
    coded = np.flatnonzero(classes & _DECODED)
    begins = frames.begins[full[coded]]
    strings = [stream[a:b] for a, b in zip(begins.tolist(), (begins + chars[coded]).tolist(), strict=True)]
    texts = texts_of(strings)
    readable[coded] = [text is not None for text in texts]
    chars[coded] = [len(text or "") for text in texts]
    visible[coded] = [not is_blank(text or "") for text in texts]
    unseen[coded] = [is_unseen(text or "") for text in texts]
    frames.of[full[~readable]] = -1
    return full[readable], chars[readable], visible[readable], unseen[readable]


def _state(form: Form, events: _Events, number: int) -> ReplyState | None:
    """Return the state of a reply behind its last event; None if it is to be read alone."""
    begin, end = events.firsts[number : number + 2]
    if begin == end:
        return None
    seen = ReplyState()
    for first, stop in pairwise(events.runs[begin : end + 1]):
        frame = events.frames[first]
        if frame < 0:
            _take(seen, form, events, first)
        else:
            _take_run(seen, form, events, range(first, stop), events.plain[frame])
    return seen


def _take(seen: ReplyState, form: Form, events: _Events, event: int) -> None:
    take_event(seen, form, SseEvent("", events.stream[events.begins[event] : events.stops[event]], event))


def _take_run(seen: ReplyState, form: Form, events: _Events, run: range, plain: PlainEvent) -> None:
    filled, first, stop = events.filled, run.start, run.stop
    # Without a text the first event of a choice may name a role alone.
    while first < stop and filled[first] == filled[first + 1] and plain.choice not in seen.choices:
        _take(seen, form, events, first)
        first += 1
    if first == stop:
        return
    before, texts = filled[first], slice(filled[first], filled[stop])
    shows = bisect_left(events.visible, first) if seen.first_visible < 0 else len(events.visible)
    visible = events.visible[shows] if shows < len(events.visible) else stop
    unseen = events.unseen[bisect_left(events.unseen, first) : bisect_left(events.unseen, stop)]
    seen.response_id = seen.response_id or plain.response_id
    seen.add_run(
        stop - first,
        (first, stop - 1),
        events.texts[texts],
        events.chars[texts],
        visible=filled[visible] - before if visible < stop else -1,
        unseen=[filled[event] - before for event in unseen],
        reasoning=plain.reasoning,
        choice=plain.choice,
    )
