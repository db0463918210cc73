"""Windows, increases across resets, slices and gauge samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from series import endpoint_of_columns

from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import HistogramColumns, histograms, parse
from sidelight.scraper.series.resets import alternates, reset_rows, together, without_resets
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.increase import CounterIncrease, HistogramIncrease, counter, gauge, histogram
from sidelight.scraper.window.window import ScrapeSelection, Window, select_scrapes, slice_of

S = 10**9
NAN = float("nan")


def endpoint(at_s: list[float], values: list[list[float]], layout: str = "") -> EndpointSeries:
    """Scrapes that took 2 ns each, complete at the given seconds."""
    stamps = np.array([round(at * S) for at in at_s], dtype=np.int64)
    matrix = np.array(values, dtype=np.float64).reshape(len(stamps), len(values[0]) if values else 0)
    text = layout or "".join(f"s{column} 0\n" for column in range(matrix.shape[1]))
    return endpoint_of_columns(parse(text).series, matrix, request_ns=stamps - 2, response_ns=stamps)


def chosen(series: EndpointSeries, start_s: float, end_s: float, slice_s: float = 1000) -> ScrapeSelection:
    selection = select_scrapes(series, Window(start_ns=round(start_s * S), end_ns=round(end_s * S)), round(slice_s * S))
    assert isinstance(selection, ScrapeSelection)
    return selection


def increase(series: EndpointSeries, cuts: ScrapeSelection) -> CounterIncrease:
    increased = counter(series, 0, cuts)
    assert isinstance(increased, CounterIncrease)
    return increased


def test_a_counter_beyond_the_largest_number_is_missing():
    """Of forged values, and without a warning of numpy on anybody's terminal."""
    values = np.array([[1e308], [0.0], [1.7e308], [0.0], [5.0]])
    risen = without_resets(values, reset_rows(values))
    np.testing.assert_array_equal([1e308, 1e308, NAN, NAN, NAN], risen[:, 0])
    np.testing.assert_array_equal([2.0, NAN], together([np.array([1.0, 1.7e308]), np.array([1.0, 1.7e308])]))


def test_reference_is_the_last_scrape_complete_before_the_start():
    """A scrape that ends after the start may have seen what the window counts: it is not the reference."""
    series = endpoint([1, 2, 3, 4, 5], [[0]] * 5)
    assert [(1, False), (1, False), (0, False), (0, True)] == [
        (selection.reference, selection.late)
        for selection in (chosen(series, start, 4.5) for start in (2, 2.9, 1.999999999, 0.5))
    ]
    assert 4 == chosen(series, 2, 4.5).last


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
    series = endpoint(at_s, [[1.0]] * len(at_s))
    assert Missing(reason) == select_scrapes(series, Window(start_ns=int(window[0] * S), end_ns=int(window[1] * S)), S)


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
    series = endpoint([1, 2, 3, 4], [[value] for value in values])
    increased = increase(series, chosen(series, 2, 3))
    assert (pytest.approx(total, abs=1e-2 if total == 0 else 1e-9), resets) == (increased.total, increased.resets)


def test_counter_before_any_scrape_counts_from_the_first():
    """Without a scrape before the window, what the first page already shows is not the window's."""
    series = endpoint([3, 4, 5], [[100], [110], [115]])
    assert 15 == increase(series, chosen(series, 2, 4.5)).total


def test_counter_that_is_nowhere_in_the_window():
    """A series on no page of the window is missing."""
    series = endpoint([1, 2, 3], [[4], [NAN], [NAN]])
    assert Missing("the series is on no page of the window") == counter(series, 0, chosen(series, 2, 3))


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
    matrix = np.array(values)[:, None]
    rising = without_resets(matrix, reset_rows(matrix))
    start = min(at, len(values) - 1)
    got = float(rising[-1, 0] - rising[start, 0])
    assert pytest.approx(sum(expected[start + 1 :]), rel=1e-6, abs=1e-3) == got
    assert (np.diff(rising[:, 0]) >= -1e-3).all()


def test_slices_start_at_the_window_and_the_last_takes_what_settles():
    """Slices start at the window's start; each has what came between its scrapes, the last also the tail after it."""
    series = endpoint([1, 2.1, 2.9, 4, 5.2, 6.1, 7], [[v] for v in (0, 1, 3, 6, 10, 15, 21)])
    cuts = chosen(series, 2, 5.5, slice_s=2)
    assert ([2 * S, 4 * S, int(5.5 * S)], [True, False]) == (cuts.edges_ns.tolist(), cuts.complete.tolist())
    increased = increase(series, cuts)
    assert ([6, 15], 21) == (increased.slices.tolist(), increased.total)


