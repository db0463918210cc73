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

from sidelight.loadgen.driver import Order, Send, Stop, is_share, run_phase, slots
from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.loadgen.records import PlannedRequest
from sidelight.rundir.clock import AnchoredClock

MS = 1_000_000


def _virtual(look_ns: int = 1000) -> AnchoredClock:
    """The event loop's virtual time; each look at it costs a microsecond, so that waiting for it comes to an end."""
    loop, looks = asyncio.get_running_loop(), itertools.count()
    return AnchoredClock(offset_ns=0, monotonic_ns=lambda: round(loop.time() * 1e9) + look_ns * next(looks))


def _request(index: int, offset_ns: int = -1, think_ns: int = -1, *turns: PlannedRequest) -> PlannedRequest:
    return PlannedRequest(index=index, offset_ns=offset_ns, think_ns=think_ns, turns=turns)


async def _planned(*requests: PlannedRequest) -> AsyncGenerator[PlannedRequest, None]:
    for request in requests:
        yield request


class _Server:
    """Answers each request after a time of its own, and goes on with the session; notes what was sent when."""

    def __init__(self, took_s: Callable[[PlannedRequest], float] = lambda _: 0.0, *, look_ns: int = 1000) -> None:
        self.clock, self.stop, self._took_s = _virtual(look_ns), Stop(), took_s
        self.start_ns = self.clock.now_ns()
        self.sent: list[tuple[int, int, int]] = []
        self.cut: list[tuple[int, str, int]] = []
        self.overdue: list[int] = []

    @property
    def indices(self) -> list[int]:
        return [index for index, _, _ in self.sent]

    def at_ms(self, moment_ns: int) -> int:
        """Milliseconds of virtual time; looking at it costs microseconds, and waiting for it a thousand looks."""
        return moment_ns if moment_ns < 0 else round((moment_ns - self.start_ns) / MS)

    async def send(self, planned: PlannedRequest, due_ns: int, _held_ns: int = 0) -> tuple[PlannedRequest, int] | None:
        self.sent.append((planned.index, self.at_ms(due_ns), self.at_ms(self.clock.now_ns())))
        try:
            await asyncio.sleep(self._took_s(planned))
        except asyncio.CancelledError:
            self.cut.append((planned.index, self.stop.reason, self.at_ms(self.clock.now_ns())))
            raise
        if not planned.turns:
            return None
        following = msgspec.structs.replace(planned.turns[0], turns=planned.turns[1:])
        return following, self.clock.now_ns() + following.think_ns

    async def drive(
        self,
        plan: AsyncGenerator[PlannedRequest, None],
        send: Send | None = None,
        *,
        start_ms: int = 0,
        until_ms: int | None = None,
        **order: object,
    ) -> None:
        """Drive a plan to its end; times count from when the server was made."""
        until_ns = None if until_ms is None else self.start_ns + until_ms * MS
        phase_order = Order(start_ns=self.start_ns + start_ms * MS, until_ns=until_ns, **order)
        send, overdue = send or self.send, self.overdue.append
        await run_phase(plan, phase_order, send=send, clock=self.clock, stop=self.stop, overdue=overdue)


def _near(*sent: tuple[int, int, int]) -> list[object]:
    """What was sent, times to within 3 ms; -1 stands for none."""
    return [(index, due if due < 0 else pytest.approx(due, abs=3), pytest.approx(at, abs=3)) for index, due, at in sent]


async def _plan(*offsets: int, then: Callable[[], object] | None = None) -> AsyncGenerator[PlannedRequest, None]:
    for index, offset_ns in enumerate(offsets):
        yield _request(index, offset_ns)
    if then is not None:
        await then()  # a plan that is still growing


@pytest.mark.looptime
async def test_nothing_is_submitted_at_or_after_the_end():
    """Of offsets 0, 10, 20, 30 ms the last two are not before 20 ms."""
    server = _Server()
    await server.drive(_plan(0, 10 * MS, 20 * MS, 30 * MS), until_ms=20)
    assert ([0, 1], 0) == (server.indices, sum(server.overdue))


@pytest.mark.looptime
async def test_what_was_due_while_the_process_stood_still_is_counted():
    """It stands still while the first is sent, to behind the end of the phase; the last was not due before that."""
    server = _Server()

    async def stand_still(planned: PlannedRequest, due_ns: int, held_ns: int) -> None:
        await server.send(planned, due_ns, held_ns)
        for _ in range(100_000):
            server.clock.now_ns()

    await server.drive(_plan(0, 10 * MS, 20 * MS, 30 * MS), stand_still, until_ms=25)
    assert ([0], 2) == (server.indices, sum(server.overdue))


