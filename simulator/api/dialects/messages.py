"""Anthropic's /v1/messages, as vLLM serves it: a block of text between the start of a message and its end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidelight.simulator.api.dialects.dialect import Dialect, Positive, generation, sse, text_of
from sidelight.simulator.api.requests import (
    ChatMessage,
    ContentPart,
    Generation,
    RefusedError,
    chat_token_ids,
    check_model,
    read,
)
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.settings import SimulatorSettings

_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class _MessagesRequest(msgspec.Struct):
    model: str
    messages: list[ChatMessage]
    max_tokens: Positive
    system: str | list[ContentPart] | None = None
    stream: bool = False


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    wanted = read(body, _MessagesRequest)
    check_model(wanted.model, settings.only_model)
    system = [] if wanted.system is None else [ChatMessage(role="system", content=wanted.system)]
    return generation(
        chat_token_ids([*system, *wanted.messages]),
        wanted.max_tokens,
        settings,
        ignore_eos=False,  # the API has no such field
        stream=wanted.stream,
    )


def _opening(info: ReplyInfo) -> bytes:
    # Its usage has no part of the cache yet.
    message = _message(info) | {"usage": {"input_tokens": info.prompt_tokens, "output_tokens": 0}}
    return _typed("message_start", message=message)


def _event(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    count, thought, text = len(outputs), info.reasoning_tokens, text_of(outputs[-1:])
    kind, index = ("thinking", 0) if count <= thought else ("text", int(thought > 0))
    delta = _typed("content_block_delta", index=index, delta={"type": f"{kind}_delta", kind: text}) if text else b""
    if count in (1, thought + 1):
        before = _typed("content_block_stop", index=0) if index else b""
        delta = before + _typed("content_block_start", index=index, content_block={"type": kind, kind: ""}) + delta
    if record is None:
        return delta
    ended = {"stop_reason": _REASONS[record.finish_reason], "stop_sequence": None}
    last = _typed("message_delta", delta=ended, usage=_usage(info, outputs, record))
    return delta + _typed("content_block_stop", index=index) + last + _typed("message_stop")


def _whole(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    ended = {"stop_reason": _REASONS[record.finish_reason], "usage": _usage(info, outputs, record)}
    thought = info.reasoning_tokens
    content = [{"type": "thinking", "thinking": text_of(outputs[:thought])}] if thought else []
    content.append({"type": "text", "text": text_of(outputs[thought:])})
    return msgspec.json.encode(_message(info) | ended | {"content": content})


def _message(info: ReplyInfo) -> dict[str, object]:
    return {"id": info.response_id, "type": "message", "role": "assistant", "content": [], "model": info.model}


def _usage(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> dict[str, int]:
    cached = record.cached_tokens
    counts = {"input_tokens": info.prompt_tokens - cached, "output_tokens": len(outputs)}
    return counts | {"cache_read_input_tokens": cached}


def _typed(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, name=kind)


def _failed(message: str) -> bytes:
    return _typed("error", error={"type": "api_error", "message": message})


def _refused(error: RefusedError) -> tuple[int, bytes]:
    kind = _ERRORS.get(error.status, "invalid_request_error")
    return error.status, msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


DIALECT = Dialect(
    prefix="chatcmpl", read=_read, opening=_opening, event=_event, whole=_whole, failed=_failed, refused=_refused
)
