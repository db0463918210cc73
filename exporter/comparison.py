"""Several runs beside each other, in tables. Whether they differ by more than chance, `methodology.compare` tells, by
repeated runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from msgspec import UnsetType

from sidelight.correlator.parts import LABELS as LABELS_OF
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import BLANK, Block, Cell, Prose, Table, numbers, table, words
from sidelight.exporter.report.alerts import alerts
from sidelight.exporter.report.load import served_in_load, sustained
from sidelight.exporter.report.method import generator_verdict, slowed_engine
from sidelight.exporter.report.tables.client import time_labels
from sidelight.exporter.report.tables.server import GAUGE_ROWS, gauge_cell
from sidelight.exporter.report.verdict import LEVELS, TONES, verdict_blocks, verdict_of
from sidelight.exporter.summary.breakdown import json_name
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.tail import LEAST_FOR_P99
from sidelight.exporter.summary.verdict import (
    MeanParts,
    PartShare,
    RunVerdict,
    SidesFigure,
    StudyState,
    StudyVerdict,
    Subject,
)
from sidelight.loadgen.requests.self_check.claims import Claim, are_sure
from sidelight.loadgen.requests.self_check.stated_error import UNUSABLE_RATIO
from sidelight.rundir.printable.numbers import cell, setting, spoken, spoken_together
from sidelight.rundir.printable.text import as_sentence
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
    """Yield the verdict on the last run beside the first, then the state of each."""
    states = [(run, verdict_of(run.summary)) for run in runs]
    yield from verdict_blocks(_verdict(runs, states))
    for run, verdict in states:
        yield Prose(f"{run.label}: {verdict.headline}", TONES[verdict.state])
    yield BLANK


def _verdict(runs: Sequence[Compared], states: Sequence[tuple[Compared, RunVerdict]]) -> StudyVerdict:
    """Return the verdict on single runs: how far they differ, which is undecided, since it may be chance."""
    sides = [_side(run, verdict) for run, verdict in states]
    first, last = sides[0], sides[-1]
    bad = [f"{run.label} {NOT_COMPARABLE[each.state]}" for run, each in states if each.state in NOT_COMPARABLE]
    least = min(run.summary.client.ttft_ms.count for run in (runs[0], runs[-1]))
    level = "p99" if least >= LEAST_FOR_P99 else "p50"
    before_ms, after_ms = first.ttft_ms[level], last.ttft_ms[level]
    do = CAUTION
    if bad:
        headline = f"Not comparable: {', '.join(bad)}."
        do = " ".join(f"For {run.label}: {each.do}" for run, each in states if each.state in NOT_COMPARABLE)
    elif not before_ms or not after_ms:
        headline = "Not comparable: a run has no TTFT."
    elif not are_sure([Claim(after_ms, before_ms)], error_ms := sum(map(_error_ms, runs))):
        times = " and ".join(spoken_together(after_ms, before_ms))
        headline = f"Not decided: {level} of the TTFT, {times}, may each be off: together by {spoken(error_ms)}."
        cures = (check.cause.cure for run in runs if (check := run.summary.self_check).cause and _error_ms(run))
        do = as_sentence(f"measure again; {next(cures, 'keep processors free for the load generator')}")
    else:
        times = " and ".join(spoken_together(after_ms, before_ms))
        how = f"{moved(after_ms / before_ms)} {'slower' if after_ms >= before_ms else 'faster'}"
        headline = f"{last.name} is {how} than {first.name} at {level} of the TTFT: {times}."
    return comparison_verdict(sides, "undecided", headline, do)


def _error_ms(run: Compared) -> float:
    """Return the error of a run's TTFT where it is large, else 0."""
    error = run.summary.self_check.error_ms.ttft
    return error.p99 or 0.0 if error.unusable else 0.0


