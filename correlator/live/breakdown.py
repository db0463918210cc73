"""Breakdown of the waits of production traffic, request by request as they end.

The spans of clients and engines are read as in a run (`exact.spans`) and put together as in a run (`breakdown`). Only
times that one clock measured are subtracted, so that no clock has to agree with another. Requests without an engine's
span are `estimate`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import Attribution, nothing
from sidelight.correlator.exact.clock_offset import EngineClocks, handed_over
from sidelight.correlator.exact.spans import Owners, own_spans, span_times
from sidelight.correlator.exact.table import SLACK_S, SPAN_BY_TIME, Joined, Refusal, put, unjoined
from sidelight.correlator.live.reasons import (
    CONTRADICTION,
    EVICTED,
    FAILED,
    NO_CLIENT,
    NO_ENGINE,
    NO_FIRST,
    NO_TIMES,
    NOT_ESTIMATED,
)
from sidelight.correlator.live.traces import TracedRequest
from sidelight.correlator.parts import ENGINE_PARTS
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.client_spans import request_log
from sidelight.rundir.columns import Bools, Floats, Texts, take
from sidelight.scraper.spans.requests import EngineSpans, request_spans

_SOURCES = {"trace": "trace", "id": "request id", "time": SPAN_BY_TIME}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequests:
    """n requests that ended: `parts` break down the TTFT, `whole` the time to the end of the client's span.

    `requests` are what the clients' spans say of them, or without one the engine's, with no status; `attribution` the
    estimates where there is no engine's span.
    reason[n]: why the TTFT was not broken down, one of REASONS; "" where it was. In `whole`, network and gateway are
    what the whole took longer than in the engine; there is no TTFT in it. Of a contradiction neither is known.
    """

    requests: RequestLog
    attribution: Attribution
    parts: Parts
    whole: Parts
    reason: Texts

    def __len__(self) -> int:
        return len(self.reason)

    @property
    def engine_only(self) -> Parts:
        """Return the parts of requests without a client's span: queue and prefill as the engine's span states them."""
        return take(self.parts, self.requests.status == "")


class EngineMeans:
    """Means of queue and prefill over requests without a client's span."""

    def __init__(self) -> None:
        self._sums_s = dict.fromkeys((part.name for part in ENGINE_PARTS), 0.0)
        self._counts = dict.fromkeys(self._sums_s, 0)

    def add(self, engine_only: Parts) -> None:
        """Add the parts of requests."""
        for part in ENGINE_PARTS:
            values_s = engine_only.seconds(part)
            self._sums_s[part.name] += float(np.nansum(values_s))
            self._counts[part.name] += int(np.isfinite(values_s).sum())

    @property
    def ms(self) -> dict[str, float]:
        """Return the means by part, without unknown ones."""
        return {name: 1e3 * self._sums_s[name] / count for name, count in self._counts.items() if count}


def break_down_ended(requests: Sequence[TracedRequest], late: EngineClocks | None = None) -> EndedRequests:
    """Break down requests that ended, in their order, by the engines' spans; `late` is as of `handed_over`.

    A client's wait that is shorter than what the engine says it did in it, by over SLACK_S, is a contradiction.
    """
    clients = request_log([request.client for request in requests], [request.trace_id for request in requests])
    gateways = [request.gateways for request in requests]
    table, spans = _joined(requests, clients)
    joined = handed_over(table, clients, late=late, gateways=gateways)
    clients = _with_tokens(clients, joined, spans)
    no_estimates = nothing(len(requests), "")
    begins = np.array([bool(request.client and request.client.serves) for request in requests], dtype=np.bool_)
    parts = break_down(clients, joined, no_estimates, gateways=gateways, begins_at_gateway=begins)
    unseen = np.full(len(requests), -1, dtype=np.int64)
    ends = replace(clients, first_output_ns=unseen, first_token_ns=unseen)
    whole = break_down(ends, joined, no_estimates, gateways=gateways, begins_at_gateway=begins)
    inconsistent = _inconsistent(parts, parts.other_s) | _inconsistent(whole, whole.e2e_other_s)
    engine_only = np.array([request.client is None for request in requests], dtype=np.bool_)
    _discard(parts, inconsistent | engine_only)
    _discard(whole, inconsistent | engine_only)
    whole = _with_decode(whole, parts)
    reason = _reasons(requests, parts, joined, inconsistent)
    _stamp_by_engine(clients, joined, engine_only)
    return EndedRequests(requests=clients, attribution=no_estimates, parts=parts, whole=whole, reason=reason)


