"""The connections of an HTTP port: who sends nothing keeps no other away, and is cut when there is need."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from certificates import Authority
from waiting import BOUND_S

from sidelight.scraper.spans.intake import connections
from sidelight.scraper.spans.intake.connections import Connections

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def serving(most: int, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Connections, int]]:
    """Answer `ok` to all, on so many connections."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    connections = Connections(most)
    app = web.Application(middlewares=[connections.following])
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    try:
        async with connections.listening(runner.server, "127.0.0.1", 0, tls=tls) as port:
            yield connections, port
    finally:
        await runner.cleanup()


class Client:
    """One connection, by its client's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self) -> bytes:
        """Send a whole request; the status line of the answer, b"" where the connection is cut."""
        try:
            self.writer.write(HEAD)
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), BOUND_S)
            await asyncio.wait_for(self.reader.readexactly(2), BOUND_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""
        return head.partition(b"\r\n")[0]

    async def is_cut(self) -> bool:
        """Wait until the connection is closed."""
        try:
            return b"" == await asyncio.wait_for(self.reader.read(1), BOUND_S)
        except ConnectionError:
            return True


@asynccontextmanager
async def connecting() -> AsyncIterator[list[Client]]:
    """A list to which connections are added with `connect`; they are closed at the end."""
    clients: list[Client] = []
    try:
        yield clients
    finally:
        for client in clients:
            client.writer.close()


async def connect(clients: list[Client], port: int, sent: bytes = b"") -> Client:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    clients.append(client)
    client.writer.write(sent)
    return client


async def test_an_idle_connection_gives_way_to_a_new_one():
    """The one that has waited longest does, and the new one is answered."""
    async with serving(3) as (server, port), connecting() as clients:
        idle = [await connect(clients, port, b"GET / HT") for _ in range(3)]
        assert b"HTTP/1.1 200 OK" == await (await connect(clients, port)).ask()
        assert await idle[0].is_cut()
        assert 1 == server.cut
        idle[1].writer.write(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert (await idle[1].reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_sender_that_was_answered_gives_way_last():
    """However many connect and send nothing, it keeps its connection."""
    async with serving(3) as (server, port), connecting() as clients:
        exporter = await connect(clients, port)
        assert b"HTTP/1.1 200 OK" == await exporter.ask()
        for _ in range(20):
            await connect(clients, port)
        assert await clients[1].is_cut()
        assert b"HTTP/1.1 200 OK" == await exporter.ask()
        assert 18 == server.cut


async def test_a_head_has_to_be_short():
    """It is not kept while it grows: aiohttp answers before its end."""
    async with serving(9) as (_, port), connecting() as clients:
        client = await connect(clients, port, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        assert (await asyncio.wait_for(client.reader.readline(), BOUND_S)).startswith(b"HTTP/1.0 400")


async def test_a_handshake_has_to_come_in_time(authority: Authority, monkeypatch: pytest.MonkeyPatch):
    """Who begins none is cut, who speaks another protocol too; who does is answered."""
    monkeypatch.setattr(connections, "_HANDSHAKE_S", 1.0)
    async with serving(9, tls=authority.serving()) as (_, port), connecting() as clients:
        assert await (await connect(clients, port, b"GET / HTTP/1.1\r\n\r\n")).is_cut()
        assert await (await connect(clients, port)).is_cut()
        trusting = ssl.create_default_context(cafile=authority.path("ca.pem"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        clients.append(Client(reader, writer))
        assert b"HTTP/1.1 200 OK" == await clients[-1].ask()
