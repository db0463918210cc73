"""The simulated engine as a server with vLLM's behaviour, apart from the text.

A client cannot tell it from vLLM's. As SGLang or TensorRT-LLM it differs in the requests before and beside a load: the
metrics page and where it is, where the version stands, which endpoints exist. Replies keep vLLM's form, which the
others share but for small things. What was recorded of SGLang is played: a reply's head comes with its first token, any
model name is answered, /health generates a token (without the second that it takes there), a client that leaves is
noticed with a later output, and `n` above 1 is a prefill and n requests.

`running` starts one inside this process, `serve` runs one until it is cancelled, and `python -m sidelight.simulator` is
a process
around `serve`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from sidelight.simulator.api import native, websocket
from sidelight.simulator.api.gateway import SimulatedGateway
from sidelight.simulator.api.requests import (
    DetokenizeRequest,
    Generation,
    RefusedError,
    TokenizeRequest,
    chat_token_ids,
    check_model,
    read,
    read_generation,
)
from sidelight.simulator.api.responses import DONE, event_template, token_events, usage_event, whole_reply
from sidelight.simulator.api.samples import several
from sidelight.simulator.api.service import (
    SERVICE,
    Service,
    answering,
    engine_stopped,
    errors_as_json,
    reply_id,
    said,
    streamed,
    submitted,
    url_of,
    whole,
)
from sidelight.simulator.engine.driver import EngineDriver, anchored_clock
from sidelight.simulator.engine.history import RequestRecord, StepOutcome, TokenOutput
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.engine.tokenizer import END_OF_SEQUENCE, UnknownTokenError, decode, encode
from sidelight.simulator.rooms import PATH, met, rooms_of, wait_in_room
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.telemetry.pages import VERSIONS, page_of
from sidelight.simulator.telemetry.pages.trtllm import TrtllmPage
from sidelight.simulator.telemetry.perf_metrics import PerfMetrics
from sidelight.simulator.telemetry.truth import TruthLog

if TYPE_CHECKING:
    from sidelight.simulator.telemetry.spans import SpanExporter

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}

_MAX_BODY_BYTES = 64 * 1024 * 1024
_SHUTDOWN_S = 0.5


async def serve(settings: SimulatorSettings, on_ready: Callable[[str, str], None]) -> None:
    """Run a simulator until this task is cancelled; `on_ready` gets its URLs, of HTTP and of gRPC, once it listens.

    Raises OSError when it cannot listen or cannot write the truth file.
    """
    grpc_urls: list[str] = []
    async with running(settings, on_grpc=grpc_urls.append) as url:
        on_ready(url, "".join(grpc_urls))
        await asyncio.Event().wait()


@asynccontextmanager
async def running(
    settings: SimulatorSettings, *, truth: TruthLog | None = None, on_grpc: Callable[[str], None] = lambda _: None
) -> AsyncIterator[str]:
    """Run a simulator in this event loop during the context, and yield its URL.

    The URL has no slash at the end.

    A caller that reads the true records in this process passes a TruthLog, which replaces `settings.truth`.
    `on_grpc` gets the URL of gRPC where the settings want one. Requests in flight at the end are aborted. Raises
    OSError as `serve`.
    """
    async with AsyncExitStack() as logs:
        log = logs.enter_context(TruthLog(settings.truth, settings.truth_steps) if truth is None else truth)
        spans = None
        if settings.otlp_endpoint:
            from sidelight.simulator.telemetry.spans import SpanExporter  # noqa: PLC0415  # heavy, and seldom wanted

            spans = await logs.enter_async_context(SpanExporter(settings.otlp_target, settings))
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[errors_as_json])
        service = app[SERVICE] = _service(settings, log, spans)
        app.add_routes(_routes(settings))
        app.cleanup_ctx.append(rooms_of)
        # A client that goes away cancels its handler, and so aborts its request.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        stepping = asyncio.create_task(service.driver.run())
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            # The engine ends first: that ends the streams, so that there is nothing to wait for.
            try:
                # As wide as real servers have it (uvicorn 2048): a stalled engine still takes connections.
                await web.TCPSite(runner, settings.host, settings.port, backlog=4096).start()
                if settings.grpc_port is not None:
                    from sidelight.simulator.api import grpc as grpc_server  # noqa: PLC0415  # as above

                    served = grpc_server.serving(service, settings.host, settings.grpc_port)
                    on_grpc(url_of(settings.host, await stack.enter_async_context(served)))
                yield url_of(settings.host, runner.addresses[0][1])
            finally:
                stepping.cancel()
                await asyncio.wait([stepping])
        if not stepping.cancelled():
            stepping.result()


def _service(settings: SimulatorSettings, log: TruthLog, spans: SpanExporter | None) -> Service:
    """Return an engine with all that sees its steps: its page, the truth, records of requests and spans."""
    clock = anchored_clock()
    page, perf_metrics = page_of(settings, clock), PerfMetrics(settings.perf_metrics_max_requests, clock)

    def on_step(outcome: StepOutcome) -> None:
        page.observe(outcome)
        log.add_step(outcome)
        for record in outcome.finished:
            log.add(record)
            perf_metrics.add(record)
            if spans is not None:
                spans.add(record)
        if outcome.lost and settings.oom_exits:
            for _, record in outcome.lost:
                log.add(record)
            os._exit(1)  # as a process that the kernel ends

    def on_abort(record: RequestRecord) -> None:
        page.abort(record)
        log.add(record)

    is_sglang, limits = settings.engine == "sglang", settings.engine_settings
    if is_sglang and limits.kv_role == "decode":  # what the prefill engine sent is there before a request is queued
        limits = replace(limits, kv_async=False, kv_latency_s=0.0, kv_bytes_per_s=math.inf)
    engine = SimulatedEngine(limits, keep_steps=is_sglang and spans is not None)
    return Service(
        settings=settings,
        driver=EngineDriver(engine, clock=clock, on_step=on_step, on_abort=on_abort, late_aborts=is_sglang),
        gateway=SimulatedGateway(settings.gateway, settings.engine_settings.seed),
        page=page,
        perf_metrics=perf_metrics,
        clock=clock,
    )


def _routes(settings: SimulatorSettings) -> list[web.RouteDef]:
    routes = [
        web.post("/v1/chat/completions", partial(_generate, chat=True)),
        web.post("/v1/completions", partial(_generate, chat=False)),
        web.get("/v1/models", answering(_models)),
        *(web.get(path, _health) for path in ("/health", "/health_generate")),
        *native.ROUTES,
        web.get(websocket.PATH, websocket.stream),
    ]
    if settings.engine == "sglang":
        routes += [web.get("/metrics", _metrics), web.post(PATH, wait_in_room)]
        routes += [web.get("/flush_cache", _flush_cache), web.post("/flush_cache", _flush_cache)]
        # The second of each is the older name.
        routes += [web.get(path, answering(_server_info)) for path in ("/server_info", "/get_server_info")]
        routes += [web.get(path, answering(_model_info)) for path in ("/model_info", "/get_model_info")]
    elif settings.engine == "trtllm":
        routes += [web.get("/version", answering(_version))]
        routes += [web.get("/metrics", answering(_iterations)), web.get("/prometheus/metrics", _metrics)]
        routes += [
            web.get("/perf_metrics", answering(lambda service: service.perf_metrics.take())),
            web.get("/steady_clock_offset", answering(lambda service: service.perf_metrics.exchange())),
        ]
    else:
        routes += [web.get("/version", answering(_version)), web.get("/metrics", _metrics)]
        routes += [web.post("/reset_prefix_cache", _reset_prefix_cache)]
    if settings.tokenize and settings.engine != "trtllm":
        routes += [web.post("/tokenize", _tokenize), web.post("/detokenize", _detokenize)]
    return routes


async def _generate(request: web.Request, *, chat: bool) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await request.read()
    # vLLM's arrival too: the body is here, its rendering and tokenizing begin.
    arrival_ns = service.clock()
    settings = service.settings
    generation = read_generation(body, chat=chat, settings=settings)
    client_id, traceparent = request.headers.get("X-Request-Id", ""), request.headers.get("traceparent", "")
    if generation.samples > 1:
        sent = {"client_id": client_id, "traceparent": traceparent}
        return await several(request, generation, arrival_ns, chat=chat, **sent)
    name = reply_id(service, "chatcmpl" if chat else "cmpl", client_id)

    def stated(record: RequestRecord | None) -> tuple[RequestRecord | None, RequestRecord | None]:
        drafted = record if settings.per_request_spec_decode_metrics else None
        return record if settings.per_request_metrics else None, drafted

    async with (
        met(request, generation) as meeting,
        submitted(service, generation, name, arrival_ns, traceparent, client_id=client_id, meeting=meeting) as (
            stream,
            info,
        ),
    ):
        if generation.stream:
            template = event_template(info, chat=chat, continuous_usage=generation.continuous_usage)

            def events(outputs: list[TokenOutput]) -> bytes:
                parts = [token_events(template, outputs)]
                if outputs[-1].finish_reason is not None:
                    if generation.include_usage:
                        parts.append(usage_event(template, outputs[-1].output_tokens, *stated(stream.record)))
                    parts.append(DONE)
                return b"".join(parts)

            kind = "text/event-stream; charset=utf-8"
            late = settings.engine == "sglang"
            return await streamed(request, stream, kind, events=events, failed=_stream_failed, late_head=late)
        outputs, record = await whole(stream)
    timed, drafted = stated(record)
    reply = whole_reply(info, outputs, chat=chat, record=timed, drafted=drafted)
    if generation.remote_decode:
        moved = {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": info.prompt_tokens}
        reply = reply[:-1] + b',"kv_transfer_params":%b}' % msgspec.json.encode(moved)
    return said(msgspec.Raw(reply))


def _stream_failed(message: str) -> bytes:
    """Return the last events of a stream after the death of vLLM's engine."""
    return b"data: %b\n\n%b" % (engine_stopped(message), DONE)


