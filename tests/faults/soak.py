"""A watch and a run for as long as is wanted, beside what goes wrong in production: nothing is lost, and nothing grows.

Of the watch the engine starts again every half minute and flaps, the next collector is away a third of the time, its
configuration is read again every three seconds, and every tenth export comes twice. The run is `soak_of_run`'s. Only of
the long part of the suite, whose time the two halve; what was held is printed when each ends. `virtual` is a watch of
two hours in virtual time, whose growth is counted in blocks of memory (`schedules/soaking.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults import soak_of_run
from faults.cases import REPOSITORY, Case, Kind, Setting, Try
from faults.world import SAMPLE_S, Use, World, figures, grown, standing, use
from test_watch import RESTARTS, TRACE, Watch, request, watching  # that of the tests of `watch`

RATE_PER_S = 20.0
LEAST_S = 60.0
# A span waits for the others of its request, and the conductor looks at the logs twice a second.
MOST_LAG_S = 30.0
WAITING = 'sidelight_receiver_forward_queue{what="exports"}'
AWAY = "sidelight_receiver_forward_dropped_total"
# Of a watch in virtual time: when memory is looked at, by when its windows are full, and how much more it may hold at
# the end: less than one block for each time that the configuration was read again.
MINUTES = (20, 40, 70, 130)
MOST_MORE_BLOCKS, MOST_WAITING_BLOCKS = 1000, 30_000


def configure(path: Path, world: World, interval_s: str) -> None:
    """Write the configuration of a watch."""
    path.write_text(f"metrics: [{world.page_url}]\nscrape-interval: {interval_s}\n")


async def soaked(place: Path, seconds: float, rng: random.Random) -> str:
    """Let a watch go on for so long; return what is wrong."""
    config = place / "watch.yaml"
    async with standing(rng) as world:
        configure(config, world, "0.5")
        options = ("--config", str(config), "--otlp-forward", world.collector_url, "--keep", "2m")
        async with watching(place / "watch", *options) as watch:
            uses = await _through(watch, world, config, seconds)
            world.is_away = world.flaps = False
            counts = await watch.until(lambda page: page[TRACE] >= world.sent and not page.get(WAITING))
            await watch.end()
    print(_figures(world, counts, uses), file=sys.stderr, flush=True)
    if any("Traceback" in line for line in watch.said):
        return "\n".join(watch.said[-5:])
    integrity = json.loads((watch.path / "summary.json").read_text())["integrity"]
    if integrity["state"] != "whole":
        return f"what is left of the logs is {integrity['state']}: {integrity['disagreements']}"
    lag_s = max(each.lag for each in uses) / RATE_PER_S
    behind = f"the conductor was {lag_s:.0f} s behind" if lag_s > MOST_LAG_S else ""
    return _miscounted(world, counts) or grown(uses) or behind


def _miscounted(world: World, counts: Mapping[str, float]) -> str:
    lost = 3 * world.sent - len(world.forwarded)
    if counts[TRACE] != world.sent:
        return f"{world.sent} requests were sent, {counts[TRACE]:g} counted"
    if counts[RESTARTS]:
        return f"the receiver was started again {counts[RESTARTS]:g} times"
    if lost > counts[AWAY] * 3:  # an export has three spans, of one request
        return f"{lost} spans were not forwarded, and {counts[AWAY]:g} exports are counted as dropped"
    return ""


async def _through(watch: Watch, world: World, config: Path, seconds: float) -> Sequence[Use]:
    begun_s = next_s = time.monotonic()
    uses: list[Use] = []
    while (now_s := time.monotonic()) < begun_s + seconds:
        world.sent += 1
        await watch.send(spans := request(world.sent), over=world.rng.choice(("grpc", "http")))
        if world.rng.random() < 0.1:
            await watch.send(spans)
            world.sent_again += 1
        if now_s > begun_s + SAMPLE_S * (len(uses) + 1):
            lag = world.sent - (await watch.counts())[TRACE]
            uses.append(use(watch.process.pid, at_s=now_s - begun_s, lag=lag))
            world.is_away, world.flaps = world.rng.random() < 1 / 3, world.rng.random() < 0.5
            interval_s = world.rng.choice(("0.5", "1", "[["))  # the last is refused, and what was goes on
            configure(config, world, interval_s)
            watch.process.send_signal(signal.SIGHUP)
            world.signals += 1
        next_s += world.rng.expovariate(RATE_PER_S)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    return uses


def _figures(world: World, counts: Mapping[str, float], uses: Sequence[Use]) -> str:
    """Say what came, what came of it, and what was held."""
    return (
        f"watch of {uses[-1].at_s / 60:.1f} min: {world.sent:,} requests, {world.sent_again:,} sent twice, "
        f"{counts[TRACE]:,.0f} counted; {len(world.forwarded):,} of {3 * world.sent:,} spans forwarded, "
        f"{counts[AWAY]:g} exports dropped; {world.signals:,} SIGHUP; {len(world.lives)} lives of the engine; "
        f"lag at most {max(each.lag for each in uses):g} requests; {figures(uses)}"
    )


def virtual(place: Path, minutes: Sequence[int]) -> str:
    """Let a watch go on in virtual time up to the last of some minutes; return what is wrong, also with what it held at
    the others.
    """
    paths = os.pathsep.join((str(REPOSITORY / "tests"), str(REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-m", "faults.schedules", str(place), *map(str, minutes)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode:
        return done.stderr
    came: dict[str, Any] = json.loads(done.stdout)
    print(f"watch in virtual time: {came['sent']:,} requests; blocks of memory {came['held']}", file=sys.stderr)
    if came["trouble"] or not came["line"].startswith(f"{came['sent']} requests in "):
        return f"{came['sent']} requests were sent: {came['line']}; {came['trouble'][:3]}"
    early, *_, late = came["held"]
    waiting = max(each["waiting"] for each in came["held"])
    if waiting > MOST_WAITING_BLOCKS:
        return f"{waiting:,} blocks of memory were garbage that had not been collected"
    if late["live"] > early["live"] + MOST_MORE_BLOCKS:
        return (
            f"from minute {early['minute']} to {late['minute']} blocks grew from {early['live']:,} to {late['live']:,}"
        )
    return ""


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    seconds = max(LEAST_S, setting.seconds / 2)

    def attempt(case: Case) -> str:
        place = setting.place / case.row
        place.mkdir()
        if case.row == "virtual":
            return virtual(place, MINUTES)
        soaking = soaked if case.row == "watch" else soak_of_run.soaked
        return asyncio.run(soaking(place, seconds, case.random()))

    yield attempt


SOAK = Kind(
    name="soak",
    rows={"watch": 0, "run": 0, "virtual": 0},
    opened=opened,
    sizes=dict.fromkeys(("watch", "run", "virtual"), 1),
)
