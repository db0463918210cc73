"""The scrape log: each target's pages as rows of numbers, appended as they come, and read back.

Every record is framed by its length and CRC-32, so that a killed process loses nothing that it had written. A page's
series are logged once, as a *layout*; a page of a known layout is a row of values: the exclusive or with the
target's row before, its bytes sorted by significance, through zlib. Unchanged values are zeros and take almost no
space; an unchanged page is its stamps alone.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sidelight.rundir.columns import Floats, Indices
from sidelight.rundir.frames import FrameLog, Rotation, read_frames
from sidelight.rundir.framing import GAP, inflate
from sidelight.scraper.exposition import MalformedPage, PageReader, Series
from sidelight.scraper.targets.scrape import Scrape

_COMPRESSION_LEVEL = 1
_WHOLE_EVERY = 64  # rows of a target
LOST = "lost: a record that it builds on is damaged"
_LAYOUT_BYTES = 64 * 1024 * 1024  # of 50,000 series; a page has 16 MiB at most
_LAYOUTS_KEPT = 8  # a target: a page that invents labels on each scrape must not fill the memory
_USUAL_SERIES = 1000  # of a page
MOST_SERIES = 200_000  # of a run: nor that of who reads it


class LayoutRecord(msgspec.Struct, tag="layout", array_like=True, frozen=True, kw_only=True):
    """The series of one target's pages from here on: `series` is their MessagePack through zlib."""

    id: int
    url: str
    series: bytes


class RowRecord(msgspec.Struct, tag="row", array_like=True, frozen=True, kw_only=True):
    """One page: stamps are int64 ns Unix; `delta` is empty where no value changed.

    The row before is the target's last one if that has the same layout, else zeros. With `whole` it is zeros: what is
    behind a damaged record can be read from there.
    """

    layout: int
    tick_ns: int
    request_ns: int
    response_ns: int
    delta: bytes
    whole: bool = False


class FailureRecord(msgspec.Struct, tag="failure", array_like=True, frozen=True, kw_only=True):
    """One scrape without a usable page, and why; `status` is that of HTTP, 0 where there was none."""

    url: str
    tick_ns: int
    request_ns: int
    response_ns: int
    status: int
    error: str


