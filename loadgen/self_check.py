"""The generator's own error: was it the server that was slow, or were we?

A submission that leaves late, or a read that is stamped late because the process was busy, looks like latency of the
server. Both are measured, and a verdict says whether the results can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.log import RequestLog
from loadgen.records import WorkerStat

LATE_P99_MS = 10.0
BUSY_DELAY_P99_MS = 1.0
BUSY_CPU_RATIO = 0.85
TRUSTED = "kept up"
UNKNOWN = "did not report on itself"
NOT_TRUSTED = "was slow, and its own delays may show in the results"


def self_check(log: RequestLog, stats: Sequence[WorkerStat], *, open_loop: bool) -> dict[str, Any]:
    """Return the JSON-ready self-check of a measured phase.

    `schedule_lateness_ms`: dispatch minus schedule, of an open loop (a closed loop schedules nothing).
    `loop_delay_ms`: how late the workers' timer ticks came, a bound on how late a read can have been stamped.
    `cpu_ratio`: the workers' CPU time over wall time, between their first and last tick. A worker goes round its loop
    in the last millisecond before a submission is due, which is CPU time that delays nothing: a high ratio is a reason
    only when the loop was also late by more than BUSY_DELAY_P99_MS.
    """
    lateness = (log.dispatch_ns - log.scheduled_ns)[(log.dispatch_ns >= 0) & (log.scheduled_ns >= 0)] / 1e6
    delays = np.array([stat.loop_delay_ns for stat in stats], dtype=np.float64) / 1e6
    cpu = _cpu_ratios(stats)
    reasons = []
    if open_loop and len(lateness) and np.quantile(lateness, 0.99) > LATE_P99_MS:
        reasons.append(f"submissions were late by p99 {np.quantile(lateness, 0.99):.1f} ms (limit {LATE_P99_MS:g})")
    delay_p99_ms = float(np.quantile(delays, 0.99)) if len(delays) else 0.0
    if delay_p99_ms > LATE_P99_MS:
        reasons.append(f"the event loop was late by p99 {delay_p99_ms:.1f} ms (limit {LATE_P99_MS:g})")
    if cpu and max(cpu) > BUSY_CPU_RATIO and delay_p99_ms > BUSY_DELAY_P99_MS:
        reasons.append(f"a load worker used {100 * max(cpu):.0f} % of a core (limit {100 * BUSY_CPU_RATIO:.0f} %)")
    known = bool(len(delays))
    return {
        "verdict": NOT_TRUSTED if reasons else TRUSTED if known else UNKNOWN,
        "trusted": not reasons if known else None,
        "reasons": reasons,
        "schedule_lateness_ms": _spread(lateness, "nothing was submitted")
        if open_loop
        else _absent("a closed loop has no schedule"),
        "loop_delay_ms": _spread(delays, "no worker reported"),
        "read_lateness_ms": _absent("needs receive time stamps of the kernel; loop_delay_ms bounds it"),
        "cpu_ratio": {"by_worker": cpu, "max": max(cpu)}
        if cpu
        else {"by_worker": [], "max": None, "missing": "no worker reported twice"},
    }


def _cpu_ratios(stats: Sequence[WorkerStat]) -> list[float]:
    ratios = []
    for worker in sorted({stat.worker for stat in stats}):
        own = [stat for stat in stats if stat.worker == worker]
        wall_ns = own[-1].at_ns - own[0].at_ns
        if wall_ns > 0:
            ratios.append((own[-1].cpu_ns - own[0].cpu_ns) / wall_ns)
    return ratios


def _spread(values: np.typing.NDArray[np.float64], why_empty: str) -> dict[str, Any]:
    if not len(values):
        return _absent(why_empty)
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {"count": len(values), "p50": float(p50), "p99": float(p99), "max": float(values.max())}


def _absent(reason: str) -> dict[str, Any]:
    return {"p50": None, "p99": None, "max": None, "missing": reason}
