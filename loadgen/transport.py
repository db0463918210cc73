"""The hot path: one request on one connection, its bytes and their time stamps.

A read costs two appends and a walk over chunk sizes; nothing is decoded here. What goes wrong on the way is data
(`Exchange.error`), never an exception, and nothing is tried twice. Where bytes come from is a wire's: wires.py.

T_submit is the moment the request's last byte left for the kernel. Under TLS it is the moment the last record was
handed to the inner transport, whose own buffer (64 KiB at most) may still hold it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from loadgen.clock import Clock
from loadgen.http1 import MAX_HEAD_BYTES, BodyEnd, Head, ProtocolError, head_end, parse_head

# Servers commonly drop idle connections after 5 s (uvicorn's default); younger than that is safe to use.
MAX_IDLE_NS = 4_000_000_000
_MESSAGE_CHARS = 200
# Most servers' heads differ by their date alone, once a second.
_parse_head = lru_cache(maxsize=64)(parse_head)


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request and what came back so far; filled in place, since the hot path can afford no copy.

    Stamps are -1 until known. `reads_ns`, `read_ends` and `body` hold what has not been logged yet; `head` likewise.
    A session's next turn needs them: where `kept` is there, the log leaves body and head in `kept` and `kept_head`.
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
    kept: bytearray | None = None
    kept_head: bytes = b""


class Wire(Protocol):
    """Bytes to and from a peer. It tells its connection: `received`, `sent`, `ended_by_peer`, `lost`."""

    @property
    def unsent(self) -> bool:
        """Whether the kernel has not taken everything yet."""

    def send(self, data: bytes) -> None:
        """Hand over bytes; `sent` follows, at once or later, when the kernel has taken the last."""

    def abort(self) -> None:
        """Close at once and tell nothing more; may be called again."""


class Connection:
    """One connection and at most one exchange on it; owns its wire."""

    __slots__ = ("_clock", "_done", "_end", "_exchange", "_floor_ns", "_head", "_raw_head", "_wire", "idle_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wire: Wire | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._head: Head | None = None
        self._end: BodyEnd | None = None
        self._raw_head = bytearray()
        self._floor_ns = -1
        self.idle_ns = 0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent: open, idle, and not idle for too long."""
        return self._wire is not None and self._exchange is None and self._clock.now_ns() - self.idle_ns <= MAX_IDLE_NS

    def begin(self, exchange: Exchange, request: bytes) -> asyncio.Future[None]:
        """Send `request`; the future is done when the exchange has ended, well or not."""
        if self._wire is None:
            raise RuntimeError("a connection was used before it was made")
        self._exchange = exchange
        self._head = self._end = None
        self._raw_head.clear()
        self._floor_ns = -1
        self._done = done = asyncio.get_running_loop().create_future()
        self._wire.send(request)
        return done

    def abort(self) -> None:
        """Close at once; an exchange under way gets no more bytes and keeps what it has."""
        self._exchange = None
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abort()

    # What the wire tells

    def made(self, wire: Wire) -> None:
        """There is a wire now."""
        self._wire = wire
        self.idle_ns = self._clock.now_ns()

    def sent(self) -> None:
        """The kernel has taken all that there was to send."""
        exchange = self._exchange
        if exchange is not None and exchange.submit_ns < 0:
            exchange.submit_ns = self._floor_ns = self._clock.now_ns()

    def received(self, data: bytes, at_ns: int) -> None:
        """Bytes came in at the given moment; it is moved behind the submission and the read before, if need be."""
        exchange = self._exchange
        if exchange is None:
            self.abort()  # bytes that nobody asked for
            return
        if at_ns < self._floor_ns:
            at_ns = self._floor_ns
        else:
            self._floor_ns = at_ns
        exchange.reads_ns.append(at_ns)
        body, end, begin = exchange.body, self._end, 0
        try:
            if end is None:
                begin, end = self._take_head(exchange, data)
            stop = end.feed(data, begin) if end is not None else 0
        except ProtocolError as error:
            exchange.read_ends.append(len(body))
            self._finish(at_ns, f"protocol: {error}")
            return
        if stop < 0 and begin == 0:
            body += data
        elif end is not None:
            body += data[begin : stop if stop >= 0 else len(data)]
        exchange.read_ends.append(len(body))
        if stop >= 0 and end is not None:
            self._complete(at_ns, surplus=stop < len(data))

    def ended_by_peer(self) -> None:
        """The peer will send nothing more."""
        self._closed("closed by the peer")

    def lost(self, error: Exception | None) -> None:
        """The wire is no more; without an error somebody closed it."""
        if error is None:
            self._closed("closed")
        elif self._exchange is not None:
            self._finish(self._now_ns(), f"reset: {one_line(error)}{self._progress()}")
        else:
            self.abort()

    # The exchange's ends

    def _take_head(self, exchange: Exchange, data: bytes) -> tuple[int, BodyEnd | None]:
        """Collect the head; give the position in `data` where the body begins, and its end finder once it is known."""
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
                self._raw_head = bytearray()
                return stop - before, self._end
            del self._raw_head[:stop]  # an interim 1xx answer
            before -= stop
        if len(self._raw_head) > MAX_HEAD_BYTES:
            raise ProtocolError("a response head longer than 64 KiB")
        return 0, None

    def _closed(self, what: str) -> None:
        if self._exchange is None:
            self.abort()
            return
        error = "" if self._end is not None and self._end.until_close else f"reset: {what}{self._progress()}"
        self._finish(self._now_ns(), error)

    def _progress(self) -> str:
        exchange = self._exchange
        if exchange is None or self._head is None:
            return " in the middle of the response head" if self._raw_head else " before any response"
        return f" after {exchange.body_bytes + len(exchange.body)} body bytes"

    def _now_ns(self) -> int:
        return max(self._clock.now_ns(), self._floor_ns)

    def _complete(self, end_ns: int, *, surplus: bool) -> None:
        wire, head = self._wire, self._head
        reusable = not surplus and head is not None and head.keep_alive and wire is not None and not wire.unsent
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
