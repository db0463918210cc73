"""The hot path: one request on one connection, its bytes and their time stamps.

A read in the middle of a chunked body costs three appends and a look at its last bytes. All else waits until these may
be the last, or until somebody asks (`Exchange.catch_up`): walking and stamping many reads in one go costs a fraction.
Nothing is decoded here. What goes wrong on the way is data (`Exchange.error`), never an exception, and nothing is tried
twice here. Where bytes come from is left to a wire: sockets.py.

T_submit is the moment the request's last byte left for the kernel. Under TLS it is the moment the last record was
handed to the inner transport, whose own buffer (64 KiB at most) may still hold it.
"""

from __future__ import annotations

import asyncio
from array import array
from functools import lru_cache
from itertools import accumulate, islice
from typing import Protocol

from sidelight.loadgen.http1 import MAX_HEAD_BYTES, BodyEnd, Head, ProtocolError, head_end, parse_head
from sidelight.loadgen.transports.lateness import ReceiveStamps
from sidelight.loadgen.transports.transport import PART_BYTES, Exchange, one_line
from sidelight.rundir.clock import AnchoredClock

# Servers commonly drop idle connections after 5 s (uvicorn's default); younger than that is safe to use.
MAX_IDLE_NS = 4_000_000_000
# Most servers' heads differ by their date alone, once a second.
_parse_head = lru_cache(maxsize=64)(parse_head)
# What a chunked body ends with, and how long that is at most; newlines may be bare. Where trailers mix both kinds of
# newline, or bytes follow a last chunk with bare ones in the same read, the end is only found by the next flush.
_BLANK_LINE = (b"\r\n\r\n", b"\n\n", b"0\n\r\n")
_BLANK_LINE_BYTES = 4
_LAST_CHUNK = b"0\r\n\r\n"
# No more is left to be looked at later: walking as many chunks of one byte takes some milliseconds.
_MOST_PIECES, _LARGE_BYTES, _MOST_LARGE_BYTES = 128, 4096, 65_536


class Wire(Protocol):
    """Bytes to and from a peer. It tells its connection: `received`, `sent`, `ended_by_peer`, `lost`."""

    @property
    def unsent(self) -> bool:
        """Return whether the kernel still has bytes to take."""

    def send(self, data: bytes) -> None:
        """Hand over bytes; `sent` follows, at once or later, when the kernel has taken the last."""

    def look(self) -> None:
        """Read the available data.

        `received`, `ended_by_peer` or `lost` follows where the event loop does not report it.
        """

    def abort(self) -> None:
        """Close at once without further reports; may be called again."""


