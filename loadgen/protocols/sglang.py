"""SGLang's native /generate: SSE whose every event repeats the whole text so far, with meta_info.

With --incremental-streaming-output an event holds only what is new. Which of the two it is shows: a text that is whole
each time begins with the one before it, throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from sidelight.loadgen.protocols.reading.events import SseEvent, events
from sidelight.loadgen.protocols.reading.failures import UNREADABLE, Payload
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState, reader
from sidelight.loadgen.protocols.reading.timings import SglangMeta, of_sglang_meta
from sidelight.loadgen.protocols.request import RequestContent, joined, json_body


def body(asked: RequestContent) -> bytes:
    """Write a request; the endpoint serves one model and takes no name, no roles and no chat template."""
    sampling: dict[str, object] = {"max_new_tokens": asked.max_tokens, "temperature": asked.temperature}
    if asked.ignore_eos:
        sampling["ignore_eos"] = True
    return json_body({"text": joined(asked.prompt), "sampling_params": sampling, "stream": True}, asked.target)


class _Finish(msgspec.Struct, gc=False):
    type: str = ""
    message: str | None = None


class _SGLangChunk(Payload, gc=False):
    text: str = ""
    meta_info: SglangMeta | None = None


_decode = msgspec.json.Decoder(_SGLangChunk).decode


def _split(data: bytes, at: int = 0) -> Iterator[SseEvent]:
    """Yield the events, each with its new text only."""
    streamed = list(events(data, at))
    chunks = [_chunk(event.data) for event in streamed]
    texts = [chunk.text for chunk in chunks if chunk is not None and chunk.text]
    if not all(later.startswith(earlier) for earlier, later in pairwise(texts)):
        yield from streamed
        return
    said = 0
    for event, chunk in zip(streamed, chunks, strict=True):
        if chunk is None or not chunk.text:
            yield event
            continue
        chunk.text, said = chunk.text[said:], len(chunk.text)
        yield SseEvent(event.name, msgspec.json.encode(chunk), event.end)


def _chunk(data: bytes) -> _SGLangChunk | None:
    try:
        return _decode(data)
    except UNREADABLE:
        return None


def _take(seen: ReplyState, chunk: _SGLangChunk, end: int) -> None:
    if (meta := chunk.meta_info) is not None:
        _described(seen, meta)
    seen.say(end, chunk.text)


def _described(seen: ReplyState, meta: SglangMeta) -> None:
    seen.response_id = seen.response_id or meta.id or ""
    seen.count(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)
    seen.timings = of_sglang_meta(meta) or seen.timings
    if bytes(meta.finish_reason) != b"null":
        finish = msgspec.json.decode(meta.finish_reason, type=_Finish | str)
        if isinstance(finish, str):  # before 0.3
            seen.finish(finish)
        elif finish.type == "abort":
            seen.fail(finish.message or "the request was aborted")
        else:
            seen.finish(finish.type)


FORM = Form(split=_split, take=reader(_SGLangChunk, _take))
