"""Estimates for requests that no engine's span told of, from the scrapes and requests of the last minute.

Others use the engines too: that is normal in production, and the quality of each estimate says so. The clients' clocks
have to agree with ours, by which pages are stamped; where they do not, whole numbers contradict, and that is said too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from correlator.estimate import attribute
from correlator.estimate.table import nothing
from correlator.live.breakdown import Ended, break_down_ended
from correlator.live.client_spans import columns
from correlator.live.traces import TracedRequest
from rundir.columns import take
from scraper.series.log import FailureRecord, Row
from scraper.series.table import SeriesTable

WINDOW_S = 60.0
STEP_S = 15.0  # an estimate of a window costs about a millisecond a request
MOST_REQUESTS = 2000


@dataclass(slots=True)
class _Held:
    """A request in the window, and whether it still waits for an estimate."""

    request: TracedRequest
    end_ns: int
    received_ns: int
    waits: bool


class RollingEstimate:
    """Owns the scrapes and requests of the last WINDOW_S. Requests that are too many for it are not estimated."""

    def __init__(self, *, window_s: float = WINDOW_S, step_s: float = STEP_S, most: int = MOST_REQUESTS) -> None:
        self._window_ns, self._step_ns = round(window_s * 1e9), round(step_s * 1e9)
        self._most = most
        self._pages: dict[str, SeriesTable] = {}
        self._scraped_ns: dict[str, int] = {}
        self._held: deque[_Held] = deque()
        self._given_up: list[TracedRequest] = []
        self._next_ns = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many requests are in the window, and how many of them wait for an estimate."""
        return {"requests": len(self._held), "waiting": sum(one.waits for one in self._held)}

    def scraped(self, scrape: Row | FailureRecord) -> None:
        """Take in one scrape."""
        if scrape.url not in self._pages:
            self._pages[scrape.url] = SeriesTable(scrape.url, keep_ns=self._window_ns)
        self._pages[scrape.url].append(scrape)
        if isinstance(scrape, Row):
            self._scraped_ns[scrape.url] = scrape.response_ns

    def forget_pages(self, kept: Collection[str]) -> None:
        """Forget the pages that are no longer scraped."""
        for gone in set(self._pages) - set(kept):
            del self._pages[gone]
            self._scraped_ns.pop(gone, None)

    def hold(self, requests: Sequence[TracedRequest]) -> list[TracedRequest]:
        """Keep what estimates are made of, or with; return the requests that need not wait for one."""
        free = []
        for request in requests:
            span = request.client
            fit = span is not None and not span.failed and not math.isnan(span.first_s) and not request.evicted
            waits = fit and not request.engine and bool(self._scraped_ns)
            if span is not None and fit and self._scraped_ns:
                client = TracedRequest(client=span, gateway=None, engine=())
                self._held.append(_Held(client, end_ns=span.end_ns, received_ns=span.received_ns, waits=waits))
            if not waits:
                free.append(request)
        while len(self._held) > self._most:
            self._leave()
        return free

    def estimated(self, now_ns: int, *, all_of_it: bool = False) -> list[Ended]:
        """Return the requests that waited and are estimated now, or cannot be; at most every `step_s` there are any.

        What cannot be estimated is tried again in a fuller window until it leaves it, or `all_of_it` is asked for.
        """
        if now_ns < self._next_ns and not all_of_it:
            return []
        self._next_ns = now_ns + self._step_ns
        found = self._estimate()
        while self._held and (all_of_it or self._held[0].received_ns < now_ns - self._window_ns):
            self._leave()
        if self._given_up:
            found.append(break_down_ended(self._given_up, nothing(len(self._given_up), "no estimate in the window")))
            self._given_up = []
        return found

    def _leave(self) -> None:
        one = self._held.popleft()
        if one.waits:
            self._given_up.append(one.request)

    def _estimate(self) -> list[Ended]:
        """Estimate what waits and ended before the last scrape, with all of the window: all of it shares the sums."""
        covered_ns = min(self._scraped_ns.values(), default=0)
        ready = np.array([one.waits and one.end_ns < covered_ns for one in self._held], dtype=np.bool_)
        if not ready.any():
            return []
        pages = [page.view() for page in self._pages.values()]
        table = attribute(columns([one.request.client for one in self._held]), pages)
        rows = np.flatnonzero(ready & (table.quality != "none"))
        held = list(self._held)
        for row in rows.tolist():
            held[row].waits = False
        requests = [held[row].request for row in rows.tolist()]
        return [break_down_ended(requests, take(table, rows))] if requests else []
