"""Renderer of reports for terminals of any width, and for text files of 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from sidelight.correlator.parts import E2E_PARTS
from sidelight.exporter.document import BLANK, Block, Column, Figures, Line, PartsBar, Piece, Prose, Sparklines, Table
from sidelight.rundir.printable.text import sparkline

WIDTH = 100
LONG_WORD, SHORT_LABEL = 24, 14  # characters: longer words break, shorter labels do not
PADDING = 1  # blanks behind each column
LABEL = 9  # of a sparkline
GAP = 3  # blanks between figures
MOST_BAR = 80  # columns
TRACE = "▏"  # a bar that is next to nothing beside the longest
_GAPS = re.compile(r"(?<=\S)(?:  +|(?<!\d) (?![\d ]))")  # but for those between a number, its label and its unit
STYLES = {
    "alarm": "red", "warning": "yellow", "met": "green", "note": "dim", "inner": "dim", "strong": "bold",
    "headline": "bold", "label": "bold cyan", **{part.name: part.colour for part in E2E_PARTS},
}  # fmt: skip
GLYPHS = {part.name: part.glyph for part in E2E_PARTS}


def without_padding(content: Iterable[Block]) -> str:
    """Return the text of a 100-column terminal, without blanks at the ends of lines; it ends in a newline."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    console.print(render(content))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n"


def print_on(console: Console, content: Iterable[Block], *, again: Iterable[Block] = ()) -> None:
    """Print a report, where no terminal shows it as `without_padding` does.

    Below a report that a terminal is too low for, stands `again` what has left the screen.
    """
    whole = render(content)
    if not console.is_terminal:
        console.print(Text(without_padding(whole.content)), end="", soft_wrap=True)
        return
    console.print(whole)
    if len(console.render_lines(whole)) > console.height:
        console.print(render((BLANK, *again)))


def wrapped(prose: Prose, width: int) -> list[Text]:
    """Return the lines of a paragraph."""
    lines = textwrap.wrap(prose.unbroken(), width, break_on_hyphens=False) or [""]
    return [Text(line.replace("\N{NO-BREAK SPACE}", " "), style=_style(prose.tone)) for line in lines]


def _style(tone: str) -> str:
    return " ".join(STYLES[word] for word in tone.split())


@dataclass(frozen=True, slots=True)
class Rendered:
    """A report on a console of any width."""

    content: tuple[Block, ...]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        for block in self.content:
            match block:
                case Prose():
                    yield from wrapped(block, options.max_width)
                case Line():
                    yield _line(block, options.max_width)
                case Figures(cells):
                    yield from _packed([_cell(*each) for each in cells], options.max_width)
                case PartsBar():
                    yield from _bar(block, options.max_width)
                case Sparklines():
                    yield from _sparklines(block, options.max_width)
                case Table():
                    yield from _table(block, options.max_width)


def render(content: Iterable[Block]) -> Rendered:
    """Return a report for a console."""
    return Rendered(tuple(content))


def _line(line: Line, width: int) -> Text:
    """Return a line; where it is cut, no number is cut or parted from its unit."""
    spans = line.spans
    if line.fit == "shrink":
        first, (text, tone), *others = spans
        room = max(1, width - sum(cell_len(each) for each, _ in (first, *others)))
        spans = first, (text[-room:], tone), *others
    shown = Text.assemble(*((text, _style(tone)) for text, tone in spans), style=_style(line.tone))
    if line.fit == "cut" and shown.cell_len > width:
        ends = [gap.start() for gap in _GAPS.finditer(shown.plain) if gap.start() < width]
        shown = Text.assemble(shown[: max(ends, default=width - 1)], ("…", "dim"))
    return shown


def _cell(label: str, text: str, tone: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (text, _style(f"{tone} strong".strip())))


def _packed(cells: Iterable[Text], width: int) -> Iterator[Text]:
    """Yield lines of as many cells as have room."""
    line = Text()
    for cell in cells:
        if line and line.cell_len + GAP + cell.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, " " * GAP if line else "", cell)
    yield line


def _bar(bar: PartsBar, width: int) -> Iterator[Text]:
    """Yield the bar and its legend, in glyphs that need no colours."""
    if bar.label:
        yield from wrapped(Prose(bar.label, "note"), width)
    drawn, room, end, whole = Text(), bar.length * min(width, MOST_BAR), 0, 0.0
    for piece, share in bar.drawn:
        whole += share
        length = round(room * whole) - end
        drawn.append(glyph(piece) * length, _style("note" if piece.share is None else piece.name))
        end += length
    yield drawn or Text(TRACE)
    yield from _packed((Text.assemble((glyph(piece), _style(piece.name)), f" {words}")
                        for piece, words in bar.legend), width)  # fmt: skip


