"""Verdict on a study by its steps: the highest load that held, and what shows where the next one did not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import asdict

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.queueing import while_waiting
from sidelight.correlator.statistics.server_load import leading_endpoints
from sidelight.exporter.report.advice import MORE_PREFILL, UNEXPLAINED, Observations, mean_shares
from sidelight.exporter.report.verdict import (
    LEVELS,
    described_parts,
    failed_figure,
    largest_share,
    part_shares,
    served_figure,
    spent,
    time_figures,
)
from sidelight.exporter.summary.verdict import MeanParts, SidesFigure, StudyState, StudyVerdict
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Finished, Reader, StepData, StudySettings
from sidelight.methodology.study.planning import POPULATE, counting, valid
from sidelight.methodology.study.quantities import latency
from sidelight.methodology.study.samples import breakdown_of
from sidelight.methodology.study.saturation import SATURATE, load_of, measured_capacity
from sidelight.rundir.printable.numbers import count_of, figure, spoken
from sidelight.rundir.printable.text import as_sentence
from sidelight.scraper.engines.catalogue import EngineLimits, catalogue
from sidelight.scraper.engines.recognition import detect
from sidelight.scraper.window.window import Window

# What to do about a limit of which the step's scrapes show no more.
CURES = {
    "client": "allow more requests in flight (--concurrency): the server was not full",
    "kv_cache": "give more memory to the KV cache, let fewer requests run at once, or add a replica",
    "seats": "let the engine run more requests at once, or add a replica",
    "steps": "add a replica: the engine's own steps take all of its time",
}
SEARCHES = frozenset({"throughput", "tradeoff", "capacity"})
LOADS = frozenset({"rate", "concurrency"})
NOTHING = "look at why no step counts (the notes below), and measure again"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Steps of a study: the highest load `held`, and the lowest one that `broke`; `last` is what else is shown."""

    held: Finished | None
    broke: Finished | None
    last: Finished
    tried: int
    contradictory: bool

    @property
    def state(self) -> StudyState:
        """Return the state of the study."""
        if self.contradictory:
            return "undecided"
        if self.broke is not None:
            return "limit_found" if self.held is not None else "none_held"
        return "no_limit" if self.held is not None and self.tried > 1 else "measured"


def _ending(each: Finished) -> str:
    """Return the fault of a step, behind its load; "" of one that held."""
    if each.outcome.verdict == "growing":
        return ", where requests pile up"
    slo = each.outcome.slo
    missed = [objective.text for objective in (slo.objectives if slo else ()) if objective.met is False]
    return f", where {' and '.join(missed)} is missed" if missed else ""


def study_verdict(
    asked: StudySettings, finished: Sequence[Finished], findings: StudyFindings, read: Reader
) -> StudyVerdict:
    """Return the verdict on a study; a comparison has brought its own."""
    if findings.verdict is not None:
        return findings.verdict
    headline = next(iter(findings.answer), "There is no result.")
    steps = _steps(asked, finished)
    if steps is None:
        return StudyVerdict(
            state="incomplete", cause="none", headline=headline, figures=[], bars=[],
            why=as_sentence(next((each.outcome.void for each in finished if each.outcome.void), "no step has ended")),
            do=as_sentence(NOTHING),
        )  # fmt: skip
    shown, where = steps.held or steps.broke or steps.last, steps.broke or steps.held or steps.last
    data = read(where)
    seen = _observed(data, where)
    parts = part_shares(seen.breakdown, described_parts(seen.breakdown, TTFT_PARTS, "ttft"))
    largest, mean_ms = largest_share(parts), seen.breakdown.ttft_ms.mean
    variant = f" ({where.step.variant})" if where.step.variant else ""
    at = f"step {where.number}{variant}, {where.step.load_words}{_ending(where)}"
    why, do = _explained(steps, seen, at=where)
    return StudyVerdict(
        state=steps.state,
        cause=largest.part if largest else "none",
        headline=_headline(findings, asked) or headline,
        figures=_figures(shown),
        bars=[MeanParts(label=f"Mean TTFT of {at}: {spoken(mean_ms)}", mean_ms=mean_ms, parts=parts)]
        if parts and mean_ms
        else [],
        why=as_sentence(why),
        do=as_sentence(do),
    )


def _seeks_load(asked: StudySettings) -> bool:
    """Return whether the steps of a study differ in load alone."""
    return asked.test in SEARCHES or (asked.test == "sweep" and {*(asked.parameters.vary or {})} <= LOADS)