Record = LayoutRecord | RowRecord | FailureRecord
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_series_decoder = msgspec.msgpack.Decoder(tuple[Series, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeRow:
    """One page read back: `values` (float64[N]) belong to `series`; rows of one layout share that tuple.

    `changed`: some value, or the layout, differs from the target's page before. `is_cut`: the page had more series,
    which were left out.
    """

    url: str
    tick_ns: int
    request_ns: int
    response_ns: int
    series: tuple[Series, ...]
    values: Floats
    changed: bool
    is_cut: bool = False


@dataclass(slots=True)
class _Written:
    """The state of one target in the log: its layouts (by the identity of their tuple) and its last row."""

    reader: PageReader = field(default_factory=PageReader)
    layouts: dict[int, tuple[int, tuple[Series, ...]]] = field(default_factory=dict)
    layout: int = -1
    values: Floats = field(default_factory=lambda: np.zeros(0))
    rows: int = 0  # since the last whole one


class ScrapeLog:
    """Writer of an append-only log of scrapes, in one file or several independent ones.

    Owns the file. Each can be read without the others.
    """

    def __init__(self, path: str | os.PathLike[str], rotation: Rotation | None = None) -> None:
        self._frames = FrameLog(path, rotation)
        self._encoder = Encoder()

    def append(self, scrape: Scrape) -> str:
        """Parse and write one scrape; return why its page cannot be used, empty if it can.

        Raises OSError when it cannot be written whole, as on a full disk; the next one then builds on none before.
        """
        if self._frames.rotate():
            self._encoder = Encoder()
        payloads, error = self._encoder.encode(scrape)
        try:
            self._frames.append(*payloads)
        except OSError:
            self._encoder = Encoder()
            raise
        return error

    def close(self) -> None:
        """Close the file."""
        self._frames.close()


class Encoder:
    """Turns scrapes into the payloads of a log; keeps each target's layouts and last row."""

    def __init__(self) -> None:
        self._targets: dict[str, _Written] = {}
        self._next_layout = 0

    def encode(self, scrape: Scrape) -> tuple[list[bytes], str]:
        """Return the payloads of one scrape, and the fault of its page (empty if usable)."""
        target = self._targets.setdefault(scrape.url, _Written())
        error = scrape.error
        if not error:
            try:
                page = target.reader.read(scrape.body, scrape.content_type)
            except MalformedPage as bad:
                error = f"malformed page: {bad}"
        if error:
            failure = FailureRecord(
                url=scrape.url,
                tick_ns=scrape.tick_ns,
                request_ns=scrape.request_ns,
                response_ns=scrape.response_ns,
                status=scrape.status,
                error=error,
            )
            return [_encode(failure)], error
        payloads: list[bytes] = []
        layout = self._layout(scrape.url, target, page.series, payloads)
        whole = layout != target.layout or target.rows >= _WHOLE_EVERY
        target.rows = 0 if whole else target.rows + 1
        before = np.zeros(len(page.values)) if whole else target.values
        row = RowRecord(
            layout=layout,
            tick_ns=scrape.tick_ns,
            request_ns=scrape.request_ns,
            response_ns=scrape.response_ns,
            delta=_delta(page.values, before),
            whole=whole,
        )
        target.layout, target.values = layout, page.values
        return [*payloads, _encode(row)], ""

    def _layout(self, url: str, target: _Written, series: tuple[Series, ...], payloads: list[bytes]) -> int:
        known = target.layouts.get(id(series))
        if known is not None:
            return known[0]
        number, self._next_layout = self._next_layout, self._next_layout + 1
        packed = zlib.compress(_encode(series), _COMPRESSION_LEVEL)
        payloads.append(_encode(LayoutRecord(id=number, url=url, series=packed)))
        if len(target.layouts) >= _LAYOUTS_KEPT:
            del target.layouts[next(iter(target.layouts))]
        target.layouts[id(series)] = (number, series)
        return number


class SeriesLimit:
    """Limit of different series, against pages that invent labels. Series beyond `most` are left out."""

    def __init__(self, most: int = MOST_SERIES) -> None:
        self._most = most
        self._taken: set[int] = set()  # by hash: the labels themselves take ten times as much
        self._last: dict[str, tuple[Series, ...]] = {}

    def take(self, url: str, series: tuple[Series, ...]) -> _LoggedLayout:
        """Return the layout of a page of these series: with all of them, or with those that are taken."""
        keys = [hash((url, item.name, item.labels)) for item in series]
        places = []
        for place, key in enumerate(keys):
            if key not in self._taken:
                if len(self._taken) >= self._most:
                    continue
                self._taken.add(key)
            places.append(place)
        if len(places) == len(series):
            return _LoggedLayout(url, series, len(series), None)
        taken = tuple(series[place] for place in places)
        if taken == self._last.get(url):
            taken = self._last[url]  # rows of one layout share it
        self._last[url] = taken
        return _LoggedLayout(url, taken, len(series), np.array(places, np.intp))


class _LoggedLayout(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The series of pages: `size` of them, of which those at `places` are kept; None: all."""

    url: str
    series: tuple[Series, ...]
    size: int
    places: Indices | None


class LogReader:
    """Reader of a scrape log's payloads, in order, up to the limit of series."""

    def __init__(self, limit: SeriesLimit | None = None) -> None:
        self._limit = limit or SeriesLimit()
        self._layouts: dict[int, _LoggedLayout] = {}
        self._last: dict[str, tuple[int, Floats]] = {}
        self._lost: set[str] = set()  # targets whose last row is not known
        self._series: dict[str, dict[Series, Series]] = {}  # of each target's last layouts

    def take(self, payload: bytes) -> ScrapeRow | FailureRecord | None:
        """Return the record of one payload; None for a layout, which the rows after it use, and for a GAP. A row that
        builds on one that is lost is a failed scrape.

        Raises msgspec.DecodeError on anything that `ScrapeLog` has not written.
        """
        if payload is GAP:
            self._lost.update(layout.url for layout in self._layouts.values())
            return None
        record = _decoder.decode(payload)
        if isinstance(record, FailureRecord):
            return record
        if isinstance(record, LayoutRecord):
            series = self._shared(record.url, _series_decoder.decode(inflate(record.series, _LAYOUT_BYTES)))
            self._layouts[record.id] = self._limit.take(record.url, series)
            self._last.pop(record.url, None)  # its next row is encoded against zeros
            self._lost.discard(record.url)
            return None
        layout = self._layouts[record.layout]
        url, places = layout.url, layout.places
        if record.whole:
            self._lost.discard(url)
        elif url in self._lost:
            return FailureRecord(
                url=url,
                tick_ns=record.tick_ns,
                request_ns=record.request_ns,
                response_ns=record.response_ns,
                status=0,
                error=LOST,
            )
        last_layout, values = self._last.get(url, (-1, np.zeros(0)))
        changed = last_layout != record.layout
        before = np.zeros(layout.size) if changed or record.whole else values
        if record.delta:
            before = _with_delta(before, record.delta)
        changed = changed or (record.delta != b"" if not record.whole else before.tobytes() != values.tobytes())
        self._last[url] = record.layout, before
        return ScrapeRow(
            url=url,
            tick_ns=record.tick_ns,
            request_ns=record.request_ns,
            response_ns=record.response_ns,
            series=layout.series,
            values=before if places is None else before[places],
            changed=changed,
            is_cut=places is not None,
        )

    def _shared(self, url: str, series: tuple[Series, ...]) -> tuple[Series, ...]:
        """Return series as those that they equal in the target's last layouts: an engine that starts again has new
        layouts each time, and what holds their rows would hold all names and help again with each.
        """
        known = self._series.setdefault(url, {})
        shared = tuple([known.setdefault(item, item) for item in series])
        if len(known) > _LAYOUTS_KEPT * max(len(series), _USUAL_SERIES):
            self._series[url] = dict(zip(series, shared, strict=True))
        return shared


def read_log(path: str | os.PathLike[str]) -> Iterator[ScrapeRow | FailureRecord]:
    """Yield the scrapes of a log up to its end or its tear. Raises msgspec.DecodeError as `LogReader.take` does."""
    reader = LogReader()
    for payload in read_frames(path, gaps=True):
        scrape = reader.take(payload)
        if scrape is not None:
            yield scrape


def rows(scrapes: Iterable[Scrape]) -> Iterator[ScrapeRow | FailureRecord]:
    """Return scrapes as a log of them would give them back."""
    encoder, reader = Encoder(), LogReader()
    for scrape in scrapes:
        for payload in encoder.encode(scrape)[0]:
            row = reader.take(payload)
            if row is not None:
                yield row


def _delta(values: Floats, before: Floats) -> bytes:
    """Return the difference from the row before. It is of bits, so that NaN and -0 come back as they were."""
    bits = values.view(np.uint64) ^ before.view(np.uint64)
    if not bits.any():
        return b""
    return zlib.compress(bits.view(np.uint8).reshape(-1, 8).T.tobytes(), _COMPRESSION_LEVEL)


def _with_delta(before: Floats, delta: bytes) -> Floats:
    planes = np.frombuffer(inflate(delta, before.nbytes), dtype=np.uint8).reshape(8, -1)
    bits = np.ascontiguousarray(planes.T).view(np.uint64)[:, 0]
    return (bits ^ before.view(np.uint64)).view(np.float64)
