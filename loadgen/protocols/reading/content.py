"""The parts of a reply's content that count: visible text, and non-empty calls of tools."""

from __future__ import annotations

import re

import msgspec

from loadgen.protocols.reading.failures import UNREADABLE, states_nothing

# Any character that shows: no white space, no control, no default ignorable code point of Unicode (zero-width spaces
# and joiners, marks of direction, a byte order mark, soft hyphens, fillers), and no empty cell of Braille.
_VISIBLE = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff]"
)
# Fields of a tool call that the server writes, and no model.
_LABELS = {"id", "index", "type"}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def is_blank(text: str) -> bool:
    """Return whether a text has no visible character."""
    return _VISIBLE.search(text) is None


def is_unseen(text: str) -> bool:
    """Return whether a text has characters, but neither visible ones nor white space."""
    if text == "" or (text.isascii() and text.isprintable()):  # most texts: some of it shows, or all are spaces
        return False
    return is_blank(text) and not any(map(str.isspace, text))


def calls_tool(call: msgspec.Raw) -> bool:
    """Return whether a tool call, or a piece of one, has a name or arguments."""
    members = [call]
    for _ in range(2):  # the call's own fields, and those of its function
        members = [value for member in members for value in _values(member)]
    return not all(map(states_nothing, members))


def _values(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the values of an object but for labels; anything else as it is."""
    try:
        return [value for name, value in _fields(raw).items() if name not in _LABELS]
    except UNREADABLE:
        return [raw]
