"""A page of delimited protobuf (`io.prometheus.client.MetricFamily`), read into what its text would give.

The messages are described here in code; upb does the decoding. Pages of text are left to `page_text`.
Source: metrics.proto of prometheus/client_model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from prometheus_client.utils import floatToGoString

from scraper.exposition import native_histogram
from scraper.exposition.grammar import Labels
from scraper.exposition.page import KEPT_LAYOUTS, MAX_SERIES, MalformedPage, Page, Series

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "double": _FIELD.TYPE_DOUBLE,
    "uint64": _FIELD.TYPE_UINT64,
    "uint32": _FIELD.TYPE_UINT32,
    "int64": _FIELD.TYPE_INT64,
    "int32": _FIELD.TYPE_INT32,
    "sint64": _FIELD.TYPE_SINT64,
    "sint32": _FIELD.TYPE_SINT32,
}
_PACKAGE = "io.prometheus.client"
# What is read of each: field, type, number; `*` is repeated. An enumeration is an int32 on the wire.
_MESSAGES = {
    "LabelPair": "name string 1, value string 2",
    "Gauge": "value double 1",
    "Counter": "value double 1",
    "Quantile": "quantile double 1, value double 2",
    "Summary": "sample_count uint64 1, sample_sum double 2, quantile *Quantile 3",
    "Untyped": "value double 1",
    "Bucket": "cumulative_count uint64 1, cumulative_count_float double 4, upper_bound double 2",
    "BucketSpan": "offset sint32 1, length uint32 2",
    "Histogram": (
        "sample_count uint64 1, sample_count_float double 4, sample_sum double 2, bucket *Bucket 3, "
        "schema sint32 5, zero_threshold double 6, zero_count uint64 7, "
        "zero_count_float double 8, negative_span *BucketSpan 9, negative_delta *sint64 10, negative_count *double 11, "
        "positive_span *BucketSpan 12, positive_delta *sint64 13, positive_count *double 14"
    ),
    "Metric": (
        "label *LabelPair 1, gauge Gauge 2, counter Counter 3, summary Summary 4, untyped Untyped 5, "
        "histogram Histogram 7"
    ),
    "MetricFamily": "name string 1, help string 2, type int32 3, metric *Metric 4",
}


def message_class(name: str) -> type[Any]:
    """Return the class of one of the messages above, `MetricFamily` or what it is made of."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            field, kind, number = text.split()
            label = _FIELD.LABEL_REPEATED if kind[0] == "*" else _FIELD.LABEL_OPTIONAL
            one = message.field.add(name=field, number=int(number), label=label)
            kind = kind.lstrip("*")
            if kind in _SCALARS:
                one.type = _SCALARS[kind]
            else:
                one.type, one.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()  # of our own: another library may bring the same names
    pool.Add(file)
    return pool


_POOL = _pool()
_MetricFamily = message_class("MetricFamily")


