"""Windows, increases across resets, slices and gauge samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scraper.exposition import parse
from scraper.missing import Missing
from scraper.normalise import (
    Buckets,
    CounterIncrease,
    Cut,
    GaugeSamples,
    HistogramIncrease,
    Window,
    counter,
    cut,
    gauge,
    histogram,
    slice_of,
    unrolled,
)
from scraper.series import EndpointSeries, histograms

S = 10**9
NAN = float("nan")


def endpoint(at_s: list[float], values: list[list[float]], layout: str = "") -> EndpointSeries:
    """Scrapes that took 2 ns each, complete at the given seconds."""
    stamps = np.array([round(at * S) for at in at_s], dtype=np.int64)
    matrix = np.array(values, dtype=np.float64).reshape(len(stamps), len(values[0]) if values else 0)
    text = layout or "".join(f"s{column} 0\n" for column in range(matrix.shape[1]))
    return EndpointSeries(
        url="u",
        due_ns=stamps,
        request_ns=stamps - 2,
        response_ns=stamps,
        at_ns=stamps - 1,
        series=parse(text).series,
        values=matrix,
        changed=np.ones(len(stamps), dtype=np.bool_),
        failures=(),
    )


def chosen(one: EndpointSeries, start_s: float, end_s: float, slice_s: float = 1000) -> Cut:
    found = cut(one, Window(start_ns=round(start_s * S), end_ns=round(end_s * S)), round(slice_s * S))
    assert isinstance(found, Cut)
    return found


def increase(at_s: list[float], values: list[float], start_s: float, end_s: float) -> CounterIncrease | Missing:
    one = endpoint(at_s, [[value] for value in values])
    return counter(one.values[:, 0], chosen(one, start_s, end_s))


def test_reference_is_the_last_scrape_complete_before_the_start():
    """A scrape that ends after the start may have seen what the window counts: it is not the reference."""
    one = endpoint([1, 2, 3, 4, 5], [[0]] * 5)
    assert [(1, False), (1, False), (0, False), (0, True)] == [
        (found.reference, found.late) for found in (chosen(one, start, 4.5) for start in (2, 2.9, 1.999999999, 0.5))
    ]
    assert 4 == chosen(one, 2, 4.5).last


@pytest.mark.parametrize(
    ("at_s", "window", "reason"),
    [
        ([], (1, 2), "no scrape succeeded"),
        ([1], (2, 3), "no scrape after the window opened"),
        ([2.5], (2, 3), "a single scrape: nothing to compare with"),
        ([1, 2], (3, 3), "the window has no duration"),
    ],
)
def test_windows_that_nothing_can_be_said_of(at_s: list[float], window: tuple[float, float], reason: str):
    """A window without two scrapes to compare is a reason, not a zero."""
    one = endpoint(at_s, [[1.0]] * len(at_s))
    assert Missing(reason) == cut(one, Window(start_ns=int(window[0] * S), end_ns=int(window[1] * S)), S)


@pytest.mark.parametrize(
    ("values", "total", "resets"),
    [
        ([5, 5, 8, 10], 5, 0),
        ([5, 5, 5, 5], 0, 0),
        ([NAN, NAN, 3, 7], 7, 0),
        ([2, NAN, 3, 7], 5, 0),
        ([5, 5, 2, 4], 4, 1),
        ([100, 300, 0, 150], 150, 1),
        ([0, 90, 80, 70], 150, 2),
        ([9, 1, 4, 5], 4, 0),
        ([1, 3, NAN, NAN], 0, 0),
        ([1, 3, NAN, 2], 2, 1),
        ([1, 3, float("inf"), 4], 1, 0),
        ([0, 1e9, 1e9 - 1e-3, 1e9], 0, 0),
    ],
)
def test_counter_increases(values: list[float], total: float, resets: int):
    """From the reference (second scrape) to the last: absent counts from zero, a decrease from zero, and is counted."""
    found = increase([1, 2, 3, 4], values, 2, 3)
    assert isinstance(found, CounterIncrease)
    assert (pytest.approx(total, abs=1e-2 if total == 0 else 1e-9), resets) == (found.total, found.resets)


def test_counter_before_any_scrape_counts_from_the_first():
    """Without a scrape before the window, what the first page already shows is not the window's."""
    found = increase([3, 4, 5], [100, 110, 115], 2, 4.5)
    assert isinstance(found, CounterIncrease)
    assert 15 == found.total


def test_counter_that_is_nowhere_in_the_window():
    """A series on no page of the window is missing."""
    assert Missing("the series is on no page of the window") == increase([1, 2, 3], [4, NAN, NAN], 2, 3)


