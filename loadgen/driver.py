"""When requests go out: an open loop keeps a schedule whatever comes back, a closed loop keeps N in flight.

The driver knows nothing of HTTP: it awaits `send` for each planned request. Its own lateness is not hidden: `send`
gets the moment that was due and stamps for itself when it began.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
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
    drain_until_ns  what is still in flight then is cancelled; None: waited for
    """

    start_ns: int
    concurrency: int | None = None
    until_ns: int | None = None
    drain_until_ns: int | None = None


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
    drive = _open_loop if order.concurrency is None else _closed_loop
    driving = asyncio.create_task(drive(plan, order, send=send, clock=clock))
    bound = asyncio.create_task(_wish_at_bound(order, clock, stop))
    wished = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({driving, wished}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (driving, bound, wished):
            task.cancel()
        await asyncio.wait({driving, bound, wished})
    if not driving.cancelled() and (error := driving.exception()) is not None:
        raise error


async def _wish_at_bound(order: Order, clock: Clock, stop: Stop) -> None:
    if order.drain_until_ns is not None:
        await wait_until(clock, order.drain_until_ns)
        stop.set("the drain bound was reached")


async def _open_loop(plan: AsyncIterator[PlannedRequest], order: Order, *, send: Send, clock: Clock) -> None:
    async with asyncio.TaskGroup() as group:
        while (planned := await _next(plan, order, clock)) is not None:
            due_ns = order.start_ns + planned.offset_ns
            if _over(order, due_ns):
                break
            await wait_until(clock, due_ns)
            # Behind schedule at the phase's end, as when the machine was suspended: what was due is not sent any more.
            if _over(order, clock.now_ns()):
                break
            group.create_task(send(planned, due_ns))


async def _closed_loop(plan: AsyncIterator[PlannedRequest], order: Order, *, send: Send, clock: Clock) -> None:
    turn = asyncio.Lock()  # an asynchronous generator takes one caller at a time

    async def slot() -> None:
        while True:
            async with turn:
                planned = await _next(plan, order, clock)
            if planned is None:
                return
            await send(planned, -1)

    await wait_until(clock, order.start_ns)
    async with asyncio.TaskGroup() as group:
        for _ in range(order.concurrency or 0):
            group.create_task(slot())


def _over(order: Order, at_ns: int) -> bool:
    return order.until_ns is not None and at_ns >= order.until_ns


async def _next(plan: AsyncIterator[PlannedRequest], order: Order, clock: Clock) -> PlannedRequest | None:
    """The next request, or None when the plan or the phase is over; a plan that is still growing is waited for."""
    if order.until_ns is None:
        return await anext(plan, None)
    left_ns = order.until_ns - clock.now_ns()
    if left_ns <= 0:
        return None
    try:
        async with asyncio.timeout(left_ns / 1e9):
            return await anext(plan, None)
    except TimeoutError:
        return None
