"""Error messages of servers, in every form in which servers state them."""

from __future__ import annotations

from typing import Any

import msgspec

from sidelight.rundir.printable.masking import without_secrets

_MESSAGE_CHARS = 300
CONTENT_FILTER = "content_filter"  # as a code or a type of an error, and as a reason why a reply ended

# What decoding JSON raises on what a server may send: bytes that are no UTF-8 and deep nesting are no DecodeError.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

NULL = msgspec.Raw(b"null")


# Values of a field that state nothing.
_NOTHING = {b"null", b'""', b"{}", b"[]", b"false"}
# Finish reasons of a reply that was given up: vLLM, SGLang, LMDeploy and OpenRouter say error or abort, TensorRT-LLM
# timeout or cancelled, DeepSeek insufficient_system_resource.
ABORTED = {
    "abort", "aborted", "cancelled", "canceled", "error", "failed", "insufficient_system_resource", "not_finished",
    "timeout",
}  # fmt: skip


class Payload(msgspec.Struct, gc=False):
    """The fields of a reply or an event that state an error.

    An object or a text in `error`, a list in `errors`, `object` or `type` error; of what states nothing else, also
    FastAPI's `detail` and a bare `message`.
    """

    error: msgspec.Raw = NULL
    errors: msgspec.Raw = NULL
    detail: msgspec.Raw = NULL
    object: str | None = None
    type: Any = None
    message: str | None = None


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    code: Any = None
    type: Any = None


_decode = msgspec.json.Decoder(Payload).decode


def failure_of(payload: Payload, data: bytes) -> str | None:
    """Return the error message of a payload, None without an error. `data` is its JSON."""
    are_absent = payload.error is payload.errors is payload.detail is NULL and payload.message is None
    if are_absent and payload.object != "error" != payload.type:  # nearly all
        return None
    if (said := stated(payload.error) or stated(payload.errors)) is not None:
        return said
    if not (payload.object == "error" or payload.type == "error" or _states_only_an_error(payload)):
        return None
    return clip(payload.message or stated(payload.detail) or data.decode(errors="replace"))


def stated(error: msgspec.Raw) -> str | None:
    """Return the message of an error field's value, None for an empty value."""
    return None if states_nothing(error) else clip(message_in(bytes(error)))


def states_nothing(value: msgspec.Raw) -> bool:
    """Return whether a field's value is null, false or empty."""
    return value is NULL or bytes(value) in _NOTHING


def _states_only_an_error(payload: Payload) -> bool:
    """Return whether a payload consists of error fields only. There is one at least, even without a value."""
    fields = {name: getattr(payload, name) for name in ("error", "errors", "detail", "message", "type")}
    return payload == type(payload)(**fields)


def server_message(data: bytes) -> str:
    """Return the message in the body of an HTTP error, in one line."""
    try:
        said = failure_of(_decode(data), data)
    except UNREADABLE:
        said = None
    return said or ("" if data.strip() in _NOTHING else clip(data.decode(errors="replace"))) or "no message"


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
    """Return a text in one line of bounded length, without secrets: of one that is cut the rest would stay."""
    return " ".join(without_secrets(text).split())[:_MESSAGE_CHARS]
