from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from waiting import BOUND_S, movable_time

from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.transports.http import HttpTransport, Pool, origin_of
from sidelight.loadgen.transports.lateness import ReceiveStamps
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec
from sidelight.rundir.access import Tls, UnusableFile, root_url, tls_context
from sidelight.rundir.clock import AnchoredClock

if TYPE_CHECKING:
    from conftest import Peer, Script, Serve, Wire

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n{}"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no connection be too old, and no request too late to be sent again, because this machine is busy."""
    monkeypatch.setattr("sidelight.loadgen.transports.connection.MAX_IDLE_NS", round(BOUND_S * 1e9))
    monkeypatch.setattr("sidelight.loadgen.transports.http.RETRY_NS", round(BOUND_S * 1e9))


async def _exchange(pool: Pool, clock: AnchoredClock, request: bytes = REQUEST, timeout_s: float = BOUND_S) -> Exchange:
    exchange = Exchange(index=0, scheduled_ns=clock.now_ns(), dispatch_ns=clock.now_ns())
    await pool.perform(exchange, request, timeout_s=timeout_s)
    return exchange


async def _turn_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in the transport, which has no event
            await asyncio.sleep(0)


async def _once(
    serve: Serve, clock: AnchoredClock, *reply: bytes, close: bool = False, timeout_s: float = BOUND_S
) -> Exchange:
    async def script(peer: Peer) -> None:
        await peer.say(*reply)
        if close:
            peer.writer.close()

    server = await serve(script)
    async with Pool(origin_of(server.url), clock) as pool:
        return await _exchange(pool, clock, timeout_s=timeout_s)


async def test_a_chunked_reply_is_kept_as_it_came(serve: Serve, anchored: AnchoredClock, wire: type[Wire]):
    """Status, raw head, wire body, and one stamp a read, all in order between dispatch and end."""
    reply = wire.answer(5)
    got = await _once(serve, anchored, reply)
    assert ("", 200) == (got.error, got.status)
    assert wire.SSE_HEAD == got.head
    assert reply.removeprefix(wire.SSE_HEAD) == got.body
    assert len(got.reads_ns) == len(got.read_ends)
    assert len(got.body) == got.read_ends[-1]
    times = [got.dispatch_ns, got.connected_ns, got.submit_ns, *got.reads_ns]
    assert sorted(times) == times
    assert got.reads_ns[-1] == got.end_ns


@pytest.mark.parametrize(
    ("reply", "close", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", False, b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", True, b"hello"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello", True, b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n" + OK, False, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b""),
    ],
)
async def test_the_ways_a_body_may_end(serve: Serve, anchored: AnchoredClock, reply: bytes, close: bool, body: bytes):
    """By length, by being none, by the close; interim answers are skipped."""
    got = await _once(serve, anchored, reply, close=close)
    assert ("", body) == (got.error, bytes(got.body))
    assert got.end_ns >= got.reads_ns[-1]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", "reset: closed by the peer before any response"),
        (b"HTTP/1.1 200", "reset: closed by the peer in the middle of the response head"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "reset: closed by the peer after 5 body bytes"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol: not an HTTP/1.x status line"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "protocol: 101"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "protocol: not a chunk size"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "protocol: a response head longer than 64 KiB"),
        (
            b"HTTP/1.1 102 Processing\r\n\r\n" * 3_000 + OK,
            "protocol: interim answers (1xx) of more than 64 KiB",
        ),
    ],
)
async def test_a_broken_reply_is_an_error_with_its_kind(
    serve: Serve, anchored: AnchoredClock, reply: bytes, error: str
):
    """The error says what the peer did, and what had come is kept."""
    got = await _once(serve, anchored, reply, close=True)
    assert got.error.startswith(error)
    assert len(got.reads_ns) == len(got.read_ends)
    assert got.end_ns > 0


async def test_a_reset_in_the_middle_keeps_what_had_come(serve: Serve, anchored: AnchoredClock, wire: type[Wire]):
    """RST after two events: error of kind reset, the bytes before it are there."""
    begun = wire.SSE_HEAD + wire.event(wire.ROLE) + wire.event(wire.content("hi"))
    received = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.say(begun)
        await received.wait()
        raw = peer.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.writer.transport.abort()

    server = await serve(script)
    async with Pool(origin_of(server.url), anchored) as pool:
        exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
        performing = asyncio.create_task(pool.perform(exchange, REQUEST, timeout_s=BOUND_S))
        await _turn_until(lambda: exchange.catch_up() or len(exchange.head) + len(exchange.body) >= len(begun))
        received.set()
        await performing
    assert exchange.error.startswith("reset: Connection reset by peer after ")
    assert begun == exchange.head + exchange.body