def estimated(requests: RequestLog, attribution: Attribution, parts: Parts) -> EndedRequests:
    """Return requests broken down by estimates, and those that left the window without one."""
    inconsistent = _inconsistent(parts, np.fmin(parts.other_s, parts.e2e_other_s))
    _discard(parts, inconsistent)
    why = np.where(inconsistent, CONTRADICTION, NOT_ESTIMATED)
    reason = np.where(parts.covered, "", why).astype(np.object_)
    return EndedRequests(requests=requests, attribution=attribution, parts=parts, whole=parts, reason=reason)


def _with_decode(whole: Parts, parts: Parts) -> Parts:
    """Return the parts of the whole time with clients' decode where engines' spans lack it."""
    rows = (whole.source != "none") & (parts.decode_source == "client")
    return replace(
        whole,
        decode_s=np.where(rows, parts.decode_s, whole.decode_s),
        decode_source=np.where(rows, "client", whole.decode_source).astype(np.object_),
        e2e_other_s=whole.e2e_other_s - np.where(rows, parts.decode_s, 0.0),
    )


def _inconsistent(parts: Parts, other_s: Floats) -> Bools:
    least_s = np.fmin(np.fmin(parts.network_s, parts.gateway_s), other_s)
    return np.asarray(least_s < -SLACK_S, dtype=np.bool_)


def _discard(parts: Parts, rows: Bools) -> None:
    parts.source[rows] = "none"
    parts.quality[rows] = "none"


def _reasons(requests: Sequence[TracedRequest], parts: Parts, joined: Joined, inconsistent: Bools) -> Texts:
    reasons = np.full(len(requests), "", dtype=np.object_)
    for row in np.flatnonzero(~parts.covered).tolist():
        request = requests[row]
        if request.evicted:
            reasons[row] = EVICTED
        elif request.client is None:
            reasons[row] = NO_CLIENT
        elif inconsistent[row]:
            reasons[row] = CONTRADICTION
        elif request.client.failed:
            reasons[row] = FAILED
        elif not request.engine:
            reasons[row] = NO_ENGINE
        else:
            reasons[row] = NO_TIMES if joined.source[row] == "none" else NO_FIRST
    return reasons


def _with_tokens(clients: RequestLog, joined: Joined, spans: EngineSpans) -> RequestLog:
    """Return the requests with the engine's counts of tokens where a client's span states none."""
    alone = np.flatnonzero((joined.place >= 0) & (joined.next_place < 0))
    for name in ("input_tokens", "output_tokens"):
        counts = getattr(clients, name)
        rows = alone[counts[alone] < 0]
        counts[rows] = getattr(spans, name)[joined.place[rows]]
    clients.output_tokens_source[clients.output_tokens >= 0] = "usage"
    return clients


def _stamp_by_engine(clients: RequestLog, joined: Joined, engine_only: Bools) -> None:
    """Set the stamps of requests without a client's span to those of their only engine."""
    rows = np.flatnonzero(engine_only & (joined.place >= 0) & (joined.next_place < 0) & np.isfinite(joined.ttft_s))
    clients.submit_ns[rows], clients.end_ns[rows] = joined.arrival_ns[rows], joined.end_ns[rows]
    clients.first_token_ns[rows] = joined.arrival_ns[rows] + np.rint(1e9 * joined.ttft_s[rows]).astype(np.int64)


def _joined(requests: Sequence[TracedRequest], clients: RequestLog) -> tuple[Joined, EngineSpans]:
    """Return the engine times of requests, and the engines' spans. The client's wait is compared with them later."""
    owners: dict[tuple[str, str], int] = {}
    for row, request in enumerate(requests):
        for received in request.engine:
            owners.setdefault((received.span.trace_id.hex(), received.span.span_id.hex()), row)
    spans = request_spans(received for request in requests for received in request.engine)
    places: dict[int, list[int]] = {}
    for place, key in enumerate(zip(spans.trace_id, spans.span_id, strict=True)):
        places.setdefault(owners[key], []).append(place)
    table = unjoined(len(requests))
    request_owners = Owners(clients)
    for row, request_places in places.items():
        selection = own_spans(request_owners, row, spans, request_places)
        times = None if isinstance(selection, Refusal) else span_times(spans, selection, request_places)
        if times is not None:
            put(table, row, _SOURCES[requests[row].joined], times)
    return table, spans
