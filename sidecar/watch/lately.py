"""Requests that a watch counted in the last minutes, for terminal, live page and alerts.

What is said of them is what a report says of its window: the same statistics of the same columns.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from correlator.breakdown import Parts
from correlator.estimate.table import Attribution
from correlator.live.breakdown import EndedRequests, EngineMeans
from correlator.live.reasons import NO_CLIENT
from exporter.report.conclusion import largest_part
from exporter.summary.breakdown import Explained, Group, group
from exporter.summary.slowest import SlowRequest, slowest
from rundir.columns import concat
from rundir.stats import Missing
from sidecar.live.tally import FAILING

WINDOW_S = 300.0
RATE_S = 60.0  # what "requests/s" is the mean of
MOST = 20_000  # requests: their statistics cost 30 ms each time
LARGEST_S = 5.0
SLOWEST = 3
_NOT_SHOWN = Missing("not shown")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Batch of n requests that were counted at once, and the slowest of them."""

    at_ns: int
    parts: Parts
    attribution: Attribution
    missing: Mapping[str, int]
    slowest: Sequence[SlowRequest]
    engine_only: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clients:
    """Numbers of clients' spans that ended, and of those with an error."""

    at_ns: int
    ended: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequests:
    """Statistics of the requests of the last `window_s` seconds. These are WINDOW_S, or fewer where the watch has just
    begun or requests are too many.

    `group` is None where none had a TTFT. `missing` says why requests have no breakdown of it, by count, the most
    frequent first. `ended_per_s` and `failed` are of the clients' spans of the last RATE_S. `engine_only_ms` are the
    means of queue and prefill of requests without a client's span, where engines' spans state them.
    """

    window_s: float
    group: Group | None
    slowest: Sequence[SlowRequest]
    missing: Mapping[str, int]
    ended_per_s: float | None
    failed: int
    engine_only_ms: Mapping[str, float]


class Lately:
    """Requests of the last WINDOW_S, `most` of them and one batch at most.

    A request's time is when it was counted: clients' clocks may differ from ours.
    """

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._begun_ns: int | None = None
        self._size = 0
        self._batches: deque[_Batch] = deque()
        self._clients: deque[_Clients] = deque()
        self._failed = 0  # since one succeeded
        self._largest: Mapping[str, float] = {}
        self._largest_due_ns = 0

    def count_clients(self, ended: int, failed: int, now_ns: int) -> None:
        """Add the number of clients' spans that ended."""
        self._clients.append(_Clients(at_ns=now_ns, ended=ended, failed=failed))
        self._failed = self._failed + failed if failed == ended else 0

    def take(self, ended: EndedRequests, now_ns: int) -> None:
        """Add requests that are counted now."""
        longest = slowest(ended.requests, ended.parts, _NOT_SHOWN, _NOT_SHOWN, start_ns=0)
        self._size += len(ended)
        self._batches.append(
            _Batch(
                at_ns=now_ns,
                parts=ended.parts,
                attribution=ended.attribution,
                missing=Counter(ended.reason[ended.reason != ""].tolist()),
                slowest=longest[:SLOWEST],
                engine_only=ended.engine_only,
            )
        )

    def forget(self, now_ns: int) -> None:
        """Remove requests older than the window, and the oldest ones where they are too many."""
        self._begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        while self._batches and (self._batches[0].at_ns < now_ns - WINDOW_S * 1e9 or self._is_full()):
            self._size -= len(self._batches.popleft().parts)
        while self._clients and self._clients[0].at_ns < now_ns - RATE_S * 1e9:
            self._clients.popleft()

    def largest(self, now_ns: int) -> Mapping[str, float]:
        """Return the largest part of their TTFT with its share, up to LARGEST_S old.

        It is empty where it is uncertain, and while requests only fail.
        """
        if now_ns >= self._largest_due_ns:
            described = self._group()
            self._largest = largest_part(described.breakdown) if described else {}
            self._largest_due_ns = now_ns + round(LARGEST_S * 1e9)
        return {} if self._failed >= FAILING else self._largest

    def _is_full(self) -> bool:
        """Return whether there are enough requests without those of the oldest batch."""
        return self._size - len(self._batches[0].parts) >= self._most

    def recent(self, now_ns: int) -> RecentRequests:
        """Return the statistics of the window that ends now."""
        self.forget(now_ns)
        begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        elapsed_s = (now_ns - begun_ns) / 1e9
        is_cut = self._size >= self._most
        requests = chain.from_iterable(batch.slowest for batch in self._batches)
        engine_only = EngineMeans()
        for batch in self._batches:
            engine_only.add(batch.engine_only)
        return RecentRequests(
            window_s=(now_ns - self._batches[0].at_ns) / 1e9 if is_cut else min(WINDOW_S, elapsed_s),
            group=self._group(),
            slowest=heapq.nlargest(SLOWEST, requests, key=lambda request: request.ttft_ms),
            missing=dict(sum((Counter(batch.missing) for batch in self._batches), Counter[str]()).most_common()),
            ended_per_s=self._ended_per_s(elapsed_s),
            failed=sum(spans.failed for spans in self._clients),
            engine_only_ms=engine_only.ms,
        )

    def _ended_per_s(self, elapsed_s: float) -> float | None:
        """Return the rate of clients' spans; None where requests came without any."""
        ended = sum(spans.ended for spans in self._clients)
        if not ended and any(NO_CLIENT in batch.missing for batch in self._batches):
            return None
        return ended / min(RATE_S, max(elapsed_s, 1.0))

    def _group(self) -> Group | None:
        """Return the statistics of all requests together, as in a report."""
        if not self._batches:
            return None
        parts = concat([batch.parts for batch in self._batches])
        explained = Explained(
            parts=parts, attribution=concat([batch.attribution for batch in self._batches]), clocks={}
        )
        return group(explained, np.ones(len(parts), dtype=np.bool_))
