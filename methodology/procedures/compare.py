"""Comparison of systems: the same requests at the same moments for each, in pairs that are measured in turn.

Draft, "Multi-System Comparison Guidelines". Requests of a run depend on each other, so that runs, not requests, are
what is tested; the runs of a pair have the same requests, so that what these ask for is in no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.parts import CAUSES, LABELS, TTFT_PARTS
from sidelight.loadgen.requests.self_check.stated_error import UNUSABLE_RATIO
from sidelight.methodology.compare import LEAST_RUNS, Comparison, of_family, paired, unpaired
from sidelight.methodology.compliance.fair_comparison import checklist
from sidelight.methodology.measures.paired import overloaded
from sidelight.methodology.study.findings import (
    Cell,
    Plot,
    PlotLine,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    SupportingNumber,
    plot,
    table,
)
from sidelight.methodology.study.model import Done, Finished, Parameters, Procedure, Reader, Step, StudySettings
from sidelight.methodology.study.planning import content_seed, counting, of_kind
from sidelight.methodology.study.quantities import number, slug
from sidelight.methodology.study.samples import FAMILY, RATES, TIMES, ComparedMetric, RunSample, sample
from sidelight.methodology.study.saturation import Capacity, capacity
from sidelight.rundir.printable.numbers import figure
from sidelight.rundir.stats import finite, known

PAIR = "pair"
LEVEL = 0.95
RECORDED = 0  # pairs to measure, where runs are compared that were recorded before
SAME_SUCCESS = 0.01  # success rates that differ by less are taken as the same
MARGIN = 0.05
TIMES_FROM = 2.0  # a ratio, from which on a change is said in times, not in percent
_LETTER = Parameters(load=0.7, duration=60.0, pairs=5, margin=MARGIN)
TESTED = (
    "Student's t on the logarithm of each run's ratio, over pairs of runs with the same requests (Welch's where runs "
    "are not paired); Holm's correction over all metrics; equivalent by two one-sided tests (Schuirmann 1987)"
)
NOTES = (
    (
        "Runs, not requests, are compared: requests that queue together are slow together, and a test over pooled "
        "requests calls identical systems different in more than half of all cases."
    ),
    (
        "A failed request took for ever. Where success rates differ, latencies are of different requests and get no "
        "verdict; the rate of completed requests decides."
    ),
    "Tokens per dollar-hour is read as tokens per second over dollars per hour.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A configuration beside the first: runs of both, and by metric what is concluded."""

    first: str
    other: str
    before: Sequence[RunSample]
    after: Sequence[RunSample]
    is_paired: bool  # the k-th runs of both
    concluded: Mapping[str, Comparison]


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the next run: pair by pair, the configurations of each in an order by the study's seed."""
    parameters, variants = asked.parameters, asked.variants
    if parameters.pairs == RECORDED:
        return Done(reason="recorded runs were compared")
    if len(variants) < 2:
        return Done(reason="a comparison needs two configurations", complete=False)
    load = _load(asked, [each for each in finished if each.step.kind != PAIR])
    if isinstance(load, Step):
        return replace(load, variant=variants[0])
    if isinstance(load, Done):
        return load
    runs = of_kind(finished, PAIR)
    measured = {(each.step.seed, each.step.variant) for each in runs}
    void = {(each.step.seed, each.step.variant) for each in runs if each.outcome.void}
    before = sum(each.step.kind != PAIR for each in finished)
    pairs = parameters.pairs or LEAST_RUNS
    for pair in range(1, pairs + 1):
        seed = content_seed(asked, before + pair)  # not what the first configuration was saturated with
        if (seed, variants[0]) in void or all((seed, other) in void for other in variants[1:]):
            continue  # no run of this pair has its like
        for place in np.random.default_rng([asked.seed, pair]).permutation(len(variants)).tolist():
            if (seed, variants[place]) not in measured:
                step = load | {"duration": parameters.duration, "requests": parameters.requests, "seed": seed}
                label = f"pair-{pair}-{variants[place]}"
                return Step(**step, kind=PAIR, label=label, variant=variants[place], reset_cache=True)
    return Done(reason=f"{pairs} runs of each configuration were measured")


