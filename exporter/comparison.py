"""Several runs beside each other, in sentences and tables: by how much the first and each other differ, and why.

The intervals are about the requests of these runs alone; what differs from run to run of one system is not in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import UnsetType
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from correlator.breakdown import TTFT_PARTS, Parts
from exporter.report.alerts import alerts, severe_lines
from exporter.report.format import Prose, table
from exporter.report.load import served_in_load, sustained
from exporter.report.method import generator_verdict, slowed_engine
from exporter.report.tables.client import CLIENT_ROWS
from exporter.report.tables.server import GAUGE_ROWS, gauge_cell
from exporter.summary.breakdown import json_name, label_of
from exporter.summary.result import Summary
from loadgen.requests.table import RequestLog
from methodology.intervals import LEAST_TAIL, Ends, difference, mean
from methodology.percentiles import QUANTILES, times_in_order
from rundir.printable.numbers import cell, ms, setting, spoken
from scraper.window.quantities import Gauge

LABELS = "ABCDEF"
STATISTICS = ("mean", "p50", "p90", "p99")
TIMES = dict.fromkeys(("ttft_ms", *map(json_name, TTFT_PARTS), "tpot_ms", "itl_ms", "e2e_ms"), STATISTICS)
LEAST_PART = 0.05  # of the change of the mean: less of a part is not named
CAUTION = (
    "The intervals are about the requests of these runs alone. Runs of one and the same system often differ by more; "
    "to claim a difference, repeat each run at least three times, in turn."
)
INTERVALS = (
    "Intervals are of means by Student's t, of percentiles by order statistics, and of differences by Zou and Donner's "
    "method from both."
)
_METHOD = {"out", "prometheus_write", "otlp_export", "formats", "quiet", "tag"}  # say nothing about what was measured


@dataclass(frozen=True)
class Compared:
    """One of the runs: the label that stands for it, the name of its directory, its summary and measured requests."""

    label: str
    name: str
    summary: Summary
    measured: RequestLog
    parts: Parts

    @cached_property
    def means(self) -> dict[str, Ends]:
        """Return the mean of each time, ms, with its interval."""
        return {name: mean(values) for name, values in times_in_order(self.measured, self.parts).items()}

    def ends(self, name: str, statistic: str) -> Ends | None:
        """Return a statistic of a time, ms, with its interval; None where no request has that time."""
        if statistic == "mean":
            return self.means.get(name)
        percentiles = self.summary.methodology.percentiles.get(name)
        if percentiles is None:
            return None
        interval = getattr(percentiles, statistic)
        return interval.estimate, interval.low, interval.high


def comparison(runs: Sequence[Compared]) -> Iterator[RenderableType]:
    """Yield the answer, what the runs were and differ in, and by how much their times differ."""
    yield from answer(runs)
    yield Text("")
    yield runs_table(runs)
    yield configuration_table(runs)
    yield from difference_tables(runs)
    yield Prose(INTERVALS)


def answer(runs: Sequence[Compared]) -> Iterator[RenderableType]:
    """Yield by how much the TTFT differs and which parts make that, and whether each run is to be trusted."""
    for run in runs:
        summary = run.summary
        severe = list(severe_lines(summary))
        yield from (Prose(f"! {run.label}: {line}", "red") for line in severe)
        yield from (Prose(f"! {run.label}: {line}", "yellow") for line in alerts(summary))
    first, *others = runs
    for other in others:
        yield Prose(" ".join(against(first, other)), "bold")
    yield Prose(same_requests(runs))
    yield Prose(CAUTION)
    for run in runs:
        trust = [] if run.summary.watch else [generator_verdict(run.summary), *slowed_engine(run.summary)]
        trust += [sustained(run.summary)] if run.summary.methodology.stability.verdict else []
        if trust:
            yield Prose(f"{run.label}: {' '.join(trust)}")


def against(first: Compared, other: Compared) -> Iterator[str]:
    """Yield the change of the mean TTFT, what parts make of it, and that of its p99."""
    mean_change, p99_change = (_change(first, other, "ttft_ms", statistic) for statistic in ("mean", "p99"))
    if mean_change is None:
        without = " and ".join(run.label for run in (first, other) if run.ends("ttft_ms", "mean") is None)
        yield f"{other.label} against {first.label}: no TTFT is known of {without}."
        return
    if over := [run.label for run in (first, other) if run.summary.methodology.stability.verdict == "growing"]:
        were = f"{' and '.join(over)} {'was' if len(over) == 1 else 'were'} overloaded"
        yield f"{other.label} against {first.label}: not comparable: {were}, so that times depend on how long it ran."
    yield f"{other.label} against {first.label}: the mean TTFT is {mean_change}."
    parts = [
        (end[0], label_of(part, other.summary.correlation.breakdown))
        for part in TTFT_PARTS
        if (end := _difference(first, other, json_name(part), "mean"))
    ]
    largest = max((abs(change) for change, _ in parts), default=0.0)
    named = sorted((part for part in parts if abs(part[0]) >= LEAST_PART * largest > 0), key=lambda part: -abs(part[0]))
    if named:
        some = any(run.summary.correlation.coverage.none for run in (first, other))
        whose = ", over the requests with a breakdown" if some else ""
        yield f"By part{whose}: {', '.join(f'{label} {_moved(change, largest)}' for change, label in named)}."
    yield f"The p99 is {p99_change}."


def _change(first: Compared, other: Compared, name: str, statistic: str) -> str | None:
    """Return how a statistic changed, in words; None where either run has none."""
    before, after = first.ends(name, statistic), other.ends(name, statistic)
    if before is None or after is None:
        return None
    change, low, high = difference(before, after)
    together = (before[0], after[0], low, high)
    how = f"{spoken(abs(change), *together)} {'higher' if change > 0 else 'lower'}" if change else "the same"
    words = f"{how} ({spoken(after[0], *together)} instead of {spoken(before[0], *together)}"
    if low is None or high is None:
        return f"{words}; {_why_no_interval((first, other), name, statistic)})"
    over = "growing" in (first.summary.methodology.stability.verdict, other.summary.methodology.stability.verdict)
    chance = ", which may be chance" if low <= 0 <= high and not over else ""
    return f"{words}; 95 % interval of the difference {_moved(low, *together)} to {_moved(high, *together)}){chance}"


def _why_no_interval(runs: Sequence[Compared], name: str, statistic: str) -> str:
    """Say why a difference has none: of the percentile of a run that says least, what its requests are worth."""
    few = "too few requests for an interval"
    if statistic == "mean":
        return few
    of = {run.label: getattr(run.summary.methodology.percentiles[name], statistic) for run in runs}
    label, interval = min(of.items(), key=lambda pair: pair[1].effective_tail)
    thin = min(QUANTILES[statistic], 1 - QUANTILES[statistic])
    independent, needed = interval.effective_tail / thin, LEAST_TAIL / thin
    if independent * interval.tau < needed:
        return few
    return (
        f"no interval: requests that queue together are slow together, so that the {independent * interval.tau:,.0f} "
        f"of {label} say as much about it as {independent:,.0f} independent ones, and it takes {needed:,.0f}"
    )


def _difference(first: Compared, other: Compared, name: str, statistic: str) -> Ends | None:
    before, after = first.ends(name, statistic), other.ends(name, statistic)
    return None if before is None or after is None else difference(before, after)


def _moved(change: float, *beside: float | None) -> str:
    return f"{'-' if change < 0 else '+'}{spoken(abs(change), *beside)}"


def _signed(value: float) -> str:
    text = ms(value)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def difference_tables(runs: Sequence[Compared], shown_of: Mapping[str, Sequence[str]] = TIMES) -> Iterator[Table]:
    """Yield for each run but the first a table of its times beside the first's, with the intervals of differences.

    `shown_of` are the statistics to show of each time. Rows in bold are of intervals that do not hold zero, and of
    differences that do not round to it.
    """
    first, *others = runs
    labels = {name: label.removesuffix(", ms") for name, label in CLIENT_ROWS if name.endswith("_ms")}
    labels |= {json_name(part): label_of(part, first.summary.correlation.breakdown) for part in TTFT_PARTS}
    for other in others:
        head = (first.label, other.label, "difference", "from", "to")
        intervals = "95 % intervals of differences, bold where they exclude 0, ?: too few requests to say"
        shown = table(f"{other.label} against {first.label}, ms; {intervals}", *head, kept_in="")
        for name, statistics in shown_of.items():
            for statistic in statistics:
                before, after = first.ends(name, statistic), other.ends(name, statistic)
                if before is None or after is None:
                    continue
                change, low, high = difference(before, after)
                ends = ("?" if end is None else _signed(end) for end in (low, high))
                label = Text(f"{labels[name]}, {statistic}")
                is_sure = low is not None and high is not None and not low <= 0 <= high
                style = "bold" if is_sure and _signed(change).strip("0.") else ""
                shown.add_row(label, ms(before[0]), ms(after[0]), _signed(change), *ends, style=style)
        yield shown


def runs_table(runs: Sequence[Compared]) -> Table:
    """Return the runs beside each other: what they were, what became of their requests, and what they served."""
    shown = _beside("Runs", runs)
    for label, value in (
        ("directory", lambda run: run.name),
        ("run", lambda run: run.summary.run_id),
        ("started", lambda run: run.summary.window.start),
        ("ended", lambda run: run.summary.status),
        ("requests sent", lambda run: cell(run.summary.client.requests.sent)),
        ("of them ok", lambda run: cell(run.summary.client.requests.ok)),
        ("requests/s sent", lambda run: cell(run.summary.client.rates.realised_requests_per_s)),
        ("requests/s served", lambda run: cell(served_in_load(run.summary))),
        ("output tokens/s", lambda run: cell(run.summary.client.throughput.output_tokens_per_s)),
    ):
        shown.add_row(label, *(Text(value(run)) for run in runs))
    for name, label in GAUGE_ROWS:
        most = [_most(run, name) for run in runs]
        if any(value is not None for value in most):
            shown.add_row(f"{label}, at most", *(gauge_cell(name, value) for value in most))
    return shown


def _most(run: Compared, name: str) -> float | None:
    """Return the most that a gauge of the engines showed, None where it is not known."""
    gauge: Gauge | UnsetType = getattr(run.summary.server, name)
    most = gauge.stats.max if gauge else None
    return most if isinstance(most, int | float) else None


def configuration_table(runs: Sequence[Compared]) -> Table:
    """Return what differs between the runs in configuration, engine and versions; a row says so where nothing does."""
    shown = _beside("What differs in the configuration", runs)
    settings = [_settings(run.summary) for run in runs]
    for name in dict.fromkeys(name for values in settings for name in values):
        known = [values.get(name) for values in settings]
        shown_values = ["-" if value in (None, "", []) else setting(name, value) for value in known]
        if len(set(shown_values)) > 1:
            shown.add_row(Text(name.replace("_", " ")), *map(Text, shown_values))
    if not shown.row_count:
        shown.add_row("nothing that Sidelight recorded", *("" for _ in runs))
        most = [cell(_most(run, "requests_running")) for run in runs]
        if len(set(most)) > 1:
            shown.add_row("most running at once (a limit of the engine may differ)", *most)
    return shown


def _settings(summary: Summary) -> Mapping[str, Any]:
    engine = summary.server.engine
    versions = {"engine": f"{engine.name} {engine.version or ''}".rstrip() if engine else None}
    versions["sidelight"] = summary.tool.version
    versions["tokenizer of lengths"] = summary.workload.tokenizer.name if summary.workload.tokenizer else None
    versions["requests (SHA-256)"] = (summary.workload.requests_sha256 or "")[:12]
    return versions | {name: value for name, value in summary.config.items() if name not in _METHOD}


def same_requests(runs: Sequence[Compared]) -> str:
    """Say whether the runs sent the same requests."""
    sent = {run.summary.workload.requests_sha256 for run in runs}
    if None in sent:
        return "Whether the runs sent the same requests is not known."
    if len(sent) == 1:
        return "All runs sent the same requests."
    return "The runs did not send the same requests: what differs may be due to that."


def _beside(title: str, runs: Sequence[Compared]) -> Table:
    shown = table(title, *(run.label for run in runs), kept_in="")
    for column in shown.columns[1:]:
        column.justify = "left"
    return shown
