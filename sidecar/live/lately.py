"""Recent values on panels, pages and alerts: rates, numbers of waiting requests, and where the TTFT of requests went.

What is said of requests is what a report says of its window: the same statistics of the same columns.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from sidelight.correlator.live.reasons import NO_CLIENT
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.columns import concat
from sidelight.rundir.stats import Missing
from sidelight.sidecar.live.tally import FAILING

if TYPE_CHECKING:
    from sidelight.correlator.breakdown import Parts
    from sidelight.correlator.estimate.table import Attribution
    from sidelight.correlator.live.breakdown import EndedRequests
    from sidelight.exporter.summary.breakdown import Group
    from sidelight.exporter.summary.slowest import SlowRequest
    from sidelight.exporter.summary.verdict import RunVerdict

RATE_S, LEAST_S = 10.0, 1.0
WINDOW_S = 300.0  # of a watch
CLIENTS_S = 60.0  # of a watch: what "requests/s" is the mean of
MOST = 20_000  # requests of a watch: their statistics cost 30 ms each time
LARGEST_S = 5.0
SLOWEST = 3
_NOT_SHOWN = dict.fromkeys(("requests_waiting", "requests_running"), Missing("not shown"))


@dataclass(slots=True, kw_only=True)
class Flow:
    """Counts of the last `window_s` seconds; they have rates after `least_s`."""

    window_s: float = RATE_S
    least_s: float = LEAST_S
    counts: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)

    def rates(self, at_s: float, *counts: int) -> tuple[float | None, ...]:
        """Add the counts since a phase began, and return their recent rates; None before there are any."""
        self.counts.append((at_s, counts))
        while self.counts[0][0] < at_s - self.window_s:
            self.counts.popleft()
        since_s, then = self.counts[0]
        if at_s - since_s < self.least_s:
            return (None,) * len(counts)
        return tuple((count - before) / (at_s - since_s) for count, before in zip(counts, then, strict=True))


@dataclass(slots=True, kw_only=True)
class Peaks:
    """Largest values of a gauge in each of the last `columns`, for a sparkline. A column is `column_s` long."""

    columns: int
    column_s: float = 1.25
    values: deque[float | None] = field(default_factory=deque)
    column: int = 0

    def take(self, at_s: float, value: float | None) -> list[float | None]:
        """Add the value at a moment, and return the columns, the latest last. The value is None where it is not
        known.
        """
        column = int(at_s / self.column_s)
        begun = max(0, column - self.column) if self.values else 1
        self.values.extend([None] * min(begun, self.columns))
        self.column = column
        known = [each for each in (self.values[-1], value) if each is not None]
        self.values[-1] = max(known, default=None)
        while len(self.values) > self.columns:
            self.values.popleft()
        return list(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Batch of n requests that were counted at once, and the slowest of them."""

    at_ns: int
    parts: Parts
    attribution: Attribution
    missing: Mapping[str, int] = field(default_factory=dict)
    slowest: Sequence[SlowRequest] = ()
    engine_only: Parts | None = None


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
    frequent first. `ended_per_s`, `clients` and `failed` are of the clients' spans of the last CLIENTS_S.
    `engine_only_ms` are the means of queue and prefill of requests without a client's span, where engines' spans state
    them.
    """

    window_s: float
    group: Group | None
    slowest: Sequence[SlowRequest]
    missing: Mapping[str, int]
    ended_per_s: float | None
    clients: int
    failed: int
    engine_only_ms: Mapping[str, float]


class Lately:
    """Requests of the last `window_s`, `most` of them and one batch at most.

    A request's time is when it was counted: clients' clocks may differ from ours. What takes long to import is
    imported with the first request.
    """

    def __init__(self, *, most: int = MOST, window_s: float = WINDOW_S) -> None:
        self._most, self._window_s = most, window_s
        self._group: Group | None = None  # of all batches; None: not known yet
        self._begun_ns: int | None = None
        self._size = 0
        self._batches: deque[_Batch] = deque()
        self._clients: deque[_Clients] = deque()
        self._failed, self._ok_ns = 0, 0  # since one succeeded, and when that was counted
        self._largest: Mapping[str, float] = {}
        self._largest_due_ns = 0

    def count_clients(self, ended: int, failed: int, now_ns: int) -> None:
        """Add the number of clients' spans that ended."""
        self._clients.append(_Clients(at_ns=now_ns, ended=ended, failed=failed))
        self._failed = self._failed + failed if failed == ended else 0
        self._ok_ns = self._ok_ns if failed == ended else now_ns

    def take(self, ended: EndedRequests, now_ns: int) -> None:
        """Add requests that are counted now, with their slowest and the reasons for missing breakdowns."""
        from sidelight.exporter.summary.slowest import slowest  # noqa: PLC0415  as the class says

        batch = _Batch(
            at_ns=now_ns,
            parts=ended.parts,
            attribution=ended.attribution,
            missing=Counter(ended.reason[ended.reason != ""].tolist()),
            slowest=slowest(ended.requests, ended.parts, _NOT_SHOWN, start_ns=0)[:SLOWEST],
            engine_only=ended.engine_only,
        )
        self._add(batch)

    def take_parts(self, parts: Parts, attribution: Attribution, now_ns: int) -> None:
        """Add requests that are counted now by their parts alone."""
        self._add(_Batch(at_ns=now_ns, parts=parts, attribution=attribution))

    def _add(self, batch: _Batch) -> None:
        self._size += len(batch.parts)
        self._batches.append(batch)
        self._group = None

    def forget(self, now_ns: int) -> None:
        """Remove requests older than the window, and the oldest ones where they are too many."""
        self._begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        while self._batches and (self._batches[0].at_ns < now_ns - self._window_s * 1e9 or self._is_full()):
            self._size -= len(self._batches.popleft().parts)
            self._group = None
        while self._clients and self._clients[0].at_ns < now_ns - CLIENTS_S * 1e9:
            self._clients.popleft()

    def largest(self, now_ns: int) -> Mapping[str, float]:
        """Return the largest part of their TTFT with its share, up to LARGEST_S old.

        It is empty where it is uncertain, and while requests only fail.
        """
        if now_ns >= self._largest_due_ns:
            from sidelight.exporter.report.verdict import largest_part  # noqa: PLC0415  as the class says

            described = self.group()
            self._largest = largest_part(described.breakdown) if described else {}
            self._largest_due_ns = now_ns + round(LARGEST_S * 1e9)
        return {} if self.failing else self._largest

    def _is_full(self) -> bool:
        """Return whether there are enough requests without those of the oldest batch."""
        return self._size - len(self._batches[0].parts) >= self._most

    def recent(self, now_ns: int) -> RecentRequests:
        """Return the statistics of the window that ends now."""
        from sidelight.correlator.live.breakdown import EngineMeans  # noqa: PLC0415  as the class says

        self.forget(now_ns)
        begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        elapsed_s = (now_ns - begun_ns) / 1e9
        is_cut = self._size >= self._most
        requests = chain.from_iterable(batch.slowest for batch in self._batches)
        engine_only = EngineMeans()
        for batch in self._batches:
            if batch.engine_only is not None:
                engine_only.add(batch.engine_only)
        return RecentRequests(
            window_s=(now_ns - self._batches[0].at_ns) / 1e9 if is_cut else min(self._window_s, elapsed_s),
            group=self.group(),
            slowest=heapq.nlargest(SLOWEST, requests, key=lambda request: request.ttft_ms),
            missing=dict(sum((Counter(batch.missing) for batch in self._batches), Counter[str]()).most_common()),
            ended_per_s=self._ended_per_s(elapsed_s),
            clients=sum(spans.ended for spans in self._clients),
            failed=sum(spans.failed for spans in self._clients),
            engine_only_ms=engine_only.ms,
        )

    def _ended_per_s(self, elapsed_s: float) -> float | None:
        """Return the rate of clients' spans; None where requests came without any."""
        ended = sum(spans.ended for spans in self._clients)
        if not ended and any(NO_CLIENT in batch.missing for batch in self._batches):
            return None
        return ended / min(CLIENTS_S, max(elapsed_s, 1.0))

    @property
    def failing(self) -> dict[str, Any]:
        """Return the start and the number of requests that only fail; nothing below FAILING requests."""
        since = f"{iso_ms(self._ok_ns)[11:19]} UTC" if self._ok_ns else ""
        return {"failing": since, "failures": self._failed} if self._failed >= FAILING else {}

    def verdict(self, observed: Mapping[str, Any], **current: Any) -> RunVerdict:
        """Return the verdict on the requests of the window; `current` are the fields of Current."""
        from sidelight.exporter.report.advice import Observations, advice_on_queue, mean_shares  # noqa: PLC0415  as the class says
        from sidelight.exporter.report.verdict import Current, current_verdict  # noqa: PLC0415

        group = self.group()
        seen = None
        if group is not None:
            seen = Observations(breakdown=group.breakdown, shares=mean_shares(group.breakdown), **observed)
        unseen = sum(batch.missing.get(NO_CLIENT, 0) for batch in self._batches)
        return current_verdict(Current(observed=seen, queue=advice_on_queue(**observed), unseen=unseen, **current))

    def group(self) -> Group | None:
        """Return the statistics of all requests together, as in a report; None without any."""
        if self._group is None and self._batches:
            from sidelight.exporter.summary.breakdown import Explained, group  # noqa: PLC0415  as the class says

            parts = concat([batch.parts for batch in self._batches])
            attribution = concat([batch.attribution for batch in self._batches])
            explained = Explained(parts=parts, attribution=attribution, clocks={})
            self._group = group(explained, np.ones(len(parts), dtype=np.bool_))
        return self._group if self._batches else None
