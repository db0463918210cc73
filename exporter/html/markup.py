"""HTML of the terminal report's paragraphs and tables, without a second wording.

Every text is escaped: what a server or a directory of others says is never markup, and moves no text of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as without_markup

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.report.format import Prose, plain, shown_columns
from rundir.printable.text import printable_lines

# What is drawn of characters in a colour alone is drawn in that of the charts' part.
TITLES = {
    "other": "the engine outside queue and prefill: its API server, and what no source tells apart",
    "phase": "measure: the load that counts; what came before it warmed the engine up",
    "seats": "requests that the engine runs at once",
    "blank output": "tokens without visible text, before the first that shows",
}
PARTS = {"blue": "network", "magenta": "gateway", "yellow": "queue", "green": "prefill", "cyan": "other"}

# What a terminal shows in backticks; and options, in which a browser would break a line.
_CODE = re.compile(r"`([^`<]+)`|(?<![\w-])(--[a-z][\w-]*)")


def escape(text: str) -> str:
    """Return a text as a page shows it."""
    return without_markup(printable_lines(text))


def blocks(renderables: Iterable[RenderableType]) -> str:
    """Return paragraphs and tables one after another; empty lines are left out."""
    return "\n".join(filter(None, map(_block, renderables)))


def page_header(heading: RenderableType) -> str:
    """Return a page's header: the first line as its heading, the others as a paragraph."""
    first, *others = _text(heading).split()
    below = "<br>".join(map(_line, others))
    return f"<header>\n<h1>{_line(first)}</h1>\n<p>{below}</p>\n</header>"


def _block(renderable: RenderableType) -> str:
    if isinstance(renderable, Group):
        return blocks(renderable.renderables)
    if isinstance(renderable, Table):
        return _table(renderable) if renderable.show_header else _grid(renderable)
    text = _text(renderable)
    return f"<p{_class(text.style)}>{'<br>'.join(map(_line, text.split()))}</p>" if text.plain.strip() else ""


def _text(renderable: RenderableType) -> Text:
    if isinstance(renderable, Prose):
        return Text(renderable.unbroken(), style=renderable.style)
    # What a terminal cuts to its width has all of its text here.
    text = getattr(renderable, "text", renderable)
    return text if isinstance(text, Text) else Text(str(text))


def _line(text: Text) -> str:
    """Return a line as HTML, with an element for each styled piece."""
    edges = sorted({edge for span in text.spans for edge in (span.start, span.end)})
    pieces = text.divide(edges) if edges else [text]
    styles = (_span_class(" ".join(str(span.style) for span in piece.spans)) for piece in pieces)
    line = "".join(
        f"<span{style}>{escape(piece.plain)}</span>" if style else escape(piece.plain)
        for piece, style in zip(pieces, styles, strict=True)
    )
    return _marked(line)


def _marked(text: str) -> str:
    """Return an escaped text with its code as elements."""
    return _CODE.sub(
        lambda match: f"<code>{match[1]}</code>" if match[1] else f'<span class="number">{match[2]}</span>', text
    )


def _span_class(style: str) -> str:
    return f' class="{PARTS[style]}"' if style in PARTS else _class(style)


def _grid(table: Table) -> str:
    """Return a table without headings: a line a row."""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return blocks(Text("  ").join(filter(None, map(_text, row))) for row in rows)


def _table(table: Table) -> str:
    """Return a table; its first column is of row headings."""
    columns = shown_columns(table)
    numbers = ["" if column.justify == "left" else ' class="number"' for column in columns]
    head = "".join(
        _heading_cell("col", escape(plain(column.header)), number)
        for column, number in zip(columns, numbers, strict=True)
    )
    cells = [[_marked(escape(plain(cell))) for cell in column.cells] for column in columns]
    rows = []
    for (label, *others), row in zip(zip(*cells, strict=True), table.rows, strict=True):
        # A label that is set in makes the row a part of the one above.
        inner = label.startswith("  ")
        values = "".join(
            f"<td{number}{_title(value)}>{value}</td>" for value, number in zip(others, numbers[1:], strict=True)
        )
        rows.append(
            f"<tr{_class('inner' if inner else row.style or '')}>{_heading_cell('row', label.strip())}{values}</tr>"
        )
    name = escape(plain(table.title)) if table.title else ""
    caption = f"<caption>{name}</caption>" if name else ""
    # A region with a place in the order of keys can be scrolled without a pointer.
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{name or "table"}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _heading_cell(scope: str, text: str, attributes: str = "") -> str:
    return f'<th scope="{scope}"{attributes}{_title(text)}>{text}</th>' if text else "<td></td>"


def _title(text: str) -> str:
    return f' title="{TITLES[text]}"' if text in TITLES else ""


def _class(style: object) -> str:
    names = {"red": "alarm", "yellow": "warning", "green": "met", "dim": "note", "inner": "inner", "bold": "strong"}
    words = [name for word, name in names.items() if word in str(style).split()]
    return f' class="{" ".join(words)}"' if words else ""
