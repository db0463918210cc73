"""OpenAI's chat and completions endpoints: how a request is written and how its reply is read, over SSE or whole.

Beside `content` and `text` it counts `reasoning_content`, `reasoning`, `refusal` and tool calls as content; role-only
and usage events are none. What vLLM, SGLang, llama.cpp, Dynamo, TGI and exo add of their own times is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from loadgen.protocols import timings
from loadgen.protocols.failures import NULL, failure_of
from loadgen.protocols.prompt import Prompt, Target, joined, messages_of, with_extra
from loadgen.protocols.sse import SseEvent, events
from loadgen.protocols.stream import Form, Seen
from loadgen.protocols.timings import Count

# exo says its statistics in a comment before [DONE], which other clients skip.
_EXO_STATS = "generation_stats"
_EXO_COMMENT = re.compile(rb"^: generation_stats (\{.*\})\r?$", re.MULTILINE)


def encode_request(
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,
) -> tuple[str, bytes]:
    """The path (from the server's root) and the JSON body of one request; equal arguments give equal bytes.

    `ignore_eos` is an extension of vLLM, SGLang and others; left out when false.
    """
    chat = target.endpoint != "completions"
    body: dict[str, object] = {"model": target.model}
    body |= {"messages": messages_of(prompt)} if chat else {"prompt": joined(prompt)}
    body |= {"max_tokens": max_tokens, "temperature": temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        body["ignore_eos"] = True
    name = "chat/completions" if chat else "completions"
    return f"/v1/{name}", msgspec.json.encode(with_extra(body, target))


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    meta_info: msgspec.Raw = NULL


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Payload(msgspec.Struct, gc=False):
    id: str | None = None
    object: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = NULL
    message: str | None = None
    metrics: msgspec.Raw = NULL
    timings: msgspec.Raw = NULL
    nvext: msgspec.Raw = NULL
    generation_stats: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_Payload).decode


def _take(seen: Seen, event: SseEvent) -> None:
    """Add one event to what was seen. Raises what UNREADABLE lists."""
    if event.name == _EXO_STATS:
        seen.timings = timings.of_exo(event.data) or seen.timings
        return
    payload = _decode(event.data)
    if not _described(seen, payload, event.name):
        return
    text = reasoning = ""
    tools = role = False
    for choice in payload.choices or ():
        # A content filter is told whatever else the other choices end with.
        if choice.finish_reason and seen.finish_reason != "content_filter":
            seen.finish_reason = choice.finish_reason
        delta = choice.delta
        visible = choice.text or ""
        if delta is not None:
            visible = (delta.content or "") + (delta.refusal or "")
            reasoning += delta.reasoning_content or delta.reasoning or ""
            tools = tools or bool(delta.tool_calls)
            role = role or delta.role is not None
        if visible and choice.index == 0:
            seen.texts.append(visible)
        text += visible
    if role and seen.number == 0 and not (text or reasoning or tools):
        seen.role_only_first = True
    elif payload.choices:
        seen.content(event.end, text, reasoning, tools=tools)


def _whole(seen: Seen, data: bytes) -> None:
    """Add a JSON reply. Raises what UNREADABLE lists."""
    payload = _decode(data)
    if not _described(seen, payload, ""):
        return
    for choice in payload.choices or ():
        seen.finish_reason = seen.finish_reason or choice.finish_reason or ""
        said = choice.message
        if choice.index == 0:
            seen.texts.append(choice.text or "" if said is None else (said.content or "") + (said.refusal or ""))


def _described(seen: Seen, payload: _Payload, event_name: str) -> bool:
    """Note all but the content; False when the payload is an error."""
    said = payload.object == "error" or event_name == "error"
    if (message := failure_of(payload.error, said=said, message=payload.message)) is not None:
        seen.fail(message)
        return False
    seen.response_id = seen.response_id or payload.id or ""
    if (usage := payload.usage) is not None:
        details = usage.prompt_tokens_details or _PromptDetails()
        seen.count(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens)
    _extras(seen, payload)
    return True


def _extras(seen: Seen, payload: _Payload) -> None:
    """Times of the server's own. A later event, which knows more, replaces what an earlier one said."""
    if payload.metrics is not NULL:
        seen.timings = timings.of_vllm(payload.metrics) or seen.timings
    if payload.timings is not NULL:
        found, told = timings.of_llamacpp(payload.timings)
        seen.timings = found or seen.timings
        seen.count(None, None, told.cache_n, told.predicted_n)
    if payload.nvext is not NULL:
        seen.timings = timings.of_dynamo(payload.nvext) or seen.timings
    if payload.generation_stats is not NULL:
        seen.timings = timings.of_exo(payload.generation_stats) or seen.timings
    for choice in payload.choices or ():
        if choice.meta_info is not NULL:
            seen.timings = timings.of_sglang(choice.meta_info) or seen.timings


def _split(data: bytes) -> Iterator[SseEvent]:
    stats = _EXO_COMMENT.search(data) if b": generation_stats " in data else None
    return events(data) if stats is None else _with_stats(data, stats)


def _with_stats(data: bytes, stats: re.Match[bytes]) -> Iterator[SseEvent]:
    told = False
    for event in events(data):
        if not told and event.end > stats.end():
            told = True
            yield SseEvent(_EXO_STATS, stats[1], stats.end())
        yield event


FORM = Form(split=_split, take=_take, whole=_whole)
