"""Where the mean wait for the first token went: TTFT = queue + prefill + other, for a run and for each of its slices.

The server's queue and prefill times come from the sums and counts of its histograms. Engines observe both when a
request *ends*, so the requests they speak of are those that ended in the window; the client's mean is taken over the
same requests, by the time they ended. (Setting a slice's histograms beside the TTFT of requests submitted in that
slice compares different requests.)

`other` is what is left: the network, the gateway, tokenising, the wait for the running engine step, output processing
and the client. Over a whole run, where the engine's own TTFT speaks of the same requests, `other` is told apart
further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Stamps = npt.NDArray[np.int64]

NO_SERVER = "no server offers queue and prefill times"
LIMIT = 1e100  # requests or seconds: far beyond any run


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSums:
    """What one server observed up to each scrape [T]: cumulative, never falling (restarts already counted up).

    `count` is in requests, `queue_s` and `prefill_s` are sums in seconds; `first_tokens` and `ttft_s` are count and
    sum of the engine's own TTFT, None where it has none.
    """

    at_ns: Stamps
    count: Floats
    queue_s: Floats
    prefill_s: Floats
    first_tokens: Floats | None = None
    ttft_s: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherParts:
    """What `other` consists of, mean ms. They sum to it where every reply has a TTFT.

    `outside_engine_ms`: network, gateway and client, that is the first output of any kind as the client saw it, less
    the engine's own TTFT. `engine_front_end_ms`: in the engine, but neither queue nor prefill (tokenising, the wait for
    the running step, output processing). `blank_output_ms`: from the first output to the first that is not blank.
    """

    outside_engine_ms: float
    engine_front_end_ms: float
    blank_output_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Mean parts, in ms, of the TTFT of the requests that ended in a window. The three parts sum to `ttft_ms` exactly.

    `coverage` is server over client requests: 1.0 says that both sides speak of the same number; above 1, the server
    finished requests that are not ours. Where there is no answer the parts are None and `missing` says why.
    """

    start_ns: int
    end_ns: int
    client_requests: int
    server_requests: int
    coverage: float | None
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    other_ms: float | None
    missing: str | None
    other: OtherParts | None = None


def decompose(
    ended_ns: Stamps,
    ttft_ms: Floats,
    servers: Sequence[FinishSums],
    *,
    start_ns: int,
    end_ns: int,
    output_ms: Floats | None = None,
    no_server: str = NO_SERVER,
) -> Breakdown:
    """Break down a whole window. `ended_ns` [n] and `ttft_ms` [n] (NaN: no first token) are the client's requests.

    With `output_ms` [n], submission to the first output of any kind, `other` is told apart as well, where client and
    engine counted the same number of requests and of first tokens. Server sums run from the last scrape at or before
    `start_ns` to the last there is: what settles after `end_ns` belongs to requests that ended before it. Where scrapes
    began after `start_ns` or ended before `end_ns`, only the requests that ended while all servers were scraped count.
    `no_server` is why there are no server sums, where there are none.
    """
    first = [_last_at_or_before(server, start_ns) for server in servers]
    last = [len(server.at_ns) - 1 for server in servers]
    inside = (ended_ns >= start_ns) & (ended_ns <= end_ns)
    for server in servers:
        if len(server.at_ns):
            inside &= ended_ns <= server.at_ns[-1]
            if server.at_ns[0] > start_ns:
                inside &= ended_ns > server.at_ns[0]
    whole = _breakdown(ttft_ms[inside], servers, first, last, (start_ns, end_ns), no_server)
    if output_ms is None or whole.missing is not None:
        return whole
    waits = (ttft_ms[inside], output_ms[inside])
    return replace(whole, other=_other_parts(whole, waits, servers, first, last))


