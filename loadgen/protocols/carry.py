"""The next turn of a session: what was said so far, the reply to it, and what the turn adds, as one body.

An added body is a whole request that holds only the new turn; its own settings (model, lengths) are those sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

_object = msgspec.json.Decoder(dict[str, Any]).decode


def messages(name: str, previous_body: bytes, reply_text: str, added_body: bytes) -> bytes:
    """Of protocols with roles: the field `name` is a list of messages, and the reply becomes the assistant's."""
    previous, added = _object(previous_body), _object(added_body)
    history = [*previous[name], {"role": "assistant", "content": reply_text}]
    return msgspec.json.encode({**added, name: [*history, *added[name]]})


def text(name: str, previous_body: bytes, reply_text: str, added_body: bytes) -> bytes:
    """Of protocols without roles: the field `name` is one text, and the reply continues it."""
    previous, added = _object(previous_body), _object(added_body)
    return msgspec.json.encode({**added, name: f"{previous[name]}{reply_text}{added[name]}"})


def responses(previous_body: bytes, reply_text: str, added_body: bytes) -> bytes:
    """As messages in `input`; the instructions, which stand beside them, go on unless the turn has its own."""
    previous = _object(previous_body)
    kept = {"instructions": previous["instructions"]} if "instructions" in previous else {}
    return messages("input", previous_body, reply_text, msgspec.json.encode(kept | _object(added_body)))
