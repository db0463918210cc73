"""Cumulative values across resets: where a series began at zero again, and what it would be had it not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rundir.columns import Bools, Floats
from scraper.exposition import Series
from scraper.series.table import EndpointSeries

START_TIME = "process_start_time_seconds"

Named = tuple[str, tuple[tuple[str, str], ...]]


def unrolled(values: Floats, falls: Bools) -> tuple[Floats, Bools]:
    """Make cumulative columns (float64[T, K]) rise across resets: returns them and where those were (bool[T, K]).

    `falls` (bool[T]) are the rows of that function. Absent values take the last known one since the last reset, zero
    where there is none.
    """
    resets = np.zeros(values.shape, dtype=np.bool_)
    resets[1:] = falls[1:, None]
    filled = _filled(values, resets)
    lost = np.zeros(values.shape)
    lost[1:] = np.where(resets[1:], filled[:-1], 0.0)
    return filled + np.cumsum(lost, axis=0), resets


def _filled(values: Floats, stated: Bools) -> Floats:
    """Put the last known value since the last stated reset where there is none, zero where there was none before."""
    at = np.arange(len(values))[:, None]
    # Twice the row of the last known value, or an odd number where a reset came after it.
    last = np.maximum.accumulate(np.where(np.isfinite(values), 2 * at, np.where(stated, 2 * at + 1, -1)), axis=0)
    found = np.take_along_axis(values, np.maximum(last, 0) // 2, axis=0)
    return np.where((last >= 0) & (last % 2 == 0), found, 0.0)


def falls(values: Floats, *restarts: Bools) -> Bools:
    """Return the rows (bool[T]) at which cumulative columns (float64[T, K]) that restart together began at zero again.

    They did where one of them fell, and at the rows stated (`restarted`, `moved`): an engine that restarts under load
    may have counted further by its first page than it had by its last.
    """
    stated = np.logical_or.reduce([np.zeros(len(values), dtype=np.bool_), *restarts])
    # What reappears after a stated restart with less than before it is no further one.
    filled = _filled(values, stated[:, None] & np.ones(values.shape, dtype=np.bool_))
    fell: Bools = stated.copy()
    # Within 1e-9 it is rounding: several processes' values added up in another order.
    fell[1:] |= (filled[1:] < filled[:-1] * (1 - 1e-9)).any(axis=1)
    return fell


def restarted(endpoint: EndpointSeries) -> Bools:
    """Return the rows (bool[T]) by which the process had begun anew: by the start time that the page states, else by
    what fell. A page with start times of several processes tells nothing.
    """
    moments = _start_times(endpoint)
    if moments is not None:
        return moved(moments)
    stated = any(one.name == START_TIME for one in endpoint.series)
    return np.zeros(len(endpoint.values), dtype=np.bool_) if stated else _fell_together(endpoint)


def _fell_together(endpoint: EndpointSeries) -> Bools:
    """Return the rows (bool[T]) at which most of the counters on the page, each histogram counted once, were below
    their last value since the last such row: SGLang and TensorRT-LLM state no start time, and a counter that has
    already passed its last value does not show the restart that the others show.
    """
    columns = [
        column
        for column, one in enumerate(endpoint.series)
        if (one.type == "counter" and not one.name.endswith("_created"))
        or (one.type == "histogram" and one.name == f"{one.family}_count")
    ]
    values = endpoint.values[:, columns]
    known = np.isfinite(values)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values))[:, None], -1), axis=0)
    began = np.zeros(len(values), dtype=np.bool_)
    since = 0
    for row in np.flatnonzero(falls(values)).tolist():
        before = last[row - 1]
        shown = np.flatnonzero(known[row] & (before >= since))
        earlier = values[before[shown], shown]
        fell = int((values[row, shown] < earlier * (1 - 1e-9)).sum())
        if 2 * fell > int((earlier > 0).sum()):
            began[row], since = True, row
    return began


def alternates(endpoint: EndpointSeries) -> bool:
    """Tell whether pages come from several processes in turn: their start time goes back."""
    moments = _start_times(endpoint)
    if moments is None:
        return False
    known = moments[np.isfinite(moments)]
    return bool((known[1:] < known[:-1]).any())


def _start_times(endpoint: EndpointSeries) -> Floats | None:
    columns = [column for column, one in enumerate(endpoint.series) if one.name == START_TIME]
    return np.asarray(endpoint.values[:, columns[0]]) if len(columns) == 1 else None


def moved(moments: Floats) -> Bools:
    """Tell where a moment is later than the last one known; one that goes back is another process's, not a restart."""
    latest = np.fmax.accumulate(moments)
    later = np.zeros(len(moments), dtype=np.bool_)
    later[1:] = latest[1:] > latest[:-1]
    return later


def created_columns(series: Sequence[Series]) -> dict[Named, int]:
    """Return the columns of `_created` by the family's name (without `_total`) and labels that they speak of."""
    return {
        (one.name.removesuffix("_created"), one.labels): column
        for column, one in enumerate(series)
        if one.name.endswith("_created")
    }
