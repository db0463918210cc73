"""What a study does when something goes wrong between and within its steps: runs are recorded ones, the server is real.

The steps take no time: each is a copy of a recorded run. Of one, gaps between chunks cannot be trusted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import processes
import pytest
from golden_files import GOLDEN
from tiny_study import TINY

from sidelight.methodology.execution.asking import Variant
from sidelight.methodology.execution.data import step_data
from sidelight.methodology.execution.derive import DerivedStudy, derive_study
from sidelight.methodology.execution.record import Stopped, Study, StudyRecord, create, open_study
from sidelight.methodology.execution.runner import Conduct, conduct, prepared_requests
from sidelight.methodology.execution.verb import capacity_of, resumed
from sidelight.methodology.options import StudyOptions
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.model import (
    Done,
    Finished,
    Outcome,
    Parameters,
    Procedure,
    Step,
    StepData,
    StudySettings,
)
from sidelight.recorded.errors import (
    CannotWrite,
    ConfigurationError,
    SidelightError,
    TargetNotMeasured,
    TargetUnreachable,
)
from sidelight.sidecar.cli.app import main
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import Progress

SOUND, DOUBTFUL_GAPS = "two_engines", "vllm_plain"
Measure = Callable[[RunOptions, list[str], Progress], StepData]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that lists a model, has a metrics page without an engine, and no way to empty a cache."""
    with processes.serving(processes.Script()) as url:
        yield f"{url}/plain/1"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny test be one of the draft's."""
    monkeypatch.setitem(PROCEDURES, TINY.name, TINY)


def begun(
    path: Path,
    *,
    capacity: float | None = 4.0,
    variants: tuple[str, ...] = (),
    system: Mapping[str, object] = MappingProxyType({}),
) -> Study:
    parameters = Parameters(duration=1.0, levels=(0.5, 0.8), capacity=capacity)
    asked = StudySettings(
        test="tiny", scale="short", parameters=parameters, seed=1, variants=variants, system=dict(system)
    )
    record = StudyRecord(
        study_id="20261122-120000-000000",
        tool={"name": "sidelight", "version": "0.1.0"},
        command=["sidelight", "test", "tiny"],
        started_at="2026-11-22T12:00:00.000Z",
        asked=asked,
        options={},
        seen={},
        host={},
    )
    return create(path, record)


def copying(*runs: str) -> Measure:
    """Give copies of these recorded runs in turn, the last one for ever."""
    left = list(runs)

    def measure(options: RunOptions, *_: object) -> StepData:
        assert options.out is not None
        shutil.copytree(GOLDEN / (left.pop(0) if len(left) > 1 else left[0]), options.out)
        return step_data(options.out)

    return measure


def starved(options: RunOptions, *rest: object) -> StepData:
    """Give a copy of a recorded run whose requests left in bunches."""
    return replace(copying(SOUND)(options, *rest), doubts={"load": "Requests left up to 900 ms late (p99)."})


def raising(error: BaseException) -> Measure:
    def measure(*_: object) -> StepData:
        raise error

    return measure


def then(first: Measure, second: Measure) -> Measure:
    """Measure the first step by one and the others by another."""
    calls = [first, second]

    def measure(options: RunOptions, command: list[str], progress: Progress) -> StepData:
        return calls.pop(0)(options, command, progress) if len(calls) > 1 else calls[0](options, command, progress)

    return measure


def led(
    study: Study,
    url: str,
    measure: Measure,
    *,
    variants: Mapping[str, Variant] | None = None,
    procedure: Procedure = TINY,
) -> tuple[Stopped, SidelightError | None, DerivedStudy]:
    """Conduct a study to its end, and derive it."""
    common = RunOptions(url=(url,), metrics=(), scrape_interval=0.01)
    options = dict.fromkeys(variants or {"": Variant()}, common)
    how = Conduct(
        procedure=procedure,
        options=options,
        variants=variants or {},
        command=[],
        progress=Progress("quiet"),
        measure=measure,
        ready_s=0.0,
    )
    stopped, error, steps = conduct(study, how)
    derived = derive_study(study.path)
    if not derived.damage:
        assert derived.json == derive_study(study.path, steps=steps).json
    return stopped, error, derived


def test_a_void_step_is_repeated_once_and_counts_for_nothing(tmp_path: Path, url: str):
    """The step that a starved load generator spoilt stands in the result, with the reason; the next takes its place."""
    _, error, derived = led(begun(tmp_path / "study"), url, then(starved, copying(SOUND)))
    assert error is None
    assert "complete" == derived.result.status
    assert [True, False, False] == [bool(step.void) for step in derived.result.steps]
    assert "cannot be trusted" in derived.result.steps[0].void
    assert any("Step 1 (open-0.50) counts for nothing" in note for note in derived.result.notes)
    assert derived.result.steps[0].seed == derived.result.steps[1].seed
    assert "steps/0002-open-0.50-again" == derived.result.steps[1].run
    assert all(step.requests_sha256 for step in derived.result.steps)