@pytest.mark.looptime
async def test_a_late_plan_is_sent_late_and_whole():
    """What was due long ago is sent at once, in order; lateness does not add up."""
    server = _Server()
    await server.drive(_plan(0, 1, 2, 1001 * MS), start_ms=-1000)
    assert [0, 1, 2, 3] == server.indices
    assert all(at >= due for _, due, at in server.sent)


@pytest.mark.looptime
async def test_a_closed_loop_keeps_exactly_n_in_flight():
    """A completed request is replaced at once: all slots are full whenever one ends, until the plan is used up."""
    in_flight, seen = 0, []

    async def send(planned: PlannedRequest, due_ns: int, _held_ns: int = 0) -> None:
        nonlocal in_flight
        assert due_ns == -1
        in_flight += 1
        await asyncio.sleep(0.01 * (1 + planned.index % 3))
        seen.append(in_flight)
        in_flight -= 1

    await _Server().drive(_plan(*[-1] * 40), send, concurrency=4)
    assert seen[:37] == [4] * 37
    assert len(seen) == 40


@pytest.mark.looptime
async def test_a_closed_loop_fills_its_slots_one_turn_of_the_event_loop_each():
    """What is ready meanwhile, as replies to the first, has its turn before the last is sent: stamps stay right."""
    happened: list[str] = []

    async def send(planned: PlannedRequest, _due_ns: int, _held_ns: int = 0) -> None:
        happened.append(f"sent {planned.index}")
        asyncio.get_running_loop().call_soon(happened.append, f"read {planned.index}")
        await asyncio.sleep(0.01)

    await _Server().drive(_plan(-1, -1, -1), send, concurrency=3)
    assert happened.index("read 0") < happened.index("sent 2")


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 2])
async def test_a_phase_ends_though_its_plan_does_not(concurrency: int | None):
    """At the end of the submitting time the driver does not wait for more of the plan."""
    server = _Server()
    await server.drive(_plan(0, 1, then=asyncio.Event().wait), concurrency=concurrency, until_ms=50)
    assert [0, 1] == server.indices


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 3])
async def test_what_is_in_flight_is_cancelled_with_the_reason(concurrency: int | None):
    """A stop cancels every request in flight, starts no other, and names itself."""
    server = _Server(lambda _: 1e9)

    async def send(planned: PlannedRequest, due_ns: int, _held_ns: int = 0) -> None:
        if planned.index == 2:
            server.stop.set("stopped")
        await server.send(planned, due_ns)

    await server.drive(_plan(0, 0, 0, 10**15), send, concurrency=concurrency)
    assert [(0, "stopped"), (1, "stopped"), (2, "stopped")] == sorted(cut[:2] for cut in server.cut)


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
    server = _Server(lambda _: 1e9)
    plan = _plan(*(offset * MS for offset in offsets))
    await server.drive(plan, concurrency=concurrency, until_ms=until_ms, drain_s=0.5)
    reason, about = "the drain bound was reached", pytest.approx(expected_ms, abs=5)
    assert [(0, reason, about), (1, reason, about)] == sorted(server.cut)


@pytest.mark.looptime
async def test_a_phase_that_has_drained_does_not_wait_for_its_bound():
    """It ends with its last request, without a stop."""
    server = _Server(lambda _: 0.01)
    await server.drive(_plan(0, 200_000 * MS), until_ms=100_000, drain_s=1000.0)
    assert (True, "") == (server.clock.now_ns() - server.start_ns < 50 * MS, server.stop.reason)


@pytest.mark.looptime
async def test_no_more_is_started_than_was_planned():
    """A concurrency of 10**9 costs no more than the three requests that are there for it."""
    server, tasks = _Server(lambda _: 0.01), []

    async def send(planned: PlannedRequest, due_ns: int, _held_ns: int = 0) -> None:
        await server.send(planned, due_ns)
        tasks.append(len(asyncio.all_tasks()))

    await server.drive(_plan(-1, -1, -1), send, concurrency=10**9)
    assert [0, 1, 2] == server.indices
    assert max(tasks) < 10


@pytest.mark.looptime
async def test_a_worker_without_a_slot_sends_nothing():
    """Its share of a closed loop may be none; its phase ends at once."""
    server = _Server()
    await server.drive(_plan(-1), concurrency=0)
    assert [] == server.sent


@pytest.mark.looptime
async def test_a_stop_that_was_wished_before_sends_nothing():
    """The phase ends at once."""
    server = _Server()
    server.stop.set("first")
    server.stop.set("second")
    await server.drive(_plan(10**12))
    assert ([], "first") == (server.sent, server.stop.reason)


