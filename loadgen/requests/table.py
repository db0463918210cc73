"""`RequestLog`: the columnar record of every request and every chunk, filled from the raw logs.

Here replies are parsed, once, after they were stamped: while a run goes, or long after.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from loadgen.protocols import PROTOCOLS, Protocol
from loadgen.protocols.reading.reply import Reads, Reply
from loadgen.protocols.reading.stream import EMPTY
from loadgen.protocols.reading.timings import ServerTimings
from loadgen.records import PlannedRequest, RequestPart, plan_end, request_id, trace_id
from loadgen.transports.packing import COMPACT, PLAIN
from rundir.columns import Bools, Floats, Ints, Texts, concat, ragged, take
from rundir.framing import inflate

CHARACTERS_A_TOKEN = 4

STATUSES = ("ok", "failed", "refused", "cancelled", "in_flight")

_UNTIMED = ServerTimings(source="")
_UNPLANNED = plan_end("")
_TABLE_ROWS = 1024
# Of a reply's parts so much is read in one go: nearly every reply whole.
_JOINED_BYTES = 1024 * 1024
# Of a reply that goes on, what is looked at for its first token.
_BEGINNING_BYTES = 16 * 1024
# What may come behind the last token: a finish reason, usage, [DONE].
_CLOSING_READS = 3
END_BYTES = 5  # of a body in chunks that holds nothing
# Of a part and of a plan: what becomes a number of 64 bits, and how far differences of two still do.
_part_numbers = attrgetter(
    "index", "seq", "worker", "scheduled_ns", "dispatch_ns", "held_ns", "connected_ns", "submit_ns", "status", "end_ns"
)
_plan_numbers = attrgetter("index", "input_tokens", "max_tokens", "session", "turn")
_MOST = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """Columns of n requests that were dispatched, by ascending index.

    Stamps (`_ns`) and counts are int64, -1 where missing; texts are object arrays of str, "" where there is none.

    held_ns                for how long the cap on requests in flight held a request back; 0 without a cap
    end_ns                 when the request ended; of a reply that was cut off behind its [DONE], when that was read
    chunk_ns, chunk_start  content stamps of request i: chunk_ns[chunk_start[i]:chunk_start[i + 1]]
    chunk_chars            characters of content in each of those chunks
    declared_input_tokens  what the plan wanted, in the declared tokenizer; input_tokens and output_tokens: server usage
    output_tokens_source   usage; timings: without usage, what the server's own timings count (llama.cpp's predicted_n);
                           estimate: with neither, a quarter of the characters of a whole reply (asiai, M4); "" for none
    cached_tokens          prompt tokens that the server found in its prefix cache
    retried                it was sent twice: the kept connection of the first time ended before any byte of a reply;
                           stamps are of the second time
    session, turn          -1 and 0 of a request that belongs to no session
    first_kind             what the first token was: content, reasoning or tool; "" when there was none
    response_id            the id that the server gave its reply
    timings_source         which engine reported the server_ columns (protocols.reading.timings.ServerTimings), or ""
    server_*               float64, NaN where the server said nothing; peak_memory_bytes is int64, -1
    status                 one of STATUSES
    error                  "kind: message"
    received_bytes         response bodies on the wire, framing included
    """

    index: Ints
    phase: Texts
    workload_class: Texts
    endpoint_url: Texts
    request_id: Texts
    trace_id: Texts
    scheduled_ns: Ints
    dispatch_ns: Ints
    held_ns: Ints
    connected_ns: Ints
    submit_ns: Ints
    first_read_ns: Ints
    first_output_ns: Ints
    last_output_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    end_ns: Ints
    declared_input_tokens: Ints
    max_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints
    output_tokens_source: Texts
    status: Texts
    http_status: Ints
    error: Texts
    finish_reason: Texts
    worker: Ints
    reused: Bools
    retried: Bools
    role_only_first: Bools
    blank_before_first: Ints
    received_bytes: Ints
    chunk_ns: Ints = field(metadata=ragged("chunk_start"))
    chunk_start: Ints
    chunk_chars: Ints = field(metadata=ragged("chunk_start"))
    session: Ints
    turn: Ints
    first_kind: Texts
    response_id: Texts
    cached_tokens: Ints
    timings_source: Texts
    server_queue_ms: Floats
    server_prefill_ms: Floats
    server_decode_ms: Floats
    server_ttft_ms: Floats
    server_e2e_ms: Floats
    server_scheduler_intake_ms: Floats
    server_load_ms: Floats
    server_prompt_tps: Floats
    server_generation_tps: Floats
    peak_memory_bytes: Ints

    def __len__(self) -> int:
        return len(self.index)


def unknown_requests(size: int) -> RequestLog:
    """Return so many requests of which nothing is known, without chunks."""
    missing = {"Ints": -1, "Floats": np.nan, "Texts": "", "Bools": False}
    columns: dict[str, Any] = {
        column.name: np.full(0 if column.metadata else size, missing[str(column.type)], _DTYPES[str(column.type)])
        for column in fields(RequestLog)
    }
    return RequestLog(**{**columns, "chunk_start": np.zeros(size + 1, dtype=np.int64)})


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """A request whose first token has come while its reply goes on."""

    phase: str
    index: int
    trace_id: str
    submit_ns: int
    first_token_ns: int


class _Stream(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """A reply that goes on: its first token, whether one is still looked for, and how many reads came from it on, as
    far as its first `parts` say. A token comes in a read of its own, seldom in more, which `most_tokens` then bounds.
    """

    phase: str
    most_tokens: int
    parts: int = 0
    first_token_ns: int = -1
    is_sought: bool = True
    reads: int = 0

    @property
    def tokens(self) -> int:
        return min(self.most_tokens, max(min(1, self.reads), self.reads - _CLOSING_READS))


class RequestFold:
    """The requests of a run, filled as its records arrive: each reply is parsed once, when its request is whole.

    `protocol` is a name in PROTOCOLS; another raises KeyError. Parts may come in any order, but behind the plan of
    their requests. A request is read from its parts from seq 0 up to the first that is missing. Only what is in flight
    is held as bytes.

    - planned, but without a part: not in the table, it was never dispatched
    - without its last part: status in_flight, and whatever its bytes tell
    - a part without its plan (a torn plan): phase "" and declared_input_tokens -1
    """

    def __init__(self, *, run_id: str, protocol: str = "chat") -> None:
        self._run_id = run_id
        self._protocol = PROTOCOLS[protocol]
        self._planned: dict[int, PlannedRequest] = {}
        self._parts: dict[int, list[RequestPart]] = {}
        self._lengths: dict[int, int] = {}
        self._rows: list[_Row] = []
        self._tables: list[RequestLog] = []
        self._returned = 0  # of the tables
        self.sent: Counter[str] = Counter()  # by phase
        self.offsets_ns: dict[str, array[int]] = {}  # of what a phase schedules, from its start, in the plan's order
        self.streamed: Counter[str] = Counter()  # by phase: tokens of replies that go on, as of `first_tokens`
        self._streams: dict[int, _Stream] = {}
        self._unread: dict[int, None] = {}  # requests in flight of which something came since then

    @property
    def in_flight(self) -> int:
        """Return how many requests have been sent and have not ended."""
        return len(self._parts)

    def plan(self, first: PlannedRequest) -> None:
        """Add a planned request, and with it the later turns of its session.

        Raises ValueError for one that no conductor has written.
        """
        if first.offset_ns >= 0:
            self.offsets_ns.setdefault(first.phase, array("q")).append(first.offset_ns)
        for request in (first, *first.turns):
            _require_bounds(_plan_numbers(request), f"the plan of request {request.index}")
            self._planned[request.index] = msgspec.structs.replace(request, body=b"", turns=())

    def is_planned(self, index: int) -> bool:
        """Tell whether the plan of a request is known, as long as the request has not ended."""
        return index in self._planned

    def add(self, part: RequestPart) -> None:
        """Add what a request did; with its last missing part it is read.

        Raises ValueError for a part that no worker has written, as `unpack` does.
        """
        _require_bounds(_part_numbers(part), f"a part of request {part.index}")
        parts = self._parts.setdefault(part.index, [])
        if not parts:
            self.sent[self._planned.get(part.index, _UNPLANNED).phase] += 1
        parts.append(part)
        if part.last:
            self._lengths[part.index] = 1 + part.seq
        if len(parts) == self._lengths.get(part.index):
            del self._parts[part.index], self._lengths[part.index]
            self._unread.pop(part.index, None)
            if (stream := self._streams.pop(part.index, None)) is not None:
                self.streamed[stream.phase] -= stream.tokens
            planned = self._planned.pop(part.index, _UNPLANNED)
            if (row := _row(parts, planned, self._protocol)) is not None:
                self._rows.append(row)
            if len(self._rows) == _TABLE_ROWS:
                self._lay_out()
        elif part.reads_ns:
            self._unread[part.index] = None

    def first_tokens(self) -> list[FirstToken]:
        """Return the requests in flight whose first token has come since the last call; bring `streamed` up to date.

        Where much came before the first token, it is known with the end of the request.
        """
        indices, self._unread = list(self._unread), {}
        firsts = []
        for index in indices:
            # What no worker has written is noticed when the request has ended, and counted there.
            with suppress(ValueError):
                if (first := self._look(index)) is not None:
                    firsts.append(first)
        return firsts

    def _look(self, index: int) -> FirstToken | None:
        if (stream := self._streams.get(index)) is None:
            planned = self._planned.get(index, _UNPLANNED)
            most = planned.max_tokens if planned.max_tokens >= 0 else _MOST
            stream = self._streams[index] = _Stream(phase=planned.phase, most_tokens=most)
        parts, first, before = self._parts[index], None, stream.tokens
        if stream.first_token_ns >= 0:
            stream.reads += sum(map(_reads_in, parts[stream.parts :]))
        elif stream.is_sought and (known := _in_order(parts)):
            first = self._first_token(known, stream)
        stream.parts = len(parts)
        self.streamed[stream.phase] += stream.tokens - before
        return first

    def _first_token(self, known: Sequence[RequestPart], stream: _Stream) -> FirstToken | None:
        reads, head = next(_joined(known, _BEGINNING_BYTES)), _head(known)
        status = max(part.status for part in known)
        beginning = msgspec.structs.replace(reads, body=reads.body[:_BEGINNING_BYTES])
        first_ns = self._protocol.first_token_ns(status, head, beginning)
        stream.is_sought = len(reads.body) < _BEGINNING_BYTES
        if first_ns < 0:
            return None
        stream.first_token_ns = first_ns
        stream.reads = sum(map(_reads_in, known)) - int((reads.stamps_ns < first_ns).sum())
        index = known[0].index
        return FirstToken(stream.phase, index, trace_id(self._run_id, index), known[-1].submit_ns, first_ns)

    def ended(self) -> RequestLog:
        """Return the requests that have ended since the last call, in the order in which they did."""
        self._lay_out()
        tables, self._returned = self._tables[self._returned :], len(self._tables)
        return concat([_columns([], self._run_id), *tables])

    def table(self) -> RequestLog:
        """Return all requests so far, by ascending index, those in flight as they are now."""
        self._lay_out()
        in_flight = []
        for index, parts in self._parts.items():
            # What no worker has written is noticed in a request that ended when it is read, and counted there.
            with suppress(ValueError):
                if (row := _row(parts, self._planned.get(index, _UNPLANNED), self._protocol)) is not None:
                    in_flight.append(row)
        whole = concat([*self._tables, _columns(in_flight, self._run_id)])
        return take(whole, np.argsort(whole.index, kind="stable"))

    def _lay_out(self) -> None:
        if self._rows:
            self._tables.append(_columns(self._rows, self._run_id))
            self._rows = []


def assemble(
    plan: Iterable[PlannedRequest], parts: Iterable[RequestPart], *, run_id: str, protocol: str = "chat"
) -> RequestLog:
    """Return the table of requests that are all there, by their plan and their parts in any order."""
    fold = RequestFold(run_id=run_id, protocol=protocol)
    for first in plan:
        fold.plan(first)
    for part in parts:
        fold.add(part)
    return fold.table()


class _Row(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    planned: PlannedRequest
    last: RequestPart
    status_code: int
    first_read_ns: int
    received_bytes: int
    reply: Reply


def _row(parts: Sequence[RequestPart], planned: PlannedRequest, protocol: Protocol) -> _Row | None:
    """Read one request from its parts; None without its first. The last part repeats the stamps of those before."""
    known = _in_order(parts)
    if not known:
        return None
    sizes, firsts_ns = [], []

    def parts_read() -> Iterator[Reads]:
        for reads in _joined(known):
            sizes.append(len(reads.body))
            firsts_ns.extend(reads.stamps_ns[:1].tolist())
            yield reads

    status, bodies = max(part.status for part in known), parts_read()
    reply = protocol.read_parts(status, _head(known), bodies)
    for _ in bodies:
        pass  # what came behind the reply's end counts as received
    return _Row(
        planned=planned,
        last=msgspec.structs.replace(known[-1], head=b"", reads_ns=b"", read_ends=b"", body=b""),
        status_code=status,
        first_read_ns=firsts_ns[0] if firsts_ns else -1,
        received_bytes=sum(sizes),
        reply=reply,
    )


def _require_bounds(numbers: Sequence[int], of_what: str) -> None:
    if min(numbers) < -1 or max(numbers) >= _MOST:
        raise ValueError(f"{of_what} has numbers that are out of bounds")


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


def _in_order(parts: Sequence[RequestPart]) -> list[RequestPart]:
    """Return the parts of a request from its first to the first that is missing."""
    ordered = sorted(parts, key=attrgetter("seq"))
    return [part for seq, part in enumerate(ordered) if part.seq == seq]


def _head(known: Sequence[RequestPart]) -> bytes:
    return next((part.head for part in known if part.head), b"")


def _reads_in(part: RequestPart) -> int:
    """Return how many reads a part is of, without unpacking it."""
    return len(part.reads_ns) // 8 if part.packing == PLAIN else max(0, len(part.reads_ns) // 4 - 1)


def _joined(known: Sequence[RequestPart], least_bytes: int = _JOINED_BYTES) -> Iterator[Reads]:
    """Give the reads of parts that follow one another, of so many bytes at a time or some more.

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


