from __future__ import annotations

import gc
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.transports import lateness
from rundir.clock import Clock

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


def test_a_negative_lateness_is_none():
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
    one = [0] * lateness.BUCKETS
    one[3] = 2
    assert [0, 0, 0, 4] == lateness.add_counts([one, (), one])[:4]


def _timespec(wall_ns: int) -> bytes:
    return lateness.TIMESPEC.pack(*divmod(wall_ns, 1_000_000_000))


@given(st.integers(-(10**9), 10**9))
def test_a_kernel_stamp_becomes_one_of_the_runs_clock(ahead_ns: int):
    """Whatever the run's clock is ahead of the wall clock; a stamp of the moment before is late by that moment."""
    clock = Clock(offset_ns=time.time_ns() - time.monotonic_ns() + ahead_ns)
    stamps = lateness.ReceiveStamps(clock)
    wall_ns, before_ns = time.time_ns(), clock.now_ns()
    (moved_ns,) = stamps.moved(_timespec(wall_ns - 5_000_000), [clock.now_ns()])
    assert abs(before_ns - 5_000_000 - moved_ns) < 1_000_000
    assert (1, True) == (sum(stamps.counts), stamps.seen)
    assert stamps.max_ns >= 4_000_000


def test_a_stamp_from_the_future_is_now():
    """As after a step of the wall clock: a read is never stamped later than it returned."""
    clock = Clock(offset_ns=0)
    stamps = lateness.ReceiveStamps(clock)
    now_ns = clock.now_ns()
    assert [now_ns] == stamps.moved(_timespec(time.time_ns() + 10**9), [now_ns])
    assert stamps.max_ns == 0


def test_a_read_without_a_stamp_keeps_its_own():
    """Among others that have one; it is not counted."""
    stamps = lateness.ReceiveStamps(Clock(offset_ns=0))
    kernel = _timespec(time.time_ns() - 10**9) + lateness.NO_STAMP
    now_ns = time.monotonic_ns()
    first, second = stamps.moved(kernel, [now_ns, now_ns])
    assert first < second == now_ns
    assert sum(stamps.counts) == 1


def test_no_stamp_lies_before_the_one_before():
    """Nor before the floor, as a reply never comes before its request left."""
    stamps = lateness.ReceiveStamps(Clock(offset_ns=0))
    now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    moved = stamps.moved(_timespec(wall_ns - 10**6) + _timespec(wall_ns - 10**9), [now_ns, now_ns])
    assert moved[0] == moved[1] < now_ns
    assert [now_ns + 5] == stamps.moved(_timespec(wall_ns), [now_ns], floor_ns=now_ns + 5)


def test_what_was_read_before_a_step_of_the_wall_clock_keeps_its_own_time(monkeypatch: pytest.MonkeyPatch):
    """Its stamp cannot be moved any more; what is read afterwards can."""
    stamps = lateness.ReceiveStamps(Clock(offset_ns=0))
    read_ns, wall_ns, real = time.monotonic_ns(), time.time_ns() - 1_000_000, time.time_ns
    monkeypatch.setattr(lateness.time, "time_ns", lambda: real() - 10**9)
    monkeypatch.setattr(lateness.ReceiveStamps, "_ANCHOR_NS", -1)
    assert [read_ns] == stamps.moved(_timespec(wall_ns), [read_ns])
    later_ns = time.monotonic_ns()
    (moved_ns,) = stamps.moved(_timespec(lateness.time.time_ns() - 10**7), [later_ns])
    assert moved_ns < later_ns


def test_pauses_of_the_garbage_collector_are_counted():
    """From entering to leaving."""
    with lateness.GcPauses() as pauses:
        gc.collect()
        gc.collect()
    assert 0 < pauses.max_ns < pauses.total_ns
    total_ns = pauses.total_ns
    gc.collect()
    assert total_ns == pauses.total_ns


@pytest.mark.parametrize("late_ns", [0, 255, 256, 1023, 1024, 999_999, (1 << 20) - 1, 1 << 20, 10**9])
def test_what_is_counted_is_where_the_index_says(late_ns: int):
    """The table of small latenesses and the formula agree."""
    stamps = lateness.ReceiveStamps(Clock(offset_ns=0))
    now_ns = time.monotonic_ns()
    stamps.moved(_timespec(now_ns - late_ns - stamps._offset_ns), [now_ns])
    assert [lateness.bucket_index(late_ns)] == [index for index, count in enumerate(stamps.counts) if count]
