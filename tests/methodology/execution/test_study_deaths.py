"""A study of an engine that dies under its load, over sockets: somebody starts it again, and it dies again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
import pytest
from tiny_study import TINY

from sidelight.methodology import commands as study
from sidelight.methodology.execution.record import open_study
from sidelight.methodology.procedures import PROCEDURES
from sidelight.sidecar.cli.app import main


@contextmanager
def started_again(*options: str) -> Iterator[str]:
    """Run an engine that is started again, on its port, whenever it ends; give its URL."""
    stopping = threading.Event()
    with processes.engine(*options) as (url, first):

        def supervise() -> None:
            first.wait()
            while not stopping.is_set():
                with processes.engine(*options, "--port", url.rpartition(":")[2]) as (_, again):
                    while again.poll() is None and not stopping.wait(0.05):
                        pass

        supervisor = threading.Thread(target=supervise)
        supervisor.start()
        try:
            yield url
        finally:
            stopping.set()
            if first.poll() is None:
                first.terminate()
            supervisor.join()


def test_a_step_in_which_the_engine_died_is_repeated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Then the study ends with what there is, and exit code 3: its cause is the engine, not the load."""
    monkeypatch.setitem(PROCEDURES, TINY.name, TINY)
    monkeypatch.setattr(study, "TESTS", (*study.TESTS, TINY.name))
    path = tmp_path / "study"
    with started_again("--oom-at", "8", "--oom-exits") as url, pytest.raises(SystemExit) as ended:
        main(["test", TINY.name, url, "--scale", "short", "--out", str(path), "--quiet"])
    assert 3 == ended.value.code
    steps = open_study(path).finished
    assert ["closed-64", "closed-64"] == [each.step.label for each in steps]
    assert [0, 1] == [each.step.repeat for each in steps]
    assert all(each.outcome.void.startswith("the engine died") for each in steps), [each.outcome for each in steps]
    report = " ".join((path / "report.txt").read_text().split())
    assert "! The study is partial: step 2 (closed-64) was void twice: the engine died" in report
