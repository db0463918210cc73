"""Passing exports on: to a collector that is there, away, back again, or unwilling."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from served import collector
from waiting import BOUND_S

from sidelight.rundir.access import Access, UnusableFile
from sidelight.scraper.spans.forward import CollectorConnection, Rejected, Unavailable, http_url
from sidelight.scraper.spans.forwarder import Forwarder
from sidelight.scraper.spans.log import ForwardQueue, SpanLog, compressed
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec
from sidelight.sidecar.cli.measuring import free_pair

EXPORTS = [
    ExportTraceServiceRequest(resource_spans=[{"schema_url": str(number)}]).SerializeToString()  # type: ignore[list-item]
    for number in range(3)
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is queued at the end have the time that a busy machine takes to send it."""
    monkeypatch.setattr("sidelight.scraper.spans.forwarder.FLUSH_S", BOUND_S)


@asynccontextmanager
async def receiving(*, grpc: int = 0, http: int = 0) -> AsyncIterator[tuple[Receiver, asyncio.Queue[bytes]]]:
    """Run a receiver as a collector; give it and what it was sent."""
    given: asyncio.Queue[bytes] = asyncio.Queue()
    spec = ReceiverSpec(grpc=f"127.0.0.1:{grpc}", http=f"127.0.0.1:{http}")

    def deliver(_: int, request: ExportTraceServiceRequest) -> None:
        given.put_nowait(request.SerializeToString())

    async with Receiver(spec, log=None, say=print, deliver=deliver) as receiver:
        yield receiver, given


def queue(forwarder: Forwarder, bodies: list[bytes]) -> None:
    for body in bodies:
        forwarder.offer(compressed(body), "traces")


async def take(given: asyncio.Queue[bytes], count: int) -> list[bytes]:
    async with asyncio.timeout(BOUND_S):
        return [await given.get() for _ in range(count)]


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_what_came_is_passed_on(wire: str):
    """Byte for byte and in order, over either wire; what is queued at the end is still sent, and all is counted."""
    said: list[str] = []
    async with receiving() as (receiver, given):
        port = receiver.grpc_port if wire == "grpc" else receiver.http_port
        url = f"{wire}://127.0.0.1:{port}"
        async with Forwarder(url, Access(), say=said.append) as forwarder:
            queue(forwarder, EXPORTS)
        assert EXPORTS == await take(given, 3)
    assert (3, 0, []) == (forwarder.sent.total(), forwarder.dropped.total(), said)


async def test_a_receiver_passes_on_what_it_takes(tmp_path: Path):
    """It counts what the next collector took."""
    async with receiving() as (behind, given):
        spec = ReceiverSpec(grpc="127.0.0.1:0", http="", forward=f"http://127.0.0.1:{behind.http_port}/v1/traces")
        with closing(SpanLog(tmp_path / "spans-0.log")) as log:
            async with Receiver(spec, log=log, say=print) as before:
                async with CollectorConnection(f"grpc://127.0.0.1:{before.grpc_port}", Access()) as wire:
                    await wire.send(EXPORTS[1])
                assert [EXPORTS[1]] == await take(given, 1)
    counts = before.counts()
    assert (1, 1, 0) == (counts.exports, counts.forwarded, counts.forward_dropped)


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_collector_that_comes_back_gets_what_waited(wire: str):
    """It is said once that it is away and once that it is back; nothing that fits the queue is lost."""
    said: asyncio.Queue[str] = asyncio.Queue()
    port = int(free_pair().rpartition(":")[2])
    url = f"{wire}://127.0.0.1:{port}"
    async with Forwarder(url, Access(), say=said.put_nowait) as forwarder:
        queue(forwarder, EXPORTS)
        async with asyncio.timeout(BOUND_S):
            assert (await said.get()).startswith(f"spans cannot be forwarded to {url}: ")
        async with receiving(**{wire: port}) as (_, given):
            assert EXPORTS == await take(given, 3)
            async with asyncio.timeout(BOUND_S):
                assert f"spans are forwarded to {url} again" == await said.get()
    assert (3, 0) == (forwarder.sent.total(), forwarder.dropped.total())


async def test_a_collector_that_stays_away_costs_a_bounded_queue(monkeypatch: pytest.MonkeyPatch):
    """What no longer fits is dropped and counted at once, the oldest of the signal that takes most; and the rest when
    the time to send it is over.
    """
    monkeypatch.setattr("sidelight.scraper.spans.forwarder.FLUSH_S", 0.0)
    said: list[str] = []
    tried = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if "cannot be forwarded" in text:
            tried.set()

    noise = [compressed(random.Random(number).randbytes(400)) for number in range(5)]
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        async with Forwarder(url, Access(), say=say, queue_bytes=1000) as forwarder:
            for packed in noise:
                forwarder.offer(packed, "logs")
            assert 3 == forwarder.dropped["logs"]
            size = len(noise[3]) + len(noise[4])
            assert ForwardQueue(exports=2, size_bytes=size, limit_bytes=1000) == forwarder.queue
            forwarder.offer(compressed(random.Random(5).randbytes(300)), "traces")
            assert {"logs": 4} == forwarder.dropped
            await asyncio.wait_for(tried.wait(), BOUND_S)
    assert (0, {"logs": 5, "traces": 1}) == (forwarder.sent.total(), forwarder.dropped)
    assert ForwardQueue(limit_bytes=1000) == forwarder.queue
    assert f"logs cannot be forwarded to {url}: connect: Connection refused" in said
    assert said[-1].startswith(f"2 exports did not reach {url}")


