"""`sidelight compare` of recorded data: runs, studies and directories of runs as the steps of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from sidelight.loadgen.plan.rates import pace_of
from sidelight.methodology.compliance.fair_comparison import refusals
from sidelight.methodology.execution import record
from sidelight.methodology.execution.data import step_data
from sidelight.methodology.execution.derive import derive_study, procedure_named
from sidelight.methodology.execution.verb import StudyEnd, asked_of, code_of
from sidelight.methodology.options import CompareOptions
from sidelight.methodology.procedures.compare import PAIR, RECORDED
from sidelight.methodology.study.model import Finished, Step, StepData
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import counting
from sidelight.methodology.study.saturation import SATURATE
from sidelight.recorded.directory import MANIFEST, RAW
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.failures import evaluating
from sidelight.rundir.printable.numbers import count_of
from sidelight.sidecar.options.fields import SYSTEMS, named_path


def compare_recorded(options: CompareOptions, command: list[str]) -> StudyEnd:
    """Compare recorded runs: write a study with them as its steps. Their directories stay as they are.

    Raises ConfigurationError for a path without runs, one that is named twice, and runs that must not be compared.
    """
    groups, procedure = _groups(options.runs), procedure_named("compare")
    asked, _ = asked_of(options, procedure)
    parameters = structs.replace(asked.parameters, pairs=RECORDED, load=None, duration=None)
    asked = structs.replace(asked, parameters=parameters, options={}, variants=tuple(groups), isolated=False)
    finished: list[Finished] = []
    read: list[StepData] = []
    for name, paths in groups.items():
        for path in paths:
            with evaluating(path, MANIFEST, RAW):
                data = step_data(path)
                step = _step(name, path, data)
                came = outcome(step, data, procedure.rests_on)
            finished.append(Finished(number=len(finished) + 1, run=str(path), step=step, outcome=came))
            read.append(data)
    reasons = refusals(finished, [data.about for data in read])
    reasons += [f"{each.step.label}: {each.outcome.void}" for each in finished if each.outcome.void]
    if reasons and not options.anyway:
        raise ConfigurationError(
            "compare.different",
            f"compare: {'; '.join(reasons)}; give --anyway to compare them all the same, which the checklist will say",
        )
    finished = [_counted(each) for each in finished]
    out = record.directory_of(options, "compare")
    new = record.new(replace(options, out=out), asked, command, seen={})
    study = record.create(out, new)
    for each, data in zip(finished, read, strict=True):
        record.append(
            study.path,
            record.Decided(at_ns=data.start_ns, number=each.number, step=each.step),
            record.StepStarted(at_ns=data.start_ns, number=each.number, run=each.run),
            record.StepEnded(at_ns=data.end_ns, number=each.number, status=data.status),
            record.Judged(at_ns=data.end_ns, number=each.number, outcome=each.outcome),
        )
    derived = derive_study(study.path, outside=True)
    return StudyEnd(code=code_of(derived, options, None), derived=derived, path=study.path, error=None)


def _groups(paths: tuple[Path, ...]) -> Mapping[str, list[Path]]:
    """Return the run directories of each system, by name. The name is that in NAME=DIRECTORY, else a letter."""
    if not 2 <= len(paths) <= len(SYSTEMS):
        raise ConfigurationError(
            "compare.systems", f"compare: {count_of(len(paths), 'system')}; give from 2 to {len(SYSTEMS)} directories"
        )
    groups: dict[str, list[Path]] = {}
    taken: dict[Path, Path] = {}
    for letter, given in zip(SYSTEMS, paths, strict=False):
        name, path = named_path(given, letter)
        if name in groups:
            raise ConfigurationError("compare.names", f"compare: two systems are named {name}; give each its own name")
        groups[name] = list(_runs(path))
        if not groups[name]:
            raise ConfigurationError(
                "run.none", f"{path}: no run directory here; give that of a run, of a study, or one of runs"
            )
        for run in groups[name]:
            if run in taken:
                raise ConfigurationError(
                    "compare.same-run", f"compare: {path} and {taken[run]} are the same; give different runs"
                )
            taken[run] = path
    return groups


def _runs(path: Path) -> Iterator[Path]:
    """Yield the run directories of a path; of a study, those of its steps that count."""
    path = path.resolve()
    if (path / record.STUDY).is_file():
        steps = counting(record.open_whole(path).finished)
        yield from (record.step_directory(path, each.run) for each in steps if each.step.kind != SATURATE)
    elif (path / MANIFEST).is_file():
        yield path
    elif path.is_dir():
        yield from sorted(each.parent for each in path.glob(f"*/{MANIFEST}"))


def _counted(finished: Finished) -> Finished:
    """Return a run that counts, whatever is wrong with it, which is noted."""
    came = finished.outcome
    if not came.void:
        return finished
    noted = structs.replace(
        came, void="", notes=(*came.notes, f"it counts by --anyway, although {came.void.rstrip('.')}")
    )
    return structs.replace(finished, outcome=noted)


def _step(name: str, path: Path, data: StepData) -> Step:
    config = data.about.get("config") or {}
    level = config.get("concurrency") if data.closed_loop else pace_of(config.get("rate")).per_s
    return Step(
        kind=PAIR,
        label=path.name,
        load="closed" if data.closed_loop else "open",
        level=float(level or 0.0),
        duration=config.get("duration"),
        requests=config.get("requests"),
        seed=int(config.get("seed") or 0),
        variant=name,
    )
