from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from msgspec import to_builtins

from sidelight.loadgen import records
from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.loadgen.requests.self_check.check import NOT_TRUSTED, TRUSTED, UNKNOWN, self_check
from sidelight.loadgen.requests.self_check.stated_error import STAMP_MS, stated_error
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.transports.lateness import BUCKETS, bucket_bounds, bucket_index

MS = 1_000_000


def _log(*late_ms: float) -> RequestLog:
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


def test_a_quiet_generator_is_trusted():
    """Punctual submissions, punctual ticks, an idle processor; what was measured is stated."""
    got = self_check(_log(0.1, 0.2, 0.3), _stats(delay_ms=0.2, cpu_ratio=0.25), open_loop=True)
    assert (TRUSTED, True, [], None, None) == (got.verdict, got.trusted, got.reasons, got.first_line, got.cause)
    assert {"count": 3, "p50": 0.2, "max": 0.3} == {
        key: getattr(got.schedule_lateness_ms, key) for key in ("count", "p50", "max")
    }
    assert (10, 0.2) == (got.loop_delay_ms.count, got.loop_delay_ms.p99)
    assert {"by_worker": [0.25], "max": 0.25} == to_builtins(got.cpu_ratio)


def _slow(ttft_ms: float, *, late_ms: float = 0.0, gap_ms: float = 100.0) -> RequestLog:
    """Four requests with such a TTFT and gaps of a tenth of it, which left so late."""
    left_ms = [gap_ms * number + late_ms for number in range(4)]
    return request_log(
        *(
            {
                "scheduled": at - late_ms, "dispatch": at, "submit": at, "first": at + ttft_ms,
                "last": at + 1.2 * ttft_ms, "end": at + 1.2 * ttft_ms,
                "chunks": tuple(round(at + share * ttft_ms, 3) for share in (1, 1.1, 1.2)),
            }
            for at in left_ms
        )
    )  # fmt: skip


BUNCHES = "ms between them: they left in bunches that were not asked for."
BUSY = MachineLoad(steal_ratio=0.0, busy_ratio=0.97)


@pytest.mark.parametrize(
    ("ttft_ms", "delay_ms", "reasons"),
    [
        # 1 ms, or 2 % of the median, whichever is more; 0.1 ms are the two stamps
        (1000, 1.8, []),
        (1000, 1.95, ["Gaps between chunks may be wrong by up to 2.05 ms (2 % of their median of 100 ms)"]),
        (10, 0.85, []),
        (
            10, 1.5,
            [
                "TTFT may be wrong by up to 1.60 ms (16 % of its median of 10.0 ms)",
                "Gaps between chunks may be wrong by up to 1.60 ms (160 % of their median of 1.00 ms)",
            ],
        ),
        (31_847, 31, []),
    ],
)  # fmt: skip
def test_an_error_is_measured_against_the_metric(ttft_ms: float, delay_ms: float, reasons: list[str]):
    """The same delay is nothing beside a TTFT of 30 s, and spoils one of 10 ms."""
    got = self_check(_slow(ttft_ms), _stats(delay_ms=delay_ms, cpu_ratio=0.01), open_loop=True, machine=BUSY)
    assert (not reasons, reasons) == (got.trusted, got.reasons)
    assert (not reasons, not reasons) == (got.first_line is None, got.cause is None)


def test_a_failed_self_check_says_by_how_much_why_and_what_helps():
    """In one sentence; of a metric that is right all the same, it says that."""
    got = self_check(_slow(100.0), _stats(delay_ms=1.5, cpu_ratio=0.01), open_loop=True, machine=BUSY)
    assert got.first_line == (
        "Gaps between chunks may be wrong by up to 1.60 ms (16 % of their median of 10.0 ms): other processes took the "
        "processor (this machine was 97 % busy, the busiest load worker used 1 % of a core). Run the load generator on "
        "another machine, or keep processors free for it."
    )
    assert (NOT_TRUSTED, "TTFT is right to within 1.60 ms (1.6 % of its median).") == (got.verdict, got.statement)
    both = self_check(_slow(10.0), _stats(delay_ms=1.5, cpu_ratio=0.01), open_loop=True, machine=BUSY)
    assert both.first_line.startswith(
        "TTFT may be wrong by up to 1.60 ms (16 % of its median of 10.0 ms), gaps between chunks by up to 1.60 ms "
        "(160 % of their median of 1.00 ms): other processes"
    )
    assert "" == both.statement


