from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loadgen.arrivals import Arrival, schedule
from loadgen.clock import Clock
from loadgen.driver import Order, Stop, is_share, run_phase, slots
from loadgen.records import PlannedRequest

MS = 1_000_000


def _virtual(look_ns: int = 1000) -> Clock:
    """The event loop's virtual time; each look at it costs a microsecond, so that waiting for it comes to an end."""
    loop, looks = asyncio.get_running_loop(), itertools.count()
    return Clock(offset_ns=0, monotonic_ns=lambda: round(loop.time() * 1e9) + look_ns * next(looks))


def _request(index: int, offset_ns: int = -1, think_ns: int = -1, *turns: PlannedRequest) -> PlannedRequest:
    return PlannedRequest(
        index=index, phase="p", workload_class="", path="/", body=b"", input_tokens=-1, max_tokens=1,
        offset_ns=offset_ns, think_ns=think_ns, turns=turns,
    )  # fmt: skip


async def _planned(*requests: PlannedRequest) -> AsyncGenerator[PlannedRequest, None]:
    for request in requests:
        yield request


class _Server:
    """Answers each request after a time of its own, and goes on with the session; tells what was sent when."""

    def __init__(self, clock: Clock, *, took_s: Callable[[PlannedRequest], float]) -> None:
        self._clock, self._took_s = clock, took_s
        self.start_ns = clock.now_ns()
        self.sent: list[tuple[int, int, int]] = []

    def at_ms(self, moment_ns: int) -> int:
        """Milliseconds of virtual time; looking at it costs microseconds, and waiting for it a thousand looks."""
        return moment_ns if moment_ns < 0 else round((moment_ns - self.start_ns) / MS)

    async def send(self, planned: PlannedRequest, due_ns: int) -> tuple[PlannedRequest, int] | None:
        self.sent.append((planned.index, self.at_ms(due_ns), self.at_ms(self._clock.now_ns())))
        await asyncio.sleep(self._took_s(planned))
        if not planned.turns:
            return None
        following = msgspec.structs.replace(planned.turns[0], turns=planned.turns[1:])
        return following, self._clock.now_ns() + following.think_ns


def _near(*sent: tuple[int, int, int]) -> list[object]:
    """What was sent, times to within 3 ms; -1 is no time."""
    return [(index, due if due < 0 else pytest.approx(due, abs=3), pytest.approx(at, abs=3)) for index, due, at in sent]


async def _plan(*offsets: int, then: Callable[[], object] | None = None) -> AsyncGenerator[PlannedRequest, None]:
    for index, offset_ns in enumerate(offsets):
        yield _request(index, offset_ns)
    if then is not None:
        await then()  # a plan that is still growing


@pytest.mark.looptime
async def test_an_open_loop_keeps_its_schedule_whatever_comes_back():
    """Nobody is answered before all have been sent, and each is sent within a timer's reach of its moment."""
    clock = _virtual()
    offsets = schedule(Arrival(kind="poisson", rate_per_s=20), seed=1, count=40).tolist()
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
async def test_a_closed_loop_fills_its_slots_one_turn_of_the_event_loop_each():
    """What is ready meanwhile, as replies to the first, has its turn before the last is sent: stamps stay right."""
    happened: list[str] = []

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        happened.append(f"sent {planned.index}")
        asyncio.get_running_loop().call_soon(happened.append, f"read {planned.index}")
        await asyncio.sleep(0.01)

    clock = _virtual()
    await run_phase(
        _plan(-1, -1, -1), Order(start_ns=clock.now_ns(), concurrency=3), send=send, clock=clock, stop=Stop()
    )
    assert happened.index("read 0") < happened.index("sent 2")


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


@pytest.mark.looptime
@pytest.mark.parametrize(
    "arrival",
    [
        Arrival(kind="poisson", rate_per_s=50),
        Arrival(kind="gamma", rate_per_s=50, burstiness=0.3),
        Arrival(kind="burst", rate_per_s=50, on_s=0.5, off_s=0.5),
        Arrival(kind="uniform", rate_per_s=0, ramp="linear", ramp_to_per_s=100),
    ],
    ids=lambda arrival: arrival.kind,
)
async def test_a_server_that_hangs_for_three_seconds_moves_no_submission(arrival: Arrival):
    """Whoever asks between 1 s and 4 s is answered at 4 s; every request goes out at its moment all the same."""
    clock = _virtual(look_ns=10_000)
    offsets = schedule(arrival, seed=3, duration_s=5).tolist()
    late_ns: list[int] = []
    start_ns = clock.now_ns()

    async def send(_planned: PlannedRequest, due_ns: int) -> None:
        late_ns.append(clock.now_ns() - due_ns)
        into_s = (clock.now_ns() - start_ns) / 1e9
        await asyncio.sleep(4 - into_s if 1 <= into_s < 4 else 0.01)

    await run_phase(_plan(*offsets), Order(start_ns=start_ns), send=send, clock=clock, stop=Stop())
    assert len(offsets) == len(late_ns)
    assert all(0 <= late < 2 * MS for late in late_ns)