class Connection:
    """One connection and at most one exchange on it; owns its wire."""

    __slots__ = (
        "_clock", "_done", "_end", "_exchange", "_floor_ns", "_head", "_in_chunks", "_interim_bytes", "_kernel_stamps",
        "_large_bytes", "_pieces", "_raw_head", "_read_ns", "_stamps", "_wire", "answered", "idle_ns",
    )  # fmt: skip

    def __init__(self, clock: AnchoredClock, stamps: ReceiveStamps) -> None:
        self._clock = clock
        self._stamps = stamps
        self._wire: Wire | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._head: Head | None = None
        self._end: BodyEnd | None = None
        self._raw_head = bytearray()
        self._interim_bytes = 0
        self._floor_ns = -1
        self.idle_ns = 0
        self.answered = False  # whether any byte came since the last request was sent
        # Reads that are still to be looked at: their bytes, when they returned, and the kernel's stamps.
        self._pieces: list[bytes] = []
        self._large_bytes = 0
        self._read_ns = array("q")
        self._kernel_stamps = bytearray()
        self._in_chunks = False

    @property
    def usable(self) -> bool:
        """Return whether another request may be sent: open, idle, and not idle for too long."""
        return self._wire is not None and self._exchange is None and self._clock.now_ns() - self.idle_ns <= MAX_IDLE_NS

    def begin(self, exchange: Exchange, request: bytes) -> asyncio.Future[None]:
        """Send `request`; the future is done when the exchange has ended, well or not."""
        if self._wire is None:
            raise RuntimeError("a connection was used before it was made")
        self._exchange = exchange
        exchange.catch_up = self._look
        self._head = self._end = None
        self._raw_head.clear()
        self._interim_bytes = 0
        self.answered = False
        self._floor_ns = -1
        self._done = done = asyncio.get_running_loop().create_future()
        self._wire.send(request)
        return done

    def abort(self) -> None:
        """Close at once; an exchange under way gets no more bytes and keeps what it has."""
        self._catch_up()
        self._exchange = None
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abort()

    # Called by the wire

    def take_wire(self, wire: Wire) -> None:
        """Take over the wire."""
        self._wire = wire
        self.idle_ns = self._clock.now_ns()

    def sent(self, at_ns: int) -> None:
        """Record the time when the kernel had taken all bytes to send."""
        exchange = self._exchange
        if exchange is not None and exchange.submit_ns < 0:
            exchange.submit_ns = self._floor_ns = at_ns

    def received(self, data: bytes, at_ns: int, kernel_stamp: bytes) -> None:
        """Take a read: its time and the kernel's stamp of its bytes. See ReceiveStamps.moved."""
        pieces, size = self._pieces, len(data)
        pieces.append(data)
        self._read_ns.append(at_ns)
        self._kernel_stamps += kernel_stamp
        # Of a shorter piece the blank line may lie in the one before. Not `in`: it takes bytes for a number first, and
        # clearing up the exception costs as much as the search.
        if (
            not self._in_chunks
            or data.endswith(_BLANK_LINE)
            or size < _BLANK_LINE_BYTES
            or data.find(_LAST_CHUNK) >= 0
            or len(pieces) > _MOST_PIECES
            or (size > _LARGE_BYTES and self._is_much(size))
        ):
            self._catch_up()

    def _is_much(self, size: int) -> bool:
        """Count a large read, and return whether the unprocessed bytes exceed their limit.

        More should not be looked at in one go.
        """
        self._large_bytes += size
        return self._large_bytes > _MOST_LARGE_BYTES

    def ended_by_peer(self) -> None:
        """End the exchange under way: the peer will send nothing more."""
        self._catch_up()
        self._closed()

    def lost(self, error: Exception | None) -> None:
        """End the exchange under way: the connection is gone.

        Without an error it was closed, by the peer where that ends an exchange.
        """
        self._catch_up()
        if error is None:
            self._closed()
        elif self._exchange is not None:
            self._finish(self._now_ns(), f"reset: {one_line(error)}{self._progress()}")
        else:
            self.abort()

    # What was read

    def _look(self) -> None:
        """Read the available data and process all reads."""
        if self._wire is not None:
            self._wire.look()
        self._catch_up()

    def _catch_up(self) -> None:
        """Process the reads since the last time. A stamp lies behind the submission and the stamp before."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        self._large_bytes = 0
        stamps_ns = self._stamps.moved(self._kernel_stamps, self._read_ns, floor_ns=self._floor_ns)
        self._read_ns, self._kernel_stamps = array("q"), bytearray()
        exchange = self._exchange
        if exchange is None:
            self.abort()  # unsolicited bytes: no request is in flight
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        before, begin, stop, error = len(exchange.body), 0, -1, ""
        try:
            if self._end is None:
                begin = self._take_head(exchange, data)
            if self._end is not None:
                stop = self._end.feed(data, begin)
        except ProtocolError as violation:
            error, stop = f"protocol: {violation}", max(violation.at, begin)
        ended = stop >= 0
        exchange.body += data[begin : stop if ended else len(data)]
        ends = list(islice(accumulate(map(len, pieces), initial=before - begin), 1, None))
        if ended:
            # Bytes behind the end belong to no reply.
            length = len(exchange.body)
            count = next(read for read, end in enumerate(ends, start=1) if end >= length)
            stamps_ns, ends = stamps_ns[:count], [*ends[: count - 1], length]
        exchange.read_ends.extend(ends)
        exchange.reads_ns.extend(stamps_ns)
        self._floor_ns = stamps_ns[-1]
        if error:
            self._finish(self._floor_ns, error)
        elif excess := exchange.excess:
            self._finish(self._floor_ns, excess)
        elif ended:
            self._complete(self._floor_ns, surplus=stop < len(data))
        elif len(exchange.body) >= PART_BYTES:
            exchange.flush()

    def _take_head(self, exchange: Exchange, data: bytes) -> int:
        """Collect the head; give the position in `data` where the body begins, at its end if that is still to come."""
        self.answered = True
        before = len(self._raw_head)
        self._raw_head += data
        while (stop := head_end(self._raw_head)) >= 0:
            raw = bytes(self._raw_head[:stop])
            head = _parse_head(raw)
            if head.status == 101 or head.status >= 200:
                if head.status == 101:
                    raise ProtocolError("101 Switching Protocols was not asked for")
                exchange.status, exchange.head = head.status, raw
                self._head, self._end = head, BodyEnd(head)
                self._in_chunks = self._end.chunked
                self._raw_head = bytearray()
                return stop - before
            del self._raw_head[:stop]  # an interim 1xx answer
            before -= stop
            self._interim_bytes += stop
            if self._interim_bytes > MAX_HEAD_BYTES:
                raise ProtocolError("interim answers (1xx) of more than 64 KiB")
        if len(self._raw_head) > MAX_HEAD_BYTES:
            raise ProtocolError("a response head longer than 64 KiB")
        return len(data)

    # The exchange's ends

    def _closed(self) -> None:
        if self._exchange is None:
            self.abort()
            return
        is_whole = self._end is not None and self._end.until_close
        self._finish(self._now_ns(), "" if is_whole else f"reset: closed by the peer{self._progress()}")

    def _progress(self) -> str:
        exchange = self._exchange
        if exchange is None or self._head is None:
            return " in the middle of the response head" if self._raw_head else " before any response"
        return f" after {exchange.received_bytes} body bytes"

    def _now_ns(self) -> int:
        return max(self._clock.now_ns(), self._floor_ns)

    def _complete(self, end_ns: int, *, surplus: bool) -> None:
        wire, head = self._wire, self._head
        reusable = not surplus and head is not None and head.keep_alive and wire is not None and not wire.unsent
        exchange, done = self._exchange, self._done
        self._exchange = None
        self._in_chunks = False
        self.idle_ns = end_ns
        if exchange is not None:
            exchange.end_ns = end_ns
        if not reusable:
            self.abort()
        if done is not None and not done.done():
            done.set_result(None)

    def _finish(self, end_ns: int, error: str) -> None:
        """End the exchange and the connection with it."""
        exchange, done = self._exchange, self._done
        if exchange is not None:
            exchange.error, exchange.end_ns = error, end_ns
        self.abort()
        if done is not None and not done.done():
            done.set_result(None)
