"""Columns: what arrays are called in annotations, by what they hold; rows of a table, and tables end to end.

A table is a frozen dataclass whose fields are arrays of one length, one row each.
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

Table = TypeVar("Table", bound="DataclassInstance")


def take(table: Table, rows: Indices | Ints | Bools) -> Table:
    """Return some rows of a table, by position or by a mask."""
    return type(table)(**{column.name: getattr(table, column.name)[rows] for column in fields(table)})


def concat(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, at least one, one after another."""
    names = [column.name for column in fields(tables[0])]
    return type(tables[0])(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})
