"""Throughput-Latency Tradeoff: latency and throughput at levels of load from a tenth of the capacity to beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.methodology.fits.monotone import crossing
from sidelight.methodology.measures import criteria
from sidelight.methodology.measures.paired import overloaded
from sidelight.methodology.search import bracket
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
from sidelight.methodology.study.outcome import submitted_within
from sidelight.methodology.study.planning import LEVEL, counting, fresh, level_label, of_kind
from sidelight.methodology.study.quantities import (
    LABELS,
    latency,
    latency_line,
    number,
    reported_times,
    served_tokens,
    unknown,
)
from sidelight.methodology.study.saturation import Capacity, capacity, load_of, measured_capacity
from sidelight.rundir.columns import take
from sidelight.rundir.printable.numbers import figure

LEAST_SATURATED_S = 60.0
KNEE = 2.0  # times the least TTFT P99
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
NAMES = ("p50", "p95", "p99")
UNKNOWN_SD = 0.4  # of the logarithm of a P99 whose interval is not known
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
SHORT_LEVELS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
_LETTER = Parameters(levels=LEVELS, duration=60, requests=200, slo="ttft_p99<500ms", sentinel=True)
_NOTES = (
    *criteria.NOTES[:2],
    (
        "The draft's knee is where P99 exceeds twice the minimum P99, and does not say of which latency: TTFT here. "
        "The minimum of noisy levels is too low, so that a monotone fit gives a knee with an interval beside it."
    ),
    (
        "The draft's saturation is where achieved throughput first decreases, which need not happen, and does not in "
        "its own example: then it is not reached, and the peak and the highest stable level stand beside it."
    ),
)


def _next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    parameters = asked.parameters
    lasting = replace(parameters, duration=max(parameters.duration or 0.0, LEAST_SATURATED_S))
    known = capacity(replace(asked, parameters=lasting), finished)
    if not isinstance(known, Capacity):
        return known
    ended = {each.step.share for each in of_kind(finished, LEVEL)}
    share = next((each for each in sorted(parameters.levels or ()) if each not in ended), None)
    if share is None:
        return Done(reason="every level was run")
    rate = share * known.per_s
    duration_s = max(parameters.duration or 60.0, (parameters.requests or 0) / rate)
    label, options = f"open-{level_label(rate, share)}", {"slo": parameters.slo} if parameters.slo else {}
    return fresh(asked, finished, label, "open", rate, share=share, duration=duration_s, options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TradeoffStudy:
    """The levels in ascending order, and the capacity that they are shares of."""

    asked: StudySettings
    levels: Sequence[Finished]
    limit: Capacity


def _findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    steps = counting(finished)
    levels = sorted(of_kind(steps, LEVEL), key=lambda each: each.step.level)
    stated = capacity(asked, ()) if asked.parameters.capacity else None
    limit = stated if isinstance(stated, Capacity) else measured_capacity(steps)
    if not levels or limit is None:
        results = unknown("no level counts", "requests/s", *(f"{name}_requests_per_s" for name in _DERIVED))
        results |= reported_times(None)
        return StudyFindings(answer=("There is no curve: no level counts.",), results=results)
    study = _TradeoffStudy(asked=asked, levels=levels, limit=limit)
    results = _results(study)
    return StudyFindings(
        answer=tuple(_answer(study, results)),
        results=results,
        evidence=tuple(_evidence(study, results)),
        tables=(_table(study), _derived_table(results)),
        plots=tuple(_plots(study, read)),
        notes=(*_NOTES, *_deviations(study)),
    )


_DERIVED = {
    "optimal": "Optimal operating point", "knee": "Knee point", "knee_fit": "Knee point by the monotone fit",
    "saturation": "Saturation point", "peak": "Highest throughput", "stable": "Highest load shown stable",
    "growing": "Lowest load at which requests piled up", "draft_sustainable": "Sustainable by the draft's criteria",
}  # fmt: skip


def _results(study: _TradeoffStudy) -> dict[str, ResultQuantity]:
    levels, slo = study.levels, study.asked.parameters.slo
    met = [each for each in levels if each.outcome.slo_met]
    optimal = max(met, key=lambda each: each.outcome.output_tokens_per_s or 0, default=None)
    p99 = [(each, value) for each in levels if (value := criteria.ttft_ms(each, "p99"))]
    least = min((value for _, value in p99), default=math.inf)
    knee = next((each for each, value in p99 if value > KNEE * least), None)
    served = [each.outcome.output_tokens_per_s or 0.0 for each in levels]
    fallen = next((levels[at] for at in range(1, len(levels)) if served[at] < served[at - 1]), None)
    peak = levels[int(np.argmax(served))]
    verdicts = bracket(levels, study.limit)
    unmet = f"no level meets {slo}" if slo else "no objective was stated (--slo)"
    # By name: the level, what it is, and why there is none.
    points: dict[str, tuple[Finished | None, str, str]] = {
        "optimal": (optimal, f"highest throughput of the levels that meet {slo}", unmet),
        "knee": (knee, "first level whose TTFT P99 exceeds twice the least",
                 "not reached: no P99 exceeds twice the least"),
        "saturation": (fallen, "first level that achieves less than the one before",
                       "not reached: achieved throughput never decreased"),
        "peak": (peak, "level of the highest throughput", ""),
        "stable": (verdicts.stable, "highest load below all at which the queue grew", "no level was shown stable"),
        "growing": (verdicts.growing, "lowest load at which the queue grew", "not reached: none piled up"),
    }  # fmt: skip
    results = {}
    for name, (each, method, missing) in points.items():
        load = load_of(each, study.limit) if each else None
        results[f"{name}_requests_per_s"] = number(load, "requests/s", method=method, missing=missing)
    results["knee_fit_requests_per_s"] = _knee_fit(study)
    results["peak_output_tokens_per_s"] = served_tokens(peak.outcome, f"{_level_words(peak)}, step {peak.number}")
    results["optimal_output_tokens_per_s"] = number(None, "tokens/s", missing=unmet)
    if optimal is not None:
        at = f"{_level_words(optimal)}, the highest throughput of the levels that meet it, step {optimal.number}"
        results["optimal_output_tokens_per_s"] = served_tokens(optimal.outcome, at)
    best = (
        (optimal, "the best level within the objectives") if optimal else (verdicts.stable, "the highest shown stable")
    )
    results |= reported_times(*best) if best[0] else reported_times(levels[0], "the lowest")
    stated = "of a saturated closed loop" if study.limit.run else "as stated"
    results["capacity_requests_per_s"] = number(study.limit.per_s, "requests/s", ci95=study.limit.ci95, method=stated)
    results["draft_sustainable_requests_per_s"] = criteria.draft_sustainable(levels, study.limit)
    return results


def _level_words(each: Finished) -> str:
    share = "" if each.step.share is None else f" ({100 * each.step.share:g} % of the capacity)"
    return f"{each.step.load_words}{share}"


_FIT = (
    "where a monotone fit of log TTFT P99 over the load sent (PAVA, PCHIP) reaches twice its least; interval by "
    "resampling the percentiles"
)


def _knee_fit(study: _TradeoffStudy) -> ResultQuantity:
    """Return where the monotone fit of TTFT P99 passes twice its least value."""
    points = [
        (load_of(each, study.limit), math.log(value), _log_deviation(each))
        for each in study.levels
        if (value := criteria.ttft_ms(each, "p99"))
    ]
    missing = "the monotone fit does not reach twice its least P99"
    if len(points) < 2:
        return number(None, "requests/s", missing=missing)
    loads, heights, spread = (np.array(column) for column in zip(*points, strict=True))
    if (reached := crossing(loads, heights, spread, math.log(KNEE), above_least=True)) is None:
        return number(None, "requests/s", missing=missing)
    return number(reached[0], "requests/s", ci95=reached[1:], n=len(points), method=_FIT)


def _log_deviation(each: Finished) -> float:
    """Return the standard deviation of a level's log TTFT P99, by its interval if known."""
    interval = latency(each.outcome, "ttft", "p99")
    if not interval.low or not interval.high:
        return UNKNOWN_SD
    return max(math.log(interval.high / interval.low) / (2 * 1.96), 0.01)


