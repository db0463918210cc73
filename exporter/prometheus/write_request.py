"""The messages of Prometheus' remote write 1.0: series of samples and exemplars, in snappy's block format.

Source: prometheus.io/docs/specs/prw/remote_write_spec.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from importlib import resources
from itertools import islice
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from sidelight.exporter.prometheus.page import family
from sidelight.exporter.prometheus.snapshot import Exemplar, Snapshot
from sidelight.exporter.prometheus.table import dated

STEPS_A_REQUEST = 20
SERIES_A_REQUEST = 500


def _classes() -> dict[str, Any]:
    """Return protobuf's classes from the compiled remote_write.proto, in a pool of their own."""
    compiled = resources.files("sidelight.exporter.prometheus").joinpath("remote_write.desc").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    return message_factory.GetMessages(files, pool=descriptor_pool.DescriptorPool())


_KINDS = _classes()
_Series, WriteRequest = _KINDS["prometheus.TimeSeries"], _KINDS["prometheus.WriteRequest"]


def write_requests(history: Iterable[tuple[int, Snapshot]], shown: dict[Hashable, Exemplar]) -> Iterator[Any]:
    """Yield the requests that send snapshots, each with its moment (int64 ns Unix, ascending). A server takes all of
    one or nothing.

    `shown` holds the exemplars that were sent already.
    """
    steps = iter(history)
    while group := list(islice(steps, STEPS_A_REQUEST)):
        series: dict[tuple[tuple[str, str], ...], Any] = {}
        for at_ns, row, values in dated(group, shown):
            for sample in family(row, values).samples:
                labels = _labels({**sample.labels, "__name__": sample.name})
                if (timeseries := series.get(labels)) is None:
                    timeseries = series[labels] = _Series(labels=_pairs(labels))
                timeseries.samples.add(value=sample.value, timestamp=at_ns // 1_000_000)
                if (exemplar := sample.exemplar) is not None:
                    at_ms = int(float(exemplar.timestamp or 0) * 1000)
                    pairs = _pairs(exemplar.labels.items())
                    timeseries.exemplars.add(labels=pairs, value=exemplar.value, timestamp=at_ms)
        rest = iter(series.values())
        while some := list(islice(rest, SERIES_A_REQUEST)):
            yield WriteRequest(timeseries=some)


def samples_of(request: Any) -> int:
    """Return the number of samples of a request."""
    return sum(len(series.samples) for series in request.timeseries)


def by_step(request: Any) -> Iterator[Any]:
    """Yield a request for each moment of a request; an exemplar goes with the first after it."""
    before_ms = -1
    for at_ms in sorted({sample.timestamp for series in request.timeseries for sample in series.samples}):
        of_step = [
            _Series(
                labels=series.labels,
                samples=[sample for sample in series.samples if sample.timestamp == at_ms],
                exemplars=[each for each in series.exemplars if before_ms < each.timestamp <= at_ms],
            )
            for series in request.timeseries
        ]
        yield WriteRequest(timeseries=[series for series in of_step if series.samples])
        before_ms = at_ms


def encoded(request: Any) -> bytes:
    """Return the body that sends a request."""
    return bytes(pa.compress(request.SerializeToString(), codec="snappy", asbytes=True))


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the labels of a series in order; one that is empty is none."""
    return tuple(sorted((name, value) for name, value in labels.items() if value))


def _pairs(labels: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in labels]
