"""The scraping process: `python -m scraper.worker`, obeying JSON lines on its standard input.

The first line is a `Spec`; `{"cmd":"settle","seconds":x}` scrapes on for that time, then once more, and says `settled`;
`{"cmd":"exit"}` or the end of input scrapes a last time and ends. In between it says `stale` of a target that no longer
answers and `fresh` when it does again. When each target is scraped is `target`'s business, what is kept `log`'s.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from scraper.access import Access, UnusableFile, bare
from scraper.endpoint import LIMIT_BYTES, Limits, open_session
from scraper.hardware import record
from scraper.log import ScrapeLog
from scraper.target import Schedule, Target

MIN_INTERVAL_S = 0.01  # a scrape takes milliseconds on both sides
MAX_INTERVAL_S = 86_400.0
# The conductor waits 10 s for a settled scraper, and 5 s for one that ends.
SETTLE_WITHIN_S = 8.0
END_WITHIN_S = 4.0
_LINE_LIMIT = 4 * 1024 * 1024  # a spec of many targets is one line


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to scrape: resolved URLs, the tick in seconds, the run's clock offset, and the log to append to.

    A URL that stands there twice is scraped once. `seed` is that of the jitter after failures. `hardware_out` is the
    log of what this machine's hardware uses; empty: it is not read. `stderr` is the file that standard error goes to;
    empty: where it goes already.
    """

    targets: list[str]
    interval_s: float
    clock_offset_ns: int
    out: str
    timeout_s: float = 5.0
    limit_bytes: int = LIMIT_BYTES
    access: Access = Access()
    seed: int = 0
    hardware_out: str = ""
    stderr: str = ""


async def run(spec: Spec, commands: asyncio.StreamReader) -> None:
    """Scrape every target until told to exit. Raises an ExceptionGroup of OSError when the log cannot be written."""
    schedule = Schedule(interval_ns=round(spec.interval_s * 1e9), clock_offset_ns=spec.clock_offset_ns, seed=spec.seed)
    limits = Limits(timeout_s=spec.timeout_s, body_bytes=spec.limit_bytes)
    log = ScrapeLog(spec.out)
    try:
        async with open_session(spec.access) as session:
            targets = [
                Target(url, spec.access, schedule=schedule, limits=limits, session=session, log=log)
                for url in {bare(url): url for url in spec.targets}.values()
            ]
            async with asyncio.TaskGroup() as group:
                first = group.create_task(_scrape_all(targets, schedule, within_s=SETTLE_WITHIN_S))
                # Whoever has answered goes on: a target that hangs delays only our word that all are ready.
                ticking = [group.create_task(target.tick(_say_if_read)) for target in targets]
                stopping = asyncio.Event()
                if spec.hardware_out:
                    reading = record(spec.hardware_out, clock_offset_ns=spec.clock_offset_ns, stopping=stopping)
                    group.create_task(reading)
                await first
                _say({"event": "ready", **_counts(targets)})
                settled = await _obey(targets, schedule, commands)
                stopping.set()
                for task in ticking:
                    task.cancel()
            if not settled:
                await _scrape_all(targets, schedule, within_s=END_WITHIN_S)
    finally:
        log.close()


async def _obey(targets: Sequence[Target], schedule: Schedule, commands: asyncio.StreamReader) -> bool:
    """Follow commands until `exit` or the end of input; true if the last scrape of each target is already written."""
    settled = False
    while True:
        command = await _read_line(commands)
        if command is None or command.get("cmd") == "exit":
            return settled and command is not None
        seconds = command.get("seconds", 0)
        if command.get("cmd") == "settle" and isinstance(seconds, int | float) and 0 <= seconds <= 3600:
            await asyncio.sleep(seconds)
            await _scrape_all(targets, schedule, within_s=SETTLE_WITHIN_S)
            settled = True
            _say({"event": "settled", **_counts(targets)})
        else:
            _say({"event": "error", "message": f"unknown command {json.dumps(command)}"})


async def _scrape_all(targets: Sequence[Target], schedule: Schedule, *, within_s: float) -> None:
    """Scrape every target now, at a tick that none of them has answered: the first such one, also if it is to come."""
    this_ns = schedule.now_ns() // schedule.interval_ns * schedule.interval_ns
    tick_ns = max([this_ns, *(target.last_tick_ns + schedule.interval_ns for target in targets)])
    async with asyncio.TaskGroup() as group:
        for target in targets:
            group.create_task(target.scrape(tick_ns, within_s=within_s))


def _counts(targets: Sequence[Target]) -> dict[str, int]:
    return {
        "ok": sum(target.ok for target in targets),
        "failed": sum(target.failed for target in targets),
        "skipped": sum(target.skipped for target in targets),
        "stale": sum(target.stale for target in targets),
    }


def _say_if_read(event: Mapping[str, Any]) -> None:
    """Say something that may be lost: scraping must not wait for a reader that has something else to do."""
    # A pipe that is writable has room for 4096 bytes, more than any such event.
    if select.select((), (sys.stdout,), (), 0)[1]:
        _say(event)


def _say(event: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the conductor died: the end of our input says so as well
        print(json.dumps(event), flush=True)


async def _read_line(commands: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read one JSON object; nothing at the end of input. A line that is none is answered and passed over."""
    while line := await commands.readline():
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            _say({"event": "error", "message": f"not a JSON object: {error}"})
    return None


def _check(line: bytes) -> Spec:
    spec = msgspec.json.decode(line, type=Spec)
    if not MIN_INTERVAL_S <= spec.interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"interval_s must be {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}, not {spec.interval_s:g}")
    if not spec.timeout_s > 0:
        raise ValueError("timeout_s must be above 0")
    return spec


async def _main() -> int:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=_LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    try:
        spec = _check(await commands.readline())
        if spec.stderr:
            os.dup2(os.open(spec.stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), sys.stderr.fileno())
    except ValueError as error:  # msgspec's errors are ValueErrors
        _say({"event": "error", "message": f"unusable spec: {error}"})
        return 2
    code = 0
    try:
        await run(spec, commands)
    except* UnusableFile as group:
        _say({"event": "error", "message": f"unusable spec: {_cause(group)}"})
        code = 2
    except* OSError as group:
        _say({"event": "error", "message": f"cannot write {spec.out}: {_cause(group)}"})
        code = 1
    return code


def _cause(group: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first


def main() -> int:
    """Run the worker and return its exit code; the conductor decides what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_main())


if __name__ == "__main__":
    sys.exit(main())
