"""The JSONL export of server metrics in AIPerf's shape: one line a scrape that differs from the one before.

Values are raw, as on the page, of the whole run and of every series: nothing is subtracted and no window applies.
Stamps are int64 ns Unix: `timestamp_ns` when the page was complete, `request_sent_ns` when it was asked for.
`benchmark_phase` is the phase in which the page came, absent between phases. A value that is not finite is left out:
JSON has no word for it. Summaries have `quantiles` where histograms have `buckets`, which is not in AIPerf's format.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from sidelight.exporter.server_metrics.source import Labels, Metric, MetricsSource, key, named
from sidelight.rundir.printable.text import printable_json
from sidelight.scraper.exposition import Series, histograms
from sidelight.scraper.series.table import EndpointSeries

_PHASES = {"measure": "profiling"}

Json = dict[str, Any]
_Members = list[tuple[str, int]]  # a field's name and the column that holds its value


@dataclass(slots=True)
class _Sample:
    """One entry of a metric: plain fields, and those of a map (`buckets`, `quantiles`) before them."""

    labels: Labels
    fields: _Members = field(default_factory=list)
    inner: str = ""
    members: _Members = field(default_factory=list)


def write(source: MetricsSource, file: IO[bytes]) -> None:
    """Write the file line by line, endpoints merged in the order of time."""
    metrics = named(source.endpoints)
    streams = [_lines(endpoint, metrics, source.phases) for endpoint in source.endpoints]
    encoder = msgspec.json.Encoder()
    for _, line in heapq.merge(*streams, key=lambda stamped: stamped[0]):
        file.write(printable_json(encoder.encode(line).decode()).encode() + b"\n")


def _lines(
    endpoint: EndpointSeries, metrics: Mapping[tuple[str, str], Metric], phases: Sequence[tuple[str, int, int | None]]
) -> Iterator[tuple[int, Json]]:
    plan = _plan(endpoint.series, metrics)
    for row in endpoint.changed.nonzero()[0].tolist():
        sent_ns, at_ns = int(endpoint.request_ns[row]), int(endpoint.response_ns[row])
        values = endpoint.values[row].tolist()
        line = {
            "endpoint_url": endpoint.url,
            "timestamp_ns": at_ns,
            "endpoint_latency_ns": at_ns - sent_ns,
            "metrics": {name: shown for name, samples in plan.items() if (shown := list(_entries(samples, values)))},
            "request_sent_ns": sent_ns,
        }
        phase = _phase(at_ns, phases)
        yield at_ns, line | ({"benchmark_phase": phase} if phase else {})


def _phase(at_ns: int, phases: Sequence[tuple[str, int, int | None]]) -> str | None:
    for name, start_ns, end_ns in phases:
        if start_ns <= at_ns and (end_ns is None or at_ns <= end_ns):
            return _PHASES.get(name, name)
    return None


def _entries(samples: Sequence[_Sample], values: Sequence[float]) -> Iterator[Json]:
    """Yield the entries of one metric with values on the page."""
    for sample in samples:
        fields = {name: values[column] for name, column in sample.fields if math.isfinite(values[column])}
        inner = {name: values[column] for name, column in sample.members if math.isfinite(values[column])}
        if fields or inner:
            yield {
                **({"labels": dict(sample.labels)} if sample.labels else {}),
                **({sample.inner: inner} if sample.inner else {}),
                **fields,
            }


def _plan(series: tuple[Series, ...], metrics: Mapping[tuple[str, str], Metric]) -> dict[str, list[_Sample]]:
    """Lay out once which column goes where, metrics in the order of the page."""
    plan: dict[str, list[_Sample]] = {metrics[key(item)].name: [] for item in series}
    summaries: dict[tuple[str, Labels], _Sample] = {}
    for column, item in enumerate(series):
        name = metrics[key(item)].name
        if item.type == "summary":
            labels = tuple(pair for pair in item.labels if pair[0] != "quantile")
            if (name, labels) not in summaries:
                summaries[name, labels] = _Sample(labels, inner="quantiles")
                plan[name].append(summaries[name, labels])
            _place(summaries[name, labels], item, column)
        elif item.type != "histogram":
            plan[name].append(_Sample(item.labels, fields=[("value", column)]))
    for group in histograms(series):
        sample = _Sample(group.labels, inner="buckets", members=list(zip(group.le, group.buckets, strict=True)))
        sample.fields = [(name, column) for name, column in (("sum", group.sum), ("count", group.count)) if column >= 0]
        plan[metrics[group.family, "histogram"].name].append(sample)
    return plan


def _place(sample: _Sample, item: Series, column: int) -> None:
    if item.name in (f"{item.family}_sum", f"{item.family}_count"):
        sample.fields.append((item.name.removeprefix(f"{item.family}_"), column))
    else:
        sample.members.append((dict(item.labels).get("quantile", ""), column))
