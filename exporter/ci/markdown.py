"""`report.md`: conclusion, objectives and the main tables in Markdown, short enough for a pull request's comment.

Paragraphs and tables are those of the report for terminals. What servers said is escaped: it is read as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.table import Table

from exporter.report import without_controls
from exporter.report.alerts import alerts, damage_lines
from exporter.report.conclusion import conclusion
from exporter.report.format import plain, shown_columns
from exporter.report.heading import heading
from exporter.report.load import overload, rate_lines
from exporter.report.objectives import objectives
from exporter.report.tables.breakdown import breakdown_table
from exporter.report.tables.client import client_table
from exporter.summary.result import Summary

_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~#&])")


def as_markdown(summary: Summary) -> str:
    """Return the page, ending in a newline."""
    return "\n\n".join(filter(None, _blocks(without_controls(summary)))) + "\n"


def _blocks(summary: Summary) -> Iterator[str]:
    loaded = bool(summary.client.requests.sent)
    yield from (f"**{_escaped(line)}**" for line in (*damage_lines(summary.integrity), *overload(summary)))
    if loaded:
        yield from map(_escaped, conclusion(summary))
        yield "\n".join(f"- {_escaped(objective.text)}" for objective in objectives(summary))
    yield "\n".join(f"- {_escaped(alert)}" for alert in alerts(summary))
    if loaded:
        if not summary.correlation.missing:
            yield _table(breakdown_table(summary.correlation.breakdown, inner=False))
        yield _table(client_table(summary.client))
        yield "\n".join(f"- {_escaped(line)}" for line in rate_lines(summary.client, own_load=not summary.watch))
    yield "\n".join(f"<sub>{_escaped(line)}</sub>" for line in heading(summary).plain.splitlines())


def _table(table: Table) -> str:
    """Return a table with its title above; labels to the left, numbers to the right; "" of one without rows."""
    columns = shown_columns(table)
    rows = list(zip(*([_escaped(plain(cell)) for cell in column.cells] for column in columns), strict=True))
    if not rows:
        return ""
    head = [_escaped(plain(column.header)) for column in columns]
    rule = ["---" if column.justify == "left" else "--:" for column in columns]
    lines = (f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
    title = plain(table.title) if table.title else ""
    return "\n".join([f"**{_escaped(title)}**", "", *lines])


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)
