"""Output Token Throughput: the highest load that is sustained, the limit of stability, and what makes it the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from methodology.measures import criteria
from methodology.search import AT_SLO, Bracket, at_objective, bracket, load_of, next_step
from methodology.study.findings import Cell, Evidence, Findings, Line, Plot, Quantity, Table, evidence, plot, table
from methodology.study.model import Asked, Finished, Outcome, Parameters, Procedure, Reader
from methodology.study.outcome import KIND_OF
from methodology.study.planning import LEVEL, counting
from methodology.study.quantities import LABELS, latency, latency_line, metric_table, number, percentile
from methodology.study.saturation import SATURATE, Capacity, measured_capacity

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "End-to-End"}
NAMES = ("p50", "p95", "p99")
RECOMMENDED_S = 300.0
_LETTER = Parameters(
    duration=300, min=0.01, max=10_000, increment=0.01, concurrency=1024, slo="ttft_p99<500ms", sentinel=True
)
_LIMIT_METHOD = (
    "output tokens a second of the saturated steps together, over the mean output tokens of all requests; batch means"
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
class _Study:
    """The steps that count, and what follows from them; `best` is the step whose throughput is the maximum."""

    asked: Asked
    steps: Sequence[Finished]
    limit: Capacity
    verdicts: Bracket
    best: Finished
    objective: Quantity

    @property
    def levels(self) -> list[Finished]:
        return [each for each in self.steps if each.step.load == "open"]


def _findings(asked: Asked, finished: Sequence[Finished], read: Reader) -> Findings:  # noqa: ARG001  outcomes suffice
    steps = counting(finished)
    limit = measured_capacity(steps)
    if limit is None:
        void = next((each.outcome.void for each in reversed(finished) if each.outcome.void), "")
        reason = f"no step counts, since {void.removesuffix('.')}" if void else "no closed loop completed a request"
        units = {"max_output_tokens": "tokens/s", "max_requests": "requests/s", "limit_requests": "requests/s"}
        missing = {f"{name}_per_s": number(None, unit, missing=reason) for name, unit in units.items()}
        return Findings(answer=(f"The maximum throughput is not known: {reason}.",), results=missing)
    verdicts = bracket([each for each in steps if each.step.load == "open"], limit)
    closed = [each for each in steps if each.run == limit.run]
    study = _Study(
        asked=asked,
        steps=steps,
        limit=limit,
        verdicts=verdicts,
        best=verdicts.stable or closed[0],
        objective=at_objective(asked, steps, limit),
    )
    results = _results(study)
    return Findings(
        answer=(_what(study, results), _how_sure(study, results), _what_limits(study)),
        results=results,
        evidence=tuple(_evidence(study)),
        tables=(_summary_table(results), _latency_table(study), _search_table(study)),
        plots=(_path(study), _latency_plot(study)),
        notes=(*_NOTES, *_deviations(study)),
    )


def _results(study: _Study) -> dict[str, Quantity]:
    limit, came, objective, stable = study.limit, study.best.outcome, study.objective, study.verdicts.stable
    ratio = limit.tokens_per_s / limit.per_s if limit.tokens_per_s and limit.per_s else None
    served: dict[str, Any] = {"method": "in the steady window of the highest stable level; batch means"}
    full: dict[str, Any] = {"method": _LIMIT_METHOD, "missing": "the load generator never filled the server"}
    results = {
        "max_output_tokens_per_s": number(came.output_tokens_per_s, "tokens/s", ci95=came.output_tokens_ci95, **served),
        "max_requests_per_s": number(came.completed_per_s, "requests/s", ci95=came.throughput_ci95, **served),
        "max_input_tokens_per_s": number(came.input_tokens_per_s, "tokens/s"),
        "sustainable_requests_per_s": number(
            stable.step.level if stable else None,
            "requests/s",
            method="highest offered load that was shown stable",
            missing="no open loop was shown stable",
        ),
        "limit_requests_per_s": number(limit.per_s if limit.filled else None, "requests/s", ci95=limit.ci95, **full),
        "limit_output_tokens_per_s": number(
            limit.tokens_per_s if limit.filled else None, "tokens/s", ci95=limit.tokens_ci95, **full
        ),
        "slo_requests_per_s": objective,
        "slo_output_tokens_per_s": number(
            objective.value * ratio if objective.value is not None and ratio else None,
            "tokens/s",
            missing=objective.missing,
            method="the same times the output tokens of a request",
        ),
        "draft_sustainable_requests_per_s": criteria.draft_sustainable(study.levels),
        **_efficiency(study),
    }
    return results | {
        f"{metric}_{name}_ms": replace(_latency(came, metric, name), at=study.best.step.load_words)
        for metric in METRICS
        for name in NAMES
    }


def _latency(outcome: Outcome, metric: str, name: str) -> Quantity:
    interval = latency(outcome, metric, name)
    if interval is None:
        reason = outcome.doubts.get(KIND_OF.get(metric, "load"), "no request has it")
        return Quantity(value=None, unit="ms", ci95=(None, None), missing=reason.rstrip("."))
    window_s = outcome.window.duration_s if outcome.window else 0
    return percentile(interval, name, round((outcome.realised_per_s or 0) * window_s))


def _efficiency(study: _Study) -> dict[str, Quantity]:
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


def _what(study: _Study, results: dict[str, Quantity]) -> str:
    tokens, requests = results["max_output_tokens_per_s"].value, results["max_requests_per_s"].value
    served = f"{tokens or 0:,.4g} output tokens/s ({requests or 0:.3g} requests/s)"
    if not study.limit.filled:
        most = f"{study.best.step.level:g} requests in flight, the most that were allowed"
        return f"With {most}, the server gives {served}."
    if study.verdicts.stable is None:
        return f"Saturated, the server gives {served}; no load offered beside it was shown to be sustained."
    offered = f"an offered load of {study.best.step.level:.3g} requests/s"
    return f"The server sustains {served}, at {offered}: the highest that was shown stable."


def _how_sure(study: _Study, results: dict[str, Quantity]) -> str:
    limit, draft = results["limit_requests_per_s"], results["draft_sustainable_requests_per_s"].value
    if limit.value is None:
        return "More in flight would give more: this is no limit of the server."
    said = f"Full, it serves {limit.value:.3g} requests/s{limit.interval()}, beyond which no load can be sustained"
    if study.verdicts.growing is not None:
        said += f"; at {load_of(study.verdicts.growing, study.limit):.3g} requests/s requests piled up"
    if draft is not None:
        said += f"; the draft's own criteria would accept {draft:.3g} requests/s"
    return said + "."


def _what_limits(study: _Study) -> str:
    limit, objective = study.limit, study.objective
    said = f"{criteria.WORDS[limit.limit or 'unknown']}: {limit.reason or 'there is no evidence'}"
    text = study.asked.parameters.slo
    if limit.filled and objective.value is not None and objective.value < load_of(study.best, limit):
        binds = f"{objective.value:.3g} requests/s{objective.interval()}"
        said += f"; within {text} the objective binds before, at {binds}"
    elif text and limit.filled and objective.value is not None:
        said += f"; {text} holds up to the highest stable load"
    elif text and limit.filled and objective.missing:
        said += f"; {objective.missing}"
    return said + "."


def _evidence(study: _Study) -> list[Evidence]:
    limit, best, growing = study.limit, study.best, study.verdicts.growing
    saturated = next(each.outcome for each in study.steps if each.run == limit.run)
    shown = {name: getattr(saturated, name) for name in ("queued_ratio", "running_max", "kv_cache_max", "preemptions")}
    what = "the highest load shown stable" if study.verdicts.stable else "the most that was served"
    said = evidence("what a full server serves", limit.run, {"completed_per_s": limit.per_s})
    said += evidence(what, best.run, {"output_tokens_per_s": best.outcome.output_tokens_per_s})
    said += evidence("what binds", limit.run, shown)
    if growing is not None and (stability := growing.outcome.stability):
        growth = {"stability.growth": stability.growth}
        said += evidence("the lowest load at which requests piled up", growing.run, growth)
    return said


def _summary_table(results: dict[str, Quantity]) -> Table:
    titles = {
        "max_output_tokens_per_s": "Max Output Throughput", "max_requests_per_s": "Max Request Throughput",
        "max_input_tokens_per_s": "Max Input Throughput", "sustainable_requests_per_s": "Sustainable Load",
        "output_tokens_per_gpu_s": "Tokens per GPU-second", "batch_utilisation_ratio": "Batch Utilization",
        "limit_requests_per_s": "Limit of stability", "slo_requests_per_s": "Load at the SLO",
        "slo_output_tokens_per_s": "Output Throughput at the SLO",
        "draft_sustainable_requests_per_s": "Sustainable by the draft's criteria",
    }  # fmt: skip
    return metric_table("throughput-summary", "Throughput Summary", titles, results)


def _latency_table(study: _Study) -> Table:
    rows = (
        (title, *(_latency(study.best.outcome, metric, name).shown for name in NAMES))
        for metric, title in METRICS.items()
    )
    titles = {"metric": "Metric", **{f"{name}_ms": f"{LABELS[name]} (ms)" for name in NAMES}}
    note = f"Of step {study.best.number}, {study.best.step.label}; intervals stand with the results."
    return table("latency-at-maximum-throughput", "Latency at Maximum Throughput", titles, rows, note)


def _search_table(study: _Study) -> Table:
    p50_ms = criteria.lowest_p50_ms(study.levels)
    titles = {
        "step": "Step", "level": "Level", "offered_per_s": "Offered (req/s)", "load_ratio": "Load / limit",
        "completed_per_s": "Completed (req/s)", "output_tokens_per_s": "Output (tok/s)",
        "server_tokens_per_s": "By the engine (tok/s)", "queued_ratio": "Scrapes with waiting",
        "running_mean": "Running", "kv_cache_max": "KV cache", "ttft_p99_ms": "TTFT P99 (ms)", "verdict": "Load was",
        "slo_met": "SLO met", "completed_ratio": "Completed / arrived", "draft": "Draft accepts", "limit": "Limit",
    }  # fmt: skip

    def row(each: Finished) -> tuple[Cell, ...]:
        came, is_open = each.outcome, each.step.load == "open"
        share = load_of(each, study.limit) / study.limit.per_s if study.limit.per_s else None
        served = (came.completed_per_s, came.output_tokens_per_s, came.server_tokens_per_s)
        shown = (came.queued_ratio, came.running_mean, came.kv_cache_max, criteria.ttft_ms(each, "p99"))
        judged = (criteria.completed_ratio(each), criteria.accepts(each, p50_ms)) if is_open else (None, None)
        offered = (each.step.level, share) if is_open else (None, None)
        head = (each.number, each.step.label, *offered)
        return (*head, *served, *shown, came.verdict, came.slo_met, *judged, came.limit)

    note = "Load / limit counts the output tokens that the step's requests asked for: long requests are more load."
    return table("throughput-search", "Throughput Search", titles, map(row, study.steps), note)


def _path(study: _Study) -> Plot:
    """Return the search: what each step served or realised, by number, marked by what came of it."""
    groups: dict[str, dict[float, float]] = {}
    for each in study.steps:
        if each.step.kind == SATURATE:
            groups.setdefault("closed loop, completed", {})[each.number] = each.outcome.completed_per_s or 0.0
        elif each.outcome.verdict:
            groups.setdefault(f"open loop, {each.outcome.verdict}", {})[each.number] = load_of(each, study.limit)
    lines = (Line(name=name, x=tuple(at), y=tuple(at.values())) for name, at in groups.items())
    return plot("search-path", "Search path", ("Step", "requests/s"), lines, kind="marks")


def _latency_plot(study: _Study) -> Plot:
    levels = sorted(study.levels, key=lambda each: load_of(each, study.limit))
    loads = [load_of(each, study.limit) for each in levels]
    lines = (latency_line(levels, loads, "ttft", name) for name in NAMES)
    return plot("throughput-latency", "TTFT over load", ("Load (requests/s)", "TTFT (ms)"), lines, log_y=True)


def _deviations(study: _Study) -> Iterator[str]:
    if study.verdicts.contradictions:
        yield (
            "Verdicts contradicted each other: a load was stable above one that grew. The bracket was opened again "
            "once; what counts is the highest stable load below all that grew."
        )
    for each in study.verdicts.undecided:
        yield f"{each.step.label}: whether requests piled up was not decided in {each.step.duration or 0:g} s."
    for each in study.steps:
        if each.outcome.window and each.outcome.window.enough is False:
            yield f"{each.step.label}: MSER-5 would leave out more than the first tenth: the step is short."
    duration_s = study.asked.parameters.duration or 0
    if study.objective.value is not None and duration_s < RECOMMENDED_S:
        yield (
            f"Steps of {duration_s:g} s see few requests beyond an objective: the load at it is known roughly (within "
            f"13 % in two of three queues, by 60 s; within 4 % by {RECOMMENDED_S:g} s, which are recommended)."
        )
    tried = [each for each in study.levels if each.step.kind in (LEVEL, AT_SLO)]
    if study.limit.filled and tried and not study.verdicts.stable:
        yield "No level was shown stable: the lowest that was tried is not sustained."
    if study.limit.filled and tried and not study.verdicts.growing:
        yield "No level was seen to grow: the highest that was tried may be sustained (--max)."


THROUGHPUT = Procedure(
    name="throughput",
    title="Output Token Throughput",
    section="test-throughput",
    objective="The highest rate of output tokens that the system sustains, and what makes that the limit.",
    workload="synthetic-uniform",
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=60, sentinel=False)},
    next_step=next_step,
    findings=_findings,
)
