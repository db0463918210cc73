"""What a target is asked before any load, against servers that write bytes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from waiting import BOUND_S

from sidecar.errors import TargetUnreachable
from sidecar.run import target
from sidecar.run.target import Contact, Served, preflight

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[Served]:
    """Run a server that answers its first request with these bytes, and keeps the connection."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Served(url=f"http://127.0.0.1:{port}", model="m", max_model_len=None)
        over.set()


@pytest.mark.parametrize("newline", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
async def test_bytes_behind_the_end_of_a_reply_are_nobodys(newline: bytes):
    """The reply ends where its framing says, in whatever newlines; the server did not close, and need not."""
    framed = b"%x" % len(EVENTS) + newline + EVENTS + newline + b"0" + newline + newline
    async with answering(HEAD + framed + b"and more") as served, asyncio.timeout(BOUND_S):
        await preflight(served, contact=Contact())


async def test_a_reply_that_is_done_and_does_not_end(monkeypatch: pytest.MonkeyPatch):
    """Each request would last until it is given up, so no load is sent."""
    monkeypatch.setattr(target, "PREFLIGHT_TIMEOUT_S", 0.3)
    async with answering(HEAD + b"%x\r\n%b\r\n" % (len(EVENTS), EVENTS)) as served:
        with pytest.raises(
            TargetUnreachable, match=r"announced as complete, but its response did not end within 0\.3 s"
        ):
            await preflight(served, contact=Contact())