def decompose_slices(
    ended_ns: Stamps,
    ttft_ms: Floats,
    servers: Sequence[FinishSums],
    *,
    edges_ns: Sequence[int],
    no_server: str = NO_SERVER,
) -> tuple[Breakdown, ...]:
    """Break down each slice between neighbouring edges; the last slice takes what settles after its end.

    Each edge is moved to the last scrape at or before it, on both sides, so that client and server speak of the same
    requests: a slice's own `start_ns` and `end_ns` are those scrape times.
    """
    if not servers or any(len(server.at_ns) == 0 for server in servers):
        return tuple(_breakdown(ttft_ms[:0], servers, [], [], span, no_server) for span in pairwise(edges_ns))
    picks = [[_last_at_or_before(server, edge) for server in servers] for edge in edges_ns]
    picks[-1] = [len(server.at_ns) - 1 for server in servers]
    times = [int(np.median([server.at_ns[pick] for server, pick in zip(servers, row, strict=True)])) for row in picks]
    parts = []
    for k in range(len(edges_ns) - 1):
        span = (times[k], times[k + 1])
        inside = (ended_ns > span[0]) & (ended_ns <= span[1])
        parts.append(_breakdown(ttft_ms[inside], servers, picks[k], picks[k + 1], span, no_server))
    return tuple(parts)


def _breakdown(
    ttft_ms: Floats,
    servers: Sequence[FinishSums],
    first: Sequence[int],
    last: Sequence[int],
    span: tuple[int, int],
    no_server: str,
) -> Breakdown:
    seen = ttft_ms[np.isfinite(ttft_ms)]
    count = queue_s = prefill_s = 0.0
    for server, a, b in zip(servers, first, last, strict=False):
        if len(server.at_ns):
            count += float(server.count[b] - server.count[a])
            queue_s += float(server.queue_s[b] - server.queue_s[a])
            prefill_s += float(server.prefill_s[b] - server.prefill_s[a])
    missing = _why_not(servers, no_server, client=len(seen), server=count)
    if not all(value < LIMIT for value in (count, queue_s, prefill_s)):
        missing, count = "the server's sums are too large to calculate with", 0.0
    mean_ms = float(seen.mean()) if len(seen) else None
    queue_ms = prefill_ms = other_ms = None
    if missing is None and mean_ms is not None:
        queue_ms, prefill_ms = _to_grid(1e3 * queue_s / count), _to_grid(1e3 * prefill_s / count)
        if mean_ms < queue_ms + prefill_ms:
            # The rest is negative (strangers' requests) and may be too large to keep the mean's last bits.
            mean_ms = _to_grid(mean_ms)
        other_ms = mean_ms - (queue_ms + prefill_ms)
    return Breakdown(
        start_ns=span[0],
        end_ns=span[1],
        client_requests=len(seen),
        server_requests=round(count),
        coverage=count / len(seen) if len(seen) and servers else None,
        ttft_ms=mean_ms,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        other_ms=other_ms,
        missing=missing,
    )


def _other_parts(
    whole: Breakdown,
    waits: tuple[Floats, Floats],
    servers: Sequence[FinishSums],
    first: Sequence[int],
    last: Sequence[int],
) -> OtherParts | None:
    """Return the parts of `other`, or None unless the engine's TTFT is known to speak of just these requests."""
    ttft_ms, output_ms = waits
    tokens = ttft_s = 0.0
    for server, a, b in zip(servers, first, last, strict=True):
        if server.first_tokens is None or server.ttft_s is None:
            return None
        tokens += float(server.first_tokens[b] - server.first_tokens[a])
        ttft_s += float(server.ttft_s[b] - server.ttft_s[a])
    if not len(output_ms) == round(tokens) == whole.server_requests or not np.isfinite(output_ms).all():
        return None
    if whole.queue_ms is None or whole.prefill_ms is None:
        return None
    engine_ms = 1e3 * ttft_s / tokens
    return OtherParts(
        outside_engine_ms=float(output_ms.mean()) - engine_ms,
        engine_front_end_ms=engine_ms - (whole.queue_ms + whole.prefill_ms),
        blank_output_ms=float(np.nanmean(ttft_ms - output_ms)),
    )


def _why_not(servers: Sequence[FinishSums], no_server: str, *, client: int, server: float) -> str | None:
    if not servers:
        return no_server
    if client == 0:
        return "no request with a first token ended here"
    if server <= 0:
        return "the server observed no finished request here"
    return None


def _last_at_or_before(server: FinishSums, at_ns: int) -> int:
    """Return the row of the last scrape at or before a time; the first scrape where there is none before."""
    return max(0, int(np.searchsorted(server.at_ns, at_ns, side="right")) - 1)


def _to_grid(value_ms: float) -> float:
    """Round to 2^-20 ms (1 ns): sums and differences of such numbers are exact in floating point."""
    return round(value_ms * 2**20) / 2**20
