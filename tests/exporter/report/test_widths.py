"""Reports of recorded runs at the widths of terminals: no digit is cut, and each is one of `summary.json`."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import chain
from typing import Any

import golden_files
import msgspec
import pytest
from rich.console import Console

from sidelight.exporter.document import Block, Table, numbers, table
from sidelight.exporter.report.sections import report
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.text import LONG_WORD, render

WIDTHS = (60, 80, 100, 120)
SCALES = (1.0, 33_871.0, 1e12, 1e-6)
# A number as a report prints it, thousands apart; not a part of a name, an id, an address or a moment.
NUMBER = re.compile(
    r"(?<![\w.:/-])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.:/-])\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w.:/]*[\d:/])"
)
# What is computed of numbers of the summary, and stands in none of its fields.
DERIVED = re.compile(
    r"(?s:which\s+takes\s+at\s+least:.*?\))"  # numbers of requests to two digits, and how long they take
    r"|^.*run \d{8}-.*$|^\d{4}-\d\d-\d\d .*?UTC|trace \w+.*$|^sl-.*$",  # ids and moments
    re.MULTILINE,
)
_NO_AMOUNT = re.compile("share|ratio|rho|ci95|growth|coverage|quality|accuracy")
SUMMARIES = {name: golden_files.expected(name)["summary.json"] for name in golden_files.names()}


def printed(content: Iterable[Block], width: int) -> str:
    """Return what a terminal shows."""
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False)
    console.print(render(content))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def scaled(text: str, factor: float) -> Summary:
    """Return a summary whose times, rates and counts of tokens are so many times as large."""

    def times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item if _NO_AMOUNT.search(key) else times(item) for key, item in value.items()}
        if isinstance(value, list):
            return [times(item) for item in value]
        return value * factor if isinstance(value, float) else value

    whole = msgspec.json.decode(text)
    for section in ("client", "correlation"):
        whole[section] = times(whole[section])
    return msgspec.convert(whole, Summary)


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers of a summary as a report has them: also in percent, and in ms or s for the other."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, str):
        yield from (float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", value))
    elif isinstance(value, int | float):
        yield from (abs(value) * unit for unit in (1, 100, 1e3, 1e-3, 1 / 60, 1e-3 / 60))


def tables_of(summary: Summary) -> list[Table]:
    return [piece for piece in report(summary) if isinstance(piece, Table)]


def tokens(shown: Table, left_out: set[str]) -> Counter[str]:
    """Return the words and numbers of a table without some of its columns."""
    columns = [(column.title, *texts) for column, texts in shown.texts(bars=True) if column.title not in left_out]
    return Counter(" ".join([shown.title, *chain(*columns)]).split())


@pytest.mark.parametrize("factor", SCALES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SUMMARIES)
def test_a_table_is_whole_but_for_the_columns_that_it_names(name: str, width: int, factor: float):
    """Each label, heading and number of the others is there in one piece, within the width, however large."""
    for each in tables_of(scaled(SUMMARIES[name], factor)):
        text, _, footer = printed([each], width).partition("Not shown at this width: ")
        named = " ".join(footer.split()).removesuffix("; see summary.json.").split(", ")
        left_out = {*named} if footer else set()
        assert left_out <= {column.title for column in each.columns[1:]}
        assert all(len(line) <= width for line in text.splitlines())
        expected, shown = tokens(each, left_out), Counter(text.replace("─", "").replace("█", "").split())
        assert not [token for token in expected - shown if len(token) <= LONG_WORD and token.strip("█")], text
        assert Counter("".join(expected.elements()).replace("█", "")) == Counter("".join(shown.elements())), text


@pytest.mark.parametrize("name", SUMMARIES)
def test_columns_go_in_the_stated_order(name: str):
    """Those that tell least go first; the median and the p99 of what the client saw stay at 60 columns."""
    for each in tables_of(msgspec.json.decode(SUMMARIES[name], type=Summary)):
        headings = [column.title for column in each.columns]
        if "p99.9" in headings:
            footer = " ".join(printed([each], 60).partition("Not shown at this width: ")[2].split())
            assert ["min", "p99.9", "p90", "p95", "max"][: footer.count(",") + 1] == footer.split(";")[0].split(", ")
            assert {"p50", "p99"} & {*footer.split(";")[0].split(", ")} == set()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SUMMARIES)
def test_every_number_is_a_rounded_one_of_the_summary(name: str, width: int):
    """In sentences, sparklines and tables: what stands nowhere in summary.json, no reader can check."""
    summary = msgspec.json.decode(SUMMARIES[name], type=Summary)
    known = sorted(numbers_in(msgspec.json.decode(SUMMARIES[name])))
    text = DERIVED.sub("", printed(report(summary), width))
    odd = []
    for number in NUMBER.findall(text):
        digits = len(number.partition(".")[2])
        value, off = float(number.replace(",", "")), 0.5 * 10**-digits * (1 + 1e-9)
        at = bisect.bisect_left(known, value - off - 1e-9 * value)
        odd += [number] if known[at] > value + off + 1e-9 * value else []
    assert [] == odd


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SUMMARIES)
def test_all_but_tables_says_the_same_at_every_width(name: str, width: int):
    """Sentences and the line over time break, and lose nothing."""
    for piece in report(msgspec.json.decode(SUMMARIES[name], type=Summary)):
        if not isinstance(piece, Table):
            narrow, wide = (re.sub("[▁▂▃▄▅▆▇█░▒▓▞·]", "", printed([piece], columns)) for columns in (width, 400))
            assert wide.split() == narrow.split()
            assert all(len(line.rstrip()) <= width for line in narrow.splitlines())


def test_words_break_before_a_number_goes():
    """A long label takes no column away; where it has to, the line below names the column and no file."""
    row = "a label of many words that is much too long", 1_234_567.8, 0.25
    shown = [table("T", numbers("first", "second"), [row], kept_in="")]
    assert {"1,234,567.8", "0.25"} <= {*printed(shown, 40).split()}
    narrow = printed(shown, 34)
    assert "1,234,567.8" in narrow.split()
    assert narrow.rstrip().endswith("Not shown at this width: second.")