def _answer(study: _TradeoffStudy, results: dict[str, ResultQuantity]) -> Iterator[str]:
    optimal, knee = results["optimal_requests_per_s"], results["knee_fit_requests_per_s"]
    slo, tokens = study.asked.parameters.slo, results["optimal_output_tokens_per_s"]
    if optimal.value is not None and tokens.value is not None:
        best = f"{figure(optimal.value)} requests/s"
        share = f"{100 * optimal.value / study.limit.per_s:.0f} % of the capacity"
        yield f"Within {slo} the best level is {best} ({share}, {figure(tokens.value)} output tokens/s)."
    else:
        highest = load_of(study.levels[-1], study.limit)
        yield f"The curve has {len(study.levels)} levels up to {figure(highest)} requests/s; {optimal.missing}."
    stable, growing = results["stable_requests_per_s"].value, results["growing_requests_per_s"].value
    sustained = (
        f"The highest load shown stable is {figure(stable)} requests/s" if stable else "No level was shown stable"
    )
    piled = f"requests piled up from {figure(growing)} on" if growing else "at none did requests pile up"
    bend = f"; TTFT P99 has doubled by {figure(knee.value)} requests/s{knee.interval()}" if knee.value else ""
    yield f"{sustained}, {piled}{bend}."
    last = study.levels[-1].outcome
    if last.limit:
        yield f"{criteria.WORDS[last.limit]}: at the highest level {last.limit_reason}."
    elif study.limit.limit:
        yield f"{criteria.WORDS[study.limit.limit]}, by the saturated step: {study.limit.reason}."
    else:
        yield f"{criteria.WORDS['unknown']}: {last.blame or 'no page of an engine shows what ran and waited'}."


