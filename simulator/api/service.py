"""Objects shared by the request handlers of all protocols."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
from aiohttp import web

from sidelight.simulator.api.gateway import OPEN, SimulatedGateway
from sidelight.simulator.api.requests import Generation, RefusedError
from sidelight.simulator.api.responses import ReplyInfo, refused
from sidelight.simulator.engine.driver import EngineDriver, EngineStoppedError, TokenStream
from sidelight.simulator.engine.history import EngineRequest, Meeting, RequestRecord, Role, TokenOutput
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.telemetry.pages import EnginePage
from sidelight.simulator.telemetry.perf_metrics import PerfMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The engine in real time, with its gateway, page, request records, settings and clock.

    The clock is in ns Unix.
    """

    settings: SimulatorSettings
    driver: EngineDriver
    gateway: SimulatedGateway
    page: EnginePage
    perf_metrics: PerfMetrics
    clock: Callable[[], int]


SERVICE = web.AppKey("service", Service)


def said(answer: object, status: int = 200) -> web.Response:
    """Answer with JSON as short as vLLM's."""
    return web.Response(body=msgspec.json.encode(answer), status=status, content_type="application/json")


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer with the error as vLLM does."""
    try:
        return await handler(request)
    except RefusedError as error:
        status, body = refused(error)
        return said(msgspec.Raw(body), status)
    except web.HTTPException as error:
        return said({"detail": error.reason}, error.status)
    except EngineStoppedError as error:
        return said(msgspec.Raw(engine_stopped(f"{error}")), 500)


def engine_stopped(message: str) -> bytes:
    """Return the body of an answer after the death of vLLM's engine."""
    return refused(RefusedError(500, message, kind="InternalServerError"))[1]


def answering(answer: Callable[[Service], object]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers with something of the service as JSON."""

    async def handler(request: web.Request) -> web.Response:
        return said(answer(request.app[SERVICE]))

    return handler


def reply_id(service: Service, prefix: str, client_id: str) -> str:
    """Return the id of a reply: from the client's own, if sent, except for SGLang."""
    return uuid.uuid4().hex if service.settings.engine == "sglang" else f"{prefix}-{client_id or uuid.uuid4().hex}"


def url_of(host: str, port: int) -> str:
    """Return the URL of a server that listens there, with an address to reach it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  named, not bound
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


@asynccontextmanager
async def submitted(
    service: Service,
    generation: Generation,
    response_id: str,
    arrival_ns: int,
    traceparent: str = "",
    *,
    client_id: str = "",
    role: Role = "request",
    meeting: Meeting | None = None,
) -> AsyncIterator[tuple[TokenStream, ReplyInfo]]:
    """Hand a request to the gateway, then to the engine; at the block's end it is abandoned unless it has finished.

    Raises EngineStoppedError when the engine does not run any more, and RefusedError as the gateway does.
    """
    request = EngineRequest(
        request_id=response_id,
        prompt_token_ids=generation.prompt_token_ids,
        max_tokens=generation.max_tokens,
        ignore_eos=generation.ignore_eos,
        streamed=generation.stream,
        traceparent=traceparent,
        client_id=client_id,
        role=role,
        samples=generation.samples,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        remote_prefill=generation.remote_prefill,
        adapter=generation.adapter,
        meeting=meeting,
    )
    info = ReplyInfo(
        response_id=response_id,
        model=generation.adapter or service.settings.model,
        created_s=arrival_ns // 1_000_000_000,
        prompt_tokens=len(generation.prompt_token_ids),
        reasoning_tokens=service.settings.reasoning_tokens,
    )
    gateway = OPEN if role == "probe" else service.gateway
    with gateway.admitted():
        if wait_s := gateway.input_s(info.prompt_tokens):
            await asyncio.sleep(wait_s)
            arrival_ns = service.clock()
        gateway.check(generation.prompt_token_ids)
        stream = service.driver.submit(request, arrival_ns, gateway.hold(streamed=generation.stream))
        try:
            yield stream, info
        finally:
            service.driver.abandon(stream)


async def whole(stream: TokenStream) -> tuple[list[TokenOutput], RequestRecord]:
    """Wait for all tokens of a request. Raises EngineStoppedError."""
    outputs = await stream.take()
    while stream.record is None or outputs[-1].finish_reason is None:
        outputs += await stream.take()
    return outputs, stream.record


async def streamed(
    request: web.Request,
    stream: TokenStream,
    content_type: str,
    *,
    events: Callable[[list[TokenOutput]], bytes],
    failed: Callable[[str], bytes],
    late_head: bool = False,
) -> web.StreamResponse:
    """Stream a reply made by `events` from the tokens as they come.

    Tokens that came together go out in one write. Like vLLM, it says 200 before the request is scheduled; with
    `late_head`, once there is a first token. When the engine stops, `failed` says so; before a late head
    EngineStoppedError is raised. A client that disconnects is not a server error.
    """
    response = web.StreamResponse(headers={"Content-Type": content_type})
    outputs = await stream.take() if late_head else []
    with suppress(ConnectionResetError):
        await response.prepare(request)
        while True:
            if outputs:
                await response.write(events(outputs))
                if outputs[-1].finish_reason is not None:
                    break
            try:
                outputs = await stream.take()
            except EngineStoppedError as error:
                await response.write(failed(f"{error}"))
                break
        await response.write_eof()
    return response
