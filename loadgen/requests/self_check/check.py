"""The load generator's own error: can what it measured be trusted, and was the load the one that was asked for?

`stated_error` says by how much a single reported latency may be off; where that is little beside the metric itself, the
metric is trusted, however busy the machine was. `arrivals` says how late requests left, which changes the load and no
latency, since a latency begins with the submission. `cause` names who held the load generator up, by what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from sidelight.loadgen.host.clock_sync import ClockSummary
from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.loadgen.host.round_trip import RoundTrip
from sidelight.loadgen.records import WorkerStat
from sidelight.loadgen.requests.metrics import schedule_lateness_ms
from sidelight.loadgen.requests.self_check.arrivals import Arrivals, arrivals
from sidelight.loadgen.requests.self_check.cause import Cause, cause
from sidelight.loadgen.requests.self_check.nodes import Node, cause_of
from sidelight.loadgen.requests.self_check.sentences import distrust, excesses, statement
from sidelight.loadgen.requests.self_check.stated_error import STAMP_MS, StatedError, stated_error
from sidelight.loadgen.requests.self_check.workers import (
    CpuRatio,
    GcPauses,
    Spread,
    absent,
    cpu_ratio,
    gc_pauses,
    kernel_stamped,
    loop_delays_ms,
    read_lateness,
    spread,
)
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.fields import Count, doc
from sidelight.rundir.stats import known

__all__ = ["STAMP_MS", "CpuRatio", "SelfCheck", "Spread", "self_check", "stated_error"]

TRUSTED = "measured within its limits"
UNKNOWN = "did not report on itself"
NOT_TRUSTED = "may have added more to latencies than its limits allow"


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The load generator's own error, and its environment: clock, network and machine."""

    verdict: Annotated[str, doc("whether the load generator measured within its limits, in words")]
    trusted: Annotated[
        bool | None,
        doc(
            "false: the stated error of TTFT or of gaps is over its limit (`error_ms`); null: no worker reported "
            "on itself"
        ),
    ]
    first_line: Annotated[str | None, doc("what may be wrong, by how much, why, and what helps; null: nothing")]
    reasons: Annotated[list[str], doc("the metrics whose error is over its limit, and by how much each may be wrong")]
    statement: Annotated[str, doc('how far off the other metrics are at most, in words; "" where there are none')]
    cause: Annotated[
        Cause | None,
        doc("who held the load generator up; null where it is trusted and arrivals are as they were asked for"),
    ]
    arrivals: Annotated[
        Arrivals | None,
        doc("how late requests of an open loop left, which changes the load and no latency; null in a closed loop"),
    ]
    schedule_lateness_ms: Annotated[Spread, doc("dispatch - scheduled, of an open loop", "ms")]
    loop_delay_ms: Annotated[
        Spread, doc("how late the workers' timers fired: a bound on how late a read was stamped", "ms")
    ]
    read_lateness_ms: Annotated[
        Spread,
        doc("how long bytes lay in the kernel before they were read, by its stamps", "ms"),
    ]
    gc_pause_ms: Annotated[
        GcPauses,
        doc("pauses of the garbage collector since the workers started: the longest (`max`), and `total`", "ms"),
    ]
    rss_bytes: Annotated[int | None, doc("resident memory of the largest worker", "bytes")]
    kernel_stamps: Annotated[
        bool | None,
        doc("whether reads have the kernel's stamps, so that their lateness is not in the results; null: not known"),
    ]
    cpu_ratio: Annotated[CpuRatio, doc("CPU time over wall time, `by_worker` and `max`", "ratio")]
    error_ms: Annotated[
        StatedError,
        doc(
            "`ttft` and `itl`: by how much 99 of 100 values are off at most (`p99`), `made_of` the uncertainty of two "
            "stamps (`stamp`), reads that were stamped late or together (`read`) and, for TTFT where the submission is "
            "stamped behind the call, the time since dispatch (`submit`); and the `limit` beyond which it is not "
            "trusted: 1 ms or 2 % of the `median`, whichever is more",
            "ms",
        ),
    ]
    clock: Annotated[
        ClockSummary | None,
        doc("how this machine's clock is synchronised, and its error"),
    ]
    network_rtt_ms: Annotated[list[RoundTrip], doc("round-trip time to each target, apart from any request", "ms")]
    machine: Annotated[
        MachineLoad | None,
        doc("what else used this machine's processors"),
    ]
    late_orders: Annotated[
        Count | UnsetType,
        doc("load workers on nodes that had their order after the load's start; absent without nodes", "workers"),
    ] = UNSET


def self_check(
    log: RequestLog,
    stats: Sequence[WorkerStat],
    *,
    open_loop: bool,
    clock: ClockSummary | None = None,
    round_trips: Sequence[RoundTrip] = (),
    machine: MachineLoad | None = None,
    nodes: Sequence[Node] = (),
    start_ns: int = 0,
) -> SelfCheck:
    """Return the self-check of a measured phase, which began at `start_ns` on `nodes`."""
    error, cpu = stated_error(log, stats), cpu_ratio(stats)
    reasons = excesses(error)
    sent = arrivals(log) if open_loop else None
    held_up = cause_of(stats, nodes) if nodes else cause(cpu.max, machine)
    no_schedule = absent("a closed loop has no schedule")
    return SelfCheck(
        verdict=NOT_TRUSTED if reasons else TRUSTED if stats else UNKNOWN,
        trusted=not reasons if stats else None,
        first_line=distrust(error, held_up) if reasons else None,
        reasons=reasons,
        statement=statement(error),
        cause=held_up if reasons or (sent is not None and sent.distorted) else None,
        arrivals=sent,
        schedule_lateness_ms=spread(known(schedule_lateness_ms(log)), "nothing was submitted")
        if open_loop
        else no_schedule,
        loop_delay_ms=spread(loop_delays_ms(stats), "no worker reported"),
        read_lateness_ms=read_lateness(stats),
        gc_pause_ms=gc_pauses(stats),
        rss_bytes=max((stat.rss_bytes for stat in stats if stat.rss_bytes >= 0), default=None),
        kernel_stamps=kernel_stamped(stats),
        cpu_ratio=cpu,
        error_ms=error,
        clock=clock,
        network_rtt_ms=list(round_trips),
        machine=machine,
        late_orders=sum(end.ordered_ns > start_ns for node in nodes for end in node.ends) if nodes else UNSET,
    )