@pytest.mark.looptime
async def test_submissions_at_500_a_second_are_accepted_as_poisson():
    """By Kolmogorov and Smirnov, from the moments at which they were made and not from those at which they were due."""
    clock, sent = _virtual(look_ns=10_000), []

    async def send(_planned: PlannedRequest, _due_ns: int) -> None:
        sent.append(clock.now_ns())
        await asyncio.sleep(0.1)

    offsets = schedule(Arrival(kind="poisson", rate_per_s=500), seed=42, count=2000).tolist()
    await run_phase(_plan(*offsets), Order(start_ns=clock.now_ns()), send=send, clock=clock, stop=Stop())
    assert stats.kstest(np.diff(sent) / 1e9, stats.expon(scale=1 / 500).cdf).pvalue > 0.01


@pytest.mark.looptime
async def test_an_open_loop_schedules_first_turns_and_the_others_follow_their_think_time():
    """A session's second turn is due 200 ms after its first has ended, whatever else is scheduled."""
    clock = _virtual()
    server = _Server(clock, took_s=lambda planned: 0.1 if planned.index < 10 else 0.5)
    sessions = _planned(
        _request(0, 0, -1, _request(1, think_ns=200 * MS), _request(2, think_ns=0)),
        _request(10, 50 * MS, -1, _request(11, think_ns=200 * MS)),
        _request(20, 250 * MS),
    )
    await run_phase(sessions, Order(start_ns=server.start_ns), send=server.send, clock=clock, stop=Stop())
    expected = _near((0, 0, 0), (10, 50, 50), (20, 250, 250), (1, 300, 300), (2, 400, 400), (11, 750, 750))
    assert expected == server.sent


@pytest.mark.looptime
async def test_a_closed_loop_holds_the_slot_until_the_session_is_over():
    """With one slot the next request waits for the last turn of the session before it, think time included."""
    clock = _virtual()
    server = _Server(clock, took_s=lambda _: 0.1)
    sessions = _planned(_request(0, -1, -1, _request(1, think_ns=300 * MS)), _request(2))
    order = Order(start_ns=server.start_ns, concurrency=1)
    await run_phase(sessions, order, send=server.send, clock=clock, stop=Stop())
    assert _near((0, -1, 0), (1, 400, 400), (2, -1, 500)) == server.sent


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 2])
async def test_turns_that_would_be_due_after_the_end_are_not_sent(concurrency: int | None):
    """Submitting ends at 250 ms: the second turn at 200 ms goes out, the third would be due at 400 ms."""
    clock = _virtual()
    server = _Server(clock, took_s=lambda _: 0.1)
    later = [_request(index, think_ns=100 * MS) for index in (1, 2)]
    order = Order(start_ns=server.start_ns, concurrency=concurrency, until_ns=server.start_ns + 250 * MS)
    await run_phase(_planned(_request(0, 0, -1, *later)), order, send=server.send, clock=clock, stop=Stop())
    assert [0, 1] == [index for index, _, _ in server.sent]
    assert clock.now_ns() - server.start_ns < 400 * MS


@pytest.mark.looptime
async def test_a_session_whose_turn_failed_is_over():
    """Nothing follows where `send` names nothing; the slot is free for the next."""
    clock, sent = _virtual(), []

    async def send(planned: PlannedRequest, _due_ns: int) -> None:
        sent.append(planned.index)

    plan = _planned(_request(0, -1, -1, _request(1, think_ns=0)), _request(2))
    order = Order(start_ns=clock.now_ns(), concurrency=1, drain_s=1.0)
    await run_phase(plan, order, send=send, clock=clock, stop=Stop())
    assert [0, 2] == sent


