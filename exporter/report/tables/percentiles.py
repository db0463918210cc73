"""How sure percentiles are: their 95 % intervals, or what they are at least and how many requests would say more."""

from __future__ import annotations

from collections.abc import Iterator

from sidelight.correlator.statistics.intervals import QuantileInterval
from sidelight.exporter.document import Cell, Table, numbers, table
from sidelight.exporter.report.tables.client import time_labels
from sidelight.exporter.summary.result import Summary
from sidelight.rundir.printable.numbers import duration, ms, spoken

SPOKEN = ("p50", "p95", "p99")
SHOWN = ("p50", "p90", "p99")


def interval_line(summary: Summary) -> Iterator[str]:
    """Yield a sentence on the percentiles of the TTFT and their intervals. There is none where they depend on the run's
    length.
    """
    ttft = summary.methodology.percentiles.get("ttft_ms")
    if ttft is None or summary.methodology.stability.verdict == "growing":
        return
    intervals: dict[str, QuantileInterval] = {label: getattr(ttft, label) for label in SPOKEN}
    shown = [each.high if each.is_known else each.estimate for each in intervals.values()]
    words = [
        f"{label} {spoken(interval.low, *shown)} to {spoken(interval.high, *shown)}"
        if interval.is_known
        else f"{label} {spoken(interval.estimate, *shown)} in the sample"
        if interval.low is None
        else f"{label} at least {spoken(interval.low, *shown)} ({spoken(interval.estimate, *shown)} in the sample)"
        for label, interval in intervals.items()
    ]
    needed = {label: _rounded_up(interval.needed_n) for label, interval in intervals.items() if not interval.is_known}
    more = ""
    if needed:
        per_s = summary.client.rates.realised_requests_per_s
        time = f" ({duration(max(needed.values()) / per_s)} at this rate)" if per_s else ""
        counts = ", ".join(f"{label} {count:,}" for label, count in needed.items())
        more = f"; too few requests for an upper bound, which takes at least: {counts}{time}"
    yield f"TTFT with 95 % confidence: {', '.join(words)}{more}."


def _rounded_up(count: int) -> int:
    """Return a count to two digits."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def percentiles_table(summary: Summary) -> Table:
    """Return percentiles beside their intervals, a row for each time that the charts show."""
    labels = time_labels(summary.correlation.breakdown)
    rows = (
        (labels[name], *(value for label in SHOWN for value in _cells(getattr(percentiles, label))))
        for name, percentiles in summary.methodology.percentiles.items()
    )
    title = "Percentiles and their 95 % intervals, ms; ?: too few requests to say"
    return table(title, numbers(*(text for name in SHOWN for text in (name, "from - to"))), rows)


def _cells(interval: QuantileInterval) -> tuple[Cell, Cell]:
    low, high = ("?" if end is None else ms(end) for end in (interval.low, interval.high))
    return interval.estimate, f"{low} - {high}"
