"""A study on the simulated engine, over sockets, as users start it: killed in the middle, resumed, derived again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from processes import answered, until
from tiny_study import TINY

from sidelight.methodology.execution.record import open_study
from sidelight.methodology.study.planning import decide

DERIVED = ("result.json", "compliance.json", "report.txt", "report-minimum.txt", "report.html", "tables/levels.csv")
SCRIPT = Path(__file__).parents[2] / "tiny_study.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A study that was killed in its second step and resumed: its directory, and what the resumed command left."""

    path: Path
    resumed: subprocess.CompletedProcess[str]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """One study for all facts here."""
    path = tmp_path_factory.mktemp("study") / "tiny"
    with processes.engine() as (url, _):
        begin = command("test", "tiny", url, "--scale", "short", "--sentinel", "--out", path, "--quiet")
        with subprocess.Popen(begin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            second = path / "steps" / "0002-open-0.50"
            until(lambda: answered(second) or process.poll() is not None, "answers of the second step")
            assert process.poll() is None, process.communicate()
            process.kill()
        resume = command("test", "tiny", url, "--resume", path, "--quiet")
        yield Whole(path=path, resumed=subprocess.run(resume, capture_output=True, text=True, check=False))


def test_a_killed_study_is_resumed_with_the_same_steps(whole: Whole):
    """The step that was cut short is set aside and repeated; the one before it is not."""
    assert 0 == whole.resumed.returncode, whole.resumed.stderr
    names = sorted(path.name for path in (whole.path / "steps").iterdir())
    assert names == ["0001-closed-64", "0002-open-0.50", "0002-open-0.50.torn", "0003-sentinel-open-0.50"]
    study = open_study(whole.path)
    for at, each in enumerate(study.finished):
        assert each.step == decide(TINY, study.record.asked, study.finished[:at])
    assert ["saturate", "level", "sentinel"] == [each.step.kind for each in study.finished]
    assert study.stopped is not None
    assert "complete" == study.stopped.status


def test_one_warm_up_serves_all_steps_of_an_engine(whole: Whole):
    """Later steps say which step warmed the engine up, and are not cold starts."""
    study = open_study(whole.path)
    assert ["", "0001-closed-64", "0001-closed-64"] == [study.begun[number].warmed_by for number in (1, 2, 3)]
    report = (whole.path / "steps" / "0003-sentinel-open-0.50" / "report.txt").read_text()
    assert "No warm-up of its own: the load of 0001-closed-64 had warmed the system up." in " ".join(report.split())


def test_a_study_is_derived_again_byte_for_byte(whole: Whole):
    """`sidelight report` of a study writes all of its files as they were."""
    before = {name: (whole.path / name).read_bytes() for name in DERIVED}
    again = subprocess.run(command("report", whole.path), capture_output=True, text=True, check=True)
    assert before == {name: (whole.path / name).read_bytes() for name in DERIVED}
    assert again.stdout == whole.resumed.stdout


def test_another_option_than_recorded_is_refused_by_name(whole: Whole):
    """A resumed study takes the decisions of the one that was begun."""
    resume = command("test", "tiny", "--resume", whole.path, "--seed", "7")
    refused = subprocess.run(resume, capture_output=True, text=True, check=False)
    assert 2 == refused.returncode
    assert "--seed was 42 when the study began; leave it out, or begin a new study" in refused.stderr
