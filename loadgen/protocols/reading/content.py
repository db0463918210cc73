"""The parts of a reply's content that count: visible text, and non-empty calls of tools."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from sidelight.loadgen.protocols.reading.failures import UNREADABLE, states_nothing

# Characters that show nothing and are no white space: controls, default ignorable code points of Unicode (zero-width
# spaces and joiners, marks of direction, a byte order mark, soft hyphens, fillers), and the empty cell of Braille.
_UNSEEN = (
    r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_VISIBLE = re.compile(rf"[^\s{_UNSEEN}]")
_ANY_UNSEEN, _ONLY_UNSEEN = re.compile(f"[{_UNSEEN}]"), re.compile(f"[{_UNSEEN}]+")
# Fields of a tool call that the server writes, and no model.
_LABELS = {"id", "index", "type"}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def is_blank(text: str) -> bool:
    """Return whether a text has no visible character."""
    return _VISIBLE.search(text) is None


def is_unseen(text: str) -> bool:
    """Return whether a text has characters, but neither visible ones nor white space."""
    return _ONLY_UNSEEN.fullmatch(text) is not None


def unseen_places(texts: Sequence[str]) -> list[int]:
    """Return the places of unseen texts, by `is_unseen`."""
    if _ANY_UNSEEN.search("".join(texts)) is None:  # nearly all
        return []
    return [at for at, text in enumerate(texts) if is_unseen(text)]


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
