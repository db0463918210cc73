"""Output Token Throughput: the highest load that is sustained, the limit of stability, and what makes it the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from sidelight.methodology.measures import criteria
from sidelight.methodology.search import AT_SLO, LONG_S, Bracket, at_objective, bracket, contradiction, next_step
from sidelight.methodology.study.findings import (
    Cell,
    Plot,
    PlotLine,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    SupportingNumber,
    evidence,
    plot,
    table,
)
from sidelight.methodology.study.model import Finished, Parameters, Procedure, Reader, StudySettings
from sidelight.methodology.study.planning import LEVEL, counting, valid
from sidelight.methodology.study.quantities import LABELS, latency_line, latency_result, metric_table, number, scaled
from sidelight.methodology.study.saturation import Capacity, fullest, load_of, measured_capacity
from sidelight.rundir.printable.numbers import count_of, figure

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "End-to-End"}
NAMES = ("p50", "p95", "p99")
AT_BEST = ("max_output", *METRICS)  # results of the step whose throughput is the maximum begin so
LEAST_INDEPENDENT = 20  # requests that percentiles rest on: of fewer a table warns
_LETTER = Parameters(
    duration=300, min=0.01, max=10_000, increment=0.01, concurrency=1024, slo="ttft_p99<500ms", sentinel=True
)
_LIMIT_METHOD = (
    "output tokens a second of the saturated steps together, over the mean output tokens of all requests; batch means, "
    "and how much the steps differ beyond chance"
)
_SATURATED = "what it completes when saturated: tokens/s over tokens a request"
_SEARCH_NOTE = (
    "Load: what was sent, in requests of mean size, by the output tokens that they asked for; all loads of the answer "
    "are such. Queue growth: share of the arrivals by which requests in flight rose; why a load was called growing or "
    "stable stands below the steps. The SLO and the draft judge a level by the P99 of its own requests, however few."
)
_NOTES = (
    *criteria.NOTES,
    (
        "Levels nearer to each other than 5 % of the limit cannot be told apart in a step: the search ends there, "
        "whatever --increment is."
    ),
    (
        "Of a level whose requests piled up, percentiles depend on how long it ran: they are marked by the verdict "
        "growing."
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ThroughputStudy:
    """Counted steps and their conclusions; `best` is the step with the maximum throughput."""

    asked: StudySettings
    steps: Sequence[Finished]
    limit: Capacity
    verdicts: Bracket
    best: Finished
    objective: ResultQuantity

    @property
    def levels(self) -> list[Finished]:
        return _open_loops(self.steps)

    @property
    def mean_tokens(self) -> float | None:
        """Return the output tokens of a request of mean size."""
        limit = self.limit
        return limit.tokens_per_s / limit.per_s if limit.tokens_per_s and limit.per_s else None

    def load(self, each: Finished) -> float:
        """Return the load of a step, in requests/s of mean size: the unit of all loads that are reported."""
        return load_of(each, self.limit)


def _findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:  # noqa: ARG001  outcomes suffice
    steps = valid(finished)  # with the saturated step that was repeated
    limit = measured_capacity(steps)
    if limit is None:
        void = next((each.outcome.void for each in reversed(finished) if each.outcome.void), "")
        reason = f"no step counts, since {void.removesuffix('.')}" if void else "no closed loop completed a request"
        units = {"max_output_tokens": "tokens/s", "max_requests": "requests/s", "limit_requests": "requests/s"}
        missing = {f"{name}_per_s": number(None, unit, missing=reason) for name, unit in units.items()}
        return StudyFindings(answer=(f"The maximum throughput is not known: {reason}.",), results=missing)
    verdicts = bracket(_open_loops(steps), limit)
    closed = [each for each in steps if each.run == limit.run]
    study = _ThroughputStudy(
        asked=asked,
        steps=steps,
        limit=limit,
        verdicts=verdicts,
        best=verdicts.stable or closed[0],
        objective=at_objective(asked, steps, limit),
    )
    results = _results(study)
    return StudyFindings(
        answer=tuple(_answer(study, results)),
        results=results,
        evidence=tuple(_evidence(study)),
        tables=(_summary_table(study, results), _latency_table(study, results), _search_table(study)),
        plots=(_path(study), _latency_plot(study)),
        notes=(*_NOTES, *_deviations(study)),
    )


def _open_loops(steps: Sequence[Finished]) -> list[Finished]:
    return [each for each in counting(steps) if each.step.load == "open"]


def _results(study: _ThroughputStudy) -> dict[str, ResultQuantity]:
    limit, came, objective, stable = study.limit, study.best.outcome, study.objective, study.verdicts.stable
    at_slo = number(None, "tokens/s", missing=objective.missing or "the output tokens of requests are not known")
    if tokens := study.mean_tokens:
        at_slo = replace(scaled(objective, tokens, "tokens/s"), method="the same times the output tokens of a request")
    served: dict[str, Any] = {"method": "in the steady window of the highest stable level; batch means"}
    full: dict[str, Any] = {"method": _LIMIT_METHOD, "missing": "the load generator never filled the server"}
    at = study.best.step.load_words
    if stable:
        at = f"{figure(study.load(stable))} requests/s, the highest load shown stable"
    results = {
        "max_output_tokens_per_s": number(came.output_tokens_per_s, "tokens/s", ci95=came.output_tokens_ci95, **served),
        "max_requests_per_s": number(came.completed_per_s, "requests/s", ci95=came.throughput_ci95, **served),
        "max_input_tokens_per_s": number(came.input_tokens_per_s, "tokens/s"),
        "sustainable_requests_per_s": number(
            study.load(stable) if stable else None,
            "requests/s",
            method="load of the highest stable level, by the output tokens that its requests asked for",
            missing="no open loop was shown stable",
        ),
        "limit_requests_per_s": number(limit.per_s if limit.filled else None, "requests/s", ci95=limit.ci95, **full),
        "limit_output_tokens_per_s": number(
            limit.tokens_per_s if limit.filled else None, "tokens/s", ci95=limit.tokens_ci95, **full
        ),
        "slo_requests_per_s": objective,
        "slo_output_tokens_per_s": at_slo,
        "draft_sustainable_requests_per_s": criteria.draft_sustainable(study.levels, limit),
        **_efficiency(study),
    }
    results |= {f"{metric}_{name}_ms": latency_result(came, metric, name) for metric in METRICS for name in NAMES}
    return {name: replace(of, at=at) if name.startswith(AT_BEST) else of for name, of in results.items()}


def _efficiency(study: _ThroughputStudy) -> dict[str, ResultQuantity]:
    outcome, system = study.best.outcome, study.asked.system
    count, largest = system.get("accelerator_count"), system.get("largest_batch")
    ran = max((each.outcome.running_max or 0 for each in study.steps), default=0)
    method = "mean running over the largest batch declared" if largest else "mean running over the most that ever ran"
    per_gpu = (outcome.output_tokens_per_s or 0) / count if count else None
    used = outcome.running_mean / (largest or ran) if outcome.running_mean is not None and (largest or ran) else None
    undeclared = "the number of accelerators is not declared (`accelerator_count` of the SUT)"
    not_shown = "no page of the engine shows how many requests run"
    return {
        "output_tokens_per_gpu_s": number(per_gpu, "tokens/s", missing=undeclared),
        "batch_utilisation_ratio": number(used, "ratio", method=method, missing=not_shown),
    }


def _answer(study: _ThroughputStudy, results: dict[str, ResultQuantity]) -> Iterator[str]:
    limit, stable = study.limit, study.verdicts.stable
    served = _tokens(results["max_output_tokens_per_s"])
    binds = f"{criteria.WORDS[limit.limit or 'unknown']}: {limit.reason or 'there is no evidence'}."
    if not limit.filled:
        most = count_of(study.best.step.level, "request")
        yield f"With {most} in flight, the most that were allowed, it gives {served}."
        yield "More in flight would give more: this is no limit of the server."
        yield binds
        return
    yield (_highest(study, stable, served) if stable else _unsustained(study))
    yield _saturated(study, results)
    yield binds
    if study.asked.parameters.slo:
        yield _objective(study)
    if stable is not None:
        accepted = results["draft_sustainable_requests_per_s"]
        yield from criteria.acceptance(stable, limit, accepted, criteria.lowest_p50_ms(study.levels, limit))


def _unsustained(study: _ThroughputStudy) -> str:
    """Return a sentence for a study where no load was shown stable."""
    if study.levels and all(each.outcome.verdict == "growing" for each in study.levels):
        return "Every level tried was above what it serves; try lower (--min)."
    return "No load was shown to be sustained."


def _tokens(quantity: ResultQuantity) -> str:
    return f"{figure(quantity.value or 0)} output tokens/s{quantity.interval()}"


def _highest(study: _ThroughputStudy, stable: Finished, served: str) -> str:
    """Return a sentence on the highest load shown stable, and on those above it."""
    load, tokens = study.load(stable), study.mean_tokens
    size = f" of mean size ({tokens:.0f} output tokens)" if tokens else ""
    said = f"Highest load shown stable: {figure(load)} requests/s{size}, with {served}"
    undecided = {study.load(each): each.step for each in study.verdicts.undecided if study.load(each) > load}
    if undecided:
        lowest = min(undecided)
        said += f"; {figure(lowest)} requests/s was undecided even after {undecided[lowest].duration or 0:g} s"
    if (growing := study.verdicts.growing) is not None:
        said += f"; at {figure(study.load(growing))} requests/s requests piled up"
    return f"{said}."


def _saturated(study: _ThroughputStudy, results: dict[str, ResultQuantity]) -> str:
    """Return a sentence on the saturated system's throughput, and on piled-up requests at lower loads."""
    full, tokens = results["limit_requests_per_s"], results["limit_output_tokens_per_s"]
    rate = f", {_tokens(tokens)}" if tokens.value else ""
    lowest, least = study.verdicts.growing, full.ends[0]
    rest = "more cannot be sustained with this workload"
    if lowest is not None and least is not None and (load := study.load(lowest)) < least:
        rest = f"yet at {figure(load)} requests piled up: it was not as fast all the time, so measure again"
    return f"Saturated, it completes {figure(full.value or 0)} requests/s{full.interval()}{rate}; {rest}."


