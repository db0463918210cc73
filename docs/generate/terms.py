"""Meanings in docs/explanation/glossary.md, as the tooltips of the pages have them."""

from __future__ import annotations

import re

from sidelight.exporter.html.terms import PARTS, WORDS

_ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \|", re.MULTILINE)
_LIST = re.compile(r"(?<=## Words\n\n)(?:- .*\n)+")


def with_terms(page: str) -> str:
    """Return a glossary with the meaning of each part, and the list of words."""
    meanings = {labels.partition(", ")[0]: meaning for labels, meaning in PARTS.items()}

    def row(match: re.Match[str]) -> str:
        return f"| {match[1]} | {meanings[match[1]]} |" if match[1] in meanings else match[0]

    words = sorted(WORDS.items(), key=lambda word: word[0].lower())
    return _LIST.sub(
        "".join(f"- {labels}: {meaning}\n" for labels, meaning in words).replace("\\", r"\\"), _ROW.sub(row, page)
    )
