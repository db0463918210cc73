"""Streaming over a WebSocket: a JSON object a message, one request at a time (docs/reference/protocols.md)."""

from __future__ import annotations

import uuid

import msgspec
from aiohttp import WSMsgType, web

from sidelight.simulator.api.dialects.dialect import Positive, generation, text_of
from sidelight.simulator.api.requests import ChatMessage, RefusedError, chat_token_ids, check_model, read
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.api.service import SERVICE, Service, submitted
from sidelight.simulator.engine.driver import EngineStoppedError, TokenStream
from sidelight.simulator.engine.history import RequestRecord

PATH = "/v1/stream"


class _WebSocketRequest(msgspec.Struct):
    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: Positive | None = None
    ignore_eos: bool = False
    id: str = ""
    traceparent: str = ""


async def stream(request: web.Request) -> web.WebSocketResponse:
    """Answer requests until the client goes."""
    socket = web.WebSocketResponse(max_msg_size=0, compress=False)
    await socket.prepare(request)
    try:
        async for message in socket:
            if message.type not in {WSMsgType.TEXT, WSMsgType.BINARY}:
                break
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            await _answer(socket, request.app[SERVICE], data)
    except ConnectionResetError:
        pass  # a client that disconnects is not a server error
    return socket


async def _answer(socket: web.WebSocketResponse, service: Service, data: bytes) -> None:
    arrival_ns = service.clock()
    settings = service.settings
    try:
        asked = read(data, _WebSocketRequest)
        check_model(asked.model, settings.only_model)
        token_ids = chat_token_ids(asked.messages)
        wanted = generation(token_ids, asked.max_tokens, settings, ignore_eos=asked.ignore_eos, stream=True)
    except RefusedError as error:
        await _say(socket, {"type": "error", "code": error.status, "message": error.message})
        return
    response_id = f"ws-{asked.id or uuid.uuid4().hex}"
    try:
        async with submitted(service, wanted, response_id, arrival_ns, asked.traceparent) as (tokens, info):
            await _deltas(socket, tokens, info)
    except EngineStoppedError as error:
        await _say(socket, {"type": "error", "code": 500, "message": f"{error}"})
    except RefusedError as error:
        await _say(socket, {"type": "error", "code": error.status, "message": error.message})


async def _deltas(socket: web.WebSocketResponse, tokens: TokenStream, info: ReplyInfo) -> None:
    """Send a message a token, and the last one. Raises EngineStoppedError."""
    number = 0
    while tokens.record is None or number < tokens.record.output_tokens:
        for output in await tokens.take():
            number += 1
            await _say(socket, {"type": "delta", "text": text_of([output])})
    await _say(socket, _done(info, tokens.record))


def _done(info: ReplyInfo, record: RequestRecord) -> dict[str, object]:
    return {
        "type": "done",
        "response_id": info.response_id,
        "finish_reason": record.finish_reason,
        "usage": {
            "prompt_tokens": info.prompt_tokens,
            "completion_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
        },
        "timings": {
            "queue_ms": record.wait_s * 1e3,
            "prefill_ms": record.prefill_s * 1e3,
            "decode_ms": record.decode_s * 1e3,
            "ttft_ms": (record.wait_s + record.prefill_s) * 1e3,
            "e2e_ms": record.e2e_s * 1e3,
        },
    }


async def _say(socket: web.WebSocketResponse, message: dict[str, object]) -> None:
    await socket.send_str(msgspec.json.encode(message).decode())