steps = st.lists(st.one_of(st.floats(0, 1e6), st.just("restart")), min_size=1, max_size=30)


@given(steps, st.integers(0, 29))
def test_increase_is_what_was_counted_but_for_what_a_restart_hid(moves: list[float | str], at: int):
    """The increase over any window is never negative and equals the sum of what came after each restart was seen."""
    level, values, expected = 1e7, [1e7], [0.0]
    for move in moves:
        if isinstance(move, str):
            level = 0.0
            values.append(level)
            expected.append(0.0)
        else:
            level += move
            values.append(level)
            expected.append(move)
    rising, _ = unrolled(np.array(values)[:, None])
    start = min(at, len(values) - 1)
    got = float(rising[-1, 0] - rising[start, 0])
    assert pytest.approx(sum(expected[start + 1 :]), rel=1e-6, abs=1e-3) == got
    assert (np.diff(rising[:, 0]) >= -1e-3).all()


def test_slices_start_at_the_window_and_the_last_takes_what_settles():
    """Slices start at the window's start; each has what came between its scrapes, the last also the tail after it."""
    one = endpoint([1, 2.1, 2.9, 4, 5.2, 6.1, 7], [[v] for v in (0, 1, 3, 6, 10, 15, 21)])
    cuts = chosen(one, 2, 5.5, slice_s=2)
    assert ([2 * S, 4 * S, int(5.5 * S)], [True, False]) == (cuts.edges_ns.tolist(), cuts.complete.tolist())
    found = counter(one.values[:, 0], cuts)
    assert isinstance(found, CounterIncrease)
    assert ([6, 15], 21) == (found.slices.tolist(), found.total)


def test_slice_without_a_scrape_is_unknown():
    """A gap is not a slice of zeros: what it hid belongs to the slice of the next scrape."""
    one = endpoint([1, 1.5, 2, 4.5, 5, 5.5, 6], [[v] for v in (0, 1, 2, 30, 31, 32, 33)])
    found = counter(one.values[:, 0], chosen(one, 1, 6, slice_s=1))
    assert isinstance(found, CounterIncrease)
    np.testing.assert_array_equal([2, NAN, NAN, 29, 2], np.round(found.slices))


def test_slices_shorter_than_the_updates_become_scrape_intervals():
    """Slices of 0.25 s on scrapes of 1 s would show 0 and 400 for a steady 100: they become the intervals."""
    one = endpoint([0, 1, 2, 3, 4, 5], [[v] for v in (0, 100, 200, 300, 400, 500)])
    cuts = chosen(one, 1, 4, slice_s=0.25)
    found = counter(one.values[:, 0], cuts)
    assert isinstance(found, CounterIncrease)
    assert cuts.per_interval
    assert ([1 * S, 2 * S, 3 * S, 4 * S], [100, 100, 200]) == (cuts.edges_ns.tolist(), found.slices.tolist())


LAYOUT = '# TYPE h histogram\nh_bucket{le="1"} 0\nh_bucket{le="+Inf"} 0\nh_sum 0\nh_count 0\n'


def observed(rows: list[list[float]], slice_s: float = 1000) -> HistogramIncrease | Missing:
    one = endpoint([float(t) for t in range(1, len(rows) + 1)], rows, LAYOUT)
    return histogram(one.values, histograms(one.series)[0], chosen(one, 1, len(rows), slice_s))


def test_histogram_increase_by_interval_and_slice():
    """Counts, sums and buckets (not cumulative) by scrape interval, by slice, and in all."""
    found = observed([[1, 2, 3.0, 2], [2, 4, 7.5, 4], [2, 5, 9.5, 5]], slice_s=1)
    assert isinstance(found, HistogramIncrease)
    assert isinstance(found.buckets, Buckets)
    assert (3, 6.5, [2, 1], [4.5, 2.0]) == (found.count, found.sum, found.counts.tolist(), found.sums.tolist())
    assert [[1, 1], [0, 1]] == found.buckets.intervals.tolist()
    assert ([1, 2], [[1, 1], [0, 1]]) == (found.buckets.totals.tolist(), found.buckets.slices.tolist())
    assert ([2, 1], [4.5, 2.0]) == (found.slice_counts.tolist(), found.slice_sums.tolist())


def test_histogram_reset_restarts_all_its_columns():
    """When the count fell every column counts from zero, also one that happens not to have fallen."""
    found = observed([[1, 9, 3.0, 9], [1, 10, 4.0, 10], [3, 4, 40.0, 4], [4, 5, 41.0, 5]])
    assert isinstance(found, HistogramIncrease)
    assert isinstance(found.buckets, Buckets)
    assert (6, 42.0, 1) == (found.count, found.sum, found.resets)
    assert [4, 2] == found.buckets.totals.tolist()


