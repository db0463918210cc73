"""The breakdown of a run's own requests while it goes, one by one, for the live page.

Derived as the finished run is (`join`, `attribute`, `parts`), on what ended lately: first by spans and replies, once
they have had time to come, then by estimates of a window. The report, which knows the whole run, is more exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from correlator.breakdown import break_down
from correlator.estimate import attribute
from correlator.estimate.table import Attribution, nothing
from correlator.exact.join import join, unjoined
from correlator.live.traces import own_copy
from exporter.prometheus.counts import counted, nothing_counted
from exporter.prometheus.snapshot import PartCounts
from loadgen.requests.table import RequestLog
from rundir.columns import Bools, concat, take
from scraper.series.log import FailureRecord, Row
from scraper.series.table import SeriesTable
from scraper.spans.received import ReceivedSpan
from scraper.spans.requests import request_spans
from scraper.spans.spec import SETTLE_S

WINDOW_S = 60.0
STEP_S = 15.0  # an estimate costs a fifth of a millisecond a request of the window
MOST_REQUESTS = 2000


class LiveParts:
    """Owns the requests, spans and pages of the last minute, and the counts since the start."""

    def __init__(self) -> None:
        self.counts: PartCounts = nothing_counted(sources=())
        self._spans: dict[bytes, list[ReceivedSpan]] = {}  # by trace, in the order in which the first of each came
        self._listens = False
        self._fresh: deque[tuple[int, RequestLog]] = deque()  # from when on their spans are not waited for
        self._window: deque[tuple[int, RequestLog, Bools]] = deque()  # which of them wait for an estimate
        self._pages: dict[str, SeriesTable] = {}
        self._covered_ns: dict[str, int] = {}
        self._next_ns = 0

    def ended(self, log: RequestLog, now_ns: int) -> None:
        self._fresh.append((now_ns + (round(SETTLE_S * 1e9) if self._listens else 0), log))

    def spans(self, spans: Sequence[ReceivedSpan]) -> None:
        self._listens = self._listens or bool(spans)
        for received in spans:
            if received.kind.role in ("request", "gateway", "stage"):
                self._spans.setdefault(received.span.trace_id, []).append(own_copy(received))

    def scraped(self, scrape: Row | FailureRecord) -> None:
        if scrape.url not in self._pages:
            self._pages[scrape.url] = SeriesTable(scrape.url, keep_ns=round(WINDOW_S * 1e9))
        self._pages[scrape.url].append(scrape)
        if isinstance(scrape, Row):
            self._covered_ns[scrape.url] = scrape.response_ns

    def poll(self, now_ns: int) -> None:
        """Count what can be broken down by now, and forget what is too old."""
        due: list[RequestLog] = []
        while self._fresh and (self._fresh[0][0] <= now_ns or self._has_come(self._fresh[0][1])):
            due.append(self._fresh.popleft()[1])
        if due:
            self._join(concat(due), now_ns)
        if now_ns >= self._next_ns and self._held:
            self._next_ns = now_ns + round(STEP_S * 1e9)
            self._estimate()
        before_ns = now_ns - round(WINDOW_S * 1e9)
        while self._spans and next(iter(self._spans.values()))[0].received_ns < before_ns:
            del self._spans[next(iter(self._spans))]
        while self._window and (self._window[0][0] < before_ns or self._held > MOST_REQUESTS):
            _, log, waits = self._window.popleft()
            self._count(take(log, waits), nothing(int(waits.sum()), ""))

    def _has_come(self, log: RequestLog) -> bool:
        return all(bytes.fromhex(one) in self._spans for one in log.trace_id)

    @property
    def _held(self) -> int:
        return sum(len(log) for _, log, _ in self._window)

    def _join(self, log: RequestLog, now_ns: int) -> None:
        """Count the requests whose times are told; the others wait for an estimate."""
        traces = [self._spans.pop(bytes.fromhex(one), ()) for one in log.trace_id]
        may = (log.timings_source != "") | np.array([bool(spans) for spans in traces], dtype=np.bool_)
        told = np.zeros(len(log), dtype=np.bool_)
        if may.any():
            telling = take(log, may)
            joined = join(telling, request_spans(chain.from_iterable(traces)))
            told[may] = joined.source != "none"
            exact = break_down(telling, joined, nothing(len(telling), ""))
            self.counts = counted(self.counts, take(exact, told[may]))
        waits = np.asarray(~told & (log.status == "ok"), dtype=np.bool_)
        rest = take(log, ~told & ~waits)
        self._count(rest, nothing(len(rest), ""))
        self._window.append((now_ns, log, waits))

    def _estimate(self) -> None:
        """Estimate those that wait and ended before the last scrape, with all of the window as its members."""
        whole = concat([log for _, log, _ in self._window])
        waits = np.concatenate([waits for _, _, waits in self._window])
        covered_ns = min(self._covered_ns.values(), default=0)
        ready = waits & (whole.end_ns < covered_ns)
        if not ready.any():
            return
        table = attribute(whole, [page.view() for page in self._pages.values()])
        ready &= table.quality != "none"  # those may yet be, in a fuller window
        self._count(take(whole, ready), take(table, ready))
        at = 0
        for _, log, waiting in self._window:
            waiting[ready[at : at + len(log)]] = False
            at += len(log)

    def _count(self, log: RequestLog, estimates: Attribution) -> None:
        if len(log):
            self.counts = counted(self.counts, break_down(log, unjoined(len(log)), estimates))
