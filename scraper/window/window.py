"""The measured window: which scrapes it uses, and its slices.

The window is what the client measured, [start_ns, end_ns]; scraping went on for a while after it, so that the last
increments show.
- *Totals* run from the reference (the last scrape complete at or before the start) to the last scrape there is.
- *Rates* divide by the window's own duration, never by the tail in which the last increments settled; where scrapes
  ended in the middle of the window, by the part of it that they cover.
- *Gauges* are judged by scrapes inside the window only.
- A *slice* runs from the last scrape at or before its start to the last at or before its end; what settles later is
  the last slice's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices, Ints
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.resets import Restarts, restarts_of
from sidelight.scraper.series.table import EndpointSeries


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A measured period on the run's clock (int64 ns Unix), both ends included."""

    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        """Return its length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    def holds(self, at_ns: Ints) -> Bools:
        """Return a mask of the moments within the window."""
        return (at_ns >= self.start_ns) & (at_ns <= self.end_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSelection:
    """The scrapes of one endpoint used by a window: rows of its matrix.

    `reference` and `last` are rows; `late` says that no scrape precedes the window, so that the first one is the
    reference. `edges_ns` (int64[S+1]) bound the slices, `rows` (int[S+1]) are the scrapes at the edges, `complete`
    (bool[S]) is false for a slice that the window's end, or the end of scraping, cut short. `per_interval`: the slices
    asked for were shorter than the page's update interval, so every slice is one scrape interval. `inside` (bool[T])
    are the scrapes within the window.

    `covered_s` is the part of the window that scrapes cover: from its start (from the reference when late) to its end
    or the last scrape, whichever came first. `early_s` is by how much scrapes ended before the window did, 0 where that
    is no more than two of their intervals. `slice_s` (float64[S]) are the seconds that each slice's increase
    took, NaN for none. `restarts` are those of the whole endpoint.
    """

    window: Window
    reference: int
    last: int
    late: bool
    edges_ns: Ints
    rows: Indices
    complete: Bools
    per_interval: bool
    inside: Bools
    covered_s: float
    early_s: float
    slice_s: Floats
    restarts: Restarts

    @property
    def rate_s(self) -> float:
        """Return the divisor of a total over the window for its rate."""
        return self.covered_s if self.early_s else self.window.duration_s


def select_scrapes(endpoint: EndpointSeries, window: Window, slice_ns: int) -> ScrapeSelection | Missing:
    """Return the scrapes for a window, and its slices of `slice_ns` from its start.

    The reference is the last scrape whose `response_ns` is at or before the start: one under way at that moment may
    already include requests of the window. Missing: no usable scrape, none after the reference, a window without
    duration.
    """
    stamps = endpoint.response_ns
    if window.end_ns <= window.start_ns:
        return Missing("the window has no duration")
    if not len(stamps):
        return Missing("no scrape succeeded")
    before = int(np.searchsorted(stamps, window.start_ns, side="right")) - 1
    reference = max(before, 0)
    last = len(stamps) - 1
    if last <= reference:
        return Missing(
            "no scrape after the window opened" if before >= 0 else "a single scrape: nothing to compare with"
        )
    update_ns = update_interval_ns(endpoint)
    per_interval = update_ns is not None and slice_ns < update_ns
    if per_interval:
        rows = scrape_intervals(stamps, window, reference)
        edges_ns = stamps[rows]
        complete = np.ones(len(rows) - 1, dtype=np.bool_)
    else:
        edges_ns, complete = slice_edges(window, slice_ns)
        rows = np.maximum(np.searchsorted(stamps, edges_ns, side="right") - 1, reference)
    rows[-1] = last
    opened_ns = max(window.start_ns, int(stamps[reference]))
    covered_s = max(0, min(window.end_ns, int(stamps[last])) - opened_ns) / 1e9
    early_ns = window.end_ns - int(stamps[last])
    early_s = early_ns / 1e9 if covered_s > 0 and early_ns > 2 * float(np.median(np.diff(stamps))) else 0.0
    slice_s = np.diff(edges_ns) / 1e9
    if early_s and not per_interval:
        # The slice in which scraping ended: from the scrape that it counts from to the last one.
        ended = int(np.searchsorted(edges_ns, stamps[last], side="left")) - 1
        slice_s[ended] = (int(stamps[last]) - max(opened_ns, int(stamps[rows[ended]]))) / 1e9
        complete = complete & (edges_ns[1:] != edges_ns[ended + 1])
    complete = complete & (slice_s > 0)
    slice_s[slice_s <= 0] = np.nan  # between scrapes of one moment there is no rate
    return ScrapeSelection(
        window=window,
        reference=reference,
        last=last,
        late=before < 0,
        edges_ns=edges_ns,
        rows=rows,
        complete=complete,
        per_interval=per_interval,
        inside=window.holds(endpoint.at_ns),
        covered_s=covered_s,
        early_s=early_s,
        slice_s=slice_s,
        restarts=restarts_of(endpoint),
    )


def scrape_intervals(stamps: Ints, window: Window, reference: int) -> Indices:
    """Return the rows of the scrapes bounding the scrape intervals that touch a window.

    There is one interval at least.
    """
    final = min(int(np.searchsorted(stamps, window.end_ns, side="left")), len(stamps) - 1)
    return np.arange(reference, max(final, reference + 1) + 1)


def slice_edges(window: Window, slice_ns: int) -> tuple[Ints, Bools]:
    """Return the edges (int64[S+1]) of slices from the window's start, and whole ones (bool[S])."""
    starts = np.arange(window.start_ns, window.end_ns, slice_ns, dtype=np.int64)
    edges_ns = np.append(starts, np.int64(window.end_ns))
    return edges_ns, np.diff(edges_ns) == slice_ns


def update_interval_ns(endpoint: EndpointSeries) -> float | None:
    """Return the median time between pages that differ; None with fewer than two such intervals."""
    updates = endpoint.response_ns[endpoint.changed]
    return float(np.median(np.diff(updates))) if len(updates) > 2 else None


def slice_of(at_ns: Ints, edges_ns: Ints) -> Indices:
    """Return the slice (0..S-1) of each stamp, -1 before them and S after them; the last edge is the last slice's."""
    where = np.searchsorted(edges_ns, at_ns, side="right") - 1
    where[at_ns == edges_ns[-1]] = len(edges_ns) - 2
    return where
