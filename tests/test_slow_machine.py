"""What finds tests that do not hold on a slow machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import slow_machine

TESTS = """
from pathlib import Path

RUNS = Path(__file__).with_name("runs")

def test_always(): ...

def test_at_first():
    runs = RUNS.read_text() if RUNS.exists() else ""
    RUNS.write_text(runs + "x")
    assert not runs
"""


def test_a_test_that_fails_sometimes_is_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """By its name, with how often; what passes each time is not listed."""
    monkeypatch.setattr(slow_machine, "LOWEST", 0)  # beside the other tests it would wait for as long as they last
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ("--times", "2", "--spinning", "0", "-p", "no:xdist", f"--rootdir={tmp_path}")
    assert 1 == slow_machine.main([*options, str(tmp_path)])
    said = [line for line in capfd.readouterr().out.splitlines() if "times:" in line]
    assert ["failed 1 of 2 times: test_it.py::test_at_first"] == said