def test_an_error_of_many_medians_is_said_in_times():
    """2157 % would be unreadable."""
    got = self_check(_slow(10.0), _stats(delay_ms=21.5, cpu_ratio=0.01), open_loop=True, machine=BUSY)
    assert "gaps between chunks by up to 21.6 ms (22 times their median of 1.00 ms)" in got.first_line
    assert "TTFT may be wrong by up to 21.6 ms (2.2 times its median of 10.0 ms)" in got.first_line


@pytest.mark.parametrize(
    ("error_ms", "said"),
    [(0.06, "0.16 ms (0.0005 % of its median)"), (20.0, "20.1 ms (0.063 % of its median)")],
)
def test_an_error_that_is_small_is_stated_too(error_ms: float, said: str):
    """In ms and as a share of the median: 31,847 ms."""
    got = self_check(_slow(31_847.0), _stats(delay_ms=error_ms, cpu_ratio=0.01), open_loop=True)
    assert got.statement.startswith(f"TTFT is right to within {said}, gaps between chunks to within ")


@pytest.mark.parametrize(
    ("cpu_ratio", "machine", "kind", "words"),
    [
        (0.93, MachineLoad(steal_ratio=0.0, busy_ratio=0.5), "worker", ("used 93 % of a core", "Use more")),
        (0.93, BUSY, "worker", ("used 93 % of a core", "--workers), on a machine with idle")),
        (0.3, MachineLoad(steal_ratio=0.12, busy_ratio=0.8), "steal", ("12 % of this machine's", "does not share")),
        (0.01, BUSY, "machine", ("97 % busy, the busiest load worker used 1 % of a core", "another machine")),
        (0.2, MachineLoad(steal_ratio=0.0, busy_ratio=0.4), "unknown", ("not known (it was 40 % busy", "nothing else")),
        (0.2, None, "unknown", ("how busy it was is not known", "nothing else")),
    ],
)  # fmt: skip
def test_the_cause_is_what_is_known(cpu_ratio: float, machine: MachineLoad | None, kind: str, words: tuple[str, str]):
    """Our worker, another guest, another process, or none of them; and each has its cure."""
    got = self_check(_slow(10.0), _stats(delay_ms=20.0, cpu_ratio=cpu_ratio), open_loop=True, machine=machine)
    assert got.cause is not None
    assert kind == got.cause.kind
    assert words[0] in got.cause.text
    assert words[1] in got.cause.cure
    assert got.first_line.endswith(f": {got.cause.text}. {got.cause.cure}")


def test_a_busy_worker_is_no_reason():
    """Waiting for the last millisecond before a submission takes CPU time, and nothing is late for it."""
    got = self_check(_slow(100.0), _stats(delay_ms=0.05, cpu_ratio=0.99), open_loop=True)
    assert (True, None, 0.99) == (got.trusted, got.cause, got.cpu_ratio.max)


@pytest.mark.parametrize(
    ("late_ms", "gap_ms", "distorted", "sentence"),
    [
        (46.8, 200.0, False, "Requests left up to 46.8 ms after their scheduled time (p99)."),
        (0.8, 0.5, False, "Requests left up to 0.80 ms after their scheduled time (p99)."),
        (
            18.0, 5.0, True,
            f"Requests left up to 18.0 ms after their scheduled time (p99), more than the mean gap of 5.00 {BUNCHES}",
        ),
    ],
)  # fmt: skip
def test_late_submissions_are_about_the_load(late_ms: float, gap_ms: float, distorted: bool, sentence: str):
    """They are measured against the gap between arrivals, and no TTFT is doubted for them."""
    sent = _slow(100.0, late_ms=late_ms, gap_ms=gap_ms)
    got = self_check(sent, _stats(delay_ms=0.05, cpu_ratio=0.01), open_loop=True, machine=BUSY)
    assert got.arrivals is not None
    assert (distorted, sentence, pytest.approx(late_ms / gap_ms)) == (
        got.arrivals.distorted, got.arrivals.sentence, got.arrivals.late_over_gap,
    )  # fmt: skip
    assert (True, distorted) == (got.trusted, got.cause is not None)


