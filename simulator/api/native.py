"""The engines' own HTTP endpoints, each in its dialect, and those that name the model."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from sidelight.simulator.api.dialects import exo, messages, ollama, responses, sglang, tgi
from sidelight.simulator.api.dialects.dialect import Dialect
from sidelight.simulator.api.requests import Generation, RefusedError
from sidelight.simulator.api.service import SERVICE, Service, answering, reply_id, streamed, submitted, whole
from sidelight.simulator.engine.history import TokenOutput


async def _answer(request: web.Request, dialect: Dialect) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await request.read()
    arrival_ns = service.clock()
    try:
        return await _reply(request, dialect, dialect.read(body, service.settings), arrival_ns)
    except RefusedError as error:
        status, refusal = dialect.refused(error)
        return web.Response(body=refusal, status=status, content_type="application/json")


async def _reply(request: web.Request, dialect: Dialect, asked: Generation, arrival_ns: int) -> web.StreamResponse:
    """Send the reply to a generation request. Raises RefusedError before there is a reply."""
    service = request.app[SERVICE]
    client_id, traceparent = request.headers.get("X-Request-Id", ""), request.headers.get("traceparent", "")
    name = reply_id(service, dialect.prefix, client_id)
    async with submitted(service, asked, name, arrival_ns, traceparent, client_id=client_id) as (stream, info):
        if asked.stream and dialect.event is not None:
            event, so_far = dialect.event, list[TokenOutput]()

            def events(outputs: list[TokenOutput]) -> bytes:
                parts = [] if so_far else [dialect.opening(info)]
                for output in outputs:
                    so_far.append(output)
                    parts.append(event(info, so_far, None if output.finish_reason is None else stream.record))
                return b"".join(parts)

            return await streamed(request, stream, dialect.content_type, events=events, failed=dialect.failed)
        outputs, record = await whole(stream)
        return web.Response(body=dialect.whole(info, outputs, record), content_type="application/json")


async def _generate(request: web.Request) -> web.StreamResponse:
    """SGLang and TGI call different things /generate: a text, or inputs."""
    return await _answer(request, tgi.WHOLE if b'"inputs"' in await request.read() else sglang.DIALECT)


def _info(service: Service) -> object:
    limit = service.settings.engine_settings.max_model_len
    return {"model_id": service.settings.model, "max_input_tokens": limit - 1, "max_total_tokens": limit}


def _tags(service: Service) -> object:
    return {"models": [{"name": service.settings.model, "model": service.settings.model}]}


ROUTES = [
    web.post("/v1/responses", partial(_answer, dialect=responses.DIALECT)),
    web.post("/v1/messages", partial(_answer, dialect=messages.DIALECT)),
    web.post("/generate", _generate),
    web.post("/generate_stream", partial(_answer, dialect=tgi.STREAMED)),
    web.post("/api/chat", partial(_answer, dialect=ollama.DIALECT)),
    web.post("/bench/chat/completions", partial(_answer, dialect=exo.DIALECT)),
    web.get("/api/tags", answering(_tags)),
    web.get("/info", answering(_info)),
]
