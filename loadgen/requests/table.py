"""`RequestLog`: the columnar record of every request and every chunk, filled from the raw logs.

Here replies are parsed, once, after they were stamped: while a run goes, or long after.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from loadgen.protocols.reading.batch import WholeReply, may_join, read_whole
from loadgen.protocols.reading.reply import MOST, Reads, Reply, head_of, in_order, joined, logged, reads_in, unpack
from loadgen.protocols.reading.stream import EMPTY
from loadgen.protocols.reading.timings import ServerTimings
from loadgen.protocols.reading.usage import Contradictions, contradictions, output_tokens
from loadgen.protocols.table import PROTOCOLS, Protocol
from loadgen.records import PlannedRequest, RequestPart, plan_end, request_id, trace_id
from rundir.columns import Bools, Floats, Ints, Texts, concat, ragged, take

STATUSES = ("ok", "failed", "refused", "cancelled", "in_flight")

_UNREAD, _UNTIMED = Reply(), ServerTimings(source="")
_UNPLANNED = plan_end("")
_TABLE_ROWS = 1024
# Whole replies are read together: at most this number of them, sooner where their bodies have this many bytes.
_REPLIES, _REPLY_BYTES = 256, 2 * 1024 * 1024
# Of a reply that goes on, what is looked at for its first token.
_BEGINNING_BYTES = 16 * 1024
# In a request's body: an image or a video that the server fetches, which may be any number of tokens.
_LINKED = b'_url"'
# What may come behind the last token: a finish reason, usage, [DONE].
_CLOSING_READS = 3
END_BYTES = 5  # of a body in chunks that holds nothing
# Of a part and of a plan: what becomes a number of 64 bits.
_part_numbers = attrgetter(
    "index", "seq", "worker", "scheduled_ns", "dispatch_ns", "held_ns", "connected_ns", "submit_ns", "status", "end_ns"
)
_plan_numbers = attrgetter("index", "input_tokens", "max_tokens", "session", "turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """Columns of n requests that were dispatched, by ascending index.

    Stamps (`_ns`) and counts are int64, -1 where missing; texts are object arrays of str, "" where there is none.

    held_ns                for how long the cap on requests in flight held a request back; 0 without a cap
    end_ns                 when the request ended; of a reply that was cut off behind its [DONE], when that was read
    chunk_ns, chunk_start  content stamps of request i: chunk_ns[chunk_start[i]:chunk_start[i + 1]]
    chunk_chars            characters of content in each of those chunks
    chunk_choice           of a reply of several choices, the choice of each of those chunks; of others nothing
    choices                choices that the model generated something for
    output_span_ns         of several choices: from the first to the last output of each, added up
    declared_input_tokens  what the plan wanted, in the declared tokenizer; input_tokens and output_tokens: server usage
    output_tokens_source   usage; timings: without usage, what the server's own timings count (llama.cpp's predicted_n);
                           estimate: with neither, a quarter of the characters of a whole reply (asiai, M4);
                           contradicted: by a usage that is not used; "" for none
    cached_tokens          prompt tokens that the server found in its prefix cache
    unseen_tokens          output tokens of reasoning that the usage states and no event brought
    usage_*                what the server's usage stated, and what contradicts it as `kind: numbers`, several joined
                           by "; ": a count that is contradicted is -1 in the columns above
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
    chunk_choice: Ints = field(metadata=ragged("choice_start"))
    choice_start: Ints
    choices: Ints
    output_span_ns: Ints
    unseen_tokens: Ints
    usage_input_tokens: Ints
    usage_output_tokens: Ints
    usage_cached_tokens: Ints
    usage_contradiction: Texts
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
    """Return a table of `size` unknown requests, without chunks."""
    missing = {"Ints": -1, "Floats": np.nan, "Texts": "", "Bools": False}
    columns: dict[str, Any] = {
        column.name: np.full(0 if column.metadata else size, missing[str(column.type)], _DTYPES[str(column.type)])
        for column in fields(RequestLog)
    }
    starts = dict.fromkeys(("chunk_start", "choice_start"), np.zeros(size + 1, dtype=np.int64))
    return RequestLog(**{**columns, **starts})