def test_connecting_is_not_lateness():
    """A request that needs a connection first leaves when it has one."""
    row = {"scheduled": 0, "dispatch": 1, "connected": 101, "submit": 103}
    assert 3.0 == self_check(request_log(row), [], open_loop=True).arrivals.late_ms.max


def test_who_said_nothing_is_unknown():
    """Missing is a reason, not a verdict."""
    got = self_check(_log(), [], open_loop=True)
    assert (UNKNOWN, None, []) == (got.verdict, got.trusted, got.reasons)
    assert "How far off latencies may be is not known: no load worker reported on itself." == got.statement
    assert (None, "nothing was submitted") == (got.arrivals.sentence, got.arrivals.late_ms.missing)
    missing = {key: getattr(got, key).missing for key in ("schedule_lateness_ms", "loop_delay_ms", "cpu_ratio")}
    assert {
        "schedule_lateness_ms": "nothing was submitted",
        "loop_delay_ms": "no worker reported",
        "cpu_ratio": "no worker reported twice",
    } == missing


def test_a_closed_loop_has_no_schedule_to_be_late_for():
    """Nor arrivals that could be others than were asked for."""
    got = self_check(_log(500.0), _stats(delay_ms=0.2, cpu_ratio=0.25), open_loop=False)
    assert (True, None, "a closed loop has no schedule") == (
        got.trusted, got.arrivals, got.schedule_lateness_ms.missing,
    )  # fmt: skip


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
            read_late_counts=late_counts, read_late_max_ns=most, gc_pause_max_ns=at * MS, gc_pause_total_ns=3 * at * MS,
            rss_bytes=1000 * (worker + 1), kernel_stamps=kernel_stamps,
        )
        for at, late_counts in enumerate((first, tuple(counts)))
    ]  # fmt: skip


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50), st.integers(0, 5))
def test_read_lateness_is_that_of_the_phase(late_ns: list[int], before: int):
    """What was counted before the first tick is taken off; a quantile is at most a bucket too high."""
    got = self_check(_log(0.1), _reads(*late_ns, before=before), open_loop=True).read_lateness_ms
    assert len(late_ns) == got.count
    assert 0 <= got.p50 <= got.p99 <= got.max
    assert max(late_ns) / 1e6 <= got.max <= bucket_bounds(bucket_index(max(late_ns)))[1] / 1e6


def test_workers_are_read_together():
    """Their histograms add up; the largest memory and the longest pause are stated."""
    stats = [*_reads(*[50_000] * 3), *_reads(*[2 * MS] * 3, worker=1)]
    got = self_check(_log(0.1), stats, open_loop=True)
    assert (6, 2.0, True) == (got.read_lateness_ms.count, got.read_lateness_ms.max, got.kernel_stamps)
    assert ({"max": 1.0, "total": 3.0}, 2000) == (to_builtins(got.gc_pause_ms), got.rss_bytes)
    json.dumps(to_builtins(got), allow_nan=False)


def test_reads_that_came_late_do_not_count_where_the_kernel_stamped():
    """The stamps keep it out of latencies; without them it is what they are off by."""
    assert self_check(_slow(100.0), _reads(*[30 * MS] * 10), open_loop=True).trusted
    got = self_check(_slow(100.0), _stats(delay_ms=30.0, cpu_ratio=0.1), open_loop=True)
    assert (False, pytest.approx(30.1)) == (got.trusted, got.error_ms.ttft.p99)


REPLY = {"dispatch": 10, "connected": 12, "submit": 15, "first": 20, "last": 40, "end": 41, "chunks": (20, 30, 40)}


