"""The requests of production traffic as they end, with where their waits went: from spans and pages, in the order in
which these came. For a watch while it goes, and for the report of its logs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sidelight.correlator.exact.clock_offset import EngineClocks
from sidelight.correlator.exact.span_matching import spans_by_time
from sidelight.correlator.exact.spans import bearing_id, same_id
from sidelight.correlator.live.breakdown import EndedRequests, break_down_ended, estimated
from sidelight.correlator.live.counting import TraceCount
from sidelight.correlator.live.estimate import EstimateWindow, hold_traced
from sidelight.correlator.live.traces import TracedRequest, with_gateways
from sidelight.correlator.live.window import KEEP_S, MOST_BYTES, MOST_SPANS, TraceWindow
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.client_spans import ClientSpan, request_log
from sidelight.recorded.gateway_spans import nested
from sidelight.scraper.spans.requests import request_spans
from sidelight.scraper.spans.spec import SETTLE_S

WAIT_S = 30.0  # for the other half of a request, where halves of that side came
JOIN_EVERY_S = 10.0  # by time: a thousand of each side take a third of a second
MOST_HALVES = 1000

Guard = Callable[[], AbstractContextManager[None]]
Step = Callable[[Sequence[TracedRequest]], None]


class SpanRequests:
    """Owns the windows that requests are made in: `spans`, the `halves` that are in several traces, the `count` of
    where traces break, and `estimates` for those that no engine's span speaks of.

    `guard` decides what becomes of an exception that is our defect: `defective` counts the requests that it
    cost, and it costs no others. The spans of several `shards` have as much room as in each; `is_shard`: others see
    the other traces.
    """

    def __init__(self, guard: Guard, *, shards: int = 1, is_shard: bool = False) -> None:
        self.spans = TraceWindow(guard=guard, most_spans=shards * MOST_SPANS, most_bytes=shards * MOST_BYTES)
        self.halves = Halves(self.spans, guard)
        self.count = TraceCount(is_shard=is_shard)
        self.estimates = EstimateWindow[RequestLog]()
        self._guard, self._clocks = guard, EngineClocks()
        self._defective = 0

    @property
    def defective(self) -> int:
        """Return the least number of requests lost to our own defects."""
        return self._defective + self.spans.defective

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of the windows; of them, `pending`, `halves` and `waiting` are requests to be counted."""
        return {**self.spans.sizes, **self.halves.sizes, **self.estimates.sizes}

    @property
    def pending(self) -> int:
        """Return the number of requests that may get more spans."""
        return self.sizes["pending"] + self.sizes["halves"]

    def missed(self, back_ns: int) -> None:
        """Note that no receiver ran until then: spans that could not be sent are awaited from that moment on."""
        self.spans.missed(back_ns)
        self.halves.missed(back_ns)

    def ended(self, now_ns: int, *, all_of_it: bool = False) -> tuple[list[TracedRequest], list[EndedRequests]]:
        """Return the newly complete requests, and those that were or cannot be broken down.

        A request is complete, once, when its spans are there. It is in the second list at once, or up to a minute later
        where it waited for an estimate.
        """
        finished = self.spans.finished(now_ns, all_of_it=all_of_it)
        with self._guard():
            finished = self.halves.joined(finished, now_ns, all_of_it=all_of_it)
            self.count.take(finished, now_ns, is_last=all_of_it)
        ended: list[EndedRequests] = []
        free: list[TracedRequest] = []
        self.each(lambda requests: free.extend(hold_traced(self.estimates, requests, now_ns)), finished)
        self.each(lambda requests: ended.append(break_down_ended(requests, self._clocks)), free)
        for take in (self.estimates.estimates, self.estimates.leaving):
            with self._guard():
                estimates = take(now_ns, all_of_it=all_of_it)
                ended += [estimated(estimate.requests, estimate.attribution, estimate.parts) for estimate in estimates]
        return finished, ended

    def each(self, step: Step, requests: Sequence[TracedRequest]) -> None:
        """Take a step for all requests at once, or where that fails for each alone; count those it fails for."""
        if requests and not self._succeeds(step, requests):
            self._defective += sum(not self._succeeds(step, [request]) for request in requests)

    def _succeeds(self, step: Step, requests: Sequence[TracedRequest]) -> bool:
        is_lost = True
        with self._guard():
            step(requests)
            is_lost = False
        return not is_lost


