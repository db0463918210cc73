"""Columns of histograms in a page (or matrix)."""

from __future__ import annotations

from dataclasses import dataclass

from scraper.exposition.page import Series, bound, without_le

MOST_BUCKETS = 1000  # of a histogram: what is fitted to them takes memory that grows with their square


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramColumns:
    """The columns of one histogram (one label set of a family) in an endpoint's matrix.

    `bounds` ascend; `le` are their texts as exposed; `sum` and `count` are -1 where the page has none. There are no
    buckets where the page has more than MOST_BUCKETS. Where a formula makes the histogram there may be none, and `less`
    is a column to be taken off the sum (-1: none).
    """

    family: str
    labels: tuple[tuple[str, str], ...]
    help: str
    bounds: tuple[float, ...]
    le: tuple[str, ...]
    buckets: tuple[int, ...]
    sum: int
    count: int
    less: int = -1


def histograms(series: tuple[Series, ...]) -> tuple[HistogramColumns, ...]:
    """Group the columns of every histogram, in the order in which they first appear."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
    for column, labelled in enumerate(series):
        if labelled.type == "histogram":
            groups.setdefault((labelled.family, without_le(labelled.labels)), []).append(column)
    return tuple(_histogram(series, columns) for columns in groups.values())


def _histogram(series: tuple[Series, ...], columns: list[int]) -> HistogramColumns:
    family = series[columns[0]].family
    named = {series[column].name: column for column in columns}
    buckets = sorted((bound(series[c].labels), c) for c in columns if series[c].name == f"{family}_bucket")
    if len(buckets) > MOST_BUCKETS:
        buckets = []
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