def _load(asked: StudySettings, finished: Sequence[Finished]) -> dict[str, Any] | Step | Done:
    """Return the requested load in numbers, else a share of the first configuration's capacity."""
    if rate := asked.parameters.rate:
        return {"load": "open", "level": rate}
    if concurrency := asked.parameters.concurrency:
        return {"load": "closed", "level": float(concurrency)}
    known = capacity(asked, finished)
    if not isinstance(known, Capacity):
        return known
    return {"load": "open", "level": (asked.parameters.load or 1.0) * known.per_s}


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Return each configuration's difference from the first, with its certainty and cause."""
    runs = of_kind(counting(finished), PAIR)
    samples, facts = [], []
    for each in runs:
        data = read(each)
        samples.append(sample(each, data, doubts=()))  # how far off times may be is held against the difference
        facts.append(data.about)
    margin = asked.parameters.margin or MARGIN
    in_turn = asked.parameters.pairs != RECORDED
    comparisons = [against(samples, asked.variants[0], other, margin, in_turn=in_turn) for other in asked.variants[1:]]
    return StudyFindings(
        answer=tuple(sentence for each in comparisons for sentence in _answer(each, asked)),
        results={name: quantity for each in comparisons for name, quantity in _results(each)},
        evidence=tuple(item for each in comparisons for item in _evidence(each)),
        tables=(
            *(_verdict_table(each, margin) for each in comparisons),
            *(_part_table(each) for each in comparisons),
            _run_table(samples),
            checklist(asked, runs, facts),
        ),
        plots=tuple(_plot(samples, metric) for metric in (TIMES[0], TIMES[2], RATES[0])),
        notes=(*NOTES, *overloaded(runs)),
        passed=_passed(comparisons) if asked.parameters.gate else None,
    )


def _passed(comparisons: Sequence[Against]) -> bool | None:
    """Return whether no configuration is worse than the first; None where that cannot be said of one."""
    if any(of.verdict == "worse" for each in comparisons for of in each.concluded.values()):
        return False
    known = [
        any(of.verdict for of in each.concluded.values())
        and not _all_failed([*each.before, *each.after])
        and not any(_hides(metric, each.before, each.after) for metric in TIMES if metric.kind == "ttft")
        for each in comparisons
    ]
    return True if all(known) else None


def against(samples: Sequence[RunSample], first: str, other: str, margin: float, *, in_turn: bool = False) -> Against:
    """Conclude on the differences between two configurations' runs, over all metrics.

    in_turn  they were measured in pairs of equal seeds: only whole pairs are compared, however few these are
    """
    before, after = ([each for each in samples if each.finished.step.variant == name] for name in (first, other))
    seeds = [[each.finished.step.seed for each in group] for group in (before, after)]
    common = set(seeds[0]) & set(seeds[1])
    is_paired = all(len(set(group)) == len(group) for group in seeds) and (
        in_turn or len(common) >= LEAST_RUNS or set(seeds[0]) == set(seeds[1])
    )
    if is_paired:  # a run without its like, as a void one leaves it, says nothing of a difference
        before, after = (
            sorted(
                (each for each in group if each.finished.step.seed in common), key=lambda each: each.finished.step.seed
            )
            for group in (before, after)
        )
    empty = [name for name, group in ((first, before), (other, after)) if not group]
    if empty:
        reason = "no pair has a run of both that counts" if is_paired else f"no run of {' and of '.join(empty)} counts"
        concluded = {metric.name: Comparison(reason=reason) for metric in FAMILY}
    else:
        names = (first, other)
        concluded = {metric.name: _compared(metric, names, before, after, margin, is_paired) for metric in FAMILY}
    return Against(
        first=first, other=other, before=before, after=after, is_paired=is_paired, concluded=of_family(concluded, LEVEL)
    )


