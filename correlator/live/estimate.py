"""Estimates for requests without exact times, from the scrapes and requests of the last minute: of a run while it goes,
and of production traffic.

In production others use the engines too, and the quality of each estimate says so. The clients' clocks have to agree
with ours, by which pages are stamped; where they do not, token sums are inconsistent, and that is said too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from sidelight.correlator.attribute import attribute
from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import Attribution, nothing
from sidelight.correlator.exact.table import unjoined
from sidelight.correlator.live.traces import TracedRequest
from sidelight.correlator.requests import Requests
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.client_spans import request_log
from sidelight.rundir.columns import Bools, Ints, concat, take
from sidelight.scraper.series.log import FailureRecord, ScrapeRow
from sidelight.scraper.series.resets import restarts_of
from sidelight.scraper.series.table import SeriesTable

WINDOW_S = 60.0
# Between two estimates of a window, each of which takes 20 ms and from 0.04 to 0.5 ms a request. The first come sooner:
# FIRST_S after the first request, then a step is a quarter of the time that the window holds.
FIRST_S, LEAST_STEP_S, MOST_STEP_S = 5.0, 7.5, 15.0
MOST_REQUESTS = 2000
NO_SPAN = "no span of its engine came"
_END_NS = np.iinfo(np.int64).max


Rows = TypeVar("Rows", Requests, RequestLog)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated(Generic[Rows]):
    """n requests and their estimates, or that there were none, and their times in parts."""

    requests: Rows
    attribution: Attribution
    parts: Parts


@dataclass(slots=True)
class _WaitingBatch(Generic[Rows]):
    """Requests that came at once, and which of them wait for an estimate."""

    requests: Rows
    waits: Bools
    held_ns: int

    def __len__(self) -> int:
        return len(self.waits)


@dataclass(slots=True)
class _Outflow(Generic[Rows]):
    """Estimates of one window, released in the order of their requests' ends.

    `due_ns` [n] is when each is given out, `given` the number given out so far.
    """

    estimated: Estimated[Rows]
    due_ns: Ints
    given: int = 0

    @property
    def waiting(self) -> int:
        return len(self.due_ns) - self.given

    def until(self, moment_ns: int) -> list[Estimated[Rows]]:
        """Return the estimates due by a moment, now given out."""
        rows = np.arange(self.given, max(self.given, int(np.searchsorted(self.due_ns, moment_ns, side="right"))))
        self.given += len(rows)
        of = self.estimated
        some = Estimated(
            requests=take(of.requests, rows), attribution=take(of.attribution, rows), parts=take(of.parts, rows)
        )
        return [some] if len(rows) else []


class EstimateWindow(Generic[Rows]):
    """Owns the scrapes and requests of the last WINDOW_S. Requests that are too many for it are not estimated.

    Estimates are made of the whole window at once, and given out one by one until the next ones are there: who counts
    them sees as even a flow as that of the requests.
    """

    def __init__(self, *, window_s: float = WINDOW_S, most: int = MOST_REQUESTS) -> None:
        self._window_ns = round(window_s * 1e9)
        self._most = most
        self._outflow: _Outflow[Rows] | None = None
        self._pages: dict[str, SeriesTable] = {}
        self._scraped_ns: dict[str, int] = {}
        self._batches: deque[_WaitingBatch[Rows]] = deque()
        self._given_up: list[Rows] = []
        self._next_ns = 0
        self._fresh = 0  # that came to wait since the last estimates

    @property
    def has_pages(self) -> bool:
        """Whether some page was scraped, so that there may be estimates."""
        return bool(self._scraped_ns)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the numbers of requests in the window and of those waiting.

        They wait for an estimate, or to be given out with it.
        """
        waiting = sum(int(batch.waits.sum()) for batch in self._batches)
        if self._outflow:
            waiting += self._outflow.waiting
        return {"requests": sum(map(len, self._batches)), "waiting": waiting}

    def scraped(self, scrape: ScrapeRow | FailureRecord) -> None:
        """Take in one scrape."""
        if scrape.url not in self._pages:
            self._pages[scrape.url] = SeriesTable(scrape.url, keep_ns=self._window_ns)
        self._pages[scrape.url].append(scrape)
        if isinstance(scrape, ScrapeRow):
            self._scraped_ns[scrape.url] = scrape.response_ns

    def restarted_ns(self) -> dict[str, int]:
        """Return the time of each engine's last restart in the window, by page: the page's first scrape after it."""
        stamps_ns: dict[str, int] = {}
        for url, page in self._pages.items():
            endpoint = page.view()
            restarts = np.flatnonzero(restarts_of(endpoint).process)
            if len(restarts):
                stamps_ns[url] = int(endpoint.response_ns[restarts[-1]])
        return stamps_ns

    def forget_pages(self, scraped: Collection[str]) -> None:
        """Forget the pages that are no longer scraped."""
        for gone in set(self._pages) - set(scraped):
            del self._pages[gone]
            self._scraped_ns.pop(gone, None)

    def hold(self, requests: Rows, waits: Bools, now_ns: int) -> None:
        """Keep requests that ended: those that wait [n] for an estimate, and those whose ends are in the same sums."""
        if len(requests):
            self._next_ns = self._next_ns or now_ns + round(FIRST_S * 1e9)
            self._batches.append(_WaitingBatch(requests=requests, waits=waits, held_ns=now_ns))
            self._fresh += int(waits.sum())
        excess = self.sizes["requests"] - self._most
        while excess > 0:
            batch = self._batches.popleft()
            self._give_up(batch, slice(None, excess))
            if len(batch) > excess:
                left = np.arange(excess, len(batch))
                rest = _WaitingBatch(
                    requests=take(batch.requests, left), waits=batch.waits[left], held_ns=batch.held_ns
                )
                self._batches.appendleft(rest)
            excess -= len(batch)

    def estimates(self, now_ns: int, *, all_of_it: bool = False) -> list[Estimated[Rows]]:
        """Return the waiting requests that are given out now with their estimates; with `all_of_it`, whatever is left.

        What cannot be estimated is tried again in a fuller window until `leaving` gives it out.
        """
        due: list[Estimated[Rows]] = []
        is_half_full = 2 * self._fresh > self._most
        if self._batches and (now_ns >= self._next_ns or is_half_full or all_of_it):
            self._fresh = 0
            held_s = (now_ns - self._batches[0].held_ns) / 1e9
            step_ns = round(1e9 * min(MOST_STEP_S, max(LEAST_STEP_S, held_s / 4)))
            self._next_ns = now_ns + step_ns
            fresh = self._estimate(now_ns, step_ns)
            due += self._outflow.until(_END_NS) if self._outflow else []
            self._outflow = fresh
        if self._outflow:
            due += self._outflow.until(_END_NS if all_of_it else now_ns)
        return due

    def leaving(self, now_ns: int, *, all_of_it: bool = False) -> list[Estimated[Rows]]:
        """Return the requests that leave the window without an estimate; with `all_of_it`, whatever still waits."""
        while self._batches and (all_of_it or self._batches[0].held_ns < now_ns - self._window_ns):
            self._give_up(self._batches.popleft(), slice(None))
        given_up, self._given_up = self._given_up, []
        if not given_up:
            return []
        requests = concat(given_up)
        return [_break_down(requests, nothing(len(requests), "no estimate in the window"))]

    def _give_up(self, batch: _WaitingBatch[Rows], rows: slice) -> None:
        waiting = np.flatnonzero(batch.waits[rows])
        if len(waiting):
            self._given_up.append(take(batch.requests, waiting))

    def _estimate(self, now_ns: int, step_ns: int) -> _Outflow[Rows] | None:
        """Estimate the waiting requests that ended before the last scrape.

        All of the window is used, since all of it shares the sums. From now on, they are given out evenly over the
        step.
        """
        requests = concat([batch.requests for batch in self._batches])
        waits = np.concatenate([batch.waits for batch in self._batches])
        ready = waits & (requests.end_ns < min(self._scraped_ns.values(), default=0))
        if not ready.any():
            return None
        table = attribute(requests, [page.view() for page in self._pages.values()])
        ready &= table.quality != "none"
        rows = np.flatnonzero(ready)
        rows = rows[np.argsort(requests.end_ns[rows], kind="stable")]
        due_ns = now_ns + np.arange(len(rows)) * step_ns // max(1, len(rows))
        outflow = _Outflow(_break_down(take(requests, rows), take(table, rows)), due_ns)
        first = 0
        for batch in self._batches:
            batch.waits = batch.waits & ~ready[first : first + len(batch)]
            first += len(batch)
        return outflow


def hold_traced(
    window: EstimateWindow[RequestLog], requests: Sequence[TracedRequest], now_ns: int
) -> list[TracedRequest]:
    """Hold requests for estimates in a window; return those that need not wait for one.

    Held are those that are estimated, or that estimates are made with.
    """
    if not window.has_pages:
        return list(requests)
    usable = [_is_usable(request) for request in requests]
    held = [request for request, fit in zip(requests, usable, strict=True) if fit]
    waits = np.array([not request.engine for request in held], dtype=np.bool_)
    rows = request_log([request.client for request in held], [request.trace_id for request in held])
    window.hold(rows, waits, now_ns)
    return [request for request, fit in zip(requests, usable, strict=True) if request.engine or not fit]


def _is_usable(request: TracedRequest) -> bool:
    span = request.client
    return span is not None and not span.failed and not math.isnan(span.first_s) and not request.evicted


def _break_down(requests: Rows, estimates: Attribution) -> Estimated[Rows]:
    parts = break_down(requests, unjoined(len(requests), NO_SPAN), estimates)
    return Estimated(requests=requests, attribution=estimates, parts=parts)
