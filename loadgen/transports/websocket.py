"""Requests over WebSockets, in the framing of protocols/websocket.py; aiohttp's client does the wire.

A message is a read of the exchange, stamped when the event loop hands it over, so that reading it counts as the
server's time: what is measured here is as good as the loop is idle. Imported only where it is chosen, because aiohttp
is heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Self

import aiohttp
import msgspec

from sidelight.loadgen.records import MOST_MESSAGE_BYTES, PlannedRequest, request_id, traceparent
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec, one_line, too_large, waiting_for
from sidelight.rundir.access import aiohttp_tls
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.redirects import on_same_host

_ENDED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
_KEPT_ALIVE = (aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG)
_TURN_NS = 1_000_000  # for which messages of one connection are taken in a turn of the event loop
# uvloop reads up to 32 times in one turn where as much is there: with less room in the kernel it is not.
_RECEIVE_BUFFER_BYTES = 65_536


class _Kind(msgspec.Struct, gc=False):
    type: str = ""
    code: int = 0


_decode = msgspec.json.Decoder(_Kind).decode


class WebSocketTransport:
    """Connections that carry one request at a time, kept for the next one; owns them all."""

    def __init__(self, spec: WorkerSpec, clock: AnchoredClock) -> None:
        """Prepare TLS. Raises UnusableFile when a certificate cannot be read."""
        self._spec = spec
        self._clock = clock
        secure = any(url.startswith(("https:", "wss:")) for url in spec.roots)
        self._tls = aiohttp_tls(spec.tls) if secure else True
        self._most_bytes = min(spec.max_reply_bytes, MOST_MESSAGE_BYTES)
        self._session: aiohttp.ClientSession | None = None
        self._idle: dict[str, list[aiohttp.ClientWebSocketResponse]] = {}

    async def __aenter__(self) -> Self:
        # No limit: an open loop never waits for a connection. A name is looked up once.
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, ssl=self._tls, socket_factory=_socket)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._spec.headers, trace_configs=[on_same_host()]
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for idle in self._idle.values():
            for connection in idle:
                _cut(connection)
        if self._session is not None:
            await self._session.close()

    async def perform(self, exchange: Exchange, planned: PlannedRequest, *, timeout_s: float) -> None:
        """Send a request and wait for its last message; whatever happens stands in `exchange`; see Transport."""
        url = self._spec.roots[planned.url] + planned.path
        connection: aiohttp.ClientWebSocketResponse | None = None
        whole = False
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._take_idle(url)
                exchange.reused = connection is not None
                if connection is None:
                    connection = await self._connect(url)
                exchange.connected_ns = self._clock.now_ns()
                await connection.send_frame(self._message(planned), aiohttp.WSMsgType.TEXT)
                exchange.submit_ns = self._clock.now_ns()
                whole = await self._receive(connection, exchange)
        except TimeoutError:
            exchange.error = f"timeout: {waiting_for(exchange)} within {timeout_s:g} s"
        except aiohttp.WSServerHandshakeError as error:
            exchange.status = error.status
            exchange.body += f"the server does not speak WebSocket at {planned.path}".encode()
        except (aiohttp.ClientError, OSError) as error:
            kind = "connect" if exchange.connected_ns < 0 else "reset"
            exchange.error = f"{kind}: {one_line(error)}"
        finally:
            exchange.end_ns = self._clock.now_ns() if exchange.end_ns < 0 else exchange.end_ns
            if connection is not None:
                self._put_back(connection, url, whole=whole)

    async def _connect(self, url: str) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            raise RuntimeError("a transport was used before it was entered")
        # aiohttp would answer all pings that are there in one turn.
        return await self._session.ws_connect(url, max_msg_size=self._most_bytes, compress=0, autoping=False)

    async def _take_idle(self, url: str) -> aiohttp.ClientWebSocketResponse | None:
        idle = self._idle.get(url, [])
        while idle:
            connection = idle.pop()
            if await _is_quiet(connection):
                return connection
            _cut(connection)
        return None

    def _put_back(self, connection: aiohttp.ClientWebSocketResponse, url: str, *, whole: bool) -> None:
        if whole and self._spec.reuse:
            self._idle.setdefault(url, []).append(connection)
        else:
            _cut(connection)

    def _message(self, planned: PlannedRequest) -> bytes:
        """Return the planned body with its ids, a JSON object. The ids tie it to a span and a server's log."""
        run_id, index = self._spec.run_id, planned.index
        ids = b',"id":"%b","traceparent":"%b"}' % (
            request_id(run_id, index).encode(),
            traceparent(run_id, index).encode(),
        )
        return planned.body.rstrip().removesuffix(b"}") + ids

    async def _receive(self, connection: aiohttp.ClientWebSocketResponse, exchange: Exchange) -> bool:
        """Receive messages to the last one of the reply. False when the connection ended before it.

        aiohttp gives messages that have come without a turn of the event loop between them: others would wait for as
        long as a peer sends faster than we read.
        """
        now_ns = turn_ends_ns = 0
        while True:
            if now_ns > turn_ends_ns:
                await asyncio.sleep(0)
                turn_ends_ns = self._clock.now_ns() + _TURN_NS
            message = await connection.receive()
            now_ns = self._clock.now_ns()
            if message.type in _KEPT_ALIVE:
                if message.type == aiohttp.WSMsgType.PING:
                    await connection.pong(message.data)
                continue
            if message.type in _ENDED:
                exchange.end_ns = now_ns
                if getattr(message.data, "code", None) == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                    exchange.error = too_large(self._most_bytes)
                else:
                    code, size = connection.close_code, exchange.received_bytes
                    exchange.error = f"reset: closed by peer (code {code}) after {size} body bytes"
                return False
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            kind = _kind(data)
            if exchange.status == 0:
                refused = kind.type == "error" and 400 <= kind.code <= 599
                exchange.status = kind.code if refused else 200
            exchange.take(data, now_ns)
            if exchange.excess:
                exchange.end_ns, exchange.error = now_ns, exchange.excess
                return False
            if kind.type in {"done", "error"}:
                exchange.end_ns = now_ns
                return True


def _socket(where: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = where
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return sock


def _kind(data: bytes) -> _Kind:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Kind()  # reading the reply says what is wrong with it


async def _is_quiet(connection: aiohttp.ClientWebSocketResponse) -> bool:
    """Return whether an idle connection is open and has no message; pings aside.

    A message would be read as the next reply.

    A close that has come shows only to who receives.
    """
    try:
        async with asyncio.timeout(0):  # what has come is given before it expires
            while (message := await connection.receive()).type in _KEPT_ALIVE:
                if message.type == aiohttp.WSMsgType.PING:
                    await connection.pong(message.data)
    except TimeoutError:
        return not connection.closed
    return False


def _cut(connection: aiohttp.ClientWebSocketResponse) -> None:
    """End a connection at once, without the closing handshake. The handshake would have to be waited for."""
    sock = connection.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        # A duplicate, because the socket that an event loop shows may not be shut.
        with socket.socket(fileno=os.dup(sock.fileno())) as duplicate, contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)
    connection._response.close()  # noqa: SLF001  aiohttp keeps it until garbage collection otherwise
