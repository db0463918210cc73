"""Scan of an export before it is logged: its number of spans, their faults, and the traces that a run waits for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.scraper.spans.intake.export import parsed
from sidelight.scraper.spans.received import ReceivedSpan, SharingProcesses, received_spans

_TRACES_KEPT = 100_000
_MOST_SERVICES = 8  # before an engine, of which a trace is noted to have spans


@dataclass(slots=True, kw_only=True)
class ExportScan:
    """An export: its spans, those with a fault by kind with the first of each, and those that may be awaited."""

    request: ExportTraceServiceRequest
    spans: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first: dict[str, ReceivedSpan] = field(default_factory=dict)
    awaited: list[ReceivedSpan] = field(default_factory=list)


def scan(body: bytes, received_ns: int, *, is_awaited: bool) -> ExportScan:
    """Parse an export and classify its spans. Raises Refusal, MemoryError."""
    scanned = ExportScan(request=parsed(body))
    for span in received_spans(scanned.request, received_ns):
        scanned.spans += 1
        if span.fault:
            scanned.faults[span.fault] += 1
            scanned.first.setdefault(span.fault, span)
        elif is_awaited and (span.kind.tells_all or _is_of_stages(span) or _serves(span)):
            scanned.awaited.append(span)
    return scanned


@dataclass(slots=True)
class _Stages:
    """Spans of a trace with stages: requests by their processes, and last stages."""

    requests: set[str] = field(default_factory=set)
    prefilled: bool = False
    stepped: bool = False
    is_shared: bool = False

    def note(self, received: ReceivedSpan) -> None:
        """Record a span of a request, or a stage."""
        kind = received.kind
        if kind.role == "request" and len(self.requests) < _MOST_SERVICES:
            self.requests.add(received.process)
        self.prefilled |= kind.ends_prefill
        self.stepped |= kind.ends_step
        self.is_shared |= kind.is_shared

    @property
    def tell_one(self) -> bool:
        """Return whether the times of one engine are known."""
        return bool(self.requests) and (self.prefilled or self.stepped)

    @property
    def tell_all(self) -> bool:
        """Return whether the times of all its engines are known."""
        return self.tell_one and (not self.is_shared or (self.prefilled and self.stepped and len(self.requests) > 1))


class AwaitedTraces:
    """Register of complete traces, for a run that waits for its own at its end."""

    def __init__(self) -> None:
        self._traces: dict[bytes, set[str]] = {}  # by trace, the processes of the engines that served it
        self._sharing = SharingProcesses()
        self._stages: dict[bytes, _Stages] = {}
        self._serving: dict[bytes, set[str]] = {}  # by trace, the services before an engine whose spans came
        self._news = asyncio.Event()

    def note(self, scanned: ExportScan) -> None:
        """Record an export's spans of requests, and of services on the way to the engine."""
        for received in scanned.awaited:
            trace_id = received.span.trace_id
            if received.kind.tells_all:
                processes = self._traces.setdefault(trace_id, set())
                processes.add(received.process)
                self._sharing.is_half(processes)
            elif _is_of_stages(received):
                self._stages.setdefault(trace_id, _Stages()).note(received)
            elif _serves(received):
                services = self._serving.setdefault(trace_id, set())
                if len(services) < _MOST_SERVICES:
                    services.add(received.service)
        for traces in (self._traces, self._stages, self._serving):
            while len(traces) > _TRACES_KEPT:
                del traces[next(iter(traces))]
        self._news.set()

    async def settle(self, seconds: float, trace_ids: Collection[bytes]) -> int:
        """Wait until these traces are complete, at most `seconds`; return the number without spans.

        Without traces it waits the whole time.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not trace_ids or self._lack_engines(trace_ids) or not self._have_gateways(trace_ids):
                    self._news.clear()
                    await self._news.wait()
        with_stages = {trace_id for trace_id, stages in self._stages.items() if stages.tell_one}
        return len(set(trace_ids) - self._traces.keys() - with_stages)

    def _lack_engines(self, trace_ids: Collection[bytes]) -> bool:
        """Return whether a trace lacks the span of an engine, or of one of two."""
        return any(map(self._lacks_engine, trace_ids))

    def _lacks_engine(self, trace_id: bytes) -> bool:
        if trace_id in self._traces:
            return self._sharing.is_half(self._traces[trace_id])
        return trace_id not in self._stages or not self._stages[trace_id].tell_all

    def _have_gateways(self, trace_ids: Collection[bytes]) -> bool:
        """Return whether each trace has spans of every service that serves any of them."""
        served = [self._serving.get(trace_id, set()) for trace_id in trace_ids]
        every = set().union(*served)
        return all(services == every for services in served)


def _is_of_stages(received: ReceivedSpan) -> bool:
    """Return whether a span is a request or a stage that is waited for."""
    kind = received.kind
    return kind.role == "request" or kind.ends_prefill or kind.ends_step or kind.is_shared


def _serves(received: ReceivedSpan) -> bool:
    """Return whether a span is of a service before the engine."""
    role = received.kind.role
    is_served = role in ("gateway_call", "call", "other") and received.span.kind == Span.SPAN_KIND_SERVER
    return role == "gateway" or is_served
