"""`sidelight test`: its resolved options; one study, or all of them in the order of their needs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as replaced

from sidelight.methodology.compare import LEAST_RUNS
from sidelight.methodology.compliance.statement import satisfies
from sidelight.methodology.execution import asking, between, record
from sidelight.methodology.execution.asking import common_options, options_of, targets, variants_of
from sidelight.methodology.execution.derive import DerivedStudy, derive_study, procedure_named
from sidelight.methodology.execution.plan import Plan, expected, in_all, plan_lines, served_at, speed_of, within
from sidelight.methodology.execution.record import Study
from sidelight.methodology.execution.runner import Conduct, Measure, conduct, measure, measuring
from sidelight.methodology.options import ALL, TESTS, StudyOptions
from sidelight.methodology.search import bracket
from sidelight.methodology.study.model import Finished, Parameters, Procedure, StudySettings
from sidelight.methodology.study.result import StudyResult
from sidelight.methodology.study.saturation import Capacity, capacity, capacity_shown, load_of, measured_capacity
from sidelight.recorded.errors import ConfigurationError, SidelightError, TargetNotMeasured
from sidelight.recorded.system import as_text
from sidelight.rundir.printable.numbers import count_of, figure, minutes
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.version import VERSION

MISSED = 1
LEAST_FOR_P99 = 100
USUAL = "throughput"  # the test whose workload a capacity is of that is given to all
# Names of the configurations that the tests of several compare.
TAKEN = {each.name: each.variants for each in map(procedure_named, TESTS) if each.variants}


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyEnd:
    """End of a study: the command's exit code, the derived results, the directory."""

    code: int
    derived: DerivedStudy
    path: Path
    error: SidelightError | None

    @property
    def result(self) -> StudyResult:
        return self.derived.result


def asked_of(
    options: StudyOptions, procedure: Procedure, speed: float | None = None
) -> tuple[StudySettings, list[str]]:
    """Return the resolved request for a test, and the cost of --budget. Raises ConfigurationError."""
    variants = variants_of(options)
    common = common_options(options, procedure)
    parameters = asking.parameters_of(options, procedure)
    if options.capacity_from is not None and (shown := _stated(options)) is not None:
        parameters = replaced(parameters, capacity=shown.per_s, capacity_tokens=shown.tokens_per_s)
    system = asking.system_of(options, variants, procedure)
    asked = StudySettings(
        test=procedure.name,
        scale=options.scale,
        parameters=parameters,
        seed=options.seed,
        options=asking.recorded_options(common),
        variants=tuple(variants),
        isolated=options.isolated or bool(system.isolated),
        system=json.loads(as_text(system)),
    )
    if options.budget is None:
        return asked, []
    return within(procedure, asked, common, options.budget, speed=speed)


def _stated(options: StudyOptions) -> Capacity | None:
    """Return the capacity given by option or by --from. Raises ConfigurationError."""
    if options.capacity_from is None:
        return Capacity(per_s=options.capacity, tokens_per_s=options.capacity_tokens) if options.capacity else None
    if options.capacity is not None:
        raise ConfigurationError(
            "option.contradictory", f"--from {options.capacity_from} and --capacity exclude each other; leave one out"
        )
    return capacity_of(options.capacity_from)


def capacity_of(path: Path) -> Capacity:
    """Return the system's capacity as a study shows it. Raises ConfigurationError where the study does not show it."""
    study = record.open_whole(path)
    stated = capacity_shown(study.record.asked, study.finished)
    if stated is None:
        raise ConfigurationError(
            "study.no-capacity",
            f"--from {path}: its {count_of(len(study.finished), 'step')} did not show the capacity; give --capacity",
        )
    return stated


