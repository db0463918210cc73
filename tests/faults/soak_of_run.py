"""A run for as long as is wanted, whose engine starts again every half minute and whose next collector is away a third
of the time.

Every request is planned, sent and recorded, every export that came is forwarded or counted as dropped. The processes of
the run hold no more with time, but its conductor: what is recorded stays in its memory for the report, which is so many
bytes for each request and each value of a page.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from faults.world import LIFE_S, SAMPLE_S, Use, World, both, figures, grown, median, standing, use
from waiting import BOUND_S

RATE_PER_S = 3.0
SCRAPES_PER_S = 4.0  # as a run does by itself
# What the report is made of, as tracemalloc counts it: a request's plan, its stamps and its spans, and 8 bytes for
# a value in matrices that double up to 64 rows.
REQUEST_BYTES, VALUE_BYTES = 12_000, 12
MIB = 2**20


@dataclass(slots=True)
class Engine:
    """A simulated engine that is ended and started again at the same port; `lives` counts how often it came up."""

    url: str = ""
    spans_to: str = ""
    lives: int = 0
    said: list[str] = field(default_factory=list)

    async def live(self, rng: random.Random) -> None:
        """Come up again and again, each time for LIFE_S."""
        while True:
            async with self._life():
                await asyncio.sleep(LIFE_S)
            await asyncio.sleep(rng.uniform(0.1, 1.0))

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        port = self.url.rpartition(":")[2] if self.url else "0"
        spans = ("--otlp-endpoint", self.spans_to) if self.spans_to else ()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidelight.simulator", "--speed-profile", "fast", "--port", port, *spans),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            self.url = json.loads(await process.stdout.readline())["url"].removesuffix("/v1").rstrip("/")
            self.lives += 1
            yield
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                process.send_signal(signal.SIGKILL if self.lives % 2 else signal.SIGTERM)
            await process.wait()


async def soaked(place: Path, seconds: float, rng: random.Random) -> str:
    """Let a run go on for so long; return what is wrong."""
    async with standing(rng) as world, asyncio.TaskGroup() as group:
        engine = Engine()
        living = group.create_task(engine.live(rng))
        async with asyncio.timeout(BOUND_S):
            while not engine.lives:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        values = await _page_values(engine.url)
        load = ("--rate", f"{RATE_PER_S:g}", "--duration", f"{seconds:g}", "--warmup", "0", "--request-timeout", "60")
        spans = ("--otlp-listen", "127.0.0.1:0", "--otlp-forward", world.collector_url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidelight", "run", f"{engine.url}/v1", *load, *spans, "--json"),
            *("--listen", "127.0.0.1:0", "--out", str(place / "run")),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            reading = group.create_task(_hear(process, engine))
            uses = await _through(process, world, seconds)
            world.is_away = False
            code = await asyncio.wait_for(process.wait(), BOUND_S)
            await reading
        finally:
            if process.returncode is None:
                process.kill()
        living.cancel()
    return _wrong(place / "run", code, engine, uses, values)


async def _page_values(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        return sum(line[:1] != "#" for line in (await reply.text()).splitlines())


async def _hear(process: asyncio.subprocess.Process, engine: Engine) -> None:
    """Read what the run says; from its next life on the engine sends spans to where they are received."""
    assert process.stderr is not None
    async for line in process.stderr:
        text = line.decode()
        engine.said.append(text)
        if received := re.search(r"(http://\S+) \(gRPC\)", text):
            engine.spans_to = received[1]


async def _through(process: asyncio.subprocess.Process, world: World, seconds: float) -> Sequence[Use]:
    begun_s = time.monotonic()
    uses: list[Use] = []
    while (at_s := time.monotonic() - begun_s) < seconds and process.returncode is None:
        with suppress(FileNotFoundError):  # a child that is started again
            uses.append(use(process.pid, at_s=at_s))
        world.is_away = world.rng.random() < 1 / 3
        await asyncio.sleep(SAMPLE_S)
    return uses


def _wrong(path: Path, code: int, engine: Engine, uses: Sequence[Use], values: int) -> str:
    if code or any("Traceback" in text for text in engine.said):
        return f"the run ended with {code}: {''.join(engine.said[-5:])}"
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    spans = summary["correlation"]["spans"]
    requests: dict[str, int] = summary["client"]["requests"]
    print(
        f"run of {uses[-1].at_s / 60:.1f} min: {requests}; {spans['exports']:,} exports, {spans['forwarded']:,} "
        f"forwarded, {spans['forward_dropped']:,} dropped; {engine.lives} lives of the engine; {figures(uses)}",
        file=sys.stderr,
        flush=True,
    )
    if summary["integrity"]["state"] != "whole":
        return f"its logs are {summary['integrity']['state']}: {summary['integrity']['disagreements']}"
    if not spans["spans"] or spans["exports"] != spans["forwarded"] + spans["forward_dropped"]:
        return f"of {spans['exports']} exports {spans['forwarded']} were forwarded, {spans['forward_dropped']} dropped"
    return grown(uses, lambda each: each.children_mib) or _recorded_more(uses, values)


def _recorded_more(uses: Sequence[Use], values: int) -> str:
    """Say whether the conductor holds more than what it recorded from the first look to the last."""
    before_mib, after_mib = both(uses, median(lambda each: each.conductor_mib))
    began_s, ended_s = both(uses, median(lambda each: each.at_s))
    each_s = RATE_PER_S * REQUEST_BYTES + SCRAPES_PER_S * values * VALUE_BYTES
    most_mib = before_mib + (ended_s - began_s) * each_s / MIB
    return f"the conductor grew from {before_mib:.1f} to {after_mib:.1f} MiB" if after_mib > most_mib else ""
