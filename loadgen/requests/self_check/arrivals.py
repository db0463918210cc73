"""The punctuality of requests against the arrival process. It is a statement about the load, not about latencies."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from sidelight.loadgen.requests.metrics import schedule_lateness_ms, span_ms
from sidelight.loadgen.requests.self_check.sentences import ms
from sidelight.loadgen.requests.self_check.workers import Spread, spread
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import doc
from sidelight.rundir.stats import known

# Requests that leave together within so little are no other load to any server.
LEAST_MS = 1.0


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """The deviation of the sent arrival process from the requested one."""

    late_ms: Annotated[
        Spread, doc("How late requests left: from scheduled time to submission, without connecting and any cap.", "ms")
    ]
    mean_gap_ms: Annotated[float | None, doc("Mean gap between scheduled times; null below two requests.", "ms")]
    late_over_gap: Annotated[float | None, doc("`late_ms.p99` over `mean_gap_ms`.", "ratio")]
    distorted: Annotated[
        bool | None,
        doc("Whether requests left in bunches: `late_ms.p99` is over 1 ms and over the mean gap; null: not known."),
    ]
    sentence: Annotated[str | None, doc("The same in words; null where nothing was submitted.")]


def arrivals(log: RequestLog) -> Arrivals:
    """Return the lateness of the requests of an open loop."""
    late = spread(known(_late_ms(log)), "nothing was submitted")
    due_ns = log.scheduled_ns[log.scheduled_ns >= 0]
    gap_ms = float(due_ns.max() - due_ns.min()) / 1e6 / (len(due_ns) - 1) if len(due_ns) > 1 else None
    if late.p99 is None or not gap_ms:
        distorted, beyond = None, ""
    else:
        distorted = late.p99 > max(LEAST_MS, gap_ms)
        beyond = f", more than the mean gap of {ms(gap_ms)} between them: they left in bunches that were not asked for"
    return Arrivals(
        late_ms=late,
        mean_gap_ms=gap_ms,
        late_over_gap=late.p99 / gap_ms if late.p99 is not None and gap_ms else None,
        distorted=distorted,
        sentence=None
        if late.p99 is None
        else f"Requests left up to {ms(late.p99)} after their scheduled time (p99){beyond if distorted else ''}.",
    )


def _late_ms(log: RequestLog) -> Floats:
    """Return each request's dispatch lateness plus the time it took to leave, ms.

    That time counts from the dispatch, or from its connection.
    """
    began_ns = np.maximum(log.dispatch_ns, log.connected_ns)
    return schedule_lateness_ms(log) + span_ms(began_ns, log.submit_ns)
