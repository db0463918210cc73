"""Requests over WebSocket and gRPC, against real servers that answer by a test's script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from aiohttp import web
from grpc import aio
from waiting import BOUND_S

from sidelight.loadgen.protocols import kserve
from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.request import Prompt, RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest, request_id, traceparent
from sidelight.loadgen.transports.grpc import GrpcTransport
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec
from sidelight.loadgen.transports.websocket import WebSocketTransport
from sidelight.rundir.access import Tls
from sidelight.rundir.clock import AnchoredClock


def _spec(url: str, transport: str, **changes: Any) -> WorkerSpec:
    fields = {
        "worker": 0, "workers": 1, "run_id": "run", "clock_offset_ns": time.time_ns() - time.monotonic_ns(),
        "headers": {"Authorization": "Bearer k"}, "out": "", "request_timeout_s": BOUND_S, "urls": [url],
        "transport": transport, "protocol": transport,
    } | changes  # fmt: skip
    return WorkerSpec(**fields)


def _planned(protocol: str, index: int = 0) -> PlannedRequest:
    target = RequestTarget(model="m", endpoint=protocol)
    path, body = PROTOCOLS[protocol].encode(target, Prompt(text="hi"), 5, 0.0)
    return PlannedRequest(index=index, path=path, body=body)


async def _ask(
    link: WebSocketTransport | GrpcTransport, protocol: str, index: int = 0, **more: Any
) -> tuple[Exchange, Reply]:
    exchange = Exchange(index=index, scheduled_ns=0, dispatch_ns=0, **more)
    await link.perform(exchange, _planned(protocol, index), timeout_s=BOUND_S)
    stamps = (np.array(exchange.reads_ns, np.int64), np.array(exchange.read_ends, np.int64))
    return exchange, PROTOCOLS[protocol].read_reply(exchange.status, exchange.head, bytes(exchange.body), *stamps)


DONE = {"type": "done", "finish_reason": "length", "usage": {"prompt_tokens": 2, "completion_tokens": 2}}
Script = Callable[[web.WebSocketResponse, dict[str, Any]], Awaitable[None]]


@contextlib.asynccontextmanager
async def _websocket(
    script: Script, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Run a server that answers each message by the script; give its URL and the upgrades it saw."""
    upgrades: list[web.Request] = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        upgrades.append(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await script(socket, json.loads(message.data))
        return socket

    app = web.Application()
    app.add_routes([web.get("/v1/stream", serve)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}", upgrades
    finally:
        await runner.cleanup()


def _clock() -> AnchoredClock:
    return AnchoredClock(offset_ns=time.time_ns() - time.monotonic_ns())


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_websocket_is_kept_for_the_next_request(reuse: bool):
    """One upgrade for all, or one each; each request carries its ids, the upgrade the headers."""
    heard: list[dict[str, Any]] = []

    async def script(socket: web.WebSocketResponse, asked: dict[str, Any]) -> None:
        heard.append(asked)
        for message in ({"type": "delta", "text": "a"}, {"type": "delta", "text": "b"}, DONE):
            await socket.send_str(json.dumps(message, indent=1))

    async with (
        _websocket(script) as (url, upgrades),
        WebSocketTransport(_spec(url, "websocket", reuse=reuse), _clock()) as link,
    ):
        answers = [await _ask(link, "websocket", index) for index in range(3)]
    assert (1 if reuse else 3) == len(upgrades)
    assert upgrades[0].headers["Authorization"] == "Bearer k"
    assert [(request_id("run", index), traceparent("run", index)) for index in range(3)] == [
        (asked["id"], asked["traceparent"]) for asked in heard
    ]
    assert [False, reuse, reuse] == [exchange.reused for exchange, _ in answers]
    for exchange, reply in answers:
        assert (200, "", "", True) == (exchange.status, exchange.error, reply.error, reply.complete)
        assert (2, 2, [1, 1]) == (reply.output_tokens, reply.input_tokens, reply.chunk_chars.tolist())
        assert 0 < exchange.connected_ns <= exchange.submit_ns <= reply.first_token_ns <= exchange.end_ns
        assert 3 == len(exchange.reads_ns)


@pytest.mark.parametrize("unasked", ["a reply", "a close", "a ping"])
async def test_what_comes_over_an_idle_websocket_is_no_reply_to_the_next_request(unasked: str):
    """Its connection is given up, but for a ping, which is answered."""
    texts = iter("abc")
    said_all = asyncio.Event()

    async def script(socket: web.WebSocketResponse, _asked: dict[str, Any]) -> None:
        await socket.send_json({"type": "delta", "text": next(texts)})
        await socket.send_json(DONE)
        if unasked == "a reply":
            await socket.send_json({"type": "delta", "text": "stale"})
            await socket.send_json(DONE)
        elif unasked == "a ping":
            await socket.ping()
        said_all.set()
        if unasked == "a close":  # which waits for the answer
            await socket.close()

    async with _websocket(script) as (url, upgrades), WebSocketTransport(_spec(url, "websocket"), _clock()) as link:
        answers = []
        for index in range(3):
            answers.append(await _ask(link, "websocket", index))
            await said_all.wait()
            said_all.clear()
            for _ in range(10):  # turns of the loop, in which the client's side reads what has come
                await asyncio.sleep(0)
    assert [("", True, [1])] * 3 == [
        (exchange.error, reply.complete, reply.chunk_chars.tolist()) for exchange, reply in answers
    ]
    assert (1 if unasked == "a ping" else 3) == len(upgrades)


async def test_how_a_websocket_request_can_fail():
    """A refusal with a code, an error after content, garbage, a close in the middle, and no such path."""
    said: dict[int, list[str]] = {
        0: ['{"type":"error","code":429,"message":"slow down"}'],
        1: ['{"type":"delta","text":"a"}', '{"type":"error","code":500,"message":"died"}'],
        2: ['{"type":"delta","text":"a"}', "[]", json.dumps(DONE)],
        3: ['{"type":"delta","text":"a"}'],
    }

    async def script(socket: web.WebSocketResponse, asked: dict[str, Any]) -> None:
        number = int(asked["id"][-1])
        for text in said[number]:
            await socket.send_str(text)
        if number == 3:
            await socket.close(code=1011)

    async with _websocket(script) as (url, _), WebSocketTransport(_spec(url, "websocket"), _clock()) as link:
        answers = [await _ask(link, "websocket", index) for index in range(4)]
    assert [429, 200, 200, 200] == [exchange.status for exchange, _ in answers]
    assert ["http_429: slow down", "server: died"] == [reply.error for _, reply in answers[:2]]
    assert answers[2][1].error.startswith("protocol: event 1 is not a completion chunk")
    assert ("reset: closed by peer (code 1011) after 27 body bytes", "") == (answers[3][0].error, answers[3][1].error)
    assert not any(reply.complete for _, reply in answers)
    async with _websocket(script) as (url, _), WebSocketTransport(_spec(f"{url}/no", "websocket"), _clock()) as link:
        exchange, reply = await _ask(link, "websocket")
    assert (404, "http_404: the server does not speak WebSocket at /v1/stream") == (exchange.status, reply.error)


@pytest.mark.parametrize("size", [400, 5000], ids=["in messages", "one message"])
async def test_a_websocket_reply_that_is_too_large_is_ended(size: int):
    """By several messages together, or by one that is not even read."""

    async def script(socket: web.WebSocketResponse, _asked: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            for _ in range(10):
                await socket.send_str(json.dumps({"type": "delta", "text": "x" * size}))

    spec = {"max_reply_bytes": 2000}
    async with _websocket(script) as (url, _), WebSocketTransport(_spec(url, "websocket", **spec), _clock()) as link:
        exchange, reply = await _ask(link, "websocket", most_bytes=2000)
    assert exchange.error == "too_large: more than 2000 body bytes"
    assert ([size] * 5 if size < 2000 else []) == reply.chunk_chars.tolist()
    assert exchange.end_ns > 0


@contextlib.asynccontextmanager
async def _grpc(
    infer: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]], *, tls: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    server = aio.server()
    methods = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(infer)}
    handler = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
    server.add_generic_rpc_handlers((handler,))
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _said(text: str, *, error: str = "") -> bytes:
    message = kserve._messages()["ModelStreamInferResponse"](error_message=error)
    if text:
        output = message.infer_response.outputs.add(name="text_output", datatype="BYTES")
        output.contents.bytes_contents.append(text.encode())
    return bytes(message.SerializeToString())


async def test_a_grpc_request_carries_its_ids_and_ends_with_its_stream():
    """A server that sends no final response is complete when it ends the call with OK."""
    heard: list[tuple[dict[str, str], Any]] = []

    async def infer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            heard.append(
                (dict(context.invocation_metadata()), kserve._messages()["ModelInferRequest"].FromString(data))
            )
            yield _said("a")
            yield _said("b")

    async with _grpc(infer) as url, GrpcTransport(_spec(url, "grpc"), _clock()) as link:
        answers = [await _ask(link, "grpc", index) for index in range(2)]
    for index, (exchange, reply) in enumerate(answers):
        metadata, request = heard[index]
        assert (request_id("run", index), "hi") == (request.id, request.inputs[0].contents.bytes_contents[0].decode())
        assert (request.id, traceparent("run", index)) == (metadata["x-request-id"], metadata["traceparent"])
        assert metadata["authorization"] == "Bearer k"
        assert (200, "", "", True, True) == (exchange.status, exchange.error, reply.error, reply.complete, reply.done)
        assert [1, 1] == reply.chunk_chars.tolist()
        assert 0 < exchange.connected_ns <= exchange.submit_ns <= reply.first_token_ns <= exchange.end_ns
    assert [False, True] == [exchange.reused for exchange, _ in answers]


@pytest.mark.parametrize("size", [400, 5000], ids=["in messages", "one message"])
async def test_a_grpc_reply_that_is_too_large_is_ended(size: int):
    """Likewise; that grpcio then says what a server says that is exhausted does not make it a refusal."""

    async def infer(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            for _ in range(10):
                yield _said("x" * size)

    spec = {"max_reply_bytes": 2000}
    async with _grpc(infer) as url, GrpcTransport(_spec(url, "grpc", **spec), _clock()) as link:
        exchange, reply = await _ask(link, "grpc", most_bytes=2000)
    assert exchange.error == "too_large: more than 2000 body bytes"
    assert ([size] * 5 if size < 2000 else []) == reply.chunk_chars.tolist()
    assert exchange.status in {0, 200}
    assert exchange.end_ns > 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.NOT_FOUND, 404),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
async def test_a_grpc_call_that_fails_has_the_status_of_http(code: grpc.StatusCode, status: int):
    """Before the first message; after one it is an error in the middle of a stream, or a broken connection."""
    first = True

    async def infer(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        if not first:
            yield _said("a")
        await context.abort(code, "no\nway")

    async with _grpc(infer) as url, GrpcTransport(_spec(url, "grpc"), _clock()) as link:
        exchange, reply = await _ask(link, "grpc")
        first = False
        later, torn = await _ask(link, "grpc")
    assert (status, "", f"http_{status}: no way") == (exchange.status, exchange.error, reply.error)
    broken = code is grpc.StatusCode.UNAVAILABLE
    assert (200, "", False) == (later.status, torn.error, torn.complete)
    assert later.error.startswith("reset: no way after ") if broken else later.error == "server: no way"
    assert torn.first_token_ns > 0


async def test_a_grpc_refusal_has_its_own_status_however_early_it_comes():
    """A server with its own threads refuses a request that is still being sent."""

    def refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "slow down")
        yield b""

    server = grpc.server(ThreadPoolExecutor(4))
    methods = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),))
    url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        async with GrpcTransport(_spec(url, "grpc"), _clock()) as link:
            rounds = [await asyncio.gather(*(_ask(link, "grpc", index) for index in range(20))) for _ in range(20)]
    finally:
        server.stop(None).wait()
    assert {(429, "", "http_429: slow down")} == {
        (exchange.status, exchange.error, reply.error) for some in rounds for exchange, reply in some
    }


