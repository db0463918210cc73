"""Streaming over a WebSocket, in a framing of our own (docs/protocols.md): a JSON object a message, both ways.

The client sends one request and gets `delta` messages until one `done` or `error`; then it may send the next. The link
logs each message as a line, so that a reply is read as NDJSON.
"""

from __future__ import annotations

import msgspec

from loadgen.protocols.failures import NULL
from loadgen.protocols.lines import lines
from loadgen.protocols.prompt import Prompt, Target, messages_of, with_extra
from loadgen.protocols.reply import ServerTimings
from loadgen.protocols.sse import SseEvent
from loadgen.protocols.stream import Form, Seen
from loadgen.protocols.timings import Count

PATH = "/v1/stream"


def encode_request(
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,
) -> tuple[str, bytes]:
    """Path and the one message of a request; the link adds `id` and `traceparent`."""
    body: dict[str, object] = {"model": target.model, "messages": messages_of(prompt)}
    body |= {"max_tokens": max_tokens, "temperature": temperature}
    if ignore_eos:
        body["ignore_eos"] = True
    return PATH, msgspec.json.encode(with_extra(body, target))


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None


class _Timings(msgspec.Struct, gc=False):
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None


class Message(msgspec.Struct, gc=False):
    """What a server says; `type` is delta, done or error, and tells which of the other fields count."""

    type: str
    text: str = ""
    reasoning: str = ""
    tool_call: msgspec.Raw = NULL
    response_id: str = ""
    finish_reason: str = ""
    usage: _Usage | None = None
    timings: _Timings | None = None
    code: int = 0
    message: str = ""


_decode = msgspec.json.Decoder(Message).decode


def _take(seen: Seen, event: SseEvent) -> None:
    """Add one message to what was seen. Raises what UNREADABLE lists."""
    message = _decode(event.data)
    if message.type == "delta":
        seen.say(event.end, message.text, message.reasoning, tools=bytes(message.tool_call) != b"null")
    elif message.type == "error":
        seen.fail(message.message or "no message")
        seen.done_end = event.end
    elif message.type == "done":
        usage = message.usage or _Usage()
        seen.count(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        seen.response_id, seen.finish_reason = message.response_id, message.finish_reason
        if message.timings is not None:
            told = msgspec.structs.asdict(message.timings)
            known = {name: value for name, value in told.items() if value is not None}
            seen.timings = ServerTimings(source="websocket", **known)
        seen.done_end = event.end


def _whole(seen: Seen, data: bytes) -> None:
    _take(seen, SseEvent("", data, len(data)))


FORM = Form(kinds=frozenset({"application/x-ndjson"}), split=lines, take=_take, whole=_whole)
