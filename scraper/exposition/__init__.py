"""Pages of metrics in any format, read into series and values.

`parse` reads one text page; a `PageReader` reads the pages of one target one after another, in the format that their
content type names, at little more than the cost of their numbers. The parts, each of which knows only those before it:

    page                the records, which of a page's columns are a histogram's, and the limits
    grammar             one line of text
    text                one page of text
    trtllm_iterations   the JSON that TensorRT-LLM serves instead of a page
    reader              the pages of a target

What the names mean is left to `engines`; which pages belong together, to `series`.
"""

from __future__ import annotations

from sidelight.scraper.exposition.page import (
    MAX_LINE_CHARACTERS,
    MAX_LINES,
    MAX_SERIES,
    UNREADABLE_JSON,
    HistogramColumns,
    MalformedPage,
    Page,
    Series,
    bound,
    histograms,
    without_le,
)
from sidelight.scraper.exposition.reader import PageReader
from sidelight.scraper.exposition.text import parse

__all__ = [
    "MAX_LINES",
    "MAX_LINE_CHARACTERS",
    "MAX_SERIES",
    "UNREADABLE_JSON",
    "HistogramColumns",
    "MalformedPage",
    "Page",
    "PageReader",
    "Series",
    "bound",
    "histograms",
    "parse",
    "without_le",
]
