"""Model of a report: prose, lines, and tables of typed cells. A terminal, a page and Markdown each render it in one
place; no renderer reads a text to learn its kind.

A tone is one word or several: alarm, warning, met, note, strong, label, or a part of the TTFT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from sidelight.rundir.printable.numbers import ms, percent
from sidelight.rundir.printable.text import printable_all

SUMMARY = "summary.json"
# Columns leave a table that is too wide in this order: bars, the statistics that tell least, the others from the right.
_FIRST, _LAST, _PLACES = 0, 6, {"min": 1, "p99.9": 2, "p90": 3, "p95": 4, "max": 5}
_BAR = 8

Result = TypeVar("Result", bound=msgspec.Struct)
Cell = str | float | None  # words, a number, a missing number
Span = tuple[str, str]  # a text and its tone


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph that wraps at any width, but never between a number and its unit."""

    text: str
    tone: str = ""

    def unbroken(self) -> str:
        """Return the text with no-break spaces between numbers and their units."""
        return re.sub(r"(?<=\d) (?=[%a-z])", "\N{NO-BREAK SPACE}", self.text)


BLANK = Prose("")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of texts, each in a tone beside the tone of the line.

    Where it is too narrow, it wraps, or is cut before a word, or the beginning of its second text is left out.
    """

    spans: tuple[Span, ...]
    tone: str = ""
    fit: Literal["wrap", "cut", "shrink"] = "wrap"

    @property
    def text(self) -> str:
        """Return the text of the line."""
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True, slots=True)
class Sparklines:
    """Rows of values on one axis from 0 s to `end`: each has a label before and a text behind."""

    rows: tuple[tuple[str, Sequence[float | None], str], ...]
    end: str
    axis: str


@dataclass(frozen=True, slots=True)
class Figures:
    """A few numbers of one size, each a label, a text and its tone; between two of them a line may break."""

    cells: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: its name, label, size, share of the whole, and source. A part without a share is pale."""

    name: str
    label: str
    size: float
    share: float | None
    source: str


@dataclass(frozen=True, slots=True)
class PartsBar:
    """A stacked bar of parts, with a legend; parts that are not above 0 have no piece.

    Of several bars each has a `label`, and its `length` is a share of the longest one's.
    """

    pieces: tuple[Piece, ...]
    label: str = ""
    length: float = 1.0

    @property
    def drawn(self) -> tuple[tuple[Piece, float], ...]:
        """Return the drawn pieces, each with its share of the bar."""
        drawn = [piece for piece in self.pieces if piece.size > 0]
        whole = sum(piece.size for piece in drawn)
        return tuple((piece, piece.size / whole) for piece in drawn)

    @property
    def legend(self) -> tuple[tuple[Piece, str], ...]:
        """Return the pieces with their words; a source that all have stands once, behind the last."""
        pieces = [piece for piece, _ in self.drawn]
        single = len({piece.source for piece in pieces}) == 1
        return tuple(
            (piece, _legend(piece, with_source=not single or piece is pieces[-1], of_all=single)) for piece in pieces
        )


def _legend(piece: Piece, *, with_source: bool, of_all: bool) -> str:
    share = "within its own error" if piece.share is None else percent(piece.share)
    source = f" ({'all: ' if of_all else ''}{piece.source})" if with_source else ""
    return f"{piece.label} {share}{source}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, with the format of its numbers. Bars are drawn only where charts are not.

    The column with the least `place` leaves a table that is too wide first, of several the rightmost.
    """

    title: str = ""
    show: Callable[[float | None], str] = ms
    kind: Literal["numbers", "words", "bars"] = "numbers"
    place: int = _LAST

    def text(self, value: Cell) -> str:
        """Return the text of a cell."""
        return value if isinstance(value, str) else self.show(value)


def numbers(*titles: str, show: Callable[[float | None], str] = ms) -> Iterator[Column]:
    """Yield columns of numbers in one format; statistics leave a narrow table in the stated order."""
    return (Column(title, show, place=_PLACES.get(title, _LAST)) for title in titles)


def words(title: str) -> Column:
    """Return a column of words; one without a title leaves a narrow table first."""
    return Column(title, kind="words", place=_LAST if title else _FIRST)


BARS = Column(show=lambda share: "█" * max(0, round(_BAR * (share or 0.0))), kind="bars", place=_FIRST)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: its label, then its cells. One of the tone `inner` makes up a part of the row above it."""

    cells: tuple[Cell, ...]
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; its first column holds the labels, at least `label_width` wide.

    `kept_in` names the file that has what a narrow terminal has no room for, "" where none has. One that `splits` comes
    there in pieces, each with the labels.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    label_width: int = 20
    kept_in: str = SUMMARY
    splits: bool = False

    def texts(self, *, bars: bool) -> list[tuple[Column, list[str]]]:
        """Return the columns with the texts of their cells, without bars unless asked for."""
        shown = [(column, at) for at, column in enumerate(self.columns) if bars or column.kind != "bars"]
        return [(column, [column.text(row.cells[at]) for row in self.rows]) for column, at in shown]


def table(
    title: str,
    columns: Iterable[Column],
    rows: Iterable[Row | Sequence[Cell]],
    *,
    label_width: int = 20,
    kept_in: str = SUMMARY,
) -> Table:
    """Return a table of rows: a column of labels, then these; what a row lacks at its end is empty."""
    whole = (Column(kind="words"), *columns)
    given = (row if isinstance(row, Row) else Row(tuple(row)) for row in rows)
    filled = (Row((*row.cells, *[""] * (len(whole) - len(row.cells))), row.tone) for row in given)
    return Table(title=title, columns=whole, rows=tuple(filled), label_width=label_width, kept_in=kept_in)


Heading = tuple[Line, *tuple[Prose, ...]]  # the title, then what was measured where and when
Block = Prose | Line | Figures | PartsBar | Sparklines | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report under a title; `name` is its place in a page. Tables `behind` charts have a title of their
    own.
    """

    name: str
    title: str = ""
    content: tuple[Block, ...] = ()
    behind: tuple[str, tuple[Block, ...]] | None = None


def without_controls(result: Result) -> Result:
    """Return a result without control characters in servers' texts: they move no cursor and hide nothing."""
    texts = msgspec.to_builtins(result)
    shown = printable_all(texts)
    return result if shown == texts else msgspec.convert(shown, type(result))