def read_messages(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Split a page into its messages, each with the byte at which it starts. Raises `MalformedPage` where it is cut."""
    at, number = 0, 0
    while at < len(body):
        start, size, shift, number = at, 0, 0, number + 1
        while True:
            if at >= len(body) or shift > 28:  # a message has less than 2 GB
                raise MalformedPage("the page is cut off: a message without its length", line=number, byte=start)
            byte = body[at]
            at, size, shift = at + 1, size | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        if size > len(body) - at:
            raise MalformedPage("the page is cut off: a message lacks its end", line=number, byte=start)
        yield start, body[at : at + size]
        at += size


# What a family's layout is made of: its name, help and type, and for each metric its labels, the bounds of its buckets
# or its quantiles, and the schema of its native histogram.
_Metric = tuple[Labels, tuple[float, ...], int | None]
_Identity = tuple[str, str, str, tuple[_Metric, ...]]
_KINDS = {
    0: ("counter", "counter"),
    1: ("gauge", "gauge"),
    2: ("summary", "summary"),
    3: ("unknown", "untyped"),
    4: ("histogram", "histogram"),
    5: ("gaugehistogram", "histogram"),
}  # by number: the type as text pages declare it, and the field of a metric that holds it


class FamilyReader:
    """Reads the protobuf pages of one target; a family that equals its last page's is not decoded again.

    While the layout is unchanged, `page.series` is the same object. At most `2 * MAX_SERIES` series are remembered.
    """

    def __init__(self) -> None:
        self._known: dict[_Identity, tuple[Series, ...]] = {}  # the last used at the end
        self._last: list[tuple[bytes, tuple[Series, ...], list[float]]] = []
        self._layouts: list[tuple[list[tuple[Series, ...]], tuple[Series, ...]]] = []

    def read(self, body: bytes) -> Page:
        """Read one page of delimited protobuf; the order of series is that of the page.

        - A counter, gauge or untyped metric is one series of the family's name.
        - A summary gives a series for each quantile, `_sum` and `_count`.
        - A histogram gives `_bucket` for each bound, one at +Inf, `_sum` and `_count` (`_gsum` and `_gcount` of a gauge
          histogram). A native histogram gives `_bucket` at the upper bounds of its populated buckets, lowest first, and
          at +Inf: a bucket that is absent on a page has exactly the count of the next lower bound. Where a histogram is
          both, the native one counts, as in Prometheus, unless its schema is unknown.
        - Timestamps and exemplars are read over. Custom bounds (schema -53) have no field in this format.
        Raises `MalformedPage` for a page that is cut off inside a message, or anything that is no metric.
        """
        read: list[tuple[bytes, tuple[Series, ...], list[float]]] = []
        total = 0
        for number, (start, message) in enumerate(read_messages(body)):
            last = self._last[number] if number < len(self._last) else None
            if last is not None and last[0] == message:
                one = last
            else:
                try:
                    one = self._family(message)
                except (ValueError, DecodeError) as error:
                    reason = "not a metric family" if isinstance(error, DecodeError) else str(error)
                    raise MalformedPage(reason, line=number + 1, byte=start) from None
            read.append(one)
            total += len(one[1])
            if total > MAX_SERIES:
                raise MalformedPage(f"more than {MAX_SERIES} series", line=number + 1, byte=start)
        self._last = read
        kept = sum(map(len, self._known.values()))
        while kept > 2 * MAX_SERIES:
            kept -= len(self._known.pop(next(iter(self._known))))
        values = np.array([value for _, _, values in read for value in values], dtype=np.float64)
        return Page(series=self._layout([series for _, series, _ in read]), values=values)

    def _family(self, message: bytes) -> tuple[bytes, tuple[Series, ...], list[float]]:
        identity, values = read_family(message)
        if len(values) > MAX_SERIES:
            raise ValueError(f"more than {MAX_SERIES} series")
        series = self._known.pop(identity, None) or series_of(identity)
        self._known[identity] = series
        return message, series, values

    def _layout(self, families: list[tuple[Series, ...]]) -> tuple[Series, ...]:
        for place, (parts, series) in enumerate(self._layouts):
            if len(parts) == len(families) and all(map(operator.is_, parts, families)):
                self._layouts.insert(0, self._layouts.pop(place))
                return series
        series = tuple(one for family in families for one in family)
        self._layouts.insert(0, (families, series))
        del self._layouts[KEPT_LAYOUTS:]
        return series


def read_family(message: bytes) -> tuple[_Identity, list[float]]:
    """Decode one message into its layout and the values of its series. Raises `ValueError` or `DecodeError`."""
    family = _MetricFamily.FromString(message)
    if not family.name:
        raise ValueError("a metric family without a name")
    if family.type not in _KINDS:
        raise ValueError(f"metric family {family.name} is of an unknown type ({family.type})")
    kind, field = _KINDS[family.type]
    metrics: list[_Metric] = []
    values: list[float] = []
    for metric in family.metric:
        if not metric.HasField(field):
            raise ValueError(f"{kind} {family.name} has a metric without a {field}")
        labels = _labels(metric)
        one = getattr(metric, field)
        if field == "histogram":
            bounds, schema = _histogram(one, values)
        elif field == "summary":
            bounds, schema = tuple(q.quantile for q in one.quantile), None
            values += [q.value for q in one.quantile]
            values += (one.sample_sum, one.sample_count)
        else:
            bounds, schema = (), None
            values.append(one.value)
        metrics.append((labels, bounds, schema))
    return (family.name, family.help, kind, tuple(metrics)), values


def _labels(metric: Any) -> Labels:
    labels = sorted([(pair.name, pair.value) for pair in metric.label])
    for one, following in pairwise(labels):
        if one[0] == following[0]:
            raise ValueError(f"label {one[0]} twice")
    return tuple(labels)


def _histogram(histogram: Any, values: list[float]) -> tuple[tuple[float, ...], int | None]:
    """Append a histogram's values; return the bounds of its buckets, and its schema if it is a native one."""
    count = histogram.sample_count_float or histogram.sample_count
    buckets = histogram.bucket
    schema = histogram.schema
    known = native_histogram.MIN_SCHEMA <= schema <= native_histogram.MAX_SCHEMA
    if _is_native(histogram) and (known or not buckets):
        bounds, counts = native_histogram.cumulative(
            schema,
            positive=_side(histogram.positive_span, histogram.positive_delta, histogram.positive_count),
            negative=_side(histogram.negative_span, histogram.negative_delta, histogram.negative_count),
            zero_threshold=histogram.zero_threshold,
            zero_count=histogram.zero_count_float or histogram.zero_count,
            count=count,
        )
        values += counts
    else:
        schema = None
        bounds = tuple([bucket.upper_bound for bucket in buckets])
        if any(map(math.isnan, bounds)):
            raise ValueError("a histogram's bucket without a readable le")
        values += [bucket.cumulative_count_float or bucket.cumulative_count for bucket in buckets]
        if math.inf not in bounds:
            bounds = (*bounds, math.inf)
            values.append(count)
    values += (histogram.sample_sum, count)
    return bounds, schema


def _is_native(histogram: Any) -> bool:
    """Tell as Prometheus does; a native histogram without observations has an empty span."""
    return bool(
        histogram.positive_span
        or histogram.negative_span
        or histogram.zero_threshold
        or histogram.zero_count
        or histogram.zero_count_float
    )


def _side(spans: Any, deltas: Any, counts: Any) -> native_histogram.Side:
    return native_histogram.Side(
        spans=tuple((span.offset, span.length) for span in spans),
        counts=list(counts) or list(accumulate(deltas)),
    )


def series_of(identity: _Identity) -> tuple[Series, ...]:
    """Return the series of a family's layout, in the order of its values. Raises `ValueError` for a label twice."""
    name, text, kind, metrics = identity
    found: list[Series] = []
    for labels, bounds, schema in metrics:
        if kind in ("counter", "gauge", "unknown"):
            found.append(Series(name, labels, name, kind, text))
            continue
        part, key = (name, "quantile") if kind == "summary" else (f"{name}_bucket", "le")
        if any(label == key for label, _ in labels):
            raise ValueError(f"label {key} twice")
        for edge in bounds:
            text_of_edge = floatToGoString(edge)  # type: ignore[no-untyped-call]  # `1.0`, `1e+06`, `+Inf`
            inserted = tuple(sorted((*labels, (key, text_of_edge))))
            found.append(Series(part, inserted, name, kind, text, schema))
        gauge = "g" if kind == "gaugehistogram" else ""
        found += (Series(f"{name}_{gauge}{end}", labels, name, kind, text) for end in ("sum", "count"))
    return tuple(found)
