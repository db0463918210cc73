"""A study as requirements are checked against it, and the checks that `requirements.yaml` states as rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from methodology.compliance.facts import StepFacts
from methodology.compliance.requirements import Needs, Requirement, Rule, When
from methodology.compliance.system import System
from methodology.study.model import Asked, Cell, Findings, Finished

State = Literal["met", "not met", "not applicable", "declared"]


class Answer(Struct, frozen=True, kw_only=True):
    """What a check says: the state and why; the file of the study and the path in it that show it, and the value."""

    state: State
    reason: str
    evidence: str = ""
    value: Cell = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A study: its steps that count with the facts of each; `findings` is None of a plain run."""

    test: str
    asked: Asked
    system: System
    steps: Sequence[tuple[Finished, StepFacts]]
    findings: Findings | None

    def measuring(self) -> list[tuple[Finished, StepFacts]]:
        """Return the steps that results are of, without those that only look for the capacity."""
        return [step for step in self.steps if step[0].step.kind not in ("saturate", "capacity")]


def judged(ok: bool, reason: str, evidence: str = "", value: object = None) -> Answer:
    """Return met or not met."""
    cell = value if isinstance(value, float | int | str) else None
    return Answer(state="met" if ok else "not met", reason=reason, evidence=evidence, value=cell)


def inapplicable(reason: str) -> Answer:
    """Return that a requirement does not apply, and why."""
    return Answer(state="not applicable", reason=reason)


def value_at(case: Case, step: tuple[Finished, StepFacts], path: str) -> Any:
    """Return the value of a step at a path as rules have it; None where there is none."""
    finished, facts = step
    tree: dict[str, Any] = {
        **facts.about, "step": finished.step, "outcome": finished.outcome, "asked": case.asked, "facts": facts,
        "system": case.system.of(finished.step.variant),
    }  # fmt: skip
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def by_rules(case: Case, rules: Sequence[Rule], when: When | None) -> Answer:
    """Return met where the values of every step that a requirement applies to are as they must be."""
    steps = case.steps
    if when is not None:
        steps = [step for step in steps if value_at(case, step, when.of) in (None, *when.among)]
    if not steps:
        return inapplicable(when.otherwise) if when and case.steps else judged(False, "no step that counts was run")
    evidence = [(f"{step[0].run}/{rule.at}: {rule.of}".lstrip("/"), value_at(case, step, rule.of), rule)
                for step in steps for rule in rules]  # fmt: skip
    wrong = [(place, value, text) for place, value, rule in evidence if (text := problem_of(rule, value))]
    if not wrong:
        return judged(True, "so in every step", *evidence[0][:2])
    place, value, text = wrong[0]
    more = f" (and {len(wrong) - 1} more like this)" if len(wrong) > 1 else ""
    return judged(False, text + more, place, value)


def problem_of(rule: Rule, value: Any) -> str:
    """Return the problem of a value by a rule, "" where there is none."""
    shown = value
    if rule.absent:
        fails = bool(value)
    elif rule.with_ or rule.without:
        shown = sorted({*rule.with_} - {*(value or ())} | {*rule.without} & {*(value or ())})
        fails = value is None or bool(shown)
        shown = ", ".join(shown)
    elif value is None or (rule.least is None and rule.most is None):
        fails = value not in rule.among if rule.among else not value
        fails = fails or (bool(rule.begins) and not str(value).startswith(rule.begins))
    else:
        fails = value < (rule.least or 0.0) or (rule.most is not None and value > rule.most)
    return (
        rule.problem.format("not known" if shown is None else f"{shown:,}" if isinstance(shown, int) else shown)
        if fails
        else ""
    )


def by_needs(case: Case, needs: Needs) -> Answer:
    """Return met where all that is needed is there, declared where declarations are all of it."""
    reported = needs.results or needs.tables or needs.plots
    if reported and case.findings is None:
        return judged(False, "a plain run does not report it")
    missing = [*_undeclared(case.system, needs.system), *_unreported(case.findings, needs)]
    if missing:
        return judged(False, "; ".join(missing), "result.json" if reported else "study.json: sut")
    if reported:
        return judged(True, "reported", f"result.json: results.{needs.results[0]}" if needs.results else "report.html")
    state: State = "declared" if case.system.standing(*needs.system) == "declared" else "met"
    value = msgspec.to_builtins(getattr(case.system, needs.system[0]))
    return msgspec.structs.replace(
        judged(True, f"as {state}", f"study.json: sut.{needs.system[0]}", value), state=state
    )


def _undeclared(system: System, names: Sequence[str]) -> list[str]:
    unknown = ", ".join(name for name in names if getattr(system, name) is None)
    wrong = [system.contradictions[name] for name in names if name in system.contradictions]
    return [*([f"neither declared nor seen: {unknown}"] if unknown else []), *wrong]


def _unreported(findings: Findings | None, needs: Needs) -> list[str]:
    if findings is None:
        return []
    valued = {name for name, quantity in findings.results.items() if quantity.value is not None}
    missing = [f"no value of {choice}" for choice in needs.results if valued.isdisjoint(choice.split("|"))]
    tables, plots = [table.name for table in findings.tables if table.rows], [plot.name for plot in findings.plots]
    for kind, wanted, names in (("table", needs.tables, tables), ("plot", needs.plots, plots)):
        if wanted and not any(name.startswith(wanted) for name in names):
            missing.append(f"no {kind} {wanted[0]}")
    return missing


def answer(requirement: Requirement, case: Case) -> Answer:
    """Return the answer to a requirement by its rules, or by what it needs."""
    if requirement.needs is not None:
        return by_needs(case, requirement.needs)
    return by_rules(case, requirement.rules, requirement.when)
