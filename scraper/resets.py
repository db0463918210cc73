"""Cumulative values across resets: where a series began at zero again, and what it would be had it not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scraper.exposition import Series
from scraper.series import EndpointSeries, Float64

Named = tuple[str, tuple[tuple[str, str], ...]]


def unrolled(values: Float64, falls: NDArray[np.bool_] | None = None) -> tuple[Float64, NDArray[np.bool_]]:
    """Make cumulative columns (float64[T, K]) rise across resets: returns them and where those were (bool[T, K]).

    Absent values take the last known one since the last reset, zero where there is none. `falls` (bool[T]) states the
    resets instead of each column's own decreases: the columns of a histogram restart together. A decrease within 1e-9
    is rounding (several processes' values added up in another order), not a restart.
    """
    known = np.isfinite(values)
    stated = np.zeros(values.shape, dtype=np.bool_)
    if falls is not None:
        stated[1:] = falls[1:, None]
    at = np.arange(len(values))[:, None]
    # Twice the row of the last known value, or an odd number where a reset came after it.
    last = np.maximum.accumulate(np.where(known, 2 * at, np.where(stated, 2 * at + 1, -1)), axis=0)
    found = np.take_along_axis(values, np.maximum(last, 0) // 2, axis=0)
    filled = np.where((last >= 0) & (last % 2 == 0), found, 0.0)
    resets = stated
    if falls is None:
        resets[1:] = filled[1:] < filled[:-1] * (1 - 1e-9)
    lost = np.zeros(values.shape)
    lost[1:] = np.where(resets[1:], filled[:-1], 0.0)
    return filled + np.cumsum(lost, axis=0), resets


def falls(values: Float64, *restarts: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the rows (bool[T]) at which cumulative columns (float64[T, K]) that restart together began at zero again.

    They did where one of them fell, and at the rows stated (`restarted`, `moved`): an engine that restarts under load
    may have counted further by its first page than it had by its last.
    """
    fell = unrolled(values)[1].any(axis=1)
    return np.asarray(np.logical_or.reduce([fell, *restarts]), dtype=np.bool_)


def restarted(endpoint: EndpointSeries) -> NDArray[np.bool_]:
    """Return the rows (bool[T]) by which the process had begun anew, as far as the page states one start time."""
    moments = _start_times(endpoint)
    return np.zeros(len(endpoint.values), dtype=np.bool_) if moments is None else moved(moments)


def alternates(endpoint: EndpointSeries) -> bool:
    """Tell whether pages come from several processes in turn: their start time goes back."""
    moments = _start_times(endpoint)
    if moments is None:
        return False
    known = moments[np.isfinite(moments)]
    return bool((known[1:] < known[:-1]).any())


def _start_times(endpoint: EndpointSeries) -> Float64 | None:
    columns = [column for column, one in enumerate(endpoint.series) if one.name == "process_start_time_seconds"]
    return np.asarray(endpoint.values[:, columns[0]]) if len(columns) == 1 else None


def moved(moments: Float64) -> NDArray[np.bool_]:
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