def _models(service: Service) -> object:
    settings = service.settings
    model = {
        "id": settings.model,
        "object": "model",
        "created": service.clock() // 1_000_000_000,
        "owned_by": _OWNERS[settings.engine],
        "root": settings.model,
        "parent": None,
        "max_model_len": settings.engine_settings.max_model_len,
    }
    if settings.engine == "trtllm":
        model = {key: model[key] for key in ("id", "object", "created", "owned_by")}
    adapters = (
        {**model, "id": name, "parent": settings.model, "max_model_len": None} for name in settings.lora_modules
    )
    return {"object": "list", "data": [model, *adapters]}


async def _health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    if service.settings.engine == "sglang":
        probe = Generation(prompt_token_ids=(END_OF_SEQUENCE,), max_tokens=1, ignore_eos=True, stream=False)
        arrival_ns = service.clock()
        name = f"HEALTH_CHECK_{arrival_ns / 1e9}"
        async with submitted(service, probe, name, arrival_ns, role="probe") as (stream, _):
            await whole(stream)
    return web.Response()


def _version(service: Service) -> object:
    return {"version": VERSIONS[service.settings.engine]}


def _server_info(service: Service) -> object:
    settings, limits = service.settings, service.settings.engine_settings
    # SGLang's has all its options beside these.
    return {
        "model_path": settings.model,
        "served_model_name": settings.model,
        "context_length": limits.max_model_len,
        "max_running_requests": limits.max_num_seqs,
        "max_total_num_tokens": limits.kv_blocks * limits.block_size,
        "page_size": limits.block_size,
        "enable_metrics": True,
        "internal_states": [],
        "version": VERSIONS["sglang"],
    }


