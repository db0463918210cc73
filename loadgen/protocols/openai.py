"""OpenAI's chat and completions endpoints: how a request is written and how its reply is read, over SSE or whole.

What counts as content: `content` and `text`, and also `reasoning_content`, `reasoning`, `refusal` and tool calls, since
the model generated and the client waited for them. Role-only and usage events do not. The first token is the first
content that is not blank, at the moment its complete data line was read (draft-gaikwad, sections first-token-def and
http-sse). Token counts are the server's `usage`, never the number of events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.http1 import Head, ProtocolError, dechunk, is_chunked, parse_head
from loadgen.protocols.sse import SseEvent, events

Int64s = npt.NDArray[np.int64]

_DONE = b"[DONE]"
_MESSAGE_CHARS = 300

# What decoding JSON raises on what a server may send: bytes that are no UTF-8 and deep nesting are no DecodeError.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# A count beyond what a double holds exactly is nonsense, and beyond int64 it would not fit the log.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server and the model asked there; `base_url` may end in /v1 or be the root."""

    base_url: str
    model: str
    endpoint: Literal["chat", "completions"] = "chat"


def root_url(base_url: str) -> str:
    """The server's root, where /tokenize and /metrics live: the base without a trailing slash and without /v1."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def encode_request(
    target: Target,
    prompt_text: str,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,
    stream: bool = True,
) -> tuple[str, bytes]:
    """The path (from the server's root) and the JSON body of one request; equal arguments give equal bytes.

    `ignore_eos` is an extension of vLLM, SGLang and others; left out when false. With `stream`, usage is asked for.
    """
    body: dict[str, object] = {"model": target.model}
    if target.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt_text}]
    else:
        body["prompt"] = prompt_text
    body |= {"max_tokens": max_tokens, "temperature": temperature, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if ignore_eos:
        body["ignore_eos"] = True
    name = "chat/completions" if target.endpoint == "chat" else "completions"
    return f"/v1/{name}", msgspec.json.encode(body)


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Payload(msgspec.Struct, gc=False):
    id: str | None = None
    object: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")
    message: str | None = None
    detail: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct, gc=False):
    message: str = ""


_decode = msgspec.json.Decoder(_Payload).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one reply said and when; stamps and counts are -1 where missing.

    first_output_ns     the first event the model generated something for, if only blanks or nothing visible
    chunk_ns            int64[m]: one stamp an event with content that is not empty (blank ones included)
    complete            a finish reason or [DONE] was seen, and no error
    done                [DONE] was seen, or a whole JSON reply
    done_ns             when the [DONE] event, or the last byte of a whole JSON reply, was read
    error               "" or "kind: message", kind http_<status>, server (an error event under 200) or protocol
    role_only_first     the first event carried a role and no content
    blank_before_first  content events before the first token: whitespace only
    """

    first_output_ns: int = -1
    first_token_ns: int = -1
    last_token_ns: int = -1
    chunk_ns: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    output_tokens: int = -1
    input_tokens: int = -1
    finish_reason: str = ""
    error: str = ""
    complete: bool = False
    done: bool = False
    done_ns: int = -1
    role_only_first: bool = False
    blank_before_first: int = 0
    response_id: str = ""


def read_reply(http_status: int, head: bytes, body: bytes, reads_ns: Int64s, read_ends: Int64s) -> Reply:
    """Read a reply from the bytes on the wire and the stamps of the reads that brought them.

    head       the raw response head; empty when none came
    body       the wire body, chunk framing included, whole or torn anywhere
    reads_ns   int64[k]: when each read returned
    read_ends  int64[k], ascending: length of `body` after each read

    Never raises on what a server may send: what cannot be read is `error`. A JSON reply (not a stream) has no token
    times. Any status but 200 is an error with the server's message.
    """
    if not head:
        return Reply()
    try:
        parsed = parse_head(head)
        data, end_ns = _content(parsed, body, reads_ns, read_ends)
    except ProtocolError as error:
        return Reply(error=f"protocol: {error}")
    if http_status != 200:
        return Reply(error=f"http_{http_status}: {_server_message(data)}", done=True)
    kind = parsed.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (not kind and data.lstrip()[:1] == b"{"):
        return _read_json(data, end_ns)
    if kind not in {"", "text/event-stream"}:
        return Reply(error=f"protocol: the reply is {kind}, not an event stream", done=True)
    return _read_stream(data, end_ns)


class _Stamps:
    """Maps a position in the decoded body to the stamp of the read that brought the byte before it."""

    def __init__(self, reads_ns: Int64s, read_ends: Int64s, data_starts: list[int], wire_starts: list[int]) -> None:
        self._reads_ns, self._read_ends = reads_ns, read_ends
        self._data_starts = np.asarray(data_starts, np.int64)
        self._wire_starts = np.asarray(wire_starts, np.int64)

    def at(self, ends: list[int]) -> Int64s:
        """int64 stamps of decoded positions `ends`; -1 where no read reached that far."""
        last = np.asarray(ends, np.int64) - 1
        piece = np.searchsorted(self._data_starts, last, side="right") - 1
        wire = self._wire_starts[piece] + last - self._data_starts[piece] + 1
        read = np.searchsorted(self._read_ends, wire, side="left")
        stamps = np.append(self._reads_ns, np.int64(-1))
        return stamps[np.minimum(read, len(self._reads_ns))]


def _content(head: Head, body: bytes, reads_ns: Int64s, read_ends: Int64s) -> tuple[bytes, _Stamps]:
    encoding = head.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ProtocolError(f"content-encoding {encoding!r} was not asked for")
    if not is_chunked(head):
        return body, _Stamps(reads_ns, read_ends, [0], [0])
    plain = dechunk(body)
    return plain.data, _Stamps(reads_ns, read_ends, plain.data_starts or [0], plain.wire_starts or [0])


def _read_json(data: bytes, stamps: _Stamps) -> Reply:
    try:
        payload = _decode(data)
    except UNREADABLE as error:
        return Reply(error=f"protocol: not a completion: {error}")
    if (message := _error_of(payload, "")) is not None:
        return Reply(error=f"server: {message}", done=True)
    reason = next((choice.finish_reason for choice in payload.choices or () if choice.finish_reason), "")
    usage = payload.usage or _Usage()
    return Reply(
        output_tokens=_count(usage.completion_tokens),
        input_tokens=_count(usage.prompt_tokens),
        finish_reason=reason,
        complete=bool(reason),
        done=True,
        done_ns=int(stamps.at([len(data)])[0]),
        response_id=payload.id or "",
    )


@dataclass(slots=True)
class _Seen:
    """What the events of one stream have told so far."""

    ends: list[int] = field(default_factory=list)
    first: int = -1
    output_end: int = -1
    usage: _Usage = field(default_factory=_Usage)
    finish_reason: str = ""
    error: str = ""
    done_end: int = -1
    role_only_first: bool = False
    response_id: str = ""
    number: int = 0


def _read_stream(data: bytes, stamps: _Stamps) -> Reply:
    seen = _Seen()
    for event in events(data):
        if event.data.strip() == _DONE:
            seen.done_end = event.end
            break
        try:
            _take(seen, event)
        except UNREADABLE as error:
            seen.error = seen.error or f"protocol: event {seen.number} is not a completion chunk: {error}"
        seen.number += 1
    if seen.number == 0 and data.lstrip().startswith((b"<", b"{")):
        seen.error = "protocol: the reply is not an event stream"
    chunk_ns = stamps.at(seen.ends)
    done = seen.done_end >= 0
    return Reply(
        first_output_ns=int(stamps.at([seen.output_end])[0]) if seen.output_end >= 0 else -1,
        first_token_ns=int(chunk_ns[seen.first]) if seen.first >= 0 else -1,
        last_token_ns=int(chunk_ns[-1]) if seen.first >= 0 else -1,
        chunk_ns=chunk_ns,
        output_tokens=_count(seen.usage.completion_tokens),
        input_tokens=_count(seen.usage.prompt_tokens),
        finish_reason=seen.finish_reason,
        error=seen.error,
        complete=bool(done or seen.finish_reason) and not seen.error,
        done=done,
        done_ns=int(stamps.at([seen.done_end])[0]) if done else -1,
        role_only_first=seen.role_only_first,
        blank_before_first=seen.first if seen.first >= 0 else len(seen.ends),
        response_id=seen.response_id,
    )


def _take(seen: _Seen, event: SseEvent) -> None:
    """Add one event to what was seen. Raises what UNREADABLE lists."""
    payload = _decode(event.data)
    if (message := _error_of(payload, event.name)) is not None:
        seen.error = seen.error or f"server: {message}"
        return
    seen.response_id = seen.response_id or payload.id or ""
    seen.usage = payload.usage or seen.usage
    content = role = False
    for choice in payload.choices or ():
        # A content filter is told whatever else the other choices end with.
        if choice.finish_reason and seen.finish_reason != "content_filter":
            seen.finish_reason = choice.finish_reason
        text, tools = _text_of(choice)
        content = content or bool(text) or tools
        role = role or (choice.delta is not None and choice.delta.role is not None)
        if (text.strip() or tools) and seen.first < 0:
            seen.first = len(seen.ends)
    if not content and seen.number == 0 and role:
        seen.role_only_first = True
        return
    if payload.choices and seen.output_end < 0:
        seen.output_end = event.end
    if content:
        seen.ends.append(event.end)


def _text_of(choice: _Choice) -> tuple[str, bool]:
    """The text of a choice's new content, and whether it calls tools."""
    delta = choice.delta
    if delta is None:
        return choice.text or "", False
    text = (delta.content or "") + (delta.reasoning_content or delta.reasoning or "") + (delta.refusal or "")
    return text, bool(delta.tool_calls)


def _error_of(payload: _Payload, event_name: str) -> str | None:
    """The message of an error payload, or None when it is none."""
    raw = bytes(payload.error)
    if raw != b"null":
        return _clip(_message_in(raw))
    if payload.object == "error" or event_name == "error":
        return _clip(payload.message or "no message")
    return None


def _server_message(data: bytes) -> str:
    """What the body of an HTTP error says, in one line."""
    try:
        payload = _decode(data)
    except UNREADABLE:
        return _clip(data.decode(errors="replace")) or "no message"
    detail = bytes(payload.detail)
    return _error_of(payload, "error" if detail == b"null" else "") or _clip(_message_in(detail))


def _message_in(raw: bytes) -> str:
    """The text in an error value: a string, an object with a message, or else its JSON."""
    try:
        value = msgspec.json.decode(raw, type=str | _Error)
    except UNREADABLE:
        return raw.decode(errors="replace")
    return value if isinstance(value, str) else value.message or raw.decode(errors="replace")


def _clip(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS]


def _count(tokens: int | None) -> int:
    return -1 if tokens is None else tokens
