"""The directory of a study, read back: whole, cut short, damaged, and of somebody else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from codes import raises
from golden_files import GOLDEN
from tiny_study import TINY

from sidelight.methodology.execution.derive import derive_study
from sidelight.methodology.execution.record import (
    LOG,
    Decided,
    Frame,
    Judged,
    StepEnded,
    StepStarted,
    Stopped,
    Study,
    StudyRecord,
    append,
    create,
    held,
    is_whole,
    open_study,
    open_whole,
    set_aside,
)
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.model import Outcome, Parameters, Step, StudySettings
from sidelight.recorded.errors import ConfigurationError
from sidelight.sidecar.cli.app import main

STEP = Step(kind="level", label="open-1", load="open", level=1.0, duration=1.0, seed=1)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A study that has begun."""
    record = StudyRecord(
        study_id="20261122-120000-000000",
        tool={"name": "sidelight", "version": "0.1.0"},
        command=[],
        started_at="2026-11-22T12:00:00.000Z",
        asked=StudySettings(test="tiny", scale="short", parameters=Parameters(), seed=1),
        options={},
        seen={},
        host={},
    )
    return create(tmp_path / "study", record)


def frames(number: int, *, run: str = "steps/0001-open-1") -> list[Frame]:
    """Return what is written of a step."""
    return [
        Decided(at_ns=1, number=number, step=STEP),
        StepStarted(at_ns=2, number=number, run=run),
        StepEnded(at_ns=3, number=number, status="complete"),
        Judged(at_ns=4, number=number, outcome=Outcome(status="complete", sent=3)),
    ]


@pytest.mark.parametrize("written", range(6))
def test_a_step_counts_from_its_verdict_on(study: Study, written: int):
    """Killed anywhere before that, it is pending."""
    whole: list[Frame] = [*frames(1), Stopped(at_ns=5, status="complete", reason="done")]
    if written:
        append(study.path, *whole[:written])
    again = open_study(study.path)
    assert study.record == again.record
    assert (written >= 4) == bool(again.finished)
    assert (0 < written < 4) == (again.pending is not None)
    assert (written == 5) == (again.stopped is not None)


def test_a_torn_frame_is_passed_over_and_the_log_goes_on(study: Study):
    """As after kill -9 or on a full disk."""
    append(study.path, *frames(1))
    log = study.path / LOG
    log.write_bytes(log.read_bytes() + b"\xf5SLr\x09\0\0\0\xff")
    append(study.path, *frames(2, run="steps/0002-open-1"))
    assert [1, 2] == [each.number for each in open_study(study.path).finished]


def test_a_damaged_log_is_refused(study: Study):
    """Decisions would differ without a verdict in the middle."""
    append(study.path, *frames(2, run="steps/0002-open-1"))
    with raises("study.damaged"):
        open_study(study.path)


def test_a_run_that_the_log_does_not_name_is_damage(study: Study):
    """A run is begun once the log says so: where it does not, records are lost. Runs that were set aside are none."""
    append(study.path, *frames(1))
    for name in ("0001-open-1", "0002-open-1.torn", "0002-open-1"):
        assert "" == open_study(study.path).damage
        run = study.path / "steps" / name
        run.mkdir()
        (run / "manifest.json").touch()
    assert open_study(study.path).damage.startswith("steps.log is damaged: it does not name steps/0002-open-1; restore")
    (study.path / LOG).unlink()
    with raises("study.damaged", says="0001-open-1"):
        open_whole(study.path)


def test_what_is_not_a_step_is_not_moved(study: Study):
    """A directory from elsewhere may name another place."""
    other = study.path.parent / "other"
    other.mkdir()
    with raises("study.step"):
        set_aside(study.path / "steps" / ".." / ".." / "other")
    assert other.is_dir()


def test_a_step_that_was_cut_short_is_set_aside(study: Study):
    """Under another name each time; one whose manifest says that it ended is whole."""
    run = study.path / "steps" / "0001-open-1"
    for name in ("0001-open-1.torn", "0001-open-1.torn-2"):
        run.mkdir()
        assert not is_whole(run)
        aside = set_aside(run)
        assert aside is not None
        assert name == aside.name
    assert set_aside(run) is None
    (run / "raw").mkdir(parents=True)
    (run / "manifest.json").write_text('{"status": "complete"}')
    assert is_whole(run)


HOLDER = """
import sys
from pathlib import Path
from sidelight.methodology.execution.record import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_goes_on_with_a_study(study: Study, capsys: pytest.CaptureFixture[str]):
    """A second one is refused by its name; neither that nor a report moves a step. A death lets the next one go on."""
    append(study.path, *frames(1)[:2])
    run = study.path / "steps" / "0001-open-1"
    run.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, study.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert "held\n" == holder.stdout.readline()
    written = (study.path / LOG).read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["test", "ttft", "--resume", str(study.path)])
    assert 2 == ended.value.code
    assert f"{study.path}: is not free, process {holder.pid} holds it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(study.path)])
    assert [run] == list(run.parent.iterdir())
    assert written == (study.path / LOG).read_bytes()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with held(study.path), pytest.raises(ConfigurationError, match=f"process {os.getpid()} holds"), held(study.path):
        pass


def test_a_report_of_a_study_that_goes_on_says_so(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It is of the steps that have ended; of a study that was left nothing goes on."""
    monkeypatch.setitem(PROCEDURES, TINY.name, TINY)
    going = f"process {os.getpid()} still goes on with it"
    with held(study.path), pytest.raises(SystemExit):
        main(["report", str(study.path)])
    assert going in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(study.path)])
    assert going not in capsys.readouterr().err


def test_of_two_studies_that_begin_at_once_one_does(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both find an empty directory; the second to make its steps is refused, and writes nothing."""
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))
    (tmp_path / "steps").mkdir()
    with raises("out.unusable"):
        create(tmp_path, study.record)
    assert not (tmp_path / "study.json").exists()


def test_a_pause_is_not_of_the_time_that_a_study_took(study: Study, monkeypatch: pytest.MonkeyPatch):
    """A study that was left and resumed after an hour states what its steps took, and beside it what passed between."""
    monkeypatch.setitem(PROCEDURES, TINY.name, TINY)
    for number, begin_s in ((1, 0), (2, 3600)):
        run = f"steps/000{number}-open-1"
        shutil.copytree(GOLDEN / "torn", study.path / run)
        begun = StepStarted(at_ns=begin_s * 10**9, number=number, run=run)
        decided, _, _, judged = frames(number)
        ended = StepEnded(at_ns=(begin_s + 60) * 10**9, number=number, status="complete")
        append(study.path, decided, begun, ended, judged)
    derived = derive_study(study.path)
    assert (derived.result.cost.seconds, derived.result.cost.between_seconds) == (120, 3540)
    assert "2 steps in 2 min 0 s (and 59 min 0 s between them)" in (study.path / "report.txt").read_text()
