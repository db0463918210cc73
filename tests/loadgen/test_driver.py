from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import offsets_ns
from loadgen.clock import Clock
from loadgen.driver import Order, Stop, run_phase, slots
from loadgen.records import PlannedRequest

MS = 1_000_000


def _virtual() -> Clock:
    """The event loop's virtual time; each look at it costs a microsecond, so that waiting for it comes to an end."""
    loop, looks = asyncio.get_running_loop(), itertools.count()
    return Clock(offset_ns=0, monotonic_ns=lambda: round(loop.time() * 1e9) + 1000 * next(looks))


async def _plan(*offsets: int, then: Callable[[], object] | None = None) -> AsyncGenerator[PlannedRequest, None]:
    for index, offset_ns in enumerate(offsets):
        yield PlannedRequest(
            index=index, phase="p", workload_class="", path="/", body=b"", input_tokens=-1, max_tokens=1,
            offset_ns=offset_ns,
        )  # fmt: skip
    if then is not None:
        await then()  # a plan that is still growing


@pytest.mark.looptime
async def test_an_open_loop_keeps_its_schedule_whatever_comes_back():
    """Nobody is answered before all have been sent, and each is sent within a timer's reach of its moment."""
    clock = _virtual()
    offsets = offsets_ns("poisson", 20, seed=1, count=40).tolist()
    sent: list[tuple[int, int]] = []
    all_sent = asyncio.Event()

    async def send(_planned: PlannedRequest, due_ns: int) -> None:
        sent.append((due_ns, clock.now_ns()))
        if len(sent) == len(offsets):
            all_sent.set()
        await all_sent.wait()

    start_ns = clock.now_ns() + 50 * MS
    await run_phase(_plan(*offsets), Order(start_ns=start_ns), send=send, clock=clock, stop=Stop())
    assert [start_ns + offset for offset in offsets] == [due for due, _ in sent]
    assert all(0 <= at - due < 2 * MS for due, at in sent)


@pytest.mark.looptime
async def test_nothing_is_submitted_at_or_after_the_end():
    """Of offsets 0, 10, 20, 30 ms the last two are not before 20 ms."""
    clock, sent = _virtual(), []

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        sent.append(planned.index)

    start_ns = clock.now_ns()
    order = Order(start_ns=start_ns, until_ns=start_ns + 20 * MS)
    await run_phase(_plan(0, 10 * MS, 20 * MS, 30 * MS), order, send=send, clock=clock, stop=Stop())
    assert [0, 1] == sent


@pytest.mark.looptime
async def test_a_late_plan_is_sent_late_and_whole():
    """What was due long ago is sent at once, in order; lateness does not add up."""
    clock, sent = _virtual(), []

    async def send(planned: PlannedRequest, due_ns: int) -> None:
        sent.append((planned.index, clock.now_ns() >= due_ns))

    order = Order(start_ns=clock.now_ns() - 1000 * MS)
    await run_phase(_plan(0, 1, 2, 1001 * MS), order, send=send, clock=clock, stop=Stop())
    assert [(0, True), (1, True), (2, True), (3, True)] == sent


