"""Cumulative series across resets: the one place that decides where a series began at zero again.

A series was reset at a scrape where
- the process had begun anew: by the start time that the page states, else by most of its counters having fallen;
- its own `_created` had advanced;
- it fell itself; a histogram, where its count or one of its buckets did.
After a reset the increase counts from zero: what came between the last page and the reset is lost. Where a series was
renamed (`renames`) it counts from its value there, and what came between the last page and the rename is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from sidelight.rundir.columns import Bools, Floats
from sidelight.scraper.exposition import HistogramColumns, Series, without_le
from sidelight.scraper.series.renames import renames
from sidelight.scraper.series.sums import NO_NUMBER, ROUNDING, sum_fault
from sidelight.scraper.series.table import EndpointSeries

START_TIME = "process_start_time_seconds"
MOST_UNSEEN = 3  # restarts that no counter shows: one that counts far soon after a restart may hide it, and not always
MODEL_LABEL = "model_name"  # of vLLM, SGLang and TensorRT-LLM

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Restarts that an endpoint's pages state.

    `process` (bool[T]) are the scrapes by which the process had restarted, `created` the columns of `_created` by the
    family's name (without `_total`) and labels. `renamed` are changes of labels (`renames`), by the same and the row.
    """

    process: Bools
    created: Mapping[tuple[str, Labels], int]
    renamed: Mapping[tuple[str, Labels], Mapping[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rising:
    """A counter without its resets, and the scrapes (bool[T]) of the resets.

    Its values are float64[T], never falling. Increases at the rows of `renames`, which are resets, are unknown.
    """

    values: Floats
    resets: Bools
    renames: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RisingHistogram:
    """A histogram without its resets, and the scrapes (bool[T]) of the resets.

    `count` (float64[T]) and `buckets` (float64[T, B], cumulative over buckets) never fall. `sum` (float64[T]) is NaN
    where the page has none or one that is not finite; `sum_fault` says why a sum cannot be (`sums`), and then it is
    NaN throughout, unless all that is wrong is that single pages state none that is finite. What a formula takes off
    it (`HistogramColumns.less`) is already off.
    """

    count: Floats
    buckets: Floats
    sum: Floats
    resets: Bools
    sum_fault: str
    renames: Mapping[int, str]


def restarts_of(endpoint: EndpointSeries) -> Restarts:
    """Return the restarts that an endpoint's pages state or show; each series' own resets are left to `rising`."""
    created = {
        (series.name.removesuffix("_created"), series.labels): column
        for column, series in enumerate(endpoint.series)
        if series.name.endswith("_created")
    }
    process, columns = _process_restarts(endpoint), _counting_columns(endpoint.series)
    renamed: dict[tuple[str, Labels], dict[int, str]] = defaultdict(dict)
    for series, row, change in renames(endpoint.series, endpoint.values, columns, process):
        renamed[_identity(series)][row] = change
    return Restarts(process=process, created=created, renamed=renamed)


def label_changes(endpoint: EndpointSeries) -> list[tuple[int, str]]:
    """Return the changes of labels while series counted on, each once: the scrape, and words."""
    return sorted({item for changes in restarts_of(endpoint).renamed.values() for item in changes.items()})


def rising(endpoint: EndpointSeries, column: int, restarts: Restarts) -> Rising:
    """Return one counter, or another cumulative series, across its resets.

    An absent value, or one below 0, is the last known one since the last reset, zero where there is none.
    """
    series = endpoint.series[column]
    values = amounts(endpoint.values[:, [column]])
    renamed = restarts.renamed.get(_identity(series), {})
    resets = _resets(endpoint, values, _identity(series), restarts)
    counted = np.maximum.accumulate(without_resets(values, resets))
    return Rising(values=_without_steps(counted, renamed)[:, 0], resets=resets, renames=renamed)


def rising_histogram(endpoint: EndpointSeries, columns: HistogramColumns, restarts: Restarts) -> RisingHistogram:
    """Return one histogram across its resets; all of its columns are reset together.

    Where it has no `_count`, its last bucket counts; it needs one of the two.
    """
    counted = columns.count if columns.count >= 0 else columns.buckets[-1]
    values = amounts(endpoint.values[:, [counted, *columns.buckets]])
    resets = _resets(endpoint, values, (columns.family, columns.labels), restarts)
    counts = np.maximum.accumulate(without_resets(values, resets))
    renamed = restarts.renamed.get((columns.family, columns.labels), {})
    total, fault = np.full(len(values), np.nan), ""
    if columns.sum >= 0:
        stated = endpoint.values[:, [columns.sum]]
        total = without_resets(stated, resets)[:, 0]
        unstated = np.isfinite(values[:, 0]) & ~np.isfinite(stated[:, 0])
        total[unstated] = np.nan
        fault = sum_fault(total, np.where(np.isfinite(values), counts, np.nan), columns.bounds)
        fault = fault or (NO_NUMBER if unstated.any() else "")
    if columns.less >= 0:
        total = together([total, -without_resets(endpoint.values[:, [columns.less]], resets)[:, 0]])
    counts = _without_steps(counts, renamed)
    return RisingHistogram(
        count=counts[:, 0],
        buckets=counts[:, 1:],
        sum=_without_steps(total, renamed) if fault in ("", NO_NUMBER) else np.full(len(values), np.nan),
        resets=resets,
        sum_fault=fault,
        renames=renamed,
    )


def _identity(series: Series) -> tuple[str, Labels]:
    return series.family.removesuffix("_total"), without_le(series.labels)


def _without_steps(values: Floats, renamed: Iterable[int]) -> Floats:
    """Return rising values (float64[T, ...]) without their increases at the rows of renames."""
    for row in renamed:
        values = np.concatenate([values[:row], values[row:] - (values[row] - values[row - 1])])
    return values


def amounts(values: Floats) -> Floats:
    """Return counts with those below 0 as missing."""
    return np.where(values < 0, np.nan, values)


def alternates(endpoint: EndpointSeries) -> bool:
    """Return whether pages come from several processes in turn. Their start time then goes back."""
    moments = _start_times(endpoint)
    if moments is None:
        return False
    known = moments[np.isfinite(moments)]
    return bool((known[1:] < known[:-1]).any())


def unlikely_starts(endpoint: EndpointSeries) -> int:
    """Return the number of advances of the start time without a counter that fell; 0 below three times."""
    moments = _start_times(endpoint)
    if moments is None:
        return 0
    advanced = _advanced(moments)
    times = int(advanced.sum())
    if times < MOST_UNSEEN:
        return 0
    counters = amounts(endpoint.values[:, _counting_columns(endpoint.series)])
    counted = np.count_nonzero(counters > 0, axis=1)[:-1][advanced[1:]].all()
    return times if counted and not reset_rows(counters).any() else 0


def models_in_turn(endpoint: EndpointSeries) -> list[tuple[str, int]]:
    """Return the models that the pages name one after the other, and since when; a page may name several at once.

    One that a page names beside the one before is an addition, such as a gateway's, and replaces none.
    """
    named = [dict(series.labels).get(MODEL_LABEL) for series in endpoint.series]
    models = sorted(filter(None, set(named)))
    if len(models) < 2:
        return [(model, int(endpoint.at_ns[0])) for model in models]
    known = np.isfinite(endpoint.values)
    present = np.array([known[:, [name == model for name in named]].any(axis=1) for model in models]).T
    changed = 1 + np.flatnonzero((present[1:] != present[:-1]).any(axis=1))
    turns: list[tuple[str, int]] = []
    before = np.zeros(len(models), dtype=np.bool_)
    for row in (0, *changed.tolist()):
        shown = present[row]
        if shown.any() and not (shown & before).any():
            turns.append((", ".join(compress(models, shown)), int(endpoint.at_ns[row])))
        before = shown if shown.any() else before
    return turns


def without_resets(values: Floats, resets: Bools) -> Floats:
    """Return cumulative columns (float64[T, K]) continued across resets (bool[T]); NaN beyond the largest number."""
    filled = _filled(values, resets)
    lost = np.zeros(values.shape)
    lost[1:] = np.where(resets[1:, None], filled[:-1], 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        return _held(filled + np.cumsum(lost, axis=0))


def together(columns: Sequence[Floats]) -> Floats:
    """Return the sum of columns (float64[T] each, one at least); NaN beyond the largest number."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _held(np.sum(columns, axis=0))


def _held(values: Floats) -> Floats:
    """Return the values with NaN for those beyond the largest number."""
    return np.where(np.isfinite(values), values, np.nan)


def reset_rows(values: Floats, *restarts: Bools) -> Bools:
    """Return the rows (bool[T]) at which cumulative columns (float64[T, K]) were reset together.

    They did where one of them fell, and at the rows of `restarts`: an engine that restarts under load may have counted
    further by its first page than it had by its last.
    """
    stated = np.logical_or.reduce([np.zeros(len(values), dtype=np.bool_), *restarts])
    # A series that reappears below its value before a stated restart is not reset once more.
    filled = _filled(values, stated)
    resets: Bools = stated.copy()
    resets[1:] |= (filled[1:] < filled[:-1] * (1 - ROUNDING)).any(axis=1)
    return resets


def _resets(endpoint: EndpointSeries, values: Floats, name: tuple[str, Labels], restarts: Restarts) -> Bools:
    created = restarts.created.get(name)
    stated = [] if created is None else [_advanced(endpoint.values[:, created])]
    stated += [np.arange(len(values)) == row for row in restarts.renamed.get(name, ())]
    return reset_rows(values, restarts.process, *stated)


def _filled(values: Floats, resets: Bools) -> Floats:
    """Replace absent values by the last known one since a reset, else by zero."""
    row = np.arange(len(values))[:, None]
    # Twice the row of the last known value, or an odd number where a reset came after it.
    absent = np.where(resets[:, None], 2 * row + 1, -1)
    last = np.maximum.accumulate(np.where(np.isfinite(values), 2 * row, absent), axis=0)
    known = np.take_along_axis(values, np.maximum(last, 0) // 2, axis=0)
    return np.where((last >= 0) & (last % 2 == 0), known, 0.0)


def _process_restarts(endpoint: EndpointSeries) -> Bools:
    """Return the rows (bool[T]) by which the process had begun anew.

    A page with start times of several processes says nothing, and then none is assumed; nor by start times that the
    page's own counters contradict.
    """
    moments = _start_times(endpoint)
    if moments is not None:
        advanced = _advanced(moments)
        return np.zeros_like(advanced) if unlikely_starts(endpoint) else advanced
    stated = any(series.name == START_TIME for series in endpoint.series)
    return np.zeros(len(endpoint.values), dtype=np.bool_) if stated else _common_resets(endpoint)


def _common_resets(endpoint: EndpointSeries) -> Bools:
    """Return the rows (bool[T]) at which most counters of the page fell.

    They fell below their last value since the last such row; each histogram counts once. SGLang and TensorRT-LLM state
    no start time, and a counter that has already passed its last value does not show the restart that the others show.
    """
    columns = _counting_columns(endpoint.series)
    values = amounts(endpoint.values[:, columns])
    known = np.isfinite(values)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values))[:, None], -1), axis=0)
    resets = np.zeros(len(values), dtype=np.bool_)
    since = 0
    for row in np.flatnonzero(reset_rows(values)).tolist():
        before = last[row - 1]
        shown = np.flatnonzero(known[row] & (before >= since))
        earlier = values[before[shown], shown]
        fallen = int((values[row, shown] < earlier * (1 - ROUNDING)).sum())
        if 2 * fallen > int((earlier > 0).sum()):
            resets[row], since = True, row
    return resets


def _counting_columns(series: Sequence[Series]) -> list[int]:
    return [
        column
        for column, labelled in enumerate(series)
        if (labelled.type == "counter" and not labelled.name.endswith("_created"))
        or (labelled.type == "histogram" and labelled.name == f"{labelled.family}_count")
    ]


def _start_times(endpoint: EndpointSeries) -> Floats | None:
    columns = [column for column, series in enumerate(endpoint.series) if series.name == START_TIME]
    return np.asarray(endpoint.values[:, columns[0]]) if len(columns) == 1 else None


def _advanced(moments: Floats) -> Bools:
    """Return a mask of the moments later than the last known one. One that goes back is another process's, not a
    restart.
    """
    latest = np.fmax.accumulate(moments)
    later = np.zeros(len(moments), dtype=np.bool_)
    later[1:] = latest[1:] > latest[:-1]
    return later
