"""Sending spans to real collectors on the loopback: ones that take them, ask for later, refuse, or are not there."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from served import collector

from exporter.otlp.send import Sent, send
from rundir.access import Access
from scraper.spans.receiver import Receiver
from scraper.spans.spec import ReceiverSpec


def export(number: int, spans: int = 3) -> ExportTraceServiceRequest:
    """An export of good spans."""
    return ExportTraceServiceRequest(
        resource_spans=[  # type: ignore[list-item]
            {
                "scope_spans": [
                    {
                        "spans": [
                            {
                                "trace_id": number.to_bytes(16),
                                "span_id": place.to_bytes(8),
                                "name": "chat m",
                                "start_time_unix_nano": 1,
                                "end_time_unix_nano": 2,
                            }
                            for place in range(1, 1 + spans)
                        ]
                    }
                ]
            }
        ]
    )


EXPORTS = [export(number) for number in (1, 2, 3)]
ALL = Sent(taken=9, rejected=0, given_up=False, reason="")


class Service(TraceServiceServicer):  # type: ignore[misc]  its stub is without types
    """OpenTelemetry's own service: it rejects a span of each export, or asks `later` times to come again."""

    def __init__(self, later: int) -> None:
        self.later = later
        self.came: list[tuple[bytes, dict[str, Any]]] = []

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.came.append((request.SerializeToString(), dict(context.invocation_metadata())))
        if len(self.came) <= self.later:
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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts that no test waits for."""
    monkeypatch.setattr("scraper.spans.forward.FIRST_PAUSE_S", 1e-3)


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_collector_gets_every_span(wire: str):
    """Over either wire, in order, and counted."""
    given: list[ExportTraceServiceRequest] = []
    # By its clock the year is 1970, as it is by these spans.
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0", clock_offset_ns=-time.monotonic_ns())
    async with Receiver(spec, log=None, say=print, deliver=lambda _, export: given.append(export)) as receiver:
        port = receiver.grpc_port if wire == "grpc" else receiver.http_port
        assert ALL == await send(EXPORTS, f"{wire}://127.0.0.1:{port}", Access(), report=print)
    assert EXPORTS == given
    assert (3, 9, 0) == (receiver.counts().exports, receiver.counts().spans, receiver.counts().bad_spans)


async def test_bodies_go_zipped_over_http():
    """They are a tenth of the size."""
    async with collector((200, {})) as (url, came):
        assert ALL == await send(EXPORTS, url, Access(), report=print)
    assert [("gzip", export.SerializeToString()) for export in EXPORTS] == [
        (headers["Content-Encoding"], gzip.decompress(body)) for headers, body in came
    ]


async def test_what_a_collector_rejects_of_an_export_is_counted():
    """With its reason; the rest is taken. Credentials in the URL are sent as OTLP over gRPC has them."""
    async with service() as (url, rpc):
        sent = await send(EXPORTS, url.replace("//", "//me:secret@"), Access(headers={"X-Team": "a"}), report=print)
    assert Sent(taken=6, rejected=3, given_up=False, reason="one too old") == sent
    metadata = rpc.came[0][1]
    assert ("Basic bWU6c2VjcmV0", "a") == (metadata["authorization"], metadata["x-team"])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_collector_that_asks_for_later_is_asked_again(status: int):
    """The same export first; nothing is lost or sent twice to one that took it."""
    async with collector((status, {"Retry-After": "0"}), (status, {}), (200, {})) as (url, came):
        assert ALL == await send(EXPORTS, url, Access(), report=print)
    bodies = [ExportTraceServiceRequest.FromString(gzip.decompress(body)) for _, body in came]
    assert [EXPORTS[0], EXPORTS[0], *EXPORTS] == bodies


@pytest.mark.usefixtures("impatient")
async def test_a_grpc_collector_that_asks_for_later_is_asked_again():
    """By the codes that OTLP names."""
    async with service(later=2) as (url, rpc):
        sent = await send(EXPORTS[:1], url, Access(), report=print)
    assert (2, 1) == (sent.taken, sent.rejected)
    assert [EXPORTS[0].SerializeToString()] * 3 == [body for body, _ in rpc.came]


async def test_a_wait_beyond_our_patience_is_not_begun():
    """A collector that asks for a pause of an hour is not asked again."""
    async with collector((503, {"Retry-After": "3600"})) as (url, came):
        sent = await send(EXPORTS, url, Access(), report=print)
    assert (Sent(taken=0, rejected=0, given_up=True, reason="HTTP 503", is_away=True), 1) == (sent, len(came))


@pytest.mark.parametrize("status", [400, 401, 404, 307])
async def test_a_collector_that_refuses_is_not_asked_again(status: int):
    """Nor is it given what comes after; what it took before counts."""
    async with collector((200, {}), (status, {})) as (url, came):
        sent = await send(EXPORTS, url, Access(), report=print)
    assert (Sent(taken=3, rejected=0, given_up=True, reason=f"HTTP {status}"), 2) == (sent, len(came))


async def test_a_refusal_is_reported_in_the_collectors_words():
    """Whether they are plain, or as OTLP has them; a page is not shown."""
    async with collector((401, {}), text="no org id\n") as (url, _):
        assert "HTTP 401: no org id" == (await send(EXPORTS, url, Access(), report=print)).reason
    async with collector((404, {"Content-Type": "text/html"}), text="<html>") as (url, _):
        assert "HTTP 404" == (await send(EXPORTS, url, Access(), report=print)).reason
    spec = ReceiverSpec(grpc="", http="127.0.0.1:0", limit_bytes=50)
    async with Receiver(spec, log=None, say=print) as receiver:
        sent = await send(EXPORTS, f"http://127.0.0.1:{receiver.http_port}", Access(), report=print)
    assert "HTTP 413: more than 50 bytes" == sent.reason


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_collector_that_is_not_there_is_given_up(wire: str, monkeypatch: pytest.MonkeyPatch):
    """Within our patience, with the reason."""
    monkeypatch.setattr("exporter.otlp.send.PATIENCE_S", 0.1)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        url = f"{wire}://127.0.0.1:{reserved.getsockname()[1]}"
        sent = await send(EXPORTS, url, Access(), report=print)
    assert (0, True) == (sent.taken, sent.given_up)
    assert "Connection refused" in sent.reason


async def test_progress_is_reported_now_and_then(monkeypatch: pytest.MonkeyPatch):
    """How many spans were taken so far."""
    monkeypatch.setattr("exporter.otlp.send.REPORT_EVERY_S", 0.0)
    said: list[str] = []
    async with collector((200, {})) as (url, _):
        await send(EXPORTS, url, Access(), report=said.append)
    assert ["3 spans sent", "6 spans sent", "9 spans sent"] == said