@pytest.mark.looptime
async def test_a_closed_loop_keeps_exactly_n_in_flight():
    """A completed request is replaced at once: all slots are full whenever one ends, until the plan is used up."""
    clock, in_flight, seen = _virtual(), 0, []

    async def send(planned: PlannedRequest, due_ns: int) -> None:
        nonlocal in_flight
        assert due_ns == -1
        in_flight += 1
        await asyncio.sleep(0.01 * (1 + planned.index % 3))
        seen.append(in_flight)
        in_flight -= 1

    order = Order(start_ns=clock.now_ns(), concurrency=4)
    await run_phase(_plan(*[-1] * 40), order, send=send, clock=clock, stop=Stop())
    assert seen[:37] == [4] * 37
    assert len(seen) == 40


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 2])
async def test_a_phase_ends_though_its_plan_does_not(concurrency: int | None):
    """At the end of the submitting time nobody waits for more of the plan."""
    clock, sent = _virtual(), []

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        sent.append(planned.index)

    order = Order(start_ns=clock.now_ns(), concurrency=concurrency, until_ns=clock.now_ns() + 50 * MS)
    await run_phase(_plan(0, 1, then=asyncio.Event().wait), order, send=send, clock=clock, stop=Stop())
    assert [0, 1] == sent


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("how", ["stop", "drain bound"])
async def test_what_is_in_flight_is_cancelled_with_the_reason(concurrency: int | None, how: str):
    """A stop and the drain bound cancel every request in flight, start no other, and name themselves."""
    clock, stop, ends = _virtual(), Stop(), []

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        try:
            if planned.index == 2 and how == "stop":
                stop.set("stopped")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append((planned.index, stop.reason))
            raise

    start_ns = clock.now_ns()
    order = Order(
        start_ns=start_ns,
        concurrency=concurrency,
        until_ns=start_ns + 10 * MS if how == "drain bound" else None,
        drain_s=0.02 if how == "drain bound" else None,
    )
    await run_phase(_plan(0, 0, 0, 10**15), order, send=send, clock=clock, stop=stop)
    reason = "stopped" if how == "stop" else "the drain bound was reached"
    assert [(0, reason), (1, reason), (2, reason)] == sorted(ends)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("concurrency", "offsets", "until_ms", "expected_ms"),
    [
        (None, [0, 30], None, 530),  # the plan's last request goes out at 30 ms
        (None, [0, 30, 900], 400, 900),  # the rest is due later, so submitting is over at 400 ms and not before
        (None, [0, 30], 400, 530),  # the plan ends before its time
        (2, [-1, -1], None, 500),  # the plan's end is known though both slots are full
        (2, [-1, -1, -1], 400, 900),  # a third waits for room until the end of the submitting time
        (3, [-1, -1], 400, 500),
    ],
)
async def test_the_drain_bound_counts_from_the_end_of_submitting(
    concurrency: int | None, offsets: list[int], until_ms: int | None, expected_ms: int
):
    """Half a second after the plan's end or `until_ns`, in open and closed loop alike; the third is never begun."""
    clock, stop, ends = _virtual(), Stop(), []
    start_ns = clock.now_ns()

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append((planned.index, stop.reason, (clock.now_ns() - start_ns) / MS))
            raise

    until_ns = None if until_ms is None else start_ns + until_ms * MS
    order = Order(start_ns=start_ns, concurrency=concurrency, until_ns=until_ns, drain_s=0.5)
    plan = _plan(*(offset * MS for offset in offsets))
    await run_phase(plan, order, send=send, clock=clock, stop=stop)
    reason = "the drain bound was reached"
    # Each look at the clock costs a microsecond, and a timer's approach a thousand looks.
    about = pytest.approx(expected_ms, abs=5)
    assert [(0, reason, about), (1, reason, about)] == sorted(ends)


@pytest.mark.looptime
async def test_a_phase_that_has_drained_does_not_wait_for_its_bound():
    """It ends with its last request, and nobody wished a stop."""
    clock, stop = _virtual(), Stop()
    start_ns = clock.now_ns()

    async def send(_planned: PlannedRequest, _due_ns: int) -> None:
        await asyncio.sleep(0.01)

    order = Order(start_ns=start_ns, until_ns=start_ns + 100_000 * MS, drain_s=1000.0)
    await run_phase(_plan(0, 200_000 * MS), order, send=send, clock=clock, stop=stop)
    assert (True, "") == (clock.now_ns() - start_ns < 50 * MS, stop.reason)


@pytest.mark.looptime
async def test_no_more_is_started_than_was_planned():
    """A concurrency of 10**9 costs no more than the three requests that are there for it."""
    clock, in_flight = _virtual(), []

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        in_flight.append(planned.index)
        await asyncio.sleep(0.01)
        tasks.append(len(asyncio.all_tasks()))

    tasks: list[int] = []
    order = Order(start_ns=clock.now_ns(), concurrency=10**9)
    await run_phase(_plan(-1, -1, -1), order, send=send, clock=clock, stop=Stop())
    assert [0, 1, 2] == in_flight
    assert max(tasks) < 10


async def test_a_worker_without_a_slot_sends_nothing():
    """Its share of a closed loop may be none; its phase ends at once."""
    clock = Clock(offset_ns=0)

    async def send(_planned: PlannedRequest, _due_ns: int) -> None:
        raise AssertionError

    order = Order(start_ns=clock.now_ns(), concurrency=0)
    await run_phase(_plan(-1), order, send=send, clock=clock, stop=Stop())


async def test_a_stop_that_was_wished_before_sends_nothing():
    """The phase ends at once."""
    clock, stop = Clock(offset_ns=0), Stop()
    stop.set("first")
    stop.set("second")

    async def send(_planned: PlannedRequest, _due_ns: int) -> None:
        raise AssertionError

    await run_phase(_plan(10**12), Order(start_ns=clock.now_ns() + 10**12), send=send, clock=clock, stop=stop)
    assert stop.reason == "first"


async def test_what_breaks_the_sender_ends_the_phase():
    """As when the log cannot be written: the error comes out."""
    clock = Clock(offset_ns=0)

    async def send(_planned: PlannedRequest, _due_ns: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ExceptionGroup) as caught:
        await run_phase(_plan(0), Order(start_ns=clock.now_ns()), send=send, clock=clock, stop=Stop())
    assert caught.group_contains(OSError, match="No space left")


@given(st.integers(0, 1000), st.integers(1, 40))
def test_slots_are_shared_evenly(concurrency: int, workers: int):
    """The shares sum to the whole and differ by one at most."""
    shares = [slots(concurrency, workers=workers, worker=worker) for worker in range(workers)]
    assert concurrency == sum(shares)
    assert max(shares) - min(shares) <= 1
