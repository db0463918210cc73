"""What schedules are drawn: a row for each kind of thing that goes wrong, and one for all at once."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from faults.cases import Case, TooLongError, cpu_limit, tried
from faults.schedules import traffic
from faults.schedules.checks import wrong_with
from faults.schedules.network import Weather
from faults.schedules.virtual_time import Time
from faults.schedules.watching import Schedule, play

CALM = Weather()
CASE_CPU_S = 60.0


def drawn(row: str, rng: random.Random) -> Schedule:
    """Draw the schedule of a case."""
    everything = row == "all"
    seconds = rng.uniform(1, 40)
    requests = traffic.requests(rng, rng.randrange(1, 25), seconds)
    latest_s = 300.0 if rng.random() < 0.05 else 50.0
    weather = CALM
    kills: list[tuple[float, str]] = []
    deaths: list[tuple[int, str]] = []
    full: list[tuple[float, float]] = []
    away: list[tuple[float, float]] = []
    if row == "network" or everything:
        weather = Weather(
            resets=rng.choice((0.0, 0.05, 0.3)),
            silences=rng.choice((0.0, 0.05)),
            slow=rng.choice((0.0, 0.05, 0.3)),
            delay_s=rng.choice((0.001, 0.05)),
        )
    if row == "deaths" or everything:
        kills = [(rng.uniform(0.5, seconds + 20), "receiver") for _ in range(rng.randrange(3))]
        deaths = [(rng.randrange(40), rng.choice(("before", "within", "behind"))) for _ in range(rng.randrange(4))]
    if row == "disk" or everything:
        begin_s = rng.uniform(1, seconds + 10)
        full = [(begin_s, begin_s + rng.choice((0.1, 3.0, 20.0)))]
    if row == "collector" or everything:
        begin_s = rng.uniform(1, seconds + 10)
        away = [(begin_s, begin_s + rng.choice((1.0, 20.0, 100.0)))]
    return Schedule(
        requests=requests,
        exports=traffic.exports(rng, requests, latest_s=latest_s),
        weather=weather,
        kills=sorted(kills),
        deaths=deaths,
        full=full,
        away=away,
        busy=rng.choice((0.0, 0.2)) if away else 0.0,
    )


def attempt(clock: Time, case: Case, place: Path) -> str:
    """Play one case, and say what is wrong with what came of it."""
    rng = case.random()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        with cpu_limit(CASE_CPU_S):
            return wrong_with(play(clock, rng, drawn(case.row, rng), place))
    except TooLongError as error:
        return f"it does not end: {error}"


def answer_cases(clock: Time) -> int:
    """Answer cases until none comes any more."""
    answers = sys.__stdout__
    assert answers is not None
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as scratch:
        for line in sys.stdin:
            case = Case.parse(line.strip())
            wrong = tried(lambda case: attempt(clock, case, Path(scratch) / "case"), case).wrong
            answers.write(json.dumps(wrong) + "\n")
            answers.flush()
    return 0