@pytest.mark.parametrize(
    ("dribble", "body", "missing"),
    [
        (b"", b"", "response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", b"hel", "complete reply"),
        (b"HTTP/1.1 200", b"", "complete reply"),
    ],
)
async def test_timeouts_say_what_was_waited_for(
    serve: Serve, anchored: AnchoredClock, monkeypatch: pytest.MonkeyPatch, dribble: bytes, body: bytes, missing: str
):
    """No response at all; a slow reply that never completes; a head that never ends. The loop's time is moved on."""
    move = movable_time(monkeypatch)

    async def script(peer: Peer) -> None:
        await peer.say(dribble)
        await asyncio.Event().wait()

    server = await serve(script)
    async with Pool(origin_of(server.url), anchored) as pool:
        exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
        performing = asyncio.create_task(pool.perform(exchange, REQUEST, timeout_s=BOUND_S))
        await _turn_until(lambda: server.peers and (exchange.reads_ns or not dribble))
        move(BOUND_S)
        await performing
    assert f"timeout: no {missing} within {BOUND_S:g} s" == exchange.error
    assert (body, 1) == (bytes(exchange.body), server.connections)


async def test_a_name_that_does_not_resolve(anchored: AnchoredClock):
    """The reserved top-level domain .invalid never resolves."""
    async with Pool(origin_of("http://nowhere.invalid:80"), anchored) as pool:
        got = await _exchange(pool, anchored)
    assert got.error.startswith("connect: name not resolved")


async def test_a_connection_is_used_again(serve: Serve, anchored: AnchoredClock):
    """Ten requests in a row go over one connection, and say so."""
    server = await serve(OK)
    async with Pool(origin_of(server.url), anchored) as pool:
        reused = [(await _exchange(pool, anchored)).reused for _ in range(10)]
    assert [False] + 9 * [True] == reused
    assert server.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b", and more",
    ],
)
async def test_a_connection_is_not_used_again(serve: Serve, anchored: AnchoredClock, reply: bytes):
    """Not when the peer will close it, nor when bytes follow the reply."""

    server = await serve(reply)
    async with Pool(origin_of(server.url), anchored) as pool:
        got = [await _exchange(pool, anchored) for _ in range(2)]
    assert [("", b"ok", False)] * 2 == [(exchange.error, bytes(exchange.body), exchange.reused) for exchange in got]
    assert server.connections == 2


async def test_a_connection_closed_while_idle_is_not_used_again(serve: Serve, anchored: AnchoredClock):
    """The close is seen before the next request, which opens a new connection and succeeds."""
    closed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.say(OK)
        peer.writer.close()
        closed.set()

    server = await serve(script)
    async with Pool(origin_of(server.url), anchored) as pool:
        first = await _exchange(pool, anchored)
        await closed.wait()
        await _turn_until(lambda: not any(connection.usable for connection in pool._open))
        second = await _exchange(pool, anchored)
    assert [("", False)] * 2 == [(exchange.error, exchange.reused) for exchange in (first, second)]


async def test_an_old_idle_connection_is_not_used_again(
    serve: Serve, anchored: AnchoredClock, monkeypatch: pytest.MonkeyPatch
):
    """Past the idle limit a new connection is made and the old one closed."""

    server = await serve(OK)
    monkeypatch.setattr("sidelight.loadgen.transports.connection.MAX_IDLE_NS", -1)
    async with Pool(origin_of(server.url), anchored) as pool:
        await _exchange(pool, anchored)
        await _exchange(pool, anchored)
        assert not pool._idle
    assert server.connections == 2


def _closing(at: set[int], before_closing: bytes = b"") -> Script:
    """Answer every request but those at some places, counted from 1: say the bytes and close."""
    seen = count(1)

    async def script(peer: Peer) -> None:
        if next(seen) in at:
            await peer.say(before_closing)
            peer.writer.close()
        else:
            await peer.say(OK)

    return script


