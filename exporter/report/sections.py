"""Content of a run's report: the verdict is read in ten seconds, all of it in a minute.

It reads `summary.json` and nothing else; each topic has a module, which yields its prose or tables from the typed
summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from msgspec import UnsetType

from sidelight.exporter.document import BLANK, Block, Prose, Sparklines, without_controls
from sidelight.exporter.report.alerts import alerts
from sidelight.exporter.report.conclusion import conclusion, objectives
from sidelight.exporter.report.heading import heading
from sidelight.exporter.report.method import method
from sidelight.exporter.report.tables.breakdown import breakdown_tables
from sidelight.exporter.report.tables.client import client_section
from sidelight.exporter.report.tables.energy import energy_section
from sidelight.exporter.report.tables.gateways import gateway_lines
from sidelight.exporter.report.tables.server import association_line, server_section
from sidelight.exporter.report.tables.shards import shards_section
from sidelight.exporter.report.tables.slowest import slowest_section, work_section
from sidelight.exporter.report.verdict import verdict_blocks, verdict_of
from sidelight.exporter.summary.result import Summary, as_written
from sidelight.exporter.summary.timeline import Timeline
from sidelight.exporter.text import without_padding
from sidelight.rundir.printable.numbers import cell, duration, spoken

OF_A_LOAD = {"objectives", "conclusion", "timeline", "client", "parts", "slowest", "association", "method"}


def report(summary: Summary) -> Iterator[Block]:
    """Yield everything in the order in which it is read: what happened and why, then the numbers, then the method."""
    return chain.from_iterable(sections(without_controls(as_written(summary))).values())


def as_text(summary: Summary) -> str:
    """Return `report.txt`."""
    return without_padding(report(summary))


def sections(summary: Summary) -> dict[str, tuple[Block, ...]]:
    """Return the parts of the report by name, in their order; those of a load are empty without one."""
    correlation, loaded, verdict = summary.correlation, bool(summary.client.requests.sent), verdict_of(summary)
    parts: dict[str, Iterable[Block]] = {
        "heading": (*heading(summary), BLANK),
        "verdict": verdict_blocks(verdict) if verdict.cause != "none" or verdict.figures or loaded else (),
        "objectives": _apart(objectives(summary)),
        "alerts": _apart(Prose(f"! {alert}", "warning") for alert in alerts(summary)),
        "conclusion": _apart(prose(conclusion(summary))),
        "timeline": timeline_lines(correlation.timeline),
        "client": client_section(summary),
        "parts": () if correlation.missing else breakdown_tables(correlation),
        "slowest": (*slowest_section(correlation.slowest, correlation.breakdown), *work_section(summary)),
        "server": server_section(summary),
        "gateways": prose(gateway_lines(summary)),
        "shards": shards_section(summary.watch) if summary.watch else (),
        "association": prose(association_line(correlation.association), "note"),
        "energy": energy_section(summary.hardware),
        "method": prose(method(summary), "note"),
    }
    return {name: tuple(blocks) if loaded or name not in OF_A_LOAD else () for name, blocks in parts.items()}


def _apart(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return blocks with an empty line below; nothing without any."""
    shown = tuple(blocks)
    return (*shown, BLANK) if shown else ()


def prose(lines: Iterable[str], tone: str = "") -> Iterator[Prose]:
    """Yield a paragraph for each line."""
    return (Prose(line, tone) for line in lines)


def timeline_lines(timeline: Timeline | UnsetType) -> Iterator[Sparklines]:
    """Yield a sparkline for each that is known, with its largest value; nothing where none is."""
    if not timeline:
        return
    rows = (
        ("TTFT", timeline.ttft_ms, spoken),
        ("waiting", timeline.requests_waiting, cell),
        ("running", timeline.requests_running, cell),
    )
    known = tuple(
        (label, values, f"  up to {shown(max(value for value in values if value is not None))}")
        for label, values, shown in rows
        if any(value is not None for value in values)
    )
    if known:
        yield Sparklines(known, duration(len(timeline.ttft_ms) * timeline.column_s), "  TTFT by when sent")
