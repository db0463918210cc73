from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.transports.connection import Connection
from sidelight.loadgen.transports.lateness import NO_STAMP, ReceiveStamps
from sidelight.loadgen.transports.transport import PART_BYTES, Exchange
from sidelight.rundir.clock import AnchoredClock

REQUEST = b"POST / HTTP/1.1\r\n\r\n"


class Silent:
    """A wire whose bytes come from the test."""

    unsent = False
    aborted = False

    def send(self, data: bytes) -> None:
        pass

    def look(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _read(reply: bytes, cuts: list[int], asked: set[int]) -> tuple[Exchange, Silent, int]:
    """What an exchange holds after reads that end at the cuts, asked for after some of them; and how many it took."""

    async def feed() -> tuple[Exchange, Silent, int]:
        clock = AnchoredClock(offset_ns=0)
        connection, wire = Connection(clock, ReceiveStamps(clock)), Silent()
        connection.take_wire(wire)
        exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
        done = connection.begin(exchange, REQUEST)
        edges = sorted({0, len(reply), *(cut % len(reply) for cut in cuts)})
        for read, (begin, end) in enumerate(itertools.pairwise(edges), start=1):
            connection.received(reply[begin:end], read, NO_STAMP)
            if read in asked or end == len(reply):
                exchange.catch_up()
            if done.done():
                return exchange, wire, read
        return exchange, wire, -1

    return asyncio.run(feed())


chunks = st.lists(
    st.sampled_from([b"data: x\n\n", b"\r\n\r\n", b"0\r\n\r\n", b"\n"]) | st.binary(min_size=1), max_size=6
)
asked = st.sets(st.integers(1, 30))


@given(chunks, st.lists(st.integers(0, 500), max_size=20), asked, st.sampled_from([b"", b"0", b"\r\n\r\n"]))
def test_a_chunked_body_ends_with_the_read_that_ends_it(
    body: list[bytes], cuts: list[int], asked: set[int], surplus: bytes
):
    """However the reads fell, whatever the chunks look like, and whenever somebody asked for what had come."""
    framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in body) + b"0\r\n\r\n"
    exchange, wire, reads = _read(CHUNKED + framed + surplus, cuts, asked)
    assert ("", framed) == (exchange.error, bytes(exchange.body))
    assert len(framed) == exchange.read_ends[-1]
    assert list(range(1, len(exchange.reads_ns) + 1)) == list(exchange.reads_ns)
    assert exchange.end_ns == exchange.reads_ns[-1] == len(exchange.read_ends)
    ends = sorted({*(cut % len(CHUNKED + framed + surplus) for cut in cuts), len(CHUNKED + framed + surplus)} - {0})
    assert exchange.end_ns == next(n for n, end in enumerate(ends, start=1) if end >= len(CHUNKED + framed))
    # Bytes that follow are seen with the body's end, or when they come: to an idle connection then.
    assert wire.aborted or reads <= exchange.end_ns


@given(chunks, st.lists(st.integers(0, 500), max_size=20), asked)
def test_what_came_before_a_broken_chunk_is_kept(body: list[bytes], cuts: list[int], asked: set[int]):
    """The error may be found later than it came, but nothing good is lost."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body)
    exchange, wire, _ = _read(CHUNKED + framed + b"zz\r\nmore", cuts, asked)
    assert exchange.error.startswith("protocol: not a chunk size")
    assert bytes(exchange.body).rstrip(b"z\r").startswith(framed.rstrip(b"z\r"))
    assert len(exchange.body) <= len(framed) + len(b"zz\r")
    assert len(exchange.body) == exchange.read_ends[-1]
    assert wire.aborted


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\n\n", b"0\r\n\n", b"0\n\r\n", b"0\r\nX-A: 1\r\n\r\n"])
@pytest.mark.parametrize("cut", range(5))
def test_the_end_of_a_chunked_body_is_seen_at_once(end: bytes, cut: int):
    """With bare newlines and trailers too, and wherever its last bytes are torn, before anything asks for it."""
    framed = b"1\r\nx\r\n" + end

    async def feed() -> bool:
        clock = AnchoredClock(offset_ns=0)
        connection = Connection(clock, ReceiveStamps(clock))
        connection.take_wire(Silent())
        done = connection.begin(Exchange(index=0, scheduled_ns=0, dispatch_ns=0), REQUEST)
        for piece in (CHUNKED, framed[: len(framed) - cut], framed[len(framed) - cut :]):
            if piece:
                connection.received(piece, 1, NO_STAMP)
        return done.done()

    assert asyncio.run(feed())


@given(chunks.filter(bool), st.lists(st.integers(0, 500), max_size=20), asked)
def test_what_came_before_a_chunk_without_its_end_is_kept(body: list[bytes], cuts: list[int], asked: set[int]):
    """Up to the place where its CRLF should be."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body)
    exchange, wire, _ = _read(CHUNKED + framed[:-2] + b"XX0\r\n\r\n", cuts, asked)
    assert exchange.error.startswith("protocol: a chunk does not end with CRLF")
    assert framed[:-2] == bytes(exchange.body)
    assert wire.aborted


def test_much_that_has_come_is_looked_at_without_being_asked_for():
    """So that walking what a server floods us with never takes long at once; the body goes to the log in parts."""
    clock = AnchoredClock(offset_ns=0)
    connection, parts = Connection(clock, ReceiveStamps(clock)), []
    exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)

    def flush() -> None:
        parts.append(len(exchange.body))
        exchange.body, exchange.body_bytes = bytearray(), exchange.body_bytes + len(exchange.body)

    async def feed() -> None:
        connection.take_wire(Silent())
        connection.begin(exchange, REQUEST)
        exchange.flush = flush
        connection.received(CHUNKED, 1, NO_STAMP)
        for read in range(100):
            connection.received(b"1\r\nx\r\n" * 5000, 2 + read, NO_STAMP)

    asyncio.run(feed())
    assert sum(parts) + len(exchange.body) > 100 * 30_000 - 2 * 65_536
    assert all(PART_BYTES <= size < PART_BYTES + 2 * 65_536 for size in parts)


def test_a_reply_without_end_is_ended():
    """At the first look behind the limit, with an error of its own."""
    clock = AnchoredClock(offset_ns=0)
    connection, wire = Connection(clock, ReceiveStamps(clock)), Silent()
    exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0, most_bytes=100_000)

    async def feed() -> int:
        connection.take_wire(wire)
        done = connection.begin(exchange, REQUEST)
        for read in itertools.count(1):
            connection.received(CHUNKED if read == 1 else b"1000\r\n%b\r\n" % bytes(4096), read, NO_STAMP)
            if done.done():
                return read
        raise AssertionError

    assert asyncio.run(feed()) < 50
    assert exchange.error == "too_large: more than 100000 body bytes"
    assert wire.aborted
    assert exchange.end_ns == exchange.reads_ns[-1]
