from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.transports import lateness
from sidelight.rundir.clock import AnchoredClock

lates_ns = st.integers(0, 10**13)


@given(lates_ns)
def test_a_lateness_lies_within_its_bucket(late_ns: int):
    """From the bucket's begin on, and before its end."""
    begin_ns, end_ns = lateness.bucket_bounds(lateness.bucket_index(late_ns))
    assert begin_ns <= late_ns < end_ns


def test_the_buckets_follow_on_each_other():
    """Each begins where the one before ends; 4 an octave, so none of those in between is wider than a quarter."""
    bounds = [lateness.bucket_bounds(index) for index in range(lateness.BUCKETS)]
    assert [end for _, end in bounds[:-1]] == [begin for begin, _ in bounds[1:]]
    assert (0, math.inf) == (bounds[0][0], bounds[-1][1])
    assert all(end <= 1.25 * begin for begin, end in bounds[1:-1])


def test_a_negative_lateness_counts_as_none():
    """It is counted in the first bucket."""
    assert lateness.bucket_index(-1) == 0


@given(st.lists(lates_ns, min_size=1), st.floats(0, 1))
def test_a_quantile_is_never_too_small_nor_off_by_more_than_its_bucket(lates: list[int], q: float):
    """Between the true quantile (nearest rank) and the end of that value's bucket, and at most the largest value."""
    counts = [0] * lateness.BUCKETS
    for late_ns in lates:
        counts[lateness.bucket_index(late_ns)] += 1
    true_ns = sorted(lates)[max(0, math.ceil(q * len(lates)) - 1)]
    got_ns = lateness.quantile_ns(counts, q, max_ns=max(lates))
    assert true_ns <= got_ns <= lateness.bucket_bounds(lateness.bucket_index(true_ns))[1]
    assert got_ns <= max(lates)


def test_a_quantile_of_nothing_is_missing():
    """NaN, not zero."""
    assert math.isnan(lateness.quantile_ns([0] * lateness.BUCKETS, 0.5))


def test_histograms_of_several_workers_add_up():
    """Bucket by bucket; a worker without one adds nothing."""
    counts = [0] * lateness.BUCKETS
    counts[3] = 2
    assert [0, 0, 0, 4] == lateness.add_counts([counts, (), counts])[:4]


def _timespec(wall_ns: int) -> bytes:
    return lateness.TIMESPEC.pack(*divmod(wall_ns, 1_000_000_000))


@dataclass(slots=True)
class Machine:
    """A machine whose two clocks stand still but when a test moves them."""

    monotonic_ns: int = 10**15
    wall_ns: int = 10**18

    def stamps(self, ahead_ns: int = 0) -> lateness.ReceiveStamps:
        """Return the stamps of a run whose clock is ahead of the wall clock."""
        offset_ns = self.wall_ns - self.monotonic_ns + ahead_ns
        return lateness.ReceiveStamps(AnchoredClock(offset_ns=offset_ns, monotonic_ns=lambda: self.monotonic_ns))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        stopped = Machine()
        patch.setattr(lateness.time, "time_ns", lambda: stopped.wall_ns)
        yield stopped


@given(st.integers(-(10**9), 10**9))
def test_a_kernel_stamp_becomes_one_of_the_runs_clock(machine: Machine, ahead_ns: int):
    """Whatever the run's clock is ahead of the wall clock; a stamp of the moment before is late by that moment."""
    stamps, now_ns = machine.stamps(ahead_ns), machine.wall_ns + ahead_ns
    assert [now_ns - 5_000_000] == stamps.moved(_timespec(machine.wall_ns - 5_000_000), [now_ns])
    assert (1, True, 5_000_000) == (sum(stamps.counts), stamps.seen, stamps.max_ns)


def test_a_stamp_from_the_future_is_now(machine: Machine):
    """As after a step of the wall clock: a read is never stamped later than it returned."""
    stamps, now_ns = machine.stamps(), machine.wall_ns
    assert [now_ns] == stamps.moved(_timespec(now_ns + 1), [now_ns])
    assert stamps.max_ns == 0


def test_a_read_without_a_stamp_keeps_its_own(machine: Machine):
    """Among others that have one; it is not counted."""
    stamps, now_ns = machine.stamps(), machine.wall_ns
    kernel = _timespec(now_ns - 10**9) + lateness.NO_STAMP
    assert [now_ns - 10**9, now_ns] == stamps.moved(kernel, [now_ns, now_ns])
    assert sum(stamps.counts) == 1


def test_no_stamp_lies_before_the_one_before(machine: Machine):
    """Nor before the floor, as a reply never comes before its request left."""
    stamps, now_ns = machine.stamps(), machine.wall_ns
    kernel = _timespec(now_ns - 10**6) + _timespec(now_ns - 10**9)
    assert [now_ns - 10**6] * 2 == stamps.moved(kernel, [now_ns, now_ns])
    assert [now_ns + 5] == stamps.moved(_timespec(now_ns), [now_ns], floor_ns=now_ns + 5)


