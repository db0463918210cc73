"""Anthropic's /v1/messages, as vLLM and SGLang serve it: typed events over SSE, or one JSON object.

Visible text comes in text_delta, reasoning in thinking_delta, a call of a tool with the name in its block's start and
its arguments in input_json_delta. Pings, signatures and the ends of blocks are no content. `message_start` has the id
and the input tokens, `message_delta` the reason and the output tokens; `message_stop` ends the stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.failures import CONTENT_FILTER, NULL, server_message, states_nothing
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState
from sidelight.loadgen.protocols.reading.timings import is_count
from sidelight.loadgen.protocols.request import RequestContent, json_body, messages_of

# The words of the other protocols for the same.
_REASONS = {
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "model_context_window_exceeded": "length",
    "tool_use": "tool_calls", "refusal": CONTENT_FILTER,
}  # fmt: skip
# Of a prompt `input_tokens` leaves out what was read from a cache, and what was written to one.
_CACHED, _ADDED = "cache_read_input_tokens", "cache_creation_input_tokens"


def body(asked: RequestContent) -> bytes:
    """Write a request; the system prompt is in `system`. Nothing can ask an engine to ignore the end of a sequence."""
    said = messages_of(asked.prompt)
    system = said.pop(0)["content"] if said[0].get("role") == "system" else None
    fields = {
        "model": asked.target.model,
        "messages": said,
        "system": system or None,
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "stream": True,
    }
    return json_body(fields, asked.target)


class _ContentPiece(msgspec.Struct, gc=False):
    """A block of content, or a piece of one."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _MessageState(msgspec.Struct, gc=False):
    id: str | None = None
    content: list[_ContentPiece] | None = None
    stop_reason: str | None = None
    usage: Any = None


class _MessageEvent(_MessageState, gc=False):
    type: str = ""
    message: _MessageState | None = None
    delta: _ContentPiece | None = None
    content_block: _ContentPiece | None = None
    error: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_MessageEvent).decode


def _take(seen: ReplyState, event: SseEvent) -> None:
    """Read an event or an unstreamed reply, which is the message itself."""
    payload = _MessageEvent(type="error") if event.name == "error" else _decode(event.data)
    if payload.type == "error" or not states_nothing(payload.error):
        seen.fail(server_message(event.data))
        return
    _state(seen, payload.message or payload)
    if payload.delta is not None and payload.delta.stop_reason:
        seen.finish(_REASONS.get(payload.delta.stop_reason, payload.delta.stop_reason))
    for block in (payload.content_block, payload.delta, *(payload.content or ())):
        if block is None or not (block.text or block.thinking or block.name or block.partial_json):
            continue
        seen.say(event.end, block.text or "", block.thinking or "", tools=bool(block.name or block.partial_json))
    if payload.type == "message_stop":
        seen.done_end = event.end


def _state(seen: ReplyState, message: _MessageState) -> None:
    """Record the id, the counts and the reason of a message or an event."""
    seen.response_id = seen.response_id or message.id or ""
    if message.stop_reason:
        seen.finish(_REASONS.get(message.stop_reason, message.stop_reason))
    if message.usage is not None:
        seen.usage(_with_cached(message.usage))


def _with_cached(usage: Any) -> Any:
    """Return a usage with the tokens of the cache among its input tokens."""
    if not isinstance(usage, dict) or not is_count(usage.get("input_tokens")):
        return usage
    of_cache = [usage[name] for name in (_CACHED, _ADDED) if is_count(usage.get(name))]
    return {
        "input_tokens": usage["input_tokens"] + sum(of_cache),
        "output_tokens": usage.get("output_tokens"),
        "cached_tokens": usage.get(_CACHED),
    }


FORM = Form(take=_take)