async def test_a_signal_that_the_collector_wants_later_holds_no_other_up(monkeypatch: pytest.MonkeyPatch):
    """Spans go out while logs wait, however many; what is dropped for want of room is of those."""
    monkeypatch.setattr("sidelight.scraper.spans.forwarder.FLUSH_S", 0.0)
    taken: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        if request.path == "/v1/logs":
            return web.Response(status=503)
        taken.put_nowait(await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with asyncio.timeout(BOUND_S), Forwarder(url, Access(), say=print, queue_bytes=1000) as forwarder:
            for number in range(20):
                forwarder.offer(compressed(random.Random(number).randbytes(400)), "logs")
                forwarder.offer(compressed(EXPORTS[number % 3]), "traces")
                assert EXPORTS[number % 3] == await taken.get()
            assert 0 == forwarder.dropped["traces"]
            assert 1 <= forwarder.queue.exports <= 3


@pytest.mark.parametrize("status", [400, 401, 404, 307])
async def test_what_the_collector_refuses_is_not_sent_again(status: int):
    """It is dropped, counted, and said once; a password in the URL goes there, and is not shown."""
    said: list[str] = []
    async with collector((status, {})) as (url, exports):
        with_password = url.replace("//", "//me:secret@")
        access = Access(headers={"X-Key": "k"})
        async with Forwarder(with_password, access, say=said.append) as forwarder:
            queue(forwarder, EXPORTS)
        sent = [(headers["X-Key"], headers["Authorization"]) for headers, _ in exports]
        assert [("k", "Basic bWU6c2VjcmV0")] * 3 == sent
    assert (0, 3) == (forwarder.sent.total(), forwarder.dropped.total())
    assert [f"{url.replace('//', '//***@')} refuses spans: HTTP {status}"] == said


@pytest.mark.parametrize(
    ("url", "spans", "logs"),
    [
        ("http://h:4318", "http://h:4318/v1/traces", "http://h:4318/v1/logs"),
        ("http://h:4318/", "http://h:4318/v1/traces", "http://h:4318/v1/logs"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces", "https://h/otlp/v1/logs"),
        ("https://h/otlp/v1/traces/?a=b", "https://h/otlp/v1/traces/?a=b", "https://h/otlp/v1/logs?a=b"),
        ("https://h/ingest", "https://h/ingest", ""),
    ],
)
def test_a_path_is_used_unchanged(url: str, spans: str, logs: str):
    """And a missing one is that of OTLP. Other signals go beside spans, where the path says where that is."""
    assert (spans, logs) == (http_url(url), http_url(url, "logs"))


async def test_a_grpc_port_asked_over_http_is_named_as_such():
    """Any number but 4317 is taken for HTTP; what answers is a frame of HTTP/2, and the cure is another scheme."""
    async with (
        receiving() as (receiver, _),
        CollectorConnection(f"http://127.0.0.1:{receiver.grpc_port}", Access()) as wire,
    ):
        with pytest.raises(Rejected) as rejected:
            await wire.send(EXPORTS[0])
    assert f"this is a gRPC port: write grpc://127.0.0.1:{receiver.grpc_port}" == str(rejected.value)


async def test_what_is_no_http_and_no_grpc_is_shown_as_it_answers():
    """As a server of mail does: nothing is claimed of it."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, CollectorConnection(f"http://127.0.0.1:{port}", Access()) as wire:
        with pytest.raises(Unavailable) as unavailable:
            await wire.send(EXPORTS[0])
    assert "gRPC" not in str(unavailable.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("collector:4317", "collector:4317 is not a grpc(s) or http(s) URL"),
        ("grpc://collector", "grpc://collector names no port"),
        ("http://collector:x", "http://collector:x is not a grpc(s) or http(s) URL"),
        ("grpc://a:b@:4317", "grpc://***@:4317 is not a grpc(s) or http(s) URL"),
    ],
)
def test_an_invalid_url_is_refused_at_once(url: str, reason: str):
    """In one line, before anything runs; a password in it is not shown."""
    with pytest.raises(ValueError, match=r".") as refused:
        Forwarder(url, Access(), say=print)
    assert reason == str(refused.value)


@pytest.mark.parametrize("url", ["https://127.0.0.1:4318", "grpcs://127.0.0.1:4317"])
async def test_a_certificate_that_cannot_be_read_is_said_before_anything_runs(url: str):
    """Over either wire."""
    with pytest.raises(UnusableFile, match="ca: No such file"):
        async with Forwarder(url, Access(ca="absent.pem"), say=print):
            pass


async def test_grpc_takes_no_certificate_unchecked():
    """grpcio cannot, so it is not pretended."""
    access = Access(insecure=True)
    with pytest.raises(ValueError, match="gRPC takes no certificate unchecked"):
        async with Forwarder("grpcs://127.0.0.1:4317", access, say=print):
            pass


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch):
    """Exports may bear credentials, and what they go to is named in full."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        async with receiving() as (receiver, given):
            for url in (f"grpc://127.0.0.1:{receiver.grpc_port}", f"http://127.0.0.1:{receiver.http_port}"):
                async with CollectorConnection(url, Access()) as wire:
                    await wire.send(EXPORTS[0])
            assert 2 == given.qsize()
