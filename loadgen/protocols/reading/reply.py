"""Contents and times of a reply, the same for every protocol."""

from __future__ import annotations

import re
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter

import msgspec
import numpy as np

from sidelight.loadgen.http1 import Dechunked
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState, reading
from sidelight.loadgen.protocols.reading.timings import ServerTimings
from sidelight.loadgen.records import RequestPart
from sidelight.loadgen.transports.packing import COMPACT, PLAIN
from sidelight.rundir.columns import Ints
from sidelight.rundir.framing import inflate

_NONE = np.empty(0, np.int64)
# Of a reply's parts so much is read in one go: nearly every reply whole.
MOST_IN_ONE_READ = 4  # contents of a choice: as many at one moment were held back on their way
_JOINED_BYTES = 1024 * 1024
MOST = 2**62  # of a number in a log: differences of two are still of 64 bits
_STAMPS = ("first_output_ns", "last_output_ns", "first_token_ns", "first_visible_ns", "last_token_ns", "done_ns")
# Of an error: what a server repeats of the request (FastAPI: as `input`), as JSON or as Python prints it.
_REPEATED = re.compile(r"""(["'])(?:inputs?|prompts?|messages|content|text|body)\1\s*:.*""", re.DOTALL)


class Reply(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Contents and times of one reply; stamps and counts are -1 where missing.

    first_output_ns     the first event the model generated something for, if only blanks or nothing visible; the first
                        content where there are as many as tokens
    last_output_ns      the last such event, or content
    first_visible_ns    the first token that is not reasoning: of text, or of a call of a tool
    first_kind          what the first token was: content, reasoning or tool; "" when there was none
    chunk_ns            int64[m]: one stamp an event with content that is not empty (white space included; of nothing
                        but invisible characters only where more tokens were counted than other contents came)
    chunk_chars         int64[m]: characters in each of those events, of reasoning too; 0 of a tool call
    chunk_choice        int64[m]: the number of the choice of each; empty where there is but one
    choices             choices that the model generated something for
    output_span_ns      from the first to the last output of each choice, added up; -1 below two choices, and where
                        one of them came in one read
    unseen_tokens       tokens of reasoning that the usage counts and no event brought
    output_tokens       by the server's usage
    timed_tokens        output tokens that the server's timings are of (llama.cpp's predicted_n)
    cached_tokens       prompt tokens that the server found in its prefix cache
    reasoning_tokens, total_tokens  by the server's usage, as are the next
    statements, grew    how often it stated output tokens, and whether they ever rose
    doubts              what of its statements cannot be so, by the count
    silent_events       events the model generated something for that shows no text
    complete            a finish reason or the protocol's last event was seen, and no error
    done                the protocol's last event ([DONE]) was seen, or a whole JSON reply
    done_ns             when that event, or the last byte of a whole JSON reply, was read
    error               "" or "kind: message": http_<status>; server, an error event under 200; aborted, a finish reason
                        that says so; empty, a stream without output; protocol
    role_only_first     the first event carried a role and no content
    blank_before_first  content events before the first token: whitespace only
    """

    first_output_ns: int = -1
    last_output_ns: int = -1
    first_token_ns: int = -1
    first_visible_ns: int = -1
    last_token_ns: int = -1
    first_kind: str = ""
    chunk_ns: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    chunk_chars: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    chunk_choice: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    choices: int = 0
    output_span_ns: int = -1
    unseen_tokens: int = 0
    output_tokens: int = -1
    input_tokens: int = -1
    cached_tokens: int = -1
    timed_tokens: int = -1
    reasoning_tokens: int = -1
    total_tokens: int = -1
    statements: int = 0
    grew: bool = False
    doubts: Mapping[str, str] = msgspec.field(default_factory=dict)
    silent_events: int = 0
    finish_reason: str = ""
    error: str = ""
    complete: bool = False
    done: bool = False
    done_ns: int = -1
    role_only_first: bool = False
    blank_before_first: int = 0
    response_id: str = ""
    timings: ServerTimings | None = None


class Reads(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The reads of a reply, or of a part of it, with the body.

    These are the time at which each read returned, the body's length after each (both int64), and the body on the wire.
    """

    stamps_ns: Ints
    ends: Ints
    body: bytes


def read_reply(form: Form, http_status: int, head: bytes, body: bytes, reads_ns: Ints, read_ends: Ints) -> Reply:
    """Read a reply that is in memory as a whole; see `read_parts`."""
    return read_parts(form, http_status, head, [Reads(stamps_ns=reads_ns, ends=read_ends, body=body)])


