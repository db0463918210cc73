"""The course of a study: decide, set up, run, judge, write down. It goes on until there is no further step, or the user
stops it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sidelight.methodology.execution import between, record
from sidelight.methodology.execution.asking import Variant, with_values
from sidelight.methodology.execution.data import Steps, data_of, step_data
from sidelight.methodology.execution.plan import MOST_STEPS
from sidelight.methodology.execution.record import Status, StepStarted, Stopped, Study, append
from sidelight.methodology.study.model import Done, Finished, Outcome, Procedure, Step, StepData
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import decide, given_up
from sidelight.recorded.errors import CannotWrite, ConfigurationError, Interrupted, SidelightError
from sidelight.recorded.run import Run
from sidelight.recorded.system import as_text, read_system
from sidelight.rundir.clock import anchor
from sidelight.rundir.printable.numbers import figure
from sidelight.sidecar.options.checks import check_run
from sidelight.sidecar.options.load import AFTER, DRAFT, SHORT_WARM_UP, RunOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run import session

if TYPE_CHECKING:
    from sidelight.exporter.evaluation.evaluate import Evaluated
    from sidelight.sidecar.run.processes.nodes import Nodes

# How many times more of other requests a system may serve than it is known to.
OTHER_REQUESTS = 4.0
Measure = Callable[[RunOptions, list[str], Progress], StepData]


def measure(options: RunOptions, command: list[str], progress: Progress, nodes: Nodes | None = None) -> StepData:
    """Run a load, on these nodes if any; return the tables of the run, also of a broken-off one.

    Raises SidelightError where it could not begin, and where its files cannot be written.
    """

    def finish(measured: Run) -> tuple[StepData, Evaluated]:
        from sidelight.sidecar.report import derive  # noqa: PLC0415  what it imports would make the first request wait

        derived: Evaluated = derive.derive_run(measured)
        if derived.unwritten is not None:
            raise derived.unwritten
        return data_of(measured, derived.parts, derived.summary.self_check), derived

    try:
        run = session.run(
            options,
            command=command,
            progress=progress,
            finish=finish,
            linger_s=0.0,
            nodes=nodes,
        )
        return asyncio.run(run)
    except (CannotWrite, ConfigurationError, Interrupted):
        raise
    except SidelightError as error:
        if error.run_directory is None:
            raise
        progress.warn(str(error))
        return step_data(error.run_directory)


@contextmanager
def measuring(options: RunOptions, progress: Progress, known: Measure = measure) -> Iterator[Measure]:
    """Open the nodes of --ray, if any, while the context is open; yield what measures runs on them.

    A `known` one that has nodes is yielded as it is.
    """
    if known is not measure:
        yield known
        return
    with session.nodes_of(options, progress) as nodes:
        yield partial(measure, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """Shared settings of a study's steps: its test, the options of each configuration, and its observers."""

    procedure: Procedure
    options: Mapping[str, RunOptions]
    variants: Mapping[str, Variant]
    command: list[str]
    progress: Progress
    # Says what stands above the progress of a step's run, by the steps so far.
    shown: Callable[[list[Finished]], str] = lambda _: ""
    measure: Measure = measure
    ready_s: float = between.READY_S  # for which an engine that does not answer is waited for


def conduct(study: Study, how: Conduct) -> tuple[Stopped, SidelightError | None, Steps]:
    """Run the remaining steps of a study; return its end, its error, and these steps.

    The error is None unless one ended it.

    A first signal is an end like others; a second one is not waited for, and raises KeyboardInterrupt.
    """
    error: SidelightError | None = None
    finished, steps = list(study.finished), Steps(study.path)
    status: Status
    try:
        _settle(study, how.procedure)
        finished = list(record.open_study(study.path).finished)
        with measuring(next(iter(how.options.values())), how.progress, how.measure) as measured:
            status, reason = _to_the_end(study, replace(how, measure=measured), finished, steps)
    except SidelightError as stopping:
        error, status, reason = stopping, "partial", str(stopping)
        if isinstance(stopping, Interrupted):
            status, reason = "interrupted", "a signal stopped it"
    except KeyboardInterrupt:
        error, status, reason = Interrupted("interrupted.user", "interrupted"), "interrupted", "a signal stopped it"
    stopped = Stopped(at_ns=_now_ns(), status=status, reason=reason)
    with suppress(CannotWrite):  # a full disk is what stopped it
        append(study.path, stopped)
    return stopped, error, steps