def _evidence(study: _TradeoffStudy, results: dict[str, ResultQuantity]) -> Iterator[SupportingNumber]:
    for name, title in _DERIVED.items():
        value = results[f"{name}_requests_per_s"].value
        run = next((each.run for each in study.levels if load_of(each, study.limit) == value), "")
        if run:
            yield SupportingNumber(claim=title, quantity="load in requests of mean size", run=run, value=value)


def _table(study: _TradeoffStudy) -> ResultTable:
    times = [(metric, name) for metric in METRICS for name in NAMES]
    p50_ms = criteria.lowest_p50_ms(study.levels, study.limit)
    titles = {
        "level_ratio": "Level", "offered_per_s": "Offered (r/s)", "realised_per_s": "Sent (r/s)",
        "load_per_s": "Load (r/s)",
        "achieved_tokens_per_s": "Achieved (tok/s)",
        **{f"{metric}_{name}_ms": f"{METRICS[metric]} {LABELS[name]}" for metric, name in times},
        "success_ratio": "Success", "verdict": "Queue", "completed_ratio": "Completed / arrived",
        "draft": "Draft accepts", "slo_met": "SLO met",
    }  # fmt: skip

    def row(each: Finished) -> tuple[Cell, ...]:
        came = each.outcome
        loads = (each.step.share, each.step.level, came.realised_per_s, load_of(each, study.limit))
        percentiles = (latency(came, *time).estimate for time in times)
        judged = (criteria.completed_ratio(each), criteria.accepts(each, p50_ms), came.slo_met)
        return (*loads, came.output_tokens_per_s, *percentiles, came.success, came.verdict, *judged)

    size = ", in requests of mean size, by the output tokens that they asked for" if study.limit.tokens_per_s else ""
    note = (
        f"Times in ms. Load: what was sent{size}; all loads below and in the answer are such. Percentiles of a "
        "level whose queue was growing depend on how long it ran."
    )
    return table("throughput-latency", "Throughput-Latency Table", titles, map(row, study.levels), note)


