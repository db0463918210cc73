"""Verdict as every report shows it: its blocks, and its figures with their objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from sidelight.exporter.document import BLANK, Block, Figures, PartsBar, Piece, Prose
from sidelight.exporter.summary.verdict import (
    MeanParts,
    RunVerdict,
    State,
    StudyState,
    StudyVerdict,
    VerdictFigure,
)
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.rundir.printable.numbers import cell, spoken

WHY, DO = "Why: ", "Do this: "
LEVELS = ("p50", "p99")
LEAST_SHOWN = 0.005  # of the whole: a smaller part has no piece of the bar
TONES: dict[State | StudyState, str] = {
    "healthy": "met strong", "not_judged": "strong", "missed": "alarm strong", "untrusted": "warning strong",
    "overloaded": "alarm strong", "failing": "alarm strong",
    "slower": "alarm strong", "faster": "met strong", "equal": "met strong", "undecided": "strong",
    "limit_found": "strong", "no_limit": "met strong", "none_held": "alarm strong", "measured": "strong",
    "incomplete": "warning strong",
}  # fmt: skip
_MET = {True: "met", False: "MISSED", None: "not known"}


def verdict_blocks(verdict: RunVerdict | StudyVerdict) -> Iterator[Block]:
    """Yield a verdict as every report shows it; an empty line ends it."""
    yield Prose(verdict.headline, f"{TONES[verdict.state]} headline")
    if verdict.figures:
        yield Figures(tuple((each.label, each.text, "alarm" if each.bad else "") for each in verdict.figures))
    for bar in (bars := list(_bars(verdict))):
        shown = [part for part in bar.parts if part.share is None or part.share >= LEAST_SHOWN]
        pieces = (Piece(part.part, part.label, part.mean_ms, part.share, part.known_from) for part in shown)
        if shown:
            yield PartsBar(tuple(pieces), bar.label, bar.mean_ms / max(each.mean_ms for each in bars))
    yield Prose(f"{WHY}{verdict.why}")
    yield Prose(f"{DO}{verdict.do}", "strong")
    yield BLANK


def _bars(verdict: RunVerdict | StudyVerdict) -> Iterator[MeanParts]:
    if isinstance(verdict, RunVerdict):
        yield MeanParts(label="", mean_ms=1.0, parts=verdict.parts)
    else:
        yield from verdict.bars


def served_figure(served: float | None, offered: float | None, drained: str = "") -> VerdictFigure:
    of = "" if offered is None else f" of {cell(offered)}"
    return VerdictFigure(name="served", label="served", value=served, text=f"{cell(served)}{of} requests/s{drained}")


def failed_figure(failed: int, sent: int, unended: str = "") -> VerdictFigure:
    text = f"{failed:,} of {sent:,}{unended}"
    return VerdictFigure(name="failed", label="failed", value=float(failed), text=text, bad=failed > 0)


def time_figures(
    whole: str,
    times_ms: Mapping[str, float | None],
    objectives: Sequence[ObjectiveResult],
    *,
    off: float = 1e-6,
    error_ms: float | None = None,
) -> Iterator[VerdictFigure]:
    """Yield percentiles of a time, each with its error and its objective."""
    beside = {level: objective_of(f"{whole}_{level}", times_ms[level], objectives, off=off) for level in LEVELS}
    together = *times_ms.values(), *(objective.bound_ms for objective in beside.values() if objective)
    for level in LEVELS:
        name, objective, text = f"{whole}_{level}", beside[level], spoken(times_ms[level], *together)
        if error_ms is not None:
            text += f" \N{PLUS-MINUS SIGN} {spoken(error_ms, *together)}"
        if objective is not None:
            bound = f"{objective.text[len(name) :][:1]} {spoken(objective.bound_ms, *together)}"
            text += f" ({bound}: {_MET[objective.met]})"
        yield VerdictFigure(
            name=cast("Any", name),
            label=f"{whole.upper()} {level}",
            value=times_ms[level],
            text=text,
            bad=objective is not None and not objective.met,
        )


def objective_of(
    name: str, value_ms: float | None, objectives: Sequence[ObjectiveResult], *, off: float = 1e-6
) -> ObjectiveResult | None:
    """Return the objective of a figure with its value; None without one. Values may be `off` by that ratio."""
    for objective in objectives:
        is_same = value_ms is not None and objective.value is not None
        is_same = is_same and abs((objective.value or 0.0) - (value_ms or 0.0)) <= off * abs(value_ms or 0.0)
        if f"{objective.metric}_{objective.statistic}" == name and is_same and objective.bound_ms is not None:
            return objective
    return None
