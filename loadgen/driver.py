"""Dispatch of requests by an open or a closed loop.

An open loop keeps a schedule whatever comes back, a closed loop keeps N in flight.

The driver knows nothing of HTTP: it awaits `send` for each planned request. Its own lateness is not hidden: `send`
gets the moment that was due and stamps for itself when it began.

A session is driven from its first turn to its last: each later turn is due its think time after the previous one's end.
In an open loop only the first turns are scheduled; in a closed loop a session holds its slot, think time included.

`Command` is what the conductor sends to a worker after its WorkerSpec, one JSON line each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.timer import Alarm, wait_until
from sidelight.rundir.clock import AnchoredClock

_REST_S = 1.0  # for what is left of a plan to be counted
# Sends one request that was due at the given moment (-1: nothing was scheduled), and that the cap held back for a time
# in ns, and returns when it has ended: with the session's next turn and the moment when that is due, or with None
# where nothing follows. A failed request raises nothing; a cancellation is recorded and raised again.
Send = Callable[[PlannedRequest, int, int], Coroutine[None, None, tuple[PlannedRequest, int] | None]]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The order to drive one phase.

    start_ns        when it begins; offsets count from here
    concurrency     slots of a closed loop (0: none for this worker); None for an open loop
    cap             most requests of an open loop in flight (0: none for this worker); one that is due then is
                    held back until one has ended, in the order in which they were due. None: any number
    until_ns        nothing is submitted at or after this moment; None: to the plan's end
    drain_s         what is still in flight so long after submitting was over (the end of the plan and of its sessions'
                    turns, or until_ns) is cancelled; None: waited for
    """

    start_ns: int
    concurrency: int | None = None
    cap: int | None = None
    until_ns: int | None = None
    drain_s: float | None = None


class LoadRun(Order, frozen=True, kw_only=True, tag_field="cmd", tag="run", forbid_unknown_fields=True):
    """Drive a plan, with the concurrency of all workers together."""

    plan: str


class StopNow(msgspec.Struct, frozen=True, tag_field="cmd", tag="stop", forbid_unknown_fields=True):
    """A command to cancel the requests in flight and report drained."""


class ExitWorker(msgspec.Struct, frozen=True, tag_field="cmd", tag="exit", forbid_unknown_fields=True):
    """Stop and leave."""


Command = LoadRun | StopNow | ExitWorker


class Seats:
    """The seats of a cap, taken in the order in which they were asked for; None: any number."""

    def __init__(self, count: int | None, clock: AnchoredClock) -> None:
        self._free, self._clock = count, clock
        self._queue: deque[asyncio.Future[int]] = deque()

    async def take(self) -> int:
        """Wait for a seat; return for how long all were taken, in nanoseconds: 0 where one was free."""
        if self._free is None:
            return 0
        if self._free > 0:
            self._free -= 1
            return 0
        asked_ns = self._clock.now_ns()
        seat: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(seat)
        try:
            # At least 1: it was held, however short that was.
            return max(1, await seat - asked_ns)
        except asyncio.CancelledError:
            if not seat.cancelled():
                self.free()
            raise

    def free(self) -> None:
        """Give a seat to the longest waiter, or return it."""
        if self._free is None:
            return
        while self._queue:
            seat = self._queue.popleft()
            if not seat.cancelled():
                seat.set_result(self._clock.now_ns())
                return
        self._free += 1


class Stop:
    """The wish to end a phase early, with its reason; the first one counts."""

    def __init__(self) -> None:
        self._wish = asyncio.Event()
        self.reason = ""

    def set(self, reason: str) -> None:
        """Ask for the end."""
        if not self._wish.is_set():
            self.reason = reason
            self._wish.set()

    async def wait(self) -> None:
        """Wait until the end is requested."""
        await self._wish.wait()


def is_closed_loop(*, concurrency: int | None, rate: float | str | None, trace: object) -> bool:
    """Return whether the replies alone determine the time of the next request.

    With a schedule, the concurrency is a cap.
    """
    return concurrency is not None and rate is None and trace is None