@pytest.mark.looptime
async def test_what_breaks_the_sender_ends_the_phase():
    """As when the log cannot be written: the error comes out."""

    async def send(_planned: PlannedRequest, _due_ns: int, _held_ns: int = 0) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ExceptionGroup) as caught:
        await _Server().drive(_plan(0), send)
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
        Arrival(kind="burst", rate_per_s=50),
        Arrival(kind="uniform", rate_per_s=0, ramp_to_per_s=100),
    ],
    ids=lambda arrival: arrival.kind,
)
async def test_a_server_that_hangs_for_three_seconds_moves_no_submission(arrival: Arrival):
    """A wait that ends between 1 s and 4 s ends at 4 s; every request goes out at its moment all the same."""
    offsets = schedule(arrival, seed=3, duration_s=5).tolist()
    late_ns: list[int] = []
    server = _Server(look_ns=10_000)

    async def send(_planned: PlannedRequest, due_ns: int, _held_ns: int = 0) -> None:
        late_ns.append(server.clock.now_ns() - due_ns)
        into_s = (server.clock.now_ns() - server.start_ns) / 1e9
        await asyncio.sleep(4 - into_s if 1 <= into_s < 4 else 0.01)

    await server.drive(_plan(*offsets), send)
    assert len(offsets) == len(late_ns)
    assert all(0 <= late < 2 * MS for late in late_ns)


@pytest.mark.looptime
async def test_submissions_at_500_a_second_are_accepted_as_poisson():
    """By Kolmogorov and Smirnov, from the moments at which they were made and not from those at which they were due."""
    server, sent = _Server(look_ns=10_000), []

    async def send(_planned: PlannedRequest, _due_ns: int, _held_ns: int = 0) -> None:
        sent.append(server.clock.now_ns())
        await asyncio.sleep(0.1)

    await server.drive(_plan(*schedule(Arrival(kind="poisson", rate_per_s=500), seed=42, count=1000).tolist()), send)
    assert stats.kstest(np.diff(sent) / 1e9, stats.expon(scale=1 / 500).cdf).pvalue > 0.01


@pytest.mark.looptime
async def test_an_open_loop_schedules_first_turns_and_the_others_follow_their_think_time():
    """A session's second turn is due 200 ms after its first has ended, whatever else is scheduled."""
    server = _Server(lambda planned: 0.1 if planned.index < 10 else 0.5)
    sessions = _planned(
        _request(0, 0, -1, _request(1, think_ns=200 * MS), _request(2, think_ns=0)),
        _request(10, 50 * MS, -1, _request(11, think_ns=200 * MS)),
        _request(20, 250 * MS),
    )
    await server.drive(sessions)
    expected = _near((0, 0, 0), (10, 50, 50), (20, 250, 250), (1, 300, 300), (2, 400, 400), (11, 750, 750))
    assert expected == server.sent


@pytest.mark.looptime
async def test_a_closed_loop_holds_the_slot_until_the_session_is_over():
    """With one slot the next request waits for the last turn of the session before it, think time included."""
    server = _Server(lambda _: 0.1)
    await server.drive(_planned(_request(0, -1, -1, _request(1, think_ns=300 * MS)), _request(2)), concurrency=1)
    assert _near((0, -1, 0), (1, 400, 400), (2, -1, 500)) == server.sent


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 2])
async def test_turns_that_would_be_due_after_the_end_are_not_sent(concurrency: int | None):
    """Submitting ends at 250 ms: the second turn at 200 ms goes out, the third would be due at 400 ms."""
    server = _Server(lambda _: 0.1)
    later = [_request(index, think_ns=100 * MS) for index in (1, 2)]
    await server.drive(_planned(_request(0, 0, -1, *later)), concurrency=concurrency, until_ms=250)
    assert [0, 1] == server.indices
    assert server.clock.now_ns() - server.start_ns < 400 * MS


@pytest.mark.looptime
async def test_a_session_whose_turn_failed_is_over():
    """Nothing follows where `send` names nothing; the slot is free for the next."""
    sent: list[int] = []

    async def send(planned: PlannedRequest, _due_ns: int, _held_ns: int = 0) -> None:
        sent.append(planned.index)

    plan = _planned(_request(0, -1, -1, _request(1, think_ns=0)), _request(2))
    await _Server().drive(plan, send, concurrency=1, drain_s=1.0)
    assert [0, 2] == sent


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize(("until_ms", "expected_ms"), [(None, 1500), (700, 1200)])
async def test_the_drain_bound_counts_from_the_last_turn(
    concurrency: int | None, until_ms: int | None, expected_ms: int
):
    """A session's last turn is sent at 1 s; it, and a stream that never ends, are cut off half a second later.

    Where submitting ends at 700 ms, that turn is not sent any more, and the stream is cut off at 1.2 s.
    """
    server = _Server(lambda planned: 0.1 if planned.turns else 1e9)
    plan = _planned(_request(0, 0), _request(1, 0, -1, _request(2, think_ns=900 * MS)))
    await server.drive(plan, concurrency=concurrency, until_ms=until_ms, drain_s=0.5)
    about = pytest.approx(expected_ms, abs=5)
    reason = "the drain bound was reached"
    assert [(index, reason, about) for index in ([0, 2] if until_ms is None else [0])] == sorted(server.cut)