def plan(options: StudyOptions, name: str) -> Iterator[str]:
    """Yield the lines of --plan. Of one test, they are its steps; of all tests, each one's total and the sum.

    Raises ConfigurationError, also where a test would refuse to begin.
    """
    if is_all := name == ALL:
        _require_taken(variants_of(options))
    stated, usual = _stated(options), procedure_named(USUAL)
    # Of a test without that number a capacity says how fast the system is.
    says_speed = is_all or "capacity" not in options_of(procedure_named(name))
    of_usual = common_options(options, usual)
    speed = speed_of(of_usual, stated.per_s) if stated is not None and says_speed else None
    shown = {options.workload or usual.workload: stated} if stated is not None else {}
    plans: list[Plan] = []
    for procedure in map(procedure_named, TESTS if is_all else (name,)):
        each = replace(options, capacity=None, capacity_tokens=None, capacity_from=None) if says_speed else options
        each = _of_all(each, procedure, shown) if is_all else each
        if is_all and (why := _left_out(procedure.name, each)):
            yield f"{procedure.name:16} {why}"
            continue
        asked, costs = asked_of(each, procedure, speed)
        yield from costs
        yield from () if is_all else _too_few(options, asked)
        plans.append(_planned(procedure, asked, common_options(each, procedure), speed))
        if isinstance(capable := capacity(asked, plans[-1].finished), Capacity):
            shown.setdefault(options.workload or procedure.workload, capable)
        yield from [f"{procedure.name:16} {in_all(plans[-1])}"] if is_all else plan_lines(plans[-1])
    if is_all:
        yield f"{ALL:16} {in_all(*plans)}"
    if stated is None:
        yield (
            f"These are for the simulated engine, which serves {served_at(1.0, of_usual).per_s():.2g} requests/s of "
            f"{of_usual.workload}; with --capacity or --from they are for yours."
        )


def _planned(procedure: Procedure, asked: StudySettings, common: RunOptions, speed: float | None = None) -> Plan:
    """Return the plan of a test. Raises ConfigurationError where it would refuse to begin, or has no such variant."""
    planned = expected(procedure, asked, common, speed=speed)
    if planned.end is not None and not planned.end.complete and not planned.steps:
        raise ConfigurationError("study.not-planned", f"{procedure.name}: {planned.end.reason}")
    if unknown := {each.step.variant for each in planned.steps} - set(asked.variants or ("",)):
        which = f"has no configuration {min(unknown)}" if any(unknown) else "measures a single configuration"
        raise ConfigurationError(
            "variant.not-taken", f"--variant {', '.join(asked.variants)}: the test {procedure.name} {which}"
        )
    return planned


def start(options: StudyOptions, procedure: Procedure, command: list[str], progress: Progress, path: Path) -> Study:
    """Begin a study after a look at the target. Raises SidelightError; nothing is written then."""
    asked, costs = asked_of(options, procedure)
    for cost in costs:
        progress.warn(cost)
    for doubt in _too_few(options, asked):
        progress.warn(doubt)
    configurations = targets(options, procedure)
    _planned(procedure, asked, next(iter(configurations.values())))
    seen = between.targets_seen(options, configurations, limit_s=0.0)
    longest = min((each.max_model_len for each in seen.values() if each.max_model_len), default=None)
    new = record.new(options, replaced(asked, max_model_len=longest), command, seen)
    return record.create(path, new)


def _too_few(options: StudyOptions, asked: StudySettings) -> Iterator[str]:
    """Yield warnings of numbers that are too small to answer the test's question."""
    if options.requests is not None and options.requests < LEAST_FOR_P99:
        yield f"--requests {options.requests}: too few for a P99, which is that of the slowest of them alone"
    pairs = asked.parameters.pairs
    if pairs is not None and 0 < pairs < LEAST_RUNS:
        yield f"--pairs {pairs}: too few for a verdict, which takes at least {LEAST_RUNS} runs of each configuration"


def test(
    options: StudyOptions,
    name: str,
    command: list[str],
    progress: Progress,
    *,
    measure: Measure = measure,  # noqa: PT028  no test of pytest's
) -> StudyEnd:
    """Run or resume one test, and derive its files. Raises SidelightError where it could not begin."""
    with ExitStack() as stack:
        if options.resume is not None:
            record.open_whole(options.resume)  # nothing is written where there is no study
            stack.enter_context(record.held(options.resume))
            study, options = resumed(options, name)
        else:
            study = start(options, procedure_named(name), command, progress, record.directory_of(options, name))
            stack.enter_context(record.held(study.path))
        return _conducted(study, options, command, progress, measure)


