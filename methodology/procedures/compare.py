"""Comparison of systems: the same requests at the same moments for each, in pairs that are measured in turn.

Draft, "Multi-System Comparison Guidelines". Requests of a run depend on each other, so that runs, not requests, are
what is tested; the runs of a pair have the same requests, so that what these ask for is in no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.parts import CAUSES, LABELS
from sidelight.exporter.comparison import Ratio, Side, comparison_verdict, moved
from sidelight.exporter.report.advice import MORE_PREFILL, UNEXPLAINED
from sidelight.exporter.report.verdict import LEVELS
from sidelight.exporter.summary.verdict import StudyState, StudyVerdict
from sidelight.methodology.compare import LEAST_RUNS
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
from sidelight.methodology.study.samples import (
    FAMILY,
    LEVEL,
    RATES,
    TIMES,
    Against,
    ComparedMetric,
    RunSample,
    against,
    all_failed,
    error_ms,
    hides,
    overloaded_sides,
    sample,
)
from sidelight.methodology.study.saturation import Capacity, capacity
from sidelight.rundir.printable.numbers import count_of, figure
from sidelight.rundir.printable.text import as_sentence
from sidelight.rundir.stats import finite

PAIR = "pair"
RECORDED = 0  # pairs to measure, where runs are compared that were recorded before
MARGIN = 0.05
_TTFTS = [metric for metric in TIMES if metric.kind == "ttft"]
TIMES_FROM = 2.0  # a ratio, from which on a change is said in times, not in percent
_LETTER = Parameters(load=0.7, duration=60.0, pairs=5, margin=MARGIN)
TESTED = (
    "Student's t on the logarithm of each run's ratio, over pairs of runs with the same requests (Welch's where runs "
    "are not paired); Holm's correction over all metrics; equivalent by two one-sided tests (Schuirmann 1987)"
)
_FIRST: Sequence[StudyState] = ("slower", "undecided", "faster", "equal")  # of several, the verdict that is shown
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
        verdict=min(
            (_verdict(each, asked) for each in comparisons), key=lambda each: _FIRST.index(each.state), default=None
        ),
    )


def _passed(comparisons: Sequence[Against]) -> bool | None:
    """Return whether no configuration is worse than the first; None where that cannot be said of one."""
    if any(of.verdict == "worse" for each in comparisons for of in each.concluded.values()):
        return False
    known = [
        any(of.verdict for of in each.concluded.values())
        and not all_failed([*each.before, *each.after])
        and not any(hides(metric, each.before, each.after) for metric in TIMES if metric.kind == "ttft")
        for each in comparisons
    ]
    return True if all(known) else None


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
    yield f"{name} against {base}, over {_runs_in_words(comparison, asked)}: {listed}."
    if over := overloaded_sides(comparison):
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


def _verdict(comparison: Against, asked: StudySettings) -> StudyVerdict:
    """Return the verdict on the other configuration: by the highest percentile of the TTFT that surely differs, else by
    another time, else by a rate. Times of an overloaded one depend on how long the load lasted.
    """
    over, concluded = overloaded_sides(comparison), comparison.concluded
    names = {"served": RATES[1].name, "ttft_p50": "ttft_p50_ms", "ttft_p99": "ttft_p99_ms"}
    ratios = {name: Ratio(concluded[metric].ratio, concluded[metric].ci95) for name, metric in names.items()}
    sides = [_side(comparison.first, comparison.before), _side(comparison.other, comparison.after)]
    error = error_ms(TIMES[0], comparison.before, comparison.after)
    times = sorted([] if over else TIMES, key=lambda metric: (metric.kind != "ttft", -TIMES.index(metric)))
    sure = [each for each in (*times, *RATES) if concluded[each.name].verdict in ("better", "worse")]
    state, headline = _sure(comparison, sure) if sure else _not_sure(comparison, asked, over)
    of_sides = comparison_verdict(sides, state, headline, "", ratios, error_ms=error)
    return replace(of_sides, do=as_sentence(_advice(comparison, of_sides, over)))


def _sure(comparison: Against, sure: Sequence[ComparedMetric]) -> tuple[StudyState, str]:
    """Return the state by the first of these metrics, and its sentence."""
    metric, concluded = sure[0], comparison.concluded
    is_worse, ratio = concluded[metric.name].verdict == "worse", concluded[metric.name].ratio or 1.0
    contrary = [each.title for each in sure if (concluded[each.name].verdict == "worse") != is_worse]
    but = f"; but {'better' if is_worse else 'worse'} on {', '.join(contrary)}" if contrary else ""
    state: StudyState = "slower" if is_worse else "faster"
    if metric in RATES:
        how = f"serves {moved(ratio)} {'fewer' if is_worse else 'more'} {metric.unit} than {comparison.first}"
    else:
        how = f"is {moved(ratio)} {state} than {comparison.first} at {metric.title}"
    return state, f"{comparison.other} {how}{but}; sure at {100 * LEVEL:g} %."


def _not_sure(comparison: Against, asked: StudySettings, over: Sequence[str]) -> tuple[StudyState, str]:
    """Return the state where no metric surely differs."""
    margin, both = asked.parameters.margin or MARGIN, f"{comparison.first} and {comparison.other}"
    decisive = [comparison.concluded[metric.name] for metric in (RATES if over else _TTFTS)]
    known = [of.verdict for of in decisive if of.verdict is not None]
    if over:
        were = f"{' and '.join(over)} {'was' if len(over) == 1 else 'were'} overloaded"
        return "undecided", f"Undecided: {were}, so that times depend on how long the load lasted."
    if not known:
        return "undecided", f"Undecided: {decisive[-1].reason.rstrip('.')}."
    if {*known} == {"equivalent"}:
        return "equal", f"{both} are equal within {100 * margin:g} % of the TTFT; sure at {100 * LEVEL:g} %."
    counted = _runs_in_words(comparison, asked)
    if min(of.pairs for of in decisive if of.verdict is not None) < LEAST_RUNS:
        return "undecided", f"Undecided: {counted} of {both}, and a claim takes at least {LEAST_RUNS}."
    return (
        "undecided",
        f"Undecided: {counted} tell neither that {both} differ, nor that they are within {100 * margin:g} %.",
    )


def _advice(comparison: Against, verdict: StudyVerdict, over: Sequence[str]) -> str:
    """Return advice on a comparison, without a subject."""
    if verdict.state in ("slower", "faster"):
        pair = comparison.other, comparison.first
        slow, fast = pair if verdict.state == "slower" else pair[::-1]
        cures = {**UNEXPLAINED, "prefill": MORE_PREFILL.partition(":")[0]}
        cause = f", or work on {CAUSES[verdict.cause]} of {slow}: {cures[verdict.cause]}"
        return f"prefer {fast}{'' if verdict.cause == 'none' else cause}"
    if verdict.state == "equal":
        return "nothing: neither is slower"
    if over:
        return "compare them at a load that both sustain (--rate, or a smaller --load)"
    more = {metric.title: count for metric in _TTFTS if (count := comparison.concluded[metric.name].more_pairs)}
    if more:
        title, count = min(more.items(), key=lambda pair: pair[1])
        of_each = "" if comparison.is_paired else " of each"
        what = count_of(count, "more pair" if comparison.is_paired else "more run")
        return f"measure {what}{of_each}, to decide on {title} (--pairs), or longer ones"
    return "mend what keeps them from being compared, and measure again"


def _side(name: str, runs: Sequence[RunSample]) -> Side:
    """Return the means over a configuration's runs, and its requests together."""
    timed = [{part.part: part for part in each.parts} for each in runs if each.parts]
    means_ms = _means([each.parts_ms for each in runs if each.parts_ms])
    mean_ms, parts = sum(means_ms.values()), []
    for part, ms in means_ms.items():
        of_runs = [run[part] for run in timed if part in run]
        if of_runs:
            sources = {each.known_from for each in of_runs}
            share = None if any(each.share is None for each in of_runs) or not mean_ms else ms / mean_ms
            known_from = sources.pop() if len(sources) == 1 else "several"
            parts.append(replace(of_runs[0], mean_ms=ms, share=share, known_from=known_from))
    sent, ok = (sum(getattr(each.finished.outcome, what) for each in runs) for what in ("sent", "ok"))
    return Side(
        name=name,
        served_per_s=_mean(runs, RATES[1].name),
        ttft_ms={level: _mean(runs, f"ttft_{level}_ms") for level in LEVELS},
        failed=sent - ok,
        sent=sent,
        parts=parts,
        mean_ms=mean_ms,
    )


def _mean(runs: Sequence[RunSample], name: str) -> float | None:
    return finite(float(np.mean([each.metrics[name] for each in runs]))) if runs else None


def _means(parts_ms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part over runs."""
    names = parts_ms[0] if parts_ms else ()
    return {name: float(np.mean([each[name] for each in parts_ms])) for name in names}


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
    before, after = (
        _means([each.parts_ms for each in group if each.parts_ms]) for group in (comparison.before, comparison.after)
    )
    if not before or not after:
        return {}
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
        middle: list[Cell] = [_mean(group, metric.name) for group in (comparison.before, comparison.after)]
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
