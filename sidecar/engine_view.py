"""One scraped endpoint while a run goes: its last page in canonical quantities, and its finish-time sums of late."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from correlator.decompose import FinishSums
from correlator.finish import finish_sums
from exporter.snapshot import Cumulative, EngineCounts, add
from scraper import engines
from scraper.aggregate import gauge_values
from scraper.engines import CanonicalSource
from scraper.exposition import Series
from scraper.log import FailureRecord, Row
from scraper.missing import Missing
from scraper.resets import unrolled
from scraper.series import build


@dataclass(slots=True, kw_only=True)
class EngineView:
    """`counts` is what the live page shows; `sums` are (at_ns, count, queue s, prefill s), one a scrape, still as
    exposed.
    """

    counts: EngineCounts
    outcomes: dict[str, int] = field(default_factory=lambda: {"ok": 0, "failed": 0})
    sums: deque[tuple[int, float, float, float]] = field(default_factory=deque)

    def take(self, record: Row | FailureRecord, *, keep_s: float) -> None:
        """Take in one scrape; sums older than `keep_s`, but for one, are dropped."""
        page = build([record])[0]
        usable = len(page.at_ns) > 0
        self.outcomes["ok" if usable else "failed"] += 1
        if usable:
            self.counts = _counts(record.url, page.series, page.values[0])
            sums = finish_sums(page)
            if isinstance(sums, FinishSums):
                row = (sums.count, sums.queue_s, sums.prefill_s)
                self.sums.append((int(sums.at_ns[0]), *(float(column[0]) for column in row)))  # type: ignore[arg-type]
        while len(self.sums) > 2 and self.sums[1][0] < record.response_ns - keep_s * 1e9:
            self.sums.popleft()
        duration_s = (record.response_ns - record.request_ns) / 1e9
        self.counts = replace(self.counts, scrapes=dict(self.outcomes), last_scrape_duration_s=duration_s)

    def finish_sums(self) -> FinishSums | None:
        """Return the sums of late, restarts counted up; None with fewer than two scrapes."""
        if len(self.sums) < 2:
            return None
        rows = np.array([row[1:] for row in self.sums])
        falls = unrolled(rows[:, :1])[1][:, 0]
        count, queue_s, prefill_s = unrolled(rows, falls)[0].T
        at_ns = np.array([row[0] for row in self.sums], dtype=np.int64)
        return FinishSums(at_ns=at_ns, count=count, queue_s=queue_s, prefill_s=prefill_s)


def _counts(url: str, series: tuple[Series, ...], row: npt.NDArray[np.float64]) -> EngineCounts:
    engine = engines.detect(series)
    if engine is None:
        return EngineCounts(endpoint=url)
    histograms: dict[str, Cumulative] = {}
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    for name, source in engines.canonical(series, engine.name).items():
        if isinstance(source, Missing):
            continue
        if source.quantity.kind == "histogram":
            merged = _merged(source, row)
            if merged is not None:
                histograms[name] = merged
            continue
        values = gauge_values(row[None, :], source)[0]
        values = values[np.isfinite(values)]
        total = math.inf
        if len(values):
            total = max(values.tolist()) if source.quantity.across == "max" else sum(values.tolist())
        if math.isfinite(total):
            (gauges if source.quantity.kind == "gauge" else counters)[name] = total
    return EngineCounts(
        endpoint=url,
        engine=engine.name,
        version=engine.version or "",
        histograms=histograms,
        gauges=gauges,
        counters=counters,
    )


def _merged(source: CanonicalSource, row: npt.NDArray[np.float64]) -> Cumulative | None:
    """Add the label sets of a histogram; None where one has no sum, no +Inf bucket or a value that is not finite, or
    where their bounds differ.
    """
    found = []
    for columns in source.histograms:
        if columns.sum < 0 or not columns.bounds or columns.bounds[-1] != math.inf:
            return None
        found.append(
            Cumulative(
                bounds_s=columns.bounds[:-1],
                counts=tuple(np.diff(row[list(columns.buckets)], prepend=0.0).tolist()),
                sum_s=float(row[columns.sum]),
            )
        )
    if len({one.bounds_s for one in found}) != 1:
        return None
    merged = found[0]
    for other in found[1:]:
        merged = add(merged, other)
    return merged if all(map(math.isfinite, (*merged.counts, merged.sum_s))) else None
