"""What a server says when it cannot do what it was asked, in whatever form it says it."""

from __future__ import annotations

from typing import Any

import msgspec

_MESSAGE_CHARS = 300
CONTENT_FILTER = "content_filter"  # as a code or a type of an error, and as a reason why a reply ended

# What decoding JSON raises on what a server may send: bytes that are no UTF-8 and deep nesting are no DecodeError.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

NULL = msgspec.Raw(b"null")


class Payload(msgspec.Struct, gc=False):
    """The fields of a reply or an event that say an error: an object or a text in `error`, or `object: error`."""

    error: msgspec.Raw = NULL
    object: str | None = None
    message: str | None = None


class _Refusal(Payload, gc=False):
    """The body of an HTTP error; FastAPI says it in `detail`."""

    detail: msgspec.Raw = NULL


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    code: Any = None
    type: Any = None


_decode = msgspec.json.Decoder(_Refusal).decode


def failure_of(error: msgspec.Raw, *, said: bool = False, message: str | None = None) -> str | None:
    """Return the message of an error payload; None of any other.

    `error` is the payload's field of that name; `said` that the payload is an error by its kind, `message` its text.
    """
    raw = bytes(error)
    if raw != b"null":
        return clip(message_in(raw))
    return clip(message or "no message") if said else None


def server_message(data: bytes) -> str:
    """Return what the body of an HTTP error says, in one line."""
    try:
        refusal = _decode(data)
    except UNREADABLE:
        return clip(data.decode(errors="replace")) or "no message"
    detail = bytes(refusal.detail)
    said = refusal.object == "error" or detail == b"null"
    return failure_of(refusal.error, said=said, message=refusal.message) or clip(message_in(detail))


def message_in(raw: bytes) -> str:
    """Return the text in an error value: a string, an object with a message, or else its JSON.

    Of its code or type only that of a content filter is said, which tells a refusal from other errors.
    """
    try:
        value = msgspec.json.decode(raw, type=str | _Error)
    except UNREADABLE:
        return raw.decode(errors="replace")
    if isinstance(value, str):
        return value
    by_filter = f"{CONTENT_FILTER}: " if value.message and CONTENT_FILTER in (value.code, value.type) else ""
    return by_filter + (value.message or raw.decode(errors="replace"))


def clip(text: str) -> str:
    """Return a text in one line of bounded length."""
    return " ".join(text.split())[:_MESSAGE_CHARS]