def slots(concurrency: int, *, workers: int, worker: int) -> int:
    """Return a worker's share of a closed loop's slots; shares differ by one at most and sum to the whole."""
    return concurrency // workers + (worker < concurrency % workers)


def is_share(planned: PlannedRequest, *, workers: int, worker: int, seats: int | None = None) -> bool:
    """Return whether a request belongs to this worker. Requests, or whole sessions, are dealt out in turn.

    With `seats`, those of a cap, each seat has its turn: a worker gets requests in proportion to its `slots`.
    The indices of first turns are as far apart as their sessions are long, so that sessions go by their own number.
    """
    number = planned.index if planned.session < 0 else planned.session
    return (number if seats is None else number % seats) % workers == worker


def shared_among(order: Order, workers: int) -> int:
    """Return the number of workers that share a plan. One without a slot would keep its share from being sent."""
    return min([workers, *(width for width in (order.concurrency, order.cap) if width is not None)])


async def run_phase(
    plan: AsyncIterator[PlannedRequest],
    order: Order,
    *,
    send: Send,
    clock: AnchoredClock,
    stop: Stop,
    alarm: Alarm | None = None,
    overdue: Callable[[int], None] = lambda _: None,
) -> None:
    """Drive one phase until all that it sent has ended; a wish to stop, or the drain bound, cancels the rest.

    `alarm` wakes at a moment to within microseconds, where there is one and time is real. `overdue` is called with how
    many requests of an open loop were due before its end and are not sent, because this process was late. Whatever
    `send` raises ends the phase and is raised, as an ExceptionGroup.
    """
    driving = asyncio.create_task(_drive(plan, order, send=send, clock=clock, stop=stop, alarm=alarm, overdue=overdue))
    wished = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({driving, wished}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (driving, wished):
            task.cancel()
        await asyncio.wait({driving, wished})
    if not driving.cancelled() and (error := driving.exception()) is not None:
        raise error


@dataclass(slots=True, kw_only=True, eq=False)
class _Phase:
    """One phase while it is driven.

    seats       those of the cap
    unfinished  requests that are held back and sessions that have turns yet to submit
    cut_short   a session's turn was due after the phase
    """

    plan: AsyncIterator[PlannedRequest]
    order: Order
    send: Send
    clock: AnchoredClock
    alarm: Alarm | None
    overdue: Callable[[int], None]
    group: asyncio.TaskGroup
    seats: Seats
    unfinished: int = 0
    cut_short: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self) -> PlannedRequest | None:
        """Return the next request, None when the plan or the phase is over; wait for a plan that still grows."""
        if self.is_over():
            return None
        try:
            async with asyncio.timeout(self.left_s()):
                planned = await anext(self.plan, None)
        except TimeoutError:
            return None
        if planned is not None and planned.turns:
            self.unfinished += 1
        return planned

    async def submit(self, planned: PlannedRequest, due_ns: int) -> None:
        """Send a request and the turns that follow from it; those that would be due after the phase are not sent."""
        until_ns, unfinished = self.order.until_ns, bool(planned.turns)
        try:
            while True:
                if unfinished and not planned.turns:
                    unfinished = False
                    self._finish()
                following = await self._send(planned, due_ns)
                if following is None:
                    return
                planned, due_ns = following
                if until_ns is not None and due_ns >= until_ns:
                    self.cut_short = True
                    return
                await wait_until(self.clock, due_ns, self.alarm)
                if self.is_over():
                    return
        finally:
            if unfinished:
                self._finish()

    async def _send(self, planned: PlannedRequest, due_ns: int) -> tuple[PlannedRequest, int] | None:
        """Send a request once it has a seat; not at all where that comes after the phase."""
        self.unfinished += 1
        try:
            held_ns = await self.seats.take()
        finally:
            self._finish()
        try:
            if held_ns and self.is_over():
                return None
            return await self.send(planned, due_ns, held_ns)
        finally:
            self.seats.free()

    async def all_submitted(self) -> int:
        """Wait until all requests and later turns are submitted, or the phase is over.

        Returns when submitting was over, which is to come if the rest is due after the phase.
        """
        await asyncio.sleep(0)  # what was begun last asks for its seat
        with suppress(TimeoutError):
            async with asyncio.timeout(self.left_s()):
                while self.unfinished:
                    self.finished.clear()
                    await self.finished.wait()
        until_ns = self.order.until_ns
        return until_ns if self.cut_short and until_ns is not None else self.clock.now_ns()

    def is_over(self) -> bool:
        return self.order.until_ns is not None and self.clock.now_ns() >= self.order.until_ns

    def left_s(self) -> float | None:
        """Return the time left for submitting requests, as a timeout; None: without end."""
        return None if self.order.until_ns is None else (self.order.until_ns - self.clock.now_ns()) / 1e9

    def _finish(self) -> None:
        self.unfinished -= 1
        if not self.unfinished:
            self.finished.set()


