"""Several runs beside each other, in tables. Whether they differ by more than chance, `methodology.compare` tells, by
repeated runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UnsetType

from sidelight.correlator.parts import LABELS as LABELS_OF
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import BLANK, Block, Cell, Prose, Table, numbers, table, words
from sidelight.exporter.report.alerts import alerts
from sidelight.exporter.report.load import served_in_load, sustained
from sidelight.exporter.report.method import generator_verdict, slowed_engine
from sidelight.exporter.report.tables.client import time_labels
from sidelight.exporter.report.tables.server import GAUGE_ROWS, gauge_cell
from sidelight.exporter.report.verdict import TONES, verdict_blocks, verdict_of
from sidelight.exporter.summary.breakdown import json_name
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.tail import LEAST_FOR_P99
from sidelight.rundir.printable.numbers import cell, setting, spoken
from sidelight.rundir.stats import Statistics
from sidelight.scraper.window.quantities import Gauge

LABELS = "ABCDEF"
STATISTICS = ("mean", "p50", "p90", "p99")
TIMES = dict.fromkeys(("ttft_ms", *map(json_name, TTFT_PARTS), "tpot_ms", "itl_ms", "e2e_ms"), STATISTICS)
CAUTION = "Single runs of one system differ, too: to claim a difference, repeat them with `sidelight compare`."
# States in which times are not the service's, in words.
NOT_COMPARABLE = {"failing": "failed", "untrusted": "is not to be trusted", "overloaded": "was overloaded"}
TWICE = 2.0  # from which on a difference is said in times
_METHOD = {"out", "prometheus_write", "otlp_export", "formats", "quiet", "tag"}  # say nothing about what was measured


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs: the label that stands for it, the name of its directory, and its summary."""

    label: str
    name: str
    summary: Summary


def comparison(runs: Sequence[Compared]) -> Iterator[Block]:
    """Yield the verdict, the runs' warnings, then the tables of runs, differing settings and times."""
    yield from verdict_on(runs)
    yield from doubts(runs)
    yield BLANK
    yield runs_table(runs)
    yield configuration_table(runs)
    yield times_table(runs)


def verdict_on(runs: Sequence[Compared]) -> Iterator[Block]:
    """Yield the difference of the last run from the first; then the state, figures and parts of each."""
    (first, last), verdicts = (runs[0], runs[-1]), [verdict_of(run.summary) for run in runs]
    states = list(zip(runs, verdicts, strict=True))
    bad = [f"{run.label} {NOT_COMPARABLE[each.state]}" for run, each in states if each.state in NOT_COMPARABLE]
    if bad:
        yield Prose(f"Not comparable: {', '.join(bad)}.", "alarm strong headline")
        cures = [f"{run.label}: {each.do}" for run, each in states if each.state in NOT_COMPARABLE]
        yield Prose(f"Do this, for {' '.join(cures)}", "strong")
    else:
        yield from _difference(first, last)
    yield BLANK
    for run, verdict in zip(runs, verdicts, strict=True):
        _, *others = verdict_blocks(verdict)
        yield Prose(f"{run.label}: {verdict.headline}", TONES[verdict.state])
        yield from (block for block in others if not isinstance(block, Prose))
        yield BLANK


def _difference(first: Compared, last: Compared) -> Iterator[Prose]:
    """Yield the difference of the TTFT, its largest part, and advice."""
    sides = [run.summary.client.ttft_ms for run in (first, last)]
    level = "p99" if min(side.count for side in sides) >= LEAST_FOR_P99 else "p50"
    before, after = (getattr(side, level) for side in sides)
    if not before or not after:
        yield Prose("Not comparable: a run has no TTFT.", "strong headline")
        return
    how, ratio = ("slower", after / before) if after >= before else ("faster", before / after)
    moved = f"{ratio:.1f} times {how} than" if ratio >= TWICE else f"{100 * abs(after / before - 1):.0f} % {how} than"
    times = f"{spoken(after, before)} and {spoken(before, after)}"
    yield Prose(f"{last.label} is {moved} {first.label} at {level} of the TTFT: {times}.", "strong headline")
    parts = [run.summary.correlation.breakdown for run in (first, last)]
    changes = {
        part.name: means[1] - means[0]
        for part in TTFT_PARTS
        if None not in (means := [getattr(each, json_name(part)).mean for each in parts])
    }
    if whole := sum(changes.values()):
        name, change = max(changes.items(), key=lambda pair: abs(pair[1]))
        yield Prose(f"Why: Of the change of the mean TTFT, {whole:+,.1f} ms, {LABELS_OF[name]} is {change:+,.1f} ms.")
    yield Prose(f"Do this: {CAUTION}", "strong")


