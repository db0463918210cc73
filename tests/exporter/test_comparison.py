"""Several runs beside each other: what is said of differences that mean nothing, or are not known."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import summaries

from exporter.comparison import against, configuration_table, difference_tables
from exporter.report.format import plain
from exporter.summary.result import Summary
from methodology.intervals import Ends, quantiles
from methodology.percentiles import QUANTILES, PercentileIntervals


@dataclass
class Stated:
    """A run whose statistics of the TTFT are given."""

    label: str
    known: dict[str, Ends]
    summary: Summary = field(default_factory=lambda: summaries.summary(summaries.correlated()))

    def ends(self, name: str, statistic: str) -> Ends | None:
        return self.known.get(statistic) if name == "ttft_ms" else None


def test_a_difference_that_rounds_to_zero_is_not_bold():
    """However narrow its interval: a row of zeros in bold says that something differs."""
    first: Any = Stated("A", {"mean": (0.4, 0.4, 0.4), "p50": (5.0, 4.9, 5.1)})
    second: Any = Stated("B", {"mean": (0.4001, 0.4001, 0.4001), "p50": (7.0, 6.9, 7.1)})
    (shown,) = difference_tables([first, second])
    assert [(label, row.style) for label, row in zip(map(plain, shown.columns[0].cells), shown.rows, strict=True)] == [
        ("TTFT, mean", ""), ("TTFT, p50", "bold"),
    ]  # fmt: skip


def run_of(label: str, values: np.ndarray[Any, Any]) -> Any:
    """A run of so many times in order, of which the p99 has no upper end."""
    whole = summaries.summary(summaries.correlated())
    intervals = PercentileIntervals(**dict(zip(QUANTILES, quantiles(values, list(QUANTILES.values())), strict=True)))
    methodology = msgspec.structs.replace(whole.methodology, percentiles={"ttft_ms": intervals})
    p99 = intervals.p99
    return Stated(
        label, {"p99": (p99.estimate or 0.0, p99.low, p99.high), "mean": (50.0, 49.0, 51.0)},
        msgspec.structs.replace(whole, methodology=methodology),
    )  # fmt: skip


def test_a_difference_without_an_interval_says_why():
    """Many requests that depend on each other are not few; they say as much as few."""
    waves = np.repeat(np.random.default_rng(2).exponential(100.0, 200), 100)
    text = " ".join(against(run_of("A", waves), run_of("B", waves)))
    assert "no interval: requests that queue together are slow together, so that the 20,000 of A say as much" in text
    assert "independent ones, and it takes 2,000)" in text
    few = run_of("A", np.random.default_rng(2).exponential(100.0, 200))
    assert "too few requests for an interval)" in " ".join(against(few, few))


def test_the_most_running_at_once_stands_where_no_setting_differs():
    """It may be a limit of the engine, which Sidelight does not record."""
    runs: list[Any] = []
    for label, most in (("A", 16.0), ("B", 18.0)):
        server = summaries.server(requests_running=summaries.gauge(mean=4.0, p50=4.0, p99=most, max=most))
        runs.append(Stated(label, {}, summaries.summary(summaries.correlated(), server)))
    shown = configuration_table(runs)
    assert [[plain(cell) for cell in column.cells] for column in shown.columns] == [
        ["nothing that Sidelight recorded", "most running at once (a limit of the engine may differ)"],
        ["", "16"],
        ["", "18"],
    ]


def test_a_sentence_has_one_unit():
    """Seconds where any of its times has ten: a difference of 16 s beside one in ms is hard to read."""
    first: Any = Stated("A", {"mean": (6_785.0, 100.0, 26_000.0), "p99": (9_000.0, 8_000.0, 12_000.0)})
    second: Any = Stated("B", {"mean": (7_551.0, 5_000.0, 9_000.0), "p99": (9_100.0, 8_000.0, 9_900.0)})
    mean, *_, p99 = against(first, second)
    assert "instead of 6.79 s" in mean
    for sentence in (mean, p99):
        units = set(re.findall(r"\d (ms|s)\b", sentence))
        assert len(units) == 1
