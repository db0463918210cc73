"""Whether the load of a run was sustained: its requests, and the engine's queue beside them, judged by `stability`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.load.stability import Stability, verdict
from sidelight.correlator.statistics.server_load import gauge_samples, without_loads
from sidelight.loadgen.requests.rates import TOO_MANY_FAILED, failed_share
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.series.table import EndpointSeries

NOTHING_SENT = "no load was sent"
CLOSED = (
    "in a closed loop the number in flight is fixed, and a slower system is sent less: requests cannot pile up, and no "
    "overload shows"
)


def stability_of(requests: RequestLog, endpoints: Sequence[EndpointSeries], *, closed_loop: bool) -> Stability:
    """Judge the load that n requests were; its verdict is None where none was sent, or of a closed loop.

    A request that a cap held back counts as in flight from when it was due. One that was given up, by a timeout or by
    us, counts so for ever: the system did not serve it. What fails at once does not pile up, so that of many failures
    no verdict but an overload follows. Those whose KV caches are loaded wait for no place.
    """
    sent = requests.dispatch_ns >= 0
    if not sent.any():
        return Stability(verdict=None, reason=NOTHING_SENT)
    if closed_loop:
        return Stability(verdict=None, reason=CLOSED)
    due_ns = (requests.dispatch_ns - np.maximum(requests.held_ns, 0))[sent]
    begin_ns = int(due_ns.min())
    given_up = np.array([error.startswith("timeout") for error in requests.error], dtype=np.bool_)
    ended = (requests.end_ns >= 0) & ~given_up & ~np.isin(requests.status, ("cancelled", "in_flight"))
    ended_s = np.where(ended, (requests.end_ns - begin_ns) / 1e9, np.nan)
    queue = without_loads(gauge_samples(endpoints, "requests_waiting"), endpoints)
    judged = verdict((queue.at_ns - begin_ns) / 1e9, queue.amount, (due_ns - begin_ns) / 1e9, ended_s[sent])
    failed = failed_share(requests)
    if judged.verdict == "growing" or failed < TOO_MANY_FAILED:
        return judged
    return replace(judged, verdict=None, reason=f"{failed:.0%} of the requests failed")