def _steps(asked: StudySettings, finished: Sequence[Finished]) -> _Steps | None:
    """Return the steps that the verdict names; None where none counts. Open loops come before closed ones."""
    every, limit = counting(finished), measured_capacity(valid(finished))
    levels = [each for each in every if each.step.kind not in (SATURATE, POPULATE)]
    levels = [each for each in levels if each.step.load == "open"] or levels
    if not every:
        return None
    last = max(levels or every, key=_served) if asked.test == "sweep" else (levels or every)[-1]
    if not _seeks_load(asked):
        return _Steps(held=None, broke=None, last=last, tried=1, contradictory=False)

    def load(each: Finished) -> float:
        return each.step.level if limit is None or each.step.load == "closed" else load_of(each, limit)

    broken = [each for each in levels if each.outcome.verdict == "growing" or each.outcome.slo_met is False]
    broke = min(broken, key=load, default=None)
    holding = [each for each in levels if each.outcome.verdict == "stable" or each.outcome.slo_met]
    below = [each for each in holding if each not in broken and (broke is None or load(each) < load(broke))]
    return _Steps(
        held=max(below, key=load, default=None),
        broke=broke,
        last=last,
        tried=len({each.step.level for each in levels}),
        contradictory=not below and any(each not in broken for each in holding),
    )


def _served(each: Finished) -> float:
    return each.outcome.output_tokens_per_s or 0.0


def _headline(findings: StudyFindings, asked: StudySettings) -> str:
    """Return the limits of a study that sought them, else ""."""
    results = findings.results
    if "limit_requests_per_s" not in results or "sustainable_requests_per_s" not in results:
        return ""
    stable, full, at_slo = (
        results[f"{name}_requests_per_s"].value if f"{name}_requests_per_s" in results else None
        for name in ("sustainable", "limit", "slo")
    )
    said = "No load was shown stable" if stable is None else f"Stable to {figure(stable)} requests/s"
    said += "; the server was never full" if full is None else f"; saturated at {figure(full)} requests/s"
    if slo := asked.parameters.slo:
        said += f"; how far {slo} holds is not known" if at_slo is None else f"; {slo} holds to {figure(at_slo)}"
    return f"{said}."


def _figures(each: Finished) -> list[SidesFigure]:
    """Return the figures of a step, by its window."""
    outcome = each.outcome
    times_ms = {level: latency(outcome, "ttft", level).estimate for level in LEVELS}
    offered = outcome.realised_per_s if each.step.load == "open" else None
    figures = (
        served_figure(outcome.completed_per_s, offered, f" (step {each.number})"),
        *time_figures("ttft", times_ms, outcome.slo.objectives if outcome.slo else (), off=math.inf),
        failed_figure(outcome.sent - outcome.ok, outcome.sent),
    )
    return [SidesFigure(**asdict(of)) for of in figures]


def _observed(data: StepData, each: Finished) -> Observations:
    """Return the observations of a step that its advice follows from."""
    breakdown, window = breakdown_of(data.parts), Window(start_ns=data.start_ns, end_ns=data.end_ns)
    page = next((page for page, _ in leading_endpoints(data.endpoints)), None)
    engine = detect(page.series) if page is not None else None
    return Observations(
        breakdown=breakdown,
        shares=mean_shares(breakdown),
        waited=while_waiting(data.endpoints, window),
        limits=EngineLimits() if engine is None else catalogue(engine.name).limits,
        preemptions=each.outcome.preemptions or 0.0,
    )


def _explained(steps: _Steps, seen: Observations, *, at: Finished) -> tuple[str, str]:
    """Return the evidence for the end of the study, and advice."""
    explained, described = seen.explained(), list(described_parts(seen.breakdown, TTFT_PARTS, "ttft"))
    subject = f"mean TTFT of {count_of(seen.breakdown.ttft_ms.count, 'request')}"
    if explained is not None:
        why, do = explained.seen, explained.cure
    else:
        why = (
            spent(subject, seen.breakdown, described, is_ttft=True, large=seen.large)
            if described
            else at.outcome.limit_reason or "no breakdown: no part of the TTFT is known"
        )
        waits = [part for part in seen.large if part in UNEXPLAINED]
        do = UNEXPLAINED[waits[0]] if waits else MORE_PREFILL if steps.broke is not None and seen.large else ""
        if steps.broke is not None and (limit := CURES.get(at.outcome.limit or "")):
            why, do = at.outcome.limit_reason, limit
    if steps.contradictory:
        do = "lengthen the steps (--duration): a higher load held where this one did not"
    if steps.state == "no_limit":
        do = "try higher loads: none that was tried broke"
    return why, do or "nothing, if these times are good enough"
