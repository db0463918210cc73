"""The OTLP receiver: engines and gateways send their spans here, over gRPC or HTTP/protobuf.

Each export is checked, logged as it came and, on request, forwarded. What spans tell is left to `requests`. Logs and
metrics, which some send to the same address, are forwarded or dropped, and counted.
Imported only where it is chosen, because grpcio is heavy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Self

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from aiohttp import web
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rundir.access import connection_problem
from rundir.clock import anchor, step_ns
from scraper.spans.export import Refusal, check, malformed, parsed, too_large, turned_away, unpacked
from scraper.spans.forward import PROTOBUF, Forwarder
from scraper.spans.log import Counts, ForwardQueue, SpanLog, StateRecord, packed
from scraper.spans.received import OFF_CLOCK, ReceivedSpan, classify, received_spans
from scraper.spans.spec import LOGS, METRICS, SETTLE_S, SIGNALS, TRACES, CannotListen, ReceiverSpec, host_and_port

_COUNT_EVERY_S = 2.0  # what a killed receiver had refused since then is not known
_AT_ONCE = 16  # exports in hand, each of LIMIT_BYTES at most
_READ_S = 10.0
_INLINE_BYTES = 64 * 1024  # larger ones are compressed beside the loop, whose stamps must not wait
_TRACES_KEPT = 100_000
_MOST_SERVICES = 8  # before an engine, of which a trace is noted to have spans

Deliver = Callable[[int, ExportTraceServiceRequest], None]


class Receiver:
    """Owns both servers, and the forwarder if there is one; an async context manager.

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
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Read the addresses. Raises ValueError for an invalid one, or an invalid forwarding URL."""
        for address in (spec.grpc, spec.http):
            host_and_port(address or "none:0")
        classify(Span(), "")  # reads the engines' files now: later, the stamps of scrapes would wait for it
        self.grpc_port = self.http_port = 0
        self._spec, self._log, self._say, self._deliver = spec, log, say, deliver
        self._wall_ns, self._begun = wall_ns, anchor(wall_ns)
        self._forwarder = Forwarder(spec.forward, spec.access, say=say) if spec.forward else None
        self._totals = dict.fromkeys(Counts.__struct_fields__, 0)
        self._said: set[str] = set()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._traces: dict[bytes, None] = {}
        self._halves: dict[bytes, str] = {}
        self._serving: dict[bytes, set[str]] = {}  # by trace, the services before an engine whose spans came
        self._news = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Listen. Raises CannotListen, UnusableFile (a certificate for forwarding), OSError (an unwritable log)."""
        try:
            if self._forwarder:
                await self._stack.enter_async_context(self._forwarder)
            if self._spec.grpc:
                await self._listen_grpc()
            if self._spec.http:
                await self._listen_http()
            self._write_state("started")
            counting = asyncio.ensure_future(self._count_on())
            self._stack.callback(counting.cancel)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, pass on what is queued, within a few seconds; the log then says that it ended."""
        try:
            await self._stack.aclose()
        finally:
            self._write_state("ended")

    def counts(self) -> Counts:
        """Return what was done so far."""
        forwarder = self._forwarder
        if forwarder is None:
            others = {f"{signal}_dropped": self._totals[signal] for signal in (LOGS, METRICS)}
            return Counts(**{**self._totals, **others})
        ahead = {"forwarded": forwarder.sent[TRACES], "forward_dropped": forwarder.dropped[TRACES]}
        others = {f"{signal}_dropped": forwarder.dropped[signal] for signal in (LOGS, METRICS)}
        return Counts(**{**self._totals, **ahead, **others})

    async def settle(self, seconds: float = SETTLE_S, trace_ids: Collection[str] = ()) -> int:
        """Wait for late spans, `seconds` at most; return how many of the wanted traces have none by then.

        Returns early once each of `trace_ids` (hex) has the spans that tell its request's times, and where gateways
        send spans, those too; without any the whole time is waited. Of many requests those that ended last will do: an
        exporter keeps the order.
        """
        wanted = {bytes.fromhex(trace_id) for trace_id in trace_ids}
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not wanted or wanted - self._traces.keys() or not self._have_gateways(wanted):
                    self._news.clear()
                    await self._news.wait()
        self._write_state("settled")
        return len(wanted - self._traces.keys())

    def _have_gateways(self, trace_ids: Collection[bytes]) -> bool:
        """Tell whether each of these traces has the spans of every service that serves any of them."""
        served = [self._serving.get(trace_id, set()) for trace_id in trace_ids]
        every = set().union(*served)
        return all(services == every for services in served)

    async def _listen_grpc(self) -> None:
        server = aio.server(
            # Beyond these a call is refused before its message is read; this bounds the memory of all together.
            maximum_concurrent_rpcs=4 * _AT_ONCE,
            options=[("grpc.max_receive_message_length", self._spec.limit_bytes), ("grpc.so_reuseport", 0)],
        )
        # As a stream of one message: else grpcio reads it before we are asked, and we never hear of one it refuses.
        for signal, path in SIGNALS.items():
            service, _, method = path[1:].partition("/")
            rpc: Any = grpc.stream_unary_rpc_method_handler(partial(self._from_grpc, signal))
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: rpc}),))
        try:
            self.grpc_port = server.add_insecure_port(self._spec.grpc)
        except RuntimeError:
            raise CannotListen(f"cannot listen on {self._spec.grpc}: the address is in use, or not ours") from None
        await server.start()
        self._stack.push_async_callback(server.stop, 1.0)

    async def _listen_http(self) -> None:
        app = web.Application()
        for signal in SIGNALS:
            app.router.add_post(f"/v1/{signal}", partial(self._from_http, signal))
        # A bomb is ours to bound, so aiohttp does not unpack. The rest of a refused body is read past for a moment:
        # a sender that is cut off does not see why.
        logger = logging.Logger("spans", logging.WARNING)  # noqa: LOG001  its records go nowhere else
        logger.addFilter(self._noise)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=1,
            lingering_time=2,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        host, port = host_and_port(self._spec.http)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise CannotListen(f"cannot listen on {self._spec.http}: {connection_problem(error)}") from error
        self.http_port = runner.addresses[0][1]

    async def _from_grpc(self, signal: str, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async def read() -> bytes:
            async for body in requests:
                return body
            raise too_large(self._spec.limit_bytes)  # grpcio has refused it: a call without a message

        try:
            return await self._admit(signal, "grpc", read)
        except Refusal as refusal:
            if refusal.grpc_code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return b""  # grpcio has answered
            await context.abort(refusal.grpc_code, refusal.text)
            raise  # abort has raised

    async def _from_http(self, signal: str, request: web.Request) -> web.Response:
        try:
            body = await self._admit(signal, "http", lambda: self._read_http(request))
        except Refusal as refusal:
            retry = {"Retry-After": "1"} if refusal.http_status == 503 else {}
            reply = web.Response(
                body=refusal.status(), status=refusal.http_status, content_type=PROTOBUF, headers=retry
            )
            reply.force_close()
            return reply
        return web.Response(body=body, content_type=PROTOBUF)

    async def _admit(self, signal: str, via: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Read and take an export when it is its turn. Raises Refusal, which is then counted and said already."""
        try:
            try:
                async with asyncio.timeout(_READ_S), self._turns:
                    body = await read()
                    return await self._take(via, body) if signal == TRACES else self._pass_on(signal, body)
            except TimeoutError:
                raise turned_away(f"no whole export within {_READ_S:g} s") from None
        except Refusal as refusal:
            self._totals[refusal.count] += 1
            of = "spans" if signal == TRACES else signal
            self._say_once(refusal.count, f"an export of {of} over {via} is refused: {refusal.text}")
            raise

    async def _read_http(self, request: web.Request) -> bytes:
        kind, encoding = request.content_type, request.headers.get("Content-Encoding", "identity").strip().lower()
        if kind != PROTOBUF:
            raise malformed(f"it is {kind}, not {PROTOBUF}", 415)
        if encoding not in ("", "identity", "gzip"):
            raise malformed(f"encoded as {encoding[:20]!r}", 415)
        limit = self._spec.limit_bytes
        body = bytearray()
        if (request.content_length or 0) > limit:
            raise too_large(limit)
        try:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
        except web.RequestPayloadError:
            raise malformed("its body is not framed as HTTP has it") from None
        return bytes(body) if encoding != "gzip" else await asyncio.to_thread(unpacked, bytes(body), limit)

    async def _take(self, via: str, body: bytes) -> bytes:
        """Check, log, deliver and queue one export; return the reply that says what of it was bad."""
        received_ns = time.monotonic_ns() + self._spec.clock_offset_ns
        request = parsed(body)
        if self._spec.restarts_at_clock_step and step_ns(self._begun, self._wall_ns):
            raise turned_away("the clock of this machine was just set; the receiver starts again by the new time")
        await self._keep(via, body, received_ns)
        self._totals["exports"] += 1
        reply = ExportTraceServiceResponse()
        for span in received_spans(request, received_ns):
            self._look(via, span)
            if span.fault:
                reply.partial_success.rejected_spans += 1
                reply.partial_success.error_message = span.fault
        for traces in (self._traces, self._halves, self._serving):
            while len(traces) > _TRACES_KEPT:
                del traces[next(iter(traces))]
        if self._deliver:
            self._deliver(received_ns, request)
        if self._forwarder:
            self._forwarder.offer(body)
        self._news.set()
        return reply.SerializeToString()

    def _pass_on(self, signal: str, body: bytes) -> bytes:
        """Count and queue an export of what is not read here; return the empty reply that all was taken."""
        check(body, signal)
        self._totals[signal] += 1
        if self._forwarder:
            self._forwarder.offer(body, signal)
        return b""

    def _look(self, via: str, received: ReceivedSpan) -> None:
        """Count a span, and note what is to be known of it."""
        self._totals["spans"] += 1
        if received.fault == OFF_CLOCK:
            self._totals["off_clock"] += 1
            names = [
                attribute.value.string_value[:60]
                for attribute in received.resource.attributes
                if attribute.key == "service.name"
            ]
            whose = f"spans{f' of {names[0]!r}' if names else ''} that came over {via}"
            self._say_once(OFF_CLOCK, f"{whose} are not used: {self._whose_clock(received.off_clock_s)}")
        elif received.fault:
            self._totals["bad_spans"] += 1
            self._say_once(received.fault, f"spans that came over {via} are not used: {received.fault}")
        elif self._spec.is_awaited:
            self._note(received)

    def _note(self, received: ReceivedSpan) -> None:
        """Note whose request a span tells, or whose way to the engine."""
        if received.kind.tells_all or self._completes(received):
            self._traces[received.span.trace_id] = None
        elif received.kind.role == "gateway" or (
            received.kind.role in ("gateway_call", "call", "other") and received.span.kind == Span.SPAN_KIND_SERVER
        ):
            services = self._serving.setdefault(received.span.trace_id, set())
            if len(services) < _MOST_SERVICES:
                services.add(received.service)

    def _whose_clock(self, off_s: float) -> str:
        """Return whose clock is to be set right: the sender's only where ours was not set meanwhile."""
        if moved_ns := step_ns(self._begun, self._wall_ns):
            return (
                f"the clock of this machine was set by {moved_ns / 1e9:+.0f} s since the receiver began, and its "
                "stamps are by the time before; start again"
            )
        where = "ahead of" if off_s > 0 else "behind"
        return f"their clock is {abs(off_s):.0f} s {where} ours; set it right on that machine (NTP)"

    def _completes(self, received: ReceivedSpan) -> bool:
        """Tell whether a span is the second of the two that tell a request by its stages: its own, and the last one."""
        kind, trace_id = received.kind, received.span.trace_id
        if kind.role != "request" and not kind.ends_prefill:
            return False
        other = self._halves.pop(trace_id, kind.role)
        if other == kind.role:
            self._halves[trace_id] = kind.role
        return other != kind.role

    async def _keep(self, via: str, body: bytes, received_ns: int) -> None:
        """Log an export before it is acknowledged."""
        if self._log is None:
            return
        small = len(body) <= _INLINE_BYTES
        record = packed(received_ns, via, body) if small else await asyncio.to_thread(packed, received_ns, via, body)
        try:
            self._log.append(record)
        except OSError as error:
            raise turned_away(f"it cannot be logged: {error.strerror}") from error

    def _noise(self, record: logging.LogRecord) -> bool:
        """Take what aiohttp reports: a peer that does not speak HTTP is worth one line, not a traceback each time."""
        error = record.exc_info[1] if record.exc_info else None
        text = " ".join(f"{record.getMessage()}: {error!r}".split())[:200]
        self._totals["malformed"] += 1
        self._say_once("noise", f"at the port for spans over http: {text}")
        return False

    async def _count_on(self) -> None:
        written = self.counts(), self._queue()
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            if (self.counts(), self._queue()) != written:
                written = self.counts(), self._queue()
                # The log may be full for a while; exports are then turned away, which says it.
                with suppress(OSError):
                    self._write_state("counted")

    def _queue(self) -> ForwardQueue:
        return self._forwarder.queue if self._forwarder else ForwardQueue()

    def _write_state(self, state: str) -> None:
        if self._log:
            now_ns = time.monotonic_ns() + self._spec.clock_offset_ns
            self._log.append(StateRecord(at_ns=now_ns, state=state, counts=self.counts(), queue=self._queue()))

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"{text} (said once; the counts show how often)")
