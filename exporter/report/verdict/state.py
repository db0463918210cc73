"""State of a verdict where it follows from objectives, or from a wait without one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sidelight.correlator.parts import CAUSES
from sidelight.exporter.report.advice import LARGE
from sidelight.exporter.summary.breakdown import IN_PREFILL, Breakdown
from sidelight.exporter.summary.verdict import State, Subject
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.rundir.printable.numbers import cell, count_of, ms, spoken

WITHOUT_CLIENT = "without a client's span, the TTFT and what passed before the engine are not known"
CLIENT_SPANS = "have clients, or the gateway before the engine, send their spans here too"
NO_SPANS = "have clients and engines send their spans, to see where the time goes"


@dataclass(frozen=True, slots=True)
class JudgedState:
    """State of a run. `cause` is None where it is the largest part of the time; `why` is "" where it follows from the
    parts.
    """

    state: State
    headline: str
    cause: Subject | None = None
    why: str = ""


def unseen_headline(engine_requests: int) -> str:
    """Return the headline of a watch without clients' spans."""
    if not engine_requests:
        return "Not judged: requests end, and no span of a client came."
    return f"Not judged: {count_of(engine_requests, 'engine request')} came without a client's span."


def is_queueing(means_ms: Mapping[str, float]) -> bool:
    """Return whether the queue may be a large part of the TTFT by engines' pages."""
    return not means_ms.get("queue", math.inf) < LARGE * means_ms.get("TTFT", 0.0)


def page_means(means_ms: Mapping[str, float], when: str = "") -> str:
    """Return a sentence on the means of engines' pages, "" for none. `when` says of which time they are."""
    means = ", ".join(f"{label} {spoken(mean_ms)}" for label, mean_ms in means_ms.items())
    return f"By the engines' pages, on average{when}: {means}." if means else ""


def by_objectives(objectives: Sequence[ObjectiveResult], when: str = "") -> JudgedState | None:
    """Return the state by the objectives; None without any. `when` says of which time they are, with their values."""
    unmet = {met: [each for each in objectives if each.met is met] for met in (False, None)}
    texts = {met: ", ".join(each.text for each in named) for met, named in unmet.items()}
    if when:
        texts[False] = ", ".join(map(_with_value, unmet[False]))
    if unmet[False]:
        return JudgedState("missed", f"Objective missed{when}: {texts[False]}.")
    if unmet[None]:
        why = unmet[None][0].missing
        return JudgedState("not_judged", f"Not judged: whether {texts[None]} is met is not known ({why}).")
    return JudgedState("healthy", f"Healthy{when}: every objective was met.") if objectives else None


def _with_value(objective: ObjectiveResult) -> str:
    if objective.value is None:
        return objective.text
    is_time = objective.unit == "ms"
    return f"{objective.text} ({spoken(objective.value) if is_time else measured(objective.value, objective.unit)})"


def measured(value: float, unit: str) -> str:
    """Return the value of an objective with its unit."""
    if unit == "ms":
        return f"{ms(value)} ms"
    return f"{100 * value:.3g} %" if unit == "ratio" else f"{cell(value)} {unit}"


def by_parts(waits: Sequence[str], causes: Mapping[str, str] = CAUSES) -> JudgedState | None:
    """Return the state by the first large part that is a wait, without an objective; None without one."""
    goal = "no objective (--slo) says what is good enough"
    return next(
        (JudgedState("not_judged", f"Not judged: {causes[part]} stands out, and {goal}.") for part in waits),
        None,
    )


def waits_of(large: Sequence[str], breakdown: Breakdown | None = None) -> list[str]:
    """Return the large parts that are waits, or have one in them."""
    return [part for part in large if part != "prefill" or (breakdown and breakdown.queue_ms.missing == IN_PREFILL)]
