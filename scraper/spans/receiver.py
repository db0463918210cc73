"""The OTLP receiver: engines and gateways send their spans here, over gRPC or HTTP/protobuf.

Each export is checked, logged as it came and, on request, forwarded. What spans tell is left to `requests`. Logs and
metrics, which some send to the same address, are counted, and forwarded or dropped: none stays in a log.
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
from pathlib import Path
from typing import Any, Self

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from aiohttp import HttpVersion11, web
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rundir.access import connection_problem, server_context
from rundir.clock import anchor, step_ns, time_of_day_ns
from rundir.process import MemoryLimit
from scraper.spans.export import (
    AGAIN_S,
    GZIP,
    Refusal,
    checked,
    incomplete,
    malformed,
    no_memory,
    packing,
    too_large,
    turned_away,
    unauthorized,
    unpacked,
)
from scraper.spans.forward import PROTOBUF, Forwarder
from scraper.spans.intake.admission import CALL_BOUNDS, Reading, Readings, Turns
from scraper.spans.intake.connections import HEAD_S, Connections, connection_of
from scraper.spans.intake.looked import Awaited, Looked, look_through
from scraper.spans.log import Counts, ExportRecord, ForwardQueue, SpanLog, StateRecord, compressed
from scraper.spans.received import OFF_CLOCK, OFF_CLOCK_S, classify
from scraper.spans.spec import (
    LOGS,
    METRICS,
    SETTLE_S,
    SIGNALS,
    TRACES,
    CannotListen,
    ReceiverSpec,
    host_and_port,
    most_connections,
)

_COUNT_EVERY_S = 2.0  # what a killed receiver had refused since then is not known
_HTTP_BYTES = 64 * 1024 * 1024  # of bodies in hand
_CALLS = 64  # of gRPC, which reads all of a message before it shows any
# Beyond so many limits gRPC refuses a message by its length, before it reads it. Up to there it is for us to refuse and
# to count: of one that gRPC refuses we learn no more than of one whose sender left.
_LIMITS_READ = 4
_SPARE_EVERY_S = 0.05
_GRACE_S = 1.0
_KEEP_ALIVE_S, _GRPC_IDLE_S = 75.0, 120.0
_INLINE_BYTES = 64 * 1024  # larger ones are compressed beside the loop, whose stamps must not wait

_SIGNALS_BY_PATH = {f"/v1/{signal}": signal for signal in SIGNALS}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

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
        self._totals = dict.fromkeys(Counts.__struct_fields__, 0)
        self._said: set[str] = set()
        self._turns, self._memory = Turns(), MemoryLimit(spec.memory_bytes)
        self._most_connections = most_connections()
        self._http = Readings(most=self._most_connections, most_bytes=_HTTP_BYTES)
        self._grpc = Readings(most=_CALLS, most_bytes=_CALLS * spec.limit_bytes)
        self._connections: Connections | None = None
        self._awaited = Awaited()
        self._stack = AsyncExitStack()
        self._is_ending = False

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
            for lasting in (self._count_on(), self._spare_memory()):
                self._stack.callback(asyncio.ensure_future(lasting).cancel)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, forward the queue within a few seconds, and log the end."""
        self._is_ending = True
        try:
            await self._stack.aclose()
        finally:
            with suppress(OSError):  # as in _count_on; it then counts as one that died
                self._write_state("ended")

    def counts(self) -> Counts:
        """Return the receiver's counts so far."""
        self._totals["cut_connections"] = self._connections.cut if self._connections else 0
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
        missing = await self._awaited.settle(seconds, {bytes.fromhex(trace_id) for trace_id in trace_ids})
        with suppress(OSError):  # as in _count_on
            self._write_state("settled")
        return missing

    async def _listen_grpc(self) -> None:
        options = {
            "grpc.max_receive_message_length": _LIMITS_READ * self._spec.limit_bytes,
            "grpc.per_message_decompression": 0,  # not all versions of grpcio bound it
            "grpc.so_reuseport": 0,
            "grpc.max_allowed_incoming_connections": self._most_connections,
            "grpc.server_handshake_timeout_ms": round(HEAD_S * 1e3),
            "grpc.max_connection_idle_ms": round(_GRPC_IDLE_S * 1e3),
            **CALL_BOUNDS,
        }
        server = aio.server(options=list(options.items()))
        # As a stream of one message: else grpcio reads it before we are asked, and we never hear of one it refuses.
        for signal, path in SIGNALS.items():
            service, _, method = path[1:].partition("/")
            rpc: Any = grpc.stream_unary_rpc_method_handler(partial(self._from_grpc, signal))
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: rpc}),))
        try:
            self.grpc_port = self._add_port(server)
        except RuntimeError:
            raise CannotListen(f"cannot listen on {self._spec.grpc}: the address is in use, or not ours") from None
        await server.start()
        self._stack.push_async_callback(self._end_grpc, server)

    async def _end_grpc(self, server: Any) -> None:
        await server.stop(_GRACE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                while self._grpc.are_any_held:  # noqa: ASYNC110  gRPC ends before the tasks of its calls have counted them
                    await asyncio.sleep(0)

    def _add_port(self, server: Any) -> int:
        """Add the port to a gRPC server, with TLS where it is asked for. Raises RuntimeError, UnusableFile."""
        guard = self._spec.guard
        if not guard.cert:
            return int(server.add_insecure_port(self._spec.grpc))
        server_context(guard)  # says in our words what is wrong with a file
        pair = Path(guard.key or guard.cert).read_bytes(), Path(guard.cert).read_bytes()
        authority = Path(guard.ca).read_bytes() if guard.ca else None
        credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=bool(guard.ca))
        return int(server.add_secure_port(self._spec.grpc, credentials))

    async def _listen_http(self) -> None:
        logger = logging.Logger("spans", logging.WARNING)  # noqa: LOG001  its records go nowhere else
        logger.addFilter(self._noise)
        tls = server_context(self._spec.guard)
        self._connections = Connections(most=self._most_connections, tls=tls, say=self._say)
        # An application of aiohttp would take longer over each request than all our bounds. A bomb is ours to bound, so
        # aiohttp does not unpack. The rest of a refused body is read past for a moment: a sender that is cut off does
        # not see why.
        server = web.Server(
            partial(self._connections.following, handler=self._from_http),
            access_log=None,
            logger=logger,
            auto_decompress=False,
            handler_cancellation=True,
            lingering_time=2,
            keepalive_timeout=_KEEP_ALIVE_S,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        self._stack.callback(self._connections.close)
        try:
            host, port = host_and_port(self._spec.http)
            self.http_port = await self._connections.listen(server, host, port)
        except OSError as error:
            raise CannotListen(f"cannot listen on {self._spec.http}: {connection_problem(error)}") from error

    async def _from_grpc(self, signal: str, _requests: AsyncIterator[bytes], context: Any) -> bytes:
        async def read(reading: Reading) -> bytes:
            reading.hold()
            body = await _message(context)
            if body is aio.EOF:
                raise self._departure(is_cut=False)
            if len(body) > self._spec.limit_bytes:
                raise too_large(self._spec.limit_bytes)
            reading.grow(len(body))
            packed = packing(body)
            return body if packed is None else await self._unpacked(body, packed, reading)

        try:
            stated = dict(context.invocation_metadata() or ()).get("authorization", "")
            return await self._admit(signal, "grpc", self._grpc, read, str(stated))
        except asyncio.CancelledError:
            self._count_refusal(signal, "grpc", self._departure(is_cut=False))
            raise
        except Refusal as refusal:
            again = (("grpc-status-details-bin", refusal.details()),) if refusal.count == "no_memory" else ()
            await context.abort(refusal.grpc_code, refusal.text, again)
            raise  # abort has raised

    async def _from_http(self, request: web.BaseRequest) -> web.Response:
        signal = _SIGNALS_BY_PATH.get(request.path)
        if signal is None or request.method != "POST":
            elsewhere = web.Response(status=405, headers={"Allow": "POST"}) if signal else web.Response(status=404)
            elsewhere.force_close()  # its body, which may never come, would be taken for the next request
            return elsewhere
        if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(_CONTINUE)
        connection = connection_of(request)

        async def read(reading: Reading) -> bytes:
            body = await self._read_http(request, reading)
            if connection is not None:
                connection.is_busy = True
            return body

        try:
            stated = request.headers.get("Authorization", "")
            body = await self._admit(signal, "http", self._http, read, stated)
        except Refusal as refusal:
            retry = {"Retry-After": str(AGAIN_S)} if refusal.http_status == 503 else {}
            reply = web.Response(
                body=refusal.status(), status=refusal.http_status, content_type=PROTOBUF, headers=retry
            )
            reply.force_close()
            return reply
        except asyncio.CancelledError:
            self._count_refusal(signal, "http", self._departure(is_cut=connection is not None and connection.was_cut))
            raise
        return web.Response(body=body, content_type=PROTOBUF)

    async def _admit(
        self, signal: str, via: str, readings: Readings, read: Callable[[Reading], Awaitable[bytes]], authorization: str
    ) -> bytes:
        """Read an export, and take it when it is its turn. Raises Refusal, which is then counted and said already."""
        try:
            if not self._spec.guard.admits(authorization):
                raise unauthorized()
            if self._memory.is_reached():
                raise no_memory(self._memory.most_bytes)
            async with readings.reading() as reading:
                body = await read(reading)
                turn = self._turns.of(len(body))
                if turn.locked():
                    reading.hold()
                reading.finish()
                async with turn:
                    reading.begin()
                    return await self._take(via, body) if signal == TRACES else await self._pass_on(signal, body)
        except Refusal as refusal:
            self._count_refusal(signal, via, refusal)
            raise

    def _departure(self, *, is_cut: bool) -> Refusal:
        """Return the refusal of an export with a lost call or connection.

        It tells whether the receiver or the sender ended it.
        """
        if is_cut:
            return turned_away("its connection had to give way")
        return turned_away("the receiver ends") if self._is_ending else incomplete()

    def _count_refusal(self, signal: str, via: str, refusal: Refusal) -> None:
        self._totals[refusal.count] += 1
        of = "spans" if signal == TRACES else signal
        self._say_once(refusal.count, f"an export of {of} over {via} is refused: {refusal.text}")

    async def _read_http(self, request: web.BaseRequest, reading: Reading) -> bytes:
        kind, encoding = request.content_type, request.headers.get("Content-Encoding", "identity").strip().lower()
        if kind != PROTOBUF:
            raise malformed(f"it is {kind}, not {PROTOBUF}", 415)
        if encoding not in ("", "identity", "gzip"):
            raise malformed(f"encoded as {encoding[:20]!r}", 415)
        limit = self._spec.limit_bytes
        body = bytearray()
        if (request.content_length or 0) > limit:
            raise too_large(limit)
        if encoding == "gzip" or not request.content.is_eof():
            reading.hold()
        try:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
                reading.grow(len(chunk))
        except web.RequestPayloadError:
            raise malformed("its body is not framed as HTTP has it") from None
        if encoding != "gzip":
            return bytes(body)
        return await self._unpacked(bytes(body), GZIP, reading)

    async def _unpacked(self, body: bytes, packed: int, reading: Reading) -> bytes:
        plain = await asyncio.to_thread(unpacked, body, self._spec.limit_bytes, packed)
        reading.grow(len(plain) - len(body))
        return plain

    async def _take(self, via: str, body: bytes) -> bytes:
        """Check, log, deliver and queue one export; return the reply that says what of it was bad.

        Nothing of it counts before it is logged, and nothing is waited for from then on: a sender that goes meanwhile
        has sent all of it, or nothing.
        """
        received_ns = self._now_ns()
        looked = Looked()
        look = look_through(body, received_ns, looked, is_awaited=self._spec.is_awaited)
        await self._turns.in_slices(look)
        record = ExportRecord(received_ns=received_ns, via=via, packed=await self._packed(body))
        if self._spec.restarts_at_clock_step and step_ns(self._begun, self._wall_ns):
            raise turned_away("the clock of this machine was just set; the receiver starts again by the new time")
        self._keep(record)
        self._totals["exports"] += 1
        self._count_spans(via, looked)
        if self._deliver:
            self._deliver(received_ns, looked.request)
        self._awaited.note(looked)
        reply = ExportTraceServiceResponse()
        if looked.faults:
            reply.partial_success.rejected_spans = looked.faults.total()
            reply.partial_success.error_message = list(looked.faults)[-1]
        return reply.SerializeToString()

    async def _pass_on(self, signal: str, body: bytes) -> bytes:
        """Count and queue an export of an unread signal; return the empty reply of full acceptance."""
        await self._turns.in_slices(checked(body, signal))
        if self._forwarder:
            self._forwarder.offer(await self._packed(body), signal)
        self._totals[signal] += 1
        return b""

    def _count_spans(self, via: str, looked: Looked) -> None:
        """Count the spans of an export, and report the faults of some."""
        self._totals["spans"] += looked.spans
        for fault, first in looked.first.items():
            self._totals["off_clock" if fault == OFF_CLOCK else "bad_spans"] += looked.faults[fault]
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

    async def _packed(self, body: bytes) -> bytes:
        """Return an export compressed for the log and the queue."""
        return compressed(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(compressed, body)

    def _keep(self, record: ExportRecord) -> None:
        """Log an export before it is acknowledged, and queue it for the next collector. Raises Refusal."""
        try:
            if self._log is not None:
                self._log.append(record)
        except OSError as error:
            self._totals["unwritten"] += 1
            raise turned_away(f"it cannot be logged: {error.strerror}") from error
        if self._forwarder:
            self._forwarder.offer(record.packed, TRACES)

    def _noise(self, record: logging.LogRecord) -> bool:
        """Filter aiohttp's log records: one line for a peer that does not speak HTTP.

        It replaces a traceback each time.
        """
        error = record.exc_info[1] if record.exc_info else None
        text = " ".join(f"{record.getMessage()}: {error!r}".split())[:200]
        self._totals["malformed"] += 1
        self._say_once("noise", f"at the port for spans over http: {text}")
        return False

    async def _count_on(self) -> None:
        written = self.counts(), self._queue()
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            counted = self.counts(), self._queue()
            if counted != written:
                # The disk may be full for a while; it is tried again, though no other export comes.
                with suppress(OSError):
                    self._write_state("counted")
                    written = counted

    async def _spare_memory(self) -> None:
        """Refuse messages that gRPC still reads while the limit of memory is reached.

        Nothing of them is visible before they are whole.
        """
        while True:
            await asyncio.sleep(_SPARE_EVERY_S)
            if self._grpc.are_any_read and self._memory.is_reached():
                self._grpc.let_all_give_way(no_memory(self._memory.most_bytes))

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


async def _message(context: Any) -> Any:
    """Return the next message of a call, aio.EOF where there is none.

    Where the task that waits for a message is cancelled, grpcio (1.85) leaks a message that comes then. So another task
    waits, which ends as the call does.
    """
    reader = asyncio.ensure_future(context.read())
    reader.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs that none looked
    await asyncio.wait((reader,))
    return reader.result()