def glyph(piece: Piece) -> str:
    """Return the glyph of a part; dots of one that is within its own error."""
    return "·" if piece.share is None else GLYPHS[piece.name]


def _sparklines(lines: Sparklines, width: int) -> Iterator[Text]:
    """Yield the rows; values are joined until no text is cut."""
    rows, room = lines.rows, width - LABEL - max(len(lines.axis), *(len(text) for *_, text in lines.rows))
    while len(rows[0][1]) > max(room, 2 + len(lines.end)):
        rows = tuple((label, _halved(values), text) for label, values, text in rows)
    for label, values, text in rows:
        yield Text(f"{label:{LABEL}}{sparkline(values)}{text}")
    yield Text(f"{'':{LABEL}}0 s{lines.end:>{len(rows[0][1]) - 3}}{lines.axis}")
    yield Text("")


def _halved(values: Sequence[float | None]) -> list[float | None]:
    """Return the larger of each two values; None where neither is known."""
    pairs = (values[at : at + 2] for at in range(0, len(values), 2))
    return [max((value for value in pair if value is not None), default=None) for pair in pairs]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A column on a terminal: the widths in which no line and in which no number breaks."""

    column: Column
    texts: Sequence[str]
    full: int
    least: int


def _fitted(column: Column, texts: Sequence[str], label_width: int) -> _Fitted:
    widest = _longest(text.split("\n") for text in texts)
    full = max(label_width, widest, _longest([column.title.split("\n")]))
    word = min(LONG_WORD, _longest(text.split() for text in (column.title, *texts)))
    label = min(full, SHORT_LABEL) if label_width else 0
    least = max(label, word, widest if column.kind == "numbers" else 0)
    return _Fitted(column, texts, PADDING + full, PADDING + least)


def _longest(groups: Iterable[Iterable[str]]) -> int:
    return max((cell_len(text) for group in groups for text in group), default=0)


def _table(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield a table; one that splits, in readable groups of columns with the first in each."""
    (label, texts), *others = table.texts(bars=True)
    texts = [f"  {text}" if row.tone == "inner" else text for row, text in zip(table.rows, texts, strict=True)]
    first = _fitted(label, texts, table.label_width)
    pieces = [[first]]
    for column in (_fitted(*each, label_width=0) for each in others):
        group = (*pieces[-1], column)
        wide = sum(max(each.least, min(each.full, PADDING + LONG_WORD)) + 1 for each in group) > width - 2
        if table.splits and wide and len(group) > 2:
            pieces.append([first])
        pieces[-1].append(column)
    for place, piece in enumerate(pieces):
        yield from _piece(table, piece, width, "" if place else table.title)


def _piece(table: Table, columns: list[_Fitted], width: int, title: str) -> Iterator[RenderableType]:
    """Yield a table that cuts no number: where it is too wide, words break, then whole columns go, named in a line
    below.
    """
    room, left_out = width - len(columns) - 1, []
    while sum(each.least for each in columns) > room and len(columns) > 2:
        dropped = min(reversed(columns[1:]), key=lambda each: each.column.place)
        columns.remove(dropped)
        left_out.append(" ".join(dropped.column.title.split()))
    widths, least = [each.full for each in columns], [each.least for each in columns]
    while sum(widths) > room and widths != least:
        widths[max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))] -= 1
    grid = Grid(title=Text(title, style="bold cyan"), title_justify="left", box=box.SIMPLE_HEAD,
                padding=(0, PADDING, 0, 0))  # fmt: skip
    for each, wide in zip(columns, widths, strict=True):
        kind = each.column.kind
        grid.add_column(
            Text(each.column.title),
            justify="right" if kind == "numbers" else "left",
            style="cyan" if kind == "bars" else "",
            width=wide - PADDING,
            overflow="fold",
        )
    for row, texts in zip(table.rows, zip(*(each.texts for each in columns), strict=True), strict=True):
        grid.add_row(*map(Text, texts), style=_style(row.tone))
    yield grid
    if any(left_out):
        see = f"; see {table.kept_in}" if table.kept_in else ""
        yield from wrapped(Prose(f"Not shown at this width: {', '.join(filter(None, left_out))}{see}.", "note"), width)
        yield Text("")
