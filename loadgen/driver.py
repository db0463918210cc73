"""When requests go out: an open loop keeps a schedule whatever comes back, a closed loop keeps N in flight.

The driver knows nothing of HTTP: it awaits `send` for each planned request. Its own lateness is not hidden: `send`
gets the moment that was due and stamps for itself when it began.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass

from loadgen.clock import Clock, wait_until
from loadgen.records import PlannedRequest

# Sends one request that was due at the given moment (-1: nothing was scheduled) and returns when it has ended. A
# failed request is no exception; a cancellation is recorded and raised again.
Send = Callable[[PlannedRequest, int], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How one phase is to be driven.

    start_ns        when it begins; offsets count from here
    concurrency     slots of a closed loop (0: none for this worker); None for an open loop
    until_ns        nothing is submitted at or after this moment; None: to the plan's end
    drain_s         what is still in flight so long after submitting was over (the plan's end or until_ns) is cancelled;
                    None: waited for
    """

    start_ns: int
    concurrency: int | None = None
    until_ns: int | None = None
    drain_s: float | None = None


class Stop:
    """The wish to end a phase early, with its reason; the first one counts."""

    def __init__(self) -> None:
        self._wish = asyncio.Event()
        self.reason = ""

    def set(self, reason: str) -> None:
        """Wish the end."""
        if not self._wish.is_set():
            self.reason = reason
            self._wish.set()

    async def wait(self) -> None:
        """Return when the end is wished."""
        await self._wish.wait()


def slots(concurrency: int, *, workers: int, worker: int) -> int:
    """A worker's share of a closed loop's slots; the shares differ by one at most and sum to the whole."""
    return concurrency // workers + (worker < concurrency % workers)


async def run_phase(plan: AsyncIterator[PlannedRequest], order: Order, *, send: Send, clock: Clock, stop: Stop) -> None:
    """Drive one phase until all that it sent has ended; a wish to stop, or the drain bound, cancels the rest.

    Whatever `send` raises ends the phase and is raised, as an ExceptionGroup.
    """
    driving = asyncio.create_task(_drive(plan, order, send=send, clock=clock, stop=stop))
    wished = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({driving, wished}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (driving, wished):
            task.cancel()
        await asyncio.wait({driving, wished})
    if not driving.cancelled() and (error := driving.exception()) is not None:
        raise error


async def _drive(plan: AsyncIterator[PlannedRequest], order: Order, *, send: Send, clock: Clock, stop: Stop) -> None:
    loop = asyncio.get_running_loop()
    bound: asyncio.TimerHandle | None = None
    try:
        async with asyncio.TaskGroup() as group:
            if order.concurrency is None:
                over_ns = await _open_loop(plan, order, send=send, clock=clock, group=group)
            else:
                over_ns = await _closed_loop(plan, order, send=send, clock=clock, group=group)
            if order.drain_s is not None:
                left_s = order.drain_s - (clock.now_ns() - over_ns) / 1e9
                bound = loop.call_later(max(0.0, left_s), stop.set, "the drain bound was reached")
    finally:
        if bound is not None:
            bound.cancel()


async def _open_loop(
    plan: AsyncIterator[PlannedRequest], order: Order, *, send: Send, clock: Clock, group: asyncio.TaskGroup
) -> int:
    """Submit each request at its moment; return when submitting was over, which is to come if the rest is due later."""
    while (planned := await _next(plan, order, clock)) is not None:
        due_ns = order.start_ns + planned.offset_ns
        if order.until_ns is not None and due_ns >= order.until_ns:
            return order.until_ns
        await wait_until(clock, due_ns)
        # Behind schedule at the phase's end, as when the machine was suspended: what was due is not sent any more.
        if _is_over(order, clock):
            break
        group.create_task(send(planned, due_ns))
    return clock.now_ns()


async def _closed_loop(
    plan: AsyncIterator[PlannedRequest], order: Order, *, send: Send, clock: Clock, group: asyncio.TaskGroup
) -> int:
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
                return await _next(plan, order, clock)
            taken.set()
            return None if _is_over(order, clock) else ahead.pop()

    async def slot(planned: PlannedRequest | None) -> None:
        while planned is not None:
            await send(planned, -1)
            planned = await take()

    await wait_until(clock, order.start_ns)
    free = order.concurrency or 0
    while order.concurrency and (planned := await take()) is not None:
        if free:
            free -= 1
            group.create_task(slot(planned))
            continue
        ahead.append(planned)
        taken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_left_s(order, clock)):
                await taken.wait()
    return clock.now_ns()


async def _next(plan: AsyncIterator[PlannedRequest], order: Order, clock: Clock) -> PlannedRequest | None:
    """The next request, or None when the plan or the phase is over; a plan that is still growing is waited for."""
    if _is_over(order, clock):
        return None
    try:
        async with asyncio.timeout(_left_s(order, clock)):
            return await anext(plan, None)
    except TimeoutError:
        return None


def _is_over(order: Order, clock: Clock) -> bool:
    return order.until_ns is not None and clock.now_ns() >= order.until_ns


def _left_s(order: Order, clock: Clock) -> float | None:
    """How long requests may still be submitted, as a timeout; None: without end."""
    return None if order.until_ns is None else (order.until_ns - clock.now_ns()) / 1e9
