"""A load worker: `python -m loadgen.worker`, one event loop that only sends, stamps and appends.

The conductor speaks JSON lines on standard input and is answered in JSON lines on standard output. First line in: a
WorkerSpec. Then commands: run, stop, exit. When standard input ends, the conductor is gone: what is in flight is
cancelled and recorded, and the worker leaves. SIGTERM does the same, but is told as an error: a phase that it cut short
must not look like one that came to its end. SIGINT is the conductor's to judge, and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field, replace
from urllib.parse import urlsplit

import msgspec

from loadgen.clock import Clock
from loadgen.driver import Order, Stop, run_phase, slots
from loadgen.frames import FrameTail, decode_planned
from loadgen.pool import Origin, Pool, origin_of
from loadgen.recorder import Recorder
from loadgen.records import PLAN_END, PlannedRequest, request_id, traceparent
from loadgen.transport import Exchange

_PLAN_POLL_S = 0.005
_RESOLVE_S = 2.0
_MAX_LINE_BYTES = 1 << 20
_SIGTERM = "SIGTERM"
_TERMINATED_CODE = 128 + signal.SIGTERM


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told once. `url` is the server's root, with or without /v1; the plan's paths go behind it."""

    worker: int
    workers: int
    run_id: str
    clock_offset_ns: int
    url: str
    headers: dict[str, str]
    out: str
    request_timeout_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers:
            raise ValueError(f"there is no worker {self.worker} of {self.workers}")


