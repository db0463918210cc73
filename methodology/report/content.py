"""Content of a study's full report, section by section as in the draft; for a terminal and for a page."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase
from typing import Any

import msgspec

from sidelight.exporter.document import BLANK, Block, Heading, Line, Prose, Section
from sidelight.exporter.report.verdict import verdict_blocks
from sidelight.exporter.summary.result import DRAFT
from sidelight.methodology.compliance.requirements import Level
from sidelight.methodology.compliance.statement import Compliance
from sidelight.methodology.report.system import system_in_words, system_rows
from sidelight.methodology.report.tables import TAU, joined, number, requests_table, shown, steps_table
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings, table
from sidelight.methodology.study.model import Parameters
from sidelight.methodology.study.result import StepRecord, StudyResult
from sidelight.rundir.printable.numbers import count_of, duration, setting

LEVELS: Mapping[Level, str] = {"must": "MUST", "should": "SHOULD", "part": "no keyword"}
LONG_PAUSE_S = 60.0  # between steps, from which on the report says so
SENSITIVE = (
    "These figures say how much load exhausts the system. Treat them as sensitive where somebody could use that "
    "against a service."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyContent:
    """All that is reported, without controls."""

    result: StudyResult
    findings: StudyFindings
    compliance: Compliance


def heading(study: StudyContent) -> Heading:
    """Return the first lines: which study of what, when, and what it took."""
    result, origin = study.result, study.result.reproduction
    cost, version = result.cost, origin.versions.get("sidelight", "")
    system = system_in_words(study.compliance.system, origin)
    began = f"{origin.started_at[:10]} {origin.started_at[11:19]} UTC, " if origin.started_at else ""
    between = f" (and {duration(cost.between_seconds)} between them)" if cost.between_seconds >= LONG_PAUSE_S else ""
    took = f"{count_of(cost.steps, 'step')} in {duration(cost.seconds)}{between}, {count_of(cost.requests, 'request')}"
    lines = (
        f"{DRAFT}, test {result.test}, scale {result.scale}",
        f"{system['model']} on {system['software']}",
        f"{began}{took}, {cost.input_tokens:,} input and {cost.output_tokens:,} output tokens",
    )
    tool, status = f"sidelight {version}".rstrip(), "met" if result.status == "complete" else "alarm"
    title = Line(((tool, "strong"), (f"  study {result.study_id}  ", ""), (result.status, status)))
    return title, *map(Prose, lines)


def answer(study: StudyContent) -> Iterator[Block]:
    """Yield the summary of a study: the verdict, how sure it is, and whether the draft accepts it."""
    result = study.result
    if result.status != "complete":
        reason = result.reason if result.reason.endswith("?") else f"{result.reason.rstrip('.')}."
        rest = " What follows is of the steps that count." if any(not each.void for each in result.steps) else ""
        yield Prose(f"! The study is {result.status}: {reason}{rest}", "alarm")
    for sentence in study.compliance.contradictions:
        yield Prose(f"! {sentence[:1].upper()}{sentence[1:]}.", "warning")
    if result.drift and result.drift.verdict == "drifted":
        yield Prose(f"! {result.drift.sentence}", "warning")
    yield from verdict_blocks(result.verdict)
    yield from map(Prose, further(result))
    if result.passed is not None:
        holds = "The stated criteria hold." if result.passed else "A stated criterion does not hold."
        yield Prose(holds, "met" if result.passed else "alarm")
    elif result.parameters.gate:
        yield Prose("Whether the stated criteria hold was not decided, so that --gate fails.", "alarm")
    yield Prose(study.compliance.sentence, "strong")


def further(result: StudyResult) -> list[str]:
    """Return the answer without the verdict's headline."""
    return [sentence for sentence in result.answer if sentence != result.verdict.headline]


def sections(study: StudyContent) -> Iterator[Section]:
    """Yield the draft's six sections."""
    contents = {
        ("system", "System Identification"): _system,
        ("configuration", "Test Configuration"): _configuration,
        ("results", "Results"): _results,
        ("details", "Detailed Results"): _details,
        ("compliance", "Methodology Compliance"): _compliance,
        ("reproduction", "Reproduction Information"): _reproduction,
    }
    for place, ((name, title), content) in enumerate(contents.items(), 1):
        yield Section(name=name, title=f"{place}. {title}", content=tuple(content(study)))


