"""`RequestFold`: the table of requests, filled from the raw logs.

Here replies are parsed, once, after they were stamped: while a run goes, or long after.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

import msgspec
import numpy as np

from sidelight.loadgen.protocols.reading.reply import MOST, head_of, in_order, joined, reads_in
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest, RequestPart, trace_id
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.requests.table.plans import Plans
from sidelight.loadgen.requests.table.readers import TABLE_ROWS, EndedRequest, ReaderProcesses, RequestReader
from sidelight.loadgen.requests.table.rows import columns, row_of
from sidelight.loadgen.requests.table.stored import StoredRequests
from sidelight.rundir.columns import concat, take

READ_ALONE = 20_000  # requests before other processes are worth their start
# Of requests that have ended; beyond, they are written to a file.
_ROWS_IN_MEMORY, _CHUNKS_IN_MEMORY = 50_000, 1 << 21
# Of a reply that goes on, what is looked at for its first token.
_BEGINNING_BYTES = 16 * 1024
# In a request's body: an image or a video that the server fetches, which may be any number of tokens.
_LINKED = b'_url"'
# What may come behind the last token: a finish reason, usage, [DONE].
_CLOSING_READS = 3
# Of a part and of a plan: what becomes a number of 64 bits.
_part_numbers = attrgetter(
    "index", "seq", "worker", "scheduled_ns", "dispatch_ns", "held_ns", "connected_ns", "submit_ns", "status", "end_ns"
)
_plan_numbers = attrgetter("index", "input_tokens", "max_tokens", "session", "turn")


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
    is held as bytes. With `follow`, requests are stored only after `ended` has returned them. Of a run of many requests
    replies are read by `processes`; then no part may come after `table`.

    - planned, but without a part: not in the table, it was never dispatched
    - without its last part: status in_flight, and whatever its bytes tell
    - a part without its plan (a torn plan): phase "" and declared_input_tokens -1
    """

    def __init__(
        self,
        *,
        run_id: str,
        protocol: str = "chat",
        follow: bool = False,
        processes: int = 1,
        rows_in_memory: int = _ROWS_IN_MEMORY,
    ) -> None:
        self._run_id, self._follow = run_id, follow
        self._rows_in_memory, self._chunks_in_memory = rows_in_memory, _CHUNKS_IN_MEMORY
        self._protocol = PROTOCOLS[protocol]
        self._reader = RequestReader(protocol, run_id)
        self._others: ReaderProcesses | None = None
        self._start_others = partial(ReaderProcesses, processes, protocol, run_id) if processes > 1 else None
        self._ended = 0
        self._plans = Plans()
        self._parts: dict[int, list[RequestPart]] = {}
        self._lengths: dict[int, int] = {}
        self._tables: list[RequestLog] = []
        self._returned = 0  # of these tables
        self._stored = StoredRequests(run_id)
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
            is_counted = request.turn <= 0 and _LINKED not in request.body
            self._plans.add(request, len(request.body) if is_counted else -1)

    def is_planned(self, index: int) -> bool:
        """Return whether the plan of a request is known."""
        return index in self._plans

    @property
    def refused(self) -> list[tuple[str, Exception]]:
        """Return the requests that no worker has written and other processes noticed: their origins, and why."""
        return self._others.refused if self._others else []

    def add(self, part: RequestPart, origin: str = "") -> None:
        """Add a part of a request. Once all its parts are there, the request is read.

        Raises ValueError for a part that no worker has written, as `reply.unpack` does. Where other processes read,
        that stands in `refused`, with the origin of the last part.
        """
        _require_bounds(_part_numbers(part), f"a part of request {part.index}")
        parts = self._parts.setdefault(part.index, [])
        if not parts:
            self.sent[self._plans.of(part.index)[0].phase] += 1
        parts.append(part)
        if part.last:
            self._lengths[part.index] = 1 + part.seq
        if len(parts) == self._lengths.get(part.index):
            del self._parts[part.index], self._lengths[part.index]
            self._unread.pop(part.index, None)
            if (stream := self._streams.pop(part.index, None)) is not None:
                self.streamed[stream.phase] -= stream.tokens
            self._read(EndedRequest(parts, *self._plans.of(part.index)), origin)
        elif part.reads_ns:
            self._unread[part.index] = None

    def _read(self, ended: EndedRequest, origin: str) -> None:
        self._ended += 1
        if self._ended == READ_ALONE + 1 and self._start_others is not None:
            self._others = self._start_others()
        if self._others is not None:
            self._others.add(ended, origin)
        else:
            self._reader.add(ended)
        if not self._follow and self._ended % min(TABLE_ROWS, self._rows_in_memory) == 0:
            self._take_tables()
            self._store()

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
            planned, _ = self._plans.of(index)
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
        """Return the requests that ended since the last call, in that order. Only with `follow`."""
        self._take_tables()
        tables, self._returned = self._tables[self._returned :], len(self._tables)
        self._store()
        return concat([columns([], self._run_id), *tables])

    def table(self) -> RequestLog:
        """Return all requests so far, by ascending index, those in flight as they are now."""
        self._take_tables(last=True)
        in_flight = []
        for index, parts in self._parts.items():
            # What no worker has written is noticed in a request that ended when it is read, and counted there.
            with suppress(ValueError):
                if (row := row_of(parts, *self._plans.of(index), self._protocol, may_wait=False)) is not None:
                    in_flight.append(row)
        whole = concat([*self._tables, columns(in_flight, self._run_id)])
        if self._stored:
            return self._stored.table(whole)
        return take(whole, np.argsort(whole.index, kind="stable"))

    def _take_tables(self, *, last: bool = False) -> None:
        self._tables += self._reader.tables()
        if self._others is not None:
            self._tables += self._others.tables(last=last)

    def _store(self) -> None:
        """Write many requests to a file. On a full disk they stay in memory."""
        rows, chunks = sum(map(len, self._tables)), sum(len(table.chunk_ns) for table in self._tables)
        if rows < self._rows_in_memory and chunks < self._chunks_in_memory:
            return
        try:
            self._stored.append(concat(self._tables))
        except OSError:
            self._rows_in_memory, self._chunks_in_memory = 2 * self._rows_in_memory, 2 * self._chunks_in_memory
        else:
            self._tables, self._returned = [], 0


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


def _require_bounds(numbers: Sequence[int], of_what: str) -> None:
    if min(numbers) < -1 or max(numbers) >= MOST:
        raise ValueError(f"{of_what} has numbers that are out of bounds")
