"""Streaming over a WebSocket, in a framing of our own: a JSON object a message (docs/reference/protocols.md).

The client sends one request and gets `delta` messages until one `done` or `error`; then it may send the next.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sidelight.loadgen.protocols.reading.content import calls_tool
from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.failures import NULL
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState
from sidelight.loadgen.protocols.reading.timings import WebSocket, timings_of
from sidelight.loadgen.protocols.request import RequestContent, json_body, messages_of


def body(asked: RequestContent) -> bytes:
    """Write the one message of a request; the transport adds `id` and `traceparent`."""
    fields = {
        "model": asked.target.model,
        "messages": messages_of(asked.prompt),
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "ignore_eos": asked.ignore_eos or None,
    }
    return json_body(fields, asked.target)


class Message(msgspec.Struct, gc=False):
    """A server's message; `type` is delta, done or error, and selects the other fields."""

    type: str
    text: str = ""
    reasoning: str = ""
    tool_call: msgspec.Raw = NULL
    response_id: str = ""
    finish_reason: str = ""
    usage: Any = None
    timings: WebSocket | None = None
    code: int = 0
    message: str = ""


_decode = msgspec.json.Decoder(Message).decode


def _take(seen: ReplyState, event: SseEvent) -> None:
    message = _decode(event.data)
    if message.type == "delta":
        seen.say(event.end, message.text, message.reasoning, tools=calls_tool(message.tool_call))
    elif message.type == "error":
        seen.fail(message.message or "no message")
        seen.done_end = event.end
    elif message.type == "done":
        if message.usage is not None:
            seen.usage(message.usage)
        seen.response_id = message.response_id
        seen.finish(message.finish_reason)
        seen.timings = timings_of("websocket", message.timings)
        seen.done_end = event.end


FORM = Form(messages=True, take=_take)