def _compared(
    metric: ComparedMetric,
    names: tuple[str, str],
    before: Sequence[RunSample],
    after: Sequence[RunSample],
    margin: float,
    is_paired: bool,
) -> Comparison:
    """Compare one metric of runs, at least one of each; where that cannot be done it has no verdict, and the reason."""
    success = [float(np.mean([each.success for each in group])) for group in (before, after)]
    if metric in TIMES and abs(success[0] - success[1]) > SAME_SUCCESS:
        shares = " and ".join(f"{100 * share:.1f} %" for share in success)
        return Comparison(reason=f"success rates differ ({shares}), so that these are times of different requests")
    a, b = ([each.metrics[metric.name] for each in group] for group in (before, after))
    if metric in RATES and (
        failed := [name for name, group in zip(names, (before, after), strict=True) if _all_failed(group)]
    ):
        return Comparison(reason=f"no request of a run of {' and of one of '.join(failed)} ended ok: it has no ratio")
    if np.isinf([*a, *b]).any():
        return Comparison(reason="it falls on one of the requests that failed")
    if empty := [name for name, values in zip(names, (a, b), strict=True) if np.isnan(values).all()]:
        return Comparison(reason=f"no run of {' and none of '.join(empty)} has it")
    if hidden := _hides(metric, before, after):
        return Comparison(reason=hidden)
    compare = paired if is_paired else unpaired
    return compare(a, b, margin, LEVEL, lower_is_better=metric.lower_is_better)


def _all_failed(runs: Sequence[RunSample]) -> bool:
    """Return whether a run had no request that ended ok."""
    return any(each.success == 0 for each in runs)


def _hides(metric: ComparedMetric, before: Sequence[RunSample], after: Sequence[RunSample]) -> str:
    """Return a reason if a time's difference is within the load generator's error, else ""."""
    error_ms = _error_ms(metric, before, after)
    means = [known([each.metrics[metric.name] for each in group]) for group in (before, after)]
    if not error_ms or not all(len(each) and np.isfinite(each).all() for each in means):
        return ""
    apart_ms = abs(float(means[1].mean() - means[0].mean()))
    if error_ms <= UNUSABLE_RATIO * apart_ms:
        return ""
    return (
        f"the load generator was held up: single values may be off by {figure(error_ms)} ms, which is over a tenth of "
        f"the difference, {figure(apart_ms)} ms"
    )


def _error_ms(metric: ComparedMetric, before: Sequence[RunSample], after: Sequence[RunSample]) -> float:
    return max((each.error_ms.get(metric.kind, 0.0) for each in (*before, *after) if metric.kind), default=0.0)


def _answer(comparison: Against, asked: StudySettings) -> Iterator[str]:
    """Yield the conclusion, its certainty, and the part of the TTFT that makes the difference."""
    by_verdict: dict[str, list[str]] = {}
    without: dict[str, list[str]] = {}  # metrics by why they have no verdict
    for metric in FAMILY:
        concluded = comparison.concluded[metric.name]
        if concluded.verdict is not None:
            differs = concluded.verdict in ("better", "worse")
            moved = f" ({_change(concluded.ratio or 1)})" if differs else ""
            by_verdict.setdefault(concluded.verdict, []).append(f"{metric.title}{moved}")
        else:
            without.setdefault(concluded.reason, []).append(metric.title)
    name, base, margin = comparison.other, comparison.first, asked.parameters.margin or MARGIN
    if not by_verdict:
        yield f"{name} against {base}: no verdict; {next(iter(without))}."
        return
    words = {"worse": "worse on", "better": "better on", "inconclusive": "inconclusive on",
             "equivalent": f"equivalent within {100 * margin:g} % on"}  # fmt: skip
    listed = "; ".join(
        f"{said} {', '.join(by_verdict[verdict])}" for verdict, said in words.items() if verdict in by_verdict
    )
    yield from _headline(comparison)
    yield f"{name} against {base}, over {_runs_in_words(comparison, asked)}: {listed}."
    if over := _overloaded(comparison):
        were = f"{' and '.join(over)} {'was' if len(over) == 1 else 'were'} overloaded"
        yield f"How far latencies differ depends on how long the load lasted: {were}."
    yield from (f"No verdict on {', '.join(titles)}: {reason}." for reason, titles in without.items())
    more = {metric.title: comparison.concluded[metric.name].more_pairs or 0 for metric in FAMILY}
    if least := min((count for count in more.values() if count), default=0):
        what = f"pair{'s' * (least > 1)}" if comparison.is_paired else f"run{'s' * (least > 1)} of each"
        names = [title for title, count in more.items() if count == least]
        few = any(comparison.concluded[each.name].pairs < LEAST_RUNS for each in FAMILY if more[each.title] == least)
        others = "; how many the others need is in the table" if sum(map(bool, more.values())) > len(names) else ""
        how = ("At least", "must be measured to judge") if few else ("About", "would decide")
        yield f"{how[0]} {least} more {what} {how[1]} {', '.join(names)}{others}."
    changes = {name: after - before for name, (before, after) in _part_means(comparison).items()}
    error_ms = _error_ms(TIMES[0], comparison.before, comparison.after)
    if (whole := sum(changes.values())) and error_ms <= UNUSABLE_RATIO * abs(whole):
        part, change = max(changes.items(), key=lambda pair: abs(pair[1]))
        yield f"The mean TTFT changed by {whole:+,.1f} ms, of which {LABELS[part]} is {change:+,.1f} ms."


