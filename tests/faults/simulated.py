"""Schedules of a watch in virtual time: what comes late, twice, in any order or not at all, and what dies meanwhile.

They are played in a process of their own (`faults.schedules`), whose clocks are virtual. A case plays minutes of
trouble in a fifth of a second, and the same ones each time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.cases import REPOSITORY, Case, Kind, Setting, Try
from waiting import BOUND_S

Play = Callable[[Case], tuple[str, str]]  # what is wrong with what came of a case, and a digest of it


@contextmanager
def player(place: Path) -> Iterator[Play]:
    """Start the process that plays cases."""
    paths = os.pathsep.join((str(REPOSITORY / "tests"), str(REPOSITORY)))
    with subprocess.Popen(
        [sys.executable, "-m", "faults.schedules", str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def play(case: Case) -> tuple[str, str]:
            questions.write(f"{case}\n")
            questions.flush()
            if not select.select([answers], [], [], BOUND_S)[0]:
                process.kill()
                return f"no end within {BOUND_S:g} s", ""
            wrong, digest = json.loads(answers.readline() or '["its process died", ""]')
            return wrong, digest

        try:
            yield play
        finally:
            questions.close()


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    with player(setting.place) as play:
        yield lambda case: play(case)[0]


ROWS = (
    "repeats", "network", "deaths", "scraper", "conductor", "disk", "collector", "engine", "clock", "full-clock", "all",
)  # fmt: skip
SIMULATED = Kind(name="time", rows=dict.fromkeys(ROWS, 1), opened=opened)