def _status(row: _Row) -> tuple[str, str]:
    """Return status and error of a request; the draft counts success or failure, a refusal is kept apart."""
    part, reply = row.last, row.reply
    error = part.error or reply.error
    if not part.last:
        return "in_flight", error
    # [DONE] means that the reply is whole: a connection that then hangs or breaks takes nothing away.
    if row.status_code == 200 and reply.complete and (reply.done or not part.error):
        return ("refused" if reply.finish_reason == "content_filter" else "ok"), error
    if 400 <= row.status_code < 500:
        return "refused", reply.error or error
    if part.error.startswith("cancelled"):
        return "cancelled", error
    if row.status_code == 200 and row.received_bytes <= END_BYTES:
        error = error or f"empty: {EMPTY}"
    return "failed", error or "incomplete: the reply ended without a finish reason or [DONE]"


def _end_ns(row: _Row) -> int:
    """Return when a request ended. What was cut off behind its [DONE] ended with that."""
    part, reply = row.last, row.reply
    return reply.done_ns if part.last and part.error and reply.done_ns >= 0 else part.end_ns


def _output_tokens(reply: Reply, status: str) -> tuple[int, str]:
    """Return a reply's tokens, and who counted them. Events are never counted: one may hold any number of tokens."""
    if reply.output_tokens >= 0:
        return reply.output_tokens, "usage"
    if reply.timed_tokens >= 0:
        return reply.timed_tokens, "timings"
    chars = int(reply.chunk_chars.sum())
    if status != "ok" or not chars:
        return -1, ""
    return max(1, chars // CHARACTERS_A_TOKEN), "estimate"


# The columns that are a field of a request's last part, its plan, its reply or its server's timings, by that name.
_OF_PART = (
    "index", "scheduled_ns", "dispatch_ns", "held_ns", "connected_ns", "submit_ns", "worker", "reused", "retried",
)  # fmt: skip
_OF_PLAN = ("phase", "workload_class", "max_tokens", "session", "turn")
_OF_REPLY = (
    "first_output_ns", "last_output_ns", "first_token_ns", "last_token_ns", "input_tokens", "cached_tokens",
    "finish_reason", "first_kind", "role_only_first", "blank_before_first", "response_id",
)  # fmt: skip
_OF_TIMINGS = (
    "queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "e2e_ms", "scheduler_intake_ms", "load_ms", "prompt_tps",
    "generation_tps",
)  # fmt: skip
_DTYPES = {"Ints": np.int64, "Floats": np.float64, "Texts": np.object_, "Bools": np.bool_}


def _columns(rows: Sequence[_Row], run_id: str) -> RequestLog:
    last = [row.last for row in rows]
    planned = [row.planned for row in rows]
    replies = [row.reply for row in rows]
    timings = [reply.timings or _UNTIMED for reply in replies]
    outcomes = [_status(row) for row in rows]
    tokens = [_output_tokens(reply, status) for reply, (status, _) in zip(replies, outcomes, strict=True)]
    columns: dict[str, Iterable[Any]] = {
        **{name: map(attrgetter(name), last) for name in _OF_PART},
        **{name: map(attrgetter(name), planned) for name in _OF_PLAN},
        **{name: map(attrgetter(name), replies) for name in _OF_REPLY},
        **{f"server_{name}": map(attrgetter(name), timings) for name in _OF_TIMINGS},
        "endpoint_url": (part.url for part in last),
        "request_id": (request_id(run_id, part.index, part.id_form) for part in last),
        "trace_id": (trace_id(run_id, part.index) for part in last),
        "first_read_ns": (row.first_read_ns for row in rows),
        "end_ns": (_end_ns(row) for row in rows),
        "declared_input_tokens": (request.input_tokens for request in planned),
        "output_tokens": (count for count, _ in tokens),
        "output_tokens_source": (source for _, source in tokens),
        "status": (status for status, _ in outcomes),
        "http_status": (row.status_code for row in rows),
        "error": (error for _, error in outcomes),
        "received_bytes": (row.received_bytes for row in rows),
        "timings_source": (timing.source for timing in timings),
        "peak_memory_bytes": (timing.peak_memory_bytes for timing in timings),
        "chunk_start": accumulate((len(reply.chunk_ns) for reply in replies), initial=0),
    }
    dtypes = {column.name: _DTYPES[str(column.type)] for column in fields(RequestLog)}
    return RequestLog(
        **{name: np.fromiter(values, dtypes[name]) for name, values in columns.items()},
        chunk_ns=np.concatenate([np.empty(0, np.int64), *(reply.chunk_ns for reply in replies)]),
        chunk_chars=np.concatenate([np.empty(0, np.int64), *(reply.chunk_chars for reply in replies)]),
    )
