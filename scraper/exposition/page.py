"""A parsed page of metrics: its series, values and histograms, or why it was refused; and the limits of its size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from sidelight.rundir.columns import Floats

MAX_SERIES = 50_000  # a server of 64 engines has about 40,000; reading as many takes a fifth of a second
MAX_LINES = 3 * MAX_SERIES  # a series of its own family has a HELP and a TYPE line
MAX_LINE_CHARACTERS = 65_536
# What msgspec raises for bytes that are no JSON, or that nest beyond any sense.
UNREADABLE_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MOST_BUCKETS = 1000  # of a histogram: what is fitted to them takes memory that grows with their square
KEPT_LAYOUTS = 4  # a target's pages alternate between few; each further one is one more comparison


class Series(msgspec.Struct, frozen=True, gc=False):
    """The identity of one line: everything on a page but its value.

    `name` is the sample's name as exposed (`x_bucket`, `x_total`); `labels` are sorted by name; `family` is the name
    without `_bucket`, `_sum`, `_count` for histograms and summaries, else the name; `type` is what the page declares,
    `unknown` if nothing.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    family: str
    type: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One parsed page: `values[i]` (float64) belongs to `series[i]`, in the order of the page, duplicates included."""

    series: tuple[Series, ...]
    values: Floats


class MalformedPage(ValueError):
    """A page that is broken or cut off, with the place of the fault.

    That is a line (from 1) and a byte (from 0: where the line starts, or the page ends).
    """

    def __init__(self, reason: str, *, line: int, byte: int) -> None:
        super().__init__(f"{reason} (line {line}, byte {byte})")
        self.reason = reason
        self.line = line
        self.byte = byte


def without_le(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels that distinguish the histograms of a family."""
    return tuple(label for label in labels if label[0] != "le")


def bound(labels: tuple[tuple[str, str], ...]) -> float:
    """Return the upper bound of a histogram's bucket, which its label `le` says; NaN when there is none."""
    for key, value in labels:
        if key == "le":
            try:
                return float(value)
            except ValueError:
                return math.nan
    return math.nan


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