def _objective(study: _ThroughputStudy) -> str:
    text, objective = study.asked.parameters.slo, study.objective
    if objective.value is None:
        return f"SLO, not determined: {objective.missing}."
    disputed = contradiction(study.asked, study.steps, study.limit)
    doubt = f"; but {disputed}" if disputed else ""
    if objective.value >= study.load(study.best):
        tried = f"{figure(objective.value)} requests/s, the highest that was tried"
        highest = "the highest load shown stable" if study.verdicts.stable else tried
        return f"SLO: {text} holds up to {highest}{doubt}."
    return f"SLO: {text} holds up to {figure(objective.value)} requests/s{objective.interval()}{doubt}."


def _evidence(study: _ThroughputStudy) -> list[SupportingNumber]:
    limit, best, growing = study.limit, study.best, study.verdicts.growing
    saturated = next(each.outcome for each in study.steps if each.run == limit.run)
    shown = {name: getattr(saturated, name) for name in ("queued_ratio", "running_max", "kv_cache_max", "preemptions")}
    what = "the highest load shown stable" if study.verdicts.stable else "the most that was served"
    served = {each.run: each.outcome.output_tokens_per_s for each in study.steps if each.run in limit.runs}
    said = [each for run, value in served.items() for each in evidence(_SATURATED, run, {"output_tokens_per_s": value})]
    if limit.tokens_per_s and limit.per_s:
        said += evidence(_SATURATED, "steps", {"mean output tokens of a request": limit.tokens_per_s / limit.per_s})
    said += evidence(what, best.run, {"output_tokens_per_s": best.outcome.output_tokens_per_s})
    said += evidence("what the limit is", limit.run, shown)
    if growing is not None and (stability := growing.outcome.stability):
        growth = {"stability.growth": stability.growth}
        said += evidence("the lowest load at which requests piled up", growing.run, growth)
    return said