class InFlightRequest(msgspec.Struct, frozen=True, gc=False):
    """A request in flight, with the time of its first token."""

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
        self._sent_bytes: dict[int, int] = {}
        self._parts: dict[int, list[RequestPart]] = {}
        self._lengths: dict[int, int] = {}
        self._rows: list[_Row] = []
        self._waiting_bytes = 0  # of their replies that are still to be read
        self._tables: list[RequestLog] = []
        self._returned = 0  # of the tables
        self.sent: Counter[str] = Counter()  # by phase
        self.offsets_ns: dict[str, array[int]] = {}  # of what a phase schedules, from its start, in the plan's order
        self.streamed: Counter[str] = Counter()  # by phase: tokens of replies that go on, as of `first_tokens`
        self._streams: dict[int, _Stream] = {}
        self._unread: dict[int, None] = {}  # requests in flight of which something came since then

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have been sent and have not ended."""
        return len(self._parts)

    def plan(self, first: PlannedRequest) -> None:
        """Add a planned request, and with it the later turns of its session.

        Raises ValueError for one that no conductor has written.
        """
        if first.offset_ns >= 0:
            self.offsets_ns.setdefault(first.phase, array("q")).append(first.offset_ns)
        for request in (first, *first.turns):
            _require_bounds(_plan_numbers(request), f"the plan of request {request.index}")
            if request.turn <= 0 and _LINKED not in request.body:
                self._sent_bytes[request.index] = len(request.body)
            self._planned[request.index] = msgspec.structs.replace(request, body=b"", turns=())

    def is_planned(self, index: int) -> bool:
        """Return whether the plan of a request that has not ended is known."""
        return index in self._planned

    def add(self, part: RequestPart) -> None:
        """Add a part of a request. Once all its parts are there, the request is read.

        Raises ValueError for a part that no worker has written, as `reply.unpack` does.
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
            planned, sent_bytes = self._planned.pop(part.index, _UNPLANNED), self._sent_bytes.pop(part.index, -1)
            if (row := _row(parts, planned, self._protocol, sent_bytes, may_wait=True)) is not None:
                self._rows.append(row)
                self._waiting_bytes += row.received_bytes if row.whole is not None else 0
                if len(self._rows) % _REPLIES == 0 or self._waiting_bytes > _REPLY_BYTES:
                    self._read_together()
            if len(self._rows) == _TABLE_ROWS:
                self._lay_out()
        elif part.reads_ns:
            self._unread[part.index] = None

    def first_tokens(self) -> list[InFlightRequest]:
        """Return the requests in flight with a first token since the last call. Brings `streamed` up to date.

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

    def _look(self, index: int) -> InFlightRequest | None:
        if (stream := self._streams.get(index)) is None:
            planned = self._planned.get(index, _UNPLANNED)
            most = planned.max_tokens if planned.max_tokens >= 0 else MOST
            stream = self._streams[index] = _Stream(phase=planned.phase, most_tokens=most)
        parts, first, before = self._parts[index], None, stream.tokens
        if stream.first_token_ns >= 0:
            stream.reads += sum(map(reads_in, parts[stream.parts :]))
        elif stream.is_sought and (known := in_order(parts)):
            first = self._first_token(known, stream)
        stream.parts = len(parts)
        self.streamed[stream.phase] += stream.tokens - before
        return first

    def _first_token(self, known: Sequence[RequestPart], stream: _Stream) -> InFlightRequest | None:
        reads, head = next(joined(known, _BEGINNING_BYTES)), head_of(known)
        status = max(part.status for part in known)
        beginning = msgspec.structs.replace(reads, body=reads.body[:_BEGINNING_BYTES])
        first_ns = self._protocol.first_token_ns(status, head, beginning)
        stream.is_sought = len(reads.body) < _BEGINNING_BYTES
        if first_ns < 0:
            return None
        stream.first_token_ns = first_ns
        stream.reads = sum(map(reads_in, known)) - int((reads.stamps_ns < first_ns).sum())
        index = known[0].index
        return InFlightRequest(stream.phase, index, trace_id(self._run_id, index), known[-1].submit_ns, first_ns)

    def ended(self) -> RequestLog:
        """Return the requests that have ended since the last call, in order. The order is that in which they ended."""
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
                planned = self._planned.get(index, _UNPLANNED)
                if (row := _row(parts, planned, self._protocol, may_wait=False)) is not None:
                    in_flight.append(row)
        whole = concat([*self._tables, _columns(in_flight, self._run_id)])
        return take(whole, np.argsort(whole.index, kind="stable"))

    def _read_together(self) -> None:
        """Read the replies that wait to be read with others."""
        waiting = [(row, row.whole) for row in self._rows if row.whole is not None]
        if waiting:
            replies = read_whole(self._protocol.form, [whole for _, whole in waiting])
            for (row, _), reply in zip(waiting, replies, strict=True):
                row.reply, row.whole = reply, None
        self._waiting_bytes = 0

    def _lay_out(self) -> None:
        self._read_together()
        if self._rows:
            self._tables.append(_columns(self._rows, self._run_id))
            self._rows = []


def assemble(
    plan: Iterable[PlannedRequest], parts: Iterable[RequestPart], *, run_id: str, protocol: str = "chat"
) -> RequestLog:
    """Assemble the table of complete requests from their plan and their parts. The parts may come in any order."""
    fold = RequestFold(run_id=run_id, protocol=protocol)
    for first in plan:
        fold.plan(first)
    for part in parts:
        fold.add(part)
    return fold.table()


class _Row(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One request; `whole` is its reply as long as that is still to be read."""

    planned: PlannedRequest
    last: RequestPart
    status_code: int
    first_read_ns: int
    received_bytes: int
    sent_bytes: int
    reply: Reply
    whole: WholeReply | None = None


