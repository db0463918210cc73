"""Logs and metrics at the receiver of spans: taken, counted, and passed on or dropped."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from odd_exports import PROTOBUF, over_grpc, over_http
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from waiting import BOUND_S

from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, SpanLog, read_log
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec

MB = 1 << 20


@dataclass(slots=True)
class Listening:
    """A receiver, its log, and what it said."""

    path: Path
    said: list[str] = field(default_factory=list)
    receiver: Receiver = field(init=False)

    def bodies(self) -> list[bytes]:
        return [record.body() for record in read_log(self.path) if isinstance(record, ExportRecord)]


@asynccontextmanager
async def listening(path: Path, **spec: object) -> AsyncIterator[Listening]:
    log, taking = SpanLog(path / "spans-0.log"), Listening(path / "spans-0.log")
    checked = ReceiverSpec(**{"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", **spec})  # type: ignore[arg-type]
    try:
        async with Receiver(checked, log=log, say=taking.said.append) as taking.receiver:
            yield taking
    finally:
        log.close()


# An export of logs, and one of metrics: their records are at the same places as an export's spans.
OTHERS = {
    "logs": ExportLogsServiceRequest(
        resource_logs=[{"scope_logs": [{"log_records": [{"severity_text": "INFO"}] * 2}]}]  # type: ignore[list-item]
    ).SerializeToString(),
    "metrics": ExportMetricsServiceRequest(
        resource_metrics=[{"scope_metrics": [{"metrics": [{"name": "tokens"}]}]}]  # type: ignore[list-item]
    ).SerializeToString(),
}


@pytest.mark.parametrize("signal", OTHERS)
async def test_logs_and_metrics_are_taken_and_dropped_with_a_count(tmp_path: Path, signal: str):
    """Over either wire and never `Unimplemented`, which senders log as an error for each batch; nothing is kept."""
    async with listening(tmp_path) as taking:
        assert b"" == await over_grpc(taking.receiver.grpc_port, OTHERS[signal], signal=signal)
        assert (200, b"") == await over_http(taking.receiver.http_port, OTHERS[signal], signal=signal)
        packed_ = gzip.compress(OTHERS[signal])
        assert (200, b"") == await over_http(taking.receiver.http_port, packed_, signal=signal, Content_Encoding="gzip")
    assert taking.receiver.counts() == ReceiverCounts(**{signal: 3, f"{signal}_dropped": 3})
    assert ([], []) == (taking.bodies(), taking.said)


@pytest.mark.parametrize("signal", OTHERS)
@pytest.mark.parametrize("body", [b"\x0a\x00" * 600_000, gzip.compress(bytes(64 * MB), mtime=0)], ids=["large", "bomb"])
async def test_an_export_of_logs_or_metrics_beyond_the_limit_is_refused(tmp_path: Path, signal: str, body: bytes):
    """As one of spans is, with a reason; it is counted, and said once."""
    packing = {"Content_Encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {}
    text = "more than 1000000 bytes"
    async with listening(tmp_path, limit_bytes=1_000_000) as taking:
        for _ in range(2):
            refused = await over_http(taking.receiver.http_port, body, signal=signal, **packing)
            assert (413, b"\x12" + bytes([len(text)]) + text.encode()) == refused
    assert taking.receiver.counts() == ReceiverCounts(too_large=2)
    assert [f"an export of {signal} over http is refused: {text} (said once; the counts show how often)"] == taking.said


async def test_logs_and_metrics_are_forwarded_byte_for_byte(tmp_path: Path):
    """Over gRPC to one receiver, from there over HTTP to the next collector, each where spans of its kind go."""
    posted: dict[str, bytes] = {}
    complete = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        posted[request.path] = await request.read()
        if len(posted) == len(OTHERS):
            complete.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    (tmp_path / "behind").mkdir()
    async with (
        TestServer(app) as server,
        listening(tmp_path / "behind", forward=f"http://127.0.0.1:{server.port}") as behind,
        listening(tmp_path, forward=f"grpc://127.0.0.1:{behind.receiver.grpc_port}") as taking,
    ):
        for signal, sent in OTHERS.items():
            assert b"" == await over_grpc(taking.receiver.grpc_port, sent, signal=signal)
        await asyncio.wait_for(complete.wait(), BOUND_S)
    assert {f"/v1/{signal}": sent for signal, sent in OTHERS.items()} == posted
    assert taking.receiver.counts() == behind.receiver.counts() == ReceiverCounts(logs=1, metrics=1)


async def test_a_collector_of_spans_alone_costs_the_others_a_count(tmp_path: Path):
    """Its path says where spans go and nothing of logs: these are dropped, counted, and it is said once."""
    async with listening(tmp_path, forward="http://127.0.0.1:9/ingest") as taking:
        for _ in range(2):
            assert b"" == await over_grpc(taking.receiver.grpc_port, OTHERS["logs"], signal="logs")
    assert taking.receiver.counts() == ReceiverCounts(logs=2, logs_dropped=2)
    (said,) = taking.said
    path = "the path of its URL is for spans alone; end it in /v1/traces, or in /v1/logs"
    assert said == f"http://127.0.0.1:9/ingest refuses logs: {path}"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("POST /v1/traces", b"HTTP/1.1 100 Continue"),
        ("GET /v1/traces", b"HTTP/1.1 405 Method Not Allowed"),
        ("POST /v1/profiles", b"HTTP/1.1 404 Not Found"),
        ("POST /", b"HTTP/1.1 404 Not Found"),
        ("OPTIONS *", b"HTTP/1.1 404 Not Found"),
    ],
)
async def test_a_body_is_asked_for_where_exports_are_taken(tmp_path: Path, line: str, answer: bytes):
    """Of a sender that waits until it is; anywhere else it learns so, and that it need not send the body."""
    async with listening(tmp_path) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.receiver.http_port)
        writer.write(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\n".encode())
        writer.write(b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        async with asyncio.timeout(BOUND_S):
            head = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            assert answer.lower() == head[0]
            assert (b"connection: close" in head) == (b"100" not in answer)
            assert (b"allow: post" in head) == (b"405" in answer)
        writer.close()
        await writer.wait_closed()
