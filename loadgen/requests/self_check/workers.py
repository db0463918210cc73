"""Reports of load workers on themselves: lateness and use of resources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from sidelight.loadgen.records import WorkerStat
from sidelight.loadgen.transports.lateness import add_counts, bucket_bounds, quantile_ns
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Count, Missing, doc


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a lateness."""

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


def spread(values: Floats, why_empty: str) -> Spread:
    """Return the spread of a lateness, from its values in ms."""
    if not len(values):
        return absent(why_empty)
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return Spread(count=len(values), p50=float(p50), p99=float(p99), max=float(values.max()))


def absent(reason: str) -> Spread:
    """Return a spread without values, with the reason."""
    return Spread(p50=None, p99=None, max=None, missing=reason)


def loop_delays_ms(stats: Sequence[WorkerStat]) -> Floats:
    """Return the lateness of the workers' timers, ms, one value a tick."""
    return np.array([stat.loop_delay_ns for stat in stats], dtype=np.float64) / 1e6


def read_lateness(stats: Sequence[WorkerStat]) -> Spread:
    """Return the time that bytes lay in the kernel before they were read.

    It is of all workers between first and last tick.
    """
    counts, most_ns = read_counts(stats)
    total = sum(counts)
    if not total:
        return absent("no read bore a receive stamp of the kernel; loop_delay_ms bounds its lateness")
    p50, p99 = (quantile_ns(counts, q, max_ns=most_ns) / 1e6 for q in (0.5, 0.99))
    return Spread(count=total, p50=p50, p99=p99, max=most_ns / 1e6)


def read_counts(stats: Sequence[WorkerStat]) -> tuple[list[int], int]:
    """Return the histogram of read lateness, and a bound on its largest value.

    It is of all workers, between the first and the last tick.

    Workers count from their start on, so what they had counted at the first tick is taken off; with one tick nothing
    is, and their warm-up is in it.
    """
    parts, most_ns = [], 0.0
    for ticks in by_worker(stats).values():
        before = ticks[0].read_late_counts if len(ticks) > 1 else ()
        new, worst_ns = counted_between(before, ticks[-1])
        parts.append(new)
        most_ns = max(most_ns, worst_ns)
    return add_counts(parts), int(most_ns)


def counted_between(before: Sequence[int], tick: WorkerStat) -> tuple[list[int], float]:
    """Return a worker's histogram since `before`, and a bound on its largest value, ns."""
    after = tick.read_late_counts
    before = before or (0,) * len(after)
    new = [late - early for late, early in zip(after, before, strict=True)]
    last = max((index for index, count in enumerate(new) if count), default=None)
    return new, 0.0 if last is None else min(bucket_bounds(last)[1], tick.read_late_max_ns)


def cpu_ratio(stats: Sequence[WorkerStat]) -> CpuRatio:
    """Return the workers' CPU time over wall time."""
    ends = [(ticks[0], ticks[-1]) for ticks in by_worker(stats).values()]
    spans = [(last.cpu_ns - first.cpu_ns, last.at_ns - first.at_ns) for first, last in ends]
    ratios = [cpu_ns / wall_ns for cpu_ns, wall_ns in spans if wall_ns > 0]
    return CpuRatio(
        by_worker=ratios, max=max(ratios, default=None), missing=UNSET if ratios else "no worker reported twice"
    )


def gc_pauses(stats: Sequence[WorkerStat]) -> GcPauses:
    """Return the longest pause and the greatest total of pauses of a worker.

    Both count since the workers started; the total is of the worker that paused most.
    """
    last = [stat for stat in last_ticks(stats) if stat.gc_pause_max_ns >= 0]
    if not last:
        return GcPauses(max=None, total=None, missing="no worker reported")
    return GcPauses(
        max=max(stat.gc_pause_max_ns for stat in last) / 1e6, total=max(stat.gc_pause_total_ns for stat in last) / 1e6
    )


def kernel_stamped(stats: Sequence[WorkerStat]) -> bool | None:
    """Return whether all workers' reads bear the kernel's stamps; None without a report."""
    return all(stat.kernel_stamps for stat in last_ticks(stats)) if stats else None


def by_worker(stats: Sequence[WorkerStat]) -> dict[int, list[WorkerStat]]:
    """Return the ticks of each worker."""
    ticks: dict[int, list[WorkerStat]] = {worker: [] for worker in sorted({stat.worker for stat in stats})}
    for stat in stats:
        ticks[stat.worker].append(stat)
    return ticks


def last_ticks(stats: Sequence[WorkerStat]) -> list[WorkerStat]:
    """Return the last tick of each worker."""
    return [ticks[-1] for ticks in by_worker(stats).values()]
