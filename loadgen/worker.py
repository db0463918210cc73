"""A load worker: `python -m sidelight.loadgen.worker`, one event loop that only sends, stamps and appends.

The conductor speaks JSON lines on standard input and is answered in JSON lines on standard output (`rundir.child`).
First line in: a WorkerSpec. Then commands: run, stop, exit. When standard input ends, the conductor is gone: what is in
flight is cancelled and recorded, and the worker leaves. SIGTERM does the same, but is reported as an error: a phase
that it cut short must not look like one that came to its end. SIGINT is the conductor's to judge, and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import msgspec
import uvloop

from sidelight.loadgen.driver import (
    Command,
    ExitWorker,
    LoadRun,
    Order,
    Stop,
    StopNow,
    is_share,
    run_phase,
    shared_among,
    slots,
)
from sidelight.loadgen.recorder import Read, Recorder
from sidelight.loadgen.records import PLAN_END, PlannedRequest, as_sent, decode_planned, with_secrets
from sidelight.loadgen.timer import Alarm
from sidelight.loadgen.transports import open_transport
from sidelight.loadgen.transports.lateness import PauseCounter, ReceiveStamps
from sidelight.loadgen.transports.transport import Exchange, Transport, WorkerSpec
from sidelight.rundir.child import commands, first_cause, open_input, read_spec, say
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.frames import FrameTail
from sidelight.rundir.process import raise_limit

_PLAN_POLL_S = 0.005
_SIGTERM = "SIGTERM"
_TERMINATED_CODE = 128 + signal.SIGTERM


# A session's next turn and when it is due, from the turn that has ended and what came back; None at the session's end.
Follow = Callable[[PlannedRequest, Exchange], Coroutine[None, None, tuple[PlannedRequest, int] | None]]

_decode_spec = msgspec.json.Decoder(WorkerSpec).decode
_decode_command = msgspec.json.Decoder(Command).decode


@dataclass(slots=True)
class _Tally:
    phase: str = ""
    started: int = 0
    finished: int = 0
    overdue: int = 0
    ordered_ns: int = -1
    first_ns: int = -1
    last_ns: int = -1

    def add_overdue(self, count: int) -> None:
        self.overdue += count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """The state for sending requests in a worker.

    It is the same for the worker's whole life but for the stop and the tally.
    """

    spec: WorkerSpec
    roots: list[str]
    clock: AnchoredClock
    alarm: Alarm
    transport: Transport
    recorder: Recorder
    follow: Follow | None
    stop: Stop = field(default_factory=Stop)
    tally: _Tally = field(default_factory=_Tally)

    async def send(self, planned: PlannedRequest, scheduled_ns: int, held_ns: int) -> tuple[PlannedRequest, int] | None:
        """Send one request and record it to its end, a cancellation included; return its session's next turn."""
        now_ns = self.clock.now_ns()
        tally = self.tally
        tally.started += 1
        tally.first_ns = now_ns if tally.first_ns < 0 else tally.first_ns
        exchange = Exchange(
            index=planned.index,
            scheduled_ns=now_ns if scheduled_ns < 0 else scheduled_ns,
            dispatch_ns=now_ns,
            held_ns=held_ns,
            most_bytes=self.spec.max_reply_bytes,
        )
        follow = self.follow if planned.turns else None
        if follow is not None:
            exchange.kept_body = bytearray()
        self.recorder.begin(exchange, self.roots[planned.url] + planned.path)
        try:
            async with asyncio.timeout(None if planned.leave_ns < 0 else planned.leave_ns / 1e9):
                await self.transport.perform(exchange, planned, timeout_s=self.spec.request_timeout_s)
        except TimeoutError:
            exchange.error = f"left: the client closed its connection {planned.leave_ns / 1e9:g} s after sending"
        except asyncio.CancelledError:
            exchange.error = f"cancelled: {self.stop.reason or 'the phase was ended'}"
            raise
        finally:
            self.recorder.finish(exchange)
            tally.finished += 1
            tally.last_ns = max(tally.last_ns, exchange.end_ns)
        return None if follow is None else await follow(planned, exchange)


