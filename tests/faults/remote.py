"""What is sent to Prometheus by remote write: Google's parser and another's snappy read in it what we meant.

The messages are declared as prompb/types.proto of Prometheus has them.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from prometheus_client.samples import Exemplar

from exporter.prometheus.write_request import Labels, Point, WriteRequest

ODD = 'ab\\"\n{}=, é€\u2028\U0001f600\t\x7f'
VALUES = (0.0, -0.0, 1.0, -1.5, 1e-300, 1e300, 5e-324, float("inf"), float("nan"), 2.0**53 + 1)
# Of each message its fields: number, type, and whether there may be several.
MESSAGES: dict[str, dict[str, tuple[int, str, bool]]] = {
    "Label": {"name": (1, "string", False), "value": (2, "string", False)},
    "Sample": {"value": (1, "double", False), "timestamp": (2, "int64", False)},
    "Exemplar": {"labels": (1, "Label", True), "value": (2, "double", False), "timestamp": (3, "int64", False)},
    "BucketSpan": {"offset": (1, "sint32", False), "length": (2, "uint32", False)},
    "Histogram": {
        "count_int": (1, "uint64", False), "sum": (3, "double", False), "schema": (4, "sint32", False),
        "zero_threshold": (5, "double", False), "zero_count_int": (6, "uint64", False),
        "positive_spans": (11, "BucketSpan", True), "positive_deltas": (12, "sint64", True),
        "timestamp": (15, "int64", False),
    },
    "TimeSeries": {
        "labels": (1, "Label", True), "samples": (2, "Sample", True), "exemplars": (3, "Exemplar", True),
        "histograms": (4, "Histogram", True),
    },
    "WriteRequest": {"timeseries": (1, "TimeSeries", True)},
}  # fmt: skip


@cache
def write_request() -> Any:
    """Return the class of a request as Google's parser has it."""
    file = descriptor_pb2.FileDescriptorProto(name="prompb.proto", package="prompb", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, is_list) in fields.items():
            label = kinds.LABEL_REPEATED if is_list else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if kind in MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".prompb.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prompb.WriteRequest"))


def difference(rng: random.Random) -> str:
    """Say what of a request of several series is read otherwise than it was meant."""
    sent = WriteRequest(series=tuple((_labels(rng), _points(rng)) for _ in range(rng.randrange(5))))
    block = sent.encoded()
    read = write_request().FromString(pa.decompress(block, _size(block), codec="snappy", asbytes=True))
    whole = read.SerializeToString(deterministic=True)
    read.DiscardUnknownFields()
    if whole != read.SerializeToString(deterministic=True):
        return "it has fields that Prometheus does not know"
    ours = repr([(labels, *_sorted(points)) for labels, points in sent.series])
    theirs = repr([_read(series) for series in read.timeseries])
    return "" if ours == theirs else f"{ours} is read as {theirs}"


def _labels(rng: random.Random) -> Labels:
    return tuple((f"l{number}", _text(rng)) for number in range(rng.randrange(4)))


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(ODD, k=rng.choice((0, 3, 200))))


def _points(rng: random.Random) -> tuple[Point, ...]:
    points = []
    for _ in range(rng.randrange(4)):
        exemplar: Exemplar | None = None
        if rng.random() < 0.3:
            exemplar = Exemplar(dict(_labels(rng)), rng.choice(VALUES), rng.randrange(2**40) / 1024)
        at_ms = rng.choice((0, rng.randrange(2**41), 2**63 - 1))
        points.append(Point(at_ms=at_ms, value=rng.choice(VALUES), exemplar=exemplar))
    return tuple(points)


def _size(block: bytes) -> int:
    """Return how long a block of snappy is unpacked, which stands at its beginning."""
    size = shift = 0
    for byte in block:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return size


def _sorted(points: tuple[Point, ...]) -> tuple[list[Any], list[Any]]:
    """Return samples and exemplars."""
    samples = [(point.at_ms, point.value) for point in points]
    exemplars = [
        (tuple(point.exemplar.labels.items()), point.exemplar.value, int(float(point.exemplar.timestamp or 0) * 1000))
        for point in points
        if point.exemplar is not None
    ]
    return samples, exemplars


def _read(series: Any) -> tuple[Labels, list[Any], list[Any]]:
    """Return the same of a series as it was parsed."""
    labels = tuple((label.name, label.value) for label in series.labels)
    samples = [(sample.timestamp, sample.value) for sample in series.samples]
    exemplars = [(tuple((label.name, label.value) for label in each.labels), each.value, each.timestamp)
                 for each in series.exemplars]  # fmt: skip
    return labels, samples, exemplars
