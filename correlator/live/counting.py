"""Count of requests with client and engine in one trace, and of breaks of traces."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from sidelight.correlator.live.reasons import (
    ELSEWHERE,
    NEW_TRACE,
    NO_CLIENT,
    NO_ENGINE,
    NOT_PASSED_ON,
    Break,
    explain_breaks,
    explain_routing,
)
from sidelight.correlator.live.traces import TracedRequest
from sidelight.rundir.clock import iso_ms

BREAKING_NS = 60 * 10**9
LEAST_BROKEN = 10  # requests in BREAKING_NS
MOST_SERVICES = 20  # by name
_MOST_ENDS = 1000  # of traces, of a kind
_CLIENT, _GATEWAY, _ENGINE = range(3)

_Ends = deque[tuple[int, str]]  # of traces: when they were counted, and the service there


class TraceCount:
    """Counter of whole and of broken traces.

    `whole` are requests with client and engine in one trace, `broken` others by where their traces break. A request
    that was joined from two traces is `broken`. Of traces that were not joined, one that ends without an
    engine's span and one that begins behind it are counted as one break, if they came within BREAKING_NS.

    Of a shard, `misrouted` says of its first such minute that the spans of a trace reach several shards.
    """

    def __init__(self, *, is_shard: bool = False) -> None:
        self.misrouted = ""
        self._is_shard = is_shard
        self.whole = 0
        self.broken: Counter[Break] = Counter()
        # By the kind of their outermost span; those that found no counterpart yet.
        self._last: tuple[_Ends, ...] = tuple(deque(maxlen=_MOST_ENDS) for _ in range(3))
        self._first: tuple[_Ends, ...] = tuple(deque(maxlen=_MOST_ENDS) for _ in range(3))
        self._looks: deque[tuple[int, int, Counter[Break], Counter[str]]] = deque()
        self._halves: Counter[str] = Counter()  # of all looks, what `explain_routing` takes

    def take(self, requests: Sequence[TracedRequest], now_ns: int, *, is_last: bool = False) -> None:
        """Count requests that ended; the last ones may lack what would still have come."""
        before_ns = now_ns - BREAKING_NS
        whole, broken = self.whole, self.broken.copy()
        for ends in (*self._last, *self._first):
            while ends and ends[0][0] < before_ns:
                ends.popleft()
        for request in requests:
            self._take(request, now_ns)
        halves = Counter(map(_lack, requests)) if self._is_shard else Counter[str]()
        self._looks.append((now_ns, self.whole - whole, self.broken - broken, halves))
        self._halves += halves
        while len(self._looks) > 1 and self._looks[1][0] <= before_ns:
            self._halves -= self._looks.popleft()[-1]
        if not (self.misrouted or is_last) and (text := self._misrouting(now_ns)):
            self.misrouted = f"in the minute to {iso_ms(now_ns)[11:19]} UTC {text}"

    def breaking(self, now_ns: int) -> Mapping[Break, str]:
        """Say where the traces of nearly all requests broke in the last minute; nothing where they did not.

        Of a shard, ELSEWHERE says that their spans reach other shards.
        """
        if not self._looks or self._looks[0][0] > now_ns - BREAKING_NS:
            return {}
        if text := self._misrouting(now_ns):
            return {ELSEWHERE: text}
        broken = sum((look for _, _, look, _ in self._looks), Counter[Break]())
        whole = sum(whole for _, whole, _, _ in self._looks)
        return explain_breaks(broken, whole) if broken.total() >= LEAST_BROKEN else {}

    def _misrouting(self, now_ns: int) -> str:
        """Return the warning of a wrong route, by a shard's last minute; "" for none."""
        has_minute = self._is_shard and self._looks[0][0] <= now_ns - BREAKING_NS
        return explain_routing(self._halves) if has_minute else ""

    def _take(self, request: TracedRequest, now_ns: int) -> None:
        client = request.client
        begins_at = request.begins_at if request.is_root else ""
        outermost = _ENGINE if client is None else _GATEWAY if client.serves else _CLIENT
        if request.joined != "trace":
            self._count_break(request.ends_at, begins_at)
        elif outermost == _CLIENT and request.engine:
            self.whole += 1
        elif not request.evicted:
            if outermost != _CLIENT:
                self._match_first(outermost, begins_at, now_ns)
            if client is not None and not request.engine and not client.failed:
                self._match_last(outermost, request.ends_at, now_ns)

    def _match_first(self, outermost: int, begins_at: str, now_ns: int) -> None:
        """Take in a trace that begins at a gateway or engine: it breaks where others end before one."""
        for last in reversed(self._last[:outermost]):
            if last:
                self._count_break(last.popleft()[1], begins_at)
                return
        self._first[outermost].append((now_ns, begins_at))

    def _match_last(self, outermost: int, ends_at: str, now_ns: int) -> None:
        """Take in a trace without an engine's span: it breaks where others begin further in."""
        for first in self._first[outermost + 1 :]:
            if first:
                self._count_break(ends_at, first.popleft()[1])
                return
        self._last[outermost].append((now_ns, ends_at))

    def _count_break(self, ends_at: str, begins_at: str) -> None:
        """Count a break by the first service of the inner trace, else the outer's last."""
        service, how = (begins_at, NEW_TRACE) if begins_at else (ends_at, NOT_PASSED_ON)
        names = {name for name, _ in self.broken}
        self.broken[service if service in names or len(names) < MOST_SERVICES else "", how] += 1


def _lack(request: TracedRequest) -> str:
    """Return the missing half of a request that another shard may have; "" for none.

    Of requests that say nothing of it, "other". An engine's request that begins its trace has no caller's span.
    """
    client = request.client
    if request.evicted or request.joined != "trace" or (client is None and request.is_root):
        return "other"
    if client is None:
        return NO_CLIENT
    return "" if request.engine else "other" if client.failed else NO_ENGINE
