"""Text as a person may see it: what others wrote (model names, versions, errors of servers, manifests), numbers as a
row of blocks, and what stands for both on a terminal that has only ASCII.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from typing import Any

# Controls of terminals, of the direction of text and of lines; what has no width; halves of characters; what is never a
# character, which XML cannot hold.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufffe\uffff]"
)

# Blocks of bars and sparklines, rules and signs of tables, for terminals whose encoding lacks them.
_LOOKALIKES = str.maketrans(dict(zip("▁▂▃▄▅▆▇█─≤≥±░▒▓▞·…", "_.:-=+*#-<>~.:%/..", strict=True)))
_BLOCKS = "▁▂▃▄▅▆▇█"
IN_ASCII = "sidelight.ascii"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_LOOKALIKES)
    return text.encode("ascii", "replace").decode("ascii"), error.end


codecs.register_error(IN_ASCII, _in_ascii)


def printable(text: str) -> str:
    """Return a text without anything that a terminal obeys or a reader cannot see: \\x1b instead of the escape."""
    return _UNSEEN.sub(_escaped, text)


def sparkline(values: Sequence[float | None]) -> str:
    """Return a block for each value, its height the share of the largest: the lowest is zero or below, a blank is
    unknown.
    """
    most = max(0.0, *(value for value in values if value is not None), 0.0)
    heights = (None if value is None else math.ceil(7 * (max(0.0, value) / (most or 1.0))) for value in values)
    return "".join(" " if height is None else _BLOCKS[height] for height in heights)


def printable_all(value: Any) -> Any:
    """Return a value of JSON with all texts in it made `printable`, the names of fields included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_all(key): printable_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(printable_all, value))
    return value


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