def test_what_was_read_before_a_step_of_the_wall_clock_keeps_its_own_time():
    """Its stamp cannot be moved any more; that of what comes afterwards can."""
    stepped = Machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lateness.time, "time_ns", lambda: stepped.wall_ns)
        stamps, read_ns = stepped.stamps(), stepped.wall_ns
        before_ns = stepped.wall_ns - 1_000_000
        stepped.monotonic_ns += 10**8
        stepped.wall_ns += 10**8 - 10**9
        assert [read_ns] == stamps.moved(_timespec(before_ns), [read_ns])
        stepped.monotonic_ns += 2 * 10**7
        stepped.wall_ns += 2 * 10**7
        later_ns = read_ns + 10**8 + 2 * 10**7
        assert [later_ns - 10**7] == stamps.moved(_timespec(stepped.wall_ns - 10**7), [later_ns])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine whose clocks this test alone moves."""
    machine = Machine()
    monkeypatch.setattr(lateness.time, "time_ns", lambda: machine.wall_ns)
    return machine


@pytest.mark.parametrize("step_ns", [-3600 * 10**9, -(10**9), -2_000_000, 2_000_000, 10**9, 3600 * 10**9])
def test_a_read_right_after_a_step_of_the_wall_clock_keeps_its_own_time(watched: Machine, step_ns: int):
    """Before the distance of the clocks was due to be measured again: the stamp was taken for that of a late read."""
    stamps, begun_ns = watched.stamps(), watched.wall_ns
    watched.monotonic_ns += 10**6
    watched.wall_ns += 10**6 + step_ns
    read_ns = begun_ns + 10**6
    assert [read_ns] == stamps.moved(_timespec(watched.wall_ns), [read_ns])
    assert 0 == stamps.max_ns


def test_what_came_before_a_step_and_is_read_after_it_keeps_its_own_time(watched: Machine):
    """The step ahead was noticed at another read: the stamp is an hour early by the new distance."""
    stamps, begun_ns = watched.stamps(), watched.wall_ns
    watched.monotonic_ns += 10**8
    watched.wall_ns += 10**8 + 3600 * 10**9
    noticed_ns = begun_ns + 10**8
    stamps.moved(_timespec(watched.wall_ns), [noticed_ns])
    assert [noticed_ns + 10**6] == stamps.moved(_timespec(begun_ns + 10**8 - 10**6), [noticed_ns + 10**6])
    assert stamps.max_ns == 0


def test_a_clock_that_drifts_fast_moves_no_stamp_by_more_than_a_millisecond(watched: Machine):
    """1 % is half a millisecond each time that it is measured: those of the last second had added up to 10."""
    stamps, begun_ns = watched.stamps(), watched.wall_ns
    kernel, reads_ns = b"", []
    for tick in range(1, 21):
        watched.monotonic_ns += 50_000_001
        watched.wall_ns += 50_500_001
        reads_ns.append(begun_ns + tick * 50_000_001)
        kernel += _timespec(watched.wall_ns)
        stamps.moved(_timespec(watched.wall_ns), reads_ns[-1:])
    moved_ns = stamps.moved(kernel, reads_ns)
    assert max(abs(moved - read) for moved, read in zip(moved_ns, reads_ns, strict=True)) <= 1_000_000


def test_a_measurement_that_took_long_moves_no_stamp(monkeypatch: pytest.MonkeyPatch):
    """Without a processor for 10 ms at each reading of the wall clock, its distance is off by up to half of that."""
    machine, pause_ns = Machine(), 0

    def read_wall() -> int:
        wall_ns = machine.wall_ns
        machine.monotonic_ns += pause_ns
        machine.wall_ns += pause_ns
        return wall_ns

    monkeypatch.setattr(lateness.time, "time_ns", read_wall)
    stamps = machine.stamps()
    pause_ns = 10**7
    machine.monotonic_ns += 10**8
    machine.wall_ns += 10**8
    came_ns = machine.wall_ns
    assert [came_ns] == stamps.moved(_timespec(came_ns), [came_ns + 10**6])


def test_pauses_of_the_garbage_collector_are_counted(monkeypatch: pytest.MonkeyPatch):
    """From entering to leaving: the longest, and all of them."""
    readings_ns = iter((100, 107, 200, 205))
    monkeypatch.setattr(lateness.time, "monotonic_ns", lambda: next(readings_ns))
    gc.disable()  # no other collection than these
    try:
        with lateness.PauseCounter() as pauses:
            gc.collect()
            gc.collect()
        gc.collect()
    finally:
        gc.enable()
    assert (7, 12) == (pauses.max_ns, pauses.total_ns)


@pytest.mark.parametrize("late_ns", [0, 255, 256, 1023, 1024, 999_999, (1 << 20) - 1, 1 << 20, 10**9])
def test_what_is_counted_is_where_the_index_says(machine: Machine, late_ns: int):
    """The table of small latenesses and the formula agree."""
    stamps = machine.stamps()
    stamps.moved(_timespec(machine.wall_ns - late_ns), [machine.wall_ns])
    assert [lateness.bucket_index(late_ns)] == [index for index, count in enumerate(stamps.counts) if count]