def test_doubtful_gaps_void_only_a_test_that_rests_on_them(tmp_path: Path, url: str):
    """Else the step counts without them, and the report says so once."""
    _, _, derived = led(begun(tmp_path / "study"), url, copying(DOUBTFUL_GAPS))
    assert "complete" == derived.result.status
    assert [("", ["gaps"])] * 2 == [(step.void, list(step.doubts)) for step in derived.result.steps]
    notes = [note for note in derived.result.notes if "left out of step" in note]
    assert 1 == len(notes)
    assert notes[0].startswith("Gaps between chunks and TPOT are left out of steps 1, 2; the rest counts")
    strict = replace(TINY, rests_on=("gaps",))
    _, _, derived = led(begun(tmp_path / "other"), url, copying(DOUBTFUL_GAPS), procedure=strict)
    assert all("Gaps between chunks may be wrong by up to" in step.void for step in derived.result.steps)


def test_a_step_that_is_void_twice_ends_the_study(tmp_path: Path, url: str):
    """What there is, is reported."""
    stopped, _, derived = led(begun(tmp_path / "study"), url, starved)
    assert ("partial", "partial") == (stopped.status, derived.result.status)
    assert derived.result.reason.startswith("step 2 (open-0.50) was void twice: ")
    assert (tmp_path / "study" / "report.txt").exists()


def test_a_step_that_was_void_twice_is_measured_once_more_when_the_study_goes_on(tmp_path: Path, url: str):
    """What spoilt it may be gone by now; the void runs stay where they are, and are said."""
    led(begun(tmp_path / "study"), url, starved)
    _, error, derived = led(open_study(tmp_path / "study"), url, copying(SOUND))
    assert error is None
    assert "complete" == derived.result.status
    assert [True, True, False, False] == [bool(step.void) for step in derived.result.steps]
    _, _, again = led(open_study(tmp_path / "study"), url, raising(AssertionError()))
    assert again.result == derived.result


def test_a_study_that_was_interrupted_is_reported_and_resumed(tmp_path: Path, url: str):
    """Ctrl-C in the second step: the first stands, and is not measured again."""
    stopped, error, derived = led(begun(tmp_path / "study"), url, then(copying(SOUND), raising(KeyboardInterrupt())))
    assert ("interrupted", "interrupted") == (stopped.status, derived.result.status)
    assert error is not None
    assert 130 == error.exit_code
    assert 1 == len(derived.result.steps)
    _, error, derived = led(open_study(tmp_path / "study"), url, copying(SOUND))
    assert error is None
    assert "complete" == derived.result.status
    assert ["steps/0001-open-0.50", "steps/0002-open-0.80"] == [step.run for step in derived.result.steps]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (CannotWrite("disk.unwritable", "steps.log: No space left on device"), 3),
        (TargetUnreachable("target.unreachable", "cannot connect to h: refused"), 3),
    ],
)
def test_an_error_ends_a_study_with_a_partial_report(tmp_path: Path, url: str, failure: SidelightError, code: int):
    """A full disk, an engine that is gone: what was measured before is reported, with the reason."""
    stopped, error, derived = led(begun(tmp_path / "study"), url, then(copying(SOUND), raising(failure)))
    assert error is failure
    assert code == error.exit_code
    assert ("partial", str(failure)) == (stopped.status, derived.result.reason)
    assert 1 == len(derived.result.steps)


def test_an_engine_that_does_not_answer_any_more_ends_a_study(tmp_path: Path, url: str):
    """It was waited for; nothing is recorded of a step that could not begin."""
    study = begun(tmp_path / "study")
    led(study, url, then(copying(SOUND), raising(KeyboardInterrupt())))
    _, error, derived = led(open_study(study.path), "http://127.0.0.1:9", copying(SOUND))
    assert isinstance(error, TargetUnreachable)
    assert "partial" == derived.result.status
    assert 1 == len(derived.result.steps)


