"""Columns: names of array types by content, rows of a table, and concatenation of tables.

A table is a frozen dataclass whose fields are arrays of one length, one row each; a `ragged` column has several
values a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Texts = NDArray[np.object_]  # of str
Indices = NDArray[np.intp]

_STARTS = "starts"

Table = TypeVar("Table", bound="DataclassInstance")


def ragged(starts: str) -> dict[str, str]:
    """Return the metadata of a ragged column.

    The values of row i lie between entries i and i + 1 of the column `starts`.
    """
    return {_STARTS: starts}


def take(table: Table, rows: Indices | Ints | Bools) -> Table:
    """Return rows of a table, by position or mask; the table itself for a full mask."""
    if rows.dtype == np.bool_ and rows.all():
        return table
    starts = _starts(table)
    columns = {}
    for name in (column.name for column in fields(table)):
        if name in starts.values():
            columns[name] = _bounds(np.diff(getattr(table, name))[rows])
        elif name in starts:
            columns[name] = getattr(table, name)[_places(getattr(table, starts[name]), rows)]
        else:
            columns[name] = getattr(table, name)[rows]
    return type(table)(**columns)


def concat(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, at least one, one after another."""
    bounds = set(_starts(tables[0]).values())
    columns = {}
    for name in (column.name for column in fields(tables[0])):
        parts = [getattr(table, name) for table in tables]
        joined = np.concatenate([np.diff(part) for part in parts] if name in bounds else parts)
        columns[name] = _bounds(joined) if name in bounds else joined
    return type(tables[0])(**columns)


def _starts(table: DataclassInstance) -> dict[str, str]:
    """Return the ragged columns of a table, each with its column of row starts."""
    return {column.name: column.metadata[_STARTS] for column in fields(table) if _STARTS in column.metadata}


def _places(starts: Ints, rows: Indices | Ints | Bools) -> Ints:
    """Return the places of some rows' values in a ragged column."""
    begins, counts = starts[:-1][rows], np.diff(starts)[rows]
    # The place of each value within the result, moved to where its row began.
    return np.arange(counts.sum()) + np.repeat(begins - _bounds(counts)[:-1], counts)


def _bounds(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