@given(st.lists(st.integers(1, 5), max_size=60), st.integers(1, 9))
def test_every_session_is_one_workers_and_they_are_shared_evenly(lengths: list[int], workers: int):
    """Whatever their lengths; likewise requests that belong to no session."""
    first = list(itertools.accumulate(lengths, initial=0))
    sessions = [msgspec.structs.replace(_request(at), session=number) for number, at in enumerate(first[:-1])]
    for plan in (sessions, [_request(index) for index in range(len(lengths))]):
        shares = [
            [request for request in plan if is_share(request, workers=workers, worker=worker)]
            for worker in range(workers)
        ]
        assert sorted(request.index for request in plan) == sorted(
            request.index for share in shares for request in share
        )
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 40), st.integers(1, 10))
def test_requests_of_a_cap_are_dealt_by_seat(cap: int, workers: int):
    """A worker's share of as many requests as there are seats is its share of the seats."""
    workers = min(workers, cap)
    for worker in range(workers):
        dealt = [index for index in range(cap) if is_share(_request(index), workers=workers, worker=worker, seats=cap)]
        assert slots(cap, workers=workers, worker=worker) == len(dealt)


@pytest.mark.looptime
async def test_a_cap_holds_back_what_is_due_until_a_seat_is_free():
    """Of four due at 0, 10, 20 and 30 ms that take 100 ms, two are in flight; the others go out in order, as seats
    come free, and know for how long the cap held them.
    """
    server, held_ms = _Server(lambda _: 0.1), {}

    async def send(planned: PlannedRequest, due_ns: int, held_ns: int) -> None:
        held_ms[planned.index] = held_ns / MS
        await server.send(planned, due_ns)

    await server.drive(_plan(0, 10 * MS, 20 * MS, 30 * MS), send, cap=2)
    assert _near((0, 0, 0), (1, 10, 10), (2, 20, 100), (3, 30, 110)) == server.sent
    assert {0: 0, 1: 0, 2: pytest.approx(80, abs=8), 3: pytest.approx(80, abs=8)} == held_ms


@pytest.mark.looptime
async def test_a_cap_that_is_never_reached_holds_nothing_back():
    """The schedule is that of an open loop."""
    server, held = _Server(lambda _: 0.005), []

    async def send(planned: PlannedRequest, due_ns: int, held_ns: int) -> None:
        held.append(held_ns)
        await server.send(planned, due_ns)

    await server.drive(_plan(0, 10 * MS, 20 * MS), send, cap=1)
    assert _near((0, 0, 0), (1, 10, 10), (2, 20, 20)) == server.sent
    assert [0, 0, 0] == held


@pytest.mark.looptime
async def test_what_is_still_held_at_the_end_of_submitting_is_not_sent():
    """A seat comes free at 100 ms, submitting ends at 50 ms; the drain counts from then."""
    server = _Server(lambda _: 0.1)
    await server.drive(_plan(0, 10 * MS), cap=1, until_ms=50, drain_s=0.2)
    assert [0] == server.indices
    assert "" == server.stop.reason


@pytest.mark.looptime
async def test_the_drain_bound_counts_from_when_the_last_held_request_was_sent():
    """Two due at 0 on one seat: the second is sent at 100 ms, hangs, and is cancelled half a second later."""
    server = _Server(lambda planned: 0.1 if planned.index == 0 else 1e9)
    await server.drive(_plan(0, 0), cap=1, drain_s=0.5)
    assert [(1, "the drain bound was reached", pytest.approx(600, abs=5))] == server.cut


@pytest.mark.looptime
async def test_a_turn_waits_for_a_seat_and_leaves_it_while_it_thinks():
    """A cap is of requests in flight: while the session thinks from 100 to 150 ms, the other request is sent."""
    server = _Server(lambda _: 0.1)
    await server.drive(_planned(_request(0, 0, -1, _request(1, think_ns=50 * MS)), _request(2, 10 * MS)), cap=1)
    assert _near((0, 0, 0), (2, 10, 100), (1, 150, 200)) == server.sent


@pytest.mark.looptime
@pytest.mark.parametrize("cap", [1, 3])
async def test_a_stop_ends_what_waits_for_a_seat(cap: int):
    """Nothing that was held back is sent any more, and no seat is lost on the way."""
    server = _Server(lambda _: 1e9)

    async def send(planned: PlannedRequest, due_ns: int, held_ns: int) -> None:
        asyncio.get_running_loop().call_later(0.1, server.stop.set, "stopped")
        await server.send(planned, due_ns, held_ns)

    await server.drive(_plan(*[0] * 8), send, cap=cap)
    assert list(range(cap)) == server.indices
    assert cap == len(server.cut)
