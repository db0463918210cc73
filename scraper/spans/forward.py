"""Sending of exports to an OTLP collector, again while it is away."""

from __future__ import annotations

import asyncio
import io
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import aiohttp
import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess

from sidelight.rundir.access import Access, bare, connection_problem, headers_for, masked, tls_context
from sidelight.scraper.spans.spec import GRPC_PORT, PROTOBUF, SIGNALS, TRACES, forward_parts

T = TypeVar("T")

ATTEMPT_S = 10.0
_REPLY_BYTES = 64 * 1024
# How aiohttp shows what a gRPC server says first: a frame of HTTP/2 (length of 3 bytes, type 4, on stream 0).
_NO_STATUS_LINE, HTTP2_SETTINGS = "Bad status line", r"\x04\x00\x00\x00\x00\x00"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LONGEST_WAIT_S = 60.0  # whatever a Retry-After states
# https://opentelemetry.io/docs/specs/otlp/#failures
HTTP_AGAIN = (429, 502, 503, 504)
GRPC_AGAIN = (
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
    """Return the result of `send()`, awaited again as long as it raises Unavailable.

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


class CollectorConnection:
    """Connection to a collector; an async context manager that owns it.

    `url`: grpc://HOST:PORT and grpcs:// speak gRPC, as http(s)://HOST:4317 does (what engines call their endpoint);
    any other http(s) URL speaks HTTP/protobuf, at /v1/traces where it has no path.
    """

    def __init__(self, url: str, access: Access) -> None:
        """Read the URL. Raises ValueError for one that is none of these."""
        self._url, self._access = url, access
        self._speaks_grpc = speaks_grpc(url)
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
        """Send one export to the collector, once; return its reply. Raises Unavailable, Rejected."""
        return await (self._over_grpc(body, signal) if self._speaks_grpc else self._over_http(body, signal))

    async def deliver(
        self,
        body: bytes,
        signal: str = TRACES,
        *,
        on_away: Callable[[Unavailable], object] = lambda _: None,
    ) -> bytes:
        """Send one export to the collector until it is taken or refused; return the reply. Raises Rejected."""
        return await again_while_away(lambda: self.send(body, signal), on_away=on_away)

    async def _over_http(self, body: bytes, signal: str) -> bytes:
        url = http_url(bare(self._url), signal)
        if not url:
            raise Rejected(f"the path of its URL is for spans alone; end it in /v1/traces, or in /v1/{signal}")
        headers = {"Content-Type": PROTOBUF, **headers_for(self._access, self._url)}
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
            if error.message.startswith(_NO_STATUS_LINE) and HTTP2_SETTINGS in error.message:
                raise Rejected(f"this is a gRPC port: write grpc://{urlsplit(bare(self._url)).netloc}") from error
            raise Unavailable(" ".join(error.message.split()) or type(error).__name__) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(" ".join(str(error).split()) or type(error).__name__) from error
        if status in HTTP_AGAIN:
            raise Unavailable(f"HTTP {status}", again_s=float(again) if again.isdecimal() else 0.0)
        if status >= 300:
            raise Rejected(f"HTTP {status}{refusal(kind, reply)}")
        return reply

    async def _over_grpc(self, body: bytes, signal: str) -> bytes:
        metadata = tuple((name.lower(), value) for name, value in headers_for(self._access, self._url).items())
        try:
            reply: bytes = await self._calls[signal](body, timeout=ATTEMPT_S, metadata=metadata)
        except aio.AioRpcError as error:
            reason = f"{error.code().name}: {' '.join((error.details() or '').split())[:200]}"
            raise (Unavailable if error.code() in GRPC_AGAIN else Rejected)(reason) from error
        return reply

    def _channel(self) -> aio.Channel:
        parts = urlsplit(bare(self._url))
        # No proxy of the environment's, as over HTTP: headers may be secrets.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.enable_http_proxy", 0),
        ]
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


def speaks_grpc(url: str) -> bool:
    """Return whether the collector at a URL speaks gRPC. Raises ValueError for a URL of none."""
    parts = forward_parts(url)
    return parts.scheme in ("grpc", "grpcs") or (parts.port == GRPC_PORT and not parts.path.strip("/"))


def http_url(url: str, signal: str = TRACES) -> str:
    """Return the URL for exports of a signal.

    It is at /v1/ and the signal, or where the path of the URL ends in the name of one, at that of its own. The URL
    itself, if it has another path, is that of spans, and "" is returned for others.
    """
    parts = urlsplit(url)
    path = parts.path if parts.path.strip("/") else f"/v1/{TRACES}"
    begin, slash, name = path.rstrip("/").rpartition("/")
    if name in SIGNALS:
        path = path if name == signal else f"{begin}{slash}{signal}"
    elif signal != TRACES:
        return ""
    return urlunsplit(parts._replace(path=path))


def refusal(kind: str, body: bytes) -> str:
    """Return the reason in a refusal, after a colon; empty for none, and for a page."""
    text = body.decode(errors="replace") if kind in ("text/plain", "application/json") else ""
    if kind == PROTOBUF:
        with suppress(DecodeError):  # a google.rpc.Status, whose text stands in the same field
            text = ExportTracePartialSuccess.FromString(body).error_message
    return f": {' '.join(text.split())[:200]}" if text.strip() else ""