def read_to_log(
    form: Form, http_status: int, head: bytes, body: bytes | bytearray, reads_ns: array[int], read_ends: array[int]
) -> bytes:
    """Read a reply and encode it without its texts.

    `logged` reads it back; arguments as of `read_reply`.
    """
    stamps_ns, ends = (np.array(column, np.int64) for column in (reads_ns, read_ends))
    reply = read_reply(form, http_status, head, bytes(body), stamps_ns, ends)
    reply = msgspec.structs.replace(reply, error=_REPEATED.sub("", reply.error))
    return zlib.compress(msgspec.msgpack.encode(reply, enc_hook=lambda column: np.diff(column, prepend=0).tobytes()), 1)


def logged(packed: bytes, stamps_ns: Ints) -> Reply:
    """Return a reply that `read_to_log` wrote; `stamps_ns` are those of its reads.

    Raises ValueError for what it has not written.
    """
    reply = msgspec.msgpack.decode(
        inflate(packed), type=Reply, dec_hook=lambda _, steps: np.frombuffer(steps, np.int64).cumsum()
    )
    fields = (getattr(reply, name) for name in reply.__struct_fields__)
    numbers = [number for number in fields if type(number) is int]
    times_ns = np.append(reply.chunk_ns, [min(MOST, getattr(reply, name)) for name in _STAMPS])
    are_read = np.isin(times_ns, np.append(stamps_ns, -1)).all()
    sizes = {len(reply.chunk_ns), len(reply.chunk_chars), len(reply.chunk_choice) or len(reply.chunk_ns)}
    if len(sizes) > 1 or min(numbers) < -1 or max(numbers) >= MOST or not are_read:
        raise ValueError("a reply that no worker has read")
    return reply


def read_parts(form: Form, http_status: int, head: bytes, parts: Iterable[Reads]) -> Reply:
    """Read a reply from its bytes on the wire and the stamps of its reads.

    head   the raw response head; empty when none came, and of transports that deliver messages
    parts  the wire body, chunk framing included, whole or torn anywhere; or messages, one a read. One part after
           another is looked at, so that a large reply need never be in memory

    Never raises on what a server may send: what cannot be read is `error`. A JSON reply (not a stream) has no token
    times. Any status but 200 is an error with the server's message.
    """
    if not (http_status if form.messages else head):
        return Reply()
    seen, times = ReplyState(), _ContentTimes()
    for is_whole in reading(seen, form, http_status, head, times.watch(parts)):
        if is_whole:
            times.settle(seen)
    columns = [_concatenated(parts) for parts in (times.chunk_ns, times.chunk_chars, times.chunk_choice)]
    return reply_of(seen, columns, times.outputs_ns, times.done_ns)


def reply_of(seen: ReplyState, columns: Sequence[Ints], outputs_ns: Mapping[int, Sequence[int]], done_ns: int) -> Reply:
    """Return the reply of a state behind its last event.

    columns     stamps, characters and choice of each content
    outputs_ns  the stamps of each choice's first and last output
    """
    has_token, choices = seen.first >= 0, len(seen.choices)
    first_token_ns = int(columns[0][seen.first]) if has_token else -1
    chunk_ns, chunk_chars, chunk_choice, bounds_ns = _contents(seen, columns, outputs_ns)
    error = seen.failure
    return Reply(
        first_output_ns=min(bounds_ns)[0] if bounds_ns else -1,
        last_output_ns=max([last_ns for _, last_ns in bounds_ns], default=-1),
        chunk_choice=chunk_choice if choices > 1 else _NONE,
        choices=choices,
        output_span_ns=_output_span_ns(bounds_ns, chunk_choice) if choices > 1 else -1,
        unseen_tokens=0 if seen.reasoned or seen.silent >= seen.reasoning_tokens else seen.reasoning_tokens,
        first_token_ns=first_token_ns,
        first_visible_ns=int(columns[0][seen.first_visible]) if seen.first_visible >= 0 else -1,
        last_token_ns=int(chunk_ns[-1]) if has_token else -1,
        first_kind=seen.first_kind,
        chunk_ns=chunk_ns,
        chunk_chars=chunk_chars,
        output_tokens=seen.output_tokens,
        input_tokens=seen.input_tokens,
        cached_tokens=seen.cached_tokens,
        timed_tokens=seen.timed_tokens,
        reasoning_tokens=seen.reasoning_tokens,
        total_tokens=seen.total_tokens,
        statements=seen.statements,
        grew=seen.grew,
        doubts=seen.doubts,
        silent_events=seen.silent,
        finish_reason=seen.finish_reason,
        error=error,
        complete=seen.has_ended and not error,
        done=seen.done_end >= 0,
        done_ns=done_ns,
        role_only_first=seen.role_only_first,
        blank_before_first=seen.first if has_token else seen.settled,
        response_id=seen.response_id,
        timings=seen.timings,
    )


