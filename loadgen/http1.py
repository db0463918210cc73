"""HTTP/1.1 framing: the end of a reply and, later, its head and body. No more is implemented than these need.

`BodyEnd` runs in the hot path and never looks into content; `parse_head` and `dechunk` serve derivation too.
Source: RFC 9112.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count
from operator import add

import msgspec

MAX_HEAD_BYTES = 65_536
_MAX_LINE_BYTES = 16_384
_LENGTH_DIGITS = 18
_CRLF = b"\r\n"
_NO_CRLF = "a chunk does not end with CRLF where its size says"
# From the first bytes of a chunk to the next chunk, where those bytes hold the whole size line. The hot path meets few
# different ones, and would spend more on reading the line than on all else about a chunk. The CRLF before them belongs
# to the key: so the end of the chunk before is checked at no cost.
_KEY_BYTES, _MOST_STEPS = 7, 4096
_steps: dict[bytes, int] = {}


class ProtocolError(ValueError):
    """A violation of HTTP/1.x by the peer. `at` bytes of BodyEnd's last input were still good."""

    at = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A response head; header names in lower case, repeated ones joined by a comma."""

    version: str
    status: int
    headers: dict[str, str]

    @property
    def keep_alive(self) -> bool:
        """Return whether the peer accepts another request on this connection."""
        tokens = {token.strip().lower() for token in self.headers.get("connection", "").split(",")}
        return "keep-alive" in tokens if self.version == "HTTP/1.0" else "close" not in tokens


def head_end(data: bytes | bytearray) -> int:
    """Return the position behind the blank line that ends a head, or -1; bare newlines count (RFC 9112, 2.2)."""
    # No further than a head may reach: behind it may lie as much again, or many more heads.
    crlf = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    bare = data.find(b"\n\n", 0, crlf if crlf >= 0 else MAX_HEAD_BYTES)
    if bare >= 0:
        return bare + 2
    return crlf + 4 if crlf >= 0 else -1


def parse_head(raw: bytes | bytearray) -> Head:
    """Read a status line and its headers. Raises ProtocolError."""
    first, *lines = bytes(raw).decode("latin-1").replace("\r\n", "\n").rstrip("\n").split("\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if version not in {"HTTP/1.1", "HTTP/1.0"} or not (code.isascii() and code.isdigit() and len(code) == 3):
        raise ProtocolError(f"not an HTTP/1.x status line: {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ProtocolError(f"not a header line: {line[:60]!r}")
        key = name.strip().lower()
        headers[key] = f"{headers[key]}, {value.strip()}" if key in headers else value.strip()
    return Head(version=version, status=int(code), headers=headers)


def is_chunked(head: Head) -> bool:
    """Return whether the body is chunked, which overrides a content length."""
    return head.headers.get("transfer-encoding", "").lower().split(",")[-1].strip() == "chunked"


def _content_length(head: Head) -> int | None:
    text = head.headers.get("content-length")
    if text is None:
        return None
    lengths = {part.strip() for part in text.split(",")}
    value = lengths.pop()
    # int() refuses thousands of digits; no reply has 10**18 bytes.
    if lengths or not (value.isascii() and value.isdigit() and len(value) <= _LENGTH_DIGITS):
        raise ProtocolError(f"content-length {text[:40]!r}")
    return int(value)


class BodyEnd:
    """Finder of the end of one reply's body in its stream of bytes. It keeps at most one unfinished chunk-size line.

    Three ways, fixed by the head: chunk sizes are walked, a length is counted down, or the peer closes.
    """

    __slots__ = ("_begun", "_left", "_line", "_trailer", "chunked", "until_close")

    def __init__(self, head: Head) -> None:
        """Raise ProtocolError when the head contradicts itself."""
        length = _content_length(head)
        self.chunked = is_chunked(head)
        self._trailer = False
        self._line = b""
        self._left = 0
        self._begun = False  # whether a chunk came
        if head.status in {204, 304}:
            self.chunked, length = False, 0
        self.until_close = not self.chunked and length is None
        if not self.chunked and length is not None:
            self._left = length

    def feed(self, data: bytes, at: int) -> int:
        """Read `data` from position `at`; return the position behind the body's last byte.

        Returns -1 for more to come.

        Raises ProtocolError on a chunk size that is none, and on a chunk that does not end with CRLF.
        """
        size = len(data)
        if not self.chunked:
            return self._count(size, at)
        begin = at
        # Where the CRLF before the next size line begins: before `data`, if that came with what was fed last.
        crlf, last = at + self._left - 2, size - 2
        # Strictly less: crlf == last leaves nothing to read a line from, which find() tells as well.
        while crlf <= last:
            # A key that would begin before `data` is too short to be known.
            if (step := _steps.get(data[crlf : crlf + _KEY_BYTES])) and not self._line and not self._trailer:
                crlf += step
                continue
            at = crlf + 2
            if (self._begun or at > begin) and not self._trailer:
                _require_crlf(data, at)
            stop = data.find(b"\n", at)
            if stop < 0:
                self._left, self._begun = 0, self._begun or at > begin
                self._line += data[at:]
                _require_short(self._line)
                return -1
            line = data[at:stop]
            if self._line:
                line, self._line = self._line + line, b""
            if self._trailer:
                if not line.rstrip(b"\r"):
                    return stop + 1
                crlf = stop - 1
                continue
            chunk = self._size(line, at)
            key = data[crlf : crlf + _KEY_BYTES]
            step = stop + 1 - at + (chunk + 2 if chunk else 0)
            whole = len(line) == stop - at < _KEY_BYTES - 2
            if chunk and whole and len(key) == _KEY_BYTES and key.startswith(_CRLF) and len(_steps) < _MOST_STEPS:
                _steps[key] = step
            crlf += step
        if crlf == size - 1:
            _require_crlf(data, size + 1)
        self._left, self._begun = crlf + 2 - size, True
        return -1

    def _size(self, line: bytes, at: int) -> int:
        """Return the chunk size in a line at a position. Behind the last chunk's come trailers."""
        try:
            size = chunk_size(line)
        except ProtocolError as error:
            error.at = at
            raise
        self._trailer = not size
        return size

    def _count(self, size: int, at: int) -> int:
        if self.until_close:
            return -1
        have = size - at
        if have < self._left:
            self._left -= have
            return -1
        return at + self._left