def _row(
    parts: Sequence[RequestPart], planned: PlannedRequest, protocol: Protocol, sent_bytes: int = -1, *, may_wait: bool
) -> _Row | None:
    """Read one request from its parts; None without its first. The last part repeats the stamps of those before.

    Its reply may be left to be read together with others where it `may_wait`.
    """
    known = in_order(parts)
    if not known:
        return None
    last = msgspec.structs.replace(known[-1], head=b"", reads_ns=b"", read_ends=b"", body=b"", reply=b"")
    status, head = max(part.status for part in known), head_of(known)
    row = partial(_Row, planned=planned, last=last, status_code=status, sent_bytes=sent_bytes)
    if known[-1].reply:
        reads = unpack(known[-1])
        received_bytes, reply = int(reads.ends[-1]) if len(reads.ends) else 0, logged(known[-1].reply, reads.stamps_ns)
        return row(first_read_ns=int(next(iter(reads.stamps_ns), -1)), received_bytes=received_bytes, reply=reply)
    pieces = joined(known)
    beginning = list(islice(pieces, 2))
    whole = WholeReply(http_status=status, head=head, reads=beginning[0])
    if may_wait and len(beginning) == 1 and may_join(protocol.form, whole):
        first_ns, received_bytes = int(whole.reads.stamps_ns[0]), len(whole.reads.body)
        return row(first_read_ns=first_ns, received_bytes=received_bytes, reply=_UNREAD, whole=whole)
    sizes, firsts_ns = [], []

    def parts_read() -> Iterator[Reads]:
        for reads in chain(beginning, pieces):
            sizes.append(len(reads.body))
            firsts_ns.extend(reads.stamps_ns[:1].tolist())
            yield reads

    bodies = parts_read()
    reply = protocol.read_parts(status, head, bodies)
    for _ in bodies:
        pass  # what came behind the reply's end counts as received
    return row(first_read_ns=firsts_ns[0] if firsts_ns else -1, received_bytes=sum(sizes), reply=reply)


