"""A router before a prefill and a decode engine, like the proxy of vLLM's examples.

A request goes to the prefill engine, which is asked for one token and no stream, and then, with the KV transfer that it
answered, to the decode engine, whose reply is passed through. Everything else is asked of the decode engine. It sends
no spans, and passes on the trace and the id of a request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import urlsplit

import msgspec
from aiohttp import ClientConnectionError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

from sidelight.simulator.api.requests import RefusedError, read
from sidelight.simulator.api.service import errors_as_json, url_of
from sidelight.simulator.engine.driver import anchored_clock
from sidelight.simulator.settings import RouterSettings
from sidelight.simulator.telemetry.truth import opened

_PASSED_ON = ("traceparent", "tracestate", "x-request-id", "authorization")
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Router:
    """The connections to both engines, the truth file and the clock, ns Unix."""

    settings: RouterSettings
    engines: ClientSession
    truth: TextIO | None
    clock: Callable[[], int]


_ROUTER = web.AppKey("router", _Router)


@asynccontextmanager
async def routing(settings: RouterSettings) -> AsyncIterator[str]:
    """Run a router in this event loop during the context, and yield its URL.

    Raises OSError when it cannot listen or cannot write the truth file.
    """
    engines = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None))
    with ExitStack() as files:
        truth = opened(settings.truth)
        if truth is not None:
            files.enter_context(truth)
        async with engines:
            app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[errors_as_json])
            app[_ROUTER] = _Router(settings=settings, engines=engines, truth=truth, clock=anchored_clock())
            app.add_routes([web.post(f"/v1/{name}", _route) for name in ("completions", "chat/completions")])
            app.add_routes([web.get(path, _of_decode) for path in ("/v1/models", "/version", "/health")])
            app.add_routes([web.post(path, _of_decode) for path in ("/tokenize", "/detokenize")])
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
            await runner.setup()
            try:
                await web.TCPSite(runner, settings.host, settings.port, backlog=4096).start()
                yield url_of(settings.host, runner.addresses[0][1])
            finally:
                await runner.cleanup()


async def _route(request: web.Request) -> web.StreamResponse:
    router = request.app[_ROUTER]
    stamps: dict[str, Any] = {"received_ns": router.clock()}
    body = read(await request.read(), dict[str, Any])
    headers = _headers(request)
    headers.setdefault("x-request-id", uuid.uuid4().hex)
    asked = {name: value for name, value in body.items() if name not in {"stream_options", "min_tokens"}}
    asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _REMOTE_DECODE}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    try:
        if router.settings.at_once:
            return await _route_at_once(request, body, headers, stamps)
        stamps["prefill_call_ns"] = router.clock()
        async with await _asked(request, router.settings.prefill_url, msgspec.json.encode(asked), headers) as reply:
            answer = await reply.read()
        stamps["prefill_reply_ns"] = router.clock()
        if reply.status != 200:
            return web.Response(body=answer, status=reply.status, content_type=reply.content_type)
        body["kv_transfer_params"] = msgspec.json.decode(answer).get("kv_transfer_params")
        if router.settings.hold_s:
            await asyncio.sleep(router.settings.hold_s)
        stamps["decode_call_ns"] = router.clock()
        async with await _asked(request, router.settings.decode_url, msgspec.json.encode(body), headers) as reply:
            return await _passed_through(request, reply, stamps)
    finally:
        if router.truth is not None:
            line = {"request_id": headers["x-request-id"]} | stamps | {"end_ns": router.clock()}
            router.truth.write(msgspec.json.encode(line).decode() + "\n")


async def _route_at_once(
    request: web.Request, body: dict[str, Any], headers: dict[str, str], stamps: dict[str, Any]
) -> web.StreamResponse:
    """Ask both engines at once, to meet in a room at the prefill engine; a refusal of either is the answer."""
    router = request.app[_ROUTER]
    await asyncio.sleep(router.settings.hold_s)
    prefill = urlsplit(router.settings.prefill_url)
    number = uuid.uuid4().int >> 65
    room = {"bootstrap_host": prefill.hostname, "bootstrap_port": prefill.port or 80, "bootstrap_room": number}
    content = msgspec.json.encode(body | room)
    stamps["prefill_call_ns"] = stamps["decode_call_ns"] = router.clock()
    urls = (router.settings.prefill_url, router.settings.decode_url)
    asked = [asyncio.create_task(_asked(request, url, content, headers)) for url in urls]
    try:
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in asked if task.done())
        reply = await (first if first.exception() or first.result().status != 200 else asked[1])
        async with reply:
            return await _passed_through(request, reply, stamps)
    finally:
        for task in asked:
            if not task.cancel() and task.exception() is None:
                task.result().release()


async def _passed_through(request: web.Request, reply: ClientResponse, stamps: dict[str, Any]) -> web.StreamResponse:
    """Answer with a reply as its pieces come, the first of them with a stamp."""
    response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
    await response.prepare(request)
    async for piece in reply.content.iter_any():
        stamps.setdefault("first_ns", request.app[_ROUTER].clock())
        await response.write(piece)
    await response.write_eof()
    return response


async def _of_decode(request: web.Request) -> web.StreamResponse:
    url = request.app[_ROUTER].settings.decode_url
    async with await _asked(request, url, await request.read(), _headers(request)) as reply:
        return await _passed_through(request, reply, {})


async def _asked(request: web.Request, url: str, body: bytes, headers: dict[str, str]) -> ClientResponse:
    """Send a request of the router on to an engine. Raises RefusedError (502) where it cannot be reached."""
    try:
        engines = request.app[_ROUTER].engines
        return await engines.request(request.method, url + request.path, data=body, headers=headers)
    except ClientConnectionError as error:
        raise RefusedError(502, f"An engine cannot be reached: {error}", kind="BadGatewayError") from None


def _headers(request: web.Request) -> dict[str, str]:
    """Return the headers that an engine gets of a request."""
    passed_on = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    return {"Content-Type": "application/json"} | passed_on