def test_slice_without_a_scrape_is_unknown():
    """A gap is not a slice of zeros: what it hid belongs to the slice of the next scrape."""
    series = endpoint([1, 1.5, 2, 4.5, 5, 5.5, 6], [[v] for v in (0, 1, 2, 30, 31, 32, 33)])
    increased = increase(series, chosen(series, 1, 6, slice_s=1))
    np.testing.assert_array_equal([2, NAN, NAN, 29, 2], np.round(increased.slices))


def test_slices_shorter_than_the_updates_become_scrape_intervals():
    """Slices of 0.25 s on scrapes of 1 s would show 0 and 400 for a steady 100: they become the intervals."""
    series = endpoint([0, 1, 2, 3, 4, 5], [[v] for v in (0, 100, 200, 300, 400, 500)])
    cuts = chosen(series, 1, 4, slice_s=0.25)
    increased = increase(series, cuts)
    assert cuts.per_interval
    assert ([1 * S, 2 * S, 3 * S, 4 * S], [100, 100, 200]) == (cuts.edges_ns.tolist(), increased.slices.tolist())


LAYOUT = '# TYPE h histogram\nh_bucket{le="1"} 0\nh_bucket{le="+Inf"} 0\nh_sum 0\nh_count 0\n'


def observed(rows: list[list[float]], slice_s: float = 1000, layout: str = LAYOUT) -> HistogramIncrease:
    series = endpoint([float(t) for t in range(1, len(rows) + 1)], rows, layout)
    increased = histogram(series, histograms(series.series)[0], chosen(series, 1, len(rows), slice_s))
    assert isinstance(increased, HistogramIncrease)
    return increased


def test_histogram_increase_by_interval_and_slice():
    """Counts, sums and buckets (not cumulative) by slice and in all; and by the scrape intervals in which something was
    observed, from which percentiles are read."""
    increased = observed([[1, 2, 3.0, 2], [2, 4, 7.5, 4], [2, 4, 7.5, 4], [2, 5, 9.5, 5]], slice_s=1)
    assert (3, 6.5, [4.5, 0.0, 2.0]) == (increased.count, increased.sum, increased.sums.tolist())
    assert ([1, 2], [[1, 1], [0, 0], [0, 1]]) == (increased.buckets.totals.tolist(), increased.buckets.slices.tolist())
    assert ([2, 0, 1], [4.5, 0.0, 2.0]) == (increased.slice_counts.tolist(), increased.slice_sums.tolist())
    (rows,) = increased.intervals
    assert ([1, np.inf], [[1, 1], [0, 1]], [4.5, 2.0]) == (
        rows.bounds.tolist(),
        rows.counts.tolist(),
        rows.sums.tolist(),
    )
    assert ([0, 2], 9.5) == (rows.slices.tolist(), rows.total)


def test_histogram_reset_restarts_all_its_columns():
    """When the count fell every column counts from zero, also one that happens not to have fallen: the page itself is
    then the interval."""
    increased = observed([[1, 9, 3.0, 9], [1, 10, 4.0, 10], [3, 4, 40.0, 4], [4, 5, 41.0, 5]])
    assert (6, 42.0, 1, [4, 2]) == (increased.count, increased.sum, increased.resets, increased.buckets.totals.tolist())
    (rows,) = increased.intervals
    assert ([[0, 1], [3, 1], [1, 0]], [1.0, 40.0, 1.0]) == (rows.counts.tolist(), rows.sums.tolist())


def test_histogram_whose_bounds_change_has_no_buckets():
    """New bounds in the middle of a run leave count and sum, and a reason in place of the buckets; its observations are
    read under their own bounds."""
    layout = LAYOUT.replace('h_bucket{le="+Inf"} 0\n', 'h_bucket{le="+Inf"} 0\nh_bucket{le="2"} 0\n')
    increased = observed(
        [[1, 2, NAN, 2.0, 2], [2, 4, NAN, 5.0, 4], [NAN, 1, 1, 1.5, 1], [NAN, 3, 2, 6.0, 3]], layout=layout
    )
    assert (5, 9.0, Missing("the bucket bounds changed during the run")) == (
        increased.count,
        increased.sum,
        increased.buckets,
    )
    read = {tuple(part.bounds.tolist()): (part.counts.tolist(), part.sums.tolist()) for part in increased.intervals}
    assert {(1.0, np.inf): ([[1, 1]], [3.0]), (2.0, np.inf): ([[1, 0], [1, 1]], [1.5, 4.5])} == read


