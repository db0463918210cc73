"""The OTLP receiver: engines and gateways send their spans here, over gRPC or HTTP/protobuf.

Each export is checked, logged as it came and, on request, forwarded. What spans tell is left to `requests`. Logs and
metrics, which some send to the same address, are not read: they are counted, and forwarded or dropped.
Imported only where it is chosen, because grpcio is heavy.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.rundir.clock import anchor, step_ns, time_of_day_ns
from sidelight.scraper.spans.forwarder import Forwarder
from sidelight.scraper.spans.intake.admission import Admission
from sidelight.scraper.spans.intake.connections import Connections
from sidelight.scraper.spans.intake.export import turned_away
from sidelight.scraper.spans.intake.over_grpc import over_grpc
from sidelight.scraper.spans.intake.over_http import over_http
from sidelight.scraper.spans.intake.scan import AwaitedTraces, ExportScan, scan
from sidelight.scraper.spans.log import ExportRecord, ForwardQueue, ReceiverCounts, SpanLog, StateRecord, compressed
from sidelight.scraper.spans.received import OFF_CLOCK, OFF_CLOCK_S, classify
from sidelight.scraper.spans.spec import LOGS, METRICS, SETTLE_S, TRACES, ReceiverSpec, host_and_port, most_connections

_COUNT_EVERY_S = 2.0  # what a killed receiver had refused since then is not known
_SMALL_BYTES = 16 * 1024
_LARGE_AT_ONCE = 2  # scanned beside the loop: small ones, and those that are read, do not wait

Deliver = Callable[[int, ExportTraceServiceRequest], None]


class Receiver:
    """The servers for spans over gRPC and HTTP, with an optional forwarder; an async context manager.

    It owns all three.

    `log` keeps every export; `deliver` is given each as it comes, with its stamp; `say` gets one line, once for
    each kind of trouble: the counts show how often. `grpc_port` and `http_port` are 0 where nothing listens.
    """

    def __init__(
        self,
        spec: ReceiverSpec,
        *,
        log: SpanLog | None,
        say: Callable[[str], None],
        deliver: Deliver | None = None,
        wall_ns: Callable[[], int] = time_of_day_ns,
    ) -> None:
        """Read the addresses. Raises ValueError for an invalid one, or an invalid forwarding URL."""
        for address in (spec.grpc, spec.http):
            host_and_port(address or "none:0")
        classify(Span(), "")  # reads the engines' files now: later, the stamps of exports would wait for it
        self.grpc_port = self.http_port = 0
        self._spec, self._log, self._say, self._deliver = spec, log, say, deliver
        self._wall_ns, self._begun = wall_ns, anchor(wall_ns)
        self._forwarder = Forwarder(spec.forward, spec.access, say=say) if spec.forward else None
        self._totals: Counter[str] = Counter()
        self._said: set[str] = set()
        self._admission = Admission(spec, self._take, say_once=self._say_once)
        self._connections = Connections(most_connections())
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._awaited = AwaitedTraces()

    async def __aenter__(self) -> Self:
        """Listen. Raises CannotListen, UnusableFile (a certificate for forwarding), OSError (an unwritable log)."""
        async with AsyncExitStack() as stack:
            if self._forwarder:
                await stack.enter_async_context(self._forwarder)
            if self._spec.grpc:
                self.grpc_port = await stack.enter_async_context(over_grpc(self._spec, self._admission))
            if self._spec.http:
                listening = over_http(self._spec, self._admission, self._connections)
                self.http_port = await stack.enter_async_context(listening)
            self._write_state("started")
            stack.callback(asyncio.ensure_future(self._count_on()).cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, forward the queue within a few seconds, and log the end."""
        self._admission.is_ending = True
        try:
            await self._stack.aclose()
        finally:
            with suppress(OSError):  # as in _count_on; it then counts as one that died
                self._write_state("ended")

    def counts(self) -> ReceiverCounts:
        """Return the receiver's counts so far."""
        counts = self._totals + self._admission.refused
        forwarder, dropped = self._forwarder, self._forwarder.dropped if self._forwarder else self._totals
        others = {f"{signal}_dropped": dropped[signal] for signal in (LOGS, METRICS)}
        if forwarder:
            others |= {"forwarded": forwarder.sent[TRACES], "forward_dropped": dropped[TRACES]}
        return ReceiverCounts(**counts, **others, cut_connections=self._connections.cut)

    async def settle(self, seconds: float = SETTLE_S, trace_ids: Collection[str] = ()) -> int:
        """Wait for late spans, `seconds` at most; return how many of the wanted traces have none by then.

        Returns early once each of `trace_ids` (hex) has the spans that tell its request's times, and where gateways
        send spans, those too; without any the whole time is waited. Of many requests those that ended last will do: an
        exporter keeps the order.
        """
        missing = await self._awaited.settle(seconds, {bytes.fromhex(trace_id) for trace_id in trace_ids})
        with suppress(OSError):  # as in _count_on
            self._write_state("settled")
        return missing

    async def _take(self, signal: str, via: str, body: bytes) -> bytes:
        """Log an export and queue it for the next collector; return the reply. Raises Refusal, MemoryError.

        Nothing is waited for once it is logged: a sender that goes meanwhile has sent all of it, or nothing.
        """
        received_ns = self._now_ns()
        if len(body) <= _SMALL_BYTES:
            scanned, packed = self._scanned(signal, body, received_ns)
        else:
            async with self._large:
                scanned, packed = await asyncio.to_thread(self._scanned, signal, body, received_ns)
        if scanned is None:
            return self._pass_on(signal, packed)
        return self._keep(ExportRecord(received_ns=received_ns, via=via, packed=packed), scanned)

    def _scanned(self, signal: str, body: bytes, received_ns: int) -> tuple[ExportScan | None, bytes]:
        """Return the scan of an export of spans (else None), and its compressed bytes."""
        scanned = scan(body, received_ns, is_awaited=self._spec.is_awaited) if signal == TRACES else None
        return scanned, compressed(body)

    def _keep(self, record: ExportRecord, scanned: ExportScan) -> bytes:
        """Log, deliver and queue an export of spans; return the reply that says what of it was bad."""
        if self._spec.restarts_at_clock_step and step_ns(self._begun, self._wall_ns):
            raise turned_away("the clock of this machine was just set; the receiver starts again by the new time")
        try:
            if self._log is not None:
                self._log.append(record)
        except OSError as error:
            self._totals["unwritten"] += 1
            raise turned_away(f"it cannot be logged: {error.strerror}") from error
        self._pass_on(TRACES, record.packed)
        self._count_spans(record.via, scanned)
        if self._deliver:
            self._deliver(record.received_ns, scanned.request)
        self._awaited.note(scanned)
        reply = ExportTraceServiceResponse()
        if scanned.faults:
            reply.partial_success.rejected_spans = scanned.faults.total()
            reply.partial_success.error_message = list(scanned.faults)[-1]
        return reply.SerializeToString()

    def _pass_on(self, signal: str, packed: bytes) -> bytes:
        """Count an export and queue it for the next collector; return the empty reply of full acceptance."""
        if self._forwarder:
            self._forwarder.offer(packed, signal)
        self._totals["exports" if signal == TRACES else signal] += 1
        return b""

    def _count_spans(self, via: str, scanned: ExportScan) -> None:
        """Count the spans of an export, and report the faults of some."""
        self._totals["spans"] += scanned.spans
        for fault, first in scanned.first.items():
            self._totals["off_clock" if fault == OFF_CLOCK else "bad_spans"] += scanned.faults[fault]
            whose, why = f"spans that came over {via}", fault
            if fault == OFF_CLOCK:
                names = [
                    attribute.value.string_value[:60]
                    for attribute in first.resource.attributes
                    if attribute.key == "service.name"
                ]
                whose = f"spans{f' of {names[0]!r}' if names else ''} that came over {via}"
                why = self._whose_clock(first.off_clock_s)
            self._say_once(fault, f"{whose} are not used: {why}")

    def _whose_clock(self, off_s: float) -> str:
        """Return a message about the clock that is wrong: ours, the sender's, or neither.

        The sender's is wrong only where its offset is not the step of our own clock.
        """
        moved_ns = step_ns(self._begun, self._wall_ns)
        if moved_ns and abs(off_s - moved_ns / 1e9) < OFF_CLOCK_S:
            return (
                f"the clock of this machine was set by {moved_ns / 1e9:+.0f} s since the receiver began, and its "
                "stamps are by the time before; start again"
            )
        if self._spec.clock_step_ns and abs(off_s + self._spec.clock_step_ns / 1e9) < OFF_CLOCK_S:
            return "they are from before the clock of this machine was set"
        where = "ahead of" if off_s > 0 else "behind"
        return f"their clock is {abs(off_s):.0f} s {where} ours; set it right on that machine (NTP)"

    async def _count_on(self) -> None:
        written = self.counts(), self._queue()
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            counted = self.counts(), self._queue()
            if counted != written:
                # The disk or the memory may be full for a while; it is tried again, though no other export comes.
                with suppress(OSError, MemoryError):
                    self._write_state("counted")
                    written = counted

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._spec.clock_offset_ns

    def _queue(self) -> ForwardQueue:
        return self._forwarder.queue if self._forwarder else ForwardQueue()

    def _write_state(self, state: str) -> None:
        if self._log:
            state_record = StateRecord(at_ns=self._now_ns(), state=state, counts=self.counts(), queue=self._queue())
            self._log.append(state_record)

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"{text} (said once; the counts show how often)")
