"""How far engines' clocks are from ours, by causality: no request arrives before it was sent, no token before it was.

Engines are distinguished by what their spans say of their process, and by the URL that was asked. Each joined request
bounds its engine's offset from both sides, and the tightest bounds of a run leave half the least way in and out as
error. Nothing is assumed of how a round trip divides into its two ways. Only where an engine was asked at an address of
this machine is it assumed to run by this machine's clock, as far as the bounds allow: they stay the error, since a
tunnel or a gateway can lead from there to another machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sidelight.correlator.exact.table import SLACK_S, Joined, by_calls, hand_over_bounds
from sidelight.correlator.requests import first_output_ns
from sidelight.loadgen.requests.metrics import span_s
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.gateway_spans import GatewaySpan
from sidelight.recorded.nodes import NodeTime, clock_errors_ns
from sidelight.rundir.columns import Bools, Floats, Ints

NO_PAIRS = "no request was joined with stamps of the engine's clock"
NO_AGREEMENT = "each span begins before its request was sent, or ends after its reply, wherever the clock is set"
NO_BOUNDS = "the requests that were joined bound the offset from one side only"
_QUORUM = 0.9
_FAR_NS = 2**62
_FAR_S = 1e9
_MOST_BOUNDS, _MOST_OF_PAIRS = 300, 30_000  # of a pair of clocks, and of all of them: some 4 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset to add to the engine's stamps for our clock, and its error, ns.

    None where `reason` says why. `pairs` is the number of requests that bound it, `left_out` the number of further ones
    that contradict those.
    """

    offset_ns: int | None
    error_ns: int | None
    pairs: int
    left_out: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffsets:
    """The clocks of a run's engines against ours.

    by_engine               by the engine's name: its process and the URL that was asked, as far as they are known.
                            Never empty: where no request was joined with stamps, one of "" says so
    offset_ns, error_ns     float64 [n], each request's own: those of the clock that stamped it, NaN where none did, or
                            its offset is unknown. Whole numbers below 100 days
    """

    by_engine: Mapping[str, ClockOffset]
    offset_ns: Floats
    error_ns: Floats


def clock_offsets(
    requests: RequestLog, joined: Joined, own_urls: Collection[str] = (), nodes: Sequence[NodeTime] = ()
) -> ClockOffsets:
    """Return each engine's offset by the requests joined with its stamps; one with few of them has its own wider error.

    Engines behind one URL that do not tell themselves apart are taken for one, whose stamps then contradict each other.
    `own_urls` are those of the URLs that are at an address of this machine. The errors of the clocks of `nodes`, which
    stamped their requests, are added.
    """
    client_error_ns = clock_errors_ns(requests, nodes)
    engines: dict[tuple[str, str], list[int]] = {}
    for row in np.flatnonzero(joined.arrival_ns >= 0).tolist():
        engines.setdefault((joined.clock[row], requests.endpoint_url[row]), []).append(row)
    least, most = _bounds(requests, joined)
    by_engine: dict[str, ClockOffset] = {}
    offset_ns, error_ns = np.full((2, len(joined)), np.nan)
    for (clock, url), rows in engines.items():
        offset = _offset(least[rows], most[rows], may_be_ours=url in own_urls)
        if offset.offset_ns is not None and offset.error_ns is not None:
            offset_ns[rows], error_ns[rows] = offset.offset_ns, offset.error_ns + client_error_ns[rows]
            offset = replace(offset, error_ns=int(error_ns[rows].max()))
        by_engine[f"{clock} at {url}" if clock else url] = offset
    nothing = ClockOffset(offset_ns=None, error_ns=None, pairs=0, reason=NO_PAIRS)
    return ClockOffsets(by_engine=by_engine or {"": nothing}, offset_ns=offset_ns, error_ns=error_ns)