@dataclass(slots=True, eq=False)
class _Half:
    """One side's half of a request, and since when it is held; `is_open` until it is given out."""

    request: TracedRequest
    held_ns: int
    ids: Sequence[tuple[str, str]] = ()  # of each span of an engine: the engine's name and the request's id there
    is_open: bool = True

    @property
    def client(self) -> ClientSpan:
        """Return the span of a client's half."""
        if self.request.client is None:
            raise AssertionError("a client's half has the client's span")
        return self.request.client


class Halves:
    """Store of half requests, until their halves are joined.

    Of one half only the client's spans came, of the other only those behind it: through a gateway that begins a trace
    of its own, or passes none on. They are joined by the id of the reply, else by time. One without a counterpart is
    given out after WAIT_S, or at once where nothing came that could be one. The last MOST_HALVES of each side are kept
    for a minute, also those given out: they show what is usual.
    """

    def __init__(self, spans: TraceWindow, guard: Guard) -> None:
        self._spans, self._guard = spans, guard
        self._clients: deque[_Half] = deque()
        self._engines: deque[_Half] = deque()
        self._next_ns = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of halves that wait for the other one."""
        return {"halves": sum(half.is_open for half in (*self._clients, *self._engines))}

    def missed(self, back_ns: int) -> None:
        """Note that no receiver ran until then: what could not be sent is awaited from that moment on."""
        for half in (*self._clients, *self._engines):
            half.held_ns = max(half.held_ns, back_ns)

    def joined(self, finished: Sequence[TracedRequest], now_ns: int, *, all_of_it: bool) -> list[TracedRequest]:
        """Take in requests; return those that are whole, those found to be one, and those that await nothing.

        One that is late takes the place of its half; it is dropped if that was given out as a request, by its
        client's span.
        """
        finished = [request for request in finished if not request.is_late or self._replace(request)]
        requests: list[TracedRequest] = []
        of_clients = [request for request in finished if not request.engine and not request.evicted]
        self._clients.extend(_Half(request, now_ns) for request in of_clients)
        # Where clients' halves came, what begins with a server's span may be the other half: its caller's is not there.
        are_sought = any(not half.client.serves for half in self._clients) or self._spans.has_clients_alone
        came = bool(of_clients)
        for request in finished:
            if request.engine and (request.client is None or (are_sought and request.client.serves)):
                ids = [(step.kind.engine, step.request_id) for step in request.engine if step.kind.role == "request"]
                self._engines.append(_Half(request, now_ns, ids))
                came = True
            elif request.engine or request.evicted:
                requests.append(request)
        if came:
            with self._guard():
                requests += self._by_id()
        if now_ns >= self._next_ns or all_of_it:
            self._next_ns = now_ns + round(JOIN_EVERY_S * 1e9)
            with self._guard():
                requests += self._by_time(now_ns - (0 if all_of_it else round(SETTLE_S * 1e9)))
        requests += self._alone(now_ns, all_of_it=all_of_it)
        return requests

    def _replace(self, late: TracedRequest) -> bool:
        """Close the half of a request that is late; return whether the request was not counted yet."""
        keys = _span_keys(late)
        halves = [half for half in (*self._clients, *self._engines) if half.is_open]
        halves = [half for half in halves if not keys.isdisjoint(_span_keys(half.request))]
        for half in halves:
            half.is_open = False
        return bool(halves) or not late.given

    def _by_id(self) -> Iterator[TracedRequest]:
        """Yield requests joined from halves by the id of the reply. An id that several of a side have joins none."""
        clients = [half for half in self._clients if half.is_open and half.client.response_id]
        engines = [half for half in self._engines if half.is_open]
        if not clients or not engines:
            return
        places: dict[str, dict[str, list[int]]] = {}
        for number, half in enumerate(engines):
            for engine, text in half.ids:
                places.setdefault(engine, {}).setdefault(same_id(text), []).append(number)
        claims: dict[int, list[_Half]] = {}
        for half in clients:
            for engine, by_id in places.items():
                bearing = set(bearing_id(engine, "", half.client.response_id, by_id))
                if len(bearing) == 1:
                    claims.setdefault(bearing.pop(), []).append(half)
        for number, claiming in claims.items():
            if len(claiming) == 1 and claiming[0].is_open:
                yield self._together(claiming[0], engines[number], "id")

    def _by_time(self, before_ns: int) -> Iterator[TracedRequest]:
        """Join halves by time, clients' only those that are held since `before_ns`: what could fit has come by now."""
        clients = [half for half in self._clients if not half.client.failed]
        if not any(half.is_open and half.held_ns <= before_ns for half in clients):
            return
        engines = [half for half in self._engines if len(half.ids) == 1]
        if not any(half.is_open for half in engines):
            return
        steps = [(step, half) for half in engines for step in half.request.engine]
        owners = {(step.span.trace_id.hex(), step.span.span_id.hex()): half for step, half in steps}
        log = request_log([half.client for half in clients], [half.request.trace_id for half in clients])
        spans = request_spans(step for step, _ in steps)
        # Whom a client called says nothing of the engine behind it.
        log = replace(log, endpoint_url=np.full(len(log), "", dtype=np.object_))
        places = spans_by_time(log, spans, np.arange(len(spans))).row
        for row in np.flatnonzero(places >= 0).tolist():
            client, engine = clients[row], owners[spans.trace_id[places[row]], spans.span_id[places[row]]]
            if client.is_open and client.held_ns <= before_ns and engine.is_open:
                yield self._together(client, engine, "time")

    def _together(self, client: _Half, engine: _Half, joined: Literal["id", "time"]) -> TracedRequest:
        """Make one request of two halves; what stands before the engine in its trace is of gateways."""
        client.is_open = engine.is_open = False
        passed = nested(
            self._spans.gateways_of(client.request, is_behind=False),
            self._spans.gateways_of(engine.request, is_behind=True),
        )
        request = replace(
            client.request,
            engine=engine.request.engine,
            joined=joined,
            begins_at=engine.request.begins_at,
            is_root=engine.request.is_root,
        )
        return with_gateways(request, passed)

    def _alone(self, now_ns: int, *, all_of_it: bool) -> Iterator[TracedRequest]:
        """Yield the halves without a counterpart, and forget those of more than a minute ago."""
        sides = ((self._clients, self._engines, 1), (self._engines, self._clients, 0))
        for side, others, other in sides:
            if not side:
                continue
            wait_s = WAIT_S if others else SETTLE_S if self._spans.awaits[other] else 0.0
            for half in side:
                if half.is_open and (all_of_it or half.held_ns <= now_ns - round(wait_s * 1e9)):
                    half.is_open = False
                    yield half.request
        for side in (self._clients, self._engines):
            while side and (len(side) > MOST_HALVES or side[0].held_ns < now_ns - round(KEEP_S * 1e9)):
                half = side.popleft()
                if half.is_open:
                    yield half.request


def _span_keys(request: TracedRequest) -> set[bytes]:
    """Return the identifying keys of a request's spans.

    They are those of its client, as it was given out and as it is, and of the first span of its engine.
    """
    client, engine = request.client, request.engine
    keys = {request.trace_id + key for key in (request.given, client.span_id if client else b"") if key}
    return keys | {step.span.trace_id + step.span.span_id for step in engine[:1]}