def _headline(comparison: Against) -> Iterator[str]:
    """Yield a sentence on the sure difference of the TTFT and on its largest part."""
    sure = [
        metric
        for metric in TIMES
        if metric.kind == "ttft" and comparison.concluded[metric.name].verdict in ("better", "worse")
    ]
    if not sure or _overloaded(comparison):
        return
    metric = sure[-1]
    ratio = comparison.concluded[metric.name].ratio or 1.0
    changes = {part: after - before for part, (before, after) in _part_means(comparison).items()}
    cause = ""
    if changes:
        part = max(changes, key=lambda name: abs(changes[name]))
        cause = f"; {CAUSES[part]} makes most of it"
    how, times = ("slower", ratio) if ratio >= 1 else ("faster", 1 / ratio)
    moved = f"{figure(times)} times" if times >= TIMES_FROM else f"{100 * abs(ratio - 1):.0f} %"
    yield f"{comparison.other} is {moved} {how} than {comparison.first} at {metric.title}{cause}; sure at 95 %."


def _overloaded(comparison: Against) -> list[str]:
    """Return the names of the configurations with a run in which requests piled up."""
    sides = {comparison.first: comparison.before, comparison.other: comparison.after}
    return [name for name, runs in sides.items() if any(each.finished.outcome.verdict == "growing" for each in runs)]


def _runs_in_words(comparison: Against, asked: StudySettings) -> str:
    """Return the number of pairs in words, and their names if some are incomplete."""
    counts = [len(comparison.before), len(comparison.after)]
    if not comparison.is_paired:
        sides = f"{counts[0]} run{'s' * (counts[0] != 1)} of {comparison.first} and {counts[1]} of {comparison.other}"
        return f"{sides}, which are not paired"
    planned = asked.parameters.pairs or counts[0]
    if counts[0] >= planned:
        return f"{counts[0]} pair{'s' * (counts[0] != 1)} of runs"
    steps = sorted((each.finished.step for each in comparison.before), key=lambda step: step.label)
    names = ", ".join(step.label.removesuffix(f"-{step.variant}") for step in steps)
    return f"{counts[0]} of {planned} pairs of runs ({names})"


def _change(ratio: float) -> str:
    return f"{figure(ratio)} times" if ratio >= TIMES_FROM else f"{100 * (ratio - 1):+.1f} %"


def _part_means(comparison: Against) -> dict[str, tuple[float, float]]:
    """Return the mean of each part of the TTFT on both sides, ms. Only parts that either side has are there."""
    sides = [[each.parts_ms for each in group if each.parts_ms] for group in (comparison.before, comparison.after)]
    if not all(sides):
        return {}
    before, after = ({part.name: float(np.mean([each[part.name] for each in side])) for part in TTFT_PARTS}
                     for side in sides)  # fmt: skip
    return {name: (before[name], after[name]) for name in before if before[name] or after[name]}


def _results(comparison: Against) -> Iterator[tuple[str, ResultQuantity]]:
    for metric in FAMILY:
        of = comparison.concluded[metric.name]
        ratio = number(of.ratio, "ratio", ci95=of.ci95, n=of.pairs, method=TESTED, missing=of.reason)
        name = metric.name.rpartition("_ms")[0] or metric.name
        yield f"{comparison.other}_over_{comparison.first}_{name}_ratio", ratio