def _contents(
    seen: ReplyState, columns: Sequence[Ints], outputs_ns: Mapping[int, Sequence[int]]
) -> tuple[Ints, Ints, Ints, list[tuple[int, int]]]:
    """Return the columns of the contents, and each choice's first and last output.

    The columns are stamps, characters and choice of each content.

    Where the contents that show, white space included, are as many as the tokens, or those were not counted, nothing
    else was generated: a role, a finish reason or a zero-width space, as of a heartbeat, has no part in the times.
    """
    chunk_ns, chunk_chars, choice = columns
    shown = len(chunk_ns) - len(seen.unseen)
    if not shown or max(seen.output_tokens, seen.timed_tokens) > shown:
        return chunk_ns, chunk_chars, choice, [(first_ns, last_ns) for first_ns, last_ns in outputs_ns.values()]
    if seen.unseen:
        chunk_ns, chunk_chars, choice = (np.delete(column, seen.unseen) for column in columns)
    of = [chunk_ns] if len(seen.choices) == 1 else [chunk_ns[choice == number] for number in seen.choices.values()]
    return chunk_ns, chunk_chars, choice, [(int(stamps[0]), int(stamps[-1])) for stamps in of if len(stamps)]


def first_token_ns(form: Form, http_status: int, head: bytes, beginning: Reads) -> int:
    """Return the time at which the first token was read, -1 before it.

    The reply may go on; arguments as of `read_reply`.
    """
    seen, times = ReplyState(), _ContentTimes()
    if http_status if form.messages else head:
        for _ in reading(seen, form, http_status, head, times.watch([beginning])):
            if seen.first >= 0:
                return int(times.stamps_at(seen, [seen.ends[seen.first]])[0])
    return -1


def _output_span_ns(outputs_ns: Sequence[tuple[int, int]], chunk_choice: Ints) -> int:
    """Return the time from the first to the last output of each choice, added up; -1 where one came in one read."""
    contents = np.bincount(chunk_choice, minlength=len(outputs_ns))
    spans_ns = [last_ns - first_ns for first_ns, last_ns in outputs_ns]
    if any(span_ns == 0 and count >= MOST_IN_ONE_READ for span_ns, count in zip(spans_ns, contents, strict=False)):
        return -1
    return sum(spans_ns)


class _ContentTimes:
    """Times of a reply's contents, found segment by segment. Positions in the reply's data become stamps."""

    def __init__(self) -> None:
        self.chunk_ns: list[Ints] = []
        self.chunk_chars: list[Ints] = []
        self.chunk_choice: list[Ints] = []
        self.outputs_ns: dict[int, list[int]] = {}
        self.done_ns = -1
        self._reads: deque[Reads] = deque()  # of the pieces whose segment is still to be read
        # Of the reads that a segment may need: when each returned, and how much of the reply's data had come by then.
        self._stamps_ns = self._ends = _NONE
        self._data_bytes = 0

    def watch(self, parts: Iterable[Reads]) -> Iterator[tuple[bytes, Iterable[int]]]:
        """Yield parts as `reading` takes them."""
        for part in parts:
            self._reads.append(part)
            yield part.body, map(int, part.ends)

    def settle(self, seen: ReplyState) -> None:
        """Record the times of the events in a segment that has been read.

        All else that counts by event is recorded too.
        """
        bounds = list(chain.from_iterable(seen.outputs.values()))
        count = len(seen.ends)
        stamps = self.stamps_at(seen, [*seen.ends, *bounds, seen.done_end])
        self.chunk_ns.append(stamps[:count])
        self.chunk_chars.append(np.asarray(seen.chars, np.int64))
        self.chunk_choice.append(np.asarray(seen.choice_of, np.int64))
        *bounds_ns, done_ns = stamps[count:].tolist()
        self.done_ns = done_ns if self.done_ns < 0 else self.done_ns
        for number, first_ns, last_ns in zip(seen.outputs, bounds_ns[::2], bounds_ns[1::2], strict=True):
            self.outputs_ns.setdefault(number, [first_ns, last_ns])[1] = last_ns
        seen.settled += count
        seen.ends, seen.chars, seen.texts, seen.choice_of, seen.outputs = [], [], [], [], {}

    def stamps_at(self, seen: ReplyState, ends: Sequence[int]) -> Ints:
        """Return the read time of the byte before each position, int64[len(ends)].

        Positions are in the segment; call it once a segment.

        -1 where no read reached that far, and for positions that are not behind any byte.
        """
        segment, reads = seen.segment, self._reads.popleft()
        old = self._ends.searchsorted(segment.begin, side="right") if len(self._ends) else 0
        self._stamps_ns = _concatenated([self._stamps_ns[old:], reads.stamps_ns])
        self._ends = _concatenated([self._ends[old:], self._data_bytes + _data_ends(segment.piece, reads.ends)])
        self._data_bytes += len(segment.piece.data)
        positions = np.array(ends, np.int64)
        read = self._ends.searchsorted(segment.begin + positions)
        read[positions <= 0] = len(self._ends)
        return np.append(self._stamps_ns, -1)[read]


