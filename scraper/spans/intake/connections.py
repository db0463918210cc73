"""The connections of an HTTP port: how many there may be, and how long a sender may take over the head of a request.

Idle ones keep no sender away: where all are taken, the one that has waited longest gives way.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import TypeVar, cast

from aiohttp import web

_Request = TypeVar("_Request", bound=web.BaseRequest)

HEAD_S = 5.0  # a TLS handshake included
HEAD_BYTES = 64 * 1024
_HEAD_END = b"\r\n\r\n"
_ACCEPTS = 2  # in a row, then others have their turn: each costs a third of a millisecond, and its first request too
_BACKLOG = 1024  # the system keeps these until it is theirs
_PAUSE_S = 1.0  # after which a connection that could not be taken is tried again


class Connection(asyncio.Protocol):
    """One connection, before the protocol that speaks HTTP on it. It is cut where a head takes too long or too much.

    `is_busy` is set by who answers a request, while that request must not be cut; `was_cut` says that it was.
    """

    __slots__ = (
        *("_awaits_head", "_behind", "_connections", "_due", "_head_bytes", "_loop", "_tail", "_transport"),
        *("is_busy", "is_handed_over", "opening", "was_cut"),
    )

    def __init__(self, behind: asyncio.Protocol, connections: Connections) -> None:
        self.is_busy = self.was_cut = self.is_handed_over = False
        self.opening: asyncio.Task[None] | None = None
        self._behind, self._connections = behind, connections
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._awaits_head, self._head_bytes, self._tail = True, 0, b""
        self._due: asyncio.TimerHandle | None = self._loop.call_later(HEAD_S, self.cut)

    def cut(self) -> None:
        """Close the connection now."""
        if self.was_cut:
            return
        self.was_cut = True
        self._connections.note_cut(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def give_up(self) -> None:
        """Mark the connection as failed."""
        if not self.was_cut:
            self.was_cut = True
            self._connections.note_cut(self)
        self._expect_nothing()

    def begin(self) -> None:
        """Mark the head of a request as whole."""
        self._awaits_head, self._tail = False, b""
        if self._due is not None:
            self._expect_nothing()

    def end(self, *, is_last: bool) -> None:
        """Mark a request as answered: another may follow, unless it was the last."""
        self.is_busy, self._awaits_head, self._head_bytes = False, not is_last, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._behind.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._awaits_head and not self._is_head_bounded(data):
            self.cut()
            return
        self._behind.data_received(data)

    def _is_head_bounded(self, data: bytes) -> bool:
        """Return whether a request's head is within its limits so far, looking for its end."""
        seen = self._tail + data if self._tail else data
        if _HEAD_END in seen:
            self.begin()
            return True
        if self._due is None:
            self._due = self._loop.call_later(HEAD_S, self.cut)
        self._head_bytes += len(data)
        self._tail = seen[-len(_HEAD_END) + 1 :]
        return self._head_bytes <= HEAD_BYTES

    def _expect_nothing(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def eof_received(self) -> bool | None:
        return self._behind.eof_received()

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._connections.forget(self)
        self._behind.connection_lost(exc)


class Connections:
    """Connections of an HTTP server, at most `most` open at once; owns the listening sockets.

    A new one takes the place of the one that has waited longest without ever having been answered, else of the one
    that was answered longest ago; where all are busy it is closed. `cut` counts those, and those that took too long.
    `say` gets a line, once, where the system gives no more connections, which are then tried again.
    """

    def __init__(self, *, most: int, tls: ssl.SSLContext | None = None, say: Callable[[str], None]) -> None:
        self.cut = 0
        self._most, self._tls, self._say, self._has_said = most, tls, say, False
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._new: dict[Connection, None] = {}  # the oldest first
        self._answered: dict[Connection, None] = {}  # that answered longest ago first

    async def listen(self, server: Callable[[], asyncio.Protocol], host: str, port: int) -> int:
        """Accept connections of a server at an address; return its port. Raises OSError."""
        places = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, place in dict.fromkeys(places):
            listener = socket.create_server(place, family=family, backlog=_BACKLOG)
            listener.setblocking(False)
            self._listeners.append(listener)
            self._loop.add_reader(listener, self._accept, server, listener)
        return int(self._listeners[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more; those that are open stay."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    @web.middleware
    async def following(
        self, request: _Request, handler: Callable[[_Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let a connection know of the requests that it carries: a middleware, or in front of a handler."""
        connection = connection_of(request)
        if connection is None:
            return await handler(request)
        connection.begin()
        is_taken = is_last = False
        try:
            response = await handler(request)
            is_taken, is_last = response.status < 400, response.keep_alive is False
            return response
        finally:
            connection.end(is_last=is_last)
            self._note_answer(connection, is_taken=is_taken)

    def _note_answer(self, connection: Connection, *, is_taken: bool) -> None:
        """Let a connection be the last of those that give way; of those that were answered once a request is taken."""
        group = self._answered if connection in self._answered else self._new
        if connection in group:
            del group[connection]
            (self._answered if is_taken else group)[connection] = None

    def note_cut(self, connection: Connection) -> None:
        """Count a connection that is cut; its place is free."""
        self.cut += 1
        self.forget(connection)

    def forget(self, connection: Connection) -> None:
        """Free the place of a connection."""
        self._new.pop(connection, None)
        self._answered.pop(connection, None)

    def _accept(self, server: Callable[[], asyncio.Protocol], listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # without descriptors it would be asked again at once, for ever
                self._loop.remove_reader(listener)
                self._loop.call_later(_PAUSE_S, self._accept_again, server, listener)
                if not self._has_said:
                    self._say(f"no connection can be taken for a moment: {error.strerror} (said once)")
                self._has_said = True
                return
            if self._has_room():
                self._open(Connection(server(), self), accepted)
            else:
                self.cut += 1
                accepted.close()

    def _accept_again(self, server: Callable[[], asyncio.Protocol], listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, server, listener)

    def _has_room(self) -> bool:
        """Return whether there is room for one more connection, made by cutting an idle one."""
        if len(self._new) + len(self._answered) < self._most:
            return True
        idle = next((each for each in chain(self._new, self._answered) if not each.is_busy), None)
        if idle is not None:
            idle.cut()
        return idle is not None

    def _open(self, connection: Connection, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self._new[connection] = None
        connection.opening = self._loop.create_task(self._hand_over(connection, accepted))
        connection.opening.add_done_callback(lambda _: None if connection.is_handed_over else accepted.close())

    async def _hand_over(self, connection: Connection, accepted: socket.socket) -> None:
        connection.is_handed_over = True
        timeout_s = HEAD_S if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, asyncio.CancelledError):  # a handshake that failed, took too long, or gave way
            connection.give_up()


def connection_of(request: web.BaseRequest) -> Connection | None:
    """Return the connection of a request; None where it is gone already, or is not one of `Connections`."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None
