"""Passing exports on to another OTLP collector, so that the receiver can stand in an existing pipeline.

What is passed on is what came, byte for byte. An unavailable collector is tried again at growing intervals, while
exports of spans wait in their logs (`backlog`) and others in memory; what waits for too long, or no longer fits, is
dropped and counted, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import math
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import aiohttp
import grpc
import msgspec
from google.protobuf.message import DecodeError
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess

from rundir.access import Access, bare, connection_problem, headers_for, masked, tls_context
from rundir.clock import time_of_day_ns
from scraper.spans.backlog import Backlog, left_beside
from scraper.spans.log import ForwardQueue
from scraper.spans.spec import GRPC_PORT, SIGNALS, TRACES, ForwardKeep, forward_parts

T = TypeVar("T")

PROTOBUF = "application/x-protobuf"
QUEUE_BYTES = 32 * 1024 * 1024
ATTEMPT_S = 10.0
_REPLY_BYTES = 64 * 1024
# How aiohttp shows what a gRPC server says first: a frame of HTTP/2 (length of 3 bytes, type 4, on stream 0).
_NO_STATUS_LINE, _HTTP2_SETTINGS = "Bad status line", r"\x04\x00\x00\x00\x00\x00"
FLUSH_S = 2.0
TAKE_OVER_EVERY_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LONGEST_WAIT_S = 60.0  # whatever a Retry-After states
# https://opentelemetry.io/docs/specs/otlp/#failures
_HTTP_AGAIN = (429, 502, 503, 504)
_GRPC_AGAIN = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
)


class Unavailable(Exception):
    """The collector did not answer, or wants the export again later: after `again_s`, 0 where it does not say when."""

    def __init__(self, reason: str, again_s: float = 0.0) -> None:
        super().__init__(reason)
        self.again_s = again_s


class Rejected(Exception):
    """The collector will not take this export."""


async def again_while_away(
    send: Callable[[], Awaitable[T]],
    *,
    patience_s: float = math.inf,
    on_away: Callable[[Unavailable], object] = lambda _: None,
) -> T:
    """Await `send()` again as long as it raises Unavailable, and return what it returns.

    After each attempt that failed `on_away` is called, and a pause follows: twice as long each time, or what a
    Retry-After states. Raises Unavailable when the next attempt would come after `patience_s`.
    """
    loop = asyncio.get_running_loop()
    until_s, pause_s = loop.time() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return await send()
        except Unavailable as away:
            on_away(away)
            wait_s = away.again_s or pause_s
            if loop.time() + wait_s >= until_s:
                raise
        await asyncio.sleep(min(wait_s, LONGEST_WAIT_S))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Wire:
    """Owns the connection to a collector; an async context manager.

    `url`: grpc://HOST:PORT and grpcs:// speak gRPC, as http(s)://HOST:4317 does (what engines call their endpoint);
    any other http(s) URL speaks HTTP/protobuf, at /v1/traces where it has no path. `zipped`: bodies go as gzip.
    """

    def __init__(self, url: str, access: Access, *, zipped: bool = False) -> None:
        """Read the URL. Raises ValueError for one that is none of these."""
        self._url, self._access, self._zipped = url, access, zipped
        parts = forward_parts(url)
        alike = parts.port == GRPC_PORT and not parts.path.strip("/")
        self._speaks_grpc = parts.scheme in ("grpc", "grpcs") or alike
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableFile for an unreadable certificate, ValueError for TLS that gRPC cannot do."""
        channel = self._channel() if self._speaks_grpc else None
        if channel is None:
            connector = aiohttp.TCPConnector(ssl=tls_context(self._access))
            self._session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        else:
            self._stack.push_async_callback(channel.close)
            self._calls: dict[str, Any] = {signal: channel.unary_unary(method) for signal, method in SIGNALS.items()}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def send(self, body: bytes, signal: str = TRACES) -> bytes:
        """Give the collector one export, once; return its reply. Raises Unavailable, Rejected."""
        return await (self._over_grpc(body, signal) if self._speaks_grpc else self._over_http(body, signal))

    async def deliver(
        self,
        body: bytes,
        signal: str = TRACES,
        *,
        patience_s: float = math.inf,
        on_away: Callable[[Unavailable], object] = lambda _: None,
    ) -> bytes:
        """Give the collector one export until it has taken or refused it; return its reply.

        Raises Rejected, and Unavailable as `again_while_away` does.
        """
        return await again_while_away(lambda: self.send(body, signal), patience_s=patience_s, on_away=on_away)

    async def _over_http(self, body: bytes, signal: str) -> bytes:
        url = http_url(bare(self._url), signal)
        if not url:
            raise Rejected(f"the path of its URL is for spans alone; end it in /v1/traces, or in /v1/{signal}")
        headers = {"Content-Type": PROTOBUF, **headers_for(self._access, self._url)}
        if self._zipped:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_S)
        try:
            async with self._session.post(
                url, data=io.BytesIO(body), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, reply = response.status, await response.content.read(_REPLY_BYTES)
                kind, again = response.content_type, response.headers.get("Retry-After", "")
        except TimeoutError:
            raise Unavailable(f"no answer within {ATTEMPT_S:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"connect: {connection_problem(error)}") from error
        except aiohttp.ClientResponseError as error:
            if error.message.startswith(_NO_STATUS_LINE) and _HTTP2_SETTINGS in error.message:
                raise Rejected(f"this is a gRPC port: write grpc://{urlsplit(bare(self._url)).netloc}") from error
            raise Unavailable(" ".join(error.message.split()) or type(error).__name__) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(" ".join(str(error).split()) or type(error).__name__) from error
        if status in _HTTP_AGAIN:
            raise Unavailable(f"HTTP {status}", again_s=float(again) if again.isdecimal() else 0.0)
        if status >= 300:
            raise Rejected(f"HTTP {status}{_reason(kind, reply)}")
        return reply

    async def _over_grpc(self, body: bytes, signal: str) -> bytes:
        metadata = tuple((name.lower(), value) for name, value in headers_for(self._access, self._url).items())
        try:
            reply: bytes = await self._calls[signal](
                body,
                timeout=ATTEMPT_S,
                metadata=metadata,
                compression=grpc.Compression.Gzip if self._zipped else None,
            )
        except aio.AioRpcError as error:
            reason = f"{error.code().name}: {' '.join((error.details() or '').split())[:200]}"
            raise (Unavailable if error.code() in _GRPC_AGAIN else Rejected)(reason) from error
        return reply

    def _channel(self) -> aio.Channel:
        parts = urlsplit(bare(self._url))
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 5000)]
        if parts.scheme in ("grpc", "http"):
            return aio.insecure_channel(parts.netloc, options=options)
        access = self._access
        if access.insecure:
            raise ValueError(f"{masked(self._url)}: gRPC takes no certificate unchecked; name the authority's")
        tls_context(access)  # says in our words what is wrong with a file
        credentials = grpc.ssl_channel_credentials(
            Path(access.ca).read_bytes() if access.ca else None,
            Path(access.key or access.cert).read_bytes() if access.cert else None,
            Path(access.cert).read_bytes() if access.cert else None,
        )
        return aio.secure_channel(parts.netloc, credentials, options=options)


