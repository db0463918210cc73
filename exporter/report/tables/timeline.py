"""TTFT, waiting and running requests over the run, a line each on one axis."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UnsetType
from rich.text import Text

from exporter.report.format import cell, duration, spoken
from exporter.summary.timeline import Timeline
from rundir.printable import sparkline

LABEL = 9


def timeline_lines(timeline: Timeline | UnsetType) -> Iterator[Text]:
    """Yield a sparkline for each that is known, with its largest value; nothing where none is."""
    if not timeline:
        return
    rows = (
        ("TTFT", timeline.ttft_ms, spoken),
        ("waiting", timeline.requests_waiting, cell),
        ("running", timeline.requests_running, cell),
    )
    known = [(label, values, shown) for label, values, shown in rows if any(value is not None for value in values)]
    for label, values, shown in known:
        most = max(value for value in values if value is not None)
        yield _row(f"{label:{LABEL}}{sparkline(values)}  up to {shown(most)}")
    if known:
        end = duration(len(timeline.ttft_ms) * timeline.column_s)
        axis = f"0 s{end:>{len(timeline.ttft_ms) - 3}}"
        yield _row(f"{'':{LABEL}}{axis}  TTFT by when sent")
        yield Text("")


def _row(text: str) -> Text:
    return Text(text.rstrip(), no_wrap=True, overflow="ellipsis")
