"""A call of gRPC in HTTP/2 frames made by hand, for what no library of clients sends."""

from __future__ import annotations

import asyncio
import os
import re
import select
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from waiting import BOUND_S

from sidelight.scraper.spans.spec import SIGNALS

DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_STREAM = 1
_MOST_BYTES = 16_384  # of a frame, unless a server allows more
_STATUS = re.compile(rb"grpc-status.(\d+)", re.DOTALL)  # as servers write it: a literal, with its length before it


@dataclass(slots=True, frozen=True)
class Call:
    """One call on a connection of its own. What is sent of a message must fit into the first window, 65,535 bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def begin(self, size: int, sent: bytes, *, packed: bool = False, flags: int = 0) -> None:
        """Send the length of a message, and what is to be sent of it."""
        message = bytes([packed]) + size.to_bytes(4, "big") + sent
        for at in range(0, len(message), _MOST_BYTES):
            is_last = at + _MOST_BYTES >= len(message)
            self.send(DATA, message[at : at + _MOST_BYTES], flags if is_last else 0)

    def send(self, kind: int, payload: bytes = b"", flags: int = 0) -> None:
        """Send a frame."""
        self.writer.write(_frame(kind, flags, _STREAM, payload))

    def wait_until_read(self) -> None:
        """Wait until the server has read all that was sent, and let nothing else run until then: it answers a ping."""
        self.writer.write(_frame(PING, 0, 0, bytes(8)))
        assert not self.writer.transport.get_write_buffer_size(), "not all of it fits into the socket"
        received, answer = b"", _frame(PING, ACK, 0, bytes(8))
        while answer not in received:
            assert select.select([self.writer.get_extra_info("socket")], [], [], BOUND_S)[0], "no answer to a ping"
            received += os.read(self.writer.get_extra_info("socket").fileno(), 65_536)

    async def status(self) -> int:
        """Read on until the call has ended; return its status. Raises IncompleteReadError where there is none."""
        async with asyncio.timeout(BOUND_S):
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == HEADERS and (stated := _STATUS.search(payload)):
                    return int(stated[1])

    def leave(self) -> None:
        """Close the connection."""
        self.writer.close()


@asynccontextmanager
async def calling(
    port: int, *, signal: str = "traces", headers: Sequence[tuple[str, str]] = (), others: int = 0
) -> AsyncIterator[Call]:
    """Open a call without a message yet, and others at once on its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", SIGNALS[signal]), (":authority", "x")]
        fields += [("content-type", "application/grpc"), ("te", "trailers"), *headers]
        call = Call(reader, writer)
        writer.write(_PREFACE + _frame(SETTINGS, 0, 0, b""))
        head = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)
        for number in range(1 + others):
            writer.write(_frame(HEADERS, END_HEADERS, _STREAM + 2 * number, head))
        yield call
    finally:
        writer.close()


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
