"""A run in a few columns: TTFT, waiting and running requests on one axis, as a report draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Struct

from correlator.statistics.server_load import gauge_samples, most_within
from rundir.columns import Floats, Ints
from rundir.fields import doc
from rundir.stats import finite
from scraper.series.table import EndpointSeries
from scraper.window.window import Window

COLUMNS = 48

Numbers = list[float | None]


class Timeline(Struct, frozen=True, kw_only=True):
    """The most of TTFT and of the engines' load in 48 equal columns of the window; null where a column has none."""

    column_s: Annotated[float, doc("Length of a column.", "s")]
    ttft_ms: Annotated[Numbers, doc("Longest TTFT of the requests submitted in a column.", "ms")]
    requests_waiting: Annotated[Numbers, doc("Most requests that waited, in all engines together.", "requests")]
    requests_running: Annotated[Numbers, doc("Most requests that ran, likewise.", "requests")]


def timeline(submit_ns: Ints, ttft_s: Floats, endpoints: Sequence[EndpointSeries], window: Window) -> Timeline:
    """Return what n requests and the engines showed of a window that has a duration; no TTFT is NaN."""
    edges_ns = np.linspace(window.start_ns, window.end_ns, COLUMNS + 1).astype(np.int64)
    gauges = {
        name: _numbers(most_within(gauge_samples(endpoints, name), edges_ns))
        for name in ("requests_waiting", "requests_running")
    }
    return Timeline(
        column_s=window.duration_s / COLUMNS,
        ttft_ms=_numbers(_longest(submit_ns, 1e3 * ttft_s, edges_ns)),
        **gauges,
    )


def _longest(at_ns: Ints, values: Floats, edges_ns: Ints) -> Floats:
    """Return the largest of the values [n] in each column, NaN where there is none."""
    column = np.searchsorted(edges_ns, at_ns, side="right") - 1
    column[at_ns == edges_ns[-1]] = COLUMNS - 1
    inside = np.isfinite(values) & (column >= 0) & (column < COLUMNS)
    largest = np.full(COLUMNS, -np.inf)
    np.maximum.at(largest, column[inside], values[inside])
    return np.where(np.isfinite(largest), largest, np.nan)


def _numbers(values: Floats) -> Numbers:
    return [finite(value) for value in values.tolist()]