def by_variant(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Measure each configuration once, and empty its cache before."""
    if len(finished) == len(asked.variants):
        return Done(reason="each was measured")
    name = asked.variants[len(finished)]
    return Step(kind="level", label=name, load="open", level=1.0, duration=1.0, seed=1, variant=name, reset_cache=True)


def test_each_configuration_is_set_up_before_its_steps(tmp_path: Path, url: str):
    """Its command runs, its output stays; a cache that cannot be emptied is said."""
    variants = {name: Variant(before=f"echo setting up {name}") for name in ("off", "on")}
    study = begun(tmp_path / "study", variants=("off", "on"))
    procedure = replace(TINY, next_step=by_variant)
    led(study, url, copying(SOUND), variants=variants, procedure=procedure)
    shown = {path.name: path.read_text() for path in study.path.glob("before-*.log")}
    assert {"before-0001-off.log": "setting up off\n", "before-0002-on.log": "setting up on\n"} == shown
    again = open_study(study.path)
    assert ["", ""] == [again.begun[number].warmed_by for number in (1, 2)]
    assert again.begun[1].notes[0].startswith("the prefix cache could not be emptied (/reset_prefix_cache: ")


def test_each_step_records_what_is_declared_of_its_configuration(tmp_path: Path, url: str):
    """So that the statement of its own run rests on it, too."""
    declared: list[str | None] = []

    def measure(options: RunOptions, command: list[str], progress: Progress) -> StepData:
        declared.append(options.sut)
        return copying(SOUND)(options, command, progress)

    system = {"boundary": "model engine", "variants": {"on": {"prefix_caching": True}}}
    study = begun(tmp_path / "study", variants=("off", "on"), system=system)
    variants = {name: Variant() for name in ("off", "on")}
    led(study, url, measure, variants=variants, procedure=replace(TINY, next_step=by_variant))
    assert ['{"boundary":"model engine"}', '{"boundary":"model engine","prefix_caching":true}'] == declared


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        (Variant(before="echo no such image; exit 7"), "ended with 7: no such image; its output is in"),
        (Variant(before="sleep 100", before_timeout=0.2), "not done after 0.2 s; raise before-timeout"),
        (Variant(before=("no-such-command-here",)), "before: no-such-command-here: No such file or directory"),
    ],
)
def test_a_command_that_fails_or_hangs_ends_a_study(tmp_path: Path, url: str, variant: Variant, said: str):
    """In one line, and what it started is ended with it."""
    study = begun(tmp_path / "study", variants=("off",))
    procedure = replace(TINY, next_step=by_variant)
    _, error, derived = led(study, url, copying(SOUND), variants={"off": variant}, procedure=procedure)
    assert isinstance(error, TargetNotMeasured)
    assert said in str(error)
    assert "\n" not in str(error)
    assert [] == derived.result.steps


def closed(concurrency: int, options: Mapping[str, object] = MappingProxyType({})) -> Step:
    label = f"closed-{concurrency}"
    return Step(
        kind="saturate", label=label, load="closed", level=concurrency, duration=20.0, seed=1, options=dict(options)
    )


def test_as_many_requests_are_prepared_as_the_system_may_serve():
    """By steps of the same requests, else by what it is known to serve of others; unknown, by the run itself."""
    assert prepared_requests(closed(64), ()) is None
    assert 4 * 2.5 * 20 + 2 * 64 == prepared_requests(closed(64), (), 2.5)
    warm = Outcome(status="complete", completed_per_s=5.0)
    done = [Finished(number=1, run="steps/0001-closed-64", step=closed(64), outcome=warm)]
    assert 1.5 * 5 * 20 + 2 * 64 == prepared_requests(closed(64), done, 2.5)
    assert 1.5 * 10 * 20 + 2 * 128 == prepared_requests(closed(128), done, 2.5)
    assert 4 * 5 * 20 + 2 * 64 == prepared_requests(closed(64, {"extra_body": "{}"}), done, 2.5)


def test_a_void_step_is_never_a_capacity(tmp_path: Path, url: str):
    """Nor is it handed on to another test."""
    study = begun(tmp_path / "study", capacity=None)
    led(study, url, starved)
    with pytest.raises(ConfigurationError, match="its 2 steps did not show the capacity; give --capacity"):
        capacity_of(study.path)


def test_a_step_whose_records_were_damaged_later_is_said(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]):
    """Its verdict stands in the log of steps, but the tables are read from what is left: the result is not whole."""
    led(begun(tmp_path / "study"), url, copying(SOUND))
    (tmp_path / "study" / "steps" / "0002-open-0.80" / "raw" / "requests-0.log").write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "study")])
    said = capsys.readouterr()
    lost = "recorded data of steps/0002-open-0.80 are missing or damaged: "
    assert 3 == ended.value.code
    assert (1, True) == (said.err.count("\n"), lost in said.err)
    result = json.loads((tmp_path / "study" / "result.json").read_text())
    assert ("partial", True) == (result["status"], result["reason"].startswith(lost))


def test_a_step_whose_records_are_damaged_when_it_ends_is_void(tmp_path: Path, url: str):
    """As on a disk that fails: it is measured once more, and the result is whole."""

    def damaged(options: RunOptions, *rest: object) -> StepData:
        copying(SOUND)(options, *rest)
        assert options.out is not None
        log = options.out / "raw" / "requests-0.log"
        os.truncate(log, log.stat().st_size - 1)
        return step_data(options.out)

    _, _, derived = led(begun(tmp_path / "study"), url, then(damaged, copying(SOUND)))
    assert ("complete", "") == (derived.result.status, derived.damage)
    assert [True, False, False] == [bool(step.void) for step in derived.result.steps]
    assert "recorded data of its run are missing or damaged: " in derived.result.steps[0].void


def test_nothing_rests_on_a_study_some_of_whose_steps_are_lost(tmp_path: Path, url: str):
    """Neither another study, nor its own going on; what is left is reported."""
    _, _, derived = led(begun(tmp_path / "study"), url, copying(SOUND))
    log = tmp_path / "study" / "steps.log"
    with log.open("r+b") as file:
        file.seek(-100, os.SEEK_END)  # the last record
        file.write(b"\0")
    for read in (capacity_of, lambda path: resumed(StudyOptions(resume=path), "tiny")):
        with pytest.raises(ConfigurationError, match=r"steps\.log is damaged: it lost 1 record; restore"):
            read(tmp_path / "study")
    assert ("", "partial") == (derived.damage, derive_study(tmp_path / "study").result.status)
