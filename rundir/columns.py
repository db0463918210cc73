"""Columns: names of array types by content, rows of a table, and concatenation of tables.

A table is a frozen dataclass whose fields are arrays of one length, one row each; a `ragged` column has several
values a row. A table that is too large for memory is `on_demand`: its columns are loaded when they are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Texts = NDArray[np.object_]  # of str
Indices = NDArray[np.intp]
Rows = Indices | Ints | Bools | slice  # positions, a mask, or one stretch

_STARTS, _LOAD, _HOLDS = "starts", "_load", "_holds"
Load = Callable[[str], Any]  # from a column's name to its values

Table = TypeVar("Table", bound="DataclassInstance")


def texts_of(values: Texts | NDArray[np.str_]) -> Texts:
    """Return texts as objects, equal ones as one object."""
    return np.fromiter(map(sys.intern, values.tolist()), np.object_, len(values))


def same_text(text: str, size: int) -> Texts:
    """Return a column of one text, as one object; `np.full` makes one a row."""
    column = np.empty(size, np.object_)
    column.fill(text)
    return column


def ragged(starts: str) -> dict[str, str]:
    """Return the metadata of a ragged column.

    The values of row i lie between entries i and i + 1 of the column `starts`.
    """
    return {_STARTS: starts}


class OnDemand:
    """Base of a table that may have no columns of its own: they are then loaded whenever they are read."""

    def __getattr__(self, name: str) -> Any:
        load = vars(self).get(_LOAD)
        if load is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        column = load(name)
        if vars(self).get(_HOLDS):
            vars(self)[name] = column
        return column


def on_demand(table: type[Table], load: Load) -> Table:
    """Return a table of an `OnDemand` type. `load` gives its columns whenever they are read."""
    loaded = object.__new__(table)
    vars(loaded)[_LOAD] = load
    return loaded


def held(table: Table) -> Table:
    """Return a table that loads each column once, as for a reader of single rows."""
    if getattr(table, _LOAD, None) is None:
        return table
    holding = on_demand(type(table), lambda name: getattr(table, name))
    vars(holding)[_HOLDS] = True
    return holding


def stretches(table: Table, values: int) -> Iterator[Table]:
    """Yield stretches of whole rows, each with about `values` values in the first ragged column.

    The table itself where it has no more. Columns of a table `on_demand` are loaded once.
    """
    starts = next(iter(starts_of(table).values()))
    table = held(table)
    ends = getattr(table, starts)
    rows = len(ends) - 1
    if ends[-1] <= values:
        yield table
        return
    cuts = np.unique(np.searchsorted(ends, [*range(values, int(ends[-1]), values)])).tolist()
    for begin, end in pairwise([0, *cuts, rows]):
        if begin < end:
            yield take(table, slice(begin, end))


def with_columns(table: Table, columns: Mapping[str, Any]) -> Table:
    """Return a table with some columns replaced; the others of one `on_demand` are loaded as before."""
    if getattr(table, _LOAD, None) is None:
        return replace(table, **columns)
    return on_demand(type(table), lambda name: columns[name] if name in columns else getattr(table, name))


def take(table: Table, rows: Rows) -> Table:
    """Return rows of a table, by position or mask; the table itself for a full mask.

    Columns of rows that are one stretch are views of the table's, not copies.
    """
    if not isinstance(rows, slice) and rows.dtype == np.bool_:
        count = int(np.count_nonzero(rows))
        if count == len(rows):
            return table
        first = int(rows.argmax()) if count else 0
        if rows[first : first + count].all():
            rows = slice(first, first + count)
    starts = starts_of(table)
    if getattr(table, _LOAD, None) is not None:
        return on_demand(type(table), lambda name: _taken(table, name, rows, starts))
    return type(table)(**{column.name: _taken(table, column.name, rows, starts) for column in fields(table)})


def _taken(table: DataclassInstance, name: str, rows: Rows, starts: Mapping[str, str]) -> Any:
    """Return a column of some rows."""
    if isinstance(rows, slice) and (name in starts or name in starts.values()):
        of_rows = getattr(table, starts.get(name, name))[rows.start : rows.stop + 1]
        return getattr(table, name)[of_rows[0] : of_rows[-1]] if name in starts else of_rows - of_rows[0]
    if name in starts.values():
        return bounds(np.diff(getattr(table, name))[rows])
    if name in starts:
        return getattr(table, name)[places(getattr(table, starts[name]), rows)]
    return getattr(table, name)[rows]


def concat(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, at least one, one after another."""
    starts = set(starts_of(tables[0]).values())
    columns = {}
    for name in (column.name for column in fields(tables[0])):
        parts = [getattr(table, name) for table in tables]
        joined = np.concatenate([np.diff(part) for part in parts] if name in starts else parts)
        columns[name] = bounds(joined) if name in starts else joined
    return type(tables[0])(**columns)


def starts_of(table: DataclassInstance | type[DataclassInstance]) -> dict[str, str]:
    """Return the ragged columns of a table, each with its column of row starts."""
    return {column.name: column.metadata[_STARTS] for column in fields(table) if _STARTS in column.metadata}


def places(starts: Ints, rows: Rows) -> Ints:
    """Return the places of some rows' values in a ragged column."""
    begins, counts = starts[:-1][rows], np.diff(starts)[rows]
    # The place of each value within the result, moved to where its row began.
    return np.arange(counts.sum()) + np.repeat(begins - bounds(counts)[:-1], counts)


def bounds(lengths: Ints) -> Ints:
    """Return where rows of these lengths begin, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
