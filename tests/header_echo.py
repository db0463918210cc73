"""An engine that records which trace headers reach it, and gateways before it that treat them as gateways do.

Both send their spans before their replies end: who has a whole reply has the spans too.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import SERVER, body

PIECES, GAP_S, HELD_S = 12, 0.01, 0.03
TRACE_HEADERS = ("traceparent", "tracestate", "X-Request-Id")
PROTOBUF = {"Content-Type": "application/x-protobuf"}

# passes: begins a span below its caller's, and states its first output; plain: states nothing of it; unchanged: passes
# the headers on and sends no span; renews: begins a trace; strips: drops the headers; renames: gives the reply an id of
# its own too; unsampled: clears the flag; buffers: sends a reply when it is whole; json: answers in one piece; cached:
# answers without the engine
Way = Literal["passes", "plain", "unchanged", "renews", "strips", "renames", "unsampled", "buffers", "json", "cached"]


@dataclass(slots=True)
class Echo:
    """What reached the engine: the trace headers of each completion; and where it is."""

    url: str = ""
    seen: list[dict[str, str]] = field(default_factory=list)


@asynccontextmanager
async def header_echo(collector: str = "") -> AsyncIterator[Echo]:
    """Stream a reply as vLLM does; with a collector, send a span of each request whose trace is sampled."""
    echo = Echo()
    async with aiohttp.ClientSession() as session:

        async def complete(request: web.Request) -> web.StreamResponse:
            arrival_ns, wanted = time.time_ns(), (await request.json())["max_tokens"]
            echo.seen.append({name: request.headers[name] for name in TRACE_HEADERS if name in request.headers})
            response_id = f"chatcmpl-{request.headers.get('X-Request-Id') or secrets.token_hex(8)}"
            reply = await _streaming(request)
            first_ns = time.time_ns()
            for piece in range(min(PIECES, wanted)):
                await asyncio.sleep(GAP_S)
                await reply.write(_event(response_id, "w", None if piece < min(PIECES, wanted) - 1 else "length"))
            _, trace, parent, flags = request.headers.get("traceparent", f"-{secrets.token_hex(16)}--01").split("-")
            if collector and flags == "01":
                decode_s = (time.time_ns() - first_ns) / 1e9 - GAP_S
                latencies = {
                    "time_in_queue": 0.0,
                    "time_in_model_prefill": GAP_S,
                    "time_to_first_token": GAP_S,
                    "time_in_model_decode": decode_s,
                    "e2e": GAP_S + decode_s,
                }
                attributes = {f"gen_ai.latency.{name}": value for name, value in latencies.items()}
                served = span(
                    "llm_request", trace, parent, arrival_ns, {**attributes, "gen_ai.request.id": response_id}
                )
                await send(session, collector, "vllm", served)
            await reply.write(b"data: [DONE]\n\n")
            return reply

        app = web.Application()
        app.router.add_get("/v1/models", _models)
        app.router.add_post("/v1/chat/completions", complete)
        async with TestServer(app) as server:
            echo.url = f"http://127.0.0.1:{server.port}"
            yield echo


@asynccontextmanager
async def gateway(way: Way, upstream: str, collector: str, *, software: str = "") -> AsyncIterator[str]:
    """Hold each request for HELD_S, and pass it on in one of the ways; yield the gateway's URL.

    `software` is what its replies say that it is.
    """
    async with aiohttp.ClientSession() as session:

        async def passed(request: web.Request) -> web.StreamResponse:
            begun_ns = time.time_ns()
            await asyncio.sleep(HELD_S)
            _, trace, parent, flags = request.headers["traceparent"].split("-")
            if way == "renews":
                trace, parent = secrets.token_hex(16), ""
            identity = secrets.token_hex(8)
            headers = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
            if way in ("passes", "plain", "renews"):
                headers["traceparent"] = f"00-{trace}-{identity}-{flags}"
            elif way == "unsampled":
                headers["traceparent"] = f"00-{trace}-{parent}-00"
            elif way in ("strips", "renames"):
                headers = {}
            if way in ("json", "cached"):
                await request.read()
                return web.json_response(_whole()) if way == "json" else await _from_cache(request)
            first_ns = 0
            async with session.post(upstream + request.path, data=await request.read(), headers=headers) as answer:
                reply, pieces = await _streaming(request, software), []
                async for piece in answer.content.iter_any():
                    first_ns = first_ns or time.time_ns()
                    pieces.append(piece.replace(b"chatcmpl", b"renamed") if way == "renames" else piece)
                    if way != "buffers" and b"[DONE]" not in piece:
                        await reply.write(pieces[-1])
            if way in ("passes", "plain", "renews"):
                first = {"gen_ai.response.time_to_first_chunk": (first_ns - begun_ns) / 1e9} if way != "plain" else {}
                served = span("POST", trace, parent, begun_ns, {"http.route": request.path, **first}, identity=identity)
                await send(session, collector, "my-gateway", served)
            await reply.write(b"".join(pieces) if way == "buffers" else pieces[-1])
            return reply

        async def listed(_request: web.Request) -> web.Response:
            async with session.get(f"{upstream}/v1/models") as answer:
                return web.json_response(await answer.json())

        app = web.Application()
        app.router.add_get("/v1/models", listed)
        app.router.add_post("/v1/chat/completions", passed)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"


def span(
    name: str, trace: str, parent: str, start_ns: int, attributes: Mapping[str, str | float], *, identity: str = ""
) -> Span:
    """Return a server's span that ends now; ids are hex."""
    ended = Span(
        trace_id=bytes.fromhex(trace),
        span_id=bytes.fromhex(identity or secrets.token_hex(8)),
        parent_span_id=bytes.fromhex(parent),
        name=name,
        kind=SERVER,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=time.time_ns(),
    )
    for key, value in attributes.items():
        attribute = ended.attributes.add(key=key).value
        if isinstance(value, str):
            attribute.string_value = value
        else:
            attribute.double_value = value
    return ended


async def send(session: aiohttp.ClientSession, collector: str, service: str, *spans: Span) -> None:
    """Export spans by OTLP over HTTP."""
    async with session.post(f"{collector}/v1/traces", data=body(spans, service=service), headers=PROTOBUF) as reply:
        assert 200 == reply.status


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]})


async def _streaming(request: web.Request, software: str = "") -> web.StreamResponse:
    reply = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", **({"Server": software} if software else {})}
    )
    await reply.prepare(request)
    return reply


async def _from_cache(request: web.Request) -> web.StreamResponse:
    reply = await _streaming(request)
    await reply.write(_event("cached", "w", "stop") + b"data: [DONE]\n\n")
    return reply


def _event(response_id: str, text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'id': response_id, 'choices': [choice]})}\n\n".encode()


def _whole() -> dict[str, object]:
    message = {"role": "assistant", "content": "w"}
    return {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
