"""Whether a test complies with the draft: each requirement as a function of the study, and the draft's verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import replace

from sidelight.exporter.summary.result import DRAFT, State, Verdict
from sidelight.methodology.compliance.case import Case, CheckResult, by_rules
from sidelight.methodology.compliance.checks import CHECKS
from sidelight.methodology.compliance.facts import StepFacts
from sidelight.methodology.compliance.observed import observed
from sidelight.methodology.compliance.requirements import Level, Requirement, applying, requirements
from sidelight.methodology.study.findings import Cell, StudyFindings
from sidelight.methodology.study.model import Finished, StudySettings
from sidelight.methodology.study.planning import POPULATE, counting
from sidelight.recorded.system import System
from sidelight.rundir.fields import doc
from sidelight.rundir.printable.numbers import agree

MOST_NAMED = 5  # requirements in a sentence


class Judgement(Struct, frozen=True, kw_only=True):
    """Result of checking one requirement."""

    id: Annotated[str, doc("The requirement.")]
    level: Annotated[Level, doc("must, should, or part: named without a keyword.")]
    section: Annotated[str, doc("The draft's section.")]
    text: Annotated[str, doc("What it requires.")]
    state: Annotated[State, doc("met; not met; not judged; not applicable; declared: met by what was declared alone.")]
    reason: Annotated[str, doc("Why that is so.")]
    evidence: Annotated[str, doc("The file that shows it, inside the study, and the path in it.")]
    value: Annotated[Cell, doc("The value there, where it is a number or a word.", "its unit")]
    cure: Annotated[str, doc("What to do; empty unless it is not met.")]


class Compliance(Struct, frozen=True, kw_only=True):
    """Whether a test complies with the draft."""

    draft: Annotated[str, doc("The draft.")] = DRAFT
    test: Annotated[str, doc("The test.")]
    verdict: Annotated[
        Verdict,
        doc(
            "unconditional: every MUST and SHOULD that applies holds; conditional: every MUST does; not judged: the "
            "study is not complete; else not compliant."
        ),
    ]
    sentence: Annotated[str, doc("The verdict in words, with what is missing.")]
    contradictions: Annotated[list[str], doc("What the server shows that was declared otherwise.")]
    system: Annotated[System, doc("The system as declared and as seen.")] = System()
    requirements: Annotated[list[Judgement], doc("Each requirement, in the draft's order.")]

    def failing(self, level: Level) -> list[Judgement]:
        """Return the requirements of a level that are not met."""
        return [each for each in self.requirements if each.level == level and each.state == "not met"]


def comply(
    test: str,
    asked: StudySettings,
    system: System,
    finished: Sequence[Finished],
    findings: StudyFindings | None,
    facts: Mapping[str, StepFacts],
    *,
    whole: bool = True,
) -> Compliance:
    """Return the compliance statement of a test from its steps and their facts.

    The facts are by `Finished.run`; void steps do not count. `findings` is None of a plain run, which reports no test.
    `system` is as declared: what the steps show of it is filled in here, and what contradicts it is said. `whole`: the
    study is complete; else what it lacks is not judged.
    """
    known = [(each, facts[each.run]) for each in finished if each.run in facts and each.step.kind != POPULATE]
    counted = {each.number for each in counting(finished)}
    steps = [each for each in known if each[0].number in counted]
    shown = observed(system, steps, finished, () if steps else known)
    case = Case(test=test, asked=asked, system=shown, steps=steps, findings=findings, whole=whole)
    judgements = [_judged(requirement, case) for requirement in applying(test)]
    failing: dict[str, list[str]] = {level: [] for level in ("must", "should", "part")}
    for each in judgements:
        if each.state == "not met":
            failing[each.level].append(each.id)
    verdict: Verdict = "not compliant" if failing["must"] else "conditional" if failing["should"] else "unconditional"
    if not (steps and whole):
        verdict = "not judged"
    counts: Counter[str] = Counter(each.level for each in judgements if each.state != "not applicable")
    return Compliance(
        test=test,
        verdict=verdict,
        sentence=_sentence(test, verdict, failing, counts) if steps else _NOTHING_COUNTS.format(test),
        contradictions=list(shown.contradictions.values()),
        system=shown,
        requirements=judgements,
    )


_NOTHING_COUNTS = "Whether the {} test complies with the draft was not judged: no step counts."


def satisfies(compliance: Compliance, required: Literal["conditional", "unconditional"]) -> bool:
    """Return whether a statement reaches at least the verdict required by `--require`."""
    return compliance.verdict in ("unconditional", required)


def _judged(requirement: Requirement, case: Case) -> Judgement:
    check = CHECKS.get(requirement.id)
    if not case.steps:
        given = CheckResult(state="not judged", reason="no step counts")
    else:
        given = check(case) if check else by_rules(case, requirement)
    if given.state == "not met" and requirement.scope == case.test and not case.whole:
        given = replace(given, state="not judged")
    return Judgement(
        id=requirement.id,
        level=requirement.level,
        section=requirement.section,
        text=requirement.text,
        state=given.state,
        reason=given.reason,
        evidence=given.evidence,
        value=given.value,
        cure=requirement.cure if given.state == "not met" else "",
    )


def _sentence(test: str, verdict: Verdict, failing: Mapping[str, list[str]], counts: Mapping[str, int]) -> str:
    has_test = any(each.scope == test for each in requirements())
    whose = f"The {test} test is" if has_test else f"The draft has no test {test}; as a measurement, it is"
    musts, shoulds, parts = (counts[level] for level in ("must", "should", "part"))
    if verdict == "not judged":
        so_far = _missed(failing["must"], f"the {musts} MUSTs that apply") if failing["must"] else "no MUST is missed"
        return (
            f"Whether the {test} test complies with the draft was not judged, as it is not complete; so far {so_far}."
        )
    if verdict == "not compliant":
        return f"{whose} not compliant with the draft: {_missed(failing['must'], f'the {musts} MUSTs that apply')}."
    met = f"all {musts} MUSTs"
    missed = [
        _missed(failing[level], f"{count} {words}")
        for level, count, words in (("should", shoulds, "SHOULDs"), ("part", parts, "points without a keyword"))
        if failing[level]
    ]
    if verdict == "unconditional":
        met = f"{met} and {shoulds} SHOULDs"
    but = f", but {' and '.join(missed)}" if missed else ""
    return f"{whose} {verdict}ly compliant with the draft: {met} that apply are met{but}."


def _missed(names: Sequence[str], of: str) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{len(names)} of {of} {agree(len(names), 'is', 'are')} not met ({', '.join(names[:MOST_NAMED])}{more})"