async def test_more_streams_than_a_connection_takes_get_another():
    """So that no request waits in the client unnoticed: 101 at once use two connections."""
    peers: set[str] = set()
    all_here = asyncio.Event()
    under_way = 0

    async def infer(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        nonlocal under_way
        peers.add(context.peer())
        under_way += 1
        if under_way == 101:
            all_here.set()
        await all_here.wait()
        yield _said("a")

    async with _grpc(infer) as url, GrpcTransport(_spec(url, "grpc"), _clock()) as link:
        answers = await asyncio.gather(*(_ask(link, "grpc", index) for index in range(101)))
    assert all(reply.complete for _, reply in answers)
    assert len(peers) == 2


async def test_a_name_that_does_not_resolve_is_the_error():
    """Over both transports."""
    for transport, link in (("websocket", WebSocketTransport), ("grpc", GrpcTransport)):
        async with link(_spec("http://no-such-host.invalid:80", transport), _clock()) as open_link:
            exchange, _ = await _ask(open_link, transport)
        assert exchange.error.startswith("connect: name not resolved: "), exchange.error
        assert (0, -1) == (exchange.status, exchange.connected_ns)


async def test_a_grpc_connection_for_each_request():
    """Where connections are not to be reused."""

    async def infer(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        peers.append(context.peer())
        yield _said("a")

    peers: list[str] = []
    async with _grpc(infer) as url, GrpcTransport(_spec(url, "grpc", reuse=False), _clock()) as link:
        answers = [await _ask(link, "grpc", index) for index in range(2)]
    assert [False, False] == [exchange.reused for exchange, _ in answers]
    assert len(set(peers)) == 2


@contextlib.asynccontextmanager
async def _both(
    context: ssl.SSLContext, credentials: grpc.ServerCredentials
) -> AsyncIterator[list[tuple[str, str, type[WebSocketTransport | GrpcTransport]]]]:
    """Run a server of each kind that answers anything over TLS; give URL, transport and link."""

    async def script(socket: web.WebSocketResponse, _asked: dict[str, Any]) -> None:
        await socket.send_str(json.dumps(DONE))

    async def infer(_requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        yield _said("a")

    async with _websocket(script, tls=context) as (socket_url, _), _grpc(infer, tls=credentials) as grpc_url:
        yield [(socket_url, "websocket", WebSocketTransport), (grpc_url, "grpc", GrpcTransport)]


async def test_tls(certificate: tuple[Path, Path]):
    """Servers that require client certificates: a client that trusts their authority and has one is answered.

    A client without one is not, and a client that does not trust them gets the reason.
    """
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    pair = [(key.read_bytes(), cert.read_bytes())]
    credentials = grpc.ssl_server_credentials(pair, root_certificates=cert.read_bytes(), require_client_auth=True)
    known = Tls(ca=str(cert), cert=str(cert), key=str(key))
    async with _both(context, credentials) as served:
        for url, transport, link in served:
            async with link(_spec(url, transport, tls=known), _clock()) as welcome:
                exchange, reply = await _ask(welcome, transport)
            assert ("", True) == (exchange.error, reply.complete)
            async with link(_spec(url, transport, tls=Tls(ca=str(cert))), _clock()) as anonymous:
                exchange, reply = await _ask(anonymous, transport)
            assert exchange.error
            assert not reply.complete
            async with link(_spec(url, transport), _clock()) as doubting:
                exchange, _ = await _ask(doubting, transport)
            assert exchange.error.startswith("connect: tls: "), exchange.error
        insecure = _spec(served[0][0], "websocket", tls=Tls(insecure=True, cert=str(cert), key=str(key)))
        async with WebSocketTransport(insecure, _clock()) as careless:
            assert (await _ask(careless, "websocket"))[1].complete


def test_tls_that_grpcio_cannot_do_is_refused():
    """It has no way to leave a certificate unchecked."""
    spec = _spec("https://h", "grpc", tls=Tls(insecure=True))
    with pytest.raises(ValueError, match="certificate unchecked"):
        GrpcTransport(spec, _clock())
