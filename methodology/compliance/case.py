"""View of a study for checking requirements, and the checks stated as rules in `requirements.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import Struct

from sidelight.exporter.summary.result import State
from sidelight.loadgen.requests.warmup import AFTER
from sidelight.methodology.compliance.facts import StepFacts
from sidelight.methodology.compliance.requirements import Requirement, Rule, When
from sidelight.methodology.study.findings import Cell, StudyFindings
from sidelight.methodology.study.model import Finished, StudySettings
from sidelight.recorded.system import System

APART = ("saturate", "capacity", "warm-up")  # kinds of steps that look for the capacity, or only warm up
Counted = tuple[Finished, StepFacts]


class CheckResult(Struct, frozen=True, kw_only=True):
    """Result of a check: the state and why; the file of the study and the path in it that show it, and the value."""

    state: State
    reason: str
    evidence: str = ""
    value: Cell = None


def judged(ok: bool, reason: str, evidence: str = "", value: object = None) -> CheckResult:
    """Return met or not met."""
    cell = value if isinstance(value, float | int) or (isinstance(value, str) and value not in reason) else None
    return CheckResult(state="met" if ok else "not met", reason=reason, evidence=evidence, value=cell)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A study: its steps that count with the facts of each; `findings` is None of a plain run.

    `whole`: it is complete, so that a step that is not among them is none of it.
    """

    test: str
    asked: StudySettings
    system: System
    steps: Sequence[Counted]
    findings: StudyFindings | None
    whole: bool = True

    @property
    def measuring(self) -> list[Counted]:
        """Return the steps that results are of."""
        return [step for step in self.steps if step[0].step.kind not in APART]

    @cached_property
    def study(self) -> dict[str, Any]:
        """Return the values of all steps together that rules may ask for."""
        steps = [finished.step for finished, _ in self.measuring]
        variants = [self.system.of(name) for name in {step.variant for step in steps}]
        levels = [step.level for step in steps if step.kind == "level"]
        sizes: list[Any] = [(facts.about.get("tokenizer") or {}).get("vocab_size") for _, facts in self.steps]
        tables = (f"table {table.name}" for table in (self.findings.tables if self.findings else ()) if table.rows)
        plots = (f"plot {plot.name}" for plot in (self.findings.plots if self.findings else ()))
        return {
            "vocabulary": self.system.vocabulary if None in sizes else min(sizes, default=None),
            "levels": len({step.level for step in steps}),
            "shares": {round(step.share, 3) for step in steps if step.share is not None},
            "is_ascending": levels == sorted(levels),
            "kinds": {step.kind for step in steps},
            "variants": {step.variant for step in steps},
            "filtering": {bool(each.input_filtering or each.output_filtering) for each in variants},
            "is_reported": self.findings is not None and "run" not in {step.kind for step in steps},
            "shown": {*tables, *plots},
        }


def value_at(case: Case, step: Counted, path: str) -> Any:
    """Return the value of a step at a path: of study, asked, results, system, step, outcome, facts, or its manifest;
    None where there is none.
    """
    finished, facts = step
    window = finished.outcome.window
    value: Any = {
        **facts.about, "warmup": _warm_up(case, facts), "step": finished.step, "outcome": finished.outcome,
        "asked": case.asked, "facts": facts, "system": case.system.of(finished.step.variant), "study": case.study,
        "results": case.findings.results if case.findings else {},
        "in_flight_ratio": (facts.in_flight_mean or 0.0) / (finished.step.level or 1.0),
        "lasting_s": max(finished.step.duration or 0.0, window.load_s if window else 0.0),
        "is_clock_compared": facts.is_clock_compared and not case.system.same_machine,
    }  # fmt: skip
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _warm_up(case: Case, facts: StepFacts) -> Any:
    """Return a step's stated warm-up, or that of the earlier step that warmed the system."""
    asked = str((facts.about.get("config") or {}).get("warmup"))
    earlier = (each for finished, each in case.steps if asked == f"{AFTER}{finished.run.rpartition('/')[2]}")
    return next(earlier, facts).about.get("warmup")


def by_rules(case: Case, requirement: Requirement) -> CheckResult:
    """Return the result of checking a requirement by its rules.

    It is met where the values of every step concerned are as they must be; declared, where all of them are
    declarations.
    """
    when, rules = requirement.when, requirement.all_rules()
    if case.test in requirement.unless:
        return CheckResult(state="not applicable", reason=f"the {case.test} test has a workload of its own")
    steps = [step for step in case.steps if when is None or _concerns(when, value_at(case, step, when.of))]
    if not steps and case.steps and when and when.otherwise:
        return CheckResult(state="not applicable", reason=when.otherwise)
    if not steps:
        return CheckResult(state="not met" if case.whole else "not judged", reason="no such step was run")
    shown = [(step, rule, value_at(case, step, rule.of)) for step in steps for rule in rules]
    wrong = [(step, rule, value, text) for step, rule, value in shown if (text := _problem(case, rule, value))]
    first = {each[1]: each[3] for each in reversed(wrong)}
    step, rule, value, text = wrong[0] if wrong else (*shown[0], "so in every step")
    at = rule.at or f"manifest.json: {rule.of}"
    place = at if at.startswith(("study.json", "result.json", "report.html", "steps.log")) else f"{step[0].run}/{at}"
    answer = judged(
        not wrong, _joined([first[each] for each in rules if each in first] or [text]), place.lstrip("/"), value
    )
    names = {each.of.removeprefix("system.") for each in rules if each.of.startswith("system.")}
    if wrong or len(names) < len(rules) or names & set(case.system.seen):
        return answer
    return CheckResult(state="declared", reason="as declared", evidence=answer.evidence, value=answer.value)


def _joined(texts: Sequence[str]) -> str:
    """Return problems in one line; of those that begin alike up to a colon, the beginning once."""
    ends: dict[str, dict[str, None]] = {}
    for text in texts:
        begin, _, end = text.partition(": ")
        ends.setdefault(begin, {})[end] = None
    return "; ".join(": ".join(filter(None, (begin, ", ".join(filter(None, rest))))) for begin, rest in ends.items())


def _concerns(when: When, value: Any) -> bool:
    return value is None or (value not in when.apart and (not when.among or value in when.among))


def _problem(case: Case, rule: Rule, value: Any) -> str:
    """Return the problem of a value by a rule, "" where there is none."""
    name = rule.of.removeprefix("system.")
    if rule.of.startswith("system.") and name in case.system.contradictions:
        return case.system.contradictions[name]
    shown = value
    if rule.absent:
        fails = bool(value)
    elif rule.with_ or rule.without:
        odd = {*rule.with_} - {*(value or ())} | {*rule.without} & {*(value or ())}
        fails, shown = value is None or bool(odd), ", ".join(sorted(map(str, odd))) or None
    elif rule.among:
        fails = value not in rule.among
    elif rule.begins:
        members = value if isinstance(value, set) else {str(value)}
        fails = not any(each.startswith(rule.begins) for each in members)
    elif value is not None and (rule.least is not None or rule.most is not None):
        fails = not (rule.least or 0.0) <= value <= (value if rule.most is None else rule.most)
    else:
        fails = value is None or not (rule.known or value)
    if not fails:
        return ""
    if isinstance(shown, float | int):
        shown = f"{shown:,}" if isinstance(shown, int) else f"{shown:.4g}"
    return rule.problem.format("not known" if shown is None else shown)
