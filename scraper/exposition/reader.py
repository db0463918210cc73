"""The pages of one target, read one after another: a page whose layout is known costs only its numbers.

A layout is a page's lines but for the numbers. It is recognised by comparing them, never assumed: a line that equals
its counterpart on the last page of a layout keeps its number; one that differs must have the same text before the
number. Any other difference leads to a full parse and a new layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from operator import ne

import msgspec
import numpy as np

from sidelight.rundir.columns import Floats, Indices
from sidelight.scraper.exposition import grammar
from sidelight.scraper.exposition import trtllm_iterations as trtllm_json
from sidelight.scraper.exposition.page import KEPT_LAYOUTS, MAX_LINES, UNREADABLE_JSON, MalformedPage, Page, Series
from sidelight.scraper.exposition.text import Lines, decode, plain_numbers, read_lines

KEPT_CHARACTERS = 4_000_000  # of the pages of layouts, the current one aside
_NO_HEAD = "\n"  # no line begins with it


@dataclass(slots=True)
class _Layout:
    openmetrics: bool
    series: tuple[Series, ...]
    heads: list[str]
    rows: Indices  # by line: the place of its number among the values
    lines: list[str]  # of the last page of this layout
    values: Floats  # of the same
    characters: int


class PageReader:
    """Reader of one target's pages in any format, with a cache of recent layouts.

    While the layout is unchanged, and when one of the last `KEPT_LAYOUTS` returns, `page.series` is the same object.
    `page.values` is a fresh array each time. What is kept: the last page, and for each layout one page by lines;
    together at most `KEPT_CHARACTERS` of pages that are not the last one's.
    """

    def __init__(self) -> None:
        self._layouts: list[_Layout] = []  # the latest first
        self._last: tuple[bytes, str, Page] | None = None

    def read(self, body: bytes, content_type: str = "") -> Page:
        """Read one page: text 0.0.4 or 1.0.0, OpenMetrics text or JSON, as the content type says.

        - Without a content type it is read as text.
        - One JSON string, of whatever content type, is the text in it (llama.cpp, issue 17384); lines and bytes then
          count in what was quoted.
        - Other JSON is read as the iteration statistics of TensorRT-LLM.

        Raises `MalformedPage` as `parse` does; what was remembered stays then as it was.
        """
        if self._last is not None and self._last[0] == body and self._last[1] == content_type:
            page = self._last[2]
        else:
            page = self._read(body, content_type)
            self._last = body, content_type, page
        return Page(series=page.series, values=page.values.copy())

    def _read(self, body: bytes, content_type: str) -> Page:
        kind = content_type.lower()
        quoted = body[:64].lstrip()[:1] == b'"'  # begins no line of any format
        if kind.partition(";")[0].strip().endswith("json") and not quoted:
            return trtllm_json.page(body)
        text = _unquote(decode(body)) if quoted else decode(body)
        return self._read_text(text, openmetrics="openmetrics" in kind)

    def _read_text(self, text: str, *, openmetrics: bool) -> Page:
        lines = text.split("\n", MAX_LINES + 1)
        for place, layout in enumerate(self._layouts):
            if layout.openmetrics == openmetrics and len(layout.lines) == len(lines) and _fill(layout, lines):
                self._layouts.insert(0, self._layouts.pop(place))
                return Page(series=layout.series, values=layout.values)
        read = read_lines(text, openmetrics=openmetrics)
        self._layouts.insert(0, _layout(read, openmetrics=openmetrics, characters=len(text)))
        del self._layouts[KEPT_LAYOUTS:]
        while sum(layout.characters for layout in self._layouts[1:]) > KEPT_CHARACTERS:
            del self._layouts[-1]
        return read.page


def _layout(read: Lines, *, openmetrics: bool, characters: int) -> _Layout:
    is_sample = np.fromiter(map(bool, read.heads), dtype=np.bool_, count=len(read.heads))
    return _Layout(
        openmetrics=openmetrics,
        series=read.page.series,
        heads=[head or _NO_HEAD for head in read.heads],
        rows=np.cumsum(is_sample) - 1,
        lines=read.lines,
        values=read.page.values,
        characters=characters,
    )


def _fill(layout: _Layout, lines: list[str]) -> bool:
    """Update a layout's numbers from a page, and return whether the page fits it.

    It fits if it has as many lines, is of this layout, and each number can be read.
    """
    changed = list(compress(range(len(lines)), map(ne, lines, layout.lines)))
    new = [lines[index] for index in changed]
    heads = [layout.heads[index] for index in changed]
    if not all(map(str.startswith, new, heads)):
        return False
    tails = list(map(str.removeprefix, new, heads))
    try:
        try:
            numbers = plain_numbers(tails)
        except ValueError:  # time stamps and exemplars
            numbers = np.array([grammar.number_of(tail) for tail in tails])
    except ValueError:
        return False
    values = layout.values.copy()
    values[layout.rows[changed]] = numbers
    layout.values = values
    layout.lines = lines
    return True


def _unquote(text: str) -> str:
    try:
        return msgspec.json.decode(text, type=str)
    except UNREADABLE_JSON:
        reason = "a page in quotes that is not a JSON string, or cut off"
        raise MalformedPage(reason, line=text.count("\n") + 1, byte=len(text.encode())) from None
