"""Tables of the page alone: times by slices of the run, and the load generator's lateness and load."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import Cell, Table, numbers, table
from sidelight.exporter.report.tables.server import GAUGE_ROWS, gauge_cell
from sidelight.exporter.summary.breakdown import json_name, short_label_of
from sidelight.exporter.summary.correlation import BreakdownSlice
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.self_check.check import SelfCheck
from sidelight.rundir.printable.numbers import cell, percent
from sidelight.scraper.window.quantities import Gauge

MOST_ROWS = 60  # of a long run, several slices are a row


def slices_table(summary: Summary) -> Table:
    """Return a table of time slices: requests, mean TTFT and its parts, and the engine's mean gauges. Each row has its
    start.
    """
    slices, breakdown = summary.correlation.timeslices, summary.correlation.breakdown
    known = [part for part in TTFT_PARTS if any(getattr(piece, json_name(part)) is not None for piece in slices)]
    gauges = {name: means for name, _ in GAUGE_ROWS if (means := _means(getattr(summary.server, name)))}
    columns = (
        *numbers("requests", show=cell),
        *numbers("TTFT", *(short_label_of(part, breakdown) for part in known)),
        *numbers(*(label for name, label in GAUGE_ROWS if name in gauges)),
    )
    together, rows = max(1, math.ceil(len(slices) / MOST_ROWS)), list[tuple[Cell, ...]]()
    for begin in range(0, len(slices), together):
        group = slices[begin : begin + together]
        start_s = (group[0].start_ns - summary.window.start_ns) / 1e9
        times = (_weighted(group, name) for name in ("ttft_ms", *map(json_name, known)))
        read = (
            gauge_cell(name, _mean([means[piece.start_ns] for piece in group if piece.start_ns in means]))
            for name, means in gauges.items()
        )
        rows.append((f"from {start_s:g} s", sum(piece.requests for piece in group), *times, *read))
    return table("By when requests were submitted, mean ms", columns, rows)


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


def generator_table(check: SelfCheck) -> Table:
    """Return a table of the load generator's lateness, its CPU use and its machine's load."""
    left_late = check.arrivals.late_ms if check.arrivals else check.schedule_lateness_ms
    late = (
        ("requests left after their time, ms", left_late),
        ("timers fired late (loop delay), ms", check.loop_delay_ms),
        ("bytes waited to be read, ms", check.read_lateness_ms),
    )
    ratios = [("CPU of the busiest worker, of a core", check.cpu_ratio.max)]
    if check.machine is not None:
        ratios.append(("machine busy", check.machine.busy_ratio))
        ratios.append(("stolen by other virtual machines", check.machine.steal_ratio))
    rows: list[tuple[Cell, ...]] = [(label, ms.p50, ms.p99, ms.max) for label, ms in late if ms.max is not None]
    rows += [(label, "", "", "", ratio) for label, ratio in ratios if isinstance(ratio, float)]
    return table("Load generator", (*numbers("p50", "p99", "max"), *numbers("of the run", show=percent)), rows)
