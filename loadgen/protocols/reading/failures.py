"""What a server says when it cannot do what it was asked, in whatever form it says it."""

from __future__ import annotations

import msgspec

_MESSAGE_CHARS = 300

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
    """Return the text in an error value: a string, an object with a message, or else its JSON."""
    try:
        value = msgspec.json.decode(raw, type=str | _Error)
    except UNREADABLE:
        return raw.decode(errors="replace")
    return value if isinstance(value, str) else value.message or raw.decode(errors="replace")


def clip(text: str) -> str:
    """Return a text in one line of bounded length."""
    return " ".join(text.split())[:_MESSAGE_CHARS]
