"""The generator's own error: was it the server that was slow, or were we?

A submission that leaves late, or a read that is stamped late because the process was busy, looks like latency of the
server. Both are measured, a verdict says whether the results can be trusted, and `error_ms` by how much a single
reported latency may be off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from loadgen.host.clock_sync import ClockSummary
from loadgen.host.cpu_steal import MachineLoad
from loadgen.host.round_trip import RoundTrip
from loadgen.records import WorkerStat
from loadgen.requests.metrics import request_metrics
from loadgen.requests.table import RequestLog
from loadgen.transports.lateness import add_counts, bucket_bounds, quantile_ns
from rundir.columns import Floats
from rundir.fields import Count, Missing, doc

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


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How late something was."""

    count: Annotated[Count | UnsetType, doc("Number of values; absent where nothing was measured.", "values")] = UNSET
    p50: Annotated[float | None, doc("Median.", "ms")]
    p99: Annotated[float | None, doc("99th percentile.", "ms")]
    max: Annotated[float | None, doc("Largest value.", "ms")]
    missing: Missing = UNSET


class GcPauses(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses of the workers' garbage collectors since their start."""

    max: Annotated[float | None, doc("The longest.", "ms")]
    total: Annotated[float | None, doc("All pauses of the worker that paused most.", "ms")]
    missing: Missing = UNSET


class CpuRatio(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of load workers over wall time; 1 is one core."""

    by_worker: Annotated[list[float], doc("One value a worker.", "ratio")]
    max: Annotated[float | None, doc("The busiest worker's.", "ratio")]
    missing: Missing = UNSET


class ErrorParts(msgspec.Struct, frozen=True, kw_only=True):
    """What an error is made of."""

    stamp: Annotated[float, doc("Uncertainty of two stamps.", "ms")]
    read: Annotated[float, doc("Reads that were stamped late, or together.", "ms")]
    submit: Annotated[float | UnsetType, doc("Of TTFT: from the dispatch to the stamp of the submission.", "ms")] = (
        UNSET
    )


class ErrorBound(msgspec.Struct, frozen=True, kw_only=True):
    """By how much 99 of 100 values are off at most."""

    p99: Annotated[float | None, doc("The bound.", "ms")]
    made_of: Annotated[ErrorParts | None, doc("What the bound is made of.", "ms")]
    missing: Missing = UNSET


class StatedError(msgspec.Struct, frozen=True, kw_only=True):
    """By how much a single reported latency may be off."""

    ttft: Annotated[ErrorBound, doc("Of a time to first token.", "ms")]
    itl: Annotated[ErrorBound, doc("Of a gap between chunks.", "ms")]


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The load generator's own error, and what stood around it: the clock, the network, the machine."""

    verdict: Annotated[str, doc("whether the generator kept up, or was a bottleneck itself, in words")]
    trusted: Annotated[
        bool | None, doc("false: its own delays may show in the results; null: no worker reported on itself")
    ]
    first_line: Annotated[str | None, doc("what the report begins with when it was a bottleneck; else null")]
    reasons: Annotated[list[str], doc("why it was a bottleneck")]
    schedule_lateness_ms: Annotated[
        Spread, doc("dispatch - scheduled, of an open loop; over 10 ms at p99 is a reason", "ms")
    ]
    loop_delay_ms: Annotated[
        Spread,
        doc(
            "how late the workers' timers fired, which bounds how late a read can have been stamped; over 10 ms at "
            "p99, or for over 1 % of the time, is a reason",
            "ms",
        ),
    ]
    read_lateness_ms: Annotated[
        Spread,
        doc(
            "how long bytes lay in the kernel before they were read, by its stamps, which then stand in the results; "
            "over 10 ms at p99 is a reason",
            "ms",
        ),
    ]
    gc_pause_ms: Annotated[
        GcPauses,
        doc("pauses of the garbage collector since the workers started: the longest (`max`), and `total`", "ms"),
    ]
    rss_bytes: Annotated[int | None, doc("resident memory of the largest worker", "bytes")]
    kernel_stamps: Annotated[
        bool | None,
        doc("whether reads bear the kernel's stamps, so that their lateness is not in the results; null: not known"),
    ]
    cpu_ratio: Annotated[
        CpuRatio,
        doc(
            "CPU time over wall time, `by_worker` and `max`; over 0.85 with a loop that is late by 1 ms is a reason",
            "ratio",
        ),
    ]
    error_ms: Annotated[
        StatedError,
        doc(
            "`ttft` and `itl`: by how much 99 of 100 values are off at most (`p99`), `made_of` the uncertainty of two "
            "stamps (`stamp`), reads that were stamped late or together (`read`) and, for TTFT, the time between "
            "dispatch and the stamp of the submission (`submit`)",
            "ms",
        ),
    ]
    clock: Annotated[
        ClockSummary | None,
        doc("what disciplines this machine's clock, and how far off it may be; null for a scrape without load"),
    ]
    network_rtt_ms: Annotated[list[RoundTrip], doc("round-trip time to each target, apart from any request", "ms")]
    machine: Annotated[
        MachineLoad | None,
        doc("what else used this machine's processors meanwhile; null where the phase has no end"),
    ]


def self_check(
    log: RequestLog,
    stats: Sequence[WorkerStat],
    *,
    open_loop: bool,
    clock: ClockSummary | None = None,
    round_trips: Sequence[RoundTrip] = (),
    machine: MachineLoad | None = None,
) -> SelfCheck:
    """Return the self-check of a measured phase.

    A worker goes round its loop in the last millisecond before a submission is due, which is CPU time that delays
    nothing: a high `cpu_ratio` is a reason only when the loop was also late by more than BUSY_DELAY_P99_MS.
    """
    lateness = (log.dispatch_ns - log.scheduled_ns - log.held_ns)[
        (log.dispatch_ns >= 0) & (log.scheduled_ns >= 0)
    ] / 1e6
    delays = np.array([stat.loop_delay_ns for stat in stats], dtype=np.float64) / 1e6
    reads, cpu = _read_lateness(stats), _cpu_ratios(stats)
    reasons = list(_reasons(lateness, delays, reads, cpu, open_loop=open_loop)) or _stalled(stats)
    reported = bool(len(delays))
    schedule = _spread(lateness, "nothing was submitted") if open_loop else _absent("a closed loop has no schedule")
    return SelfCheck(
        verdict=NOT_TRUSTED if reasons else TRUSTED if reported else UNKNOWN,
        trusted=not reasons if reported else None,
        first_line=f"The load generator {NOT_TRUSTED}: {'; '.join(reasons)}." if reasons else None,
        reasons=reasons,
        schedule_lateness_ms=schedule,
        loop_delay_ms=_spread(delays, "no worker reported"),
        read_lateness_ms=reads,
        gc_pause_ms=_gc_pauses(stats),
        rss_bytes=max((stat.rss_bytes for stat in stats if stat.rss_bytes >= 0), default=None),
        kernel_stamps=all(stat.kernel_stamps for stat in _last(stats)) if reported else None,
        cpu_ratio=CpuRatio(
            by_worker=cpu, max=max(cpu, default=None), missing=UNSET if cpu else "no worker reported twice"
        ),
        error_ms=stated_error(log, stats),
        clock=clock,
        network_rtt_ms=list(round_trips),
        machine=machine,
    )


def stated_error(log: RequestLog, stats: Sequence[WorkerStat]) -> StatedError:
    """Return by how much, in ms, 99 of 100 reported TTFT and ITL values are off at most, and what that is made of.

    stamp    of two stamps, STAMP_MS each
    read     stamps of ours: how late the loop came to its reads, of which its timer is a sample. The kernel's: nothing,
             but for chunks that were read together; see _waited_ms
    submit   TTFT only: how long it took from the dispatch, or the connection, to the stamp of the submission; the
             request's last byte left somewhere in between
    """
    delays_ms = np.array([stat.loop_delay_ns for stat in stats], dtype=np.float64) / 1e6
    if not len(delays_ms):
        nothing = ErrorBound(p99=None, made_of=None, missing="no worker reported")
        return StatedError(ttft=nothing, itl=nothing)
    submit_ms = _submit_ms(log)
    counts, most_ns = _read_counts(stats)
    if sum(counts) and all(stat.kernel_stamps for stat in _last(stats)):
        away_ms = max(float(delays_ms.max()), most_ns / 1e6)
        ttft_ms, itl_ms = (_quantile(waited_ms, _EACH, method="higher") for waited_ms in _waited_ms(log, away_ms))
    else:
        ttft_ms = itl_ms = float(np.quantile(delays_ms, _EACH))
    stamp_ms = 2 * STAMP_MS
    return StatedError(
        # The two may not add up: a late read makes a TTFT longer, a late stamp of the submission makes it shorter.
        ttft=ErrorBound(
            p99=stamp_ms + max(ttft_ms, submit_ms),
            made_of=ErrorParts(stamp=stamp_ms, read=ttft_ms, submit=submit_ms),
        ),
        itl=ErrorBound(p99=stamp_ms + itl_ms, made_of=ErrorParts(stamp=stamp_ms, read=itl_ms)),
    )


def _waited_ms(log: RequestLog, away_ms: float) -> tuple[Floats, Floats]:
    """Return by how much each TTFT and each gap may be off, ms, because chunks that came apart were read together.

    The kernel gives a read the stamp of the last bytes in it. Those before them came after the stamp before, so neither
    the time that led to such a read nor the gaps of 0 in it are off by more than the time that led to it; nor by more
    than `away_ms`, the longest for which the loop was seen not to look.
    """
    metrics = request_metrics(log)
    rows = np.flatnonzero(~np.isnan(metrics.ttft_ms))
    # Each request's TTFT, and the gaps behind it.
    times_ms = np.concatenate([metrics.ttft_ms[rows], metrics.itl_ms])
    of_row = np.concatenate([rows, metrics.itl_request])
    order = np.argsort(of_row, kind="stable")
    ordered_ms, of_row = times_ms[order], of_row[order]
    zero = ordered_ms == 0
    led_to = np.append(zero[1:] & (of_row[1:] == of_row[:-1]), np.zeros(min(len(zero), 1), bool))
    leading = np.maximum.accumulate(np.where(zero, 0, np.arange(len(zero))))
    waited_ms = np.empty_like(times_ms)
    waited_ms[order] = np.where(zero | led_to, np.minimum(ordered_ms[leading], away_ms), 0.0)
    return waited_ms[: len(rows)], waited_ms[len(rows) :]


def _submit_ms(log: RequestLog) -> float:
    """Return the 0.995 quantile of how late submissions can have been stamped; 0 where nothing was submitted."""
    began_ns = np.maximum(log.dispatch_ns, log.connected_ns)
    took_ms = (log.submit_ns - began_ns)[(log.submit_ns >= 0) & (began_ns >= 0)] / 1e6
    return _quantile(took_ms, _EACH)


def _reasons(
    lateness: Floats, delays: Floats, reads: Spread, cpu: Sequence[float], *, open_loop: bool
) -> Iterator[str]:
    late_ms, delay_ms, read_ms = _quantile(lateness, 0.99), _quantile(delays, 0.99), reads.p99 or 0.0
    if open_loop and late_ms > LATE_P99_MS:
        yield f"submissions were late by p99 {late_ms:.1f} ms (limit {LATE_P99_MS:g})"
    if delay_ms > LATE_P99_MS:
        yield f"the event loop was late by p99 {delay_ms:.1f} ms (limit {LATE_P99_MS:g})"
    if read_ms > LATE_P99_MS:
        yield f"replies waited to be read by p99 {read_ms:.1f} ms (limit {LATE_P99_MS:g})"
    if max(cpu, default=0.0) > BUSY_CPU_RATIO and delay_ms > BUSY_DELAY_P99_MS:
        yield f"a load worker used {100 * max(cpu):.0f} % of a core (limit {100 * BUSY_CPU_RATIO:.0f} %)"


def _quantile(values: Floats, q: float, *, method: Literal["linear", "higher"] = "linear") -> float:
    """Return a quantile, 0 where there are no values."""
    return float(np.quantile(values, q, method=method)) if len(values) else 0.0


def _stalled(stats: Sequence[WorkerStat]) -> list[str]:
    """Return the reason of a worker that stood still: too seldom for a quantile of its ticks to show it, but long."""
    worst = 0.0
    for ticks in _by_worker(stats):
        wall_ns = ticks[-1].at_ns - ticks[0].at_ns
        stood_ns = sum(stat.loop_delay_ns for stat in ticks[1:] if stat.loop_delay_ns > LATE_P99_MS * 1e6)
        worst = max(worst, stood_ns / wall_ns if wall_ns > 0 else 0.0)
    if worst <= STALLED_RATIO:
        return []
    return [f"a load worker stood still for {100 * worst:.1f} % of the time (limit {100 * STALLED_RATIO:g} %)"]


def _cpu_ratios(stats: Sequence[WorkerStat]) -> list[float]:
    spans = [(ticks[-1].cpu_ns - ticks[0].cpu_ns, ticks[-1].at_ns - ticks[0].at_ns) for ticks in _by_worker(stats)]
    return [cpu_ns / wall_ns for cpu_ns, wall_ns in spans if wall_ns > 0]


def _read_counts(stats: Sequence[WorkerStat]) -> tuple[list[int], int]:
    """Return the histogram of read lateness between the first and the last tick of all workers, and a bound on its
    largest.

    Workers count from their start on, so what they had counted at the first tick is taken off; with one tick nothing
    is, and their warm-up is in it.
    """
    parts, most_ns = [], 0.0
    for ticks in _by_worker(stats):
        after, before = ticks[-1].read_late_counts, ticks[0].read_late_counts if len(ticks) > 1 else ()
        before = before or (0,) * len(after)
        new = [late - early for late, early in zip(after, before, strict=True)]
        parts.append(new)
        last = max((index for index, count in enumerate(new) if count), default=None)
        if last is not None:
            most_ns = max(most_ns, min(bucket_bounds(last)[1], ticks[-1].read_late_max_ns))
    return add_counts(parts), int(most_ns)


def _read_lateness(stats: Sequence[WorkerStat]) -> Spread:
    counts, most_ns = _read_counts(stats)
    total = sum(counts)
    if not total:
        return _absent("no read bore a receive stamp of the kernel; loop_delay_ms bounds its lateness")
    p50, p99 = (quantile_ns(counts, q, max_ns=most_ns) / 1e6 for q in (0.5, 0.99))
    return Spread(count=total, p50=p50, p99=p99, max=most_ns / 1e6)


def _gc_pauses(stats: Sequence[WorkerStat]) -> GcPauses:
    """Return, since the workers started, the longest pause, and all pauses of the worker that paused most, together."""
    last = [stat for stat in _last(stats) if stat.gc_pause_max_ns >= 0]
    if not last:
        return GcPauses(max=None, total=None, missing="no worker reported")
    return GcPauses(
        max=max(stat.gc_pause_max_ns for stat in last) / 1e6, total=max(stat.gc_pause_total_ns for stat in last) / 1e6
    )


def _by_worker(stats: Sequence[WorkerStat]) -> list[list[WorkerStat]]:
    return [[stat for stat in stats if stat.worker == worker] for worker in sorted({stat.worker for stat in stats})]


def _last(stats: Sequence[WorkerStat]) -> list[WorkerStat]:
    return [ticks[-1] for ticks in _by_worker(stats)]


def _spread(values: Floats, why_empty: str) -> Spread:
    if not len(values):
        return _absent(why_empty)
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return Spread(count=len(values), p50=float(p50), p99=float(p99), max=float(values.max()))


def _absent(reason: str) -> Spread:
    return Spread(p50=None, p99=None, max=None, missing=reason)
