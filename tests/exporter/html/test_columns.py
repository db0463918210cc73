"""Columns of the page: what is written comes back as the page's script reads it, to the unit, missing as missing."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_columns import read

from sidelight.exporter.html.columns import ascending_column, number_column, pack, text_column

TIMES = st.lists(st.one_of(st.just(float("nan")), st.floats(-1e4, 1e7)), max_size=40)


@given(TIMES)
def test_numbers_come_back_to_half_a_unit(values: list[float]):
    """Negative ones, missing ones and none at all."""
    back = read(pack({"ttft": number_column(np.array(values), 0.01)}))["ttft"]
    np.testing.assert_allclose(back, values, rtol=0, atol=0.00501)


@given(st.lists(st.floats(-1e6, 1e9), max_size=40).map(sorted))
def test_ascending_numbers_do_not_drift(values: list[float]):
    """Only distances are written; their sum is as near as each number alone."""
    back = read(pack({"sent": ascending_column(np.array(values), 0.01)}))["sent"]
    np.testing.assert_allclose(back, values, rtol=0, atol=0.00501)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), max_size=20))
def test_texts_are_written_once_each(values: list[str]):
    """ "" is a missing one."""
    column = text_column(np.array(values, dtype=object))
    codes = read(pack({"class": column}))["class"]
    texts = column.texts or ()
    assert [texts[int(code)] if code >= 0 else "" for code in codes] == values
    assert sorted(set(values)) == list(texts)


def test_columns_of_different_lengths_stand_behind_each_other():
    """And the same columns give the same bytes."""
    columns = {"a": number_column(np.array([1.0, 300.0])), "b": text_column(["x"]), "c": number_column(np.empty(0))}
    assert {"a": [1, 300], "b": [0], "c": []} == read(pack(columns))
    assert pack(columns) == pack(columns)


@pytest.mark.parametrize("value", [2.0**52, -(2.0**47), 1.8446744073709552e19, -1e300, float("inf")])
@pytest.mark.parametrize("unit", [0.01, 1.0])
def test_a_number_that_no_chart_could_show_is_missing(value: float, unit: float):
    """A server states the tokens of a reply and its gauges: what is beyond 2**46 units does not cost the page."""
    back = read(pack({"output": number_column(np.array([value, 5.0]), unit)}))["output"]
    np.testing.assert_allclose(back, [np.nan, 5.0])


def test_a_long_text_costs_its_own_length():
    """Of a hundred thousand requests, one has a text of 10,000 characters: numpy's texts would take 4 GB."""
    tracemalloc.start()
    column = text_column(np.array(["x" * 10_000] + ["ok"] * 100_000, dtype=object))
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()
    assert ("ok", "x" * 10_000) == column.texts


def test_a_span_that_a_script_cannot_count_exactly_is_refused():
    """2**48 units: nine years in hundredths of a millisecond."""
    with pytest.raises(ValueError, match="span more than 6 bytes"):
        pack({"a": ascending_column(np.array([0.0, 2.0**48]))})
