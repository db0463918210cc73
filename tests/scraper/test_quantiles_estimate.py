"""Percentiles from buckets and sums: exact where pages suffice, ordered and inside the buckets whatever pages show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sidelight.scraper.quantiles import estimate, fit, read, read_rows
from sidelight.scraper.quantiles.intervals import sound

Float64 = NDArray[np.float64]

INF = float("inf")
BOUNDS = [0.1, 0.5, 1.0, 5.0, INF]
QS = np.array([0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1])


def scraped(rows: Sequence[Sequence[float]], bounds: Sequence[float] = BOUNDS) -> tuple[Float64, Float64]:
    """Return the counts [T, B] and sums [T] of observations that fell into each interval."""
    counts = np.zeros((len(rows), len(bounds)))
    for index, row in enumerate(rows):
        np.add.at(counts[index], np.searchsorted(bounds, row), 1)
    return counts, np.array([sum(row) for row in rows], dtype=np.float64)


values = st.lists(st.floats(0.001, 8), min_size=1, max_size=60)


@given(values)
def test_one_observation_an_interval_is_known(seen: list[float]):
    """Where every interval has one observation, quantiles are numpy's of the observations; inside finite buckets the
    range that cannot be wrong then holds the quantile and nothing else."""
    counts, sums = scraped([[value] for value in seen])
    truth = np.quantile(seen, QS)
    assert estimate(BOUNDS, counts, sums, QS) == pytest.approx(truth, rel=1e-9)
    if max(seen) <= 5:
        taken = read([fit(BOUNDS, counts, sums)], QS)
        for quantiles in (taken.values, taken.lowest, taken.highest):
            assert quantiles == pytest.approx(truth, rel=1e-6, abs=1e-7)
        assert not taken.wide.any()


@pytest.mark.parametrize(("intervals", "tolerance"), [(5, 0.02), (10, 0.002)])
def test_one_value_everywhere(intervals: int, tolerance: float):
    """A constant is found to two per cent in five intervals, to two per mille in ten."""
    counts, sums = scraped([[0.73] * (8 + index % 3) for index in range(intervals)])
    quantiles = estimate(BOUNDS, counts, sums, np.arange(1, 100) / 100)
    assert quantiles == pytest.approx(np.full(99, 0.73), rel=tolerance)


def test_everything_beyond_the_last_bound():
    """Sums give mean and spread of what no bucket separates."""
    random = np.random.default_rng(3)
    seen = random.gamma(9, 3.0, 4000) + 5
    counts, sums = scraped(np.split(seen, 400))
    assert (counts[:, -1] > 0).any()
    quantiles = estimate(BOUNDS, counts, sums, [0.1, 0.5, 0.9])
    assert quantiles == pytest.approx(np.quantile(seen, [0.1, 0.5, 0.9]), rel=0.05)


def test_a_first_bound_of_zero_holds_zeros():
    """A bucket from 0 to 0 has no width; its observations are zeros."""
    counts, sums = scraped([[0.0] * 30 + [0.7] * 10] * 20, [0.0, 1.0, INF])
    quantiles = estimate([0.0, 1.0, INF], counts, sums, [0.0, 0.5, 0.7, 0.9])
    assert quantiles == pytest.approx([0, 0, 0, 0.7], rel=0.05, abs=1e-6)


def test_negative_observations():
    """A negative first bound opens the lowest bucket below."""
    seen = np.linspace(-9, 9, 300)
    bounds = [-5.0, 0.0, 5.0, INF]
    counts, sums = scraped(np.random.default_rng(1).permutation(seen).reshape(-1, 1), bounds)
    assert estimate(bounds, counts, sums, QS) == pytest.approx(np.quantile(seen, QS), rel=1e-9)


def test_without_sums_the_buckets_answer():
    """One scrape, or no sum: neighbouring buckets suggest where in a bucket values lie, exactly so for level ones."""
    quantiles = estimate([1.0, 2.0, 3.0, 4.0, INF], [[100, 100, 100, 100, 0]], [np.nan], [0.25, 0.5])
    assert quantiles == pytest.approx([1, 2], abs=0.02)
    assert quantiles == pytest.approx(estimate([1.0, 2.0, 3.0, 4.0, INF], [[100, 100, 100, 100, 0]], [], [0.25, 0.5]))


def test_rows_that_say_nothing_are_ignored():
    """A page read twice and a row with a negative, NaN or infinite count (a restart) change nothing."""
    counts, sums = scraped(np.random.default_rng(5).lognormal(-0.5, 0.8, (80, 3)).tolist())
    silent = np.array([[0, 0, 0, 0, 0], [1, -1, 0, 0, 0], [1, np.nan, 0, 0, 0], [INF, 0, 0, 0, 0]], dtype=np.float64)
    place = np.array([10, 20, 30, 40])
    more, added = np.insert(counts, place, silent, axis=0), np.insert(sums, place, [0.0, 1.0, 1.0, 1.0])
    assert estimate(BOUNDS, counts, sums, QS).tolist() == estimate(BOUNDS, more, added, QS).tolist()


def test_a_torn_page_is_joined_with_the_next():
    """A sum that is seen one scrape before its bucket: both intervals together are as sound as any."""
    counts, sums = scraped([[0.2], [0.3, 4.0], [0.4], [0.9]])
    torn = counts.copy()
    torn[1, 3], torn[2, 3] = 0, 1
    joined = np.vstack((counts[:1], counts[1] + counts[2], counts[3:]))
    whole = estimate(BOUNDS, joined, [sums[0], sums[1] + sums[2], sums[3]], QS)
    assert estimate(BOUNDS, torn, sums, QS) == pytest.approx(whole, rel=1e-9)


def test_an_absurd_sum_is_unknown():
    """A sum that its buckets cannot hold says nothing, and does not excuse others."""
    counts, sums = scraped(np.random.default_rng(6).uniform(0.01, 4.9, (100, 2)).tolist())
    sums[[20, 50, 99]] = 1e300, -1e300, INF
    unknown = np.where(np.abs(sums) > 1e9, np.nan, sums)
    # An impossible row is joined with the next before it is given up, hence not quite the same.
    quantiles = estimate(BOUNDS, counts, sums, [0.1, 0.5, 0.9])
    assert quantiles == pytest.approx(estimate(BOUNDS, counts, unknown, [0.1, 0.5, 0.9]), rel=0.05)


def test_fits_of_one_histogram_read_together():
    """Two targets with other buckets are read as one: where each says all, so do both."""
    first_values, two = [0.2, 0.7, 3.0], [0.05, 0.6, 7.0, 0.61]
    first = fit(BOUNDS, *scraped([[value] for value in first_values]))
    second = fit([0.3, 2.0, INF], *scraped([[value] for value in two], [0.3, 2.0, INF]))
    truth = np.quantile(first_values + two, QS)
    assert read([first, second], QS).values == pytest.approx(truth, rel=1e-6)
    everything = read_rows([first, second], [slice(None), slice(None)], QS)
    assert everything == pytest.approx(truth, rel=1e-9)


def test_a_union_with_nothing_is_the_fit_itself():
    """A target without observations adds nothing; no target, or none with observations, gives no answer."""
    some = fit(BOUNDS, *scraped([[0.2, 0.7], [3.0, 4.0, 0.3]]))
    none = fit(BOUNDS, np.zeros((3, 5)), np.zeros(3))
    assert read([some], QS).values.tolist() == read([some, none], QS).values.tolist()
    assert np.isnan(read([none], QS).values).all()
    assert np.isnan(read([], QS).highest).all()
    assert np.isnan(read_rows([], [], QS)).all()


def test_slices_are_read_by_their_intervals():
    """A slice is given by indices of what was fitted, rows that were dropped included; all rows give the estimate."""
    rows = [[0.2], [], [0.7], [3.0], [0.3], [], [6.0]]
    counts, sums = scraped(rows)
    fitted = fit(BOUNDS, counts, sums)
    assert read_rows([fitted], [slice(0, 3)], [0, 1]) == pytest.approx([0.2, 0.7])
    assert read_rows([fitted], [np.array([3, 4, 5])], [0, 1]) == pytest.approx([0.3, 3.0])
    assert np.isnan(read_rows([fitted], [slice(5, 6)], [0.5])).all()
    assert estimate(BOUNDS, counts, sums, QS).tolist() == read_rows([fitted], [slice(None)], QS).tolist()


def test_a_ramp_is_fitted_in_segments():
    """A load that grows moves the means inside the buckets: each part of the run has its own."""
    random = np.random.default_rng(9)
    level = np.linspace(0.15, 4.0, 400)[:, None]
    seen = level * random.uniform(0.9, 1.1, (400, 5))
    counts, sums = scraped(seen.tolist())
    fitted = fit(BOUNDS, counts, sums)
    assert len(fitted.mean) > 1
    quantiles = read_rows([fitted], [slice(0, 100)], [0.1, 0.5, 0.9])
    assert quantiles == pytest.approx(np.quantile(seen[:100], [0.1, 0.5, 0.9]), rel=0.08)


@given(st.lists(values, min_size=1, max_size=12), st.lists(st.floats(0, 1), min_size=1, max_size=8))
@settings(max_examples=60)
def test_the_range_cannot_be_wrong(rows: list[list[float]], qs: list[float]):
    """Whatever was observed, numpy's quantile lies between lowest and highest, and these in its buckets."""
    counts, sums = scraped(rows)
    taken = read([fit(BOUNDS, counts, sums)], qs)
    truth = np.quantile([value for row in rows for value in row], qs)
    slack = 1e-6 * truth
    assert (taken.lowest <= truth + slack).all()
    assert (truth - slack <= taken.highest).all()
    ends = (np.quantile([value for row in rows for value in row], qs, method=side) for side in ("lower", "higher"))
    first, last = (np.searchsorted(BOUNDS, end) for end in ends)
    assert (np.array([0.0, *BOUNDS])[first] <= taken.lowest + slack).all()
    assert (taken.highest <= np.array(BOUNDS)[last] + slack).all()


