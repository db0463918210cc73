"""Requests of a watch, replayed from its logs after its end or during it.

Exports are replayed in the order in which they came, and waited for as long.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.estimate.table import Attribution
from sidelight.correlator.live.breakdown import EndedRequests, EngineMeans, break_down_ended
from sidelight.correlator.live.reasons import DEFECT, EXPLANATIONS, Break
from sidelight.correlator.live.requests import Guard, SpanRequests
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import concat, take
from sidelight.scraper.series.log import ScrapeRow
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.spans.log import ExportRecord, StateRecord

MOST_REQUESTS = 250_000  # about 4 kB each while they are evaluated
_STEP_NS = 500_000_000  # a watch looks as often
_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Requests with a client's span, in the order of their ends; all columns are theirs.

    parts       their times; where there are none, `reason` says why
    from_ns     when the first span came that is in this; None where none did
    missing     requests without a breakdown of the TTFT by reason, those without a client's span too
    engine_only_ms  means of queue and prefill, by engines' spans, of requests without a client's
    engine_spans, repeated, evicted  spans of engines' requests; spans that came again; spans that had to make room
    probes      spans of health probes that engines served like requests
    whole, broken  requests with client and engine in one trace; and others, by where their trace breaks
    traces, split  traces, and those whose spans came to several shards
    misrouted   of one shard, how it shows that spans of a trace reach several, "" where it does not
    dropped     older requests that were too many to keep
    shortened   older records were deleted or left out
    """

    requests: RequestLog
    attribution: Attribution
    parts: Parts
    from_ns: int | None
    missing: Mapping[str, int]
    engine_only_ms: Mapping[str, float]
    engine_spans: int
    repeated: int
    evicted: int
    probes: int
    whole: int
    broken: Mapping[Break, int]
    traces: int
    split: int
    misrouted: str
    dropped: int
    shortened: bool