def _evidence(comparison: Against) -> Iterator[SupportingNumber]:
    claim, name = f"{comparison.other} against {comparison.first}", TIMES[0].name
    for each in (*comparison.before, *comparison.after):
        yield SupportingNumber(claim=claim, quantity=name, run=each.finished.run, value=finite(each.metrics[name]))


def _verdict_table(comparison: Against, margin: float) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for metric in FAMILY:
        concluded = comparison.concluded[metric.name]
        middle: list[Cell] = [
            finite(float(np.mean([each.metrics[metric.name] for each in group]))) if group else None
            for group in (comparison.before, comparison.after)
        ]
        title = f"{metric.title}, {metric.unit}" if metric.unit == "ms" else metric.title
        verdict = concluded.verdict or f"no verdict: {concluded.reason}"
        ends = concluded.ci95 or (None, None)
        rows.append((title, *middle, concluded.ratio, *ends, concluded.p, verdict, concluded.more_pairs))
    titles = {
        "metric": "Metric", "first": comparison.first, "other": comparison.other, "ratio": "Ratio",
        "ratio_low": "95 % from", "ratio_high": "to", "p": "p (Holm)", "verdict": "Verdict",
        "more_pairs": "More pairs" if comparison.is_paired else "More runs of each",
    }  # fmt: skip
    note = f"Means over runs, and the ratio with its interval. Equivalent: surely within {100 * margin:g} %. {TESTED}."
    digits = {"ratio": 4, "ratio_low": 4, "ratio_high": 4, "p": 2, "more_pairs": None}
    title = f"{comparison.other} against {comparison.first}"
    return table(f"comparison-{slug(comparison.other, 'run')}", title, titles, rows, note, digits)


def _part_table(comparison: Against) -> ResultTable:
    means = _part_means(comparison)
    whole = sum(after - before for before, after in means.values())
    rows = []
    for name, (before, after) in means.items():
        ratio, change = after / before if before > 0 else None, after - before
        rows.append((LABELS[name], before, after, ratio, change, 100 * change / whole if whole else None))
    title = f"Where the mean TTFT differs, {comparison.other} against {comparison.first}"
    titles = {
        "part": "Part", "first_ms": f"{comparison.first}, ms", "other_ms": f"{comparison.other}, ms", "ratio": "Ratio",
        "change_ms": "Change, ms", "share_of_change_percent": "Share of the change, %",
    }  # fmt: skip
    counts = comparison.before and comparison.after
    note = "" if rows else "No request has a breakdown of its TTFT." if counts else "No runs of both count."
    return table(f"ttft-parts-{slug(comparison.other, 'run')}", title, titles, rows, note)


def _run_table(samples: Sequence[RunSample]) -> ResultTable:
    rows = (
        (each.finished.run, each.finished.step.variant, each.finished.outcome.sent, each.success,
         *(finite(each.metrics[metric.name]) for metric in FAMILY)) for each in samples
    )  # fmt: skip
    titles = {"run": "Run", "configuration": "Configuration", "requests": "Requests", "success_ratio": "Ended ok"}
    titles |= {metric.name: metric.title for metric in FAMILY}
    return table("runs", "Runs, in the order in which they were measured", titles, rows, digits={"requests": None})


def _plot(samples: Sequence[RunSample], metric: ComparedMetric) -> Plot:
    lines = []
    for name in dict.fromkeys(each.finished.step.variant for each in samples):
        values = [finite(each.metrics[metric.name]) for each in samples if each.finished.step.variant == name]
        lines.append(PlotLine(name=name, x=tuple(float(place) for place in range(1, len(values) + 1)), y=tuple(values)))
    axes = ("pair", f"{metric.title}, {metric.unit}")
    return plot(f"runs-{slug(metric.name, 'run')}", f"{metric.title} of each run", axes, lines, kind="marks")


COMPARE = Procedure(
    name="compare",
    of_draft=False,
    objective="Tell whether systems differ, by how much, how sure that is, and which part of the TTFT makes it.",
    workload="synthetic-uniform",
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=30.0)},
    next_step=next_step,
    findings=findings,
    independent=(PAIR,),
    optional=("rate", "concurrency", "requests", "gate"),
)