async def _drive(
    plan: AsyncIterator[PlannedRequest],
    order: Order,
    *,
    send: Send,
    clock: AnchoredClock,
    stop: Stop,
    alarm: Alarm | None,
    overdue: Callable[[int], None],
) -> None:
    loop = asyncio.get_running_loop()
    bound: asyncio.TimerHandle | None = None
    try:
        async with asyncio.TaskGroup() as group:
            seats = Seats(order.cap, clock)
            phase = _Phase(
                plan=plan,
                order=order,
                send=send,
                clock=clock,
                alarm=alarm,
                overdue=overdue,
                group=group,
                seats=seats,
            )
            if order.concurrency is None:
                over_ns = await _open_loop(phase)
            else:
                over_ns = await _closed_loop(phase)
            over_ns = max(over_ns, await phase.all_submitted())
            if order.drain_s is not None:
                left_s = order.drain_s - (clock.now_ns() - over_ns) / 1e9
                bound = loop.call_later(max(0.0, left_s), stop.set, "the drain bound was reached")
    finally:
        if bound is not None:
            bound.cancel()


async def _open_loop(phase: _Phase) -> int:
    """Submit each request at its moment; return when submitting was over, which is to come if the rest is due later."""
    order, clock = phase.order, phase.clock
    while (planned := await phase.take()) is not None:
        due_ns = order.start_ns + planned.offset_ns
        if order.until_ns is not None and due_ns >= order.until_ns:
            phase.unfinished -= bool(planned.turns)
            return order.until_ns
        await wait_until(clock, due_ns, phase.alarm)
        # Behind schedule at the phase's end, as when the machine was suspended: what was due is not sent any more.
        if phase.is_over():
            phase.overdue(1)
            break
        phase.group.create_task(phase.submit(planned, due_ns))
    if phase.is_over():
        phase.overdue(await _due(phase))
    return clock.now_ns()


async def _due(phase: _Phase) -> int:
    """Count the remaining requests that were due before the end of the phase.

    Only the written part of the plan is read.
    """
    count = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_REST_S):
            async for planned in phase.plan:
                if phase.order.start_ns + planned.offset_ns >= (phase.order.until_ns or 0):
                    break
                count += 1
    return count


async def _closed_loop(phase: _Phase) -> int:
    """Keep the slots full; return when submitting was over.

    A slot is started only for a request that is there, so a concurrency beyond the plan costs nothing. Once all have
    been started, one request is taken ahead of them: the plan's end is known while every slot is busy.
    """
    turn = asyncio.Lock()  # an asynchronous generator takes one caller at a time
    ahead: list[PlannedRequest] = []
    taken = asyncio.Event()

    async def take() -> PlannedRequest | None:
        async with turn:
            if not ahead:
                return await phase.take()
            taken.set()
            return None if phase.is_over() else ahead.pop()

    async def slot(planned: PlannedRequest | None) -> None:
        while planned is not None:
            await phase.submit(planned, -1)
            planned = await take()

    await wait_until(phase.clock, phase.order.start_ns, phase.alarm)
    free = phase.order.concurrency or 0
    while phase.order.concurrency and (planned := await take()) is not None:
        if free:
            free -= 1
            phase.group.create_task(slot(planned))
            # One turn of the event loop each: replies are read between the first submission and the last.
            await asyncio.sleep(0)
            continue
        ahead.append(planned)
        taken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(phase.left_s()):
                await taken.wait()
    return phase.clock.now_ns()
