"""The hot path: connections, bytes, time stamps.

A read costs one stamp, two appends and a walk over chunk sizes; nothing is decoded here. What goes wrong on the way is
data (`Exchange.error`), never an exception, and nothing is tried twice.

T_submit is the moment the request's last byte left the transport for the kernel. Under TLS it is the moment the last
record was handed to the inner transport, whose own buffer (64 KiB at most) may still hold it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from array import array
from dataclasses import dataclass, field

from loadgen.clock import Clock
from loadgen.http1 import MAX_HEAD_BYTES, BodyEnd, Head, ProtocolError, head_end, parse_head

# Servers commonly drop idle connections after 5 s (uvicorn's default); younger than that is safe to use.
MAX_IDLE_NS = 4_000_000_000
_MESSAGE_CHARS = 200


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request and what came back so far; filled in place, since the hot path can afford no copy.

    Stamps are -1 until known. `reads_ns`, `read_ends` and `body` hold what has not been logged yet; `head` likewise.
    """

    index: int
    scheduled_ns: int
    dispatch_ns: int
    connected_ns: int = -1
    submit_ns: int = -1
    end_ns: int = -1
    reused: bool = False
    status: int = 0
    head: bytes = b""
    reads_ns: array[int] = field(default_factory=lambda: array("q"))
    read_ends: array[int] = field(default_factory=lambda: array("q"))
    body: bytearray = field(default_factory=bytearray)
    body_bytes: int = 0
    error: str = ""


class Connection(asyncio.Protocol):
    """One connection and at most one exchange on it; owns the socket."""

    __slots__ = ("_clock", "_done", "_end", "_exchange", "_head", "_offset_ns", "_raw_head", "_transport", "idle_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = clock.offset_ns
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._head: Head | None = None
        self._end: BodyEnd | None = None
        self._raw_head = bytearray()
        self.idle_ns = 0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent: open, idle, and not idle for too long."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._exchange is None
            and self._clock.now_ns() - self.idle_ns <= MAX_IDLE_NS
        )

    def begin(self, exchange: Exchange, request: bytes) -> asyncio.Future[None]:
        """Send `request`; the future is done when the exchange has ended, well or not."""
        transport = self._transport
        if transport is None:
            raise RuntimeError("a connection was used before it was made")
        self._exchange = exchange
        self._head = self._end = None
        self._raw_head = bytearray()
        self._done = asyncio.get_running_loop().create_future()
        transport.write(request)
        if transport.get_write_buffer_size() == 0:
            exchange.submit_ns = self._clock.now_ns()
        return self._done

    def abort(self) -> None:
        """Close at once; an exchange under way gets no more bytes and keeps what it has."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        # Every unsent byte pauses writing, so resume_writing tells when the last one has left.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport

    def resume_writing(self) -> None:
        if self._exchange is not None and self._exchange.submit_ns < 0:
            self._exchange.submit_ns = self._clock.now_ns()

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns() + self._offset_ns
        exchange = self._exchange
        if exchange is None:
            self.abort()  # bytes that nobody asked for
            return
        exchange.reads_ns.append(now_ns)
        try:
            end, begin = self._end, 0
            if end is None:
                begin, end = self._take_head(exchange, data)
            if end is None:
                exchange.read_ends.append(len(exchange.body))
                return
            stop = end.feed(data, begin)
        except ProtocolError as error:
            exchange.read_ends.append(len(exchange.body))
            self._finish(now_ns, f"protocol: {error}")
            return
        if begin == 0 and stop < 0:
            exchange.body += data
        else:
            exchange.body += data[begin : stop if stop >= 0 else len(data)]
        exchange.read_ends.append(len(exchange.body))
        if stop >= 0:
            self._complete(now_ns, surplus=stop < len(data))

    def eof_received(self) -> None:
        # Returning None lets the transport close itself; connection_lost follows.
        self._ended_by_peer("closed by the peer")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._ended_by_peer("closed")
        elif self._exchange is not None:
            self._finish(self._clock.now_ns(), f"reset: {one_line(exc)}{self._progress()}")
        self._transport = None

    # The exchange's ends

    def _take_head(self, exchange: Exchange, data: bytes) -> tuple[int, BodyEnd | None]:
        """Collect the head; give the position in `data` where the body begins, and its end finder once it is known."""
        before = len(self._raw_head)
        self._raw_head += data
        while (stop := head_end(self._raw_head)) >= 0:
            raw = bytes(self._raw_head[:stop])
            head = parse_head(raw)
            if head.status == 101 or head.status >= 200:
                if head.status == 101:
                    raise ProtocolError("101 Switching Protocols was not asked for")
                exchange.status, exchange.head = head.status, raw
                self._head, self._end = head, BodyEnd(head)
                self._raw_head = bytearray()
                return stop - before, self._end
            del self._raw_head[:stop]  # an interim 1xx answer
            before -= stop
        if len(self._raw_head) > MAX_HEAD_BYTES:
            raise ProtocolError("a response head longer than 64 KiB")
        return 0, None

    def _ended_by_peer(self, what: str) -> None:
        if self._exchange is None:
            return
        error = "" if self._end is not None and self._end.until_close else f"reset: {what}{self._progress()}"
        self._finish(self._clock.now_ns(), error)

    def _progress(self) -> str:
        exchange = self._exchange
        if exchange is None or self._head is None:
            return " in the middle of the response head" if self._raw_head else " before any response"
        return f" after {exchange.body_bytes + len(exchange.body)} body bytes"

    def _complete(self, end_ns: int, *, surplus: bool) -> None:
        transport, head = self._transport, self._head
        reusable = (
            not surplus
            and head is not None
            and head.keep_alive
            and transport is not None
            and transport.get_write_buffer_size() == 0
        )
        exchange, done = self._exchange, self._done
        self._exchange = None
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


def one_line(error: BaseException) -> str:
    """An exception's message for a log: one line, at most 200 characters, TLS failures marked as such."""
    if isinstance(error, ssl.SSLError):
        text = f"tls: {getattr(error, 'verify_message', '') or error.reason or error}"
    elif isinstance(error, socket.gaierror):
        text = f"name not resolved: {error.strerror}"
    elif isinstance(error, OSError) and error.errno:
        text = os.strerror(error.errno)  # asyncio puts its own words and the address into the exception
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())[:_MESSAGE_CHARS]
