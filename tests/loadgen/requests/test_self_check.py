from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from msgspec import to_builtins

from loadgen import records
from loadgen.requests import table as log
from loadgen.requests.self_check import NOT_TRUSTED, STAMP_MS, TRUSTED, UNKNOWN, self_check, stated_error
from loadgen.transports.lateness import BUCKETS, bucket_bounds, bucket_index

MS = 1_000_000


def _log(*late_ms: float) -> log.RequestLog:
    """Requests that were dispatched so much after their moment."""
    return request_log(*({"scheduled": 1, "dispatch": 1 + late} for late in late_ms))


def _stats(*, delay_ms: float, cpu_ratio: float, worker: int = 0) -> list[records.WorkerStat]:
    """Ticks of a worker, five times a second."""
    return [
        records.WorkerStat(
            worker=worker, at_ns=tick * 200 * MS, cpu_ns=round(tick * 200 * MS * cpu_ratio),
            loop_delay_ns=round(delay_ms * MS),
        )
        for tick in range(10)
    ]  # fmt: skip


def test_who_kept_up_is_trusted():
    """Punctual submissions, punctual ticks, an idle processor; what was measured is told."""
    got = self_check(_log(0.1, 0.2, 0.3), _stats(delay_ms=0.2, cpu_ratio=0.25), open_loop=True)
    assert (TRUSTED, True, [], None) == (got.verdict, got.trusted, got.reasons, got.first_line)
    assert {"count": 3, "p50": 0.2, "max": 0.3} == {
        key: getattr(got.schedule_lateness_ms, key) for key in ("count", "p50", "max")
    }
    assert (10, 0.2) == (got.loop_delay_ms.count, got.loop_delay_ms.p99)
    assert {"by_worker": [0.25], "max": 0.25} == to_builtins(got.cpu_ratio)


@pytest.mark.parametrize(
    ("late_ms", "delay_ms", "reasons"),
    [
        (30.0, 0.2, ["submissions were late by p99 30.0 ms (limit 10)"]),
        (0.1, 25.0, ["the event loop was late by p99 25.0 ms (limit 10)"]),
    ],
)
def test_who_was_late_is_not_trusted(late_ms: float, delay_ms: float, reasons: list[str]):
    """Late submissions and a late loop, each with its number."""
    got = self_check(_log(late_ms), _stats(delay_ms=delay_ms, cpu_ratio=0.25), open_loop=True)
    assert (NOT_TRUSTED, False, reasons) == (got.verdict, got.trusted, got.reasons)


def test_who_is_busy_but_punctual_is_trusted():
    """Waiting for the last millisecond before a submission takes CPU time, and nothing is late for it."""
    got = self_check(_log(0.1), _stats(delay_ms=0.9, cpu_ratio=0.99), open_loop=True)
    assert (True, [], 0.99) == (got.trusted, got.reasons, got.cpu_ratio.max)


def test_who_is_busy_and_late_for_it_is_not_trusted():
    """The busiest worker is named by its ratio."""
    stats = [*_stats(delay_ms=1.5, cpu_ratio=0.5), *_stats(delay_ms=1.5, cpu_ratio=0.95, worker=1)]
    got = self_check(_log(0.1), stats, open_loop=True)
    assert (False, ["a load worker used 95 % of a core (limit 85 %)"]) == (got.trusted, got.reasons)
    assert [0.5, 0.95] == got.cpu_ratio.by_worker


def test_who_said_nothing_is_unknown():
    """Missing is a reason, not a verdict."""
    got = self_check(_log(), [], open_loop=True)
    assert (UNKNOWN, None, []) == (got.verdict, got.trusted, got.reasons)
    missing = {key: getattr(got, key).missing for key in ("schedule_lateness_ms", "loop_delay_ms", "cpu_ratio")}
    assert {
        "schedule_lateness_ms": "nothing was submitted",
        "loop_delay_ms": "no worker reported",
        "cpu_ratio": "no worker reported twice",
    } == missing


def test_a_closed_loop_has_no_schedule_to_be_late_for():
    """Only the loop's delay and the processor count."""
    got = self_check(_log(500.0), _stats(delay_ms=0.2, cpu_ratio=0.25), open_loop=False)
    assert (TRUSTED, "a closed loop has no schedule") == (got.verdict, got.schedule_lateness_ms.missing)


