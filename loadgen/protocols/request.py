"""The content and the target of a request, the same for every protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

REQUEST = "{request}"

_object = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt's text and its system prompt; or whole `messages` in place of both.

    The system prompt stands before the text.
    """

    text: str
    system: str = ""
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTarget:
    """The model that is asked, and by which protocol.

    `models` are those that requests are spread over, each alone; empty where there is but `model`. `endpoint` is a name
    in PROTOCOLS. `extra` is merged into every request's body at the end, so that it can add a
    field, replace one, or (with None) leave one out; in gRPC a field is a tensor.
    """

    model: str
    models: tuple[str, ...] = ()
    endpoint: str = "chat"
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContent:
    """One request, before a protocol writes it; `ignore_eos` asks the engine to generate to `max_tokens`."""

    target: RequestTarget
    prompt: Prompt
    max_tokens: int
    temperature: float
    ignore_eos: bool


def joined(prompt: Prompt) -> str:
    """Return the one text that a protocol without roles is sent: the system prompt, a blank line, the prompt."""
    return f"{prompt.system}\n\n{prompt.text}" if prompt.system else prompt.text


def messages_of(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Return the messages of a chat: those of the prompt, else the system prompt, if there is one, and the user's."""
    if prompt.messages:
        return list(prompt.messages)
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.text}]


def text_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the texts of messages, a blank line between them; images and other parts have none."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += (part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
    return "\n\n".join(texts)


def with_extra(fields: Mapping[str, object], target: RequestTarget) -> dict[str, object]:
    """Return a body's fields with the target's own; those that are None are left out."""
    return {name: value for name, value in {**fields, **target.extra}.items() if value is not None}


def with_number(fields: Mapping[str, object], number: int) -> dict[str, object]:
    """Return fields for one request: its number stands where their texts have {request}."""
    return {
        name: value.replace(REQUEST, str(number)) if isinstance(value, str) else value for name, value in fields.items()
    }


def json_body(fields: Mapping[str, object], target: RequestTarget) -> bytes:
    """Return the same as JSON; equal fields give equal bytes."""
    return msgspec.json.encode(with_extra(fields, target))


# The next turn of a session is one body: what was said so far, the reply to it, and what the turn adds. An added body
# is a whole request that holds only the new turn; its own settings (model, lengths) are those sent.


def carry_messages(name: str, previous_body: bytes, reply_text: str, added_body: bytes, *, constant: str = "") -> bytes:
    """Return the next turn of a request with a list of messages in `name`.

    The reply becomes the assistant's message. The field `constant` goes on unless the turn has its own.
    """
    previous, added = _object(previous_body), _object(added_body)
    history = [*previous[name], {"role": "assistant", "content": reply_text}]
    constants = {constant: previous[constant]} if constant in previous else {}
    return msgspec.json.encode({**constants, **added, name: [*history, *added[name]]})


def carry_text(name: str, previous_body: bytes, reply_text: str, added_body: bytes) -> bytes:
    """Return the next turn of a request with one text in the field `name`. The reply continues the text."""
    previous, added = _object(previous_body), _object(added_body)
    return msgspec.json.encode({**added, name: f"{previous[name]}{reply_text}{added[name]}"})