def _to_the_end(study: Study, how: Conduct, finished: list[Finished], steps: Steps) -> tuple[Status, str]:
    warmed: dict[str, StepStarted] = {}  # by configuration, the step that warmed its engine up
    for each in finished:
        _note_warm(warmed, each, study.begun[each.number])
    last = None  # a study that goes on sets its configuration up again
    while not isinstance(decided := decide(how.procedure, study.record.asked, finished), Done):
        number = len(finished) + 1
        if number > MOST_STEPS:
            return "partial", f"it did not come to an end in {MOST_STEPS} steps"
        how.progress.study = how.shown(finished)
        append(study.path, record.Decided(at_ns=_now_ns(), number=number, step=decided))
        if decided.variant != last and decided.variant in how.variants:
            name, variant = decided.variant, how.variants[decided.variant]
            if variant.before:
                how.progress.stage(f"setting up {name}")
                between.set_up(name, variant, study.path / f"before-{number:04d}-{name}.log")
                warmed.pop(name, None)
        last = decided.variant
        begun, came = _step(study, how, decided, finished, warmed.get(decided.variant), steps)
        append(study.path, record.Judged(at_ns=_now_ns(), number=number, outcome=came))
        finished.append(Finished(number=number, run=begun.run, step=decided, outcome=came))
        _note_warm(warmed, finished[-1], begun)
        how.progress.stage(_line(finished[-1]))
    return "complete" if decided.complete else "partial", decided.reason


def _note_warm(warmed: dict[str, StepStarted], each: Finished, begun: StepStarted) -> None:
    """Record the step that warmed its configuration's engine up. Where the engine may have started again, the record is
    removed.
    """
    if each.outcome.void and each.outcome.engine_start_ns is None:
        warmed.pop(each.step.variant, None)
    elif each.step.warm_up != "none" and not (begun.warmed_by or each.outcome.void):
        warmed[each.step.variant] = begun


def _step(
    study: Study, how: Conduct, step: Step, finished: Sequence[Finished], warmed: StepStarted | None, steps: Steps
) -> tuple[StepStarted, Outcome]:
    """Run one step, and return its outcome. The engine was warmed up by `warmed`, unless it has started since.

    Raises Interrupted where the user stopped it, SidelightError.
    """
    number = len(finished) + 1
    common = how.options[step.variant]
    asyncio.run(between.ready(common, limit_s=how.ready_s))
    glance, busy = asyncio.run(between.drained(common))
    notes = [busy] if busy else []
    if step.reset_cache and (problem := asyncio.run(between.reset_cache(common))):
        notes.append(problem)
    if warmed is not None and warmed.engine_start_ns != glance.start_ns:
        warmed = None
    begun = StepStarted(
        at_ns=_now_ns(),
        number=number,
        run=record.run_name(number, step),
        warmed_by=warmed.run.rpartition("/")[2] if warmed else "",
        engine_start_ns=glance.start_ns,
        notes=tuple(notes),
    )
    options = step_options(common, step, study.path / begun.run, begun.warmed_by)
    capacity_per_s = study.record.asked.parameters.capacity or 0.0
    declared = as_text(read_system(study.record.asked.system).of(step.variant))
    prepared = options.requests or prepared_requests(step, finished, capacity_per_s)
    options = replace(options, requests=prepared, sut=declared)
    append(study.path, begun)
    data = how.measure(options, how.command, how.progress)
    steps.hold(begun.run, data)
    append(study.path, record.StepEnded(at_ns=_now_ns(), number=number, status=data.status))
    if data.status == "interrupted":
        raise Interrupted("interrupted.user", "interrupted")
    came = outcome(step, data, how.procedure.rests_on)
    if (came.failed or not came.sent) and (reason := asyncio.run(between.death(common, glance))):
        came = msgspec.structs.replace(came, void=reason)
    return begun, came


