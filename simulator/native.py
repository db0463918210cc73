"""The engines' own endpoints over HTTP, each in its dialect, and where they say which model they have."""

from __future__ import annotations

import uuid
from contextlib import suppress
from functools import partial

import msgspec
from aiohttp import web

from simulator.dialects import Dialect, Told, exo, ollama, responses, sglang, tgi
from simulator.driver import EngineStoppedError, TokenStream
from simulator.history import TokenOutput
from simulator.requests import RefusedError
from simulator.service import SERVICE, submitted


async def _answer(request: web.Request, dialect: Dialect) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await request.read()
    arrival_ns = service.clock()
    try:
        asked = dialect.read(body, service.settings)
    except RefusedError as error:
        status, refusal = dialect.refused(error)
        return web.Response(body=refusal, status=status, content_type="application/json")
    response_id = f"{dialect.prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
    traceparent = request.headers.get("traceparent", "")
    async with submitted(service, asked, response_id, arrival_ns, traceparent) as (stream, told):
        if asked.stream:
            response = web.StreamResponse(headers={"Content-Type": dialect.content_type})
            # A client that leaves is no error of the server's.
            with suppress(ConnectionResetError):
                await _stream(request, response, dialect, stream, told)
            return response
        outputs = await stream.take()
        while stream.record is None or outputs[-1].finish_reason is None:
            outputs += await stream.take()
        return web.Response(body=dialect.whole(told, outputs, stream.record), content_type="application/json")


async def _stream(
    request: web.Request, response: web.StreamResponse, dialect: Dialect, stream: TokenStream, told: Told
) -> None:
    """Send one event a token as the tokens come; those that came together go out in one write."""
    if dialect.event is None:
        raise RuntimeError("a request to a dialect without streams wants one")
    await response.prepare(request)
    said: list[TokenOutput] = []
    opening = dialect.opening(told)
    while not said or said[-1].finish_reason is None:
        try:
            outputs = await stream.take()
        except EngineStoppedError as error:
            await response.write(dialect.failed(f"{error}"))
            break
        events = [opening]
        opening = b""
        for output in outputs:
            said.append(output)
            events.append(dialect.event(told, said, None if output.finish_reason is None else stream.record))
        await response.write(b"".join(events))
    await response.write_eof()


async def _generate(request: web.Request) -> web.StreamResponse:
    """SGLang and TGI call different things /generate: a text, or inputs."""
    return await _answer(request, tgi.WHOLE if b'"inputs"' in await request.read() else sglang.DIALECT)


async def _tags(request: web.Request) -> web.Response:
    model = request.app[SERVICE].settings.model
    return _json({"models": [{"name": model, "model": model}]})


async def _info(request: web.Request) -> web.Response:
    settings = request.app[SERVICE].settings
    limit = settings.engine_settings.max_model_len
    return _json({"model_id": settings.model, "max_input_tokens": limit - 1, "max_total_tokens": limit})


def _json(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


ROUTES = [
    web.post("/v1/responses", partial(_answer, dialect=responses.DIALECT)),
    web.post("/generate", _generate),
    web.post("/generate_stream", partial(_answer, dialect=tgi.STREAMED)),
    web.post("/api/chat", partial(_answer, dialect=ollama.DIALECT)),
    web.post("/bench/chat/completions", partial(_answer, dialect=exo.DIALECT)),
    web.get("/api/tags", _tags),
    web.get("/info", _info),
]
