"""A peer that sends messages faster than we read them: other streams get their turn of the event loop."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import re
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop
from faults.servers import AGAIN, Asked, serving
from waiting import BOUND_S, Turns

from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec
from sidelight.loadgen.transports.websocket import WebSocketTransport
from sidelight.rundir.access import Tls
from sidelight.rundir.clock import AnchoredClock

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY = re.compile(rb"(?i)sec-websocket-key: *([^\r]+)")
_STEP_NS = 100_000  # by which the clock goes on each time it is read
MESSAGES = 20_000
MOST_IN_A_TURN = 20
DELTA, PING = b"\x81\x02{}", b"\x89\x00"
DONE = b'\x81\x0f{"type":"done"}'


def _spec(url: str, certificate: Path) -> WorkerSpec:
    return WorkerSpec(
        worker=0, workers=1, run_id="run", clock_offset_ns=0, headers={}, out="", request_timeout_s=BOUND_S,
        urls=[url], transport="websocket", protocol="websocket", tls=Tls(ca=str(certificate)),
    )  # fmt: skip


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("frame", [DELTA, PING + DELTA], ids=["messages", "pings"])
def test_a_flood_of_messages_leaves_others_their_turn(certificate: tuple[Path, Path], frame: bytes, is_tls: bool):
    """By the clock of the worker: it goes on by a fixed time with each message, so that no machine is too slow."""
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(cert), str(key))
    readings = itertools.count(_STEP_NS, _STEP_NS)
    clock = AnchoredClock(offset_ns=0, monotonic_ns=lambda: next(readings))
    exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
    turns = Turns(exchange)

    def answer(asked: Asked) -> Sequence[bytes]:
        stated = _KEY.search(asked.head)
        assert stated is not None
        accepted = base64.b64encode(hashlib.sha1(stated[1] + _GUID).digest())  # noqa: S324  as RFC 6455 has it
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        return (head + b"Sec-WebSocket-Accept: %b\r\n\r\n" % accepted, frame * MESSAGES + DONE, AGAIN, PING)

    async def load(url: str) -> None:
        asyncio.get_running_loop().call_soon(turns.watch)
        async with WebSocketTransport(_spec(url, cert), clock) as transport:
            planned = PlannedRequest(index=0, path="/v1/stream", body=b"{}")
            await transport.perform(exchange, planned, timeout_s=BOUND_S)

    with (
        serving(answer, tls=context if is_tls else None) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(load(url))
    assert ("", 200, MESSAGES + 1) == (exchange.error, exchange.status, len(exchange.reads_ns))
    assert turns.most <= 2 * MOST_IN_A_TURN