async def test_a_kept_connection_that_closes_before_any_byte_is_tried_once_more(serve: Serve, anchored: AnchoredClock):
    """The second request is sent twice; its stamps are those of the second time, on a new connection."""
    seen_ns: list[int] = []

    async def script(peer: Peer) -> None:
        seen_ns.append(anchored.now_ns())
        await closing(peer)

    closing = _closing({2})
    server = await serve(script)
    async with Pool(origin_of(server.url), anchored) as pool:
        got = [await _exchange(pool, anchored) for _ in range(3)]
    assert [("", b"ok", False, False), ("", b"ok", False, True), ("", b"ok", True, False)] == [
        (exchange.error, bytes(exchange.body), exchange.reused, exchange.retried) for exchange in got
    ]
    assert [0, 0, 1, 1] == [peer.connection for peer in server.peers]
    assert server.peers[1].head == server.peers[2].head
    retried = got[1]
    assert retried.dispatch_ns < seen_ns[1] < retried.connected_ns <= retried.submit_ns <= retried.reads_ns[0]


async def test_a_request_that_is_dropped_after_a_wait_is_not_sent_again(
    serve: Serve, anchored: AnchoredClock, monkeypatch: pytest.MonkeyPatch
):
    """The server had it: what it waited for would be missing from the latency of a second sending."""
    monkeypatch.setattr("sidelight.loadgen.transports.http.RETRY_NS", -1)
    server = await serve(_closing({2}))
    async with Pool(origin_of(server.url), anchored) as pool:
        await _exchange(pool, anchored)
        second = await _exchange(pool, anchored)
    assert "reset: closed by the peer before any response" == second.error
    assert (True, False, 2) == (second.reused, second.retried, len(server.peers))


async def test_a_request_is_never_sent_a_third_time(serve: Serve, anchored: AnchoredClock):
    """A new connection that dies before any byte is a failure: of the first request, and of a second sending."""
    for at, sent in (({1}, 1), ({2, 3}, 3)):
        server = await serve(_closing(at))
        async with Pool(origin_of(server.url), anchored) as pool:
            got = [await _exchange(pool, anchored) for _ in range(len(at))]
        assert "reset: closed by the peer before any response" == got[-1].error
        assert (sent > 1, sent) == (got[-1].retried, len(server.peers))


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200", b"HTTP/1.1 103 Hints\r\n\r\n", OK[:-1]])
async def test_a_request_of_which_a_byte_came_back_is_not_sent_again(
    serve: Serve, anchored: AnchoredClock, begun: bytes
):
    """The server sees it once; what had come is kept."""
    server = await serve(_closing({2}, begun))
    async with Pool(origin_of(server.url), anchored) as pool:
        await _exchange(pool, anchored)
        second = await _exchange(pool, anchored)
    assert second.error.startswith("reset: ")
    assert (True, False, 2) == (second.reused, second.retried, len(server.peers))


async def test_submit_is_when_the_last_byte_left(anchored: AnchoredClock):
    """A request larger than the socket's buffers is submitted only once the server has begun to read it."""
    reading = 0

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal reading
        await begun.wait()
        reading = anchored.now_ns()
        await reader.readexactly(len(request))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    request = REQUEST.replace(b"Content-Length: 2", b"Content-Length: 30000000")[:-2] + bytes(30_000_000)
    begun = asyncio.Event()
    listening = await asyncio.start_server(slow, "127.0.0.1", 0, limit=1 << 16)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with Pool(origin_of(url), anchored) as pool:
        exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
        performing = asyncio.create_task(pool.perform(exchange, request, timeout_s=BOUND_S))
        await _turn_until(lambda: exchange.connected_ns >= 0)
        assert exchange.submit_ns == -1
        begun.set()
        await performing
    listening.close()
    assert ("", 200) == (exchange.error, exchange.status)
    assert reading < exchange.submit_ns <= exchange.end_ns


