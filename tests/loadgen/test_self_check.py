from __future__ import annotations

import pytest

from loadgen import log, records
from loadgen.self_check import NOT_TRUSTED, TRUSTED, UNKNOWN, self_check

MS = 1_000_000


def _log(*late_ms: float) -> log.RequestLog:
    """Requests that were dispatched so much after their moment."""
    parts = [
        log.RequestPart(
            index=index, seq=0, last=True, worker=0, url="http://h/p", scheduled_ns=1000, connected_ns=-1,
            dispatch_ns=1000 + round(late * MS), submit_ns=-1, reused=False, status=0, head=b"", reads_ns=b"",
            read_ends=b"", body=b"", end_ns=10**12, error="connect: refused",
        )
        for index, late in enumerate(late_ms)
    ]  # fmt: skip
    return log.assemble([], parts, run_id="r")


def _stats(*, delay_ms: float, cpu_ratio: float, worker: int = 0) -> list[records.WorkerStat]:
    """Ticks of a worker, five times a second."""
    return [
        records.WorkerStat(
            worker=worker, at_ns=tick * 200 * MS, cpu_ns=round(tick * 200 * MS * cpu_ratio),
            loop_delay_ns=round(delay_ms * MS), in_flight=0, started=0,
        )
        for tick in range(10)
    ]  # fmt: skip


def test_who_kept_up_is_trusted():
    """Punctual submissions, punctual ticks, an idle processor; what was measured is told."""
    got = self_check(_log(0.1, 0.2, 0.3), _stats(delay_ms=0.2, cpu_ratio=0.25), open_loop=True)
    assert (TRUSTED, True, []) == (got["verdict"], got["trusted"], got["reasons"])
    assert {"count": 3, "p50": 0.2, "max": 0.3} == {
        key: got["schedule_lateness_ms"][key] for key in ("count", "p50", "max")
    }
    assert (10, 0.2) == (got["loop_delay_ms"]["count"], got["loop_delay_ms"]["p99"])
    assert {"by_worker": [0.25], "max": 0.25} == got["cpu_ratio"]


@pytest.mark.parametrize(
    ("late_ms", "delay_ms", "reasons"),
    [
        (30.0, 0.2, ["submissions were late by p99 30.0 ms (limit 10)"]),
        (0.1, 25.0, ["the event loop was late by p99 25.0 ms (limit 10)"]),
        (
            30.0,
            25.0,
            ["submissions were late by p99 30.0 ms (limit 10)", "the event loop was late by p99 25.0 ms (limit 10)"],
        ),
    ],
)
def test_who_was_late_is_not_trusted(late_ms: float, delay_ms: float, reasons: list[str]):
    """Late submissions and a late loop, each with its number."""
    got = self_check(_log(late_ms), _stats(delay_ms=delay_ms, cpu_ratio=0.25), open_loop=True)
    assert (NOT_TRUSTED, False, reasons) == (got["verdict"], got["trusted"], got["reasons"])


def test_who_is_busy_but_punctual_is_trusted():
    """Waiting for the last millisecond before a submission takes CPU time, and nothing is late for it."""
    got = self_check(_log(0.1), _stats(delay_ms=0.9, cpu_ratio=0.99), open_loop=True)
    assert (True, [], 0.99) == (got["trusted"], got["reasons"], got["cpu_ratio"]["max"])


def test_who_is_busy_and_late_for_it_is_not_trusted():
    """The busiest worker is named by its ratio."""
    stats = [*_stats(delay_ms=1.5, cpu_ratio=0.5), *_stats(delay_ms=1.5, cpu_ratio=0.95, worker=1)]
    got = self_check(_log(0.1), stats, open_loop=True)
    assert (False, ["a load worker used 95 % of a core (limit 85 %)"]) == (got["trusted"], got["reasons"])
    assert [0.5, 0.95] == got["cpu_ratio"]["by_worker"]


def test_who_said_nothing_is_unknown():
    """Missing is a reason, not a verdict."""
    got = self_check(_log(), [], open_loop=True)
    assert (UNKNOWN, None, []) == (got["verdict"], got["trusted"], got["reasons"])
    missing = {key: got[key]["missing"] for key in ("schedule_lateness_ms", "loop_delay_ms", "cpu_ratio")}
    assert {
        "schedule_lateness_ms": "nothing was submitted",
        "loop_delay_ms": "no worker reported",
        "cpu_ratio": "no worker reported twice",
    } == missing


def test_a_closed_loop_has_no_schedule_to_be_late_for():
    """Only the loop's delay and the processor count."""
    got = self_check(_log(500.0), _stats(delay_ms=0.2, cpu_ratio=0.25), open_loop=False)
    assert (TRUSTED, "a closed loop has no schedule") == (got["verdict"], got["schedule_lateness_ms"]["missing"])