@pytest.mark.looptime
@pytest.mark.parametrize(("concurrency", "barrier"), [(None, False), (3, False), (3, True)])
@pytest.mark.parametrize(("until_ms", "expected_ms"), [(None, 1500), (700, 1200)])
async def test_the_drain_bound_counts_from_the_last_turn(
    concurrency: int | None, barrier: bool, until_ms: int | None, expected_ms: int
):
    """A session's last turn is sent at 1 s; it, and a stream that never ends, are cut off half a second later.

    Where submitting ends at 700 ms, that turn is not sent any more, and the stream is cut off at 1.2 s.
    """
    clock, stop, cut = _virtual(), Stop(), []
    server = _Server(clock, took_s=lambda planned: 0.1 if planned.turns else 1e9)

    async def send(planned: PlannedRequest, due_ns: int) -> tuple[PlannedRequest, int] | None:
        try:
            return await server.send(planned, due_ns)
        except asyncio.CancelledError:
            cut.append((planned.index, stop.reason, server.at_ms(clock.now_ns())))
            raise

    plan = _planned(_request(0, 0), _request(1, 0, -1, _request(2, think_ns=900 * MS)))
    until_ns = None if until_ms is None else server.start_ns + until_ms * MS
    order = Order(
        start_ns=server.start_ns, concurrency=concurrency, barrier=barrier, until_ns=until_ns, drain_s=0.5
    )  # fmt: skip
    await run_phase(plan, order, send=send, clock=clock, stop=stop)
    about = pytest.approx(expected_ms, abs=5)
    reason = "the drain bound was reached"
    assert [(index, reason, about) for index in ([0, 2] if until_ms is None else [0])] == sorted(cut)


@pytest.mark.looptime
async def test_a_barrier_releases_its_requests_together_round_by_round():
    """Three at a time, all due at one moment; the next three when the slowest has ended, then what is left."""
    clock = _virtual()
    server = _Server(clock, took_s=lambda planned: 0.1 * (1 + planned.index % 3))
    start_ns = server.start_ns + 50 * MS
    dues: dict[int, set[int]] = {}

    async def send(planned: PlannedRequest, due_ns: int) -> None:
        dues.setdefault(planned.index // 3, set()).add(due_ns)
        await server.send(planned, due_ns)

    order = Order(start_ns=start_ns, concurrency=3, barrier=True)
    await run_phase(_plan(*[-1] * 8), order, send=send, clock=clock, stop=Stop())
    rounds = [(index, *[50 + 300 * (index // 3)] * 2) for index in range(8)]
    assert _near(*rounds) == server.sent
    assert [1, 1, 1] == [len(round_dues) for round_dues in dues.values()]
    assert {start_ns} == dues[0]


@pytest.mark.looptime
async def test_a_barrier_waits_until_a_round_is_complete():
    """A plan that is still growing holds up its round, not half of it."""
    clock = _virtual()
    server = _Server(clock, took_s=lambda _: 0.01)

    async def growing() -> AsyncGenerator[PlannedRequest, None]:
        for index in range(4):
            await asyncio.sleep(0.1)
            yield _request(index)

    order = Order(start_ns=server.start_ns, concurrency=2, barrier=True)
    await run_phase(growing(), order, send=server.send, clock=clock, stop=Stop())
    assert [200, 200, 400, 400] == pytest.approx([at for _, _, at in server.sent], abs=3)


@pytest.mark.looptime
async def test_a_barrier_starts_no_round_at_the_end():
    """A round of 100 ms, and 250 ms in all: three rounds, and no more is waited for than they take."""
    clock = _virtual()
    server = _Server(clock, took_s=lambda _: 0.1)
    order = Order(start_ns=server.start_ns, concurrency=2, barrier=True, until_ns=server.start_ns + 250 * MS)
    await run_phase(_plan(*[-1] * 100), order, send=server.send, clock=clock, stop=Stop())
    assert list(range(6)) == [index for index, _, _ in server.sent]


@given(st.lists(st.integers(1, 5), max_size=60), st.integers(1, 9))
def test_every_session_is_one_workers_and_they_are_shared_evenly(lengths: list[int], workers: int):
    """Whatever their lengths; likewise requests that belong to no session."""
    first = list(itertools.accumulate(lengths, initial=0))
    sessions = [msgspec.structs.replace(_request(at), session=number) for number, at in enumerate(first[:-1])]
    for plan in (sessions, [_request(index) for index in range(len(lengths))]):
        shares = [[one for one in plan if is_share(one, workers=workers, worker=worker)] for worker in range(workers)]
        assert sorted(one.index for one in plan) == sorted(one.index for share in shares for one in share)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
