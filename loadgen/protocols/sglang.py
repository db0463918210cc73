"""SGLang's native /generate: SSE whose every event repeats the whole text so far, with meta_info.

With --incremental-streaming-output an event holds only what is new. Which of the two it is shows: a text that is whole
each time begins with the one before it, throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from loadgen.protocols.failures import NULL, UNREADABLE, failure_of
from loadgen.protocols.prompt import Prompt, Target, joined, with_extra
from loadgen.protocols.sse import SseEvent, events
from loadgen.protocols.stream import Form, Seen
from loadgen.protocols.timings import SglangMeta, of_sglang_meta


def encode_request(
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,
) -> tuple[str, bytes]:
    """Path and JSON body; the endpoint serves one model and takes no name, no roles and no chat template."""
    sampling: dict[str, object] = {"max_new_tokens": max_tokens, "temperature": temperature}
    if ignore_eos:
        sampling["ignore_eos"] = True
    body = {"text": joined(prompt), "sampling_params": sampling, "stream": True}
    return "/generate", msgspec.json.encode(with_extra(body, target))


class _Finish(msgspec.Struct, gc=False):
    type: str = ""
    message: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    text: str = ""
    meta_info: SglangMeta | None = None
    error: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_Chunk).decode


def _split(data: bytes) -> Iterator[SseEvent]:
    """The events, each with only the text that is new."""
    found = list(events(data))
    chunks = [_chunk(event.data) for event in found]
    texts = [chunk.text for chunk in chunks if chunk is not None and chunk.text]
    if not all(later.startswith(earlier) for earlier, later in pairwise(texts)):
        yield from found
        return
    said = 0
    for event, chunk in zip(found, chunks, strict=True):
        if chunk is None or not chunk.text:
            yield event
            continue
        chunk.text, said = chunk.text[said:], len(chunk.text)
        yield SseEvent(event.name, msgspec.json.encode(chunk), event.end)


def _chunk(data: bytes) -> _Chunk | None:
    try:
        return _decode(data)
    except UNREADABLE:
        return None


def _take(seen: Seen, event: SseEvent) -> None:
    """Add one event to what was seen. Raises what UNREADABLE lists."""
    chunk = _decode(event.data)
    if _described(seen, chunk, event.name):
        seen.say(event.end, chunk.text)


def _whole(seen: Seen, data: bytes) -> None:
    chunk = _decode(data)
    if _described(seen, chunk, ""):
        seen.texts.append(chunk.text)


def _described(seen: Seen, chunk: _Chunk, event_name: str) -> bool:
    """Note all but the content; False when the event is an error."""
    if (message := failure_of(chunk.error, said=event_name == "error")) is not None:
        seen.fail(message)
        return False
    meta = chunk.meta_info
    if meta is None:
        return True
    seen.response_id = seen.response_id or meta.id or ""
    seen.count(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)
    seen.timings = of_sglang_meta(meta) or seen.timings
    if bytes(meta.finish_reason) != b"null":
        finish = msgspec.json.decode(meta.finish_reason, type=_Finish | str)
        if isinstance(finish, str):  # before 0.3
            seen.finish_reason = finish
        elif finish.type == "abort":
            seen.fail(finish.message or "the request was aborted")
        else:
            seen.finish_reason = finish.type
    return True


FORM = Form(split=_split, take=_take, whole=_whole)
