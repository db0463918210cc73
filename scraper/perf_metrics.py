"""TensorRT-LLM's `/perf_metrics`: the engine's own times of each request that ended, without any id that a reply has.

Its stamps are seconds of the engine's steady clock, which `/steady_clock_offset` beside it shows: its two stamps of an
exchange, with ours around them, bound how far that clock is from ours (as in NTP). Whose request a record is, the
correlator finds by time.

Reading `/perf_metrics` empties it, so what was not kept is gone for good: the log holds each reply as it came.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from sidelight.rundir.columns import Floats, Ints, Texts
from sidelight.rundir.frames import FrameLog, read_frames
from sidelight.rundir.framing import inflate
from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import UNREADABLE_JSON
from sidelight.scraper.targets.scrape import Scrape, clock_of

NO_CLOCK = "its clock was never read"
SHARED = "two engines shared the request (disaggregated serving), and a record has the times of each alone"
MALFORMED = "not of the form of TensorRT-LLM's"
DISORDER = "stamps out of order, or not set"
_UNREADABLE = (*UNREADABLE_JSON, ValueError)
_COMPRESSION_LEVEL = 1
_BODY_BYTES = 64 * 1024 * 1024  # a page has 16 MiB at most
_MOST_S = 9e9  # beyond it int64 cannot hold ns
_COLUMNS = dict.fromkeys(("arrival_ns", "first_token_ns", "last_token_ns", "error_ns"), "int64") | dict.fromkeys(
    ("queue_s", "prefill_s", "decode_s", "ttft_s", "e2e_s"), "float64"
)


class ReplyRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One reply, or why there was none: stamps are int64 ns Unix, `packed` is the body in zlib, empty with an error.

    `url` is masked; `status` is that of HTTP, 0 where there was no reply.
    """

    url: str
    request_ns: int
    response_ns: int
    status: int
    error: str
    packed: bytes

    def body(self) -> bytes:
        """Return the bytes of the reply. Raises ValueError for what `TimingLog` has not written."""
        return inflate(self.packed, _BODY_BYTES) if self.packed else b""


class _RequestTimes(msgspec.Struct, frozen=True):
    arrival_time: float
    first_scheduled_time: float
    first_token_time: float
    last_token_time: float
    server_arrival_time: float | None = None


class _RequestMetrics(msgspec.Struct, frozen=True):
    timing_metrics: _RequestTimes


class _RequestEntry(msgspec.Struct, frozen=True):
    perf_metrics: _RequestMetrics | None = None
    ctx_request_id: Any = None
    ctx_perf_metrics: Any = None
    gen_perf_metrics: Any = None


class _ServerTimes(msgspec.Struct, frozen=True):
    receive_ts: float
    transmit_ts: float


_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(ReplyRecord)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_item = msgspec.json.Decoder(_RequestEntry)
_exchange = msgspec.json.Decoder(_ServerTimes)


class TimingLog:
    """Writer of an append-only file of replies; owns the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._frames = FrameLog(path)

    def append(self, scrape: Scrape) -> str:
        """Write one reply, unless it is an empty list; return its error.

        Raises OSError when it cannot be written whole, as on a full disk.
        """
        if scrape.error or scrape.body.strip() != b"[]":
            self._frames.append(_encode(record_of(scrape)))
        return scrape.error

    def close(self) -> None:
        """Close the file."""
        self._frames.close()


def record_of(scrape: Scrape) -> ReplyRecord:
    """Return the record of one reply."""
    return ReplyRecord(
        url=scrape.url,
        request_ns=scrape.request_ns,
        response_ns=scrape.response_ns,
        status=scrape.status,
        error=scrape.error,
        packed=b"" if scrape.error else zlib.compress(scrape.body, _COMPRESSION_LEVEL),
    )


def read_log(path: str | os.PathLike[str]) -> Iterator[ReplyRecord]:
    """Yield the undamaged replies of a log. Raises msgspec.DecodeError as `decode` does."""
    yield from map(decode, read_frames(path))


def decode(payload: bytes) -> ReplyRecord:
    """Return the record of one payload of the log. Raises msgspec.DecodeError on what `TimingLog` has not written."""
    return _record.decode(payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyClock:
    """Offset from a steady clock to ours, and its largest error, ns."""

    offset_ns: int
    error_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Columns of n requests reported by an engine, in the order read, from any client.

    url                                  of the page, masked
    arrival_ns, first_token_ns, last_token_ns  int64 ns Unix by our clock, each off by up to error_ns; arrival is that
                                         at the HTTP server where stated, else at the engine behind it
    queue_s, prefill_s, decode_s         float64 s by the engine's clock: from its arrival to its first scheduling, to
                                         the first token, to the last. ttft_s and e2e_s begin at arrival_ns
    tokens                               int64 [n, 2] of prompt and output, -1 where it states none; None: none does
    refused                              how many more records could not be used, by why
    failures                             how many readings failed, by why: what they would have brought is lost
    clocks                               by their URLs, or why one is not known; empty where nothing was asked
    """

    url: Texts
    arrival_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    error_ns: Ints
    queue_s: Floats
    prefill_s: Floats
    decode_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    tokens: Ints | None = None
    refused: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    clocks: Mapping[str, SteadyClock | Missing] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.url)


