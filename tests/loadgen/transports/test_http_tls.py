"""Requests over TLS: who is trusted, how a connection ends, and what a fast peer may take of the event loop."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from faults.servers import serving
from waiting import BOUND_S, Turns

from sidelight.loadgen.transports.http import Pool, origin_of
from sidelight.loadgen.transports.transport import Exchange
from sidelight.rundir.access import Tls, tls_context
from sidelight.rundir.clock import AnchoredClock

if TYPE_CHECKING:
    from conftest import Peer, Serve, Wire

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n{}"


async def _exchange(pool: Pool, clock: AnchoredClock, request: bytes = REQUEST, timeout_s: float = BOUND_S) -> Exchange:
    exchange = Exchange(index=0, scheduled_ns=clock.now_ns(), dispatch_ns=clock.now_ns())
    await pool.perform(exchange, request, timeout_s=timeout_s)
    return exchange


async def test_tls(serve: Serve, anchored: AnchoredClock, wire: type[Wire], certificate: tuple[Path, Path]):
    """A server that wants a client certificate answers a client that has one; its own is trusted by its authority, or
    where checks are off; a client that does neither gets the reason."""
    key, cert = map(str, certificate)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await serve(wire.answer(1), ssl=context)
    url = server.url.replace("127.0.0.1", "localhost")
    for spec in (Tls(ca=cert, cert=cert, key=key), Tls(insecure=True, cert=cert, key=key)):
        there = url if spec.insecure else server.url
        async with Pool(origin_of(there), anchored, tls=tls_context(spec)) as pool:
            got = [await _exchange(pool, anchored) for _ in range(2)]
        assert [("", 200, False), ("", 200, True)] == [
            (exchange.error, exchange.status, exchange.reused) for exchange in got
        ]
        assert all(exchange.submit_ns >= exchange.connected_ns > 0 for exchange in got)
    async with Pool(origin_of(server.url), anchored) as pool:
        assert (await _exchange(pool, anchored)).error.startswith("connect: tls: ")
    async with Pool(origin_of(server.url), anchored, tls=tls_context(Tls(ca=cert))) as pool:
        # TLS 1.3 refuses a client only after its handshake.
        assert (await _exchange(pool, anchored)).error


async def test_a_tls_connection_may_end_without_a_word(
    serve: Serve, anchored: AnchoredClock, certificate: tuple[Path, Path]
):
    """Without TLS's own end: it was closed by the peer all the same."""
    key, cert = map(str, certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def script(peer: Peer) -> None:
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello")
        peer.writer.transport.abort()

    server = await serve(script, ssl=context)
    async with Pool(origin_of(server.url), anchored, tls=tls_context(Tls(ca=cert))) as pool:
        got = await _exchange(pool, anchored)
    assert "reset: closed by the peer after 5 body bytes" == got.error


def test_a_flood_over_tls_leaves_others_their_turn(certificate: tuple[Path, Path], anchored: AnchoredClock):
    """However fast it comes: the worker's event loop takes no more of it in one turn than the kernel has room for."""
    key, cert = map(str, certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
    turns = Turns(exchange)

    async def load(url: str) -> None:
        asyncio.get_running_loop().call_soon(turns.watch)
        async with Pool(origin_of(url), anchored, tls=tls_context(Tls(ca=cert))) as pool:
            await pool.perform(exchange, REQUEST, timeout_s=BOUND_S)

    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n" + bytes(20_000_000)
    with (
        serving(lambda _: (reply,), tls=context) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(load(url))
    assert ("", 20_000_000) == (exchange.error, exchange.received_bytes)
    assert turns.most <= 512 * 1024
