"""`sidelight compare` and `sweep` on the command line: recorded runs, and what is refused before anything is sent."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import golden_files
import pytest

from sidelight.methodology.execution.data import step_data
from sidelight.sidecar.cli.app import main


def ran(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three copies of one recorded run a side, and a run of other requests."""
    root = tmp_path_factory.mktemp("recorded")
    for side in ("before", "after"):
        for number in range(3):
            (root / side).mkdir(exist_ok=True)
            shutil.move(golden_files.copied("vllm_plain", root / side), root / side / f"run-{number}")
    (root / "other").mkdir()
    golden_files.copied("two_engines", root / "other")
    return root


def test_recorded_runs_are_compared_as_a_study(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Copies of a run do not differ, and that they are equal to the digit raises a question."""
    sides = recorded / "before", recorded / "after"
    assert 0 == ran("compare", *sides, "--out", tmp_path / "out", "--gate", "--anyway")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "complete"
    assert result["answer"][0].startswith(
        "B against A, over 3 runs of A and 3 of B, which are not paired: equivalent within 5 %"
    )
    assert result["results"]["B_over_A_ttft_p50_ratio"]["value"] == 1.0
    assert "Fair Comparison Checklist" in capsys.readouterr().out
    assert (tmp_path / "out" / "tables" / "comparison-b.csv").is_file()


def test_recorded_systems_have_the_names_that_were_given(recorded: Path, tmp_path: Path):
    """As those of URLs have, in every result; a letter for one without."""
    ran("compare", f"old={recorded / 'before'}", recorded / "after", "--out", tmp_path / "out", "--anyway")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["answer"][0].startswith("B against old, over 3 runs of old and 3 of B")
    assert result["results"]["B_over_old_ttft_p50_ratio"]["value"] == 1.0


def test_a_comparison_is_derived_again(recorded: Path, tmp_path: Path):
    """`sidelight report` of it writes the same bytes, where it may read the runs that it names."""
    out = tmp_path / "out"
    ran("compare", recorded / "before", recorded / "after", "--out", out, "--anyway")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert 2 == ran("report", out)
    assert 0 == ran("report", out, "--outside")
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("before", "other"), "they did not send the same requests"),
        (("before/run-0", "before/run-0"), "are the same; give different runs"),
        (("before", "nowhere"), "no run directory here"),
        (("x={}/before", "x={}/after"), "two systems are named x; give each its own name"),
        (("x={}/before", "y={}/nowhere"), "nowhere: no run directory here"),
        (("before",), "1 system; give from 2 to 8"),
        ((), "two systems are needed"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
):
    """In one line, before anything is written."""
    paths = [name.format(recorded) if "{" in name else recorded / name for name in arguments]
    assert 2 == ran("compare", *paths, "--out", tmp_path / "out")
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_runs_whose_load_cannot_be_trusted_are_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Doubtful gaps alone cost a comparison no more than TPOT."""
    sides = recorded / "before", recorded / "after"
    assert 0 == ran("compare", *sides, "--out", tmp_path / "out")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [["gaps"]] * 6 == [list(step["doubts"]) for step in result["steps"]]
    assert result["results"]["B_over_A_tpot_p50_ratio"]["value"] is None
    late = {"load": "Requests left up to 900 ms after their scheduled time."}
    monkeypatch.setattr(
        "sidelight.methodology.execution.recorded.step_data", lambda path: replace(step_data(path), doubts=late)
    )
    capsys.readouterr()
    assert 2 == ran("compare", *sides, "--out", tmp_path / "refused")
    assert "the load generator cannot be trusted: Requests left up to 900 ms" in capsys.readouterr().err


def test_a_run_whose_records_are_damaged_is_refused(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its numbers are those of what is left; with --anyway they are compared, and the exit code says it."""
    damaged = shutil.copytree(recorded / "before" / "run-0", tmp_path / "damaged")
    (damaged / "raw" / "requests-0.log").write_bytes(b"")
    sides = recorded / "after" / "run-0", damaged
    assert 2 == ran("compare", *sides, "--out", tmp_path / "out")
    error = capsys.readouterr().err
    assert (1, True) == (error.count("\n"), "damaged: recorded data of its run are missing or damaged: " in error)
    assert 3 == ran("compare", *sides, "--anyway", "--out", tmp_path / "out")
    assert f"recorded data of {damaged} are missing or damaged: " in capsys.readouterr().err


def test_other_requests_are_compared_where_asked_and_the_checklist_says_so(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """--anyway; with one run of a side nothing is claimed."""
    assert 0 == ran("compare", recorded / "before", recorded / "other", "--anyway", "--out", tmp_path / "out")
    shown = " ".join(capsys.readouterr().out.split())
    assert "inconclusive on" in shown
    assert "not met" in shown


def test_recorded_runs_and_urls_do_not_mix(recorded: Path, capsys: pytest.CaptureFixture[str]):
    """Either all are measured, or none is."""
    assert 2 == ran("compare", recorded / "before", "http://127.0.0.1:1")
    assert "is recorded" in capsys.readouterr().err


def test_too_few_pairs_for_a_verdict_are_announced(capsys: pytest.CaptureFixture[str]):
    """They can be measured, and take their time; --plan says beforehand that nothing will be concluded."""
    pairs = "a=http://127.0.0.1:1", "b=http://127.0.0.1:2", "--plan", "--capacity", "6", "--pairs"
    assert 0 == ran("compare", *pairs, "2")
    assert "--pairs 2: too few for a verdict" in capsys.readouterr().out
    assert 0 == ran("compare", *pairs, "3")
    assert "too few" not in capsys.readouterr().out


def test_the_plan_of_a_comparison_has_all_of_each_pair(capsys: pytest.CaptureFixture[str]):
    """Names or letters; nothing is sent."""
    arguments = ("compare", "http://127.0.0.1:1", "fast=http://127.0.0.1:2", "--rate", "2", "--pairs", "4", "--plan")
    assert 0 == ran(*arguments)
    lines = capsys.readouterr().out.splitlines()
    assert sum("pair" in line and " A" in line for line in lines) == 4
    assert sum("pair" in line and " fast" in line for line in lines) == 4


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("inpt=1,2", "did you mean input_tokens?"),
        ("concurrency", "must be NAME=VALUE,VALUE"),
        ("concurrency=", "must be NAME=VALUE,VALUE"),
    ],
)
def test_a_sweep_of_what_is_no_option_is_refused(capsys: pytest.CaptureFixture[str], vary: str, said: str):
    """With the nearest name, or the form."""
    assert 2 == ran("sweep", "http://127.0.0.1:1", "--vary", vary, "--plan")
    assert said in capsys.readouterr().err


def test_a_sweep_has_every_combination_of_numbers_times_and_distributions(capsys: pytest.CaptureFixture[str]):
    """Values with commas are parted by a bar; short names of lengths are understood."""
    vary = ("--vary", "input=normal:64,8|128", "--vary", "concurrency=1,4", "--vary", "duration=5s,10s")
    assert 0 == ran("sweep", "http://127.0.0.1:1", *vary, "--repeat", "2", "--plan")
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if "in flight" in line]
    assert len(steps) == 16
    assert sum(" 5 s " in line for line in steps) == 8