def _conducted(
    study: Study, options: StudyOptions, command: list[str], progress: Progress, measure: Measure
) -> StudyEnd:
    """Run the remaining steps of a study, and derive its files."""
    procedure = procedure_named(study.record.asked.test)
    each = targets(options, procedure)

    def shown(finished: list[Finished]) -> str:
        rest = expected(procedure, study.record.asked, next(iter(each.values())), finished)
        total = len(finished) + len(rest.steps)
        at = f"{procedure.name}: step {len(finished) + 1} of about {total}, about {minutes(rest.seconds)} left"
        return f"{at}{_bracket(finished)}"

    how = Conduct(
        procedure=procedure,
        options=each,
        variants=variants_of(options),
        command=command,
        progress=progress,
        shown=shown,
        measure=measure,
    )
    _, error, steps = conduct(study, how)
    derived = derive_study(study.path, steps=steps)
    code = code_of(derived, options, error)
    return StudyEnd(code=code, derived=derived, path=study.path, error=error)


def code_of(derived: DerivedStudy, options: StudyOptions, error: SidelightError | None) -> int:
    if error is not None:
        return error.exit_code
    result = derived.result
    if result.status != "complete" or (result.parameters.gate and result.passed is None):
        return TargetNotMeasured.exit_code
    complies = options.require is None or satisfies(derived.compliance, options.require)
    return MISSED if result.passed is False or not complies else 0


def _bracket(finished: Sequence[Finished]) -> str:
    """Return the loads between which the limit is, as far as the steps show it."""
    limit = measured_capacity(finished) or Capacity(per_s=0.0)
    verdicts = bracket([each for each in finished if each.step.load == "open"], limit)
    ends = ["?" if each is None else figure(load_of(each, limit)) for each in (verdicts.stable, verdicts.growing)]
    return f", limit between {' and '.join(ends)} requests/s" if ends != ["?", "?"] else ""


def resumed(options: StudyOptions, name: str) -> tuple[Study, StudyOptions]:
    """Return a resumed study and its options. Raises ConfigurationError naming the change."""
    path = options.resume or Path()
    study = record.open_whole(path)
    asked = study.record.asked
    if asked.test != name:
        raise ConfigurationError("study.another", f"--resume {path}: is a study of {asked.test}, not of {name}")
    began_by = study.record.tool["version"]
    if began_by != VERSION:
        raise ConfigurationError(
            "study.another", f"--resume {path}: was begun by version {began_by}, this is {VERSION}; begin a new study"
        )
    then = asking.from_record(study.record.options, options)
    asking.require_same(path, options, then)
    for variant, seen in between.targets_seen(
        then, targets(then, procedure_named(asked.test)), between.READY_S
    ).items():
        before = study.record.seen.get(variant, seen)
        compared = (("model", before.model, seen.model), ("engine version", before.version, seen.version))
        for what, was, now in compared:
            if was != now:
                raise ConfigurationError(
                    "study.changed", f"--resume {path}: the {what} was {was}, and is {now} now; begin a new study"
                )
    return study, then


def all_tests(options: StudyOptions, command: list[str], progress: Progress) -> Iterator[tuple[str, str, int]]:
    """Run every test, each into its own directory, after the tests that it needs.

    A capacity that one has shown is handed on to those of the same workload: in requests/s it says nothing of others.

    Yields what became of each, in words and as an exit code: its answer, why it was left out, or why it ended. None
    follows one that the user stopped, or whose target cannot be reached.
    """
    with ExitStack() as stack:
        root, begun = _all_begun(options, stack)
        measure = stack.enter_context(measuring(common_options(begun, procedure_named(USUAL)), progress))
        yield from _each_test(root, begun, command, progress, measure)


