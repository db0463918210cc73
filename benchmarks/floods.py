"""Flood a stream of the load generator with pieces of one byte, and print how long its event loop was held in a turn.

    python benchmarks/floods.py

A server sends a reply in a million pieces, over a WebSocket and as chunks of HTTP, plain and over TLS. What one turn of
the loop takes of the CPU is ours: no other stream is read meanwhile. How long it takes by the clock is the machine's,
too; a loop that works for a millisecond in each turn, and does nothing else, says how much that is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvloop

from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.transports.http import Pool, origin_of
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec
from sidelight.loadgen.transports.websocket import WebSocketTransport
from sidelight.rundir.access import Tls, tls_context
from sidelight.rundir.clock import AnchoredClock

WORK_S = 0.001
CONTROL_S = 5.0
TIMEOUT_S = 600.0
CERTIFICATE = (
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
    *("-addext", "subjectAltName=IP:127.0.0.1"),
)
SERVER = r"""
import base64, hashlib, re, socket, ssl, sys
kind, pieces, pair = sys.argv[1], int(sys.argv[2]), sys.argv[3]
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
if pair:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    peer = context.wrap_socket(peer, server_side=True)
head = peer.recv(65536)
if kind == "websocket":
    key = re.search(rb"(?i)sec-websocket-key: *([^\r]+)", head)[1]
    accepted = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    begin = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    peer.sendall(begin + b"Sec-WebSocket-Accept: " + accepted + b"\r\n\r\n")
    peer.recv(65536)
    piece, end = b"\x81\x01x", b'\x81\x0f{"type":"done"}'
else:
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    piece, end = b"1\r\nx\r\n", b"0\r\n\r\n"
for _ in range(pieces // 10000):
    peer.sendall(piece * 10000)
peer.sendall(end)
peer.recv(1)
"""


class Held:
    """How long each turn of an event loop takes, by the clock and of the CPU, in s."""

    def __init__(self) -> None:
        self.clock_s: list[float] = []
        self.cpu_s: list[float] = []
        self._before = 0.0, 0.0
        self._is_over = False

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        self._before = time.perf_counter(), time.thread_time()
        asyncio.get_running_loop().call_soon(self._look)
        yield
        self._is_over = True

    def _look(self) -> None:
        now_s, cpu_s = time.perf_counter(), time.thread_time()
        self.clock_s.append(now_s - self._before[0])
        self.cpu_s.append(cpu_s - self._before[1])
        self._before = now_s, cpu_s
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._look)

    def __str__(self) -> str:
        clock_ms, cpu_ms = (sorted(1e3 * each for each in taken)[-3:] for taken in (self.clock_s, self.cpu_s))
        return (
            f"{len(self.cpu_s)} turns; CPU of the longest {', '.join(f'{each:.1f}' for each in cpu_ms)} ms; "
            f"by the clock {', '.join(f'{each:.1f}' for each in clock_ms)} ms"
        )


@contextmanager
def flooding(kind: str, pieces: int, pair: str) -> Iterator[str]:
    """Serve one reply; give the address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, kind, str(pieces), pair], stdout=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline() if server.stdout else 0)
        yield f"{'https' if pair else 'http'}://127.0.0.1:{port}"
        server.kill()


async def over_websocket(url: str, tls: Tls, clock: AnchoredClock, exchange: Exchange, held: Held) -> None:
    spec = WorkerSpec(
        worker=0, workers=1, run_id="run", clock_offset_ns=0, headers={}, out="", request_timeout_s=TIMEOUT_S,
        urls=[url], transport="websocket", protocol="websocket", tls=tls,
    )  # fmt: skip
    planned = PlannedRequest(index=0, path="/v1/stream", body=b"{}")
    async with WebSocketTransport(spec, clock) as transport, held.watching():
        await transport.perform(exchange, planned, timeout_s=TIMEOUT_S)


async def over_http(url: str, tls: Tls, clock: AnchoredClock, exchange: Exchange, held: Held) -> None:
    request = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n{}"
    context = tls_context(tls) if url.startswith("https:") else None
    async with Pool(origin_of(url), clock, tls=context) as pool, held.watching():
        await pool.perform(exchange, request, timeout_s=TIMEOUT_S)


async def working(seconds: float, held: Held) -> None:
    """Work for a while in each turn of the loop."""
    end_s = time.perf_counter() + seconds
    async with held.watching():
        while time.perf_counter() < end_s:
            until_s = time.thread_time() + WORK_S
            while time.thread_time() < until_s:
                pass
            await asyncio.sleep(0)


def measured(pieces: int) -> Iterator[str]:
    gc.collect()
    gc.freeze()  # as a worker of the load generator does
    kinds = {"websocket": over_websocket, "chunks": over_http}
    with tempfile.TemporaryDirectory() as scratch:
        pair = Path(scratch) / "pair.pem"
        subprocess.run([*CERTIFICATE, "-keyout", str(pair), "-out", str(pair)], check=True, capture_output=True)
        for kind, load in kinds.items():
            for tls in (False, True):
                held, exchange = Held(), Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
                clock = AnchoredClock(offset_ns=0, monotonic_ns=time.monotonic_ns)
                with flooding(kind, pieces, str(pair) if tls else "") as url:
                    uvloop.run(load(url, Tls(ca=str(pair)), clock, exchange, held))
                if exchange.error or exchange.received_bytes < pieces:
                    raise AssertionError(exchange.error)
                yield f"{pieces:,} pieces, {kind}{' over TLS' if tls else ''}: {held}"
                held = Held()
                uvloop.run(working(CONTROL_S, held))
                yield f"  {1e3 * WORK_S:g} ms of work a turn: {held}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=1_000_000)
    for line in measured(parser.parse_args().pieces):
        print(line, flush=True)


if __name__ == "__main__":
    main()