def test_histogram_that_appears_in_the_window_counts_from_zero():
    """A labelled child that appears with its first observation counts whole, its first page as an interval."""
    increased = observed([[NAN] * 4, [1, 2, 5.0, 2], [NAN] * 4, [1, 3, 8.0, 3]])
    assert (3, 8.0) == (increased.count, increased.sum)
    assert [([[1, 1], [0, 1]], [5.0, 3.0])] == [
        (rows.counts.tolist(), rows.sums.tolist()) for rows in increased.intervals
    ]
    series = endpoint([1, 2], [[NAN] * 4] * 2, LAYOUT)
    absent = histogram(series, histograms(series.series)[0], chosen(series, 1, 2))
    assert Missing("the series is on no page of the window") == absent


def test_histogram_of_fractional_counts():
    """Counts may be fractions, as scaled exporters have them."""
    increased = observed([[0.5, 0.5, 1, 0.5], [1.0, 1.25, 2, 1.25]])
    assert (0.75, [0.5, 0.25]) == (increased.count, increased.buckets.totals.tolist())


def test_gauge_is_judged_inside_the_window_only():
    """Neither the warm-up's nor the idle tail's values are the window's; absent and infinite ones do not count."""
    series = endpoint([1, 2, 3, 4, 5, 6], [[9], [1], [NAN], [float("inf")], [3], [0]])
    readings = gauge(series, 0, chosen(series, 1.5, 5.5))
    assert ([1, 3], [2 * S - 1, 5 * S - 1]) == (readings.values.tolist(), readings.at_ns.tolist())
    assert Missing("no scrape fell inside the window") == gauge(series, 0, chosen(series, 2.1, 2.9))
    assert Missing("the series is on no page inside the window") == gauge(series, 0, chosen(series, 2.5, 3.5))


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
    """Its increase is over the time between its scrapes, and the slice is not complete; others keep their length."""
    series = endpoint([0, 1, 2, 3, 4, 5], [[v] for v in range(6)])
    cuts = chosen(series, 0.5, 12.5, slice_s=3)
    assert ([3.0, 2.0, 3.0, 3.0], [True, False, True, True]) == (cuts.slice_s.tolist(), cuts.complete.tolist())
    increased = increase(series, cuts)
    np.testing.assert_array_equal([1.0, 1.0, NAN, NAN], increased.slices / cuts.slice_s)
    assert [3.0, 3.0, 0.5] == chosen(series, 0.5, 7, slice_s=3).slice_s.tolist()


def counted(rows: list[list[float]], layout: str) -> CounterIncrease:
    series = endpoint([float(t) for t in range(1, len(rows) + 1)], rows, layout)
    return increase(series, chosen(series, 1, len(rows)))


STARTED = "# TYPE c_total counter\nc_total 0\nprocess_start_time_seconds 0\n"


def test_a_restart_behind_a_higher_value_is_known_by_the_start_time():
    """A process that counted further by its first page than the old one had counts from zero all the same."""
    increased = counted([[10, 1e9], [15, 1e9], [40, 1e9 + 7], [42, 1e9 + 7]], STARTED)
    assert (5 + 40 + 2, 1) == (increased.total, increased.resets)


def test_a_restart_with_two_signs_is_one():
    """A value that falls where the start time moves is one reset; a start time absent for a while is not."""
    increased = counted([[10, 1e9], [15, NAN], [3, 1e9 + 7], [4, NAN], [6, 1e9 + 7]], STARTED)
    assert (5 + 6, 1) == (increased.total, increased.resets)


def test_a_series_absent_after_a_restart_counts_from_zero():
    """A labelled child that the new process has not shown yet is at zero there, not at the old process's value."""
    increased = counted([[10, 1e9], [15, 1e9], [NAN, 1e9 + 7], [NAN, 1e9 + 7], [20, 1e9 + 7]], STARTED)
    assert (5 + 20, 1) == (increased.total, increased.resets)


def test_a_start_time_that_goes_back_is_another_process_not_a_restart():
    """Two processes behind one address: only what falls is counted as a reset, never every second page."""
    increased = counted([[10, 2e9], [11, 1e9], [12, 2e9], [13, 1e9]], STARTED)
    assert (3, 0) == (increased.total, increased.resets)


def test_start_times_that_no_counter_follows_are_no_restarts():
    """A new one at each scrape, while the counter goes on: else each page's value counted as an increase."""
    moving = [[10, 1e9], [15, 1e9 + 1], [17, 1e9 + 2], [19, 1e9 + 3]]
    increased = counted(moving, STARTED)
    assert (9, 0) == (increased.total, increased.resets)
    fell = counted([*moving, [4, 1e9 + 4]], STARTED)
    assert fell.resets == 4