def _require_short(line: bytes) -> None:
    if len(line) > _MAX_LINE_BYTES:
        raise ProtocolError("a chunk-size line without end")


def _require_crlf(data: bytes, at: int) -> None:
    """Require a chunk's CRLF before position `at`, as far as it is in `data`. Raises ProtocolError."""
    begin = max(0, at - 2)
    end = data[begin:at]
    if end != _CRLF[2 - at + begin :][: len(end)]:
        error = ProtocolError(_NO_CRLF)
        error.at = begin
        raise error


@lru_cache(maxsize=1024)  # the lines of a stream are few, and each comes thousands of times
def chunk_size(line: bytes) -> int:
    """Return the size that a chunk-size line gives, extensions ignored. Raises ProtocolError."""
    _require_short(line)
    digits = line.partition(b";")[0].strip()
    # int() alone would take a sign, an underscore or 0x.
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise ProtocolError(f"not a chunk size: {line[:40]!r}")
    return int(digits, 16)


class Dechunked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A body, or a piece of it, without chunk framing, with its chunks' wire positions.

    data_starts[k] in `data` is wire_starts[k] on the wire; what was begun in the piece before begins at 0.
    """

    data: bytes
    data_starts: list[int]
    wire_starts: list[int]


class Dechunker:
    """Decoder that removes the chunk framing from a body in pieces. It keeps only an unfinished line."""

    __slots__ = ("_is_first", "_is_over", "_left", "_line")

    def __init__(self) -> None:
        self._is_first, self._is_over = True, False
        self._left = 0  # of the chunk, its CRLF included
        self._line = b""

    def feed(self, wire: bytes) -> Dechunked:
        """Decode the next piece of the body.

        A piece may be torn anywhere: its data so far is returned. Raises ProtocolError.
        """
        if self._is_first:
            self._is_first = False
            if (whole := _whole(wire)) is not None:
                self._is_over = True
                return whole
        pieces: list[bytes] = []
        wire_starts: list[int] = []
        at, size = 0, len(wire)
        while at < size and not self._is_over:
            if self._left > 2:
                piece = wire[at : at + self._left - 2]
                wire_starts.append(at)
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
            elif self._left:
                crlf = wire[at : at + self._left]
                if crlf != _CRLF[2 - self._left :][: len(crlf)]:
                    raise ProtocolError(_NO_CRLF)
                at += len(crlf)
                self._left -= len(crlf)
            else:
                at = self._take_line(wire, at)
        starts = list(accumulate(map(len, pieces), initial=0))
        return Dechunked(data=b"".join(pieces), data_starts=starts[:-1], wire_starts=wire_starts)

    def _take_line(self, wire: bytes, at: int) -> int:
        stop = wire.find(b"\n", at)
        if stop < 0:
            self._line += wire[at:]
            _require_short(self._line)
            return len(wire)
        size = chunk_size(self._line + wire[at:stop])
        self._line, self._left, self._is_over = b"", size + 2 if size else 0, not size
        return stop + 1


def dechunk(wire: bytes) -> Dechunked:
    """Remove the chunk framing from a body. A body torn anywhere gives its data so far. Raises ProtocolError."""
    return Dechunker().feed(wire)


def _whole(wire: bytes) -> Dechunked | None:
    """Remove the chunk framing at the line ends; None if that does not work.

    It does not work for a body that is torn, has trailers, or has CRLF inside.

    It is exact where each size is the length of what stands between its line and the next, and that is several times
    as fast as walking from size to size.
    """
    lines = wire.split(b"\r\n")
    if len(lines) < 5 or lines[-3:] != [b"0", b"", b""]:
        return None
    pieces = lines[1:-3:2]
    lengths = list(map(len, pieces))
    try:
        if 0 in lengths or lengths != list(map(chunk_size, lines[:-3:2])):
            return None
    except ProtocolError:
        return None
    stops = list(accumulate(map(len, lines)))
    return Dechunked(
        data=b"".join(pieces),
        data_starts=list(accumulate(lengths[:-1], initial=0)),
        wire_starts=list(map(add, stops[:-3:2], count(2, 4))),
    )