def _derived_table(results: dict[str, ResultQuantity]) -> ResultTable:
    points = {title: results[f"{name}_requests_per_s"] for name, title in _DERIVED.items()}
    rows = ((title, of.value, *of.ends, of.missing or of.method) for title, of in points.items())
    titles = {
        "point": "Point", "requests_per_s": "Load (r/s)", "ci95_low": "95 % from", "ci95_high": "to",
        "meaning": "Which is",
    }  # fmt: skip
    return table("operating-points", "Operating Points", titles, rows)


def _plots(study: _TradeoffStudy, read: Reader) -> Iterator[Plot]:
    served = tuple(each.outcome.output_tokens_per_s or 0.0 for each in study.levels)
    for metric, title in METRICS.items():
        name = "throughput-latency" if metric == "ttft" else f"throughput-{metric}"
        axes = ("Achieved (output tokens/s)", f"{title} (ms)")
        lines = (latency_line(study.levels, served, metric, name) for name in NAMES)
        yield plot(name, f"{title} over throughput", axes, lines, log_y=True)
    yield from _server_plots(study, read)


def _server_plots(study: _TradeoffStudy, read: Reader) -> Iterator[Plot]:
    """Yield plots over the load of the engine's data: TTFT parts, places and KV cache."""
    levels = sorted(study.levels, key=lambda each: load_of(each, study.limit))
    loads, outcomes = tuple(load_of(each, study.limit) for each in levels), [each.outcome for each in levels]
    means = [_part_means(each, read) for each in levels]
    parts = {part.label: [mean.get(part.name) for mean in means] for part in TTFT_PARTS}
    seats = {"running": [each.running_mean for each in outcomes], "waiting": [each.waiting_mean for each in outcomes]}
    usage = [None if each.kv_cache_max is None else 100 * each.kv_cache_max for each in outcomes]
    shown: dict[tuple[str, str, str], Mapping[str, Sequence[float | None]]] = {
        ("ttft-parts", "Parts of the mean TTFT over load", "ms"): parts,
        ("seats", "Requests in the engine over load", "requests"): seats,
        ("kv-cache", "KV cache over load", "%"): {"highest usage": usage},
    }
    for (name, title, unit), values in shown.items():
        known = {label: y for label, y in values.items() if any(value is not None for value in y)}
        lines = [PlotLine(name=label, x=loads, y=tuple(y)) for label, y in known.items()]
        if lines:
            axes = ("Load (requests/s)", unit)
            yield plot(name, title, axes, lines, kind="stack" if values is parts else "line")


def _part_means(each: Finished, read: Reader) -> dict[str, float]:
    """Return the mean of each part of the TTFT of a level's requests, ms; of those whose parts are known."""
    data, window = read(each), each.outcome.window
    if window is None:
        return {}
    parts = take(data.parts, submitted_within(data.requests, window))
    values_ms = {part.name: 1e3 * parts.seconds(part)[parts.covered] for part in TTFT_PARTS}
    known = {name: values[np.isfinite(values)] for name, values in values_ms.items()}
    return {name: float(values.mean()) for name, values in known.items() if len(values)}


def _deviations(study: _TradeoffStudy) -> Iterator[str]:
    if len(study.levels) < len(study.asked.parameters.levels or ()):
        yield f"Levels that were run: {len(study.levels)} of {len(study.asked.parameters.levels or ())}."
    if not study.limit.run:
        yield "Levels are shares of a stated capacity, which this study did not measure."
    yield from overloaded(study.levels)


TRADEOFF = Procedure(
    name="tradeoff",
    objective="How latency and throughput go together from a low load to beyond the capacity.",
    workload="synthetic-uniform",
    presets={
        "letter": _LETTER,
        "short": replace(_LETTER, levels=SHORT_LEVELS, duration=20, requests=30, sentinel=False),
    },
    next_step=_next_step,
    findings=_findings,
    independent=(LEVEL,),
)