def test_a_counter_below_0_is_missing_there():
    """And a reason where it never was another."""
    increased = counted([[5], [-3], [9]], "# TYPE c_total counter\nc_total 0\n")
    assert (4, 0) == (increased.total, increased.resets)
    series = endpoint([1, 2, 3], [[-5], [-3], [-9]])
    refused = counter(series, 0, chosen(series, 1, 3))
    assert isinstance(refused, Missing)
    assert "below 0" in refused.reason


def test_reset_series_are_known_by_their_created():
    """`_created` of the series itself moves where an exporter clears it without restarting."""
    layout = "# TYPE c_total counter\nc_total 0\n# TYPE c_created gauge\nc_created 0\n"
    increased = counted([[10, 1e9], [11, 1e9], [30, 1e9 + 5], [31, 1e9 + 5]], layout)
    assert (1 + 30 + 1, 1) == (increased.total, increased.resets)


def test_a_histogram_restarts_with_its_process():
    """Buckets, sum and count all begin at zero where the start time moves, whether or not one of them fell."""
    rows = [[1, 2, 3.0, 2, 1e9], [1, 2, 3.0, 2, 1e9], [4, 8, 9.0, 8, 1e9 + 3], [4, 9, 10.0, 9, 1e9 + 3]]
    increased = observed(rows, layout=LAYOUT + "process_start_time_seconds 0\n")
    assert (9, 10.0, 1, [4, 5]) == (increased.count, increased.sum, increased.resets, increased.buckets.totals.tolist())


def test_what_a_formula_takes_off_is_off_every_sum():
    """Prefill as time to first token less queueing: in all, by interval, by slice, and across a restart."""
    layout = "# TYPE t summary\nt_sum 0\nt_count 0\n# TYPE q summary\nq_sum 0\n"
    rows = [[1.0, 1, 0.5], [4.0, 3, 1.5], [2.0, 1, 0.25], [5.0, 2, 2.25]]
    series = endpoint([1, 2, 3, 4], rows, layout)
    columns = HistogramColumns(family="t", labels=(), help="", bounds=(), le=(), buckets=(), sum=0, count=1, less=2)
    increased = histogram(series, columns, chosen(series, 1, 4))
    assert (2 + 1 + 1, 2.0 + 1.75 + 1.0) == (increased.count, increased.sum)
    assert [2.0, 1.75, 1.0] == increased.sums.tolist()
    assert Missing("the histogram has no buckets") == increased.buckets


def test_pages_of_several_processes_in_turn_are_noticed():
    """A start time that goes back is not a restart: two processes answer behind one address."""
    layout = "process_start_time_seconds 0\n"
    assert alternates(endpoint([1, 2, 3], [[9.0], [5.0], [9.0]], layout))
    assert not alternates(endpoint([1, 2, 3, 4], [[5.0], [NAN], [5.0], [9.0]], layout))
    assert not alternates(endpoint([1, 2], [[5.0], [4.0]]))


def test_a_process_that_most_counters_show_to_have_restarted_restarted_as_a_whole():
    """Where no start time is stated: a counter that has passed its last value already counts from zero like the rest,
    and what reappears later is not another restart.
    """
    layout = "".join(f"# TYPE c{n}_total counter\nc{n}_total 0\n" for n in range(4))
    series = endpoint([1, 2, 3, 4], [[5, 8, 9, 7], [6, 9, 9, 7], [7, 1, 2, NAN], [8, 2, 3, 4]], layout)
    increases = [counter(series, column, chosen(series, 1, 4)) for column in range(4)]
    assert [(9, 1), (3, 1), (3, 1), (4, 1)] == [
        (increased.total, increased.resets) for increased in increases if isinstance(increased, CounterIncrease)
    ]


def test_one_counter_that_falls_among_many_is_its_own():
    """The others go on; and where pages state several start times, which process it was is unknown."""
    layout = "".join(f"# TYPE c{n}_total counter\nc{n}_total 0\n" for n in range(3))
    series = endpoint([1, 2, 3], [[5, 8, 9], [6, 1, 9], [7, 2, 10]], layout)
    increases = [counter(series, column, chosen(series, 1, 3)) for column in range(3)]
    assert [(2, 0), (2, 1), (1, 0)] == [
        (increased.total, increased.resets) for increased in increases if isinstance(increased, CounterIncrease)
    ]
