"""The scraping process: `python -m scraper.worker`, obeying JSON lines on its standard input.

The first line is a `Spec`, the others are commands (`scraper.commands`):

- `{"cmd":"settle","seconds":x}` scrapes on for that time, then once more, and says `settled`;
- `{"cmd":"scrape","targets":[...],"interval_s":x}` exchanges the targets, and says `scraping` when each was scraped;
- `{"cmd":"exit"}` or the end of input scrapes a last time and ends.

In between it says `stale` of a target that no longer answers and `fresh` when it does again. When each target is
scraped is decided in `targets.target`, what is recorded in the logs of each family.

Where it receives spans it says `listening`, with the ports, before it is `ready`. A `settle` then also waits for the
spans of its `trace_ids`, and `settled` has their counts. What was wrong with spans is a line on standard error.

On a full disk it goes on: `unwritten` says how many scrapes it could not keep and why, `written` that it can again.
A `settled` scraper scrapes no more unless it settles again or has other targets: `scrapes` are those in its log.
"""

from __future__ import annotations

import asyncio
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING

import msgspec

from rundir.access import UnusableFile
from rundir.child import commands, first_cause, open_input, read_spec, say
from rundir.frames import PatientLog, Unwritten
from rundir.printable.masking import register_url
from rundir.process import limit_errors, raise_limit
from scraper.commands import MAX_INTERVAL_S, MIN_INTERVAL_S, Command, Exit, SetTargets, Settle, Spec
from scraper.hardware.sampler import record
from scraper.perf_metrics import TimingLog
from scraper.series.log import ScrapeLog
from scraper.spans.spec import SETTLE_S, CannotListen, forward_parts, host_and_port
from scraper.targets.fetch import Limits, open_session
from scraper.targets.pool import ScrapePool
from scraper.targets.scrape import clock_of
from scraper.targets.target import ScrapeConfig

if TYPE_CHECKING:
    from scraper.spans.receiver import Receiver

# The conductor waits 10 s for a settled scraper, and as long for one that ends.
SETTLE_WITHIN_S = 8.0
END_WITHIN_S = 4.0
_decode_command = msgspec.json.Decoder(Command).decode


async def run(spec: Spec, lines: asyncio.StreamReader) -> None:
    """Scrape every target until `exit` is read. Raises an ExceptionGroup of OSError when a log cannot be made, of
    CannotListen or of UnusableFile (a certificate).
    """
    unwritten = Unwritten(_say_if_read)
    with ExitStack() as logs:
        log = PatientLog(logs.enter_context(closing(ScrapeLog(spec.out, spec.rotation))).append, unwritten)
        timings = None
        if any(map(clock_of, spec.targets)):
            timings = PatientLog(logs.enter_context(closing(TimingLog(spec.timings_out))).append, unwritten)
        async with open_session(spec.access) as session, _receiving(spec) as receiver:
            async with asyncio.TaskGroup() as group:
                config = ScrapeConfig(
                    clock_offset_ns=spec.clock_offset_ns,
                    seed=spec.seed,
                    access=spec.access,
                    limits=Limits(timeout_s=spec.timeout_s, body_bytes=spec.limit_bytes),
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

                settled = await _obey(pool, receiver, lines, counts)
                stopping.set()
                pool.stop_schedule()
            if not settled:
                await pool.scrape_all(within_s=END_WITHIN_S)


@asynccontextmanager
async def _receiving(spec: Spec) -> AsyncIterator[Receiver | None]:
    """Receive spans for as long as the block lasts, where that was asked for."""
    if spec.spans is None:
        yield None
        return
    # grpcio and the messages take a tenth of a second to import: who receives nothing need not wait for them.
    from scraper.spans.log import SpanLog  # noqa: PLC0415
    from scraper.spans.receiver import Receiver  # noqa: PLC0415

    with closing(SpanLog(spec.spans_out, spec.rotation)) as log:
        async with Receiver(spec.spans, log=log, say=_say_to_people) as receiver:
            say("listening", grpc_port=receiver.grpc_port, http_port=receiver.http_port)
            yield receiver


async def _obey(
    pool: ScrapePool, receiver: Receiver | None, lines: asyncio.StreamReader, counts: Callable[[], dict[str, int]]
) -> bool:
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
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_spans_of(receiver, command)) if receiver else None
            await asyncio.sleep(command.seconds)
            await pool.scrape_all(within_s=SETTLE_WITHIN_S)
            pool.stop_schedule()
        settled = True
        say("settled", **counts(), **({"spans": waiting.result()} if waiting else {}))
    return settled


async def _spans_of(receiver: Receiver, wanted: Settle) -> dict[str, int]:
    """Wait for the spans of requests; return what was received in all, and of how many requests none came."""
    missing = len(wanted.trace_ids)
    if missing and not receiver.counts().spans and wanted.first_span_s:
        missing = await receiver.settle(wanted.first_span_s, wanted.trace_ids)
    if missing and receiver.counts().spans:
        missing = await receiver.settle(SETTLE_S, wanted.trace_ids)
    return {**msgspec.structs.asdict(receiver.counts()), "missing": missing}


def _say_if_read(event: str, **data: object) -> None:
    """Report an event that may be lost: scraping must not wait for a reader that has something else to do."""
    # A pipe that is writable has room for 4096 bytes, more than any such event.
    if select.select((), (sys.stdout,), (), 0)[1]:
        say(event, **data)


def _say_to_people(text: str) -> None:
    """Write a line to standard error, which is a file of the same disk as the logs, and may be full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _check(line: bytes) -> Spec:
    spec = msgspec.json.decode(line, type=Spec)
    if not MIN_INTERVAL_S <= spec.interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"interval_s must be {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}, not {spec.interval_s:g}")
    if not spec.timeout_s > 0:
        raise ValueError("timeout_s must be above 0")
    if not spec.timings_out and any(map(clock_of, spec.targets)):
        raise ValueError("a target /perf_metrics needs a log, timings_out")
    if spec.spans is not None:
        for address in filter(None, (spec.spans.grpc, spec.spans.http)):
            host_and_port(address)
        if spec.spans.forward:
            forward_parts(spec.spans.forward)
        if not spec.spans_out:
            raise ValueError("spans need a log, spans_out")
    return spec


async def _main() -> int:
    lines = await open_input()
    try:
        spec = await read_spec(lines, _check)
    except ValueError as error:  # msgspec's errors are ValueErrors
        say("error", message=f"unusable spec: {error}")
        return 2
    except OSError as error:
        say("error", message=f"cannot write {error.filename}: {error.strerror}")
        return 1
    code = 0
    try:
        await run(spec, lines)
    except* (UnusableFile, CannotListen) as errors:
        say("error", message=f"unusable spec: {first_cause(errors)}")
        code = 2
    except* OSError as errors:
        say("error", message=f"cannot write {spec.out}: {first_cause(errors)}")
        code = 1
    return code


def main() -> int:
    """Run the worker and return its exit code; the conductor decides what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_limit()
    limit_errors()
    return asyncio.run(_main())


if __name__ == "__main__":
    sys.exit(main())
