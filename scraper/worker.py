"""The scraping process: `python -m scraper.worker`, obeying JSON lines on its standard input.

The first line is a `Spec`; `{"cmd":"settle","seconds":x}` scrapes on for that time, then once more, and says `settled`;
`{"cmd":"scrape","targets":[...],"interval_s":x}` exchanges the targets, and it says `scraping` when each was scraped
once; `{"cmd":"exit"}` or the end of input scrapes a last time and ends. In between it says `stale` of a target that no
longer answers and `fresh` when it does again. When each target is scraped is `target`'s business, what is kept `log`'s.

Where it receives spans it says `listening`, with the ports, before it is `ready`. A `settle` then also waits for the
spans of its `trace_ids`, and `settled` tells of them. What was wrong with spans is a line on standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rundir.access import Access, UnusableFile
from rundir.frames import Rotation, open_append
from scraper.hardware.sampler import record
from scraper.perf_metrics import TimingLog
from scraper.series.log import ScrapeLog
from scraper.spans.spec import SETTLE_S, CannotListen, ReceiverSpec, forward_parts, host_and_port
from scraper.targets.fetch import LIMIT_BYTES, Limits, clock_of, open_session
from scraper.targets.pool import ScrapePool
from scraper.targets.target import ScrapeConfig

if TYPE_CHECKING:
    from scraper.spans.receiver import Receiver

MIN_INTERVAL_S = 0.01  # a scrape takes milliseconds on both sides
MAX_INTERVAL_S = 86_400.0
# The conductor waits 10 s for a settled scraper, and as long for one that ends.
SETTLE_WITHIN_S = 8.0
END_WITHIN_S = 4.0
_LINE_LIMIT = 4 * 1024 * 1024  # a spec of many targets is one line


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to scrape: resolved URLs, the tick in seconds, the run's clock offset, and the log to append to.

    A URL that stands there twice is scraped once. `seed` is that of the jitter after failures. `hardware_out` is the
    log of what this machine's hardware uses; empty: it is not read. `timings_out` is the log of what `/perf_metrics` of
    TensorRT-LLM says, made only where a target is one. `spans` says where spans are received, into the log
    `spans_out`; None: nowhere. `stderr` is the file that standard error goes to; empty: where it goes already. Logs go
    on in other files by `rotation`; None: never.
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
    timings_out: str = ""
    spans: ReceiverSpec | None = None
    spans_out: str = ""
    stderr: str = ""
    rotation: Rotation | None = None


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd", tag="settle"):
    """How to settle: for so many seconds, and until the requests of these traces (hex ids) have their spans.

    Spans are waited for SETTLE_S at most; where none has ever come, for `first_span_s` at most, which is how long the
    first one may still be on its way.
    """

    seconds: _Seconds = 0
    trace_ids: list[Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]] = []
    first_span_s: _Seconds = 0


class OtherPages(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd", tag="scrape"):
    """What to scrape from now on, as in Spec."""

    targets: list[str]
    interval_s: Annotated[float, msgspec.Meta(ge=MIN_INTERVAL_S, le=MAX_INTERVAL_S)]


class Exit(msgspec.Struct, frozen=True, tag_field="cmd", tag="exit"):
    """Scrape a last time and end."""


Command = Settle | OtherPages | Exit
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


async def run(spec: Spec, commands: asyncio.StreamReader) -> None:
    """Scrape every target until told to exit. Raises an ExceptionGroup of OSError when the log cannot be written,
    of CannotListen or of UnusableFile (a certificate).
    """
    with ExitStack() as logs:
        log = ScrapeLog(spec.out, spec.rotation)
        logs.callback(log.close)
        timings = TimingLog(spec.timings_out) if any(map(clock_of, spec.targets)) else None
        if timings is not None:
            logs.callback(timings.close)
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
                    reading = record(spec.hardware_out, clock_offset_ns=spec.clock_offset_ns, stopping=stopping)
                    group.create_task(reading)
                await first
                _say({"event": "ready", **pool.counts()})
                settled = await _obey(pool, receiver, commands)
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

    log = SpanLog(spec.spans_out, spec.rotation)
    try:
        async with Receiver(spec.spans, log=log, say=partial(print, file=sys.stderr, flush=True)) as receiver:
            _say({"event": "listening", "grpc_port": receiver.grpc_port, "http_port": receiver.http_port})
            yield receiver
    finally:
        log.close()


async def _obey(pool: ScrapePool, receiver: Receiver | None, commands: asyncio.StreamReader) -> bool:
    """Follow commands until `exit` or the end of input; true if the last scrape of each target is already written."""
    settled = False
    while True:
        command = await _next(commands)
        if command is None or isinstance(command, Exit):
            return settled and command is not None
        if isinstance(command, OtherPages):
            await pool.set_targets(command.targets, command.interval_s, within_s=SETTLE_WITHIN_S)
            settled = False
            _say({"event": "scraping", **pool.counts()})
            continue
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_spans_of(receiver, command)) if receiver else None
            await asyncio.sleep(command.seconds)
            await pool.scrape_all(within_s=SETTLE_WITHIN_S)
        settled = True
        _say({"event": "settled", **pool.counts(), **({"spans": waiting.result()} if waiting else {})})


async def _spans_of(receiver: Receiver, wanted: Settle) -> dict[str, int]:
    """Wait for the spans of requests; return what was received in all, and of how many requests none came."""
    missing = len(wanted.trace_ids)
    if missing and not receiver.counts().spans and wanted.first_span_s:
        missing = await receiver.settle(wanted.first_span_s, wanted.trace_ids)
    if missing and receiver.counts().spans:
        missing = await receiver.settle(SETTLE_S, wanted.trace_ids)
    return {**msgspec.structs.asdict(receiver.counts()), "missing": missing}


def _say_if_read(event: Mapping[str, Any]) -> None:
    """Say something that may be lost: scraping must not wait for a reader that has something else to do."""
    # A pipe that is writable has room for 4096 bytes, more than any such event.
    if select.select((), (sys.stdout,), (), 0)[1]:
        _say(event)


def _say(event: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the conductor died: the end of our input says so as well
        print(json.dumps(event), flush=True)


async def _next(commands: asyncio.StreamReader) -> Command | None:
    """Read a command; nothing at the end of input. A line that is none is answered and passed over."""
    while line := await commands.readline():
        try:
            return _commands.decode(line)
        except msgspec.ValidationError:
            _say({"event": "error", "message": f"unknown command {line.decode(errors='replace').rstrip()}"})
        except msgspec.DecodeError as error:
            _say({"event": "error", "message": f"not a JSON object: {error}"})
    return None


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
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=_LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    try:
        spec = _check(await commands.readline())
        if spec.stderr:
            os.dup2(open_append(spec.stderr), sys.stderr.fileno())
    except ValueError as error:  # msgspec's errors are ValueErrors
        _say({"event": "error", "message": f"unusable spec: {error}"})
        return 2
    code = 0
    try:
        await run(spec, commands)
    except* (UnusableFile, CannotListen) as group:
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
