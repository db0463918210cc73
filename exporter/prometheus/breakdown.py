"""The breakdown of single requests on the Prometheus page: histograms by part, and what a watch says of itself.

Counted by `part_counts`, which this does not import: what it needs would keep a run's first request waiting. Labels are
from small fixed sets: what is behind a request (a model, a user, a trace) never becomes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from exporter.prometheus.snapshot import Cumulative, PartCounts, WatchCounts

Numbers = TypeVar("Numbers", CounterMetricFamily, GaugeMetricFamily)

REFUSED = ("bad_spans", "off_clock", "malformed", "too_large", "turned_away")


def part_families(counts: PartCounts | None) -> Iterator[Metric]:
    """Yield the breakdown as metric families; none of a breakdown that is not made."""
    if counts is None:
        return
    for name, what, found in (
        ("ttft", "TTFT of each request by part; of one source, all parts add up to it.", counts.ttft),
        ("e2e", "End-to-end time of each request by part; of one source, all parts add up to it.", counts.e2e),
    ):
        yield histograms(f"sidelight_{name}_part_seconds", what, ("part", "source"), found.items())
    what = "What a part of each request's time consists of, where that is told apart: engine_frontend is in other."
    yield histograms("sidelight_inner_part_seconds", what, ("part", "source"), counts.inner.items())
    for name, what, label, numbers in (
        ("sidelight_requests", "Requests by where their breakdown is from.", "source", counts.requests),
        ("sidelight_breakdown_quality", "Requests by how good their breakdown is.", "quality", counts.quality),
        ("sidelight_breakdown_missing", "Requests whose TTFT is not broken down, by why.", "reason", counts.missing),
    ):
        yield series(CounterMetricFamily, name, what, (label,), numbers)


def watch_families(counts: WatchCounts | None) -> Iterator[Metric]:
    if counts is None:
        return
    received = counts.receiver
    for name, what, count in (
        ("receiver_exports", "Exports of spans taken in.", received.get("exports")),
        ("receiver_spans", "Spans taken in.", received.get("spans")),
        ("receiver_forwarded", "Exports passed on to the next collector.", received.get("forwarded")),
        ("receiver_forward_dropped", "Exports that did not reach the next collector.", received.get("forward_dropped")),
        ("receiver_restarts", "Receivers that ended on their own and were started again.", counts.restarts),
        ("watch_errors", "Defects of the sidecar; what had just come is lost with each.", counts.errors),
        ("watch_cpu_seconds", "CPU time of the process that serves this page.", counts.cpu_s),
        ("window_repeated_spans", "Spans that came again, and count once.", counts.repeated),
        ("window_evicted_spans", "Spans that had to make room for newer ones.", counts.evicted),
    ):
        yield CounterMetricFamily(f"sidelight_{name}", what, value=count)
    refused = {kind: received[kind] for kind in REFUSED if kind in received}
    what = "Exports (bad_spans, off_clock: spans) not used, by why."
    yield series(CounterMetricFamily, "sidelight_receiver_refused", what, ("kind",), refused)
    what = "What waits for the next collector of spans: exports, their bytes, and how many bytes may wait."
    yield series(GaugeMetricFamily, "sidelight_receiver_forward_queue", what, ("what",), counts.forward_queue)
    what = "How much is kept for requests that go on."
    yield series(GaugeMetricFamily, "sidelight_window_size", what, ("what",), counts.sizes)


def series(
    kind: type[Numbers], name: str, what: str, labels: Sequence[str], numbers: Mapping[Any, float | None]
) -> Numbers:
    """Return a family with a sample for each number that is known and finite, by its label or labels."""
    family = kind(name, what, labels=labels)
    for key, number in numbers.items():
        if number is not None and math.isfinite(number):
            family.add_metric([key] if isinstance(key, str) else key, number)
    return family


def histograms(
    name: str, what: str, labels: Sequence[str], found: Iterable[tuple[Sequence[str], Cumulative | None]]
) -> HistogramMetricFamily:
    """Return a family with a histogram for each that is known and finite, by its labels."""
    family = HistogramMetricFamily(name, what, labels=labels)
    for values, one in found:
        if one is not None and math.isfinite(one.sum_s + sum(one.counts)):
            upper = (*(str(bound) for bound in one.bounds_s), "+Inf")
            family.add_metric(values, list(zip(upper, accumulate(one.counts), strict=True)), one.sum_s)
    return family
