"""TTFT, waiting and running requests over the run, a line each on one axis."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UnsetType

from exporter.document import Sparklines
from exporter.summary.timeline import Timeline
from rundir.printable.numbers import cell, duration, spoken


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
