"""Trace of one request: its spans, and the beginning of the trace of the engine's span."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.spans import by_request_id
from sidelight.loadgen.requests.table.log import RequestLog, unknown_requests
from sidelight.recorded.gateway_spans import GatewaySpan, GatewaySpans, nested
from sidelight.rundir.clock import AnchoredClock
from sidelight.scraper.spans.received import ReceivedSpan, received_spans
from sidelight.scraper.spans.requests import EngineSpans, request_spans
from sidelight.sidecar.run.preparation.preflight import ProbeReply

By = Literal["trace", "request id", "time", ""]
_CLOCKS_NS = 1_000_000_000  # by which the engine's clock may be off, and its span still be known by its time
_DEPTH = 32

Traces = Mapping[bytes, Sequence[ReceivedSpan]]


@dataclass(slots=True)
class ProbeSpans:
    """Received spans by trace id, and the addresses that receive them. Spans with a fault are left out."""

    clock: AnchoredClock
    listen: str = ""
    listen_http: str = ""
    traces: dict[bytes, list[ReceivedSpan]] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, received_ns: int, export: ExportTraceServiceRequest) -> None:
        """Add the spans of an export."""
        for received in received_spans(export, received_ns):
            if not received.fault:
                self.traces.setdefault(received.span.trace_id, []).append(received)
                self.services.add(received.service)
        self.news.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trail:
    """Statements of the spans of one request.

    engine       the span of the engine's request, None where none came; `by` is how it was known to be this one's
    candidates   how many engines' spans came at its time, in traces of which nothing else is known
    unrelated    how many spans of other engines' requests came
    begun_by     the service that began the trace of the engine's span, "" where it states no name, or that trace is
                 ours; None where a span above the engine's did not come
    is_root      the engine's span has none above it
    gateways     those in our trace and in that of the engine's span, outermost first, as a run has them
    services     whose spans came in our trace, but the engine's
    absent       whose spans came, but neither in our trace nor in that of the engine's span; no engine's
    bears_request_id  whether the engine's span bears our X-Request-Id
    parts        the parts of its time, as a run has them
    """

    engine: ReceivedSpan | None
    by: By
    candidates: int
    unrelated: int
    begun_by: str | None
    is_root: bool
    gateways: tuple[GatewaySpan, ...]
    services: tuple[str, ...]
    absent: tuple[str, ...]
    bears_request_id: bool
    parts: Parts

    @property
    def is_complete(self) -> bool:
        """Return whether the engine's span came, and all above it."""
        return self.by in ("trace", "request id") and self.begun_by is not None


def follow(answer: ProbeReply, traces: Traces, ours: Collection[str]) -> Trail:
    """Return the engine's span of a request, and its surroundings. `ours` are the traces of all our requests."""
    trace_id = bytes.fromhex(answer.trace_id)
    in_trace = traces.get(trace_id, ())
    others = [span for key, spans in traces.items() if key.hex() not in ours for span in spans]
    engine, by, candidates = _engine(answer, in_trace, others)
    around = traces[engine.span.trace_id] if engine is not None and by != "trace" else ()
    collected, spans = GatewaySpans(), (*in_trace, *around)
    for received in spans:
        collected.add(received)
    both = dict.fromkeys((trace_id, engine.span.trace_id if engine is not None else trace_id))
    gateways = nested(*map(collected.of, both))
    engines = {span.service for span in (*in_trace, *others) if span.kind.role in ("request", "stage")}
    here = {span.service for span in spans}
    requests, table = request_of(answer), request_spans(spans)
    begun_by, is_root = (None, False) if engine is None else _beginning(answer, engine, spans)
    return Trail(
        engine=engine,
        by=by,
        candidates=candidates,
        unrelated=sum(span.kind.role == "request" for span in others) - (by not in ("", "trace")),
        begun_by=begun_by,
        is_root=is_root,
        gateways=gateways,
        services=tuple(sorted({span.service for span in in_trace} - engines)),
        absent=tuple(sorted({span.service for span in others} - here - engines)),
        bears_request_id=bool(_bearing(answer, "", table)),
        parts=break_down(requests, join(requests, table), nothing(1, ""), gateways=[gateways]),
    )


def _engine(
    answer: ProbeReply, in_trace: Sequence[ReceivedSpan], others: Sequence[ReceivedSpan]
) -> tuple[ReceivedSpan | None, By, int]:
    """Return the engine's span, its kind of match, and the number of candidates by time. They are counted where the
    time alone would tell.
    """
    for received in in_trace:
        if received.kind.role == "request":
            return received, "trace", 1
    requests = [received for received in others if received.kind.role == "request"]
    bearing = _bearing(answer, answer.reply.response_id, request_spans(others))
    for received in requests:
        if received.span.span_id in bearing:
            return received, "request id", 1
    begin_ns, end_ns = answer.exchange.submit_ns - _CLOCKS_NS, answer.exchange.end_ns + _CLOCKS_NS
    candidates = [
        received
        for received in requests
        if begin_ns <= received.span.start_time_unix_nano and received.span.end_time_unix_nano <= end_ns
    ]
    return (candidates[0], "time", 1) if len(candidates) == 1 else (None, "", len(candidates))


def request_of(answer: ProbeReply, response_id: str | None = None) -> RequestLog:
    """Return a request as a table of one row; `response_id` in place of its own."""
    exchange, reply = answer.exchange, answer.reply
    stamps = {
        "dispatch_ns": exchange.dispatch_ns,
        "submit_ns": exchange.submit_ns,
        "first_output_ns": reply.first_output_ns,
        "first_token_ns": reply.first_token_ns,
        "last_token_ns": reply.last_token_ns,
        "end_ns": exchange.end_ns,
        "http_status": exchange.status,
    }
    texts = {
        "trace_id": answer.trace_id,
        "request_id": answer.request_id,
        "response_id": reply.response_id if response_id is None else response_id,
        "status": "ok",
    }
    columns: dict[str, Any] = {name: np.array([value]) for name, value in stamps.items()}
    columns |= {name: np.array([text], dtype=np.object_) for name, text in texts.items()}
    return replace(unknown_requests(1), **columns)


def _bearing(answer: ProbeReply, response_id: str, spans: EngineSpans) -> set[bytes]:
    """Return the ids of engines' spans with a request's X-Request-Id or its reply's id."""
    joined = by_request_id(request_of(answer, response_id), spans, set(), [0], [[]])
    return {bytes.fromhex(times.span_id) for _, times in joined}


def _beginning(answer: ProbeReply, engine: ReceivedSpan, spans: Sequence[ReceivedSpan]) -> tuple[str | None, bool]:
    """Return the service that began the engine's trace, and whether it is the engine. The service is as in
    `Trail.begun_by`.
    """
    by_id = {received.span.span_id: received for received in spans}
    top = engine
    for _ in range(_DEPTH):
        parent = top.span.parent_span_id
        if not parent:
            return top.service, top is engine
        if parent.hex() == answer.span_id:
            return "", False
        if parent not in by_id:
            return None, False
        top = by_id[parent]
    return None, False