async def test_a_huge_body_comes_whole(serve: Serve, anchored: AnchoredClock):
    """20 MB by length."""
    got = await _once(serve, anchored, b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n", bytes(20_000_000))
    assert ("", 20_000_000) == (got.error, len(got.body))
    assert got.read_ends[-1] == 20_000_000


@pytest.mark.parametrize("url", ["http://h", "http://h/", "http://h/v1", "http://h/v1/", "http://h//v1/"])
def test_a_base_url_has_one_root(url: str):
    """The load goes where the models were listed: /v1 and every slash around it are no part of the root."""
    spec = WorkerSpec(
        worker=0, workers=1, run_id="r", clock_offset_ns=0, headers={}, out="", request_timeout_s=1.0, urls=[url]
    )
    assert ["http://h"] == spec.roots == [root_url(url)]


async def test_a_request_may_have_headers_of_its_own(serve: Serve, anchored: AnchoredClock):
    """They replace those of all requests by name, whatever its case; the next request has none of them."""

    async def script(peer: Peer) -> None:
        await peer.say(OK)

    server = await serve(script)
    spec = WorkerSpec(
        worker=0, workers=1, run_id="r", clock_offset_ns=0, headers={"X-Team": "all", "X-Key": "k"},
        header_sets=({"x-team": "one"}, {"X-Other": "2"}), out="", request_timeout_s=1.0, urls=[server.url],
    )  # fmt: skip
    async with HttpTransport(spec, anchored, stamps=ReceiveStamps(anchored)) as transport:
        for number in (0, 1, -1):
            exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
            planned = PlannedRequest(index=0, path="/v1/completions", body=b"{}", headers=number)
            await transport.perform(exchange, planned, timeout_s=BOUND_S)
    heads = [[peer.header(name) for name in ("X-Team", "X-Key", "X-Other")] for peer in server.peers]
    assert [["one", "k", None], ["all", "k", "2"], ["all", "k", None]] == heads


async def test_a_request_bears_its_id_and_its_trace(serve: Serve, anchored: AnchoredClock):
    """The id is a UUID, as Envoy requires, that ends in the request's number; the trace is to be recorded."""
    server = await serve(OK)
    spec = WorkerSpec(
        worker=0, workers=1, run_id="r", clock_offset_ns=0, headers={}, out="", request_timeout_s=1.0,
        urls=[server.url],
    )  # fmt: skip
    async with HttpTransport(spec, anchored, stamps=ReceiveStamps(anchored)) as transport:
        for index in (7, 8):
            exchange = Exchange(index=index, scheduled_ns=0, dispatch_ns=0)
            await transport.perform(exchange, PlannedRequest(index=index, path="/", body=b"{}"), timeout_s=BOUND_S)
    ids = [peer.header("X-Request-Id") for peer in server.peers]
    assert ids == [str(UUID(str(request_id))) for request_id in ids]
    assert ["000000000007", "000000000008"] == [str(request_id)[-12:] for request_id in ids]
    # Envoy samples by these eight digits.
    assert 2 == len({str(request_id)[:8] for request_id in ids})
    assert {"-01"} == {str(peer.header("traceparent"))[-3:] for peer in server.peers}


@pytest.mark.parametrize("spec", [Tls(ca="/nowhere"), Tls(cert="/nowhere")])
def test_a_certificate_that_is_not_there(spec: Tls):
    """A reason with the option's name, before anything is sent."""
    with pytest.raises(UnusableFile, match="No such file"):
        tls_context(spec)


async def test_a_read_has_the_kernels_stamp(serve: Serve, anchored: AnchoredClock, wire: type[Wire]):
    """A process that is held up reads late, but the stamp is when the bytes came; the lateness is counted."""
    held_ns = 60_000_000

    async def script(peer: Peer) -> None:
        await peer.say(wire.SSE_HEAD)
        await head_read.wait()
        peer.writer.write(wire.answer(1).removeprefix(wire.SSE_HEAD))
        time.sleep(held_ns / 1e9)  # noqa: ASYNC251  # server and client share this loop: it is the client that is held up

    head_read = asyncio.Event()
    server = await serve(script)
    stamps = ReceiveStamps(anchored)
    async with Pool(origin_of(server.url), anchored, stamps=stamps) as pool:
        exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
        performing = asyncio.create_task(pool.perform(exchange, REQUEST, timeout_s=BOUND_S))
        await _turn_until(lambda: exchange.status)
        head_read.set()
        await performing
        now_ns = anchored.now_ns()
    if not stamps.seen:
        pytest.skip("this kernel gives no receive stamps")
    assert now_ns - exchange.reads_ns[-1] >= held_ns
    assert stamps.max_ns >= held_ns
    assert exchange.submit_ns <= exchange.reads_ns[0] <= exchange.reads_ns[-1] == exchange.end_ns


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://localhost:8000/v1", "localhost:8000"),
        ("http://localhost", "localhost"),
        ("https://h:443/", "h"),
        ("https://h:80", "h:80"),
        ("http://[::1]:80", "[::1]"),
    ],
)
def test_the_host_header_of_a_url(url: str, authority: str):
    """The scheme's own port is left out."""
    assert authority == origin_of(url).authority


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", ""])
def test_what_is_no_origin(url: str):
    """Neither scheme nor host may be missing."""
    with pytest.raises(ValueError, match="is not an http"):
        origin_of(url)