def test_the_stated_error_of_kernel_stamps():
    """Reads cost nothing but the clock's move, nor does a submission, which is stamped before the call."""
    got = stated_error(request_log(REPLY), _reads(*[100_000] * 98, 4 * MS, 4 * MS))
    assert {"stamp": 2 * STAMP_MS, "read": 0.0, "submit": 0.0} == to_builtins(got.ttft.made_of)
    assert (pytest.approx(0.1), pytest.approx(0.1)) == (got.ttft.p99, got.itl.p99)
    assert (5.0, 1.0, pytest.approx(0.02)) == (got.ttft.median, got.ttft.limit, got.ttft.share_of_median)


def test_the_stated_error_of_a_submission_that_is_stamped_behind_the_call():
    """Its last byte left at some time since the connection was there."""
    got = stated_error(request_log(REPLY), _stats(delay_ms=0.4, cpu_ratio=0.1))
    assert {"stamp": 2 * STAMP_MS, "read": 0.4, "submit": 3.0} == to_builtins(got.ttft.made_of)
    assert (pytest.approx(3.1), pytest.approx(0.5)) == (got.ttft.p99, got.itl.p99)


def test_chunks_that_were_read_together_may_have_arrived_separately():
    """They share one stamp: the error is as large as their wait."""
    log_of = request_log(REPLY | {"connected": -1, "submit": 11, "chunks": (20, 20, 40)})
    got = stated_error(log_of, _reads(*[100_000] * 98, 4 * MS, 4 * MS))
    assert {"stamp": 2 * STAMP_MS, "read": 4.0} == to_builtins(got.itl.made_of)
    assert pytest.approx(4.1) == got.itl.p99 == got.ttft.p99


def test_what_was_read_together_is_off_by_no_more_than_the_time_that_led_to_it():
    """However long the loop was away; and a first token that was read alone is not off at all."""
    log_of = request_log(REPLY | {"connected": -1, "submit": 11, "chunks": (20, 23, 23, 40)})
    got = stated_error(log_of, _reads(*[100_000] * 98, 40 * MS, 40 * MS))
    assert (0.0, 3.0) == (got.ttft.made_of.read, got.itl.made_of.read)


def _ticks(*, away: dict[int, float], worker: int = 0) -> list[records.WorkerStat]:
    """40 ticks, a fifth of a second apart, whose timer was late by 0.2 ms, and by more in some; reads were prompt."""
    return [
        records.WorkerStat(
            worker=worker, at_ns=tick * 200 * MS, cpu_ns=0, loop_delay_ns=round(away.get(tick, 0.2) * MS),
            read_late_counts=(tick,), read_late_max_ns=0, kernel_stamps=True,
        )
        for tick in range(40)
    ]  # fmt: skip


def test_what_was_read_together_is_off_by_what_the_loop_was_away_about_then():
    """Not by what it was away at another time of the run, nor by another worker's."""
    stats = _ticks(away={30: 200.0}) + _ticks(away={5: 400.0}, worker=1)
    rows = {at: REPLY | {"submit": 11 + at, "first": 500 + at, "chunks": (500 + at, 500 + at)} for at in (0, 5300)}
    read_ms = {at: stated_error(request_log(row), stats).ttft.made_of.read for at, row in rows.items()}
    assert {0: 0.2, 5300: 200.0} == read_ms


def test_the_stated_error_of_our_own_stamps():
    """As late as the loop, of which its timer is a sample."""
    got = stated_error(_log(0.1), _stats(delay_ms=0.4, cpu_ratio=0.1))
    assert {"stamp": 2 * STAMP_MS, "read": 0.4, "submit": 0.0} == to_builtins(got.ttft.made_of)
    assert pytest.approx(0.5) == got.ttft.p99 == got.itl.p99


def test_no_error_is_stated_of_who_said_nothing():
    """Null, and why."""
    got = stated_error(_log(), []).itl
    assert (None, None, None, "no worker reported") == (got.p99, got.made_of, got.limit, got.missing)
