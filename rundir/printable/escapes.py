"""Texts that stand in data with escapes: of JSON, of a language's literals, of URLs, of HTML, and escapes of these."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import pairwise

# One character as JSON, a literal of a language, a URL or HTML writes it where it may not or need not stand as it is.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\[\"'\\/bfnrt]"
    rb"|%[0-9a-fA-F]{2}|&#?[0-9A-Za-z]{1,31};"
)
_DEEPEST = 6  # escapes of escapes: a proxy quotes what a gateway quotes
_BEGINS = (b"\\", b"%", b"&")
# Data without these have no letter or digit that is escaped.
_OF_LETTERS = (b"u00", b"\\x", b"&#", b"amp;#", *(b"%%%d" % digit for digit in range(2, 8)))
_PIECE, _GROWTH = 1 << 16, 32  # bytes; and how much longer a text gets by its escapes
_LEAST = 4  # bytes of what is left of a text without escapes, so that it is not found in others


def escaped(data: bytes | bytearray, texts: Collection[bytes]) -> list[tuple[int, int]]:
    """Return the places of texts written with escapes: the first byte and the one behind.

    Data are looked at in pieces that overlap, so that what they cost in memory does not grow with them.
    """
    if not texts or not any(mark in data for mark in _BEGINS):
        return []
    overlap = _GROWTH * max(map(len, texts))
    pieces = ((begin, data[begin : begin + _PIECE + overlap]) for begin in range(0, len(data), _PIECE))
    spans = [
        (begin + first, begin + behind)
        for begin, piece in pieces
        if any(run in piece for run in map(_longest_run, texts)) or any(mark in piece for mark in _OF_LETTERS)
        for first, behind in _escaped(piece, texts)
    ]
    return list(_joined(sorted(spans)))


def _escaped(data: bytes | bytearray, texts: Collection[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the places of texts written with escapes in one piece; some may overlap."""
    levels = [bytes(data)]
    while len(levels) <= _DEEPEST and (plainer := _ESCAPE.sub(_character, levels[-1])) != levels[-1]:
        levels.append(plainer)
    # A text may itself look escaped: then what is left of both is alike.
    forms = {form for text in texts for form in (text, _unescaped(text)) if len(form) >= _LEAST}
    if not any(form in level for level in levels[1:] for form in forms):
        return
    places = [(at, at + 1) for at in range(len(data))]  # of each byte of a level, in the data
    for escaped_level, level in pairwise(levels):
        places = list(_places(escaped_level, places))
        for form in forms:
            ats = (match.start() for match in re.finditer(re.escape(form), level))
            yield from ((places[at][0], places[at + len(form) - 1][1]) for at in ats)


@lru_cache(maxsize=1024)
def _longest_run(text: bytes) -> bytes:
    """Return the longest run of a text's letters and digits, which no usual escape changes.

    It is looked for first: that is far cheaper.
    """
    runs: list[bytes] = re.findall(rb"[0-9A-Za-z]*", _unescaped(text))
    return max(runs, key=len)


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield sorted spans, those that overlap as one."""
    while spans:
        begin, end = spans.pop(0)
        while spans and spans[0][0] < end:
            end = max(end, spans.pop(0)[1])
        yield begin, end


def _places(data: bytes, places: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the place of each byte of the data after its escapes are resolved."""
    at = 0
    for match in _ESCAPE.finditer(data):
        yield from places[at : match.start()]
        at = match.end()
        yield from [(places[match.start()][0], places[at - 1][1])] * len(_character(match))
    yield from places[at:]


@lru_cache(maxsize=1024)
def _unescaped(text: bytes) -> bytes:
    for _ in range(_DEEPEST):
        text = _ESCAPE.sub(_character, text)
    return text


def _character(match: re.Match[bytes]) -> bytes:
    """Return the character of an escape, in UTF-8."""
    escape = match[0]
    if escape[:1] == b"&":
        return html.unescape(escape.decode()).encode(errors="surrogatepass")
    if escape[:1] == b"%" or escape[1:2] == b"x":
        return bytes.fromhex(escape[-2:].decode())
    if escape[1:2] in b"'\"/\\":
        return escape[1:]
    return str(json.loads(b'"%b"' % escape)).encode(errors="surrogatepass")
