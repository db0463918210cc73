"""OpenAI's responses endpoint: typed events over SSE, or one JSON object.

Visible text comes in response.output_text.delta and response.refusal.delta, reasoning in the deltas whose type begins
with response.reasoning, a call of a tool in the deltas of its arguments; every other delta is a tool's. The stream
ends with response.completed, response.incomplete or response.failed; [DONE] may follow.
"""

from __future__ import annotations

import msgspec

from loadgen.protocols.failures import NULL, failure_of
from loadgen.protocols.prompt import Prompt, Target, with_extra
from loadgen.protocols.sse import SseEvent
from loadgen.protocols.stream import Form, Seen
from loadgen.protocols.timings import Count, of_llamacpp, of_vllm

_VISIBLE = {"response.output_text.delta", "response.refusal.delta"}
# What a length limit is called here, and everywhere else.
_REASONS = {"max_output_tokens": "length", "max_tokens": "length"}


def encode_request(
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,
) -> tuple[str, bytes]:
    """Path and JSON body, the system prompt as `instructions`; `ignore_eos` is an extension, left out when false."""
    body: dict[str, object] = {"model": target.model, "input": [{"role": "user", "content": prompt.text}]}
    if prompt.system:
        body["instructions"] = prompt.system
    body |= {"max_output_tokens": max_tokens, "temperature": temperature, "stream": True, "store": False}
    if ignore_eos:
        body["ignore_eos"] = True
    return "/v1/responses", msgspec.json.encode(with_extra(body, target))


class _InputDetails(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: _InputDetails | None = None


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct, gc=False):
    type: str = ""
    content: list[_Part] | None = None


class _Incomplete(msgspec.Struct, gc=False):
    reason: str = ""


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    status: str | None = None
    output: list[_Item] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = NULL
    incomplete_details: _Incomplete | None = None
    metrics: msgspec.Raw = NULL


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    delta: msgspec.Raw = NULL
    response: _Response | None = None
    error: msgspec.Raw = NULL
    message: str | None = None
    timings: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_Event).decode


def _take(seen: Seen, event: SseEvent) -> None:
    """Add one event to what was seen. Raises what UNREADABLE lists."""
    payload = _decode(event.data)
    kind = payload.type or event.name
    # A failed response says its error in response.error, an error event in its own fields.
    if kind == "error" or (payload.response is None and bytes(payload.error) != b"null"):
        seen.fail(failure_of(payload.error, said=True, message=payload.message) or "no message")
    elif kind.endswith(".delta"):
        _delta(seen, kind, payload.delta, event.end)
    if payload.timings is not NULL:  # llama.cpp's stand beside the response, vLLM's in it
        found, told = of_llamacpp(payload.timings)
        seen.timings = found or seen.timings
        seen.count(None, None, told.cache_n, told.predicted_n)
    if payload.response is not None:
        _state(seen, payload.response)
        if kind in {"response.completed", "response.incomplete", "response.failed"}:
            seen.done_end = event.end


def _delta(seen: Seen, kind: str, raw: msgspec.Raw, end: int) -> None:
    if kind in _VISIBLE:
        seen.say(end, msgspec.json.decode(raw, type=str))
    elif kind.startswith("response.reasoning"):
        seen.say(end, "", msgspec.json.decode(raw, type=str))
    else:
        seen.say(end, "", tools=bytes(raw) not in {b"null", b'""'})


def _state(seen: Seen, response: _Response) -> None:
    """What a response object says of the whole: its id, and at the end status, usage and reason."""
    seen.response_id = seen.response_id or response.id or ""
    if response.metrics is not NULL:
        seen.timings = of_vllm(response.metrics) or seen.timings
    if (usage := response.usage) is not None:
        details = usage.input_tokens_details or _InputDetails()
        seen.count(usage.input_tokens, usage.output_tokens, details.cached_tokens)
    if response.status == "failed" or bytes(response.error) != b"null":
        seen.fail(failure_of(response.error, said=True) or "no message")
    elif response.status == "completed":
        seen.finish_reason = "stop"
    elif response.status in {"incomplete", "cancelled"}:
        reason = response.incomplete_details.reason if response.incomplete_details else response.status
        seen.finish_reason = _REASONS.get(reason, reason)


def _whole(seen: Seen, data: bytes) -> None:
    response = msgspec.json.decode(data, type=_Response)
    _state(seen, response)
    for item in response.output or ():
        if item.type == "message":
            seen.texts += [part.text or part.refusal or "" for part in item.content or ()]


FORM = Form(take=_take, whole=_whole)
