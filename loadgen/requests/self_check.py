"""The generator's own error: was it the server that was slow, or were we?

A submission that leaves late, or a read that is stamped late because the process was busy, looks like latency of the
server. Both are measured, a verdict says whether the results can be trusted, and `error_ms` by how much a single
reported latency may be off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from loadgen.records import WorkerStat
from loadgen.requests.metrics import request_metrics
from loadgen.requests.table import RequestLog
from loadgen.transports.lateness import add_counts, bucket_bounds, quantile_ns
from rundir.columns import Floats

LATE_P99_MS = 10.0
BUSY_DELAY_P99_MS = 1.0
BUSY_CPU_RATIO = 0.85
STALLED_RATIO = 0.01
TRUSTED = "kept up"
UNKNOWN = "did not report on itself"
NOT_TRUSTED = "was a bottleneck itself, and its own delays may show in the results"

# What is left of a stamp's error where it is the kernel's: its move to the run's clock, anew every 50 ms, while the
# wall clock may be slewed by 500 ppm; or, of a stamp of ours, the call that took it.
STAMP_MS = 0.05
# A difference of two stamps is off by more than x only when one of them is: at 99 % each may at 99.5 %.
_EACH = 0.995


def self_check(log: RequestLog, stats: Sequence[WorkerStat], *, open_loop: bool) -> dict[str, Any]:
    """Return the JSON-ready self-check of a measured phase.

    `schedule_lateness_ms`: dispatch minus schedule, of an open loop (a closed loop schedules nothing).
    `loop_delay_ms`: how late the workers' timer ticks came, a bound on how late a read can have been stamped.
    `read_lateness_ms`: how long bytes had been in the kernel when they were read; by the kernel's stamps, which then
    stand in the results in place of ours.
    `cpu_ratio`: the workers' CPU time over wall time, between their first and last tick. A worker goes round its loop
    in the last millisecond before a submission is due, which is CPU time that delays nothing: a high ratio is a reason
    only when the loop was also late by more than BUSY_DELAY_P99_MS.
    `error_ms`: see stated_error. `first_line`: what a report begins with; null when there is nothing to warn of.
    """
    lateness = (log.dispatch_ns - log.scheduled_ns)[(log.dispatch_ns >= 0) & (log.scheduled_ns >= 0)] / 1e6
    delays = np.array([stat.loop_delay_ns for stat in stats], dtype=np.float64) / 1e6
    reads, cpu = _read_lateness(stats), _cpu_ratios(stats)
    reasons = list(_reasons(lateness, delays, reads, cpu, open_loop=open_loop)) or _stalled(stats)
    told = bool(len(delays))
    return {
        "verdict": NOT_TRUSTED if reasons else TRUSTED if told else UNKNOWN,
        "trusted": not reasons if told else None,
        "first_line": f"The load generator {NOT_TRUSTED}: {'; '.join(reasons)}." if reasons else None,
        "reasons": reasons,
        "schedule_lateness_ms": _spread(lateness, "nothing was submitted")
        if open_loop
        else _absent("a closed loop has no schedule"),
        "loop_delay_ms": _spread(delays, "no worker reported"),
        "read_lateness_ms": reads,
        "gc_pause_ms": _gc_pauses(stats),
        "rss_bytes": max((stat.rss_bytes for stat in stats if stat.rss_bytes >= 0), default=None),
        "kernel_stamps": all(stat.kernel_stamps for stat in _last(stats)) if told else None,
        "cpu_ratio": {"by_worker": cpu, "max": max(cpu)}
        if cpu
        else {"by_worker": [], "max": None, "missing": "no worker reported twice"},
        "error_ms": stated_error(log, stats),
    }


def stated_error(log: RequestLog, stats: Sequence[WorkerStat]) -> dict[str, Any]:
    """By how much, in ms, 99 of 100 reported TTFT and ITL values are off at most, and what that is made of.

    stamp    of two stamps, STAMP_MS each
    read     stamps of ours: how late the loop came to its reads, of which its timer is a sample. The kernel's: nothing,
             but for chunks that were read together; see _waited_ms
    submit   TTFT only: how long it took from the dispatch, or the connection, to the stamp of the submission; the
             request's last byte left somewhere in between
    """
    delays_ms = np.array([stat.loop_delay_ns for stat in stats], dtype=np.float64) / 1e6
    if not len(delays_ms):
        missing = {"p99": None, "made_of": None, "missing": "no worker reported"}
        return {"ttft": missing, "itl": missing}
    submit_ms = _submit_ms(log)
    counts, most_ns = _read_counts(stats)
    if sum(counts) and all(stat.kernel_stamps for stat in _last(stats)):
        away_ms = max(float(delays_ms.max()), most_ns / 1e6)
        ttft_ms, itl_ms = (_quantile(waited_ms, _EACH, method="higher") for waited_ms in _waited_ms(log, away_ms))
    else:
        ttft_ms = itl_ms = float(np.quantile(delays_ms, _EACH))
    stamp_ms = 2 * STAMP_MS
    return {
        # The two may not add up: a late read makes a TTFT longer, a late stamp of the submission makes it shorter.
        "ttft": {
            "p99": stamp_ms + max(ttft_ms, submit_ms),
            "made_of": {"stamp": stamp_ms, "read": ttft_ms, "submit": submit_ms},
        },
        "itl": {"p99": stamp_ms + itl_ms, "made_of": {"stamp": stamp_ms, "read": itl_ms}},
    }


def _waited_ms(log: RequestLog, away_ms: float) -> tuple[Floats, Floats]:
    """By how much each TTFT and each gap may be off, ms, because chunks that came apart were read together.

    The kernel gives a read the stamp of the last bytes in it. Those before them came after the stamp before, so neither
    the time that led to such a read nor the gaps of 0 in it are off by more than the time that led to it; nor by more
    than `away_ms`, the longest for which the loop was seen not to look.
    """
    told = request_metrics(log)
    rows = np.flatnonzero(~np.isnan(told.ttft_ms))
    # Each request's TTFT, and the gaps behind it.
    times_ms = np.concatenate([told.ttft_ms[rows], told.itl_ms])
    of_row = np.concatenate([rows, told.itl_request])
    order = np.argsort(of_row, kind="stable")
    ordered_ms, of_row = times_ms[order], of_row[order]
    zero = ordered_ms == 0
    led_to = np.append(zero[1:] & (of_row[1:] == of_row[:-1]), np.zeros(min(len(zero), 1), bool))
    leading = np.maximum.accumulate(np.where(zero, 0, np.arange(len(zero))))
    waited_ms = np.empty_like(times_ms)
    waited_ms[order] = np.where(zero | led_to, np.minimum(ordered_ms[leading], away_ms), 0.0)
    return waited_ms[: len(rows)], waited_ms[len(rows) :]


def _submit_ms(log: RequestLog) -> float:
    """The 0.995 quantile of how late submissions can have been stamped; 0 where nothing was submitted."""
    began_ns = np.maximum(log.dispatch_ns, log.connected_ns)
    took_ms = (log.submit_ns - began_ns)[(log.submit_ns >= 0) & (began_ns >= 0)] / 1e6
    return _quantile(took_ms, _EACH)


def _reasons(
    lateness: Floats, delays: Floats, reads: dict[str, Any], cpu: Sequence[float], *, open_loop: bool
) -> Iterator[str]:
    late_ms, delay_ms, read_ms = _quantile(lateness, 0.99), _quantile(delays, 0.99), reads["p99"] or 0.0
    if open_loop and late_ms > LATE_P99_MS:
        yield f"submissions were late by p99 {late_ms:.1f} ms (limit {LATE_P99_MS:g})"
    if delay_ms > LATE_P99_MS:
        yield f"the event loop was late by p99 {delay_ms:.1f} ms (limit {LATE_P99_MS:g})"
    if read_ms > LATE_P99_MS:
        yield f"replies waited to be read by p99 {read_ms:.1f} ms (limit {LATE_P99_MS:g})"
    if max(cpu, default=0.0) > BUSY_CPU_RATIO and delay_ms > BUSY_DELAY_P99_MS:
        yield f"a load worker used {100 * max(cpu):.0f} % of a core (limit {100 * BUSY_CPU_RATIO:.0f} %)"


def _quantile(values: Floats, q: float, *, method: Literal["linear", "higher"] = "linear") -> float:
    """0 where there are no values."""
    return float(np.quantile(values, q, method=method)) if len(values) else 0.0


def _stalled(stats: Sequence[WorkerStat]) -> list[str]:
    """A worker that stood still: seldom enough for no quantile of its ticks to show it, but long."""
    worst = 0.0
    for own in _by_worker(stats):
        wall_ns = own[-1].at_ns - own[0].at_ns
        stood_ns = sum(stat.loop_delay_ns for stat in own[1:] if stat.loop_delay_ns > LATE_P99_MS * 1e6)
        worst = max(worst, stood_ns / wall_ns if wall_ns > 0 else 0.0)
    if worst <= STALLED_RATIO:
        return []
    return [f"a load worker stood still for {100 * worst:.1f} % of the time (limit {100 * STALLED_RATIO:g} %)"]


def _cpu_ratios(stats: Sequence[WorkerStat]) -> list[float]:
    spans = [(own[-1].cpu_ns - own[0].cpu_ns, own[-1].at_ns - own[0].at_ns) for own in _by_worker(stats)]
    return [cpu_ns / wall_ns for cpu_ns, wall_ns in spans if wall_ns > 0]


def _read_counts(stats: Sequence[WorkerStat]) -> tuple[list[int], int]:
    """The histogram of read lateness between the first and the last tick of all workers, and a bound on its largest.

    Workers count from their start on, so what they had counted at the first tick is taken off; with one tick nothing
    is, and their warm-up is in it.
    """
    parts, most_ns = [], 0.0
    for own in _by_worker(stats):
        after, before = own[-1].read_late_counts, own[0].read_late_counts if len(own) > 1 else ()
        before = before or (0,) * len(after)
        new = [late - early for late, early in zip(after, before, strict=True)]
        parts.append(new)
        last = max((index for index, count in enumerate(new) if count), default=None)
        if last is not None:
            most_ns = max(most_ns, min(bucket_bounds(last)[1], own[-1].read_late_max_ns))
    return add_counts(parts), int(most_ns)


def _read_lateness(stats: Sequence[WorkerStat]) -> dict[str, Any]:
    counts, most_ns = _read_counts(stats)
    total = sum(counts)
    if not total:
        return _absent("no read bore a receive stamp of the kernel; loop_delay_ms bounds its lateness")
    p50, p99 = (quantile_ns(counts, q, max_ns=most_ns) / 1e6 for q in (0.5, 0.99))
    return {"count": total, "p50": p50, "p99": p99, "max": most_ns / 1e6}


def _gc_pauses(stats: Sequence[WorkerStat]) -> dict[str, Any]:
    """Since the workers started: the longest pause, and all pauses of the worker that paused most, together."""
    told = [stat for stat in _last(stats) if stat.gc_pause_max_ns >= 0]
    if not told:
        return {"max": None, "total": None, "missing": "no worker reported"}
    return {
        "max": max(stat.gc_pause_max_ns for stat in told) / 1e6,
        "total": max(stat.gc_pause_total_ns for stat in told) / 1e6,
    }


def _by_worker(stats: Sequence[WorkerStat]) -> list[list[WorkerStat]]:
    return [[stat for stat in stats if stat.worker == worker] for worker in sorted({stat.worker for stat in stats})]


def _last(stats: Sequence[WorkerStat]) -> list[WorkerStat]:
    return [own[-1] for own in _by_worker(stats)]


def _spread(values: Floats, why_empty: str) -> dict[str, Any]:
    if not len(values):
        return _absent(why_empty)
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {"count": len(values), "p50": float(p50), "p99": float(p99), "max": float(values.max())}


def _absent(reason: str) -> dict[str, Any]:
    return {"p50": None, "p99": None, "max": None, "missing": reason}
