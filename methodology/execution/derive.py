"""The files of a study, derived from its directory alone: the same directory gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import to_builtins as builtins

from sidelight.methodology.compliance.facts import StepFacts
from sidelight.methodology.compliance.statement import Compliance, comply
from sidelight.methodology.execution.data import Steps
from sidelight.methodology.execution.record import LOG, STUDY, Status, Study, StudyRecord, open_study
from sidelight.methodology.options import ALL
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.report.files import study_files
from sidelight.methodology.report.tables import joined
from sidelight.methodology.report.verdict import study_verdict
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings
from sidelight.methodology.study.model import Done, Finished, Kind, Procedure, Reader
from sidelight.methodology.study.planning import LEVEL, SENTINEL, decide, of_kind, repeated, valid
from sidelight.methodology.study.result import Cost, Drift, Reproduction, StepRecord, StudyResult
from sidelight.recorded.directory import json_text, write_texts
from sidelight.recorded.errors import CannotWrite, ConfigurationError
from sidelight.recorded.failures import evaluating
from sidelight.recorded.system import System, read_system
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.printable.numbers import figure
from sidelight.sidecar.options.fields import flag_of

RESULT, COMPLIANCE = "result.json", "compliance.json"
DOUBTFUL: Mapping[Kind, str] = {"ttft": "Times to first token", "gaps": "Gaps between chunks and TPOT"}
Ends = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedStudy:
    """Derived results of a study: `result.json`, in text too, and what the report is made of.

    `damage` is what is lost of its log and of its steps' records, `unwritten` why its files could not all be written.
    """

    result: StudyResult
    compliance: Compliance
    json: str
    findings: StudyFindings
    damage: str = ""
    unwritten: CannotWrite | None = None


def derive_study(path: Path, *, outside: bool = False, steps: Steps | None = None) -> DerivedStudy:
    """Write the derived files of a study into its directory, and return their contents. Files that cannot be written do
    not stop it: the error is returned.

    The steps of a comparison of recorded runs lie elsewhere, and are read only where that is meant. `steps` are those
    that were measured just now. Raises
    ConfigurationError where there is no study, or one that holds what no study writes.
    """
    study = open_study(path)
    asked = study.record.asked
    procedure, steps = procedure_named(asked.test), steps or Steps(path, outside=outside)
    with evaluating(path, STUDY, LOG):
        findings = procedure.findings(asked, study.finished, steps.read)
        facts = steps.facts_of(study.finished)
        study = replace(study, damage=_damage(study, steps.damage))
        end = decide(procedure, asked, study.finished)
        whole = isinstance(end, Done) and end.complete and not study.damage
        system = read_system(asked.system)
        compliance = comply(asked.test, asked, system, study.finished, findings, facts, whole=whole)
        result = study_result(study, procedure, findings, facts, compliance.system, steps.read)
        files = {RESULT: json_text(builtins(result)), COMPLIANCE: json_text(builtins(compliance))}
        files |= study_files(result, findings, compliance)
    derived = DerivedStudy(
        result=result, compliance=compliance, json=files[RESULT], findings=findings, damage=study.damage
    )
    try:
        write_texts(path, files)
    except CannotWrite as error:
        return replace(derived, unwritten=error)
    return derived


def _damage(study: Study, of_steps: Mapping[str, str]) -> str:
    """Return the losses in a study's log and in its steps' records, else ""."""
    lost = [f"recorded data of {run} are missing or damaged: {what}" for run, what in sorted(of_steps.items())]
    return "; ".join([study.damage] * bool(study.damage) + lost)


def procedure_named(name: str) -> Procedure:
    """Return a test by its name. Raises ConfigurationError for an unknown one."""
    if name not in PROCEDURES:
        raise ConfigurationError(
            "test.unknown", f"{name[:40]}: this version has no such test; it has {', '.join(PROCEDURES)}"
        )
    return PROCEDURES[name]


def study_result(
    study: Study,
    procedure: Procedure,
    findings: StudyFindings,
    facts: Mapping[str, StepFacts],
    system: System,
    read: Reader,
) -> StudyResult:
    """Return `result.json` of a study."""
    asked = study.record.asked
    decided = decide(procedure, asked, study.finished)
    if isinstance(decided, Done):
        status: Status = "complete" if decided.complete else "partial"
        reason = decided.reason
    else:
        status, reason = "interrupted", f"step {len(study.finished) + 1} ({decided.label}) has not ended"
    if status != "complete" and study.stopped is not None and study.stopped.reason:
        status, reason = study.stopped.status, study.stopped.reason
    if study.damage:
        status, reason = "partial", study.damage
    return StudyResult(
        study_id=study.record.study_id,
        test=asked.test,
        scale=asked.scale,
        status=status,
        reason=reason,
        sut=builtins(system),
        parameters=asked.parameters,
        seed=asked.seed,
        steps=_steps(study, facts),
        verdict=study_verdict(asked, study.finished, findings, read),
        answer=list(findings.answer),
        results=findings.results,
        evidence=list(findings.evidence),
        drift=_drift(study, procedure),
        cost=_cost(study),
        notes=[*findings.notes, *_step_notes(study)],
        passed=findings.passed if status == "complete" else None,
        reproduction=_reproduction(study, facts),
    )


def _steps(study: Study, facts: Mapping[str, StepFacts]) -> list[StepRecord]:
    return [
        StepRecord(
            number=each.number,
            run=each.run,
            offered=each.outcome.offered_per_s,
            realised=each.outcome.realised_per_s,
            completed=each.outcome.completed_per_s,
            stability=each.outcome.verdict,
            stability_reason=each.outcome.stability.reason if each.outcome.stability and each.outcome.verdict else "",
            requests=each.outcome.sent,
            requests_sha256=facts[each.run].requests_sha256 if each.run in facts else None,
            **{name: getattr(each.step, name) for name in ("kind", "load", "level", "share", "variant", "seed")},
            **{name: getattr(each.outcome, name) for name in ("limit", "void", "window", "ok", "blame", "doubts")},
        )
        for each in study.finished
    ]


def _step_notes(study: Study) -> Iterator[str]:
    """Yield the notes of single steps, and the void steps."""
    for each in study.finished:
        if each.outcome.void:
            yield f"Step {each.number} ({each.step.label}) counts for nothing: {each.outcome.void.rstrip('.')}."
    noted = [(each.number, note) for each in study.finished
             for note in (*study.begun[each.number].notes, *each.outcome.notes)]  # fmt: skip
    yield from (f"{_steps_named(numbers)}: {note}." for numbers, note in joined(noted))
    for kind, times in DOUBTFUL.items():
        doubted = {
            each.number: each.outcome.doubts[kind]
            for each in study.finished
            if kind in each.outcome.doubts and not each.outcome.void
        }
        if doubted:
            where = _steps_named(", ".join(map(str, doubted))).lower()
            first, doubt = next(iter(doubted.items()))
            yield (
                f"{times} are left out of {where}; the rest counts, as nothing that is decided here rests on them. "
                f"Step {first}: {doubt.rstrip('.')}."
            )


def _steps_named(numbers: str) -> str:
    return f"{'Steps' if ',' in numbers else 'Step'} {numbers}"


def _drift(study: Study, procedure: Procedure) -> Drift | None:
    """Return the drift between a step and its repetition at the end, or None. None where it was not measured again."""
    again = next(iter(of_kind(valid(study.finished), SENTINEL)), None)
    if again is None:
        return None
    first = repeated(procedure, study.finished)
    ratios: dict[str, ResultQuantity] = {}
    apart = []
    for name, before, after in _pairs(first, again) if first is not None else ():
        ratio = ResultQuantity(
            value=after[0] / before[0], unit="ratio", ci95=(after[1] / before[2], after[2] / before[1])
        )
        ratios[name] = msgspec.structs.replace(ratio, method="last over first, ends of both intervals apart")
        if after[1] > before[2] or after[2] < before[1]:
            apart.append(f"{name} went from {figure(before[0])} to {figure(after[0])}")
    if not ratios:
        return Drift(verdict="unknown", sentence="Whether the system drifted is not known: the steps show no interval.")
    if apart:
        return Drift(verdict="drifted", sentence=f"The system drifted: {', '.join(apart)}.", results=ratios)
    said = ", ".join(f"{name} {quantity.value:.3g} times" for name, quantity in ratios.items())
    step = f"Step {first.number} again" if first else "The first level again"
    return Drift(verdict="none", sentence=f"{step} at the end shows no drift: {said}.", results=ratios)


def _pairs(before: Finished, after: Finished) -> Iterator[tuple[str, Ends, Ends]]:
    """Yield metrics with intervals in both steps, each with both: estimate, low, high.

    Of saturated steps these are rates: the latencies of a closed loop follow from them.
    """
    first, again = before.outcome, after.outcome
    if after.step.load == "closed":
        rates = [(each.output_tokens_per_s, each.output_tokens_ci95) for each in (first, again)]
        served = [(value, *ends) for value, ends in rates if value and ends and ends[0] > 0]
        if len(served) == len(rates):
            yield "output_tokens_per_s", served[0], served[1]
        return
    for name in ("ttft_ms", "tpot_ms"):
        ends = [each.percentiles.get(name, {}).get("p50") for each in (first, again)]
        known = [
            (each.estimate, each.low, each.high)
            for each in ends
            if each is not None and each.estimate is not None and each.low and each.high is not None
        ]
        if len(known) == len(ends):
            yield f"{name.removesuffix('_ms')}_p50_ms", known[0], known[1]


def _cost(study: Study) -> Cost:
    outcomes = [each.outcome for each in study.finished]
    numbers = [each.number for each in study.finished if each.number in study.ended_ns]
    spans_ns = [(study.begun[number].at_ns, study.ended_ns[number]) for number in numbers]
    seconds = sum(max(0, end - begin) for begin, end in spans_ns) / 1e9
    whole = (max(end for _, end in spans_ns) - min(begin for begin, _ in spans_ns)) / 1e9 if spans_ns else 0.0
    return Cost(
        steps=len(outcomes),
        seconds=seconds,
        between_seconds=max(0.0, whole - seconds),
        load_seconds=sum(each.window.load_s for each in outcomes if each.window is not None),
        requests=sum(each.sent for each in outcomes),
        input_tokens=sum(each.input_tokens for each in outcomes),
        output_tokens=sum(each.output_tokens for each in outcomes),
    )


def _command(record: StudyRecord) -> list[str]:
    """Return the command that runs a study again. Of one of several, it is that of its test alone."""
    if record.command[1:3] != ["test", ALL]:
        return record.command
    options, asked = iter(record.command[3:]), record.asked
    given = []
    for word in options:
        if word == "--out":
            next(options, None)
        elif not word.startswith("--out="):
            given.append(word)
    numbers = {"seed": asked.seed, "capacity": asked.parameters.capacity}
    numbers["capacity_tokens"] = asked.parameters.capacity_tokens
    for name, value in numbers.items():
        if value is not None and flag_of(name) not in given:
            given += [flag_of(name), f"{value:.6g}" if isinstance(value, float) else str(value)]
    return [*record.command[:2], asked.test, *given]


def _workload(study: Study, facts: Mapping[str, StepFacts]) -> str:
    """Return the workload in words: of the first level, or of the first step. Empty where levels have different ones,
    such as the lengths of a long context.
    """
    steps = of_kind(study.finished, LEVEL) or study.finished
    known = [facts[each.run].about.get("workload") or {} for each in steps if each.run in facts]
    labels = [str(each.get("label") or "") for each in known]
    are_levels_alike = len(set(labels)) == 1 or not of_kind(study.finished, LEVEL)
    return labels[0] if labels and are_levels_alike else ""


def _reproduction(study: Study, facts: Mapping[str, StepFacts]) -> Reproduction:
    record = study.record
    about = next((facts[each.run].about for each in study.finished if each.run in facts), {})
    seen = next(iter(record.seen.values()), None)
    versions = {"sidelight": record.tool["version"], "python": str(record.host.get("python", ""))}
    begins = [study.begun[each.number].at_ns for each in study.finished]
    ends = list(study.ended_ns.values())
    return Reproduction(
        command=_command(record),
        versions=versions | ({"engine": seen.version} if seen and seen.version else {}),
        model=seen.model if seen else "",
        workload=_workload(study, facts) or str(record.asked.options.get("workload", "")),
        tokenizer=str((about.get("tokenizer") or {}).get("name") or ""),
        warm_up=str((about.get("warmup") or {}).get("sentence") or ""),
        options=record.asked.options,
        started_at=iso_ms(min(begins)) if begins else "",
        ended_at=iso_ms(max(ends)) if ends else "",
    )