def _each_test(
    root: Path, options: StudyOptions, command: list[str], progress: Progress, measure: Measure
) -> Iterator[tuple[str, str, int]]:
    stated = _stated(options)
    shown = {options.workload or procedure_named(USUAL).workload: stated} if stated is not None else {}
    first = None if options.url else next(iter(variants_of(options).items()), None)
    is_first = False  # that configuration was the last to be set up
    for name in TESTS:
        procedure = procedure_named(name)
        each = replace(_of_all(options, procedure, shown), out=root / name, resume=None)
        if options.resume is not None and (root / name / record.STUDY).exists():
            each = replace(each, resume=root / name, out=None)
        if why := _left_out(name, each):
            yield name, why, 0
            continue
        progress.stage(f"{name}: {procedure.objective}")
        try:
            if first is not None and first[1].before and name not in TAKEN and not is_first:
                between.set_up(*first, root / f"before-{name}.log")
            is_first = name not in TAKEN
            ended = test(each, name, command, progress, measure=measure)
        except SidelightError as error:
            yield name, str(error), error.exit_code
            if not isinstance(error, ConfigurationError):
                return
            continue
        yield name, " ".join(ended.result.answer), ended.code
        if ended.error is not None:
            return
        with suppress(ConfigurationError):  # it does not show any
            shown.setdefault(options.workload or procedure.workload, capacity_of(ended.path))


def _all_begun(options: StudyOptions, stack: ExitStack) -> tuple[Path, StudyOptions]:
    """Return the directory of all tests, locked by `stack`, and their options. The options are those that they were
    begun with.

    Raises ConfigurationError where studies are there already, or options are not as they were.
    """
    if options.resume is not None:
        then = asking.from_record(record.read_all(options.resume), options)
        stack.enter_context(record.held(options.resume))
        asking.require_same(options.resume, options, then)
        return options.resume, then
    _require_taken(variants_of(options))
    root = record.directory_of(options, ALL)
    if any((root / name / record.STUDY).exists() for name in TESTS):
        raise ConfigurationError("out.in-use", f"--out {root}: holds studies; go on with them by --resume")
    record.make(root)
    stack.enter_context(record.held(root))
    record.write_all(root, as_recorded(options))
    return root, options


def _left_out(name: str, options: StudyOptions) -> str:
    if name == "guardrail" and len(options.variant) < 2:
        return "left out: it compares configurations; give them with --variant baseline=URL --variant input=URL ..."
    if name == "memory-pressure" and not options.isolated:
        return "left out: it drives the system out of memory; give --isolated where that may happen"
    return ""


def _require_taken(variants: Collection[str]) -> None:
    """Check that some test takes each configuration. Raises ConfigurationError."""
    if unplaced := [name for name in variants if not any(name in names for names in TAKEN.values())]:
        takers = "; ".join(f"{test} has {', '.join(names)}" for test, names in TAKEN.items())
        raise ConfigurationError(
            "variant.not-taken", f"--variant {', '.join(unplaced)}: no test takes one of that name; {takers}"
        )


def _of_all(options: StudyOptions, procedure: Procedure, shown: Mapping[str, Capacity]) -> StudyOptions:
    """Return the options of one of all tests. Options that it does not have are left out, since they are of others; the
    capacity is that shown for its workload.

    Of configurations it takes those of its names; a test of a single one without --url takes the first.
    """
    has, default = options_of(procedure), StudyOptions()
    dropped = {
        name: getattr(default, name)
        for name in Parameters.__struct_fields__
        if hasattr(default, name) and name not in has and name != "output_tokens"
    }
    variants = variants_of(options)
    names = TAKEN.get(procedure.name, ())
    if variants and not names and not options.url:
        options = asking.of_variant(options, next(iter(variants.values())))
    known = shown.get(options.workload or procedure.workload) if "capacity" in has else None
    taken = tuple(asking.as_declared(name, variant) for name, variant in variants.items() if name in names)
    values = dropped | {
        "capacity": known.per_s if known is not None else None,
        "capacity_tokens": known.tokens_per_s if known is not None else None,
        "capacity_from": None,
        "variant": taken,
    }
    return replace(options, **values)
