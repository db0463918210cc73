"""A bounded window of spans as they come: when all spans of a request are there, or were waited for long enough.

Which of a trace's spans belong to a request is `traces`' part, what they add up to `breakdown`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.correlator.live.traces import (
    SpanTrace,
    TracedRequest,
    last_servers,
    own_copy,
    requests_of,
    with_ends,
    with_gateways,
)
from sidelight.recorded.client_spans import client_span
from sidelight.recorded.gateway_spans import GatewaySpan, gateways_between, note_body
from sidelight.scraper.spans.log import ExportRecord
from sidelight.scraper.spans.received import OTHER, ReceivedSpan, SharingProcesses
from sidelight.scraper.spans.spec import DECODE_S, SETTLE_S

# The spans of a request's choices come together, or nearly so.
QUIET_S = 1.0
# Older spans are forgotten, but not that they came: exporters send again for five minutes.
KEEP_S = 60.0
# For a decode engine's span where no two are known to share requests: one token may be all that a client asked for.
PERHAPS_DECODE_S = 50.0
KNOWN_S = 360.0
MOST_KNOWN = 400_000  # some 30 MB; with three spans a request, 370 requests/s for so long
_PAST_S = 60.0
MOST_SPANS = 100_000
MOST_BYTES = 64 * 1024 * 1024  # of the engines' spans, whose attributes are kept
_NOTHING = Span()


@dataclass(slots=True, kw_only=True)
class _Past:
    """Spans that were forgotten from a moment on, as hashes of their ids."""

    since_ns: int
    spans: set[int] = field(default_factory=set)


class TraceWindow:
    """Owns the spans of late, none longer than KEEP_S: at most `most_spans` of them, and of engines' `most_bytes`; and
    of those that came within KNOWN_S, MOST_KNOWN at most, that they came.

    `repeated` spans came again, `evicted` had to make room for newer ones, `engine_spans` of engines' requests were
    given out, `probes` are of health probes, which are no requests. Of all `traces`, the spans of those that are
    `split` came to several shards. `defective` requests (at least) were in traces that could not be read for a defect
    here: `guard`, which each trace is read under, decides what becomes of the exception; such a trace is dropped, and
    costs no other.
    """

    def __init__(
        self,
        *,
        settle_s: float = SETTLE_S,
        most_spans: int = MOST_SPANS,
        most_bytes: int = MOST_BYTES,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.repeated = 0
        self.evicted = 0
        self.engine_spans = 0
        self.probes = 0
        self.traces = 0
        self.split = 0
        self.defective = 0
        self._guard = guard
        self._settle_ns = round(settle_s * 1e9)
        self._most_spans, self._most_bytes = most_spans, most_bytes
        self._traces: dict[bytes, SpanTrace] = {}  # in the order of their last spans
        self._open: dict[bytes, None] = {}
        self._span_count, self._bytes = 0, 0
        self._back_ns = 0
        self._beside_ns = -(2**62)  # when a gateway's span was last seen beside an engine's
        self._overflow: list[TracedRequest] = []
        self._sharing = SharingProcesses()
        self._past = deque([_Past(since_ns=0)])  # the latest last

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the numbers of spans, traces and pending traces in the window. Pending traces wait for more spans."""
        return {"spans": self._span_count, "traces": len(self._traces), "pending": len(self._open)}

    @property
    def awaits(self) -> tuple[bool, bool]:
        """Return flags for traces that wait for more spans: whether any has no engine span yet, and whether any has
        one.
        """
        has_engine = {bool(self._traces[trace_id].engine) for trace_id in self._open}
        return False in has_engine, True in has_engine

    @property
    def has_clients_alone(self) -> bool:
        """Return whether a pending trace has clients' calls but no spans of the called servers."""
        traces = (self._traces[trace_id] for trace_id in self._open)
        return any(
            not trace.engine
            and any(span.is_call for span in trace.spans.values())
            and not any(span.serves for span in trace.spans.values())
            for trace in traces
        )

    def gateways_of(self, request: TracedRequest, *, is_behind: bool) -> tuple[GatewaySpan, ...]:
        """Return the gateways of half a request, outermost first.

        Only spans that are still here are used.

        is_behind   its client's span is in another trace, so that even the outermost span is a gateway's
        """
        trace = self._traces.get(request.trace_id)
        if trace is None:
            return ()
        engine = {received.span.span_id for received in request.engine}.intersection(trace.spans)
        spans = trace.spans
        if is_behind and request.client is None:  # what was given out is another request's
            spans = {key: span for key, span in spans.items() if key in engine or key not in trace.done}
        return gateways_between(spans, trace.bodies, engine, None if is_behind else request.client)

    def take(self, export: ExportRecord, shard: int = 0) -> int:
        """Take in one export that came to a shard; return how many spans it has, those too that have a `fault` and are
        passed over.

        Raises ValueError for bytes that no receiver has written.
        """
        taken = 0
        for received in export.spans():
            taken += 1
            if not received.fault:
                self._take(received, shard)
        while self._span_count > self._most_spans or self._bytes > self._most_bytes:
            self._evict()
        return taken

    def missed(self, back_ns: int) -> None:
        """Note that no receiver ran until then: spans that could not be sent are awaited from that moment on."""
        self._back_ns = back_ns
        for trace_id in self._open:
            self._traces[trace_id].look_ns = 0

    def finished(self, now_ns: int, *, all_of_it: bool = False) -> list[TracedRequest]:
        """Return the requests that are complete or have waited long enough.

        A complete one has all of its spans. With `all_of_it`, every one left is returned.
        """
        requests, self._overflow = self._overflow, []
        for trace_id in list(self._open):
            trace = self._traces[trace_id]
            if now_ns >= trace.look_ns or all_of_it:
                self._read(requests, trace_id, trace, now_ns, all_of_it=all_of_it)
        with self._guard():
            self._forget(now_ns, now_ns - round(KEEP_S * 1e9))
            self._forget_past(now_ns)
        return requests

    def _read(
        self, requests: list[TracedRequest], trace_id: bytes, trace: SpanTrace, now_ns: int, *, all_of_it: bool
    ) -> None:
        """Add the requests of a trace that can be given out; a trace that cannot be read is dropped and counted."""
        is_read = False
        with self._guard():
            requests += self._finish(trace_id, trace, now_ns, all_of_it=all_of_it)
            is_read = True
        if not is_read:
            clients = trace.spans.keys() - trace.engine.keys() - trace.done
            self.defective += max(1, sum(trace.spans[key].is_call for key in clients))
            self._drop(trace_id)

    def _take(self, received: ReceivedSpan, shard: int) -> None:
        span, received_ns, role = received.span, received.received_ns, received.kind.role
        trace = self._traces.get(span.trace_id)
        if (trace is not None and span.span_id in trace.spans) or self._is_past(span.trace_id, span.span_id):
            self.repeated += 1
            return
        if trace is None:
            trace = SpanTrace(trace_id=span.trace_id, oldest_ns=received_ns, shard=shard)
            self.traces += 1
        else:
            del self._traces[span.trace_id]
        if shard != trace.shard and not trace.is_split:
            trace.is_split = True
            self.split += 1
        self._traces[span.trace_id] = trace
        trace.spans[span.span_id] = client_span(received)
        note_body(trace.bodies, received)
        if role in ("request", "stage"):
            copy = own_copy(received)
            self._bytes += copy.span.ByteSize()
            (trace.engine if role == "request" else trace.stages)[span.span_id] = copy
        if role == "probe":
            self.probes += 1
        trace.newest_ns, trace.look_ns = received_ns, 0
        self._open[span.trace_id] = None
        self._span_count += 1

    def _finish(self, trace_id: bytes, trace: SpanTrace, now_ns: int, *, all_of_it: bool) -> Iterator[TracedRequest]:
        """Yield the requests that are ready, and note when to look again."""
        quiet_ns = trace.newest_ns + round(QUIET_S * 1e9)
        # Where gateways send beside the engine's spans, these may come before theirs.
        awaits_gateway = trace.newest_ns <= self._beside_ns + round(KEEP_S * 1e9)
        again_ns = []
        servers = cache(partial(last_servers, trace))
        for request, since_ns, has_all in requests_of(trace):
            is_shared = self._sharing.is_half(request.processes)
            is_half = is_shared or request.awaits_decode
            if is_half and has_all:  # the other engine's span comes when its client's does
                begun_ns = max(since_ns, trace.newest_ns)
            elif request.awaits_decode:
                begun_ns = since_ns + round((DECODE_S if is_shared else PERHAPS_DECODE_S) * 1e9)
            else:
                begun_ns = since_ns
            due_ns = max(begun_ns, self._back_ns) + self._settle_ns
            passed: tuple[GatewaySpan, ...] | None = None
            is_whole = has_all and not is_half
            if is_whole and awaits_gateway:
                passed = _gateways(trace, request)
            if is_whole and (passed is None or any(gateway.is_beside for gateway in passed)):
                due_ns = min(due_ns, quiet_ns)
            if now_ns >= due_ns or all_of_it:
                passed = _gateways(trace, request) if passed is None else passed
                if any(gateway.is_beside for gateway in passed):
                    self._beside_ns = max(self._beside_ns, trace.newest_ns)
                yield self._give_out(trace, with_ends(trace, with_gateways(request, passed), servers))
            else:
                again_ns.append(due_ns)
        if again_ns:
            trace.look_ns = min(again_ns)
        else:
            self._open.pop(trace_id, None)

    def _give_out(self, trace: SpanTrace, request: TracedRequest) -> TracedRequest:
        """Note that a request is given out: of its engines' spans no more is kept than that they came, and where they
        stood, unless its client may still come.
        """
        for received in request.engine:
            self.engine_spans += received.kind.role == "request" and received.span.span_id not in trace.done
            trace.done.add(received.span.span_id)
            if request.client is not None:
                self._strip(trace, received.span.span_id)
        if request.client is not None:
            trace.done.add(request.client.span_id)
        return request

    def _strip(self, trace: SpanTrace, key: bytes) -> None:
        for spans in (trace.engine, trace.stages):
            if key in spans:
                self._bytes -= spans[key].span.ByteSize()
                spans[key] = replace(spans[key], span=_NOTHING, kind=OTHER)

    def _evict(self) -> None:
        """Make room: the trace that nothing came for the longest goes, and its requests as they are."""
        trace_id = next(iter(self._traces))
        trace = self._traces[trace_id]
        left: list[TracedRequest] = []
        self._read(left, trace_id, trace, 0, all_of_it=True)
        self._overflow += [replace(request, gateways=(), engine=(), evicted=True) for request in left]
        self.evicted += len(trace.spans)
        if trace_id in self._traces:
            self._drop(trace_id)

    def _forget(self, now_ns: int, before_ns: int) -> None:
        for trace_id, trace in list(self._traces.items()):
            if trace.oldest_ns >= before_ns or trace.look_ns > now_ns:  # what is awaited is not forgotten
                continue
            if trace.newest_ns < before_ns:
                self._drop(trace_id)
                continue
            # A trace that goes on and on loses its oldest spans.
            old = [key for key, span in trace.spans.items() if span.received_ns < before_ns]
            if len(old) == len(trace.spans):  # stamps may be out of order in logs of others
                self._drop(trace_id)
                continue
            self._remove(trace, old)
            trace.oldest_ns = min(span.received_ns for span in trace.spans.values())

    def _forget_past(self, now_ns: int) -> None:
        last = self._past[-1]
        if now_ns >= last.since_ns + round(_PAST_S * 1e9) or len(last.spans) > MOST_KNOWN // 8:
            self._past.append(_Past(since_ns=now_ns))
        while len(self._past) > 1 and (
            self._past[1].since_ns < now_ns - round(KNOWN_S * 1e9)
            or sum(len(past.spans) for past in self._past) > MOST_KNOWN
        ):
            self._past.popleft()

    def _is_past(self, trace_id: bytes, span_id: bytes) -> bool:
        key = hash((trace_id, span_id))
        return any(key in past.spans for past in self._past)

    def _drop(self, trace_id: bytes) -> None:
        trace = self._traces.pop(trace_id)
        self._remove(trace, list(trace.spans))
        self._open.pop(trace_id, None)

    def _remove(self, trace: SpanTrace, keys: Sequence[bytes]) -> None:
        self._past[-1].spans.update(hash((trace.trace_id, key)) for key in keys)
        for key in keys:
            del trace.spans[key]
            trace.done.discard(key)
            received = trace.engine.pop(key, None) or trace.stages.pop(key, None)
            self._bytes -= received.span.ByteSize() if received else 0
            trace.bodies.pop(key, None)
        self._span_count -= len(keys)
        # A server's own span may never come: each of its replies is kept no longer than as many spans of the trace are.
        while len(trace.bodies) > len(trace.spans):
            del trace.bodies[next(iter(trace.bodies))]


def _gateways(trace: SpanTrace, request: TracedRequest) -> tuple[GatewaySpan, ...]:
    """Return the gateways that a request passed, outermost first."""
    if request.client is None or not request.engine:
        return ()
    engine = {received.span.span_id for received in request.engine}.intersection(trace.engine)
    return gateways_between(trace.spans, trace.bodies, engine, request.client)