def _require_bounds(numbers: Sequence[int], of_what: str) -> None:
    if min(numbers) < -1 or max(numbers) >= MOST:
        raise ValueError(f"{of_what} has numbers that are out of bounds")


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
    """Return the time of a request's end. A reply that was cut off behind its [DONE] ended with that."""
    part, reply = row.last, row.reply
    return reply.done_ns if part.last and part.error and reply.done_ns >= 0 else part.end_ns


# The columns that are a field of a request's last part, its plan, its reply or its server's timings, by that name.
_OF_PART = (
    "index", "scheduled_ns", "dispatch_ns", "held_ns", "connected_ns", "submit_ns", "worker", "reused", "retried",
)  # fmt: skip
_OF_PLAN = ("phase", "workload_class", "max_tokens", "session", "turn")
_OF_REPLY = (
    "first_output_ns", "last_output_ns", "first_token_ns", "last_token_ns", "choices", "output_span_ns",
    "unseen_tokens", "finish_reason", "first_kind", "role_only_first", "blank_before_first", "response_id",
)  # fmt: skip
_OF_USAGE = ("input_tokens", "output_tokens", "cached_tokens")
_OF_CHUNKS = ("chunk_ns", "chunk_chars", "chunk_choice")
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
    doubts = [
        contradictions(row.reply, row.planned, sent_bytes=row.sent_bytes, received_bytes=row.received_bytes)
        if status == "ok"
        else Contradictions()
        for row, (status, _) in zip(rows, outcomes, strict=True)
    ]
    tokens = [
        output_tokens(reply, status, doubt.output)
        for reply, (status, _), doubt in zip(replies, outcomes, doubts, strict=True)
    ]
    columns: dict[str, Iterable[Any]] = {
        **{name: map(attrgetter(name), last) for name in _OF_PART},
        **{name: map(attrgetter(name), planned) for name in _OF_PLAN},
        **{name: map(attrgetter(name), replies) for name in _OF_REPLY},
        **{f"usage_{name}": map(attrgetter(name), replies) for name in _OF_USAGE},
        **{f"server_{name}": map(attrgetter(name), timings) for name in _OF_TIMINGS},
        "endpoint_url": (part.url for part in last),
        "request_id": (request_id(run_id, part.index) for part in last),
        "trace_id": (trace_id(run_id, part.index) for part in last),
        "first_read_ns": (row.first_read_ns for row in rows),
        "end_ns": (_end_ns(row) for row in rows),
        "declared_input_tokens": (request.input_tokens for request in planned),
        "usage_contradiction": ("; ".join(filter(None, doubt)) for doubt in doubts),
        "input_tokens": (
            -1 if doubt.input else reply.input_tokens for reply, doubt in zip(replies, doubts, strict=True)
        ),
        "cached_tokens": (
            -1 if doubt.cached else reply.cached_tokens for reply, doubt in zip(replies, doubts, strict=True)
        ),
        "output_tokens": (count for count, _ in tokens),
        "output_tokens_source": (source for _, source in tokens),
        "status": (status for status, _ in outcomes),
        "http_status": (row.status_code for row in rows),
        "error": (error for _, error in outcomes),
        "received_bytes": (row.received_bytes for row in rows),
        "timings_source": (timing.source for timing in timings),
        "peak_memory_bytes": (timing.peak_memory_bytes for timing in timings),
        "chunk_start": accumulate((len(reply.chunk_ns) for reply in replies), initial=0),
        "choice_start": accumulate((len(reply.chunk_choice) for reply in replies), initial=0),
    }
    dtypes = {column.name: _DTYPES[str(column.type)] for column in fields(RequestLog)}
    chunks = {name: np.concatenate([np.empty(0, np.int64), *map(attrgetter(name), replies)]) for name in _OF_CHUNKS}
    return RequestLog(**{name: np.fromiter(values, dtypes[name]) for name, values in columns.items()}, **chunks)
