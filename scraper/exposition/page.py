"""A parsed page of metrics: its series and values, or why it was refused; and the limits of its size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from rundir.columns import Floats

MAX_SERIES = 50_000  # a server of 64 engines has about 40,000; reading as many takes a fifth of a second
MAX_LINES = 3 * MAX_SERIES  # a series of its own family has a HELP and a TYPE line
MAX_LINE_CHARACTERS = 65_536
# What msgspec raises for bytes that are no JSON, or that nest beyond any sense.
UNREADABLE_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
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
