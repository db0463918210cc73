"""`openmetrics.txt`: the live page of a run at every step, with its own time stamps, to fill a Prometheus afterwards.

    promtool tsdb create-blocks-from openmetrics openmetrics.txt DATA

Source: OpenMetrics 1.0, which wants all points of one series together, in the order of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.samples import Sample

from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.prometheus.page import family
from sidelight.exporter.prometheus.snapshot import Snapshot
from sidelight.exporter.prometheus.table import dated
from sidelight.sidecar.report.history import history

_Labels = tuple[tuple[str, str], ...]


def openmetrics_of(derived: Evaluated, **_: str) -> str:
    """Return the OpenMetrics file of a run."""
    return as_openmetrics(history(derived.run, derived.parts, derived.summary)).decode()


def as_openmetrics(steps: Iterable[tuple[int, Snapshot]]) -> bytes:
    """Return the OpenMetrics file of snapshots and their moments, ending in `# EOF`. Moments are int64 ns Unix,
    ascending.
    """
    metrics: dict[str, Metric] = {}
    points: dict[str, dict[_Labels, list[Sample]]] = {}
    for at_ns, row, values in dated(steps, {}):
        metrics.setdefault(row.name, Metric(row.page_name, row.what, row.kind))
        series = points.setdefault(row.name, {})
        for sample in family(row, values).samples:
            # The buckets of a histogram are one point.
            key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            series.setdefault(key, []).append(sample._replace(timestamp=at_ns // 1_000_000 / 1000))
    for name, metric in metrics.items():
        metric.samples = [sample for samples in points[name].values() for sample in samples]
    whole: bytes = generate_latest(SimpleNamespace(collect=metrics.values))  # type: ignore[no-untyped-call]
    return whole