def _system(study: StudyContent) -> Iterator[Block]:
    rows = list(system_rows(study.compliance.system))
    yield from _table("System under test", ("Fact", "Value", "Known from"), [row for row in rows if row[2]])
    missed = " ".join(f"{each.reason} {each.cure}" for level in LEVELS for each in study.compliance.failing(level))
    if names := ", ".join(name for name, _, source in rows if not source and name.replace(" ", "_") in missed):
        yield Prose(f"Neither declared nor seen, though requirements ask for them: {names}. Declare them for `--sut`.")


def _configuration(study: StudyContent) -> Iterator[Block]:
    result, origin = study.result, study.result.reproduction
    system = system_in_words(study.compliance.system, origin)
    facts = {
        "workload": origin.workload or "not known",
        "load": load_model(result.steps),
        "requests": f"{result.cost.requests:,}",
        "measured load": duration(result.cost.load_seconds),
        "warm-up": origin.warm_up.removeprefix("Warm-up: ") or "not known",
        "tokens counted by": origin.tokenizer or "not known",
        "seed": str(result.seed),
        "prefix caching": system["prefix_caching"],
        "guardrails": system["guardrails"],
    }
    yield from _facts("Test", facts)
    stated = msgspec.to_builtins(result.parameters)
    rows = [(name, _in_words(value), *_parameter(name)) for name, value in stated.items()]
    yield from _table("Parameters", ("Parameter", "Value", "Unit", "Meaning"), rows)
    options = {name: value for name, value in origin.options.items() if value not in (None, "", [], {}, False)}
    yield from _facts("Options of every step", {name: setting(name, value) for name, value in options.items()})


@cache
def _parameters() -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.schema(Parameters)["$defs"]["Parameters"]["properties"]
    return fields