def test_a_queue_that_is_nearly_always_empty_is_wide():
    """Where the interval is wider than the value, buckets and sums do not determine the value."""
    random = np.random.default_rng(8)
    seen = np.where(random.random((300, 40)) < 0.95, 1e-6, random.uniform(0.05, 0.09, (300, 40)))
    taken = read([fit(BOUNDS, *scraped(seen.tolist()))], [0.5, 0.99])
    assert taken.wide[0]


def test_what_rounds_to_the_bound_is_the_bound():
    """A queue that is nearly always empty waits 0 at its low percentiles, not some power of ten below every clock."""
    random = np.random.default_rng(8)
    seen = np.where(random.random((300, 1)) < 0.9, 1e-6, random.uniform(0.01, 0.09, (300, 1))) * np.ones((300, 40))
    quantiles = estimate(BOUNDS, *scraped(seen.tolist()), [0.01, 0.1])
    assert ((quantiles == 0) | (quantiles >= 1e-8)).all()


layouts = st.sampled_from(
    [BOUNDS, [INF], [1.0], [1.0, 2.0], [0.0, INF], [0.0, 1.0, INF], [-1.0, 1.0, INF], [-2.0, -1.0, INF],
     [1e-9, 2e-9, 5e-9, INF], [1e300, INF], [*np.geomspace(1e-3, 1e3, 20).tolist(), INF]]
)  # fmt: skip
absurd = st.sampled_from([0.0, 1.0, 2.0, 3.5, 40.0, 1e9, 1e15, 1e300, 1e-300, -1.0, np.nan, INF, -INF])


