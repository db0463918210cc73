"""What schedules are drawn: a row for each kind of thing that goes wrong, and one for all at once."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from faults.cases import Case, TooLongError, cpu_limit
from faults.schedules import traffic
from faults.schedules.checks import wrong_with
from faults.schedules.network import Weather
from faults.schedules.virtual_time import Time
from faults.schedules.watching import Played, Schedule, play

CALM = Weather()
TOGETHER = ("network", "deaths", "scraper", "disk", "collector", "engine", "clock")
CASE_CPU_S = 60.0


def drawn(row: str, rng: random.Random) -> Schedule:
    """Draw the schedule of a case."""
    seconds = rng.uniform(1, 40)
    requests = traffic.requests(rng, rng.randrange(1, 25), seconds)
    latest_s = 300.0 if rng.random() < 0.05 else 50.0
    exports = traffic.exports(rng, requests, latest_s=latest_s)
    exports += traffic.odd_exports(rng, rng.choice((0, 0, 5)), seconds)
    troubles: dict[str, Any] = {"weather": CALM}
    kills: list[tuple[float, str]] = []
    for trouble in {"repeats": (), "all": TOGETHER}.get(row, (row,)):
        troubles |= _trouble(trouble, rng, seconds)
        kills += troubles.pop("kills", ())
    return Schedule(requests=requests, exports=exports, kills=sorted(kills), **troubles)


def _trouble(row: str, rng: random.Random, seconds: float) -> dict[str, Any]:
    """Draw what goes wrong in one way."""
    begin_s = rng.uniform(1, seconds + 10)
    match row:
        case "network":
            weather = Weather(
                resets=rng.choice((0.0, 0.05, 0.3)),
                silences=rng.choice((0.0, 0.05)),
                slow=rng.choice((0.0, 0.05, 0.3)),
                delay_s=rng.choice((0.001, 0.05)),
            )
            return {"weather": weather}
        case "deaths":
            return {"kills": _kills(rng, "receiver", seconds), "deaths": _deaths(rng)}
        case "scraper":
            kills = _kills(rng, "scraper", seconds)
            drawn = {"has_page": True, "kills": kills, "scraper_deaths": _deaths(rng)}
            if rng.random() < 0.3:  # while nothing can be written
                drawn["full"] = [(begin_s, begin_s + rng.choice((3.0, 20.0)))]
                kills.append((begin_s + rng.uniform(0.0, 3.0), "scraper"))
            return drawn
        case "conductor":
            return {"kills": [(begin_s, "watch")]}
        case "disk":
            return {"full": [(begin_s, begin_s + rng.choice((0.1, 3.0, 20.0)))]}
        case "collector":
            return {"away": [(begin_s, begin_s + rng.choice((1.0, 20.0, 100.0)))], "busy": rng.choice((0.0, 0.2))}
        case "engine":
            down = [(begin_s, begin_s + rng.choice((0.1, 2.0, 20.0)))] if rng.random() < 0.7 else []
            return {"has_page": True, "cut": rng.choice((0.0, 0.2)), "engine_down": down}
        case "clock":
            return {"steps": [(begin_s, rng.choice((-1, 1)) * rng.choice((1.5, 30.0, 200.0)))]}
        case "full-clock":  # it is set while nothing can be recorded
            step_s = rng.choice((-1, 1)) * rng.choice((1.5, 30.0, 200.0))
            full = [(begin_s, begin_s + 20.0)]
            return {"full": full, "steps": [(begin_s + rng.uniform(0.0, 18.0), step_s)], "has_page": True}
    raise ValueError(row)


def _kills(rng: random.Random, who: str, seconds: float) -> list[tuple[float, str]]:
    return [(rng.uniform(0.5, seconds + 20), who) for _ in range(rng.randrange(3))]


def _deaths(rng: random.Random) -> list[tuple[int, str]]:
    """Draw at which of its writes each in turn dies, and how."""
    return [(rng.randrange(40), rng.choice(("before", "within", "behind"))) for _ in range(rng.randrange(4))]


def attempt(clock: Time, case: Case, place: Path) -> tuple[str, str]:
    """Play one case; return what is wrong with what came of it, and a digest of that."""
    rng = case.random()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        with cpu_limit(CASE_CPU_S):
            played = play(clock, rng, drawn(case.row, rng), place)
            return wrong_with(played), _digest(played)
    except TooLongError as error:
        return f"it does not end: {error}", ""
    except Exception as error:  # noqa: BLE001  whatever it is goes into the table
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})", ""


def _digest(played: Played) -> str:
    """Return a hash of all that was logged, forwarded and said, stamps included."""
    digest = hashlib.sha256(repr((played.collector.taken, played.seconds)).encode())
    for watch in played.watches:
        digest.update(repr((watch.line, len(watch.said.lines))).encode())
        for log in sorted((watch.path / "raw").glob("s*-*.log")):
            digest.update(log.read_bytes())
    return digest.hexdigest()


def answer_cases(clock: Time) -> int:
    """Answer cases until none comes any more: what is wrong with each, and the digest of what came of it."""
    answers = sys.__stdout__
    assert answers is not None
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as scratch:
        for line in sys.stdin:
            answers.write(json.dumps(attempt(clock, Case.parse(line.strip()), Path(scratch) / "case")) + "\n")
            answers.flush()
    return 0