def step_options(common: RunOptions, step: Step, out: Path, warmed_by: str) -> RunOptions:
    """Return the options of a step's run: the study's, then the step's, then its level.

    Raises ConfigurationError naming the one that cannot be used.
    """
    options = with_values(common, step.options)
    usual: dict[str, int | str] = {"none": 0, "short": SHORT_WARM_UP, "draft": DRAFT}
    warm_up = usual[step.warm_up] if step.warm_up == "none" or "warmup" not in step.options else options.warmup
    if step.warm_up != "none" and warmed_by:
        warm_up = f"{AFTER}{warmed_by}"
    rate = options.rate if isinstance(options.rate, str) else step.level
    level = {"rate": rate} if step.load == "open" else {"concurrency": round(step.level)}
    return check_run(
        replace(
            options,
            **{"rate": None, "concurrency": None, **level},  # type: ignore[arg-type]
            duration=step.duration,
            requests=step.requests,
            seed=step.seed,
            warmup=warm_up,
            out=out,
        )
    )


def prepared_requests(step: Step, finished: Sequence[Finished], capacity_per_s: float = 0.0) -> int | None:
    """Return the number of requests that a closed loop can use up, None if unknown. Only a duration ends the loop.

    By steps of the same requests so far: half as many more as if throughput rose with the requests in flight. Without
    one, by what the system is known to serve of any requests: others may be shorter, or cached.
    """
    if step.load != "closed" or step.requests is not None or step.duration is None:
        return None
    same_per_s = max(
        (
            (each.outcome.completed_per_s or 0.0) * max(1.0, step.level / each.step.level)
            for each in finished
            if each.step.load == "closed" and each.step.options == step.options
        ),
        default=0.0,
    )
    most_per_s = 1.5 * same_per_s
    if not same_per_s:
        most_per_s = OTHER_REQUESTS * max(
            capacity_per_s, *(each.outcome.completed_per_s or 0.0 for each in finished), 0.0
        )
    return math.ceil(most_per_s * step.duration + 2 * step.level) if most_per_s else None


def _settle(study: Study, procedure: Procedure) -> None:
    """Finish the pending step of a study, and retry void ones. A step that had ended is judged; one that had not is set
    aside; those that were void twice are tried again.
    """
    append(study.path, *(record.Retried(at_ns=_now_ns(), number=each.number) for each in given_up(study.finished)))
    pending = study.pending
    begun = None if pending is None else study.begun.get(pending.number)
    if pending is None or begun is None:
        return
    path = record.step_directory(study.path, begun.run)
    if record.is_whole(path) and study.ended_ns.get(pending.number, 0) >= begun.at_ns:
        came = outcome(pending.step, step_data(path), procedure.rests_on)
        append(study.path, record.Judged(at_ns=_now_ns(), number=pending.number, outcome=came))
    else:
        record.set_aside(path)


def _line(finished: Finished) -> str:
    """Return the outcome of a step in a line."""
    step, came = finished.step, finished.outcome
    if came.void:
        return f"step {finished.number} {step.label}: counts for nothing: {came.void}"
    served = (
        f"{figure(came.completed_per_s)} requests/s served" if came.completed_per_s is not None else "nothing served"
    )
    verdict = f", {came.stability.verdict}" if came.stability is not None and came.stability.verdict else ""
    return f"step {finished.number} {step.label}: {served}{verdict}"


def _now_ns() -> int:
    return anchor().now_ns()
