"""Scrapes as logged, and the same by series: one matrix of (scrape x series) for each endpoint.

Deltas, rates and percentiles are left to `normalise`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from scraper.exposition import MalformedPage, Page, Series, bound, parse, without_le

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


class ScrapeRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One scrape as logged: stamps are int64 ns Unix, `body` is the page through zlib, `error` empty if it is one."""

    url: str
    due_ns: int
    request_ns: int
    response_ns: int
    status: int
    content_type: str
    body: bytes
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSeries:
    """What one endpoint said: T usable scrapes of N series, in the order of `response_ns`.

    Stamps are int64[T]; `at_ns` is the middle of request and response, `due_ns` the tick (equal over the targets of
    one worker). `values` is float64[T, N], NaN where a series was not on the page. `changed[t]`: page t differs from
    the one before. `failures` are (request stamp, reason) of the scrapes that failed or whose page was malformed.
    """

    url: str
    due_ns: Int64
    request_ns: Int64
    response_ns: Int64
    at_ns: Int64
    series: tuple[Series, ...]
    values: Float64
    changed: NDArray[np.bool_]
    failures: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramColumns:
    """The columns of one histogram (one label set of a family) in an endpoint's matrix.

    `bounds` ascend; `le` are their texts as exposed; `sum` and `count` are -1 where the page has none.
    """

    family: str
    labels: tuple[tuple[str, str], ...]
    help: str
    bounds: tuple[float, ...]
    le: tuple[str, ...]
    buckets: tuple[int, ...]
    sum: int
    count: int


@dataclass(frozen=True, slots=True)
class _Parsed:
    record: ScrapeRecord
    page: Page


def build(records: Iterable[ScrapeRecord]) -> tuple[EndpointSeries, ...]:
    """Parse logged scrapes into one `EndpointSeries` a URL, in the order in which the URLs first appear.

    Series with equal name and labels share a column whatever the page's layout; a histogram's `le` is compared as a
    number. Of duplicates on one page the first counts. An endpoint whose scrapes all failed has T = 0 and its failures.
    """
    by_url: dict[str, list[ScrapeRecord]] = {}
    for record in records:
        by_url.setdefault(record.url, []).append(record)
    return tuple(_build_endpoint(url, logged) for url, logged in by_url.items())


def histograms(series: tuple[Series, ...]) -> tuple[HistogramColumns, ...]:
    """Group the columns of every histogram, in the order in which they first appear."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
    for column, one in enumerate(series):
        if one.type == "histogram":
            groups.setdefault((one.family, without_le(one.labels)), []).append(column)
    return tuple(_histogram(series, columns) for columns in groups.values())


def _histogram(series: tuple[Series, ...], columns: list[int]) -> HistogramColumns:
    family = series[columns[0]].family
    named = {series[column].name: column for column in columns}
    buckets = sorted((bound(series[c]), c) for c in columns if series[c].name == f"{family}_bucket")
    return HistogramColumns(
        family=family,
        labels=without_le(series[columns[0]].labels),
        help=series[columns[0]].help,
        bounds=tuple(edge for edge, _ in buckets),
        le=tuple(dict(series[c].labels)["le"] for _, c in buckets),
        buckets=tuple(c for _, c in buckets),
        sum=named.get(f"{family}_sum", -1),
        count=named.get(f"{family}_count", -1),
    )


def _build_endpoint(url: str, records: list[ScrapeRecord]) -> EndpointSeries:
    failures: list[tuple[int, str]] = []
    parsed: list[_Parsed] = []
    for record in sorted(records, key=lambda r: r.response_ns):
        result = _parse(record)
        if isinstance(result, str):
            failures.append((record.request_ns, result))
        else:
            parsed.append(result)
    series, values = _matrix(parsed)
    request_ns = np.array([p.record.request_ns for p in parsed], dtype=np.int64)
    response_ns = np.array([p.record.response_ns for p in parsed], dtype=np.int64)
    pages = [p.record.body for p in parsed]  # compressed alike, so equal if and only if the pages are
    return EndpointSeries(
        url=url,
        due_ns=np.array([p.record.due_ns for p in parsed], dtype=np.int64),
        request_ns=request_ns,
        response_ns=response_ns,
        at_ns=request_ns + (response_ns - request_ns) // 2,
        series=series,
        values=values,
        changed=np.array([t == 0 or pages[t] != pages[t - 1] for t in range(len(pages))], dtype=np.bool_),
        failures=tuple(failures),
    )


def _parse(record: ScrapeRecord) -> _Parsed | str:
    if record.error:
        return record.error
    try:
        text = zlib.decompress(record.body)
        return _Parsed(record, parse(text, openmetrics="openmetrics" in record.content_type))
    except zlib.error:
        return "the logged page cannot be decompressed"
    except MalformedPage as bad:
        return f"malformed page: {bad}"


def _matrix(parsed: list[_Parsed]) -> tuple[tuple[Series, ...], Float64]:
    """Lay the pages under each other; the columns are the union of the series of all layouts."""
    columns: dict[tuple[str, tuple[tuple[str, str], ...], float], int] = {}
    series: list[Series] = []
    placed: dict[int, NDArray[np.intp]] = {}  # by identity: pages of one layout share their tuple
    for one in parsed:
        layout = one.page.series
        if id(layout) in placed:
            continue
        places = []
        for item in layout:
            key = _key(item)
            if key not in columns:
                columns[key] = len(series)
                series.append(item)
            places.append(columns[key])
        placed[id(layout)] = np.array(places, dtype=np.intp)
    values = np.full((len(parsed), len(series)), np.nan)
    for row, one in enumerate(parsed):
        # From the back, so that the first of two equal series is written last and stands.
        values[row, placed[id(one.page.series)][::-1]] = one.page.values[::-1]
    return tuple(series), values


def _key(series: Series) -> tuple[str, tuple[tuple[str, str], ...], float]:
    if series.type == "histogram" and series.name == f"{series.family}_bucket":
        edge = bound(series)
        if not math.isnan(edge):
            return series.name, without_le(series.labels), edge
    return series.name, series.labels, 0.0
