"""What a reply said and when, whatever protocol it came by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from loadgen.http1 import Dechunked
from loadgen.protocols.reading.stream import Form, Seen, reading
from loadgen.protocols.reading.timings import ServerTimings
from rundir.columns import Ints

_NONE = np.empty(0, np.int64)


class Reply(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """What one reply said and when; stamps and counts are -1 where missing.

    first_output_ns     the first event the model generated something for, if only blanks or nothing visible
    last_output_ns      the last such event
    first_kind          what the first token was: content, reasoning or tool; "" when there was none
    chunk_ns            int64[m]: one stamp an event with content that is not empty (blank ones included)
    chunk_chars         int64[m]: characters in each of those events, of reasoning too; 0 of a tool call
    output_tokens       by the server's usage
    timed_tokens        output tokens that the server's timings are of (llama.cpp's predicted_n)
    cached_tokens       prompt tokens that the server found in its prefix cache
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
    last_token_ns: int = -1
    first_kind: str = ""
    chunk_ns: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    chunk_chars: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    output_tokens: int = -1
    input_tokens: int = -1
    cached_tokens: int = -1
    timed_tokens: int = -1
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
    """What came of a reply, or of a part of it: when each read returned, the body's length after each (both int64), and
    the body on the wire.
    """

    stamps_ns: Ints
    ends: Ints
    body: bytes


def read_reply(form: Form, http_status: int, head: bytes, body: bytes, reads_ns: Ints, read_ends: Ints) -> Reply:
    """Read a reply that is in memory as a whole; see `read_parts`."""
    return read_parts(form, http_status, head, [Reads(stamps_ns=reads_ns, ends=read_ends, body=body)])


def read_parts(form: Form, http_status: int, head: bytes, parts: Iterable[Reads]) -> Reply:
    """Read a reply from the bytes on the wire and the stamps of the reads that brought them.

    head   the raw response head; empty when none came, and of transports that deliver messages
    parts  the wire body, chunk framing included, whole or torn anywhere; or messages, one a read. One part after
           another is looked at, so that a large reply need never be in memory

    Never raises on what a server may send: what cannot be read is `error`. A JSON reply (not a stream) has no token
    times. Any status but 200 is an error with the server's message.
    """
    if not (http_status if form.messages else head):
        return Reply()
    seen, times = Seen(), _Times()
    for is_whole in reading(seen, form, http_status, head, times.watch(parts)):
        if is_whole:
            times.settle(seen)
    chunk_ns = _concatenated(times.chunk_ns)
    has_token = seen.first >= 0
    return Reply(
        first_output_ns=times.first_output_ns,
        last_output_ns=times.last_output_ns,
        first_token_ns=int(chunk_ns[seen.first]) if has_token else -1,
        last_token_ns=int(chunk_ns[-1]) if has_token else -1,
        first_kind=seen.first_kind,
        chunk_ns=chunk_ns,
        chunk_chars=_concatenated(times.chunk_chars),
        output_tokens=seen.output_tokens,
        input_tokens=seen.input_tokens,
        cached_tokens=seen.cached_tokens,
        timed_tokens=seen.timed_tokens,
        finish_reason=seen.finish_reason,
        error=seen.failure,
        complete=seen.complete,
        done=seen.done_end >= 0,
        done_ns=times.done_ns,
        role_only_first=seen.role_only_first,
        blank_before_first=seen.first if has_token else seen.settled,
        response_id=seen.response_id,
        timings=seen.timings,
    )


def first_token_ns(form: Form, http_status: int, head: bytes, beginning: Reads) -> int:
    """Return when the first token of a reply that may go on was read, -1 before it; arguments as of `read_reply`."""
    seen, times = Seen(), _Times()
    if http_status if form.messages else head:
        for _ in reading(seen, form, http_status, head, times.watch([beginning])):
            if seen.first >= 0:
                return int(times.stamps_at(seen, [seen.ends[seen.first]])[0])
    return -1


class _Times:
    """When what was read of a reply had come, segment by segment: positions in its data become stamps."""

    def __init__(self) -> None:
        self.chunk_ns: list[Ints] = []
        self.chunk_chars: list[Ints] = []
        self.first_output_ns = self.last_output_ns = self.done_ns = -1
        self._reads: deque[Reads] = deque()  # of the pieces whose segment is still to be read
        # Of the reads that a segment may need: when each returned, and how much of the reply's data had come by then.
        self._stamps_ns = self._ends = _NONE
        self._data_bytes = 0

    def watch(self, parts: Iterable[Reads]) -> Iterator[tuple[bytes, Iterable[int]]]:
        """Give parts as `reading` takes them."""
        for part in parts:
            self._reads.append(part)
            yield part.body, map(int, part.ends)

    def settle(self, seen: Seen) -> None:
        """Take the times of what was seen in a segment that has been read, and all else that counts by event."""
        stamps = self.stamps_at(seen, [*seen.ends, seen.output_end, seen.last_output_end, seen.done_end])
        self.chunk_ns.append(stamps[:-3])
        self.chunk_chars.append(np.asarray(seen.chars, np.int64))
        first_ns, last_ns, self.done_ns = stamps[-3:].tolist()
        self.first_output_ns = first_ns if self.first_output_ns < 0 else self.first_output_ns
        self.last_output_ns = last_ns if seen.last_output_end >= 0 else self.last_output_ns
        seen.settled += len(seen.ends)
        seen.ends, seen.chars, seen.texts = [], [], []
        seen.output_end = seen.last_output_end = -1

    def stamps_at(self, seen: Seen, ends: Sequence[int]) -> Ints:
        """Return when the byte before each position in the segment was read, int64[len(ends)]; once a segment.

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
    """Return how much of a piece's data had come when so much of it was on the wire, int64[len(read_ends)]."""
    if not piece.wire_starts:
        return np.zeros(len(read_ends), np.int64)
    data_starts = np.array([*piece.data_starts, len(piece.data)], np.int64)
    wire_starts = np.array(piece.wire_starts, np.int64)
    chunk = wire_starts.searchsorted(read_ends) - 1
    ends: Ints = np.minimum(data_starts[chunk] + read_ends - wire_starts[chunk], data_starts[chunk + 1])
    ends[chunk < 0] = 0
    return ends


def _concatenated(arrays: Sequence[Ints]) -> Ints:
    """Return arrays one behind the other, without a copy where there is but one that is not empty."""
    full = [array for array in arrays if len(array)]
    return full[0] if len(full) == 1 else np.concatenate(full or [_NONE])
