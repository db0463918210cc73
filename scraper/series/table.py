"""Scrapes by series: one matrix of (scrape x series) for each endpoint.

Increases, rates and percentiles are left to `window`; how scrapes come from and go to disk, to `log`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices, Ints
from sidelight.scraper.exposition import Series, bound, without_le
from sidelight.scraper.series.log import FailureRecord, ScrapeRow

Float64 = Floats  # as the exporter calls them
Int64 = Ints
_CHUNK_ROWS, _FIRST_ROWS = 64, 4
MOST_VALUES = 2**25  # of an endpoint: 268 MB
_Key = tuple[str, tuple[tuple[str, str], ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSeries:
    """One endpoint's scrapes: T usable ones of N series, in the order of `response_ns`.

    Stamps are int64[T]; `at_ns` is the middle of request and response, `tick_ns` the multiple of the scrape interval
    (shared by the targets of one worker). `values` is float64[T, N], NaN where a series was not on the page.
    `changed[t]`: page t differs from the one before, as the first does. `failures` are (request stamp, reason) of the
    scrapes that failed or whose page was malformed. `is_cut`: pages had more series, and those that came last are left
    out. `repeated` are the families of series that a page states more than once with different values.
    """

    url: str
    tick_ns: Ints
    request_ns: Ints
    response_ns: Ints
    at_ns: Ints
    series: tuple[Series, ...]
    values: Floats
    changed: Bools
    failures: tuple[tuple[int, str], ...]
    is_cut: bool = False
    repeated: tuple[str, ...] = ()


class SeriesTable:
    """One endpoint's scrapes in memory, 8 bytes a value; with `keep_ns`, only those of that long before the last.

    Rows are held in chunks of one layout; rows older than `keep_ns` are dropped chunk by chunk.
    """

    def __init__(self, url: str, *, keep_ns: int | None = None) -> None:
        self._url = url
        self._keep_ns = keep_ns
        self._chunks: list[_RowBlock] = []
        self._failures: list[tuple[int, str]] = []
        self._is_cut = False

    def append(self, scrape: ScrapeRow | FailureRecord) -> None:
        """Add one scrape, in the order of the log."""
        if isinstance(scrape, FailureRecord):
            self._failures.append((scrape.request_ns, scrape.error))
        else:
            if not self._chunks or self._chunks[-1].full or self._chunks[-1].series is not scrape.series:
                self._chunks.append(_RowBlock(scrape.series))
            self._chunks[-1].append(scrape)
            self._is_cut = self._is_cut or scrape.is_cut
        if self._keep_ns is not None:
            self._forget_before(scrape.response_ns - self._keep_ns)

    def view(self) -> EndpointSeries:
        """Return the scrapes as one matrix; its columns are the union of the series of all layouts.

        Series with equal name and labels share a column whatever the page's layout; a histogram's `le` is compared as a
        number. Of duplicates on one page the first counts.
        """
        series, places = union_columns([chunk.series for chunk in self._chunks])
        rows = sum(len(chunk.response_ns) for chunk in self._chunks)
        series, is_cut = series[: self._most_columns(rows)], len(series) > self._most_columns(rows)
        values = np.full((rows, len(series)), np.nan)
        repeated: dict[str, None] = {}
        at = 0
        for chunk in self._chunks:
            taken, columns = chunk.values[: len(chunk.response_ns)], places[id(chunk.series)]
            if is_cut:
                taken, columns = taken[:, columns < len(series)], columns[columns < len(series)]
            # From the back, so that the first of two equal series is written last and stands.
            values[at : at + len(taken), columns[::-1]] = taken[:, ::-1]
            if len(np.unique(columns)) < len(columns):
                stated = values[at : at + len(taken), columns]
                differ = (stated != taken) & ~(np.isnan(stated) & np.isnan(taken))
                repeated.update((series[column].family, None) for column in columns[differ.any(axis=0)])
            at += len(taken)
        response_ns = self._stamps("response_ns")
        order = np.argsort(response_ns, kind="stable")
        if (order[1:] < order[:-1]).any():
            values = values[order]
        request_ns = self._stamps("request_ns")[order]
        changed = self._stamps("changed")[order].astype(np.bool_)
        changed[:1] = True  # whatever was left out before it
        response_ns = response_ns[order]
        return EndpointSeries(
            url=self._url,
            tick_ns=self._stamps("tick_ns")[order],
            request_ns=request_ns,
            response_ns=response_ns,
            at_ns=request_ns + (response_ns - request_ns) // 2,
            series=series,
            values=values,
            changed=changed,
            failures=tuple(self._failures),
            is_cut=self._is_cut or is_cut,
            repeated=tuple(repeated),
        )

    def _most_columns(self, rows: int) -> int:
        """Return the maximum number of series. If pages bring new ones again and again, the first are kept."""
        largest = max((len(chunk.series) for chunk in self._chunks), default=0)
        return max(2 * largest, MOST_VALUES // max(rows, 1))

    def _stamps(self, name: str) -> Ints:
        parts = [np.array(getattr(chunk, name), dtype=np.int64) for chunk in self._chunks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _forget_before(self, at_ns: int) -> None:
        while len(self._chunks) > 1 and self._chunks[0].response_ns[-1] < at_ns:
            del self._chunks[0]
        old = sum(1 for failed_ns, _ in self._failures if failed_ns < at_ns)
        del self._failures[:old]


class _RowBlock:
    """Up to 64 rows of one layout, room for which is made as they come: an engine that starts again and again has few
    of each.
    """

    def __init__(self, series: tuple[Series, ...]) -> None:
        self.series = series
        self.values: Floats = np.empty((_FIRST_ROWS, len(series)))
        self.tick_ns, self.request_ns, self.response_ns = array("q"), array("q"), array("q")
        self.changed = array("b")

    @property
    def full(self) -> bool:
        return len(self.response_ns) == _CHUNK_ROWS

    def append(self, row: ScrapeRow) -> None:
        if len(self.response_ns) == len(self.values):
            self.values = np.concatenate((self.values, np.empty_like(self.values)))
        self.values[len(self.response_ns)] = row.values
        self.tick_ns.append(row.tick_ns)
        self.request_ns.append(row.request_ns)
        self.response_ns.append(row.response_ns)
        self.changed.append(row.changed)


def build(scrapes: Iterable[ScrapeRow | FailureRecord]) -> tuple[EndpointSeries, ...]:
    """Return scrapes as one `EndpointSeries` a URL, in order of the URLs' first appearance.

    An endpoint whose scrapes all failed has T = 0 and its failures.
    """
    tables: dict[str, SeriesTable] = {}
    for scrape in scrapes:
        if scrape.url not in tables:
            tables[scrape.url] = SeriesTable(scrape.url)
        tables[scrape.url].append(scrape)
    return tuple(table.view() for table in tables.values())


def union_columns(layouts: list[tuple[Series, ...]]) -> tuple[tuple[Series, ...], dict[int, Indices]]:
    """Return the union of the layouts' series, and each layout's columns in it.

    The columns are by the layout's identity.
    """
    columns: dict[_Key, int] = {}
    series: list[Series] = []
    places: dict[int, Indices] = {}
    for layout in layouts:
        if id(layout) in places:
            continue
        indices = []
        for item in layout:
            key = _key(item)
            if key not in columns:
                columns[key] = len(series)
                series.append(item)
            indices.append(columns[key])
        places[id(layout)] = np.array(indices, dtype=np.intp)
    return tuple(series), places


def _key(series: Series) -> _Key:
    if series.type == "histogram" and series.name == f"{series.family}_bucket":
        edge = bound(series.labels)
        if not math.isnan(edge):
            return series.name, without_le(series.labels), edge
    return series.name, series.labels, 0.0
