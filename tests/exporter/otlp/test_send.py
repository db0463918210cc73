"""Sending spans to real collectors on the loopback: ones that take them, ask for later, refuse, or are not there."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from certificates import Authority
from grpc import aio
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext
from served import collector

from sidelight.exporter.otlp.send import Batch, Sent, send
from sidelight.rundir.access import Access, Guard
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import TRACES, ReceiverSpec


def batch(number: int, spans: int = 3) -> list[ReadableSpan]:
    """A batch of good spans."""
    return [
        ReadableSpan(
            name="chat m", context=SpanContext(number, place, is_remote=False), start_time=1, end_time=2,
            resource=Resource({}),
        )
        for place in range(1, 1 + spans)
    ]  # fmt: skip


BATCHES = [batch(number) for number in (1, 2, 3)]
EXPORTS = [encode_spans(each) for each in BATCHES]
ALL = Sent(taken=9, rejected=0, given_up=False, reason="")


async def sent(url: str, batches: Sequence[Batch] = BATCHES, access: Access = Access(), **options: Any) -> Sent:  # noqa: B008
    """What came of sending, in a thread of its own."""
    return await asyncio.to_thread(send, batches, TRACES, url, access, **{"report": print, **options})


class Service(TraceServiceServicer):  # type: ignore[misc]  its stub is without types
    """OpenTelemetry's own service: it rejects a span of each export, or asks `later` times to come again."""

    def __init__(self, later: int) -> None:
        self.later = later
        self.came: list[tuple[bytes, dict[str, Any]]] = []

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.came.append((request.SerializeToString(), dict(context.invocation_metadata())))
        if len(self.came) <= self.later:
            context.set_trailing_metadata((("google.rpc.retryinfo-bin", b""),))  # at once
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return ExportTraceServiceResponse(
            partial_success={"rejected_spans": 1, "error_message": "one\ntoo old"}  # type: ignore[arg-type]
        )


@asynccontextmanager
async def service(later: int = 0) -> AsyncIterator[tuple[str, Service]]:
    """A gRPC server of OpenTelemetry's own stubs."""
    server, rpc = aio.server(), Service(later)
    add_TraceServiceServicer_to_server(rpc, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}", rpc
    finally:
        await server.stop(0)


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_collector_gets_every_span(wire: str):
    """Over either wire, in order, and counted."""
    given: list[ExportTraceServiceRequest] = []
    # By its clock the year is 1970, as it is by these spans.
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0", clock_offset_ns=-time.monotonic_ns())
    async with Receiver(spec, log=None, say=print, deliver=lambda _, export: given.append(export)) as receiver:
        port = receiver.grpc_port if wire == "grpc" else receiver.http_port
        assert ALL == await sent(f"{wire}://127.0.0.1:{port}")
    assert EXPORTS == given
    assert (3, 9, 0) == (receiver.counts().exports, receiver.counts().spans, receiver.counts().bad_spans)


async def test_bodies_go_zipped_over_http():
    """They are a tenth of the size."""
    async with collector((200, {})) as (url, came):
        assert ALL == await sent(url)
    assert [("gzip", export.SerializeToString()) for export in EXPORTS] == [
        (headers["Content-Encoding"], gzip.decompress(body)) for headers, body in came
    ]


async def test_what_a_collector_rejects_of_a_batch_is_counted():
    """With its reason; the rest is taken. Credentials in the URL are sent as OTLP over gRPC has them."""
    async with service() as (url, rpc):
        outcome = await sent(url.replace("//", "//me:secret@"), access=Access(headers={"X-Team": "a"}))
    assert Sent(taken=6, rejected=3, given_up=False, reason="one too old") == outcome
    metadata = rpc.came[0][1]
    assert ("Basic bWU6c2VjcmV0", "a") == (metadata["authorization"], metadata["x-team"])


async def test_what_is_rejected_over_http_is_counted_too():
    """In OTLP's words; in a page there are none."""
    partial = ExportTraceServiceResponse(partial_success={"rejected_spans": 1, "error_message": "old"})  # type: ignore[arg-type]
    async with collector((200, {}), text=partial.SerializeToString().decode()) as (url, _):
        assert Sent(taken=6, rejected=3, given_up=False, reason="old") == await sent(url)
    async with collector((200, {"Content-Type": "text/html"}), text="<html>") as (url, _):
        assert ALL == await sent(url)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_collector_that_asks_for_later_is_asked_again(status: int):
    """The same batch first; nothing is lost or sent twice to one that took it."""
    async with collector((status, {"Retry-After": "0"}), (200, {})) as (url, came):
        assert ALL == await sent(url)
    bodies = [ExportTraceServiceRequest.FromString(gzip.decompress(body)) for _, body in came]
    assert [EXPORTS[0], *EXPORTS] == bodies


async def test_a_grpc_collector_that_asks_for_later_is_asked_again():
    """By the codes that OTLP names."""
    async with service(later=2) as (url, rpc):
        outcome = await sent(url, BATCHES[:1])
    assert (2, 1) == (outcome.taken, outcome.rejected)
    assert [EXPORTS[0].SerializeToString()] * 3 == [body for body, _ in rpc.came]


