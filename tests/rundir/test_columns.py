"""Rows of a table, and tables end to end, with columns of several values a row."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sidelight.rundir.columns import Ints, concat, ragged, take


@dataclass(frozen=True, kw_only=True)
class _Table:
    index: Ints
    values: Ints = field(metadata=ragged("start"))
    start: Ints


def _table(rows: list[list[int]]) -> _Table:
    return _Table(
        index=np.arange(len(rows)),
        values=np.array([value for row in rows for value in row], np.int64),
        start=np.cumsum([0, *map(len, rows)]),
    )


def _rows(table: _Table) -> list[list[int]]:
    return [table.values[table.start[row] : table.start[row + 1]].tolist() for row in range(len(table.index))]


ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


@given(ROWS, st.data())
def test_rows_are_taken_with_all_of_their_values(rows: list[list[int]], data: st.DataObject):
    places = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    mask = np.array([place in places for place in range(len(rows))], np.bool_)
    assert [rows[place] for place in places] == _rows(take(_table(rows), np.array(places, np.int64)))
    assert [row for row, chosen in zip(rows, mask, strict=True) if chosen] == _rows(take(_table(rows), mask))


@given(st.lists(ROWS, min_size=1, max_size=3))
def test_tables_end_to_end_have_the_rows_of_all(tables: list[list[list[int]]]):
    whole = concat([_table(rows) for rows in tables])
    assert [row for rows in tables for row in rows] == _rows(whole)
    assert {column.name: np.int64 for column in fields(whole)} == {
        column.name: getattr(whole, column.name).dtype for column in fields(whole)
    }