def _parameter(name: str) -> tuple[str, str]:
    field = _parameters()[name]
    unit = field.get("unit", "")
    return ("" if unit == "1" else unit), field.get("description", "")


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return number(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else setting("", value)


def _results(study: StudyContent) -> Iterator[Block]:
    """Yield the tables of the test, how many requests succeeded, and whether the system drifted."""
    for each in study.findings.tables:
        yield from shown(each)
    yield Prose("A dash stands for what was not measured or cannot be said.", "note")
    counting = [step for step in study.result.steps if not step.void]
    sent, ok = sum(step.requests for step in counting), sum(step.ok for step in counting)
    void = len(study.result.steps) - len(counting)
    left_out = f"; {count_of(void, 'void step')} left out" if void else ""
    among = f"{ok:,} of {count_of(sent, 'request')} ({100 * ok / sent:.4g} %) in " if sent else "no request counts in "
    success = f"{among}{count_of(len(counting), 'step')}" if counting else "no step counts"
    yield Prose(f"Success: {success}{left_out}.")
    drift = study.result.drift
    yield Prose(f"Drift: {drift.sentence if drift else 'not measured, since no level was repeated at the end.'}")


def _details(study: StudyContent) -> Iterator[Block]:
    yield from _quantities(study)
    yield BLANK
    yield from shown(steps_table(study.result.steps))
    verdicts = ((each.number, f"{each.stability}: {each.stability_reason}") for each in study.result.steps
                if each.stability_reason)  # fmt: skip
    yield from _table("Whether requests piled up", ("Steps", "Load was, and why"), joined(verdicts))
    blames = joined((step.number, step.blame) for step in study.result.steps if step.blame)
    yield from _table("What made the slowest requests of a step slow", ("Steps", "Reason"), blames)
    claims = ["", *(each.claim for each in study.result.evidence)]
    evidence = [
        (each.claim if each.claim != before else "", each.quantity, each.value, each.run)
        for before, each in zip(claims, study.result.evidence, strict=False)
    ]
    yield from _table("Evidence", ("Statement", "Rests on", "Value", "Step"), evidence)


def _quantities(study: StudyContent) -> Iterator[Block]:
    """Yield every result with its interval, how these were computed, and why results are missing."""
    results = study.result.results
    methods = list(dict.fromkeys(quantity.method for quantity in results.values() if quantity.method))
    letters = dict(zip(methods, ascii_lowercase, strict=False))
    rows = [
        (name, each.shown, each.unit, _interval(each), each.n, each.tau, letters.get(each.method, ""))
        for name, each in results.items()
        if each.value is not None
    ]
    names = ("Result", "Value", "Unit", "95 % interval", "Values", "tau", "How")
    yield from _table("Every result", names, rows, "results")
    if any(row[5] for row in rows):
        yield Prose(TAU, "note")
    yield from (Prose(f"{letter}: {method}", "note") for method, letter in letters.items())
    few = [
        (name, each.sample, each.ends[0], each.unit, each.missing)
        for name, each in results.items()
        if each.value is None and each.sample is not None
    ]
    heads = ("Result", "In the sample", "At least", "Unit", "Why no more is known")
    yield BLANK
    yield from _table("Percentiles of too few values", heads, few)
    missing: dict[str, list[str]] = {}
    for name, each in results.items():
        if each.value is None and each.sample is None:
            missing.setdefault(each.missing or "no reason is known", []).append(name)
    yield from (Prose(f"Missing: {', '.join(names)} ({reason}).") for reason, names in missing.items())


def _interval(quantity: ResultQuantity) -> str:
    """Return an interval in words; empty of a result that has none."""
    if quantity.ci95 is None:
        return ""
    low, high = (None if end is None else number(end) for end in quantity.ci95)
    if low is None:
        return f"{high} or less" if high else "-"
    return f"{low} to {high}" if high else f"{low} or more"


def _compliance(study: StudyContent) -> Iterator[Block]:
    """Yield the verdict, the unmet requirements with their cures, and the met ones. How the draft was read comes
    last.
    """
    compliance = study.compliance
    yield Prose(compliance.sentence)
    yield BLANK
    unmet = [each for level in LEVELS for each in compliance.failing(level)]
    rows = [(LEVELS[each.level], each.id, each.reason, each.cure) for each in unmet]
    yield from _table("Not met", ("Level", "Requirement", "Why", "What to do"), rows)
    yield Prose(_counts(compliance))
    labels = {"met": "Met", "declared": "Met by declaration", "not judged": "Not judged"}
    for state, label in (labels | {"not applicable": "Not applicable"}).items():
        names = [each.id for each in compliance.requirements if each.state == state]
        if names:
            yield Prose(f"{label} ({len(names)}): {', '.join(names)}.")
    yield Prose("compliance.json has the evidence of each requirement.")
    yield BLANK
    yield Prose("Deviations from the draft, and how it was read where it is open", "strong")
    yield from (Prose(f"- {note}") for note in study.result.notes or ["None."])


def _counts(compliance: Compliance) -> str:
    """Return the number of requirements by state and by level: sums that add up."""
    every = compliance.requirements
    states = Counter(each.state for each in every)
    levels = Counter(each.level for each in every if each.state != "not applicable")
    judged = f"{states['not judged']} not judged, " if states["not judged"] else ""
    return (
        f"{len(every)} requirements: {states['met']} met, {states['declared']} met by declaration, "
        f"{states['not met']} not met, {judged}{states['not applicable']} not applicable. "
        f"The {levels.total()} that apply: {levels['must']} MUSTs, {levels['should']} SHOULDs, {levels['part']} that "
        "the draft states without a keyword."
    )


def _reproduction(study: StudyContent) -> Iterator[Block]:
    result, origin = study.result, study.result.reproduction
    command = shlex.join(origin.command) or f"sidelight test {result.test} --scale {result.scale} --seed {result.seed}"
    facts = {"run it again": command, "derive this report again": "sidelight report DIRECTORY", **origin.versions}
    yield from _facts("Commands and versions", facts)
    yield from shown(requests_table(result.steps))
    yield Prose(SENSITIVE)


def _facts(title: str, facts: Mapping[str, str]) -> Iterator[Block]:
    rows = [(name.replace("_", " "), value) for name, value in facts.items()]
    yield from _table(title, ("Fact", "Value"), rows)


def _table(title: str, names: Iterable[str], rows: Iterable[tuple[Any, ...]], file: str = "-") -> Iterator[Block]:
    """Yield a table for people, with a reference to `file` for all rows; nothing without rows."""
    if listed := tuple(rows):
        yield from shown(table(file, title, {name: name for name in names}, listed))


def load_model(steps: Sequence[StepRecord]) -> str:
    """Return the load of the steps that count, in the words of the draft."""
    counting = [step for step in steps if not step.void]
    words = []
    for load, what in (("closed", "closed-loop concurrency {}"), ("open", "open-loop {} requests/s")):
        levels = sorted({step.level for step in counting if step.load == load})
        if levels:
            ends = dict.fromkeys(number(level, None) for level in (levels[0], levels[-1]))
            words.append(what.format(" to ".join(ends)))
    return " and ".join(words) or "not known (no step counts)"
