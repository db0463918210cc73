"""Where the mean wait for the first token went, by histogram sums alone: for runs too short to attribute by request.

The server's queue and prefill times come from the sums and counts of its histograms. Engines observe both when a
request *ends*, so the requests they speak of are those that ended in the window; the client's mean is taken over the
same requests, by the time they ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rundir.columns import Floats, Ints

NO_SERVER = "no server offers queue and prefill times"
LIMIT = 1e100  # requests or seconds: far beyond any run


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSums:
    """What one server observed up to each scrape [T]: cumulative, never falling (restarts already counted up).

    `count` is in requests, `queue_s` and `prefill_s` are sums in seconds.
    """

    at_ns: Ints
    count: Floats
    queue_s: Floats
    prefill_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Mean parts, in ms, of the TTFT of the requests that ended in a window. The three parts sum to `ttft_ms`.

    `coverage` is server over client requests: 1.0 says that both sides speak of the same number; above 1, the server
    finished requests that are not ours. Where there is no answer the parts are None and `missing` says why.
    """

    client_requests: int
    server_requests: int
    coverage: float | None
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    other_ms: float | None
    missing: str | None


def decompose(
    ended_ns: Ints,
    ttft_ms: Floats,
    servers: Sequence[FinishSums],
    *,
    start_ns: int,
    end_ns: int,
    no_server: str = NO_SERVER,
) -> Breakdown:
    """Break down a whole window. `ended_ns` [n] and `ttft_ms` [n] (NaN: no first token) are the client's requests.

    Server sums run from the last scrape at or before `start_ns` to the last there is: what settles after `end_ns`
    belongs to requests that ended before it. Where scrapes began after `start_ns` or ended before `end_ns`, only the
    requests that ended while all servers were scraped count. `no_server` is why there are no server sums, where there
    are none.
    """
    inside = (ended_ns >= start_ns) & (ended_ns <= end_ns)
    count = queue_s = prefill_s = 0.0
    for server in servers:
        if not len(server.at_ns):
            continue
        inside &= ended_ns <= server.at_ns[-1]
        if server.at_ns[0] > start_ns:
            inside &= ended_ns > server.at_ns[0]
        first = max(0, int(np.searchsorted(server.at_ns, start_ns, side="right")) - 1)
        count += float(server.count[-1] - server.count[first])
        queue_s += float(server.queue_s[-1] - server.queue_s[first])
        prefill_s += float(server.prefill_s[-1] - server.prefill_s[first])
    seen = ttft_ms[inside & np.isfinite(ttft_ms)]
    missing = None
    if not servers:
        missing = no_server
    elif not len(seen):
        missing = "no request with a first token ended here"
    elif count <= 0:
        missing = "the server observed no finished request here"
    if not all(value < LIMIT for value in (count, queue_s, prefill_s)):
        missing, count = "the server's sums are too large to calculate with", 0.0
    mean_ms = float(seen.mean()) if len(seen) else None
    queue_ms = prefill_ms = other_ms = None
    if missing is None and mean_ms is not None:
        queue_ms, prefill_ms = 1e3 * queue_s / count, 1e3 * prefill_s / count
        other_ms = mean_ms - queue_ms - prefill_ms
    return Breakdown(
        client_requests=len(seen),
        server_requests=round(count),
        coverage=count / len(seen) if len(seen) and servers else None,
        ttft_ms=mean_ms,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        other_ms=other_ms,
        missing=missing,
    )