def _reads(*late_ns: int, before: int = 0, worker: int = 0, kernel_stamps: bool = True) -> list[records.WorkerStat]:
    """Two ticks of a worker, between which it read so late; `before` reads of 1 s came before the first."""
    counts = [0] * BUCKETS
    counts[bucket_index(10**9)] = before
    first = tuple(counts)
    for late in late_ns:
        counts[bucket_index(late)] += 1
    most = max([10**9] * bool(before) + list(late_ns), default=-1)
    return [
        records.WorkerStat(
            worker=worker, at_ns=at * 200 * MS, cpu_ns=at * MS, loop_delay_ns=at * MS // 10,
            read_late_counts=told, read_late_max_ns=most, gc_pause_max_ns=at * MS, gc_pause_total_ns=3 * at * MS,
            rss_bytes=1000 * (worker + 1), kernel_stamps=kernel_stamps,
        )
        for at, told in enumerate((first, tuple(counts)))
    ]  # fmt: skip


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50), st.integers(0, 5))
def test_read_lateness_is_that_of_the_phase(late_ns: list[int], before: int):
    """What was counted before the first tick is taken off; a quantile is at most a bucket too high."""
    got = self_check(_log(0.1), _reads(*late_ns, before=before), open_loop=True).read_lateness_ms
    assert len(late_ns) == got.count
    assert 0 <= got.p50 <= got.p99 <= got.max
    assert max(late_ns) / 1e6 <= got.max <= bucket_bounds(bucket_index(max(late_ns)))[1] / 1e6


def test_workers_are_read_together():
    """Their histograms add up; the largest memory and the longest pause are told."""
    stats = [*_reads(*[50_000] * 3), *_reads(*[2 * MS] * 3, worker=1)]
    got = self_check(_log(0.1), stats, open_loop=True)
    assert (6, 2.0, True) == (got.read_lateness_ms.count, got.read_lateness_ms.max, got.kernel_stamps)
    assert ({"max": 1.0, "total": 3.0}, 2000) == (to_builtins(got.gc_pause_ms), got.rss_bytes)
    json.dumps(to_builtins(got), allow_nan=False)


def test_who_let_replies_wait_is_not_trusted():
    """Even where the kernel's stamps keep it out of latencies: a closed loop asks again too late."""
    got = self_check(_log(0.1), _reads(*[30 * MS] * 10), open_loop=False)
    assert (False, ["replies waited to be read by p99 30.0 ms (limit 10)"]) == (got.trusted, got.reasons)
    assert got.first_line == f"The load generator {NOT_TRUSTED}: {got.reasons[0]}."


def test_who_stood_still_once_is_not_trusted():
    """One pause in a long run is in no p99, and yet all that happened meanwhile is late."""
    ticks = _stats(delay_ms=0.2, cpu_ratio=0.25) * 30
    stats = [
        records.WorkerStat(
            worker=0, at_ns=place * 200 * MS, cpu_ns=0, loop_delay_ns=1200 * MS if place == 150 else tick.loop_delay_ns
        )
        for place, tick in enumerate(ticks)
    ]
    got = self_check(_log(0.1), stats, open_loop=True)
    assert ["a load worker stood still for 2.0 % of the time (limit 1 %)"] == got.reasons


REPLY = {"dispatch": 10, "connected": 12, "submit": 15, "first": 20, "last": 40, "end": 41, "chunks": (20, 30, 40)}


def test_the_stated_error_of_kernel_stamps():
    """Reads cost nothing but the clock's move; a submission was stamped since its connection was there."""
    got = stated_error(request_log(REPLY), _reads(*[100_000] * 98, 4 * MS, 4 * MS))
    assert {"stamp": 2 * STAMP_MS, "read": 0.0, "submit": 3.0} == to_builtins(got.ttft.made_of)
    assert (pytest.approx(3.1), pytest.approx(0.1)) == (got.ttft.p99, got.itl.p99)


def test_chunks_that_were_read_together_may_have_come_apart():
    """They bear one stamp: the error is as large as what they waited."""
    log_of = request_log(REPLY | {"connected": -1, "submit": 11, "chunks": (20, 20, 40)})
    got = stated_error(log_of, _reads(*[100_000] * 98, 4 * MS, 4 * MS))
    assert {"stamp": 2 * STAMP_MS, "read": 4.0} == to_builtins(got.itl.made_of)
    assert pytest.approx(4.1) == got.itl.p99 == got.ttft.p99


def test_what_was_read_together_is_off_by_no_more_than_the_time_that_led_to_it():
    """However long the loop was away; and a first token that was read alone is not off at all."""
    log_of = request_log(REPLY | {"connected": -1, "submit": 11, "chunks": (20, 23, 23, 40)})
    got = stated_error(log_of, _reads(*[100_000] * 98, 40 * MS, 40 * MS))
    assert (0.0, 3.0) == (got.ttft.made_of.read, got.itl.made_of.read)


def test_the_stated_error_of_our_own_stamps():
    """As late as the loop, of which its timer is a sample."""
    got = stated_error(_log(0.1), _stats(delay_ms=0.4, cpu_ratio=0.1))
    assert {"stamp": 2 * STAMP_MS, "read": 0.4, "submit": 0.0} == to_builtins(got.ttft.made_of)
    assert pytest.approx(0.5) == got.ttft.p99 == got.itl.p99


def test_no_error_is_stated_of_who_said_nothing():
    """Null, and why."""
    assert {"p99": None, "made_of": None, "missing": "no worker reported"} == to_builtins(stated_error(_log(), []).itl)
