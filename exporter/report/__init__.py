"""The report for people in a terminal: read in ten seconds down to the conclusion, in a minute to the end.

One rendering serves the terminal and `report.txt`; it reads `summary.json` and nothing else. `_sections` is the order
of everything; each topic has a module, which yields its lines or tables from the typed summary.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from exporter.report.alerts import alerts, severe_lines
from exporter.report.conclusion import conclusion
from exporter.report.format import Prose
from exporter.report.heading import heading
from exporter.report.method import method
from exporter.report.objectives import objectives
from exporter.report.tables.association import association_line
from exporter.report.tables.breakdown import breakdown_table, group_tables
from exporter.report.tables.client import client_section
from exporter.report.tables.energy import energy_section
from exporter.report.tables.gateways import gateway_lines
from exporter.report.tables.server import server_section
from exporter.report.tables.slowest import slowest_section
from exporter.report.tables.timeline import timeline_lines
from exporter.summary.result import Summary, as_written
from rundir.printable.text import printable_all

WIDTH = 100
Result = TypeVar("Result", bound=msgspec.Struct)


def as_text(summary: Summary) -> str:
    """Return the report as plain text, 100 columns wide, ending in a newline."""
    return without_padding(render(summary))


def without_padding(content: RenderableType) -> str:
    """Return the text of a 100-column terminal, without blanks at the ends of lines."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    console.print(content)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n"


def render(summary: Summary) -> Group:
    """Return the report for a console of any width."""
    return Group(*_sections(without_controls(as_written(summary))))


def without_controls(result: Result) -> Result:
    """Return a result without control characters in servers' texts: they move no cursor and hide nothing."""
    texts = msgspec.to_builtins(result)
    shown = printable_all(texts)
    return result if shown == texts else msgspec.convert(shown, type(result))


def _sections(summary: Summary) -> Iterator[RenderableType]:
    """Yield everything in the order in which it is read: what happened and why, then the numbers, then the method."""
    loaded, correlation = bool(summary.client.requests.sent), summary.correlation
    yield from (Prose(f"! {line}", "bold red") for line in severe_lines(summary))
    yield heading(summary)
    yield from (Prose(f"! {alert}", "yellow") for alert in alerts(summary))
    yield Text("")
    if loaded:
        yield from objectives(summary)
        yield from (Prose(sentence, "bold") for sentence in conclusion(summary))
        yield Text("")
        yield from timeline_lines(correlation.timeline)
        yield from client_section(summary)
        if not correlation.missing:
            yield breakdown_table(correlation.breakdown)
            yield from group_tables(correlation)
        yield from slowest_section(correlation.slowest, correlation.breakdown)
    yield from server_section(summary)
    yield from (Prose(line) for line in gateway_lines(summary))
    if loaded:
        yield from (Prose(line, "dim") for line in association_line(correlation.association))
    yield from energy_section(summary.hardware)
    if loaded:
        yield from (Prose(line, "dim") for line in method(summary))