def _summary_table(study: _ThroughputStudy, results: dict[str, ResultQuantity]) -> ResultTable:
    step = "highest shown stable" if study.verdicts.stable else "saturated" if study.limit.filled else "in flight"
    titles = {
        "max_output_tokens_per_s": f"Max Output Throughput ({step})", "max_requests_per_s": "Max Request Throughput",
        "max_input_tokens_per_s": "Max Input Throughput", "sustainable_requests_per_s": "Sustainable Load",
        "limit_output_tokens_per_s": "Saturated Output Throughput",
        "limit_requests_per_s": "Saturated Request Throughput",
        "slo_requests_per_s": "Load at the SLO", "slo_output_tokens_per_s": "Output Throughput at the SLO",
        "draft_sustainable_requests_per_s": "Sustainable by the draft's criteria",
        "output_tokens_per_gpu_s": "Tokens per GPU-second", "batch_utilisation_ratio": "Batch Utilization",
    }  # fmt: skip
    note = f"Maxima are of step {study.best.number}. Loads are of requests of mean size, as in the column Load below."
    return metric_table("throughput-summary", "Throughput Summary", titles, results, note)


def _latency_table(study: _ThroughputStudy, results: dict[str, ResultQuantity]) -> ResultTable:
    rows = ((title, *(results[f"{metric}_{name}_ms"].shown for name in NAMES)) for metric, title in METRICS.items())
    titles = {"metric": "Metric", **{f"{name}_ms": f"{LABELS[name]} (ms)" for name in NAMES}}
    note = f"Of step {study.best.number}, {study.best.step.label}."
    few = [name for name in NAMES if results[f"ttft_{name}_ms"].value is None]
    known = results["ttft_p50_ms"]
    if known.n and few:
        note += f" {', '.join(LABELS[name] for name in few)}: of these {known.n:,} requests alone."
    if known.n and known.tau and known.n / known.tau < LEAST_INDEPENDENT:
        note += (
            f" Requests that queue together are slow together: these {known.n:,} say as much as about "
            f"{known.n / known.tau:.0f} independent ones, too few for intervals. Lengthen the steps (--duration)."
        )
    return table("latency-at-maximum-throughput", "Latency at Maximum Throughput", titles, rows, note)