async def test_a_wait_beyond_our_patience_is_not_begun():
    """A collector that asks for a pause of an hour is not asked again."""
    async with collector((503, {"Retry-After": "3600"})) as (url, came):
        outcome = await sent(url)
    assert (Sent(taken=0, rejected=0, given_up=True, reason="HTTP 503", is_away=True), 1) == (outcome, len(came))


@pytest.mark.parametrize("status", [400, 401, 404, 307])
async def test_a_collector_that_refuses_is_not_asked_again(status: int):
    """Nor is it given what comes after, nor anybody whom it names; what it took before counts."""
    async with collector((200, {}), (status, {"Location": "/elsewhere"})) as (url, came):
        outcome = await sent(url)
    assert (Sent(taken=3, rejected=0, given_up=True, reason=f"HTTP {status}"), 2) == (outcome, len(came))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "HTTP 101"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
            "reply: read length must be non-negative or -1",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "reply: IncompleteRead(0 bytes read, 9 more expected)"),
    ],
)
async def test_a_reply_that_is_none_takes_nothing(reply: bytes, reason: str):
    """It is said what was wrong with it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        outcome = await sent(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert (0, True, reason) == (outcome.taken, outcome.given_up, outcome.reason)


async def test_a_refusal_is_reported_in_the_collectors_words():
    """Whether they are plain, or as OTLP has them; a page is not shown."""
    async with collector((401, {}), text="no org id\n") as (url, _):
        assert "HTTP 401: no org id" == (await sent(url)).reason
    async with collector((404, {"Content-Type": "text/html"}), text="<html>") as (url, _):
        assert "HTTP 404" == (await sent(url)).reason
    spec = ReceiverSpec(grpc="", http="127.0.0.1:0", limit_bytes=50)
    async with Receiver(spec, log=None, say=print) as receiver:
        assert "HTTP 413: more than 50 bytes" == (await sent(f"http://127.0.0.1:{receiver.http_port}")).reason


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_collector_that_is_not_there_is_given_up(wire: str, monkeypatch: pytest.MonkeyPatch):
    """Within OpenTelemetry's own variable, with the reason."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        outcome = await sent(f"{wire}://127.0.0.1:{reserved.getsockname()[1]}")
    assert (0, True, True) == (outcome.taken, outcome.given_up, outcome.is_away)
    assert "Connection refused" in outcome.reason


async def test_http_at_a_grpc_port_is_named():
    """At once."""
    async with service() as (url, _):
        outcome = await sent(url.replace("grpc://", "http://"))
    assert (f"this is a gRPC port: write {url}", False) == (outcome.reason, outcome.is_away)


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_no_proxy_of_the_environment_is_asked(wire: str, monkeypatch: pytest.MonkeyPatch):
    """Headers may be secrets, and loopback is not the proxy's."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    async with service() as (grpc_url, _), collector((200, {})) as (http_url, _):
        assert (await sent(grpc_url if wire == "grpc" else http_url)).reason in ("", "one too old")


@pytest.mark.parametrize("wire", ["grpcs", "https"])
async def test_a_collector_is_trusted_by_its_authority(
    wire: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    """That of --otlp-ca, or of OpenTelemetry's variable; no other."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    guard = Guard(cert=authority.path("server.pem"), key=authority.path("server.key"))
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0", clock_offset_ns=-time.monotonic_ns(), guard=guard)
    async with Receiver(spec, log=None, say=print) as receiver:
        url = f"{wire}://127.0.0.1:{receiver.grpc_port if wire == 'grpcs' else receiver.http_port}"
        assert ALL == await sent(url, access=Access(ca=authority.path("ca.pem")))
        assert (await sent(url, BATCHES[:1])).is_away
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", authority.path("ca.pem"))
        assert ALL == await sent(url)


async def test_variables_of_opentelemetrys_exporters_count(monkeypatch: pytest.MonkeyPatch):
    """Beside the options, which win."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=env,x-other=env")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    async with collector((200, {})) as (url, came):
        assert ALL == await sent(url, access=Access(headers={"X-Team": "ours"}))
    headers, body = came[0]
    assert ("ours", "env", EXPORTS[0].SerializeToString()) == (headers["X-Team"], headers["X-Other"], body)


@pytest.mark.parametrize("name", ["COMPRESSION", "TIMEOUT"])
async def test_a_variable_that_cannot_be_used_is_the_reason(name: str, monkeypatch: pytest.MonkeyPatch):
    """Instead of a traceback."""
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", "much")
    async with service() as (url, _):
        outcome = await sent(url)
    assert (True, False) == (outcome.given_up, outcome.is_away)
    assert "much" in outcome.reason


async def test_an_authority_that_is_not_there_is_the_reason(monkeypatch: pytest.MonkeyPatch):
    """By its path."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/absent.pem")
    assert "/absent.pem" in (await sent("https://127.0.0.1:9")).reason


async def test_progress_is_reported_now_and_then(monkeypatch: pytest.MonkeyPatch):
    """How many spans were taken so far."""
    monkeypatch.setattr("sidelight.exporter.otlp.send.REPORT_EVERY_S", 0.0)
    said: list[str] = []
    async with collector((200, {})) as (url, _):
        await sent(url, report=said.append)
    assert ["3 spans sent", "6 spans sent", "9 spans sent"] == said