def _data_ends(piece: Dechunked, read_ends: Ints) -> Ints:
    """Return the length of a piece's data at each read, int64[len(read_ends)].

    `read_ends` are the lengths on the wire.
    """
    if not piece.wire_starts:
        return np.zeros(len(read_ends), np.int64)
    data_starts = np.array([*piece.data_starts, len(piece.data)], np.int64)
    wire_starts = np.array(piece.wire_starts, np.int64)
    chunk = wire_starts.searchsorted(read_ends) - 1
    ends: Ints = np.minimum(data_starts[chunk] + read_ends - wire_starts[chunk], data_starts[chunk + 1])
    ends[chunk < 0] = 0
    return ends


def _concatenated(arrays: Sequence[Ints]) -> Ints:
    """Concatenate arrays, without a copy if only one is not empty."""
    full = [array for array in arrays if len(array)]
    return full[0] if len(full) == 1 else np.concatenate(full or [_NONE])


def unpack(part: RequestPart) -> Reads:
    """Return the reads of a part. Raises ValueError when it is packed in a way that is not known here."""
    body = inflate(part.body) if part.body else b""
    if part.packing == PLAIN:
        ends = np.frombuffer(part.read_ends, np.int64)
        return Reads(stamps_ns=np.frombuffer(part.reads_ns, np.int64), ends=ends, body=body)
    if part.packing != COMPACT:
        raise ValueError(f"a part of request {part.index} is packed in way {part.packing}, which is not known here")
    if not part.reads_ns:
        return Reads(stamps_ns=np.empty(0, np.int64), ends=np.empty(0, np.int64), body=body)
    steps_ns = np.frombuffer(part.reads_ns, np.uint32)[1:].astype(np.int64)
    steps_ns[0] = int.from_bytes(part.reads_ns[:8], "little", signed=True)
    ends = np.frombuffer(body, np.uint32, len(steps_ns)).cumsum(dtype=np.int64)
    return Reads(stamps_ns=steps_ns.cumsum(), ends=ends, body=body[4 * len(steps_ns) :])


def in_order(parts: Sequence[RequestPart]) -> list[RequestPart]:
    """Return the parts of a request from its first to the first that is missing."""
    ordered = sorted(parts, key=attrgetter("seq"))
    return [part for seq, part in enumerate(ordered) if part.seq == seq]


def head_of(known: Sequence[RequestPart]) -> bytes:
    """Return the raw response head, empty if none arrived."""
    return next((part.head for part in known if part.head), b"")


def reads_in(part: RequestPart) -> int:
    """Return the number of reads of a part, without unpacking it."""
    return len(part.reads_ns) // 8 if part.packing == PLAIN else max(0, len(part.reads_ns) // 4 - 1)


def joined(known: Sequence[RequestPart], least_bytes: int = _JOINED_BYTES) -> Iterator[Reads]:
    """Yield the reads of successive parts, joined to at least `least_bytes` at a time.

    Raises ValueError as `unpack` does.
    """
    parts: list[Reads] = []
    size = 0
    for part in known:
        parts.append(unpack(part))
        size += len(parts[-1].body)
        if part is known[-1] or size >= least_bytes:
            yield parts[0] if len(parts) == 1 else _join(parts)
            parts, size = [], 0


def _join(parts: Sequence[Reads]) -> Reads:
    begins = accumulate((len(part.body) for part in parts), initial=0)
    return Reads(
        stamps_ns=np.concatenate([part.stamps_ns for part in parts]),
        ends=np.concatenate([part.ends + begin for part, begin in zip(parts, begins, strict=False)]),
        body=b"".join([part.body for part in parts]),
    )