class Waiting(Protocol):
    """Exports that wait for the next collector."""

    exports: int
    size_bytes: int

    def head(self) -> tuple[str, bytes] | None:
        """Return the export that waits longest, with its signal; None where none is there."""

    def is_outdated(self, now_ns: int, /) -> bool:
        """Tell whether it is not to wait any longer."""

    def leave(self, *, forwarded: bool) -> None:
        """Take it out."""


class _Memory:
    """Exports of other signals than spans, which are not logged."""

    def __init__(self) -> None:
        self.exports = self.size_bytes = 0
        self._queue: deque[tuple[str, bytes]] = deque()

    def put(self, signal: str, body: bytes) -> None:
        self._queue.append((signal, body))
        self.exports += 1
        self.size_bytes += len(body)

    def head(self) -> tuple[str, bytes] | None:
        return self._queue[0] if self._queue else None

    def is_outdated(self, _: int, /) -> bool:
        return False

    def leave(self, *, forwarded: bool) -> None:  # noqa: ARG002  the cursor of a Backlog counts it
        self.exports -= 1
        self.size_bytes -= len(self._queue.popleft()[1])


class Forwarder:
    """Owns what waits for the next collector and the connection to it; an async context manager.

    Exports of spans wait in their `log`, those of other signals in memory. What waits at the end is left there for
    another process where there is a `keep`, which then also says for how long; else it is dropped.
    """

    def __init__(
        self,
        url: str,
        access: Access,
        *,
        say: Callable[[str], None],
        queue_bytes: int = QUEUE_BYTES,
        log: Path | None = None,
        keep: ForwardKeep | None = None,
        now_ns: Callable[[], int] = time_of_day_ns,
    ) -> None:
        """Read the URL. Raises ValueError for one that Wire cannot use."""
        self.sent: Counter[str] = Counter()  # exports by signal
        self.dropped: Counter[str] = Counter()
        self._url, self._say = url, say
        self._wire = Wire(url, access)
        self._log, self._keep, self._now_ns = log, keep, now_ns
        self._memory, self._queue_bytes = _Memory(), queue_bytes
        self._spans: Backlog | None = None
        self._earlier: list[Backlog] = []
        self._memory_filled, self._log_filled, self._emptied = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_away = False
        self._said: set[str] = set()

    async def __aenter__(self) -> Self:
        """Open the connection and begin to send. Raises what Wire does, and OSError where no cursor can be written."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._wire)
            stack.callback(self._close)
            if self._log is not None:
                self._spans = Backlog.resume(self._log, masked(self._url), self._keep)
                await asyncio.to_thread(self._spans.survey)
                self.sent[TRACES], self.dropped[TRACES] = self._spans.unrecorded
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._tasks = [group.create_task(self._send_on(self._memory, self._memory_filled))]
            if self._spans is not None:
                self._tasks.append(group.create_task(self._send_on(self._spans, self._log_filled)))
            if self._log is not None and self._keep is not None:
                self._tasks.append(group.create_task(self._take_over_on(self._log, self._keep)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what is queued within FLUSH_S seconds; the rest stays in the logs or counts as dropped."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while self.queue.exports:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            self._say(f"{self.queue.exports} exports did not reach {masked(self._url)}")
        finally:
            for task in self._tasks:
                task.cancel()
            await self._stack.aclose()

    @property
    def queue(self) -> ForwardQueue:
        """Return what waits now."""
        spans = self._spans.queue() if self._spans else ForwardQueue()
        others: list[Waiting] = [self._memory, *self._earlier]
        return msgspec.structs.replace(
            spans,
            exports=spans.exports + sum(waiting.exports for waiting in others),
            size_bytes=spans.size_bytes + sum(waiting.size_bytes for waiting in others),
            limit_bytes=spans.limit_bytes + self._queue_bytes,
        )

    def offer(self, body: bytes, signal: str = TRACES) -> None:
        """Queue an export that is not logged; never waits. One that does not fit is dropped and counted."""
        if self._memory.size_bytes + len(body) > self._queue_bytes:
            self.dropped[signal] += 1
            return
        self._memory.put(signal, body)
        self._memory_filled.set()

    def logged(self, size: int) -> None:
        """Note that an export of spans of so many bytes is in the log."""
        if self._spans is not None:
            self._spans.logged(size)
            self._log_filled.set()

    async def _send_on(self, waiting: Waiting, filled: asyncio.Event) -> None:
        while True:
            filled.clear()
            await self._send_all(waiting)
            await filled.wait()

    async def _send_all(self, waiting: Waiting) -> None:
        """Send what waits, until nothing does."""
        while await again_while_away(lambda: self._send_next(waiting), on_away=self._note_away):
            pass

    async def _send_next(self, waiting: Waiting) -> bool:
        """Try to send what waits longest; return False where nothing waits. Raises Unavailable."""
        while (head := _head(waiting)) and waiting.is_outdated(self._now_ns()):
            self._leave(waiting, head[0], forwarded=False)
            self._say_once(
                "outdated", f"exports that wait too long, or are too many, for {masked(self._url)} are dropped"
            )
            await asyncio.sleep(0)
        if head is None:
            if isinstance(waiting, Backlog) and waiting.exports:  # they were deleted from the logs, or are damaged
                self._give_up(waiting)
            return False
        signal, body = head
        try:
            await self._wire.send(body, signal)
        except Rejected as refused:
            self._leave(waiting, signal, forwarded=False)
            self._say_once(signal, f"{masked(self._url)} refuses {'spans' if signal == TRACES else signal}: {refused}")
            return True
        self._leave(waiting, signal, forwarded=True)
        if self._is_away:
            self._say(f"spans are forwarded to {masked(self._url)} again")
        self._is_away = False
        return True

    def _leave(self, waiting: Waiting, signal: str, *, forwarded: bool) -> None:
        waiting.leave(forwarded=forwarded)
        self._count(waiting, signal, forwarded=int(forwarded), dropped=int(not forwarded))

    def _give_up(self, backlog: Backlog) -> None:
        self._count(backlog, TRACES, dropped=backlog.give_up())

    def _count(self, waiting: Waiting, signal: str, *, forwarded: int = 0, dropped: int = 0) -> None:
        self.sent[signal] += forwarded
        self.dropped[signal] += dropped
        if self._spans is not None and waiting in self._earlier:
            self._spans.count(forwarded=forwarded, dropped=dropped)
        self._emptied.set()

    async def _take_over_on(self, log: Path, keep: ForwardKeep) -> None:
        """Send what watches that are dead have left beside this one, now and again."""
        while True:
            for raw in left_beside(log):
                backlog = Backlog.take_over(raw, masked(self._url), keep)
                if backlog is not None:
                    self._earlier.append(backlog)
                    await asyncio.to_thread(backlog.survey)
                    self._say(f"{backlog.exports} exports that {raw} has left are forwarded to {masked(self._url)}")
            while self._earlier:
                await self._send_all(self._earlier[0])
                self._earlier.pop(0).close()
            await asyncio.sleep(TAKE_OVER_EVERY_S)

    def _close(self) -> None:
        """Drop what waits in memory; leave what waits in logs, if another process may go on with it."""
        while head := self._memory.head():
            self._leave(self._memory, head[0], forwarded=False)
        if self._spans is not None and self._keep is None:
            self._give_up(self._spans)
        for backlog in (*self._earlier, *filter(None, [self._spans])):
            backlog.close()

    def _note_away(self, away: Unavailable) -> None:
        if not self._is_away:
            self._say(f"spans cannot be forwarded to {masked(self._url)}: {away}")
        self._is_away = True

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


def _head(waiting: Waiting) -> tuple[str, bytes] | None:
    """Return what waits longest. Raises Unavailable where it cannot be read, as without a free descriptor."""
    try:
        return waiting.head()
    except OSError as error:
        raise Unavailable(f"{error.filename or 'a log'}: {error.strerror}") from error


def http_url(url: str, signal: str = TRACES) -> str:
    """Return where an export is posted: at /v1/ and its signal, or where the path of the URL ends in the name of one,
    at that of its own. The URL itself, if it has another path, is that of spans, and "" is returned for others.
    """
    parts = urlsplit(url)
    path = parts.path if parts.path.strip("/") else f"/v1/{TRACES}"
    begin, slash, name = path.rstrip("/").rpartition("/")
    if name in SIGNALS:
        path = path if name == signal else f"{begin}{slash}{signal}"
    elif signal != TRACES:
        return ""
    return urlunsplit(parts._replace(path=path))


def _reason(kind: str, body: bytes) -> str:
    """Return what a refusal says, after a colon; empty for none, and for a page."""
    text = body.decode(errors="replace") if kind in ("text/plain", "application/json") else ""
    if kind == PROTOBUF:
        with suppress(DecodeError):  # a google.rpc.Status, whose text stands in the same field
            text = ExportTracePartialSuccess.FromString(body).error_message
    return f": {' '.join(text.split())[:200]}" if text.strip() else ""
