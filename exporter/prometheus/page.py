"""The page of a run or a watch in progress; metrics as families of Prometheus.

The conductor replaces the snapshot about once a second, and a scrape renders whichever is the latest. Serving it over
HTTP is left to `server`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from time import monotonic

from prometheus_client import CollectorRegistry, samples
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sidelight.exporter.prometheus.events import EventStream
from sidelight.exporter.prometheus.snapshot import Cumulative, Snapshot
from sidelight.exporter.prometheus.table import MetricRow, Point, points

SCRAPES_KEPT = 4


class LivePage(Collector):
    """The page of one run: owns a registry of its own and the latest snapshot.

    Before the first `update` the page is empty. A scrape sees one snapshot as a whole, never parts of two. `scraped_s`
    are when the last scrapes came, by the monotonic clock, and `latest` is what they see. Who serves the page sets
    `scraped` when an answer was taken. Browsers are sent `stream`.
    """

    def __init__(self) -> None:
        self.latest: Snapshot | None = None
        self.stream = EventStream()
        self.scraped_s: deque[float] = deque(maxlen=SCRAPES_KEPT)
        self.scraped = asyncio.Event()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, snapshot: Snapshot) -> None:
        self.latest = snapshot

    def collect(self) -> Iterable[Metric]:
        """Yield the families of the latest snapshot; called by the registry at each scrape."""
        if self.latest is None:
            return ()
        self.scraped_s.append(monotonic())
        return families(self.latest)

    def render(self) -> bytes:
        """Return the page as Prometheus text 0.0.4."""
        return generate_latest(self.registry)


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metric families of a snapshot; one without samples is not yielded."""
    return (family(row, values) for row, values in points(snapshot))


def family(row: MetricRow, values: Iterable[Point]) -> Metric:
    """Return a metric's points as a family. The older text format leaves exemplars out."""
    metric = Metric(row.page_name, row.what, row.kind)
    name = metric.name + {"counter": "_total", "info": "_info"}.get(row.kind, "")
    for labels, value in values:
        if not isinstance(value, Cumulative):
            metric.add_sample(name, labels, value)
            continue
        count = 0.0
        for place, (bound, count) in enumerate(zip(_upper(value.bounds_s), accumulate(value.counts), strict=True)):
            of = value.exemplars.get(place)
            exemplar = None if of is None else samples.Exemplar({"trace_id": of.trace_id}, of.value_s, of.at_s)
            metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count, exemplar=exemplar)
        metric.add_sample(f"{name}_count", labels, count)
        metric.add_sample(f"{name}_sum", labels, value.sum_s)
    return metric


@lru_cache
def _upper(bounds_s: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds_s), "+Inf")
