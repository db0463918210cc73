"""The scraping process: `python -m sidelight.scraper.worker`, obeying JSON lines on its standard input.

The first line is a `Spec`, the others are commands (`scraper.commands`):

- `{"cmd":"settle","seconds":x}` scrapes on for that time, then once more, and says `settled`;
- `{"cmd":"scrape","targets":[...],"interval_s":x}` exchanges the targets, and says `scraping` when each was scraped;
- `{"cmd":"exit"}` or the end of input scrapes a last time and ends.

In between it says `stale` of a target that no longer answers and `fresh` when it does again. When each target is
scraped is decided in `targets.target`, what is recorded in the logs of each family.

On a full disk it goes on: `unwritten` says how many scrapes it could not keep and why, `written` that it can again.
A `settled` scraper scrapes no more unless it settles again or has other targets: `scrapes` are those in its log.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing

import msgspec

from sidelight.rundir.child import commands, say
from sidelight.rundir.frames import PatientLog, Unwritten
from sidelight.rundir.printable.masking import register_url
from sidelight.scraper.commands import MAX_INTERVAL_S, MIN_INTERVAL_S, Command, Exit, SetTargets, Spec
from sidelight.scraper.hardware.sampler import record
from sidelight.scraper.perf_metrics import TimingLog
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.targets.fetch import FetchLimits, open_session
from sidelight.scraper.targets.pool import ScrapePool
from sidelight.scraper.targets.scrape import clock_of
from sidelight.scraper.targets.target import ScrapeConfig
from sidelight.scraper.worker.process import main

# The conductor waits 10 s for a settled scraper, and as long for one that ends.
SETTLE_WITHIN_S = 8.0
END_WITHIN_S = 4.0
_decode_command = msgspec.json.Decoder(Command).decode


async def run(spec: Spec, lines: asyncio.StreamReader) -> None:
    """Scrape every target until `exit` is read."""
    unwritten = Unwritten(_say_if_read)
    with ExitStack() as logs:
        log = PatientLog(logs.enter_context(closing(ScrapeLog(spec.out, spec.rotation))).append, unwritten)
        timings = None
        if any(map(clock_of, spec.targets)):
            timings = PatientLog(logs.enter_context(closing(TimingLog(spec.timings_out))).append, unwritten)
        async with open_session(spec.access) as session, asyncio.TaskGroup() as group:
            config = ScrapeConfig(
                clock_offset_ns=spec.clock_offset_ns,
                seed=spec.seed,
                access=spec.access,
                limits=FetchLimits(timeout_s=spec.timeout_s, body_bytes=spec.limit_bytes),
                session=session,
            )
            pool = ScrapePool(config, log=log, timings=timings, group=group, say=_say_if_read)
            first = pool.set_targets(spec.targets, spec.interval_s, within_s=SETTLE_WITHIN_S)
            stopping = asyncio.Event()
            if spec.hardware_out:
                reading = record(
                    spec.hardware_out,
                    clock_offset_ns=spec.clock_offset_ns,
                    stopping=stopping,
                    unwritten=unwritten,
                )
                group.create_task(reading)
            await first
            say("ready", **pool.counts())

            def counts() -> dict[str, int]:
                return {**pool.counts(), "scrapes": log.written, "unwritten": unwritten.count}

            settled = await _obey(pool, lines, counts)
            stopping.set()
            if not settled:
                await pool.scrape_last(within_s=END_WITHIN_S)


async def _obey(pool: ScrapePool, lines: asyncio.StreamReader, counts: Callable[[], dict[str, int]]) -> bool:
    """Follow commands until `exit` or the end of input; true if the last scrape of each target is already written.

    `counts` returns what a settled scraper states.
    """
    settled = False
    async for command in commands(lines, _decode_command):
        if isinstance(command, Exit):
            return settled
        if isinstance(command, SetTargets):
            for url in command.targets:
                register_url(url)
            await pool.set_targets(command.targets, command.interval_s, within_s=SETTLE_WITHIN_S)
            settled = False
            say("scraping", **pool.counts())
            continue
        await asyncio.sleep(command.seconds)
        await pool.scrape_last(within_s=SETTLE_WITHIN_S)
        settled = True
        say("settled", **counts())
    return settled


def _say_if_read(event: str, **data: object) -> None:
    """Report an event that may be lost: scraping must not wait for a reader that has something else to do."""
    # A pipe that is writable has room for 4096 bytes, more than any such event.
    if select.select((), (sys.stdout,), (), 0)[1]:
        say(event, **data)


def _check(line: bytes) -> Spec:
    spec = msgspec.json.decode(line, type=Spec)
    if not MIN_INTERVAL_S <= spec.interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"interval_s must be {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}, not {spec.interval_s:g}")
    if not spec.timeout_s > 0:
        raise ValueError("timeout_s must be above 0")
    if not spec.timings_out and any(map(clock_of, spec.targets)):
        raise ValueError("a target /perf_metrics needs a log, timings_out")
    return spec


if __name__ == "__main__":
    sys.exit(main(_check, run))