@st.composite
def hostile(draw: st.DrawFn) -> tuple[list[float], Float64, Float64]:
    """Draw bounds, counts and sums as no engine should show them."""
    bounds = draw(layouts)
    rows = draw(st.integers(0, 12))
    sound = st.integers(0, 50).map(float)
    elements = draw(st.sampled_from([sound, absurd, st.floats(0, 9)]))
    counts = draw(st.lists(elements, min_size=rows * len(bounds), max_size=rows * len(bounds)))
    sums = draw(st.lists(st.one_of(st.floats(0, 99), st.floats(), absurd), min_size=rows, max_size=rows))
    return bounds, np.array(counts).reshape(rows, len(bounds)), np.array(sums)


@given(hostile())
@settings(max_examples=100)
def test_no_page_breaks_the_order(page: tuple[list[float], Float64, Float64]):
    """Nothing raises or warns; quantiles never decrease and lie between lowest and highest and in their interval."""
    bounds, counts, sums = page
    fitted = [fit(bounds, counts, sums)]
    taken = read(fitted, QS)
    assert np.isnan(taken.lowest).tolist() == [not sound(counts, len(bounds))[0].any()] * len(QS)
    for quantiles in (taken.values, estimate(bounds, counts, sums, QS), read_rows(fitted, [slice(0, 6)], QS)):
        assert (np.diff(quantiles[~np.isnan(quantiles)]) >= 0).all()
    known = ~np.isnan(taken.values)
    for lower, upper in (
        (taken.lowest, taken.values),
        (taken.values, taken.highest),
        (taken.low, taken.values),
        (taken.values, taken.high),
    ):
        assert (lower[known] <= upper[known]).all()
    assert taken.wide.shape == QS.shape


@given(hostile())
@settings(max_examples=60)
def test_the_unit_does_not_matter(page: tuple[list[float], Float64, Float64]):
    """Nanoseconds give the quantiles of seconds, to the digits that the change of unit costs."""
    _, counts, sums = page
    counts = np.where(np.isfinite(counts) & (counts < 1e6), counts, 0.0)[:, :1]
    sums = np.where(np.abs(sums) < 1e6, sums, np.nan)
    seconds = estimate([8.0], counts, sums, QS)
    ticks = estimate([8.0 * 2**-30], counts, sums * 2**-30, QS)
    assert ticks * 2**30 == pytest.approx(seconds, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("q", [-0.1, 1.1, np.nan, INF])
def test_no_such_quantile_is_nan(q: float):
    """Outside 0 to 1 there is no quantile; what stands beside it is answered."""
    counts, sums = scraped([[0.2], [0.7]])
    quantiles = estimate(BOUNDS, counts, sums, [q, 0.0])
    assert np.isnan(quantiles[0])
    assert pytest.approx(0.2) == quantiles[1]
    assert np.isnan(read([fit(BOUNDS, counts, sums)], [q]).low).all()


@pytest.mark.parametrize(
    ("bounds", "counts", "sums"),
    [
        ([1, INF], [[0, 0]], [0.0]),
        ([1, INF], np.zeros((0, 2)), []),
        ([1, INF], [[-1, 1], [np.nan, 1], [INF, 1]], [1.0, 1.0, 1.0]),
        ([INF], [[3]], [np.nan]),
        ([], np.zeros((0, 0)), []),
    ],
)
def test_nothing_known_is_nan(bounds: list[float], counts: list[list[float]], sums: list[float]):
    """No observation, no sound row, or nothing that shows how large the observations are: NaN."""
    assert np.isnan(estimate(bounds, counts, sums, QS)).all()
