"""The table behind the charts over time: a row a slice of the run; of a long run, several slices together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from correlator.breakdown import TTFT_PARTS
from exporter.report.format import table
from exporter.report.tables.server import GAUGE_ROWS, gauge_cell
from exporter.summary.breakdown import json_name, short_label_of
from exporter.summary.correlation import BreakdownSlice
from exporter.summary.result import Summary
from rundir.printable.numbers import cell, ms
from scraper.window.quantities import Gauge

MOST_ROWS = 60


def slices_table(summary: Summary) -> Table:
    """Return a table of time slices: requests, mean TTFT and its parts, and the engine's mean gauges. Each row has its
    start.
    """
    slices, breakdown = summary.correlation.timeslices, summary.correlation.breakdown
    together = max(1, math.ceil(len(slices) / MOST_ROWS))
    names = [
        json_name(part) for part in TTFT_PARTS if any(getattr(piece, json_name(part)) is not None for piece in slices)
    ]
    labels = [short_label_of(part, breakdown) for part in TTFT_PARTS if json_name(part) in names]
    gauges = {name: means for name, _ in GAUGE_ROWS if (means := _means(getattr(summary.server, name)))}
    labels += [label for name, label in GAUGE_ROWS if name in gauges]
    shown = table("By when requests were submitted, mean ms", "requests", "TTFT", *labels)
    for begin in range(0, len(slices), together):
        group = slices[begin : begin + together]
        start_s = (group[0].start_ns - summary.window.start_ns) / 1e9
        times = (_weighted(group, name) for name in ("ttft_ms", *names))
        read = (
            gauge_cell(name, _mean([means[piece.start_ns] for piece in group if piece.start_ns in means]))
            for name, means in gauges.items()
        )
        shown.add_row(f"from {start_s:g} s", cell(sum(piece.requests for piece in group)), *map(ms, times), *read)
    return shown


def _means(gauge: Gauge | object) -> dict[int, float]:
    """Return a gauge's means by when their slices start; empty of one that is not known."""
    slices = gauge.timeslices if isinstance(gauge, Gauge) else []
    return {piece.start_ns: float(piece.mean) for piece in slices if isinstance(piece.mean, int | float)}


def _weighted(group: Sequence[BreakdownSlice], name: str) -> float | None:
    """Return the mean over the requests of several slices, None if missing in all."""
    weights = [(piece.covered or piece.requests, getattr(piece, name)) for piece in group]
    known = [(weight, value) for weight, value in weights if value is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