def timings(records: Iterable[ReplyRecord]) -> Timings:
    """Return the timings in a log's records.

    - a page whose clock is not known: its records are refused, since nothing joins them to requests
    - a record of disaggregated serving, or one that was never scheduled or has no token: refused
    """
    replies = list(records)
    pages = [reply for reply in replies if clock_of(reply.url)]
    asked = dict.fromkeys(clock_of(reply.url) or reply.url for reply in replies)
    clocks = {url: _clock([reply for reply in replies if reply.url == url]) for url in asked}
    refused: Counter[str] = Counter()
    failures: Counter[str] = Counter(page.error for page in pages if page.error)
    urls: list[str] = []
    rows: list[tuple[float, ...]] = []
    for page in pages:
        if page.error:
            continue
        try:
            items = _items.decode(page.body())
        except _UNREADABLE:
            failures["not a list of records, or cut off"] += 1
            continue
        clock = clocks[clock_of(page.url)]
        for item in items:
            row = clock if isinstance(clock, Missing) else _row(item, clock)
            if isinstance(row, Missing):
                refused[row.reason] += 1
            else:
                rows.append(row)
                urls.append(page.url)
    table = np.array(rows, dtype=np.object_).reshape(len(rows), len(_COLUMNS)).T
    return Timings(
        url=np.array(urls, dtype=np.object_),
        **{name: column.astype(kind) for (name, kind), column in zip(_COLUMNS.items(), table, strict=True)},
        refused=dict(refused),
        failures=dict(failures),
        clocks=clocks,
    )


def none() -> Timings:
    """Return a table of nothing."""
    return timings([])


def clock_reading(reply: ReplyRecord) -> SteadyClock | Missing:
    """Return the clock by one reply of `/steady_clock_offset`; its error is half of the round trip.

    Missing: no reply, not of its form, or an exchange that took longer by their clock than by ours.
    """
    if reply.error:
        return Missing(reply.error)
    try:
        stamps = _exchange.decode(reply.body())
    except _UNREADABLE:
        return Missing(MALFORMED)
    if not all(
        math.isfinite(stamp_s) and abs(stamp_s) < _MOST_S for stamp_s in (stamps.receive_ts, stamps.transmit_ts)
    ):
        return Missing(MALFORMED)
    receive_ns, transmit_ns = _ns(stamps.receive_ts), _ns(stamps.transmit_ts)
    on_way_ns = reply.response_ns - reply.request_ns - (transmit_ns - receive_ns)
    if transmit_ns < receive_ns or on_way_ns < 0:
        return Missing("its stamps are further apart than the reply took")
    offset_ns = ((reply.request_ns - receive_ns) + (reply.response_ns - transmit_ns)) // 2
    return SteadyClock(offset_ns=offset_ns, error_ns=(on_way_ns + 1) // 2)


def _clock(readings: list[ReplyRecord]) -> SteadyClock | Missing:
    """Return the clock by the reading with the shortest round trip; its error is widened until all readings agree:
    between the beginning and the end of a run clocks drift.
    """
    offsets = [clock_reading(reading) for reading in readings]
    clocks = [clock for clock in offsets if isinstance(clock, SteadyClock)]
    if not clocks:
        reasons = dict.fromkeys(offset.reason for offset in offsets if isinstance(offset, Missing))
        return Missing(f"its clock is not known (/steady_clock_offset): {'; '.join(reasons)}" if reasons else NO_CLOCK)
    best = min(clocks, key=lambda clock: clock.error_ns)
    apart_ns = max(abs(clock.offset_ns - best.offset_ns) - clock.error_ns for clock in clocks)
    return SteadyClock(offset_ns=best.offset_ns, error_ns=max(best.error_ns, apart_ns))


def _row(raw: msgspec.Raw, clock: SteadyClock) -> tuple[float, ...] | Missing:
    """Return the numbers of one record in the order of _COLUMNS."""
    try:
        item = _item.decode(raw)
    except _UNREADABLE:
        return Missing(MALFORMED)
    if any(part is not None for part in (item.ctx_request_id, item.ctx_perf_metrics, item.gen_perf_metrics)):
        return Missing(SHARED)
    if item.perf_metrics is None:
        return Missing(MALFORMED)
    times = item.perf_metrics.timing_metrics
    # A stamp of the server later than the engine's is not an arrival.
    server_s = times.arrival_time if times.server_arrival_time is None else times.server_arrival_time
    arrival_s = server_s if 0 < server_s < times.arrival_time else times.arrival_time
    stamps = (arrival_s, times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time)
    if not arrival_s > 0 or not all(before <= after for before, after in pairwise(stamps)):
        return Missing(DISORDER)
    if not times.last_token_time < _MOST_S:
        return Missing(MALFORMED)
    return (
        _ns(arrival_s) + clock.offset_ns,
        _ns(times.first_token_time) + clock.offset_ns,
        _ns(times.last_token_time) + clock.offset_ns,
        clock.error_ns,
        times.first_scheduled_time - times.arrival_time,
        times.first_token_time - times.first_scheduled_time,
        times.last_token_time - times.first_token_time,
        times.first_token_time - arrival_s,
        times.last_token_time - arrival_s,
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