def main() -> int:
    """Run a worker to its end; 2 when the spec is unusable, 1 when it cannot go on, 143 after SIGTERM, else 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main())


async def _main() -> int:
    lines = await open_input()
    async with contextlib.AsyncExitStack() as stack:
        try:
            spec = await read_spec(lines, _decode_spec)
            clock, alarm = AnchoredClock(offset_ns=spec.clock_offset_ns), stack.enter_context(Alarm())
            stamps, pauses = ReceiveStamps(clock), PauseCounter()
            transport = open_transport(spec, clock, stamps)
            follow = _follow(spec)
            recorder = Recorder(
                spec.out,
                clock,
                worker=spec.worker,
                stamps=stamps,
                pauses=pauses,
                read=_read(spec) if spec.redact_bodies else None,
            )
            stack.enter_context(recorder)
        except (ValueError, OSError) as error:
            say("error", message=f"unusable spec: {error}")
            return 2
        await stack.enter_async_context(transport)
        sender = _Sender(
            spec=spec, roots=spec.roots, clock=clock, alarm=alarm, transport=transport, recorder=recorder, follow=follow
        )
        gc.collect()
        gc.freeze()
        stack.enter_context(pauses)
        code = 0
        try:
            if await _obey(lines, sender) == _SIGTERM:
                say("error", message="terminated by SIGTERM")
                code = _TERMINATED_CODE
        except* OSError as errors:
            # The log cannot be written: going on would send what is not recorded.
            say("error", message=f"{spec.out}: {first_cause(errors)}")
            code = 1
    return code


def _follow(spec: WorkerSpec) -> Follow | None:
    """Return the function that finds a session's next turn, None without sessions.

    The protocols are loaded only with sessions.
    """
    if not spec.sessions:
        return None
    from sidelight.loadgen.protocols.table import PROTOCOLS  # noqa: PLC0415
    from sidelight.loadgen.turns import next_turn  # noqa: PLC0415

    return partial(next_turn, protocol=PROTOCOLS[spec.protocol])


def _read(spec: WorkerSpec) -> Read:
    """Return the function that reads replies for the log; few runs load it."""
    from sidelight.loadgen.protocols.reading.reply import read_to_log  # noqa: PLC0415
    from sidelight.loadgen.protocols.table import PROTOCOLS  # noqa: PLC0415

    return partial(read_to_log, PROTOCOLS[spec.protocol].form)


class _TerminatedError(Exception):
    """An error raised on SIGTERM."""


async def _orders(lines: asyncio.StreamReader) -> AsyncGenerator[LoadRun | StopNow | str, None]:
    """Yield the conductor's commands, and at last the reason for their end, as text."""
    try:
        async for command in commands(lines, _decode_command):
            if isinstance(command, ExitWorker):
                yield "the worker was told to leave"
                return
            yield command
        yield "the conductor is gone"
    except _TerminatedError:
        yield _SIGTERM


async def _obey(lines: asyncio.StreamReader, sender: _Sender) -> str:
    """Execute commands until they end, and return the reason for the end.

    At the end requests in flight are cancelled and recorded.
    """
    running: asyncio.Task[None] | None = None
    reason = ""
    # The exception is raised where a line is waited for, or the next is asked for.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lines.set_exception, _TerminatedError())
    async with asyncio.TaskGroup() as group:
        background = (sender.recorder.flush_forever(), sender.recorder.stat_forever(sender.alarm))
        tasks = [group.create_task(coroutine) for coroutine in background]
        say("ready")
        async for command in _orders(lines):
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
                say("error", message="a run is still going on")
        sender.stop.set(reason)
        if running is not None:
            await running
        for task in tasks:
            task.cancel()
    return reason


async def _run(command: LoadRun, sender: _Sender) -> None:
    spec, workers = sender.spec, shared_among(command, sender.spec.workers)
    sender.tally.ordered_ns = sender.clock.now_ns()
    order: Order = command
    for name in ("concurrency", "cap"):
        if (width := getattr(command, name)) is not None:
            order = msgspec.structs.replace(order, **{name: slots(width, workers=workers, worker=spec.worker)})
    try:
        tail = FrameTail(command.plan)
    except OSError as error:
        say("error", message=f"plan {command.plan}: {error.strerror}")
    else:
        with tail:
            async with contextlib.aclosing(
                _shard(tail, sender.tally, workers=workers, spec=spec, seats=command.cap)
            ) as plan:
                await run_phase(
                    plan,
                    order,
                    send=sender.send,
                    clock=sender.clock,
                    stop=sender.stop,
                    alarm=sender.alarm,
                    overdue=sender.tally.add_overdue,
                )
    sender.recorder.settle()
    # A conductor that heard of a drained phase would take what SIGTERM cut short for its natural end.
    if sender.stop.reason != _SIGTERM:
        _say_drained(sender.tally)


async def _shard(
    tail: FrameTail, tally: _Tally, *, workers: int, spec: WorkerSpec, seats: int | None
) -> AsyncGenerator[PlannedRequest, None]:
    """Yield this worker's share of a plan that may still grow.

    A worker beyond the `workers` that share it gets no requests.
    """
    stand_ins = as_sent(spec.stand_ins, is_json=spec.transport != "grpc")
    while True:
        payloads = tail.read_new()
        for payload in payloads:
            planned = decode_planned(payload)
            tally.phase = planned.phase
            if planned.index == PLAN_END:
                return
            if is_share(planned, workers=workers, worker=spec.worker, seats=seats):
                yield with_secrets(planned, stand_ins) if stand_ins else planned
        if not payloads:
            await asyncio.sleep(_PLAN_POLL_S)


def _say_drained(tally: _Tally) -> None:
    say("drained", **asdict(tally))


if __name__ == "__main__":
    sys.exit(main())
