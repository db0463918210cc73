from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import uvloop

from sidelight.loadgen.timer import Alarm, wait_until
from sidelight.rundir.clock import AnchoredClock

MS = 1_000_000


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    with Alarm() as alarm_clock:
        if not alarm_clock.precise:
            pytest.skip("there is no timerfd here")
        yield alarm_clock


async def test_no_wait_ends_early(alarm: Alarm):
    """Whatever the order in which they ask, all wake at their moment or after it, and in its order."""
    begin_ns = time.monotonic_ns()
    dues_ns = [begin_ns + wait * MS for wait in (8, 2, 5, 2, 11)]
    woken: list[int] = []

    async def wait(due_ns: int) -> None:
        await alarm.until(due_ns)
        assert time.monotonic_ns() >= due_ns
        woken.append(due_ns)

    await asyncio.gather(*map(wait, dues_ns))
    assert sorted(dues_ns) == woken


async def test_a_wait_that_is_given_up_delays_no_other(alarm: Alarm):
    """The others wake; so does one whose moment has passed."""
    begin_ns = time.monotonic_ns()
    given_up = asyncio.create_task(alarm.until(begin_ns + MS))
    waiting = asyncio.create_task(alarm.until(begin_ns + 3 * MS))
    await asyncio.sleep(0)
    given_up.cancel()
    await waiting
    await alarm.until(0)
    assert given_up.cancelled()


async def test_the_clock_waits_by_its_alarm(alarm: Alarm):
    """In the run's time, with its offset."""
    clock = AnchoredClock(offset_ns=10**18)
    due_ns = clock.now_ns() + 2 * MS
    await wait_until(clock, due_ns, alarm)
    assert clock.now_ns() >= due_ns


def test_it_works_on_the_workers_loop():
    """On uvloop, and its timer goes before the loop does or after it."""

    async def wait() -> None:
        await alarm.until(time.monotonic_ns() + MS)

    with Alarm() as alarm, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wait())
