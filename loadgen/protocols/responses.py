"""OpenAI's responses endpoint: typed events over SSE, or one JSON object.

Visible text comes in response.output_text.delta and response.refusal.delta, reasoning in the deltas whose type begins
with response.reasoning, a call of a tool in the deltas of its arguments; every other delta is a tool's. The stream
ends with response.completed, response.incomplete or response.failed; [DONE] may follow.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.failures import NULL, Payload, stated, states_nothing
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState, reader
from sidelight.loadgen.protocols.reading.timings import of_vllm
from sidelight.loadgen.protocols.request import RequestContent, json_body

_VISIBLE = {"response.output_text.delta", "response.refusal.delta"}
# What a length limit is called here, and everywhere else.
_REASONS = {"max_output_tokens": "length", "max_tokens": "length"}


def body(asked: RequestContent) -> bytes:
    """Write a request; the system prompt is in `instructions`; `ignore_eos`, an extension, is left out when false."""
    fields = {
        "model": asked.target.model,
        "input": asked.prompt.messages or [{"role": "user", "content": asked.prompt.text}],
        "instructions": asked.prompt.system or None,
        "max_output_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "stream": True,
        "store": False,
        "ignore_eos": asked.ignore_eos or None,
    }
    return json_body(fields, asked.target)


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    text: str | None = None
    refusal: str | None = None


class _OutputItem(msgspec.Struct, gc=False):
    type: str = ""
    content: list[_Part] | None = None


class _Incomplete(msgspec.Struct, gc=False):
    reason: str = ""


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    status: str | None = None
    output: list[_OutputItem] | None = None
    usage: Any = None
    error: msgspec.Raw = NULL
    incomplete_details: _Incomplete | None = None
    metrics: msgspec.Raw = NULL


class _Event(Payload, gc=False):
    type: str = ""
    delta: msgspec.Raw = NULL
    response: _Response | None = None
    timings: msgspec.Raw = NULL


def _take(seen: ReplyState, event: _Event, end: int) -> None:
    if event.type.endswith(".delta"):
        _delta(seen, event.type, event.delta, end)
    if event.timings is not NULL:  # llama.cpp's stand beside the response, vLLM's in it
        seen.llamacpp(event.timings)
    if event.response is not None:
        _state(seen, event.response)
        if event.type in {"response.completed", "response.incomplete", "response.failed"}:
            seen.done_end = end


def _delta(seen: ReplyState, kind: str, raw: msgspec.Raw, end: int) -> None:
    if kind in _VISIBLE:
        seen.say(end, msgspec.json.decode(raw, type=str))
    elif kind.startswith("response.reasoning"):
        seen.say(end, "", msgspec.json.decode(raw, type=str))
    else:
        seen.say(end, "", tools=not states_nothing(raw))


def _state(seen: ReplyState, response: _Response) -> None:
    """Record the state in a response object. It is the id, and at the end status, usage and reason."""
    seen.response_id = seen.response_id or response.id or ""
    if response.metrics is not NULL:
        seen.time(of_vllm(response.metrics))
    if response.usage is not None:
        seen.usage(response.usage)
    error = stated(response.error)
    if response.status == "failed" or error is not None:
        seen.fail(error or "no message")
    elif response.status == "completed":
        seen.finish("stop")
    elif response.status in {"incomplete", "cancelled"}:
        reason = response.incomplete_details.reason if response.incomplete_details else response.status
        seen.finish(_REASONS.get(reason, reason))


_read = reader(_Event, _take)


def _take_event(seen: ReplyState, event: SseEvent) -> None:
    """Read an event or an unstreamed reply. An unstreamed reply is the response object itself."""
    if seen.streamed:
        _read(seen, event)
        return
    response = msgspec.json.decode(event.data, type=_Response)
    _state(seen, response)
    for item in response.output or ():
        if item.type == "message":
            seen.texts += [part.text or part.refusal or "" for part in item.content or ()]


FORM = Form(take=_take_event)