class EngineClocks:
    """Bounds on the clocks of engines that share requests, by the names of both.

    They are of the last requests, for those who see a few at a time: a watch, and the live page. The pairs that were
    not seen for the longest make room for others.
    """

    def __init__(self) -> None:
        self._bounds: dict[str, deque[tuple[int, int]]] = {}
        self.size = 0

    def extended(self, pair: str, least_ns: Ints, most_ns: Ints) -> tuple[Ints, Ints]:
        """Return the bounds of late with those of these requests, which are kept."""
        bounds = self._bounds.pop(pair, None) or deque(maxlen=_MOST_BOUNDS)
        self.size -= len(bounds)
        bounds.extend(zip(least_ns.tolist(), most_ns.tolist(), strict=True))
        self._bounds[pair] = bounds
        self.size += len(bounds)
        while self.size > _MOST_OF_PAIRS:
            self.size -= len(self._bounds.pop(next(iter(self._bounds))))
        least, most = np.array(bounds, dtype=np.int64).T
        return least, most


def handed_over(
    joined: Joined,
    requests: RequestLog,
    one_machine: Bools | None = None,
    late: EngineClocks | None = None,
    gateways: Sequence[tuple[GatewaySpan, ...]] = (),
) -> Joined:
    """Return requests with the time between their two engines, `router_s`, and its error.

    It lies between stamps of two clocks: the second engine cannot have a request before the first is done with it, and
    the client waited at least for both. Where it can be known it is in the engines' TTFT and whole time too, else NaN.
    `one_machine` [n] says whose engines have addresses of one machine, and are assumed to run by its clock as far as
    the bounds allow. `late` has what earlier requests say. The calls of a router among the `gateways` [n] bound it too,
    and complete what undivided spans leave open (`by_calls`).

    Where it is mostly smaller than the error, or than twice that of an offset that nothing else speaks for, it is left
    where it is: outside the engines.
    """
    passed = gateways or [()] * len(joined)
    joined, shared = by_calls(joined, passed), np.isfinite(joined.hand_over_s)
    if not shared.any():
        return joined
    router_s, error_s = np.full((2, len(joined)), np.nan)
    # It is at most what the client waited for beside both engines.
    whole_s = np.where(requests.status == "ok", span_s(requests.submit_ns, requests.end_ns), np.nan)
    waited_s = span_s(requests.submit_ns, first_output_ns(requests))
    beside_s = np.fmin(waited_s - joined.ttft_s, whole_s - joined.e2e_s)
    called = hand_over_bounds(joined, passed)
    most_s = np.clip(np.nan_to_num(np.fmin(beside_s, called.most_s), nan=_FAR_S), -_FAR_S, _FAR_S)
    least_s = np.nan_to_num(called.least_s)
    for pair in dict.fromkeys(joined.hand_over_by[shared].tolist()):
        rows = np.flatnonzero(shared & (joined.hand_over_by == pair))
        between_s = joined.hand_over_s[rows]
        if not pair:
            router_s[rows], error_s[rows] = between_s, 0.0
            continue
        least_ns = np.rint((between_s - most_s[rows]) * 1e9).astype(np.int64)
        most_ns = np.rint((between_s - least_s[rows]) * 1e9).astype(np.int64)
        if late is not None:
            least_ns, most_ns = late.extended(pair, least_ns, most_ns)
        offset = _offset(least_ns, most_ns, may_be_ours=one_machine is not None and bool(one_machine[rows].all()))
        if offset.offset_ns is not None and offset.error_ns is not None:
            usual_ns = np.median(most_ns) - offset.offset_ns + 1e9 * np.median(least_s[rows])
            if usual_ns >= (1 if offset.offset_ns == 0 else 2) * offset.error_ns:
                router_s[rows], error_s[rows] = between_s - offset.offset_ns / 1e9, offset.error_ns / 1e9
    is_known = (router_s >= -SLACK_S) & (router_s <= most_s + np.nan_to_num(error_s) + SLACK_S)
    router_s = np.where(is_known, np.maximum(router_s, least_s), np.nan)
    added_s = np.nan_to_num(router_s)
    columns: dict[str, Any] = {
        "router_s": np.where(shared, router_s, joined.router_s),
        "router_error_s": np.where(is_known, error_s, np.nan),
        "ttft_s": joined.ttft_s + added_s,
        "e2e_s": joined.e2e_s + added_s,
        "end_ns": np.where(joined.end_ns >= 0, joined.end_ns + np.rint(added_s * 1e9).astype(np.int64), -1),
    }
    return replace(joined, **columns)


