"""How many requests there were, each once: of what the spans of several traces say, and where traces break.

Which spans of several traces are of one request is found out in `requests`, where that is possible.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from correlator.exact.table import SLACK_S
from correlator.live.reasons import NEW_TRACE, NOT_PASSED_ON, Break, explain_breaks
from correlator.live.traces import TracedRequest
from recorded.client_spans import ahead_ns

KEEP_S = 120.0  # what was not joined; longer than it is waited for
BREAKING_S = 60.0
LEAST_BROKEN = 10  # requests in BREAKING_S: of fewer, two that have nothing to do with each other may look like one
MOST_SERVICES = 20  # by name
MOST_NEAR = 200
_CLIENT, _GATEWAY, _ENGINE = range(3)


@dataclass(slots=True, eq=False)
class _Part:
    """Part of a request that is in no one trace, with its times where known.

    `at` says at which of client, gateway and engine its spans begin; `start_ns` and `end_ns` are its beginning and end
    there, by our clock.

    key             that of its last span
    begins_at       the service that begins its trace, ends_at the last one in it without an engine; "" for none
    is_broken_down  its trace breaks its TTFT down, from a gateway on
    is_given        it was counted, or is not to be
    is_another      it is not to be counted: another part of the same request is
    """

    at: int
    start_ns: int
    end_ns: int
    came_ns: int
    key: bytes
    begins_at: str
    ends_at: str
    is_broken_down: bool = False
    is_given: bool = False
    is_another: bool = False

    @property
    def whole_ns(self) -> int:
        """Return its duration, in ns."""
        return self.end_ns - self.start_ns


class RequestCount:
    """Counter of recent requests that are in no one trace, each counted once.

    Two parts that were not joined are taken for one request if the one that began further in took no longer, the
    nearest by time first. Which belong together is a guess, of which only their number is used. Of two, one is counted:
    that whose trace breaks its TTFT down, else the outer one. An engine's without a client is counted `patience_s`
    after it came: the client's span may still come.

    `whole` counts requests with client and engine in one trace, `broken` others by where their traces break.
    """

    def __init__(self, *, patience_s: float = 0.0) -> None:
        self.whole = 0
        self.broken: Counter[Break] = Counter()
        self._patience_ns = round(patience_s * 1e9)
        self._last = 0
        self._parts: dict[int, _Part] = {}
        self._by_span: dict[bytes, int] = {}
        self._patient: dict[int, TracedRequest] = {}
        # Those with nothing within them yet, and with nothing around them, by when they ended.
        self._outer: tuple[list[tuple[int, int]], ...] = ([], [], [])
        self._inner: tuple[list[tuple[int, int]], ...] = ([], [], [])
        self._looks: deque[tuple[int, int, Counter[Break]]] = deque()

    def __len__(self) -> int:
        """Return the number of requests that wait here to be counted."""
        return len(self._patient)

    def clock_moved(self, moved_ns: int) -> None:
        """Note that the clock was set by so much."""
        for part in self._parts.values():
            part.came_ns += moved_ns
        self._looks = deque((at_ns + moved_ns, whole, broken) for at_ns, whole, broken in self._looks)

    def came(self, requests: Sequence[TracedRequest], now_ns: int) -> Iterator[TracedRequest]:
        """Take in requests that ended, and give those that may be counted: a late one if its first part was not yet."""
        for request in requests:
            is_another = False
            if request.is_late:
                first = next((self._by_span[key] for key in span_keys(request) if key in self._by_span), None)
                if first is None or self._parts[first].is_given:
                    continue
                is_another = self._parts[first].is_another
                self._forget(first)
            if not request.evicted and not _is_whole(request):
                self._add(request, now_ns, is_another=is_another)
            yield request

    def once(
        self, requests: Sequence[TracedRequest], now_ns: int, *, all_of_it: bool = False
    ) -> Iterator[TracedRequest]:
        """Take in joined and unjoined requests, and yield each that is to be counted."""
        whole, broken = self.whole, self.broken.copy()
        for request in requests:
            numbers = [self._by_span[key] for key in span_keys(request) if key in self._by_span]
            if request.joined != "trace":
                self._count_break(request.ends_at, request.begins_at if request.is_root else "")
                for number in numbers:
                    self._forget(number)
                yield request
            elif _is_whole(request) or not numbers:
                self.whole += _is_whole(request)
                yield request
            elif request.client is None and self._patience_ns:
                self._patient[numbers[0]] = request
            else:
                yield from self._settle(numbers[0], request)
        due_ns = now_ns - self._patience_ns
        for number, request in list(self._patient.items()):
            if all_of_it or self._parts[number].came_ns <= due_ns:
                del self._patient[number]
                yield from self._settle(number, request)
        while self._parts and next(iter(self._parts.values())).came_ns < now_ns - KEEP_S * 1e9:
            self._forget(next(iter(self._parts)))
        self._looks.append((now_ns, self.whole - whole, self.broken - broken))
        while len(self._looks) > 1 and self._looks[1][0] <= now_ns - BREAKING_S * 1e9:
            self._looks.popleft()

    def breaking(self, now_ns: int) -> Mapping[Break, str]:
        """Say where the traces of nearly all requests broke in the last minute; nothing where they did not."""
        if not self._looks or self._looks[0][0] > now_ns - BREAKING_S * 1e9:
            return {}
        broken = sum((look for _, _, look in self._looks), Counter[Break]())
        whole = sum(whole for _, whole, _ in self._looks)
        return explain_breaks(broken, whole) if broken.total() >= LEAST_BROKEN else {}

    def _add(self, request: TracedRequest, now_ns: int, *, is_another: bool) -> None:
        client, engine = request.client, request.engine
        if client is not None:
            start_ns, end_ns, received_ns = client.start_ns, client.end_ns, client.received_ns
        else:
            longest = max(engine, key=lambda step: step.span.end_time_unix_nano - step.span.start_time_unix_nano)
            start_ns, end_ns = longest.span.start_time_unix_nano, longest.span.end_time_unix_nano
            received_ns = longest.received_ns
        moved_ns = ahead_ns(end_ns, received_ns)
        part = _Part(
            at=_ENGINE if client is None else _GATEWAY if client.serves else _CLIENT,
            start_ns=start_ns + moved_ns,
            end_ns=end_ns + moved_ns,
            came_ns=now_ns,
            key=span_keys(request)[-1],
            begins_at=request.begins_at if request.is_root else "",
            ends_at=request.ends_at,
            is_broken_down=client is not None and bool(engine) and client.first_s >= 0,
            is_another=is_another,
        )
        self._last += 1
        self._parts[self._last] = part
        self._by_span[part.key] = self._last
        if not engine:
            insort(self._outer[part.at], (part.end_ns, self._last))
        if part.at != _CLIENT:
            insort(self._inner[part.at], (part.end_ns, self._last))

    def _settle(self, number: int, request: TracedRequest) -> Iterator[TracedRequest]:
        """Match an unjoined request with its other part. It is yielded if it is to be counted."""
        part = self._parts[number]
        # The gateway before the client, and before the engine: all three may have a trace of their own.
        if _place(self._inner[part.at], part, number) is not None:
            outer = next(filter(None, (self._nearest(rows, part) for rows in self._outer[: part.at][::-1])), None)
            if outer is not None:
                self._pair(outer, number)
        if _place(self._outer[part.at], part, number) is not None:
            inner = next(filter(None, (self._nearest(rows, part) for rows in self._inner[part.at + 1 :])), None)
            if inner is not None:
                self._pair(number, inner)
        part.is_given = True
        if not part.is_broken_down:
            _remove(self._inner[part.at], part, number)
        if not part.is_another:
            yield request

    def _nearest(self, rows: Sequence[tuple[int, int]], part: _Part) -> int | None:
        """Return the nearest of some sorted parts that may be of the same request.

        Nearness is by beginning and end. Only the MOST_NEAR that ended nearest are tried: where none fits, as with
        clients of another server beside engines of other clients, each request would otherwise look at all of two
        minutes.
        """
        best, best_ns = None, 2**63
        for end_ns, number in islice(_outward(rows, part.end_ns), MOST_NEAR):
            apart_ns = abs(end_ns - part.end_ns)
            if apart_ns >= best_ns:
                break
            other = self._parts[number]
            outer, inner = (part, other) if part.at < other.at else (other, part)
            apart_ns += abs(other.start_ns - part.start_ns)
            if apart_ns < best_ns and inner.whole_ns <= outer.whole_ns + SLACK_S * 1e9:
                best, best_ns = number, apart_ns
        return best

    def _pair(self, outer: int, inner: int) -> None:
        """Take two parts for one request."""
        around, within = self._parts[outer], self._parts[inner]
        _remove(self._outer[around.at], around, outer)
        _remove(self._inner[within.at], within, inner)
        (around if within.is_broken_down and not around.is_given else within).is_another = True
        self._count_break(around.ends_at, within.begins_at)

    def _count_break(self, ends_at: str, begins_at: str) -> None:
        """Count a broken request by service.

        It is the one that begins its engine's trace, else the last one in its client's.
        """
        service, how = (begins_at, NEW_TRACE) if begins_at else (ends_at, NOT_PASSED_ON)
        names = {name for name, _ in self.broken}
        self.broken[service if service in names or len(names) < MOST_SERVICES else "", how] += 1

    def _settled(self, number: int) -> None:
        """Look for no other part of a request any more."""
        part = self._parts[number]
        _remove(self._outer[part.at], part, number)
        _remove(self._inner[part.at], part, number)

    def _forget(self, number: int) -> None:
        self._settled(number)
        self._patient.pop(number, None)
        part = self._parts.pop(number)
        if self._by_span.get(part.key) == number:  # a span that was sent again after six minutes counts as another
            del self._by_span[part.key]


def _is_whole(request: TracedRequest) -> bool:
    """Return whether both a client's and an engine's spans are present."""
    return request.client is not None and not request.client.serves and bool(request.engine)


def span_keys(request: TracedRequest) -> list[bytes]:
    """Return the identifying keys of a request's spans.

    They are those of its client, as it was given out and as it is, and of the first span of its engine.
    """
    client, engine = request.client, request.engine
    keys = [request.trace_id + key for key in (request.given, client.span_id if client else b"") if key]
    return keys + [step.span.trace_id + step.span.span_id for step in engine[:1]]


def _outward(rows: Sequence[tuple[int, int]], from_ns: int) -> Iterator[tuple[int, int]]:
    """Give sorted rows, the nearest to a moment first."""
    after = bisect_left(rows, (from_ns, 0))
    before = after - 1
    while before >= 0 or after < len(rows):
        if before < 0 or (after < len(rows) and rows[after][0] - from_ns < from_ns - rows[before][0]):
            yield rows[after]
            after += 1
        else:
            yield rows[before]
            before -= 1


def _place(rows: Sequence[tuple[int, int]], part: _Part, number: int) -> int | None:
    """Return where a part stands among sorted ones, None where it does not."""
    place = bisect_left(rows, (part.end_ns, number))
    return place if place < len(rows) and rows[place][1] == number else None


def _remove(rows: list[tuple[int, int]], part: _Part, number: int) -> None:
    place = _place(rows, part, number)
    if place is not None:
        del rows[place]
