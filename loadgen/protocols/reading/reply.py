"""What a reply said and when, whatever protocol it came by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.http1 import Dechunked
from loadgen.protocols.reading.stream import Form, Seen, reading
from loadgen.protocols.reading.timings import ServerTimings
from rundir.columns import Ints


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
    error               "" or "kind: message", kind http_<status>, server (an error event under 200) or protocol
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


def read_reply(form: Form, http_status: int, head: bytes, body: bytes, reads_ns: Ints, read_ends: Ints) -> Reply:
    """Read a reply from the bytes on the wire and the stamps of the reads that brought them.

    head       the raw response head; empty when none came, and of transports that deliver messages
    body       the wire body, chunk framing included, whole or torn anywhere; or messages, one a read
    reads_ns   int64[k]: when each read returned
    read_ends  int64[k], ascending: length of `body` after each read

    Never raises on what a server may send: what cannot be read is `error`. A JSON reply (not a stream) has no token
    times. Any status but 200 is an error with the server's message.
    """
    if not (http_status if form.messages else head):
        return Reply()
    seen = Seen()
    for _ in reading(seen, form, http_status, head, body, map(int, read_ends)):
        pass
    ends = [*seen.ends, seen.output_end, seen.last_output_end, seen.done_end]
    stamps = _stamps_at(ends, seen.body, reads_ns, read_ends)
    first_output_ns, last_output_ns, done_ns = stamps[-3:].tolist()
    has_token = seen.first >= 0
    return Reply(
        first_output_ns=first_output_ns,
        last_output_ns=last_output_ns,
        first_token_ns=int(stamps[seen.first]) if has_token else -1,
        last_token_ns=int(stamps[-4]) if has_token else -1,
        first_kind=seen.first_kind,
        chunk_ns=stamps[:-3],
        chunk_chars=np.asarray(seen.chars, np.int64),
        output_tokens=seen.output_tokens,
        input_tokens=seen.input_tokens,
        cached_tokens=seen.cached_tokens,
        timed_tokens=seen.timed_tokens,
        finish_reason=seen.finish_reason,
        error=seen.error,
        complete=seen.complete,
        done=seen.done_end >= 0,
        done_ns=done_ns,
        role_only_first=seen.role_only_first,
        blank_before_first=seen.first if has_token else len(seen.ends),
        response_id=seen.response_id,
        timings=seen.timings,
    )


def first_token_ns(form: Form, http_status: int, head: bytes, body: bytes, reads_ns: Ints, read_ends: Ints) -> int:
    """Return when the first token of a reply that may go on was read, -1 before it; arguments as of `read_reply`, and
    `body` may be its beginning alone.
    """
    seen = Seen()
    if http_status if form.messages else head:
        for _ in reading(seen, form, http_status, head, body, map(int, read_ends)):
            if seen.first >= 0:
                break
    return -1 if seen.first < 0 else int(_stamps_at([seen.ends[seen.first]], seen.body, reads_ns, read_ends)[0])


def _stamps_at(ends: Sequence[int], body: Dechunked, reads_ns: Ints, read_ends: Ints) -> Ints:
    """Return when the byte before each position of a decoded body was read, int64[len(ends)].

    reads_ns, read_ends  int64[k]: when each read returned, and how much was on the wire by then

    -1 where no read reached that far, and for positions that are not behind any byte.
    """
    if not len(reads_ns):
        return np.full(len(ends), -1, np.int64)
    last = np.array(ends, np.int64) - 1
    data_starts, wire_starts = np.array(body.data_starts, np.int64), np.array(body.wire_starts, np.int64)
    piece = data_starts.searchsorted(last, side="right") - 1
    wire = wire_starts[piece] + last - data_starts[piece] + 1
    read = read_ends.searchsorted(wire, side="left")
    known = (last >= 0) & (read < len(reads_ns))
    return np.where(known, reads_ns[np.minimum(read, len(reads_ns) - 1)], -1)
