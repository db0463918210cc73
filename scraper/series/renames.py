"""Series that were renamed while they counted on: another value, or another name, of one of their labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.sums import ROUNDING

MOST_NEW = 10  # that a new series may show on its first page, where its metric has shown no larger step


def renames(
    series: Sequence[Series], values: Floats, columns: Sequence[int], restarts: Bools
) -> Iterator[tuple[Series, int, str]]:
    """Yield renamed series, of cumulative `columns` of float64[T, N], each with the scrape and change.

    Those that come (again) at a scrape are compared with the last that left their metric, since a restart (bool[T]).
    They were renamed if a label has none of its values before, each metric with that change has counted as far as
    before, and most had counted more than in any scrape interval: a new model's first page may show as much as that.
    """
    if np.isfinite(values[:1, columns]).all():  # nothing comes later
        return
    series, values = [series[column] for column in columns], values[:, columns]
    known = np.isfinite(values) & (values >= 0)
    names, code = np.unique([item.name for item in series], return_inverse=True)
    last = np.full(len(series), -1)  # the last scrape that has the series
    for row in (1 + np.flatnonzero(restarts[1:] | (known[1:] != known[:-1]).any(axis=1))).tolist():
        last[known[row - 1]] = row - 1
        if restarts[row]:
            last[:] = -1
            continue
        gone, latest = (last >= 0) & ~known[row], np.full(len(names), -1)
        np.maximum.at(latest, code[gone], last[gone])
        came = known[row] & (last < latest[code])
        changes: dict[str, list[tuple[Indices, Indices]]] = defaultdict(list)
        for name in np.unique(code[came]):
            left, new = (np.flatnonzero(side & (code == name)) for side in (gone & (last == latest[name]), came))
            changes[_change([series[at] for at in left], [series[at] for at in new])].append((left, new))
        changes.pop("", None)
        for change, moved in changes.items():
            yield from ((series[at], row, change) for at in _counted_on(values, row, last, moved))


def _change(left: Sequence[Series], came: Sequence[Series]) -> str:
    """Return the first change of a label without a common value, else ''."""
    before, after = ([dict(item.labels) for item in items] for items in (left, came))
    for label in dict.fromkeys(label for labels in (*before, *after) for label in labels):
        old, new = (
            [f'"{labels[label]}"' if label in labels else "none" for labels in side] for side in (before, after)
        )
        if not set(old) & set(new):
            return f"label {label} changed from {old[0]} to {new[0]}"
    return ""


def _counted_on(values: Floats, row: int, last: Indices, moved: Sequence[tuple[Indices, Indices]]) -> list[int]:
    """Return the new columns of a rename, none if they rather began anew."""
    renamed, far = [], []
    for left, new in moved:
        page = last[left[0]]
        counted = float(values[page, left].sum())
        if values[row, new].sum() < counted * (1 - ROUNDING):
            return []
        if counted > 0:
            renamed += new.tolist()
            steps = np.nan_to_num(np.diff(values[: page + 1, left], axis=0)).sum(axis=1)
            far.append(counted > max(MOST_NEW, steps.max(initial=0.0)))
    return renamed if 2 * sum(far) > len(far) else []