def doubts(runs: Sequence[Compared]) -> Iterator[Block]:
    """Yield each run's warnings and trust, and whether the runs are comparable."""
    for run in runs:
        yield from (Prose(f"! {run.label}: {line}", "warning") for line in alerts(run.summary))
    yield Prose(same_requests(runs))
    for run in runs:
        trust = [] if run.summary.watch else [generator_verdict(run.summary), *slowed_engine(run.summary)]
        trust += [sustained(run.summary)] if run.summary.methodology.stability.verdict else []
        if trust:
            yield Prose(f"{run.label}: {' '.join(trust)}")


def times_table(runs: Sequence[Compared], shown_of: Mapping[str, Sequence[str]] = TIMES) -> Table:
    """Return the times of the runs beside each other; `shown_of` are the statistics to show of each time."""
    labels, rows = time_labels(runs[0].summary.correlation.breakdown), list[tuple[Cell, ...]]()
    for name, statistics in shown_of.items():
        of_runs = [_of(run.summary, name) for run in runs]
        for statistic in statistics:
            values = [getattr(of_run, statistic, None) for of_run in of_runs]
            if any(value is not None for value in values):
                rows.append((f"{labels[name]}, {statistic}", *values))
    return table("Times, ms", numbers(*(run.label for run in runs)), rows, kept_in="")


def _of(summary: Summary, name: str) -> Statistics | UnsetType:
    """Return the statistics of a time or of a part of the TTFT; of gaps between chunks, under either of their names."""
    client = summary.client
    if name == "itl_ms":
        return client.itl_ms or client.time_between_chunks_ms
    of: Statistics | UnsetType = getattr(client, name, None) or getattr(summary.correlation.breakdown, name)
    return of


def runs_table(runs: Sequence[Compared]) -> Table:
    """Return the runs beside each other: what they were, what became of their requests, and what they served."""
    facts: tuple[tuple[str, Callable[[Compared], str]], ...] = (
        ("directory", lambda run: run.name),
        ("run", lambda run: run.summary.run_id),
        ("started", lambda run: run.summary.window.start),
        ("ended", lambda run: run.summary.status),
        ("requests sent", lambda run: cell(run.summary.client.requests.sent)),
        ("of them ok", lambda run: cell(run.summary.client.requests.ok)),
        ("requests/s sent", lambda run: cell(run.summary.client.rates.realised_requests_per_s)),
        ("requests/s served", lambda run: cell(served_in_load(run.summary))),
        ("output tokens/s", lambda run: cell(run.summary.client.throughput.output_tokens_per_s)),
    )
    rows = [(label, *(value(run) for run in runs)) for label, value in facts]
    for name, label in GAUGE_ROWS:
        most = [_most(run, name) for run in runs]
        if any(value is not None for value in most):
            rows.append((f"{label}, at most", *(gauge_cell(name, value) for value in most)))
    return _beside("Runs", runs, rows)


def _most(run: Compared, name: str) -> float | None:
    """Return the maximum of a gauge over the engines, None if unknown."""
    gauge: Gauge | UnsetType = getattr(run.summary.server, name)
    most = gauge.stats.max if gauge else None
    return most if isinstance(most, int | float) else None


def configuration_table(runs: Sequence[Compared]) -> Table:
    """Return a table of the runs' differences in configuration, engine and versions. A row says so if there are no
    differences.
    """
    settings = [_settings(run.summary) for run in runs]
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(name for values in settings for name in values):
        known = [values.get(name) for values in settings]
        shown_values = ["-" if value in (None, "", []) else setting(name, value) for value in known]
        if len(set(shown_values)) > 1:
            rows.append((name.replace("_", " "), *shown_values))
    if not rows:
        rows.append(("nothing that Sidelight recorded", *("" for _ in runs)))
        most = [cell(_most(run, "requests_running")) for run in runs]
        if len(set(most)) > 1:
            rows.append(("most running at once (a limit of the engine may differ)", *most))
    return _beside("What differs in the configuration", runs, rows)


def _settings(summary: Summary) -> Mapping[str, Any]:
    engine = summary.server.engine
    versions = {"engine": f"{engine.name} {engine.version or ''}".rstrip() if engine else None}
    versions["sidelight"] = summary.tool.version
    versions["tokenizer of lengths"] = summary.workload.tokenizer.name if summary.workload.tokenizer else None
    versions["requests (SHA-256)"] = (summary.workload.requests_sha256 or "")[:12]
    return versions | {name: value for name, value in summary.config.items() if name not in _METHOD}


def same_requests(runs: Sequence[Compared]) -> str:
    """Return a sentence on whether the runs sent the same requests."""
    sent = {run.summary.workload.requests_sha256 for run in runs}
    if None in sent:
        return "Whether the runs sent the same requests is not known."
    if len(sent) == 1:
        return "All runs sent the same requests."
    return "The runs did not send the same requests: what differs may be due to that."


def _beside(title: str, runs: Sequence[Compared], rows: Iterable[Sequence[str]]) -> Table:
    return table(title, (words(run.label) for run in runs), rows, kept_in="")
