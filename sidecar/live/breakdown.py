"""Live breakdown of a run's own requests, one by one, for the live page.

Derived as for the finished run, of what ended lately: first by spans and replies, once they have had time to come, then
by estimates of a window. The report, which knows the whole run, is more exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, takewhile

import numpy as np

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import Attribution, nothing
from sidelight.correlator.exact.clock_offset import EngineClocks, handed_over
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.spans import bearing_id, same_id
from sidelight.correlator.exact.table import unjoined
from sidelight.correlator.live.estimate import NO_SPAN, WINDOW_S, Estimated, EstimateWindow
from sidelight.correlator.live.traces import own_copy
from sidelight.correlator.requests import RequestColumns, Requests, of_log
from sidelight.exporter.prometheus.counts import counted, nothing_counted
from sidelight.exporter.prometheus.snapshot import PartCounts
from sidelight.exporter.report.verdict import largest_part
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.gateway_spans import GatewaySpans, nested
from sidelight.rundir.columns import Ints, concat, take
from sidelight.scraper.series.log import FailureRecord, ScrapeRow
from sidelight.scraper.spans.received import ReceivedSpan, SharingProcesses
from sidelight.scraper.spans.requests import request_spans
from sidelight.scraper.spans.spec import DECODE_S, SETTLE_S
from sidelight.sidecar.live.lately import Lately

LATEST, LATEST_S = 1000, 60.0  # requests: what is said of them costs some milliseconds each time


class LiveParts:
    """Requests, spans and pages of the last minute, and the counts since the start."""

    def __init__(self) -> None:
        self.counts: PartCounts = nothing_counted(sources=())
        self._spans: dict[bytes, list[ReceivedSpan]] = {}  # by trace, in the order in which the first of each came
        self._traces: dict[str, dict[str, list[int]]] = {}  # by engine and its id of the request
        self._gateways = GatewaySpans()
        self._sharing, self._clocks = SharingProcesses(), EngineClocks()
        self._listens = self._has_gateways = False
        self._fresh: deque[tuple[int, RequestLog]] = deque()  # from when on their spans are not waited for
        self._window = EstimateWindow[Requests]()
        self._released: list[tuple[Ints, Parts]] = []
        self.latest = Lately(most=LATEST, window_s=LATEST_S)

    @property
    def pending(self) -> int:
        """Return the number of requests that have ended and are not counted yet."""
        return sum(len(log) for _, log in self._fresh) + self._window.sizes["waiting"]

    @property
    def largest(self) -> dict[str, float]:
        """Return the largest part of the latest requests' TTFT with its share; nothing of a few."""
        latest = self.latest.group()
        return {} if latest is None else largest_part(latest.breakdown)

    def ended(self, log: RequestLog, now_ns: int) -> None:
        self._fresh.append((now_ns + (round(SETTLE_S * 1e9) if self._listens else 0), log))

    def spans(self, spans: Sequence[ReceivedSpan]) -> None:
        self._listens = self._listens or bool(spans)
        for received in spans:
            role = received.kind.role
            if role != "stage":
                self._gateways.add(received)
                self._has_gateways = self._has_gateways or role in ("gateway", "gateway_call", "call")
            if role in ("request", "stage"):
                copy = own_copy(received)
                self._spans.setdefault(copy.span.trace_id, []).append(copy)
                if role == "request" and copy.request_id:
                    traces = self._traces.setdefault(copy.kind.engine, {})
                    traces.setdefault(same_id(copy.request_id), []).append(int.from_bytes(copy.span.trace_id))

    def scraped(self, scrape: ScrapeRow | FailureRecord) -> None:
        self._window.scraped(scrape)

    def poll(self, now_ns: int) -> None:
        """Count the requests that can be broken down by now, and remove old data."""
        due: list[RequestLog] = []
        while self._fresh and (self._fresh[0][0] <= now_ns or self._has_come(self._fresh[0][1])):
            due.append(self._fresh.popleft()[1])
        if due:
            self._join(concat(due), now_ns)
        for estimated in (*self._window.estimates(now_ns), *self._window.leaving(now_ns)):
            self._count(estimated.requests, self._with_gateways(estimated), estimated.attribution, now_ns)
        before_ns = now_ns - round(WINDOW_S * 1e9)
        halves_ns = now_ns - round(DECODE_S * 1e9)
        old = takewhile(lambda item: item[1][0].received_ns < before_ns, self._spans.items())
        for trace_id, spans in list(old):
            awaited_ns = halves_ns if self._sharing.is_half(_processes(spans)) else before_ns
            if spans[-1].received_ns < awaited_ns:
                self._take(trace_id)
        self._gateways.forget(before_ns)
        self.latest.forget(now_ns)

    def _with_gateways(self, estimated: Estimated[Requests]) -> Parts:
        """Return the parts of estimated requests, with their gateways by spans."""
        if not self._has_gateways:
            return estimated.parts
        requests, attribution = estimated.requests, estimated.attribution
        gateways = [nested(self._gateways.of(bytes.fromhex(trace_id))) for trace_id in requests.trace_id]
        return break_down(requests, unjoined(len(requests), NO_SPAN), attribution, gateways=gateways)

    def released(self) -> list[tuple[Ints, Parts]]:
        """Return the parts that were counted since the last call, with their requests' indices."""
        released, self._released = self._released, []
        return released

    def _count(self, requests: RequestColumns, parts: Parts, attribution: Attribution, now_ns: int) -> None:
        self.counts = counted(self.counts, parts, requests=requests)
        self._released.append((requests.index, parts))
        if parts.covered.any():
            self.latest.take_parts(take(parts, parts.covered), take(attribution, parts.covered), now_ns)

    def _has_come(self, log: RequestLog) -> bool:
        """Return whether all spans have come. Where gateways send spans, one may come after the engine's."""
        if self._has_gateways:
            return False
        traces = (self._spans.get(bytes.fromhex(trace_id)) for trace_id in log.trace_id)
        return all(spans and not self._sharing.is_half(_processes(spans)) for spans in traces)

    def _spans_of(self, trace_id: str, request_id: str, response_id: str) -> Sequence[ReceivedSpan]:
        """Remove and return the spans of a request. They are those of its trace, else of the one that has its id."""
        if spans := self._take(bytes.fromhex(trace_id)):
            return spans
        for engine, traces in self._traces.items():
            for trace in bearing_id(engine, request_id, response_id, traces):
                return self._take(trace.to_bytes(16))
        return ()

    def _take(self, trace_id: bytes) -> Sequence[ReceivedSpan]:
        spans = self._spans.pop(trace_id, ())
        for span in spans:
            self._traces.get(span.kind.engine, {}).pop(same_id(span.request_id), None)
        return spans

    def _join(self, log: RequestLog, now_ns: int) -> None:
        """Count the requests with known times; the others wait for an estimate."""
        traces = [self._spans_of(*ids) for ids in zip(log.trace_id, log.request_id, log.response_id, strict=True)]
        may = (log.timings_source != "") | np.array([bool(spans) for spans in traces], dtype=np.bool_)
        known = np.zeros(len(log), dtype=np.bool_)
        if may.any():
            timed = take(log, may)
            joined = join(timed, request_spans(chain.from_iterable(traces)))
            pairs = zip(timed.trace_id, joined.trace_id, strict=True)
            gateways = [nested(*map(self._gateways.of, map(bytes.fromhex, dict.fromkeys(pair)))) for pair in pairs]
            joined = handed_over(joined, timed, late=self._clocks, gateways=gateways)
            known[may] = joined.source != "none"
            exact = break_down(timed, joined, nothing(len(timed), ""), gateways=gateways)
            self._count(take(log, known), take(exact, known[may]), nothing(int(known.sum()), ""), now_ns)
        waits = np.asarray(~known & (log.status == "ok"), dtype=np.bool_)
        rest = take(log, ~known & ~waits)
        if len(rest):
            self.counts = counted(self.counts, break_down(rest, unjoined(len(rest)), nothing(len(rest), "")))
        self._window.hold(of_log(log), waits, now_ns)


def _processes(spans: Sequence[ReceivedSpan]) -> set[str]:
    return {received.process for received in spans if received.kind.role == "request"}