def _model_info(service: Service) -> object:
    model = service.settings.model
    return {"model_path": model, "tokenizer_path": model, "is_generation": True}


async def _metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[SERVICE].page.page(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    """Empty the prefix cache; where a request runs nothing happens, and like vLLM this answer does not say so."""
    request.app[SERVICE].driver.reset_prefix_cache()
    return web.Response()


async def _flush_cache(request: web.Request) -> web.Response:
    text = (
        "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
        "operation will not be performed.)\n"
    )
    return web.Response(text=text, status=200 if request.app[SERVICE].driver.reset_prefix_cache() else 400)


def _iterations(service: Service) -> object:
    return service.page.take_iterations() if isinstance(service.page, TrtllmPage) else []


async def _tokenize(request: web.Request) -> web.Response:
    asked = read(await request.read(), TokenizeRequest)
    settings = request.app[SERVICE].settings
    check_model(asked.model, settings.only_model)
    if asked.messages is not None:
        token_ids = chat_token_ids(asked.messages, open_reply=asked.add_generation_prompt is not False)
    elif asked.prompt is not None:
        token_ids = encode(asked.prompt)
    else:
        raise RefusedError(400, "either prompt or messages must be given")
    max_model_len = settings.engine_settings.max_model_len
    answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": None}
    return said(answer)


async def _detokenize(request: web.Request) -> web.Response:
    asked = read(await request.read(), DetokenizeRequest)
    check_model(asked.model, request.app[SERVICE].settings.only_model)
    try:
        text = decode(asked.tokens)
    except UnknownTokenError as error:
        raise RefusedError(400, f"{error}", param="tokens") from None
    return said({"text" if request.app[SERVICE].settings.engine == "sglang" else "prompt": text})