def _search_table(study: _ThroughputStudy) -> ResultTable:
    p50_ms = criteria.lowest_p50_ms(study.levels, study.limit)
    titles = {
        "step": "Step", "level": "Level", "target_per_s": "Offered (req/s)", "sent_per_s": "Sent (req/s)",
        "load_per_s": "Load (req/s)", "completed_per_s": "Completed (req/s)", "output_tokens_per_s": "Output (tok/s)",
        "queued_ratio": "Scrapes with waiting", "running_mean": "Running (mean)", "limit": "Limit",
        "kv_cache_max": "KV cache (max)",
        "growth_ratio": "Queue growth", "growth_low": "95 % from", "growth_high": "to",
        "verdict": "Load was", "completed_ratio": "Completed / arrived",
        "ttft_p50_ms": "TTFT P50 (ms)", "ttft_p99_ms": "TTFT P99 (ms)",
        "slo_met": "SLO met", "draft": "Draft accepts",
    }  # fmt: skip

    def row(each: Finished) -> tuple[Cell, ...]:
        came, is_open, stability = each.outcome, each.step.load == "open", each.outcome.stability
        asked = (each.step.level, came.realised_per_s, study.load(each)) if is_open else (None,) * 3
        served = (came.completed_per_s, came.output_tokens_per_s)
        shown = (came.queued_ratio, came.running_mean, came.limit, came.kv_cache_max)
        growth = (stability.growth, *(stability.ci95 or (None, None))) if stability else (None,) * 3
        ratio, accepted = (criteria.completed_ratio(each), criteria.accepts(each, p50_ms)) if is_open else (None, None)
        times_ms = (criteria.ttft_ms(each, "p50"), criteria.ttft_ms(each, "p99"))
        judged = (came.verdict, ratio, *times_ms, came.slo_met, accepted)
        return (each.number, each.step.label, *asked, *served, *shown, *growth, *judged)

    note = " ".join((_SEARCH_NOTE, *_legend(study)))
    digits = dict.fromkeys(("growth_ratio", "growth_low", "growth_high"), 2)
    return table("throughput-search", "Throughput Search", titles, map(row, study.steps), note, digits)


