"""The circular block bootstrap: how long blocks are, what resamples add up to, how wide an interval is."""

from __future__ import annotations

import numpy as np
import pytest
from autoregressive import autoregressive
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sidelight.correlator.statistics.bootstrap import (
    block_count,
    block_length,
    degrees_of_freedom,
    interval95,
    resampled_sums,
)


def test_independent_values_have_blocks_of_two():
    assert 2 == block_length(np.random.default_rng(1).normal(size=5000))


def test_a_block_is_twice_as_long_as_neighbours_resemble_each_other():
    """0.8 to the 11th is the first power of 0.8 below 0.1."""
    assert 22 == pytest.approx(block_length(autoregressive(np.random.default_rng(3), 200_000, 0.8)), abs=2)


def test_unknown_values_do_not_change_how_long_neighbours_resemble_each_other():
    values = autoregressive(np.random.default_rng(3), 200_000, 0.8)
    values[::50] = np.nan
    assert 22 == pytest.approx(block_length(values), abs=2)


@pytest.mark.parametrize(
    ("values", "length"),
    [
        (np.arange(100.0), 20),
        (np.zeros(100), 1),
        (np.full(100, np.nan), 1),
        (np.array([1.0]), 1),
        (np.zeros(0), 1),
        (np.array([1.0, 2.0, 3.0]), 1),
    ],
)
def test_a_block_is_from_one_to_a_fifth_of_the_values(values: np.ndarray, length: int):
    """A trend never ends; what is constant, unknown or hardly there has nothing to resemble."""
    assert length == block_length(values)


@given(arrays(np.float64, st.tuples(st.integers(1, 30), st.integers(1, 3)), elements=st.floats(-1e6, 1e6)))
def test_a_block_of_everything_adds_up_to_the_whole(columns: np.ndarray):
    """Wherever it starts: a block that reaches the end goes on from the beginning."""
    sums = resampled_sums(columns, len(columns), resamples=7)

    assert np.tile(columns.sum(axis=0), (7, 1)) == pytest.approx(sums, abs=1e-6)


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_resample_has_as_many_rows_as_whole_blocks_that_cover_them(size: int, block: int):
    block = min(block, size)
    sums = resampled_sums(np.ones((size, 1)), block, resamples=3)

    assert [[-(-size // block) * block]] * 3 == sums.tolist()


def test_resamples_are_the_same_every_time():
    columns = np.random.default_rng(5).normal(size=(40, 2))
    assert resampled_sums(columns, 4).tolist() == resampled_sums(columns, 4).tolist()


def test_the_spread_of_resamples_is_that_of_a_mean_of_independent_values():
    columns = np.random.default_rng(5).normal(size=(400, 1))
    assert columns.std() / 20 == pytest.approx(resampled_sums(columns, 1).std() / 400, rel=0.1)


def test_an_interval_is_wider_the_fewer_blocks_there_are():
    resampled = np.random.default_rng(5).normal(size=1000)
    widths = [high - low for low, high in filter(None, (interval95(0.0, resampled, few) for few in (2, 5, 10, 1000)))]

    assert 4 == len(widths)
    assert sorted(widths, reverse=True) == widths
    assert 2 * 1.96 * resampled.std() == pytest.approx(widths[-1], rel=0.01)


def test_one_block_has_no_interval():
    assert interval95(0.0, np.arange(1000.0), 1) is None
    assert 1 == block_count(9, 5)


def test_normal_blocks_have_a_degree_of_freedom_each_but_one():
    degrees = degrees_of_freedom(np.random.default_rng(6).normal(size=(40_000, 1)), 4)

    assert 9999 == pytest.approx(degrees[0], rel=0.1)


def test_one_block_that_outweighs_the_others_has_one_degree_of_freedom():
    """However many there are; a part that never varies has them all."""
    influence = np.zeros((1000, 2))
    influence[500, 0] = 1.0

    assert [1.0, 199.0] == pytest.approx(degrees_of_freedom(influence, 5).tolist(), abs=1.1)


@given(arrays(np.float64, st.tuples(st.integers(1, 50), st.just(2)), elements=st.floats(-1e6, 1e6)), st.integers(1, 10))
def test_degrees_of_freedom_are_never_none_nor_more_than_the_blocks(influence: np.ndarray, block: int):
    degrees = degrees_of_freedom(influence, min(block, len(influence)))

    assert (degrees >= 1).all()
    assert (degrees <= max(block_count(len(influence), min(block, len(influence))) - 1, 1)).all()
