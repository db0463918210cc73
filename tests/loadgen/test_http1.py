from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen import http1

CHUNKED = http1.parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")


pieces = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


def _framed(body: list[bytes]) -> bytes:
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in body) + b"0\r\n\r\n"


@given(pieces, st.integers(0, 400))
def test_dechunk_gives_what_had_come(body: list[bytes], cut: int):
    """A whole body gives its content; a torn one a prefix of it."""
    wire, plain = _framed(body), b"".join(body)
    assert plain == http1.dechunk(wire).data
    torn = http1.dechunk(wire[:cut])
    assert plain.startswith(torn.data)
    for data_start, wire_start in zip(torn.data_starts, torn.wire_starts, strict=True):
        if data_start < len(torn.data):
            assert wire[wire_start] == plain[data_start]


@pytest.mark.parametrize(
    ("head", "fed", "end"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"abcd", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", 0),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 0),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", 0),
        (b"HTTP/1.0 200 OK\r\n\r\n", b"abc", -1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3, 3\r\n\r\n", b"abc", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\n", 5),
    ],
)
def test_how_long_a_body_is(head: bytes, fed: bytes, end: int):
    """Length, no body, to the close, and chunks above length."""
    assert end == http1.BodyEnd(http1.parse_head(head)).feed(fed, 0)


@pytest.mark.parametrize("line", [b"", b"-1", b"+1", b"0x1", b"1_0", b"g", b";a=1"])
def test_a_chunk_size_is_hexadecimal_digits(line: bytes):
    """What int() would forgive is not a chunk size."""
    with pytest.raises(http1.ProtocolError, match="not a chunk size"):
        http1.chunk_size(line)


@pytest.mark.parametrize(
    "head",
    [b"<html>\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n"],
)
def test_an_invalid_head_is_refused(head: bytes):
    """Whatever does not begin as HTTP/1.x, or has a line that cannot be a header."""
    with pytest.raises(http1.ProtocolError):
        http1.parse_head(head)


@pytest.mark.parametrize("length", [b"3\r\nContent-Length: 4", b"-3", b"9" * 5000], ids=["two", "negative", "huge"])
def test_impossible_lengths_are_refused(length: bytes):
    """Two that differ, less than nothing, more than there are bytes: the end is unknown."""
    head = http1.parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % length)
    with pytest.raises(http1.ProtocolError, match="content-length"):
        http1.BodyEnd(head)


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_who_keeps_a_connection_alive(head: bytes, keep: bool):
    """1.1 unless it says close, 1.0 only if it says so."""
    assert keep == http1.parse_head(head).keep_alive


def test_a_head_may_end_with_bare_newlines():
    """The first blank line ends it, whichever kind."""
    assert http1.head_end(b"HTTP/1.1 200 OK\nA: b\n\nbody\r\n\r\n") == 22
    assert http1.head_end(b"HTTP/1.1 200 OK\r\n") == -1


cuts = st.lists(st.integers(0, 400), max_size=8)


def _torn(wire: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in at)})
    return [wire[begin:end] for begin, end in itertools.pairwise(edges)]


@given(pieces, cuts)
def test_a_body_in_pieces_is_dechunked_as_the_whole(body: list[bytes], at: list[int]):
    """However it is torn; each piece says where its own bytes lay."""
    wire = _framed(body)
    dechunker = http1.Dechunker()
    taken = [(piece, dechunker.feed(piece)) for piece in _torn(wire, at)]
    assert b"".join(body) == b"".join(plain.data for _, plain in taken)
    for piece, plain in taken:
        for data_start, wire_start in zip(plain.data_starts, plain.wire_starts, strict=True):
            assert piece[wire_start] == plain.data[data_start]


@given(cuts)
def test_a_chunk_size_line_has_a_bound(at: list[int]):
    """Whether it comes in pieces or as a whole."""
    line = b"5" + b";a=b" * 5_000 + b"\r\nhello\r\n"
    body_end, dechunker = http1.BodyEnd(CHUNKED), http1.Dechunker()
    for feed in (lambda piece: body_end.feed(piece, 0), dechunker.feed):
        with pytest.raises(http1.ProtocolError, match="a chunk-size line without end"):
            list(map(feed, _torn(line, at)))


@given(pieces.filter(bool), cuts, st.sampled_from([b"XX", b"\n\n", b"\rX", b"X\n"]))
def test_a_chunk_ends_with_crlf(body: list[bytes], at: list[int], end: bytes):
    """Bytes in its place are refused, wherever the body is torn, by who looks for its end and by who reads it."""
    good, last = _framed(body[:-1])[: -len(b"0\r\n\r\n")], body[-1]
    broken = _torn(good + b"%x\r\n%b%b" % (len(last), last, end) + b"0\r\n\r\n", at)
    body_end, dechunker = http1.BodyEnd(CHUNKED), http1.Dechunker()
    for feed in (lambda piece: body_end.feed(piece, 0), dechunker.feed):
        with pytest.raises(http1.ProtocolError, match="does not end with CRLF"):
            list(map(feed, broken))
