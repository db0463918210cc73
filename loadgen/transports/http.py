"""Requests over HTTP/1.1: their heads, and the connections that carry them, kept alive between requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from sidelight.loadgen.records import PlannedRequest, request_id, traceparent
from sidelight.loadgen.transports.connection import Connection
from sidelight.loadgen.transports.lateness import ReceiveStamps
from sidelight.loadgen.transports.sockets import Address, connect, connect_tls
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec, one_line, waiting_for
from sidelight.rundir.access import tls_context
from sidelight.rundir.clock import AnchoredClock

_RESOLVE_S = 2.0
# A close that comes later than that was no answer to an idle connection: the peer had the request, and dropped it.
RETRY_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Scheme, host and port of a target."""

    tls: bool
    host: str
    port: int

    @property
    def authority(self) -> str:
        """Return host and port as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def origin_of(url: str) -> Origin:
    """Return the origin of a URL; its path does not matter. Raises ValueError when it is not http(s)."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    tls = parts.scheme == "https"
    return Origin(tls=tls, host=parts.hostname, port=parts.port or (443 if tls else 80))


class Pool:
    """Connections to one origin, kept alive between requests unless `reuse` is off; owns them all.

    There is no limit to how many are open at once: an open loop never waits for one. The most recently used idle one
    is taken first, so that the rest grow old and are dropped.
    """

    def __init__(
        self,
        origin: Origin,
        clock: AnchoredClock,
        *,
        tls: ssl.SSLContext | None = None,
        reuse: bool = True,
        stamps: ReceiveStamps | None = None,
    ) -> None:
        self._origin = origin
        self._clock = clock
        self._tls = (tls or ssl.create_default_context()) if origin.tls else None
        self._reuse = reuse
        self._stamps = stamps or ReceiveStamps(clock)
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._addresses: tuple[Address, ...] = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._open:
            connection.abort()
        # Aborted transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

    async def perform(self, exchange: Exchange, request: bytes, *, timeout_s: float) -> None:
        """Send a request and wait for the end of its reply; whatever happens stands in `exchange`; see Transport.

        A kept connection that ends within a second, before any byte of a reply, was closed by the peer while it was
        idle, or as the request came. The request is then sent once more on a new connection, and its stamps are of
        that. One that is dropped later is a failure: its wait would be missing from the latency.
        """
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._take_idle()
                exchange.reused = connection is not None
                if connection is not None:
                    await self._send(connection, exchange, request)
                    if exchange.error and not connection.answered and self._is_fresh(exchange):
                        exchange.send_again()
                        self._drop(connection)
                        connection = None
                if connection is None:
                    connection = await self._connect()
                    await self._send(connection, exchange, request)
        except TimeoutError:
            exchange.error = f"timeout: {waiting_for(exchange)} within {timeout_s:g} s"
        except OSError as error:
            exchange.error = f"connect: {one_line(error)}"
        finally:
            if exchange.end_ns < 0:
                if connection is not None:
                    connection.abort()
                exchange.end_ns = self._clock.now_ns()
            if connection is not None:
                self._put_back(connection)

    async def _send(self, connection: Connection, exchange: Exchange, request: bytes) -> None:
        exchange.connected_ns = self._clock.now_ns()
        await connection.begin(exchange, request)

    def _is_fresh(self, exchange: Exchange) -> bool:
        return self._clock.now_ns() - exchange.connected_ns <= RETRY_NS

    async def resolve(self) -> None:
        """Look the host up, once: for each connection it would go through a thread pool and show as lateness.

        Raises OSError when the name does not resolve.
        """
        host, port = self._origin.host, self._origin.port
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses = tuple(dict.fromkeys((entry[0], entry[4]) for entry in entries))

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._drop(connection)
        return None

    def _put_back(self, connection: Connection) -> None:
        if self._reuse and connection.usable:
            self._idle.append(connection)
        else:
            self._drop(connection)
        # Idle connections are ordered oldest first; checking two per call evicts stale ones in amortised O(1).
        for old in self._idle[:2]:
            if not old.usable:
                self._idle.remove(old)
                self._drop(old)

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        self._open.discard(connection)

    async def _connect(self) -> Connection:
        if not self._addresses:
            await self.resolve()
        failure = OSError(f"{self._origin.host} has no address")
        for address in self._addresses:
            try:
                if self._tls is None:
                    connection = await connect(address, self._clock, self._stamps)
                else:
                    tls, host = self._tls, self._origin.host
                    connection = await connect_tls(address, self._clock, self._stamps, tls=tls, host=host)
            except TimeoutError as error:
                # The kernel's own: asyncio.timeout cancels instead. With its errno it would be a TimeoutError again.
                failure = OSError(one_line(error))
            except OSError as error:
                failure = error
            else:
                self._addresses = (address,)
                self._open.add(connection)
                return connection
        raise failure


class HttpTransport:
    """One pool of connections an origin; owns them. Raises ValueError or OSError on an unusable specification."""

    def __init__(self, spec: WorkerSpec, clock: AnchoredClock, *, stamps: ReceiveStamps) -> None:
        self._run_id = spec.run_id
        origins = [origin_of(root) for root in spec.roots]
        tls = tls_context(spec.tls) if any(origin.tls for origin in origins) else None
        pools = {origin: Pool(origin, clock, tls=tls, reuse=spec.reuse, stamps=stamps) for origin in origins}
        # By a request's `url`: the pool, what stands before its path, and the lines that every request has; last those
        # of a request without headers of its own, so that position -1 is theirs.
        self._targets = [
            (
                pools[origin],
                urlsplit(root).path,
                [
                    _fixed_head(origin.authority, _merged(spec.headers, header_set), reuse=spec.reuse)
                    for header_set in (*spec.header_sets, {})
                ],
            )
            for root, origin in zip(spec.roots, origins, strict=True)
        ]
        self._pools = tuple(pools.values())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for pool in self._pools:
            await self._stack.enter_async_context(pool)
            # A name that does not resolve is every request's own error.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_RESOLVE_S):
                    await pool.resolve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def perform(self, exchange: Exchange, planned: PlannedRequest, *, timeout_s: float) -> None:
        """Send a request to the URL that it names; see Pool.perform."""
        pool, prefix, heads = self._targets[planned.url]
        fixed = heads[planned.headers]
        run_id, index = self._run_id, planned.index
        head = (
            f"POST {prefix}{planned.path} HTTP/1.1\r\n{fixed}X-Request-Id: {request_id(run_id, index)}\r\n"
            f"traceparent: {traceparent(run_id, index)}\r\nContent-Length: {len(planned.body)}\r\n\r\n"
        )
        await pool.perform(exchange, head.encode() + planned.body, timeout_s=timeout_s)


def _merged(headers: dict[str, str], header_set: dict[str, str]) -> dict[str, str]:
    """Return headers, with a request's own in place of those of equal name. Case makes no difference."""
    replaced = {name.lower() for name in header_set}
    return {name: value for name, value in headers.items() if name.lower() not in replaced} | header_set


def _fixed_head(authority: str, given: dict[str, str], *, reuse: bool) -> str:
    headers = {
        "Host": authority,
        "User-Agent": "sidelight",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
        "Connection": "keep-alive" if reuse else "close",
        "Content-Type": "application/json",
    }
    names = {name.lower() for name in given}
    lines = {name: value for name, value in headers.items() if name.lower() not in names} | given
    for name, value in lines.items():
        if not name or any(character in name + value for character in "\r\n\0"):
            raise ValueError(f"header {name!r} is empty or holds a line break")
        if not (name + value).isascii():
            raise ValueError(f"header {name!r} is not ASCII")
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items())
