"""Words of verdicts, and of the outputs that show them."""

from __future__ import annotations

import html
import re

from sidelight.exporter.summary.verdict import MeanParts, RunVerdict, StudyVerdict

_TAGS = re.compile(r"<(?!main|section)[^>]*>")


def words_of(verdict: RunVerdict | StudyVerdict) -> list[str]:
    """Return the sentences, figures and shares that an output has to show."""
    bars = verdict.bars if isinstance(verdict, StudyVerdict) else [MeanParts(label="", mean_ms=0, parts=verdict.parts)]
    shares = [part for bar in bars for part in bar.parts if part.share is not None and part.share >= 0.005]
    return [
        verdict.headline,
        verdict.why,
        verdict.do,
        *(text for figure in verdict.figures for text in (figure.label, figure.text)),
        *(bar.label for bar in bars),
        *(f"{part.label} {100 * (part.share or 0.0):.0f} %" for part in shares),
    ]


def plain(text: str) -> str:
    """Return the words of a text, without line breaks."""
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").replace("`", "").split())


def of_page(page: str) -> str:
    """Return the words of a page of HTML."""
    return plain(html.unescape(_TAGS.sub("", page)))


def of_markdown(page: str) -> str:
    """Return the words of Markdown."""
    return plain(re.sub(r"\\(.)", r"\1", page))