def _side(run: Compared, verdict: RunVerdict) -> Side:
    client = run.summary.client
    mean_ms = sum(part.mean_ms for part in verdict.parts)
    return Side(
        name=run.label,
        served_per_s=next((figure.value for figure in verdict.figures if figure.name == "served"), None),
        ttft_ms={level: getattr(client.ttft_ms, level) for level in LEVELS},
        failed=client.requests.failed + client.requests.refused,
        sent=client.requests.sent,
        parts=verdict.parts if client.ttft_ms.mean is not None else (),
        mean_ms=mean_ms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the compared sides: its figures, and the parts of its mean TTFT. Empty or None is what is not known."""

    name: str
    served_per_s: float | None
    ttft_ms: Mapping[str, float | None]
    failed: int
    sent: int
    parts: Sequence[PartShare]
    mean_ms: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the other side's figure to the first one's; its interval where known."""

    value: float | None
    ci95: tuple[float, float] | None = None


def moved(ratio: float) -> str:
    """Return a ratio as how many times or percent more or less it is."""
    times = max(ratio, 1 / ratio)
    return f"{times:.1f} times" if times >= TWICE else f"{100 * abs(ratio - 1):.0f} %"


def comparison_verdict(
    sides: Sequence[Side],
    state: StudyState,
    headline: str,
    do: str,
    ratios: Mapping[str, Ratio] | None = None,
    *,
    error_ms: float = 0.0,
) -> StudyVerdict:
    """Return the verdict on the last side beside the first, with a bar for each.

    error_ms  of the load generator: a change of the mean counts from ten times that on
    """
    first, last = sides[0], sides[-1]
    known = all(side.parts for side in (first, last))
    before, after = ({part.part: part.mean_ms for part in side.parts} for side in (first, last))
    changes = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in dict.fromkeys((*before, *after))}
    whole = sum(changes.values())
    cause: Subject = "none"
    if not known:
        why = "Which part of the TTFT makes the difference is not known: a side has no breakdown."
    elif error_ms > UNUSABLE_RATIO * abs(whole):
        why = f"The mean TTFT changed by {_change(whole)}, less than the load generator's own error can make."
    else:
        cause = max(changes, key=lambda part: abs(changes[part]))
        part, times = LABELS_OF[cause], spoken_together(before.get(cause, 0.0), after.get(cause, 0.0))
        why = f"The mean TTFT changed by {_change(whole)}, of which {part} is {_change(changes[cause])} "
        why += f"({' -> '.join(times)})."
    return StudyVerdict(
        state=state,
        cause=cause,
        headline=headline,
        figures=list(_figures(first, last, ratios or {})),
        bars=[
            MeanParts(label=f"{side.name}: mean TTFT {spoken(side.mean_ms)}", mean_ms=side.mean_ms, parts=[*side.parts])
            for side in sides
            if side.parts
        ],
        why=why,
        do=as_sentence(do),
    )


def _change(value_ms: float) -> str:
    return f"{value_ms:+,.0f} ms" if abs(value_ms) >= 100 else f"{value_ms:+.3g} ms"


def _figures(first: Side, last: Side, ratios: Mapping[str, Ratio]) -> Iterator[SidesFigure]:
    """Yield the figures of both sides, each with the ratio and its interval."""
    pairs = {
        "served": (first.served_per_s, last.served_per_s),
        **{f"ttft_{level}": (first.ttft_ms[level], last.ttft_ms[level]) for level in LEVELS},
    }
    for name, (base, value) in pairs.items():
        texts = [cell(base), f"{cell(value)} requests/s"] if name == "served" else spoken_together(base, value)
        ratio = ratios.get(name, Ratio(value / base if base and value is not None else None))
        times = "" if ratio.value is None else f", {_times(ratio.value)} times"
        interval = "" if ratio.ci95 is None else f" ({' to '.join(map(_times, ratio.ci95))})"
        yield SidesFigure(
            name=cast("Any", name),
            label=name if name == "served" else name.upper().replace("_P", " p"),
            value=value,
            base=base,
            ratio=ratio.value,
            ratio_ci95=ratio.ci95,
            text=f"{' -> '.join(texts)}{times}{interval}",
        )
    yield SidesFigure(
        name="failed",
        label="failed",
        value=float(last.failed),
        base=float(first.failed),
        text=f"{first.failed:,} of {first.sent:,} -> {last.failed:,} of {last.sent:,}",
        bad=first.failed + last.failed > 0,
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < TWICE else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


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
