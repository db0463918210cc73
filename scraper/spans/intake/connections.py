"""Bound on the connections of an HTTP server: where all are taken, one that was never answered makes room.

What a connection may send is bounded by aiohttp, and how long it may be idle.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar

from aiohttp import web

_Request = TypeVar("_Request", bound=web.BaseRequest)

_HANDSHAKE_S = 5.0  # no connection is counted before


class Connections:
    """Connections of an HTTP server, at most `most` open at once.

    A new one takes the place of the oldest that was never answered, else of the one answered longest ago; `cut` counts
    those.
    """

    def __init__(self, most: int) -> None:
        self.cut = 0
        self._most = most
        self._answered: dict[web.RequestHandler, None] = {}  # that answered longest ago first

    @asynccontextmanager
    async def listening(
        self, server: web.Server, host: str, port: int, *, tls: ssl.SSLContext | None, backlog: int = 100
    ) -> AsyncIterator[int]:
        """Accept connections of a server at an address while the context is open; yield the port. Raises OSError."""

        def accept() -> asyncio.Protocol:
            self._make_room(server)
            return server()

        loop, handshake_s = asyncio.get_running_loop(), _HANDSHAKE_S if tls else None
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with ExitStack() as stack:
            ports = []
            for family, _, _, _, place in dict.fromkeys(places):
                listener = socket.create_server(place, family=family, backlog=backlog)
                ports.append(int(listener.getsockname()[1]))
                accepting = await loop.create_server(
                    accept, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s, backlog=backlog
                )
                stack.callback(accepting.close)
            yield ports[0]

    @web.middleware
    async def following(
        self, request: _Request, handler: Callable[[_Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request, and note its connection unless it is refused: a middleware, or in front of a handler."""
        response = await handler(request)
        if response.status < 400:
            self.note_answer(request)
        return response

    def note_answer(self, request: web.BaseRequest) -> None:
        """Let the connection of a request be the last to make room."""
        self._answered.pop(request.protocol, None)
        self._answered[request.protocol] = None

    def _make_room(self, server: web.Server) -> None:
        """Cut as many connections as are too many with one more."""
        connected = {each: each.transport for each in server.connections if each.transport is not None}
        connected = {each: transport for each, transport in connected.items() if not transport.is_closing()}
        self._answered = {each: None for each in self._answered if each in connected}
        in_order = [*(each for each in connected if each not in self._answered), *self._answered]
        for each in in_order[: max(0, len(connected) + 1 - self._most)]:
            self.cut += 1
            connected[each].abort()