def _offset(least: Ints, most: Ints, *, may_be_ours: bool) -> ClockOffset:
    """Return the middle of the possible clock offsets, with half their range as error.

    An offset is possible if it puts no effect before its cause. Sent is not after arrived, the engine's first token not
    after the client's first output, its end not after ours.

    - a clock that may be ours, where 0 is among these offsets: 0, with the farthest of them as error
    - no request whose reply came, or only such whose own bounds contradict each other: unknown
    - bounds that contradict each other by up to 10 ms, as clocks drift and stamps are late: half of that is the error
    - by more: what most of them agree on (Marzullo 1984), if that are nine of ten; a single span may lie. Else unknown:
      the engine's clock was set during the run, or it is several engines with a clock each
    """
    agree = _agreeing(least, most)
    if not agree.any():
        return ClockOffset(offset_ns=None, error_ns=None, pairs=len(least), reason=NO_AGREEMENT)
    low_ns, high_ns, pairs = int(least[agree].max()), int(most[agree].min()), int(agree.sum())
    if low_ns == -_FAR_NS or high_ns == _FAR_NS:
        return ClockOffset(offset_ns=None, error_ns=None, pairs=len(least), reason=NO_BOUNDS)
    if pairs < _QUORUM * len(least):
        apart_ns = int(least[least > -_FAR_NS].max()) - int(most[most < _FAR_NS].min())
        reason = (
            f"its stamps contradict each other by {apart_ns / 1e6:,.0f} ms: its clock was set during the run, "
            "or several engines are behind it whose spans have no service.instance.id"
        )
        return ClockOffset(offset_ns=None, error_ns=None, pairs=len(least), reason=reason)
    offset_ns, error_ns = (low_ns + high_ns) // 2, (abs(high_ns - low_ns) + 1) // 2
    if may_be_ours and low_ns <= 0 <= high_ns:
        offset_ns, error_ns = 0, max(-low_ns, high_ns)
    return ClockOffset(offset_ns=offset_ns, error_ns=error_ns, pairs=pairs, left_out=len(least) - pairs)


def _bounds(requests: RequestLog, joined: Joined) -> tuple[Ints, Ints]:
    """Return the least and greatest offset that each request allows, far away if unbounded."""
    sent = (requests.submit_ns >= 0) & (joined.arrival_ns >= 0)
    least = np.where(sent, requests.submit_ns - joined.arrival_ns, -_FAR_NS)
    spoken_ns = first_token_ns(joined)
    spoken = (spoken_ns >= 0) & (requests.first_output_ns >= 0)
    # Engines go on for a while with what a client gave up.
    ended = (joined.end_ns >= 0) & (requests.end_ns >= 0) & ~np.isin(requests.status, ("cancelled", "failed", "left"))
    most = np.minimum(
        np.where(spoken, requests.first_output_ns - spoken_ns, _FAR_NS),
        np.where(ended, requests.end_ns - joined.end_ns, _FAR_NS),
    )
    return least, most


def _agreeing(least: Ints, most: Ints) -> Bools:
    """Return a mask of the bounds that hold the most widely shared offset.

    Each is widened by half of the lateness that stamps may have. Bounds that hold no offset hold none of the others'.
    """
    slack_ns = round(SLACK_S * 1e9) // 2
    begin, end = least - slack_ns, most + slack_ns
    possible = begin <= end
    if not possible.any():
        return possible
    edges = np.concatenate([begin[possible], end[possible]])
    steps = np.repeat(np.array([1, -1]), int(possible.sum()))
    # Of edges at one place those that begin go first: bounds that touch agree.
    order = np.lexsort((-steps, edges))
    offset_ns = edges[order][np.argmax(np.cumsum(steps[order]))]
    return np.asarray((begin <= offset_ns) & (offset_ns <= end), dtype=np.bool_)


def first_token_ns(joined: Joined) -> Ints:
    """Return each request's first-token time, int64 [n] ns by the engine's clock, -1 where unknown."""
    # A time beyond all that a stamp can hold is none.
    known = (joined.arrival_ns >= 0) & (np.abs(joined.ttft_s) < _FAR_NS / 1e9)
    waited_ns = np.rint(np.where(known, joined.ttft_s, 0.0) * 1e9).astype(np.int64)
    return np.where(known, joined.arrival_ns + waited_ns, -1)
