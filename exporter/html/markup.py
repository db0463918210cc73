"""HTML of a report's prose, lines and tables.

Every text is escaped: what a server or a directory of others says is never markup, and moves none of our text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as without_markup

from sidelight.correlator.parts import E2E_PARTS
from sidelight.exporter.document import Block, Figures, Heading, Line, PartsBar, Prose, Section, Table
from sidelight.exporter.html.terms import TITLES, title_of
from sidelight.rundir.printable.text import printable_lines

UNSURE = 0.35  # opacity of a part within its own error
_LIGHT = {part.name: part.light for part in E2E_PARTS}  # where no page states the colours
# What a terminal shows in backticks; and options, in which a browser would break a line.
_CODE = re.compile(r"`([^`<]+)`|(?<![\w-])(--[a-z][\w-]*)")


def escape(text: str) -> str:
    """Return a text as a page shows it."""
    return without_markup(printable_lines(text))


def blocks(content: Iterable[Block]) -> str:
    """Return prose, lines and tables one after another; empty lines and what charts draw better are left out."""
    return "\n".join(filter(None, map(_block, content)))


def page_header(heading: Heading) -> str:
    """Return a page's header: the title as its heading, the other lines as a paragraph."""
    title, *others = heading
    return f"<header>\n<h1>{_spans(title)}</h1>\n<p>{'<br>'.join(map(_prose, others))}</p>\n</header>"


def section(of: Section, below: str = "") -> str:
    """Return a section with markup `below` its text; tables `behind` its charts are closed by the script that draws."""
    pieces = [f"<h2>{escape(of.title)}</h2>"] if of.title else []
    pieces += ['<div class="charts"></div>', blocks(of.content), below]
    if of.behind is not None:
        title, content = of.behind
        pieces.append(f"<details open><summary>{escape(title)}</summary>\n{blocks(content)}\n</details>")
    inside = "\n".join(filter(None, pieces))
    return f'<section id="{of.name}">\n{inside}\n</section>'


def _block(block: Block) -> str:
    match block:
        case Table():
            return _table(block)
        case Prose(text, tone) if text.strip():
            return f"<p{_class(tone)}>{_prose(block)}</p>"
        case Figures(cells):
            pairs = (
                f"<div><dt{_title(label)}>{escape(label)}</dt><dd{_class(tone)}>{_prose(Prose(text))}</dd></div>"
                for label, text, tone in cells
            )
            return f'<dl class="figures">{"".join(pairs)}</dl>'
        case PartsBar():
            return _bar(block)
        case Line(tone=tone):
            return f"<p{_class(f'row {tone}'.strip())}>{_spans(block)}</p>"
    return ""


def _bar(bar: PartsBar) -> str:
    """Return a bar of parts with its legend; a part within its own error is pale."""
    left, pieces, words = 0.0, [], []
    legend = dict(bar.legend)
    for piece, part in bar.drawn:
        share = part * bar.length
        pale = f' opacity="{UNSURE}"' if piece.share is None else ""
        fill = f'height="100%" fill="var(--{piece.name}, {_LIGHT[piece.name]})"{pale}'
        text = escape(Prose(legend[piece]).unbroken())
        pieces.append(f'<rect x="{100 * left:.2f}%" width="{100 * share:.2f}%" {fill}><title>{text}</title></rect>')
        swatch = f'<svg width="11" height="11" aria-hidden="true"><rect width="100%" {fill}/></svg>'
        words.append(f"<li{_title(piece.label)}>{swatch} {text}</li>")
        left += share
    picture = (
        f'<svg class="parts" width="100%" height="20" role="img" '
        f'aria-label="{escape(bar.label) or "Parts of the mean"}">{"".join(pieces)}</svg>'
    )
    label = f'<p class="note">{escape(bar.label)}</p>\n' if bar.label else ""
    return f'{label}{picture}\n<ul class="legend">{"".join(words)}</ul>'


def _prose(prose: Prose) -> str:
    return _marked(escape(prose.unbroken()))


def _spans(line: Line) -> str:
    """Return a line with an element for each toned piece."""
    return _marked(
        "".join(
            f"<span{_class(tone)}{_title(text)}>{escape(text)}</span>" if tone else escape(text)
            for text, tone in line.spans
        )
    )


def _marked(text: str) -> str:
    """Return an escaped text with its code as elements."""
    return _CODE.sub(
        lambda match: f"<code>{match[1]}</code>" if match[1] else f'<span class="number">{match[2]}</span>', text
    )


def _table(table: Table) -> str:
    """Return a table; its first column is of row headings."""
    columns = table.texts(bars=False)
    kinds = [' class="number"' if column.kind == "numbers" else "" for column, _ in columns]
    head = "".join(
        _heading_cell("col", escape(column.title), kind) for (column, _), kind in zip(columns, kinds, strict=True)
    )
    rows = []
    for row, texts in zip(table.rows, zip(*(texts for _, texts in columns), strict=True), strict=True):
        label, *others = (_marked(escape(text)) for text in texts)
        values = "".join(
            f"<td{kind}{_title(value) if value.lower() in TITLES else ''}>{value}</td>"
            for value, kind in zip(others, kinds[1:], strict=True)
        )
        rows.append(f"<tr{_class(row.tone)}>{_heading_cell('row', label)}{values}</tr>")
    name = escape(table.title)
    caption = f"<caption>{name}</caption>" if name else ""
    # A region with a place in the order of keys can be scrolled without a pointer.
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{name or "table"}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _heading_cell(scope: str, text: str, attributes: str = "") -> str:
    return f'<th scope="{scope}"{attributes}{_title(text)}>{text}</th>' if text else "<td></td>"


def _title(label: str) -> str:
    meaning = title_of(label)
    return f' title="{escape(meaning)}"' if meaning else ""


def _class(tone: str) -> str:
    return f' class="{tone}"' if tone else ""
