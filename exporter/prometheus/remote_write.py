"""`--prometheus-write`: the live page of a run at every step, sent to a server that takes Prometheus' remote write 1.0.

Samples bear the run's own time stamps, so that what comes twice changes nothing.
Source: Prometheus remote write 1.0 (prometheus.io/docs/specs/prw/remote_write_spec).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import aiohttp
from prometheus_client.samples import Exemplar, Sample

from exporter.prometheus.page import dated
from exporter.prometheus.snapshot import Snapshot
from rundir.access import Access, aiohttp_tls, bare, connection_problem, headers_for
from scraper.spans.forward import Rejected, Unavailable, again_while_away

STEPS_A_REQUEST = 20
SERIES_A_REQUEST = 500
PATIENCE_S = 10.0  # how long one request is tried
REPORT_EVERY_S = 5.0
_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
_LITERAL_BYTES = 1 << 16
_REPLY_BYTES, _REASON_CHARACTERS = 4096, 200
# What a server says of samples that it takes no more, as Prometheus without an out-of-order window does after an hour.
_TOO_OLD = ("too old", "out of bounds", "out of order")
_Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How many samples a server took, and why it was given no more; "" where it took all."""

    samples: int
    reason: str = ""


async def write(
    history: Iterable[tuple[int, Snapshot]], url: str, access: Access, *, report: Callable[[str], None]
) -> Written:
    """Send snapshots and the moments of each (int64 ns Unix, ascending) in turn.

    A server that is away, or asks for later (429, 5xx), is tried again for PATIENCE_S; one that refuses is given
    nothing more. `report` is called every few seconds with how many samples were taken. Raises UnusableFile.
    """
    taken, loop = 0, asyncio.get_running_loop()
    reported_s = loop.time()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(ssl=aiohttp_tls(access))
    headers = {**_HEADERS, **headers_for(access, url)}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        for count, body in write_requests(history):
            try:
                await again_while_away(partial(_send, session, bare(url), body), patience_s=PATIENCE_S)
            except (Unavailable, Rejected) as error:
                return Written(samples=taken, reason=str(error))
            taken += count
            if loop.time() - reported_s >= REPORT_EVERY_S:
                reported_s = loop.time()
                report(f"{taken:,} samples sent")
    return Written(samples=taken)


async def _send(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    """Send one request, once. Raises Unavailable, Rejected."""
    try:
        async with session.post(url, data=body, allow_redirects=False) as response:
            status, reply = response.status, await response.content.read(_REPLY_BYTES)
    except TimeoutError:
        raise Unavailable(f"no answer within {PATIENCE_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"connect: {connection_problem(error)}") from error
    text = " ".join(reply.decode(errors="replace").split())[:_REASON_CHARACTERS]
    reason = f"HTTP {status}{f': {text}' if text else ''}"
    if status == 429 or status >= 500:
        raise Unavailable(reason)
    if status >= 300:
        raise Rejected(_with_cure(reason))


def _with_cure(reason: str) -> str:
    if any(words in reason.lower() for words in _TOO_OLD):
        return f"{reason}; for a run of over an hour ago, write --formats openmetrics and create blocks of it"
    if reason.startswith("HTTP 404"):
        return f"{reason}; start Prometheus with --web.enable-remote-write-receiver; its path is /api/v1/write"
    return reason


def write_requests(history: Iterable[tuple[int, Snapshot]]) -> Iterator[tuple[int, bytes]]:
    """Give the bodies of requests, each with how many samples it holds; those of one series ascend in time."""
    steps, shown = iter(history), dict[Hashable, Exemplar]()
    while group := list(islice(steps, STEPS_A_REQUEST)):
        series: dict[_Labels, list[tuple[int, Sample]]] = {}
        for at_ns, family in dated(group, shown):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if value}
                key = tuple(sorted({**labels, "__name__": sample.name}.items()))
                series.setdefault(key, []).append((at_ns // 1_000_000, sample))
        rest = iter(series.items())
        while some := list(islice(rest, SERIES_A_REQUEST)):
            message = b"".join(_field(1, _time_series(labels, points)) for labels, points in some)
            yield sum(len(points) for _, points in some), snappy(message)


def _time_series(labels: _Labels, points: Sequence[tuple[int, Sample]]) -> bytes:
    exemplars = (sample.exemplar for _, sample in points if sample.exemplar)
    return b"".join(
        (
            *_named(labels),
            *(_field(2, _double(1, sample.value) + _integer(2, at_ms)) for at_ms, sample in points),
            *(_field(3, _exemplar(exemplar)) for exemplar in exemplars),
        )
    )


def _exemplar(exemplar: Exemplar) -> bytes:
    at_ms = int(float(exemplar.timestamp or 0) * 1000)
    return b"".join((*_named(exemplar.labels.items()), _double(2, exemplar.value), _integer(3, at_ms)))


def _named(labels: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    return (_field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in labels)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _field(number: int, payload: bytes) -> bytes:
    """Return a field of protobuf whose value has a length."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


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