def test_histogram_whose_bounds_change_has_no_buckets():
    """New bounds in the middle of a run leave count and sum, and a reason in place of the buckets."""
    layout = LAYOUT.replace('h_bucket{le="+Inf"} 0\n', 'h_bucket{le="+Inf"} 0\nh_bucket{le="2"} 0\n')
    rows = [[1, 2, NAN, 2.0, 2], [NAN, 3, 3, 3.0, 3]]
    one = endpoint([1, 2], rows, layout)
    found = histogram(one.values, histograms(one.series)[0], chosen(one, 1, 2))
    assert isinstance(found, HistogramIncrease)
    assert (1, 1.0, Missing("the bucket bounds changed during the run")) == (found.count, found.sum, found.buckets)


def test_histogram_that_appears_in_the_window_counts_from_zero():
    """A labelled child that appears with its first observation counts whole."""
    found = observed([[NAN] * 4, [1, 2, 5.0, 2]])
    assert isinstance(found, HistogramIncrease)
    assert (2, 5.0) == (found.count, found.sum)
    assert Missing("the series is on no page of the window") == observed([[NAN] * 4] * 2)


def test_histogram_of_fractional_counts():
    """Counts may be fractions, as scaled exporters have them."""
    found = observed([[0.5, 0.5, 1, 0.5], [1.0, 1.25, 2, 1.25]])
    assert isinstance(found, HistogramIncrease)
    assert isinstance(found.buckets, Buckets)
    assert (0.75, [0.5, 0.25]) == (found.count, found.buckets.totals.tolist())


def test_gauge_is_judged_inside_the_window_only():
    """Neither the warm-up's nor the idle tail's values are the window's; absent and infinite ones are none."""
    one = endpoint([1, 2, 3, 4, 5, 6], [[9], [1], [NAN], [float("inf")], [3], [0]])
    found = gauge(one, 0, chosen(one, 1.5, 5.5))
    assert isinstance(found, GaugeSamples)
    assert ([1, 3], [2 * S - 1, 5 * S - 1]) == (found.values.tolist(), found.at_ns.tolist())
    assert Missing("no scrape fell inside the window") == gauge(one, 0, chosen(one, 2.1, 2.9))
    assert Missing("the series is on no page inside the window") == gauge(one, 0, chosen(one, 2.5, 3.5))


def test_slice_of_stamps():
    """A stamp on an edge is the later slice's, but for the last edge."""
    where = slice_of(np.array([0, 1, 5, 9, 10, 11]), np.array([1, 5, 10]))
    assert [-1, 0, 1, 1, 1, 2] == where.tolist()


@pytest.mark.parametrize(
    ("at_s", "window", "covered_s", "early_s", "rate_s"),
    [
        ([1, 2, 3, 4, 5], (1.5, 4.5), 3.0, 0.0, 3.0),
        ([1, 2, 3, 4], (1.5, 5.5), 2.5, 0.0, 4.0),
        ([1, 2, 3, 4], (1.5, 6.0), 2.5, 0.0, 4.5),
        ([1, 2, 3, 4], (1.5, 9.5), 2.5, 5.5, 2.5),
        ([3, 4, 5], (2, 4.5), 1.5, 0.0, 2.5),
        ([3, 4, 5], (2, 9), 2.0, 4.0, 2.0),
        ([3, 4], (1, 2), 0.0, 0.0, 1.0),
    ],
)
def test_rates_are_over_what_scrapes_cover(
    at_s: list[float], window: tuple[float, float], covered_s: float, early_s: float, rate_s: float
):
    """The whole window, unless scrapes ended more than two of their intervals before it did."""
    cuts = chosen(endpoint(at_s, [[0]] * len(at_s)), *window)
    assert (covered_s, early_s, rate_s) == (cuts.covered_s, cuts.early_s, cuts.rate_s)


def test_the_slice_in_which_scraping_ended_lasts_to_the_last_scrape():
    """Its increase is over the time between its scrapes, and it is no complete slice; others keep their length."""
    one = endpoint([0, 1, 2, 3, 4, 5], [[v] for v in range(6)])
    cuts = chosen(one, 0.5, 12.5, slice_s=3)
    assert ([3.0, 2.0, 3.0, 3.0], [True, False, True, True]) == (cuts.slice_s.tolist(), cuts.complete.tolist())
    found = counter(one.values[:, 0], cuts)
    assert isinstance(found, CounterIncrease)
    np.testing.assert_array_equal([1.0, 1.0, NAN, NAN], found.slices / cuts.slice_s)
    assert [3.0, 3.0, 0.5] == chosen(one, 0.5, 7, slice_s=3).slice_s.tolist()
