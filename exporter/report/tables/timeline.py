"""TTFT, waiting and running requests over the run, a line each on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UnsetType
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from exporter.summary.timeline import Timeline
from rundir.printable.numbers import cell, duration, spoken
from rundir.printable.text import sparkline

LABEL = 9
AXIS = "  TTFT by when sent"


@dataclass(frozen=True, slots=True)
class _Lines:
    """Sparklines on one axis: each has a label before and a text behind; blocks are joined until no text is cut."""

    rows: Sequence[tuple[str, Sequence[float | None], str]]
    end: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        rows, room = self.rows, options.max_width - LABEL - max(len(AXIS), *(len(text) for *_, text in self.rows))
        while len(rows[0][1]) > max(room, 2 + len(self.end)):
            rows = [(label, _halved(values), text) for label, values, text in rows]
        for label, values, text in rows:
            yield Text(f"{label:{LABEL}}{sparkline(values)}{text}")
        yield Text(f"{'':{LABEL}}0 s{self.end:>{len(rows[0][1]) - 3}}{AXIS}")
        yield Text("")


def timeline_lines(timeline: Timeline | UnsetType) -> Iterator[_Lines]:
    """Yield a sparkline for each that is known, with its largest value; nothing where none is."""
    if not timeline:
        return
    rows = (
        ("TTFT", timeline.ttft_ms, spoken),
        ("waiting", timeline.requests_waiting, cell),
        ("running", timeline.requests_running, cell),
    )
    known = [
        (label, values, f"  up to {shown(max(value for value in values if value is not None))}")
        for label, values, shown in rows
        if any(value is not None for value in values)
    ]
    if known:
        yield _Lines(known, duration(len(timeline.ttft_ms) * timeline.column_s))


def _halved(values: Sequence[float | None]) -> list[float | None]:
    """Return the larger of each two values; None where neither is known."""
    pairs = (values[at : at + 2] for at in range(0, len(values), 2))
    return [max((value for value in pair if value is not None), default=None) for pair in pairs]