class Replay:
    """Owns the requests of a watch's logs, the newest `most_requests` of them.

    `pages` are the scrapes, `deaths_ns` when receivers died: until the next one began nothing was given up.
    `shortened`: these are not all records since the start; they are those of so many `shards`; `is_shard`: of one of
    several.
    """

    def __init__(
        self,
        pages: Sequence[EndpointSeries],
        deaths_ns: Sequence[int],
        guard: Guard,
        *,
        shortened: bool = False,
        shards: int = 1,
        is_shard: bool = False,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        self._requests = SpanRequests(guard, shards=shards, is_shard=is_shard)
        self._pages = heapq.merge(*map(_rows, pages), key=attrgetter("response_ns"))
        self._page = next(self._pages, None)
        self._deaths = deque(deaths_ns)
        self._shortened, self._most_requests = shortened, most_requests
        self._now_ns = self._from_ns = 0
        self._tables = deque([_Table.of(break_down_ended([]))])
        self._fresh: list[_Table] = []
        self._fresh_rows = 0
        self._missing: Counter[str] = Counter()
        self._engine_only = EngineMeans()
        self._dropped = 0

    def take(self, record: ExportRecord | StateRecord, shard: int = 0) -> None:
        """Let time pass up to a record of a shard, and take it in.

        Raises ValueError for bytes that no receiver has written.
        """
        if isinstance(record, StateRecord):
            if record.state == "started":
                self._begin(record.at_ns)
            return
        at_ns = record.received_ns
        self._from_ns = self._from_ns or at_ns
        self._pass_time(at_ns)
        self._requests.spans.take(record, shard)

    def replayed(self) -> Replayed:
        """Return all requests. Those that still waited for spans or for an estimate are returned as they are."""
        self._feed_pages(None)
        self._count(self._requests.ended(self._now_ns, all_of_it=True)[1])
        self._lay_out()
        whole = _Table.concat(self._tables)
        if self._requests.defective:
            self._missing[DEFECT] += self._requests.defective
        ends_ns = whole.requests.end_ns
        from_ns = int(ends_ns.min()) if self._dropped else self._from_ns or None
        return Replayed(
            requests=replace(whole.requests, index=np.arange(len(whole.requests))),
            attribution=whole.attribution,
            parts=whole.parts,
            from_ns=from_ns,
            missing=dict(self._missing.most_common()),
            engine_only_ms=self._engine_only.ms,
            engine_spans=self._requests.spans.engine_spans,
            repeated=self._requests.spans.repeated,
            evicted=self._requests.spans.evicted,
            probes=self._requests.spans.probes,
            whole=self._requests.count.whole,
            broken=dict(self._requests.count.broken.most_common()),
            traces=self._requests.spans.traces,
            split=self._requests.spans.split,
            misrouted=self._requests.count.misrouted,
            dropped=self._dropped,
            shortened=self._shortened or self._dropped > 0,
        )

    def _begin(self, at_ns: int) -> None:
        """Go on with a receiver that began then, after another or as the first."""
        if self._now_ns:
            self._pass_time(at_ns)
        while self._deaths and self._deaths[0] < at_ns:
            self._deaths.popleft()
        self._requests.missed(at_ns)
        self._now_ns = max(self._now_ns, at_ns)

    def _pass_time(self, at_ns: int) -> None:
        """Advance time in steps to a moment, or to the death of a receiver."""
        until_ns = min(at_ns, self._deaths[0]) if self._deaths else at_ns
        while self._now_ns + _STEP_NS <= until_ns:
            is_idle = not (self._requests.pending or self._requests.sizes["waiting"])
            self._now_ns = until_ns if is_idle else self._now_ns + _STEP_NS
            self._feed_pages(self._now_ns)
            self._count(self._requests.ended(self._now_ns)[1])

    def _feed_pages(self, until_ns: int | None) -> None:
        while self._page is not None and (until_ns is None or self._page.response_ns <= until_ns):
            self._requests.estimates.scraped(self._page)
            self._page = next(self._pages, None)

    def _count(self, ended: Sequence[EndedRequests]) -> None:
        for requests in ended:
            self._missing.update(reason for reason in requests.reason.tolist() if reason)
            self._engine_only.add(requests.engine_only)
            if (requests.requests.status != "").any():
                self._fresh.append(_Table.of(requests))
                self._fresh_rows += len(self._fresh[-1].requests)
        if self._fresh_rows >= _CHUNK_ROWS:
            self._lay_out()

    def _lay_out(self) -> None:
        if self._fresh:
            self._tables.append(_Table.concat(self._fresh))
            self._fresh, self._fresh_rows = [], 0
        held = sum(len(table.requests) for table in self._tables)
        while held - len(self._tables[0].requests) >= self._most_requests:
            oldest = len(self._tables.popleft().requests)
            held, self._dropped = held - oldest, self._dropped + oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Requests of clients, in columns."""

    requests: RequestLog
    attribution: Attribution
    parts: Parts

    @staticmethod
    def of(ended: EndedRequests) -> _Table:
        """Return a table of the requests with a client's span.

        Where the breakdown is missing, the reason is in words.
        """
        rows = np.flatnonzero(ended.requests.status != "")
        parts, codes = take(ended.parts, rows), ended.reason[rows]
        reasons = np.array([EXPLANATIONS.get(code, "") for code in codes.tolist()], dtype=np.object_)
        return _Table(
            requests=take(ended.requests, rows),
            attribution=take(ended.attribution, rows),
            parts=replace(parts, reason=np.where(codes == "", parts.reason, reasons)),
        )

    @staticmethod
    def concat(tables: Iterable[_Table]) -> _Table:
        """Put tables end to end."""
        several = list(tables)
        return _Table(
            requests=concat([table.requests for table in several]),
            attribution=concat([table.attribution for table in several]),
            parts=concat([table.parts for table in several]),
        )


def _rows(page: EndpointSeries) -> Iterator[ScrapeRow]:
    """Give the scrapes of an endpoint one by one."""
    stamps = zip(page.tick_ns.tolist(), page.request_ns.tolist(), page.response_ns.tolist(), strict=True)
    for place, (tick_ns, request_ns, response_ns) in enumerate(stamps):
        yield ScrapeRow(
            url=page.url,
            tick_ns=tick_ns,
            request_ns=request_ns,
            response_ns=response_ns,
            series=page.series,
            values=page.values[place],
            changed=bool(page.changed[place]),
        )
