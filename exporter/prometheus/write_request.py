"""The messages of Prometheus' remote write 1.0: series of samples and exemplars, in snappy's format.

Source: prometheus.io/docs/specs/prw/remote_write_spec and prompb/types.proto of Prometheus.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from prometheus_client.samples import Exemplar

from exporter.prometheus.page import dated
from exporter.prometheus.snapshot import Snapshot

STEPS_A_REQUEST = 20
SERIES_A_REQUEST = 500
_LITERAL_BYTES = 1 << 16
Labels = tuple[tuple[str, str], ...]


class Point(NamedTuple):
    """One sample of a series."""

    at_ms: int
    value: float
    exemplar: Exemplar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Request to a server, which takes all of it or nothing. Points of a series ascend in time."""

    series: tuple[tuple[Labels, tuple[Point, ...]], ...]

    @property
    def samples(self) -> int:
        return sum(len(points) for _, points in self.series)

    def by_step(self) -> Iterator[WriteRequest]:
        """Yield the same points as one request for each moment."""
        stamps = sorted({point.at_ms for _, points in self.series for point in points})
        for at_ms in stamps:
            of_step = ((labels, tuple(p for p in points if p.at_ms == at_ms)) for labels, points in self.series)
            yield WriteRequest(series=tuple((labels, points) for labels, points in of_step if points))

    def encoded(self) -> bytes:
        return snappy(b"".join(_field(1, _time_series(labels, points)) for labels, points in self.series))


def write_requests(history: Iterable[tuple[int, Snapshot]], shown: dict[Hashable, Exemplar]) -> Iterator[WriteRequest]:
    """Yield the requests that send snapshots, each with its moment (int64 ns Unix, ascending).

    `shown` holds the exemplars that were sent already.
    """
    steps = iter(history)
    while group := list(islice(steps, STEPS_A_REQUEST)):
        series: dict[Labels, list[Point]] = {}
        for at_ns, family in dated(group, shown):
            at_ms = at_ns // 1_000_000
            for sample in family.samples:
                point = Point(at_ms=at_ms, value=float(sample.value), exemplar=sample.exemplar)
                series.setdefault(_labels(sample.name, sample.labels), []).append(point)
        rest = iter(series.items())
        while some := list(islice(rest, SERIES_A_REQUEST)):
            yield WriteRequest(series=tuple((labels, tuple(points)) for labels, points in some))


def _labels(name: str, labels: Mapping[str, str]) -> Labels:
    """Return the labels of a series in order; one that is empty is none."""
    return tuple(sorted([(label, value) for label, value in labels.items() if value] + [("__name__", name)]))


def _time_series(labels: Labels, points: Sequence[Point]) -> bytes:
    return b"".join(
        (
            *_named(labels),
            *(_field(2, _double(1, p.value) + _integer(2, p.at_ms)) for p in points),
            *(_field(3, _exemplar(p.exemplar)) for p in points if p.exemplar is not None),
        )
    )


def _exemplar(exemplar: Exemplar) -> bytes:
    at_ms = int(float(exemplar.timestamp or 0) * 1000)
    return b"".join((*_named(exemplar.labels.items()), _double(2, exemplar.value), _integer(3, at_ms)))


def _named(labels: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    return (_field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in labels)


def _field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field of protobuf."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


@lru_cache(maxsize=4096)  # lengths, and a run's stamps, come again and again
def _varint(number: int) -> bytes:
    """Return a number, not negative, in base 128, the lowest digits first."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes((*digits, number))


def snappy(data: bytes) -> bytes:
    """Return data in snappy's block format, all of it literal: the format is asked for, compression is not."""
    pieces = [_varint(len(data))]
    for begin in range(0, len(data), _LITERAL_BYTES):
        literal = data[begin : begin + _LITERAL_BYTES]
        pieces += [b"\xf4", struct.pack("<H", len(literal) - 1), literal]
    return b"".join(pieces)
