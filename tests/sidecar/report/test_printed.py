"""What a report prints: the report and where its files are, or summary.json alone; and no warning twice."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import summaries
from golden_files import GOLDEN, MANIFEST, RAW
from processes import Ended

from sidelight.sidecar.report.printing import print_report

SAID = "port 9464 is taken"


def recorded(path: Path) -> Path:
    """Put a recorded run at a path."""
    path.mkdir()
    shutil.copy(GOLDEN / "torn" / MANIFEST, path)
    shutil.copytree(GOLDEN / "torn" / RAW, path / RAW)
    return path


def test_json_prints_the_summary_and_nothing_else(sidelight: Callable[..., Ended], tmp_path: Path):
    """The bytes of the file, for a pipe into jq."""
    run = recorded(tmp_path / "torn")

    ended = sidelight("report", run, "--json")

    assert (0, "") == (ended.code, ended.err)
    assert (run / "summary.json").read_text() == ended.out
    assert "crashed" == json.loads(ended.out)["status"]


def test_a_report_that_cannot_be_saved_is_printed_and_names_the_place(sidelight: Callable[..., Ended], tmp_path: Path):
    """It is the user's place, so bad usage; nothing is said to be written. The change against a base is left out."""
    run, base = (recorded(tmp_path / name) for name in ("run", "base"))
    (run / "summary.json").mkdir()

    ended = sidelight("report", run, "--base", base)

    assert 2 == ended.code
    assert "could not be saved" in ended.err
    assert str(run / "summary.json") in ended.err
    assert "Where the TTFT went" in ended.out
    assert "Written to" not in ended.out


@pytest.mark.parametrize(("apart", "times"), [(True, 1), (False, 0)], ids=["apart", "one stream"])
def test_a_warning_that_standard_error_had_is_not_printed_again_below_it(
    apart: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where both are the same terminal or log; the report's file has it in any case."""
    summary = msgspec.structs.replace(summaries.summary(summaries.correlated()), warnings=[SAID, "16 of 27 failed"])
    (tmp_path / "run").mkdir()
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err if apart else out)
        print_report(summary, tmp_path / "run", said=[SAID])
    shown = (tmp_path / "out").read_text().lower()
    assert times == shown.count(SAID)
    assert 1 == shown.count("16 of 27 failed")