class Run(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd", tag="run", forbid_unknown_fields=True):
    """Drive a plan; its fields are those of driver.Order, with the concurrency of all workers together."""

    plan: str
    start_ns: int
    concurrency: int | None = None
    until_ns: int | None = None
    drain_s: float | None = None


class StopNow(msgspec.Struct, frozen=True, tag_field="cmd", tag="stop"):
    """Cancel what is in flight and report drained."""


class Exit(msgspec.Struct, frozen=True, tag_field="cmd", tag="exit"):
    """Stop and leave."""


_decode_spec = msgspec.json.Decoder(WorkerSpec).decode
_decode_command = msgspec.json.Decoder(Run | StopNow | Exit).decode


@dataclass(slots=True)
class _Tally:
    phase: str = ""
    started: int = 0
    finished: int = 0
    first_ns: int = -1
    last_ns: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """Everything that sending takes; the same for the worker's whole life but for the stop and the tally."""

    spec: WorkerSpec
    origin: Origin
    prefix: str
    head: str
    clock: Clock
    pool: Pool
    recorder: Recorder
    stop: Stop = field(default_factory=Stop)
    tally: _Tally = field(default_factory=_Tally)

    async def send(self, planned: PlannedRequest, scheduled_ns: int) -> None:
        """Send one request and record it to its end, a cancellation included."""
        now_ns = self.clock.now_ns()
        tally = self.tally
        tally.started += 1
        tally.first_ns = now_ns if tally.first_ns < 0 else tally.first_ns
        exchange = Exchange(
            index=planned.index, scheduled_ns=now_ns if scheduled_ns < 0 else scheduled_ns, dispatch_ns=now_ns
        )
        self.recorder.begin(exchange, self.origin.url + self.prefix + planned.path)
        try:
            await self.pool.perform(exchange, self._request(planned), timeout_s=self.spec.request_timeout_s)
        except asyncio.CancelledError:
            exchange.error = f"cancelled: {self.stop.reason or 'the phase was ended'}"
            raise
        finally:
            self.recorder.finish(exchange)
            tally.finished += 1
            tally.last_ns = max(tally.last_ns, exchange.end_ns)

    def _request(self, planned: PlannedRequest) -> bytes:
        run_id, index = self.spec.run_id, planned.index
        head = (
            f"POST {self.prefix}{planned.path} HTTP/1.1\r\n{self.head}X-Request-Id: {request_id(run_id, index)}\r\n"
            f"traceparent: {traceparent(run_id, index)}\r\nContent-Length: {len(planned.body)}\r\n\r\n"
        )
        return head.encode() + planned.body


def main() -> int:
    """Run a worker to its end; 2 when the spec is unusable, 1 when it cannot go on, 143 after SIGTERM, else 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_main())


async def _main() -> int:
    lines = await _standard_input()
    try:
        spec = _decode_spec(await lines.readline())
        origin, head = origin_of(spec.url), _fixed_head(spec)
        clock = Clock(offset_ns=spec.clock_offset_ns)
        recorder = Recorder(spec.out, clock, worker=spec.worker)
    except (ValueError, OSError) as error:
        _say({"event": "error", "message": f"worker specification: {error}"})
        return 2
    with recorder:
        async with Pool(origin, clock) as pool:
            prefix = urlsplit(spec.url).path.rstrip("/").removesuffix("/v1")
            sender = _Sender(
                spec=spec, origin=origin, prefix=prefix, head=head, clock=clock, pool=pool, recorder=recorder
            )
            code = 0
            # A name that does not resolve is every request's own error.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_RESOLVE_S):
                    await pool.resolve()
            gc.collect()
            gc.freeze()
            try:
                if await _obey(lines, sender) == _SIGTERM:
                    _say({"event": "error", "message": "terminated by SIGTERM"})
                    code = _TERMINATED_CODE
            except* OSError as errors:
                # The log cannot be written: going on would send what nobody records.
                _say({"event": "error", "message": f"{spec.out}: {_innermost(errors)}"})
                code = 1
    return code


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fixed_head(spec: WorkerSpec) -> str:
    headers = {
        "Host": origin_of(spec.url).authority,
        "User-Agent": "sidelight",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
        "Connection": "keep-alive",
        "Content-Type": "application/json",
    }
    given = {name.lower() for name in spec.headers}
    lines = {name: value for name, value in headers.items() if name.lower() not in given} | spec.headers
    for name, value in lines.items():
        if not name or any(character in name + value for character in "\r\n\0"):
            raise ValueError(f"header {name!r} is empty or holds a line break")
        if not (name + value).isascii():
            raise ValueError(f"header {name!r} is not ASCII")
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items())


class _TerminatedError(Exception):
    """SIGTERM came."""


async def _commands(lines: asyncio.StreamReader) -> AsyncGenerator[Run | StopNow | str, None]:
    """What the conductor orders, and at last, as text, why there is no more; a line that is no command is answered."""
    try:
        while line := await lines.readline():
            try:
                command = _decode_command(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _say({"event": "error", "message": f"command: {error}"})
                continue
            if isinstance(command, Exit):
                yield "the worker was told to leave"
                return
            yield command
        yield "the conductor is gone"
    except _TerminatedError:
        yield _SIGTERM


async def _obey(lines: asyncio.StreamReader, sender: _Sender) -> str:
    """Take commands until there are no more, cancel and record what is in flight, and return why it ended."""
    running: asyncio.Task[None] | None = None
    reason = ""
    # Whoever waits for a line, or asks for the next, gets the exception.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lines.set_exception, _TerminatedError())
    async with asyncio.TaskGroup() as group:
        background = (sender.recorder.flush_forever(), sender.recorder.stat_forever())
        tasks = [group.create_task(coroutine) for coroutine in background]
        _say({"event": "ready"})
        async for command in _commands(lines):
            idle = running is None or running.done()
            if isinstance(command, str):
                reason = command
            elif isinstance(command, StopNow):
                if idle:
                    _say_drained(_Tally())
                sender.stop.set("stopped")
            elif idle:
                sender = replace(sender, stop=Stop(), tally=_Tally())
                running = group.create_task(_run(command, sender))
            else:
                _say({"event": "error", "message": "a run is still going on"})
        sender.stop.set(reason)
        if running is not None:
            await running
        for task in tasks:
            task.cancel()
    return reason


async def _run(command: Run, sender: _Sender) -> None:
    spec, concurrency = sender.spec, command.concurrency
    if concurrency is not None:
        concurrency = slots(concurrency, workers=spec.workers, worker=spec.worker)
    order = Order(
        start_ns=command.start_ns,
        concurrency=concurrency,
        until_ns=command.until_ns,
        drain_s=command.drain_s,
    )
    try:
        tail = FrameTail(command.plan)
    except OSError as error:
        _say({"event": "error", "message": f"plan {command.plan}: {error.strerror}"})
    else:
        with tail:
            async with contextlib.aclosing(_shard(tail, spec, sender.tally)) as plan:
                await run_phase(plan, order, send=sender.send, clock=sender.clock, stop=sender.stop)
    # A conductor that heard of a drained phase would take what SIGTERM cut short for its natural end.
    if sender.stop.reason != _SIGTERM:
        _say_drained(sender.tally)


async def _shard(tail: FrameTail, spec: WorkerSpec, tally: _Tally) -> AsyncGenerator[PlannedRequest, None]:
    """This worker's requests of a plan that may still be growing."""
    while True:
        payloads = tail.read_new()
        for payload in payloads:
            planned = decode_planned(payload)
            tally.phase = planned.phase
            if planned.index == PLAN_END:
                return
            if planned.index % spec.workers == spec.worker:
                yield planned
        if not payloads:
            await asyncio.sleep(_PLAN_POLL_S)


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say_drained(tally: _Tally) -> None:
    _say({"event": "drained", **asdict(tally)})


def _say(event: dict[str, str | int]) -> None:
    try:
        print(json.dumps(event), flush=True)
    except OSError:
        # Nobody listens any more; the end of standard input will say so too. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
