"""Text for display on a terminal, in a page or in a spreadsheet cell.

Text of others (model names, versions, errors of servers, manifests) is shown without secrets and controls, numbers as a
row of blocks, and both with replacements on a terminal that has only ASCII.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from sidelight.rundir.printable.masking import without_secrets

LONGEST_WORD, LONGEST = 200, 4000  # characters: what is longer is cut
_LONG_WORD = re.compile(rf"(\S{{{LONGEST_WORD}}})\S+")
_FORMULA = ("=", "+", "-", "@")

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


def escaped(text: str) -> str:
    """Return a text without secrets and with escaped control and invisible characters.

    Nothing remains that a terminal obeys or a reader cannot see: \\x1b instead of the escape.
    """
    text = without_secrets(text)
    return text if text.isprintable() else _UNSEEN.sub(_escape, text)


def printable(text: str) -> str:
    """Return an escaped text for a person, cut to LONGEST characters and words of LONGEST_WORD."""
    text = escaped(text)
    if len(text) > LONGEST_WORD:
        text = _LONG_WORD.sub(r"\1...", text)
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return text


def printable_lines(text: str) -> str:
    """Return a text of several lines for a person, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """Return JSON of the same value without invisible characters; its own line breaks stay."""
    if text.replace("\n", "").isprintable():
        return text
    return _UNSEEN.sub(lambda match: "\n" if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text)


def defused(text: str) -> str:
    """Return a text as a cell of a CSV file: `escaped`, and safe in a spreadsheet.

    An apostrophe stands before a formula. A number stays as it is.
    """
    text = escaped(text)
    if not text.lstrip().startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def first_of(texts: Sequence[str], most: int = 10, separator: str = ", ") -> str:
    """Return texts as one, and behind the first of them how many more there are."""
    more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    return separator.join([*texts[:most], *more])


def sparkline(values: Sequence[float | None]) -> str:
    """Return a block for each value, its height the share of the largest.

    The lowest is zero or below, a blank is unknown.
    """
    most = max(0.0, *(value for value in values if value is not None), 0.0)
    heights = (None if value is None else math.ceil(7 * (max(0.0, value) / (most or 1.0))) for value in values)
    return "".join(" " if height is None else _BLOCKS[height] for height in heights)


def printable_all(value: Any, shown: Callable[[str], str] = printable) -> Any:
    """Return a JSON value with `shown` applied to all texts, names of fields included."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {printable_all(key, shown): printable_all(item, shown) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(printable_all(item, shown) for item in value)
    return value


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def as_sentence(text: str) -> str:
    """Return words as a sentence: from a capital letter, but of an address, to a full stop."""
    begin = text[:1] if text.startswith("http") else text[:1].upper()
    return f"{begin}{text[1:]}{'' if text.endswith('.') else '.'}"
