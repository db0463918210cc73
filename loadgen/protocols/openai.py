"""OpenAI's chat and completions endpoints, and exo's /bench/chat/completions: writing requests and reading replies.

Beside `content` and `text` it counts `reasoning_content`, `reasoning`, `refusal` and tool calls as content; role-only
and usage events are none. What vLLM, SGLang, llama.cpp, Dynamo, TGI and exo add of their own times is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from sidelight.loadgen.protocols.reading import timings
from sidelight.loadgen.protocols.reading.content import calls_tool
from sidelight.loadgen.protocols.reading.events import SseEvent, events
from sidelight.loadgen.protocols.reading.failures import NULL, UNREADABLE, Payload, failure_of
from sidelight.loadgen.protocols.reading.runs import PROBE, PlainEvent, frame_of, run_of
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState, reader
from sidelight.loadgen.protocols.request import RequestContent, joined, json_body, messages_of

# exo says its statistics in a comment before [DONE], which other clients skip.
_EXO_STATS = "generation_stats"
_EXO_COMMENT = re.compile(rb"^: generation_stats (\{.*\})\r?$", re.MULTILINE)


def chat_body(asked: RequestContent) -> bytes:
    """Write a chat; `ignore_eos` is an extension of vLLM, SGLang and others, left out when false."""
    return json_body(
        {"model": asked.target.model, "messages": messages_of(asked.prompt)} | _streamed(asked), asked.target
    )


def completions_body(asked: RequestContent) -> bytes:
    """Write the same with one text, since the endpoint has no roles."""
    return json_body({"model": asked.target.model, "prompt": joined(asked.prompt)} | _streamed(asked), asked.target)


def _streamed(asked: RequestContent) -> dict[str, object]:
    return {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "stream": True,
        # vLLM refuses it in a request that asks for no stream.
        "stream_options": {"include_usage": True} if asked.target.extra.get("stream", True) else None,
        "ignore_eos": asked.ignore_eos or None,
    }


def exo_body(asked: RequestContent) -> bytes:
    """Write the body of a request to exo's bench.

    The bench empties the prefix cache, bans the end of a sequence and does not stream.

    So there are no token times of the client's: the server's are all there is. exo's streaming chat is the protocol
    `chat`, which reads the same statistics.
    """
    fields = {
        "model": asked.target.model,
        "messages": messages_of(asked.prompt),
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "stream": False,
    }
    return json_body(fields, asked.target)


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


class _ChatChunk(Payload, gc=False):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: Any = None
    metrics: msgspec.Raw = NULL
    timings: msgspec.Raw = NULL
    nvext: msgspec.Raw = NULL
    generation_stats: msgspec.Raw = NULL


def _take(seen: ReplyState, chunk: _ChatChunk, end: int) -> None:
    seen.response_id = seen.response_id or chunk.id or ""
    if chunk.usage is not None:
        seen.usage(chunk.usage)
    _extras(seen, chunk)
    role = said = False
    for choice in chunk.choices or ():
        if choice.finish_reason:
            seen.finish(choice.finish_reason)
        if choice.meta_info is not NULL:
            seen.timings = timings.of_sglang(choice.meta_info) or seen.timings
        visible, thought, called, speaks = _said(choice)
        is_first = choice.index not in seen.choices and choice.index not in seen.roles
        if speaks and is_first and not (visible or thought or called):
            seen.roles.add(choice.index)
            role = seen.number == 0
            continue
        said = True
        seen.content(end, visible, thought, tools=called, choice=choice.index)
        if visible and choice.index == 0:
            seen.texts.append(visible)
    if role and not said:
        seen.role_only_first = True


def _said(choice: _Choice) -> tuple[str, str, bool, bool]:
    """Return a choice's visible text, its reasoning, and two flags.

    They are: whether it calls tools, and whether it names a role.
    """
    said = choice.delta or choice.message
    if said is None:
        return choice.text or "", "", False, False
    return (
        (said.content or "") + (said.refusal or ""),
        said.reasoning_content or said.reasoning or "",
        any(map(calls_tool, said.tool_calls or ())),
        said.role is not None,
    )


def _extras(seen: ReplyState, chunk: _ChatChunk) -> None:
    """Record the server's own times."""
    if chunk.metrics is not NULL:
        seen.time(timings.of_vllm(chunk.metrics))
    if chunk.timings is not NULL:
        seen.llamacpp(chunk.timings)
    if chunk.nvext is not NULL:
        seen.time(timings.of_dynamo(chunk.nvext))
    if chunk.generation_stats is not NULL:
        seen.time(timings.of_exo(chunk.generation_stats))


_decode = msgspec.json.Decoder(_ChatChunk).decode
_read = reader(_ChatChunk, _take)


def _take_event(seen: ReplyState, event: SseEvent) -> None:
    if event.name == _EXO_STATS:
        seen.time(timings.of_exo(event.data))
    else:
        _read(seen, event)


@lru_cache(maxsize=1)  # asked once a run, of the same body
def _has_exo_mark(data: bytes) -> bool:
    return b": generation_stats " in data


def _split(data: bytes, at: int) -> Iterator[SseEvent]:
    stats = _EXO_COMMENT.search(data) if _has_exo_mark(data) else None
    return events(data, at) if stats is None else _with_stats(data, stats)


def _with_stats(data: bytes, stats: re.Match[bytes]) -> Iterator[SseEvent]:
    given = False
    for event in events(data):
        if not given and event.end > stats.end():
            given = True
            yield SseEvent(_EXO_STATS, stats[1], stats.end())
        yield event


def _run(seen: ReplyState, data: bytes, event: SseEvent) -> int:
    """Read a run of following events that differ only in their choice's text.

    Each has one choice only. Returns the position behind the run, -1 where there is none.
    """
    frame = frame_of(data, event)
    # exo's statistics count once, before the first event behind them.
    if frame is None or _has_exo_mark(data):
        return -1
    if (plain := _plain(frame.probe)) is None or (run := run_of(data, frame)) is None:
        return -1
    seen.response_id = seen.response_id or plain.response_id
    seen.say_all(run, reasoning=plain.reasoning, choice=plain.choice)
    return run.ends[-1] + 1


def _plain(data: bytes) -> PlainEvent | None:
    """Return the meaning of an event that carries only one choice's text. The text may be any; here it is PROBE.

    Return None for any other event.
    """
    try:
        chunk = _decode(data)
    except UNREADABLE:
        return None
    if chunk.usage is not None or failure_of(chunk, data) is not None or not chunk.choices or len(chunk.choices) > 1:
        return None
    (choice,) = chunk.choices
    said = choice.delta or choice.message or _Delta()
    extras = (chunk.metrics, chunk.timings, chunk.nvext, chunk.generation_stats, choice.meta_info)
    stated = any(extra is not NULL and bytes(extra) != b"null" for extra in extras)
    if stated or choice.finish_reason or said.tool_calls:
        return None
    # Where the one reasoning is empty the other counts.
    ambiguous = said.reasoning_content and said.reasoning
    visible, thought, *_ = _said(choice)
    if (visible, thought) not in {(PROBE, ""), ("", PROBE)} or ambiguous:
        return None
    return PlainEvent(chunk.id or "", choice.index, reasoning=not visible)


FORM = Form(split=_split, run=_run, plain=_plain, take=_take_event)
