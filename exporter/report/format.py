"""How tables and paragraphs look in a report for people."""

from __future__ import annotations

import copy
import re
import textwrap
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

SUMMARY = "summary.json"
TEXTS = {"", "known from", "class"}  # columns of words
DROPPED_FIRST = ("", "min", "p99.9", "p90", "p95", "max")  # of a table too wide, then from the right
LONG_WORD, SHORT_LABEL = 24, 14  # characters: longer words break, shorter labels do not
PADDING = 1  # blanks behind each column


class FittedTable(Table):
    """A table that cuts no number: where it is too wide, words break, then whole columns go, named in a line below.

    A column that is set to the right holds numbers. `kept_in` is the file that has the columns left out.
    """

    kept_in = SUMMARY

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that have room."""
        columns, room, left_out = list(self.columns), options.max_width - self._extra_width, []
        while sum(map(_least_width, columns)) > room and len(columns) > 2:
            dropped = min(reversed(columns[1:]), key=_place)
            columns.remove(dropped)
            left_out.append(heading(dropped))
        widths, least = list(map(_full_width, columns)), list(map(_least_width, columns))
        while sum(widths) > room and widths != least:
            widths[max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))] -= 1
        fitted = copy.copy(self)
        fitted.columns = [
            replace(column, _index=at, width=width - PADDING, min_width=None, no_wrap=False, overflow="fold")
            for at, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        yield from Table.__rich_console__(fitted, console, options)
        if any(left_out):
            see = f"; see {self.kept_in}" if self.kept_in else ""
            yield Prose(f"Not shown at this width: {', '.join(filter(None, left_out))}{see}.", "dim")
            yield Text("")


def _place(column: Column) -> int:
    """Return the place of a column in the order in which columns are left out."""
    name = heading(column)
    return DROPPED_FIRST.index(name) if name in DROPPED_FIRST else len(DROPPED_FIRST)


def _full_width(column: Column) -> int:
    lines = [line for content in (column.header, *column.cells) for line in plain(content).split("\n")]
    return PADDING + max(column.min_width or 0, *map(cell_len, lines))


def _least_width(column: Column) -> int:
    """Return the width in which no number breaks, and of words only a long one."""
    cells = [plain(cell) for cell in column.cells]
    pieces = [line for cell in cells for line in cell.split("\n")] if column.justify == "right" else []
    words = [word[:LONG_WORD] for text in (plain(column.header), *cells) for word in text.split()]
    label = min(_full_width(column) - PADDING, SHORT_LABEL) if column.min_width else 0
    return PADDING + max(label, *map(cell_len, (*pieces, *words, "")))


def table(title: str, *columns: str, label_width: int = 20, kept_in: str = SUMMARY) -> FittedTable:
    """Return an empty table: a column of labels, then these; numbers to the right and in one piece, words to the left.

    `kept_in` names the file that has what a narrow terminal has no room for, "" where none has.
    """
    title_text = Text(title, style="bold cyan")
    empty = FittedTable(title=title_text, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, PADDING, 0, 0))
    empty.kept_in = kept_in
    empty.add_column("", min_width=label_width)
    for column in columns:
        empty.add_column(column, justify="left" if column in TEXTS else "right")
    return empty


def heading(column: Column) -> str:
    """Return the heading of a column in one line."""
    return " ".join(plain(column.header).split())


def plain(content: RenderableType) -> str:
    """Return the text of a heading or a cell."""
    return content.plain if isinstance(content, Text) else str(content)


def shown_columns(table: Table) -> list[Column]:
    """Return the columns of a table that are worth showing beside charts: without bars made of characters."""
    return [column for column in table.columns if not _is_bars(column)]


def _is_bars(column: Column) -> bool:
    cells = [plain(cell) for cell in column.cells]
    return not plain(column.header) and "█" in "".join(cells) and not "".join(cells).strip("█")


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph that wraps at any width, but never between a number and its unit."""

    text: str
    style: str = ""

    def unbroken(self) -> str:
        """Return the text with no-break spaces between numbers and their units."""
        return re.sub(r"(?<=\d) (?=[%a-z])", "\N{NO-BREAK SPACE}", self.text)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        for line in textwrap.wrap(self.unbroken(), options.max_width, break_on_hyphens=False) or [""]:
            yield Text(line.replace("\N{NO-BREAK SPACE}", " "), style=self.style)
