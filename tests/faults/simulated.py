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
from collections.abc import Iterator
from contextlib import contextmanager

from faults.cases import REPOSITORY, Case, Kind, Setting, Try
from waiting import BOUND_S


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    paths = os.pathsep.join((str(REPOSITORY / "tests"), str(REPOSITORY)))
    with subprocess.Popen(
        [sys.executable, "-m", "faults.schedules", str(setting.place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
    ) as player:
        assert player.stdin is not None
        assert player.stdout is not None
        questions, answers = player.stdin, player.stdout

        def attempt(case: Case) -> str:
            questions.write(f"{case}\n")
            questions.flush()
            if not select.select([answers], [], [], BOUND_S)[0]:
                player.kill()
                return f"no end within {BOUND_S:g} s"
            return str(json.loads(answers.readline() or '"its process died"'))

        try:
            yield attempt
        finally:
            questions.close()


SIMULATED = Kind(
    name="time",
    rows={"repeats": 5, "network": 5, "deaths": 5, "disk": 5, "collector": 5, "all": 5},
    opened=opened,
)