def _legend(study: _ThroughputStudy) -> Iterator[str]:
    """Yield a legend of the table's limits, and the agreement with the engine's token count."""
    limits = dict.fromkeys(each.outcome.limit for each in study.steps if each.outcome.limit in criteria.LIMITS)
    if limits:
        yield f"Limit: {'; '.join(f'{name}, {criteria.LIMITS[name]}' for name in limits if name)}."
    counted = [(each.outcome.server_tokens_per_s, each.outcome.output_tokens_per_s) for each in study.steps]
    apart = [abs(server / ours - 1) for server, ours in counted if server is not None and ours]
    if apart:
        yield f"The engine's own counters of output tokens agree with ours within {100 * max(apart):.2g} %."


def _path(study: _ThroughputStudy) -> Plot:
    """Return the search: load served or realised by each step, marked by its verdict."""
    groups: dict[str, dict[float, float]] = {}
    for each in study.steps:
        if each.step.load == "closed":
            groups.setdefault("closed loop, completed", {})[each.number] = each.outcome.completed_per_s or 0.0
        elif each.outcome.verdict:
            groups.setdefault(f"open loop, {each.outcome.verdict}", {})[each.number] = study.load(each)
    lines = (PlotLine(name=name, x=tuple(at), y=tuple(at.values())) for name, at in groups.items())
    return plot("search-path", "Search path", ("Step", "requests/s"), lines, kind="marks")


def _latency_plot(study: _ThroughputStudy) -> Plot:
    levels = sorted(study.levels, key=study.load)
    loads = [study.load(each) for each in levels]
    lines = (latency_line(levels, loads, "ttft", name) for name in NAMES)
    return plot("throughput-latency", "TTFT over load", ("Load (requests/s)", "TTFT (ms)"), lines, log_y=True)


def _deviations(study: _ThroughputStudy) -> Iterator[str]:
    if study.verdicts.contradictions:
        yield (
            "Verdicts contradicted each other: a load was stable above one that grew. The bracket was opened again "
            "once; what counts is the highest stable load below all that grew."
        )
    if study.limit.varied:
        served = [each.outcome.output_tokens_per_s or 0.0 for each in study.steps if each.run in study.limit.runs]
        yield (
            f"The saturated steps served {figure(min(served))} to {figure(max(served))} output tokens/s, which differ "
            "by more than each by itself explains: the interval of the limit holds that, too."
        )
    for each in study.verdicts.undecided:
        yield f"Step {each.number}: whether requests piled up was not decided in {each.step.duration or 0:g} s."
    unsettled = [each.number for each in study.steps if each.outcome.window and each.outcome.window.enough is False]
    if unsettled:
        yield f"Not settled after the first 10 % (MSER-5): steps {', '.join(map(str, unsettled))}."
    duration_s = study.asked.parameters.duration or 0
    if study.objective.value is not None and duration_s < LONG_S:
        yield (
            f"Steps of {duration_s:g} s see few requests beyond an objective: the load at it is known roughly (within "
            f"13 % in two of three queues, by 60 s; within 4 % by {LONG_S:g} s, which are recommended)."
        )
    tried = [each for each in study.levels if each.step.kind in (LEVEL, AT_SLO)]
    if study.limit.filled and tried and not study.verdicts.stable:
        yield "No level was shown stable: the lowest that was tried is not sustained."
    if study.limit.filled and tried and not study.verdicts.growing:
        yield "No level was seen to grow: the highest that was tried may be sustained (--max)."


THROUGHPUT = Procedure(
    name="throughput",
    objective="The highest rate of output tokens that the system sustains, and what makes that the limit.",
    workload="synthetic-uniform",
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=60, sentinel=False)},
    next_step=next_step,
    findings=_findings,
    sentinel=fullest,
)
