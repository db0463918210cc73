"""Two systems compared by several runs of each: what is shown, and what runs without much to say get."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sidelight.methodology.compare import Comparison, holm, of_family, paired, unpaired

Compare = Callable[[list[float], list[float]], Comparison]
RATIOS = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=3, max_size=12)


@given(RATIOS)
def test_pairs_are_compared_by_students_t_of_log_ratios(pairs: list[tuple[float, float]]):
    """As SciPy does."""
    a, b = map(np.array, zip(*pairs, strict=True))
    comparison = paired(a, b)
    if np.std(np.log(b / a)) < 1e-9:
        return
    peer = stats.ttest_rel(np.log(b), np.log(a))
    low, high = peer.confidence_interval(0.95)
    assert comparison.p == pytest.approx(peer.pvalue, rel=1e-6, abs=1e-12)
    assert comparison.ratio == pytest.approx(stats.gmean(b / a))
    assert comparison.ci95 == pytest.approx((math.exp(low), math.exp(high)))


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=9), st.lists(st.floats(0.1, 10), min_size=3, max_size=9))
def test_runs_that_are_not_paired_are_compared_by_welch(a: list[float], b: list[float]):
    """As SciPy does, also of groups of unequal size."""
    comparison = unpaired(a, b)
    if min(np.std(np.log(a)), np.std(np.log(b))) < 1e-6:
        return
    peer = stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    low, high = peer.confidence_interval(0.95)
    assert comparison.p == pytest.approx(peer.pvalue, rel=1e-6, abs=1e-12)
    assert comparison.ci95 == pytest.approx((math.exp(low), math.exp(high)))
    assert comparison.pairs == min(len(a), len(b))


@given(RATIOS, st.floats(0.01, 0.5))
def test_equivalent_is_what_two_one_sided_tests_show(pairs: list[tuple[float, float]], margin: float):
    """Each at 5 %: the 90 % interval lies within the margin."""
    a, b = map(np.array, zip(*pairs, strict=True))
    logs = np.log(b / a)
    if np.std(logs) < 1e-9:
        return
    limit = math.log1p(margin)
    largest = max(
        stats.ttest_1samp(logs, limit, alternative="less").pvalue,
        stats.ttest_1samp(logs, -limit, alternative="greater").pvalue,
    )
    if abs(largest - 0.05) > 1e-9:
        assert (paired(a, b, margin).verdict == "equivalent") == (largest < 0.05)


@given(RATIOS)
def test_exchanging_the_systems_exchanges_the_verdict(pairs: list[tuple[float, float]]):
    """What is better one way is worse the other way, by the inverse ratio; nor does the order of pairs matter."""
    a, b = zip(*pairs, strict=True)
    once, other, turned = paired(a, b), paired(b, a), paired(a[::-1], b[::-1])
    exchanged = {"better": "worse", "worse": "better"}
    assert other.verdict == exchanged.get(str(once.verdict), once.verdict)
    assert turned.verdict == once.verdict
    assert other.ratio == pytest.approx(1 / (once.ratio or 0))
    assert paired(a, b, lower_is_better=False).verdict == exchanged.get(str(once.verdict), once.verdict)


SLOWER = (1.0, 1.3, 0.9, 1.1, 1.2)


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.10, 1.11, 1.09, 1.10, 1.12), "worse"),
        ((0.90, 0.91, 0.89, 0.90, 0.88), "better"),
        ((1.01, 0.99, 1.00, 1.02, 0.99), "equivalent"),
        ((1.02, 1.03, 1.02, 1.03, 1.02), "equivalent"),
        ((0.80, 1.20, 1.10, 0.90, 1.05), "inconclusive"),
    ],
)
def test_a_verdict_is_one_of_four(factors: tuple[float, ...], verdict: str):
    """Five pairs that differ much among each other; what surely differs by less than the margin is equivalent."""
    comparison = paired(SLOWER, np.multiply(SLOWER, factors))
    assert comparison.verdict == verdict
    assert (comparison.more_pairs == 0) == (verdict != "inconclusive")


def test_an_inconclusive_comparison_says_how_many_more_pairs_would_tell():
    """With so many of the same spread, a true difference of the margin is found in 80 %."""
    random = np.random.default_rng(3)
    few = paired(np.ones(5), np.exp(np.array([-0.2, -0.1, 0.0, 0.1, 0.2])))
    assert few.more_pairs is not None
    sd, size = math.sqrt(0.025), 5 + few.more_pairs
    shown = [
        (paired(np.ones(size), np.exp(random.normal(math.log(1.05), sd, size)), margin=0.0).p or 0) < 0.05
        for _ in range(300)
    ]
    assert 0.73 <= np.mean(shown) <= 0.87
    assert few.reason.startswith("B is 0 % above A (95 % interval: 18 % below to 22 % above it): neither a difference")


def test_equals_rarely_differ():
    """Of systems that are the same, in 5 % of the comparisons."""
    random = np.random.default_rng(1)
    false = {"paired": 0, "unpaired": 0}
    for _ in range(1000):
        a, b = random.lognormal(0, 0.2, (2, 4))
        false["paired"] += paired(a, b).verdict in {"better", "worse"}
        false["unpaired"] += unpaired(a, b).verdict in {"better", "worse"}
    assert 30 <= false["paired"] <= 70
    assert 20 <= false["unpaired"] <= 70


@pytest.mark.parametrize("compare", [paired, unpaired])
@pytest.mark.parametrize("count", [1, 2])
def test_two_runs_make_no_claim(compare: Compare, count: int):
    """However far apart they are; it is said how many are missing."""
    comparison = compare([1.0] * count, [9.0] * count)
    assert (comparison.verdict, comparison.ci95, comparison.p) == ("inconclusive", None, None)
    assert comparison.more_pairs == 3 - count
    counted = {1: ("1 pair:", "1 run of each:"), 2: ("2 pairs:", "2 runs of each:")}[count]
    assert comparison.reason.startswith(counted)
    assert comparison.reason.endswith("a claim needs at least 3")
    assert comparison.ratio == pytest.approx(9)


@pytest.mark.parametrize("compare", [paired, unpaired])
def test_a_side_that_failed_in_all_runs_has_no_verdict(compare: Compare):
    """Nor have runs whose number is 0: there is no ratio."""
    for b in ([np.nan] * 3, [0.0] * 3, [np.inf] * 3, []):
        comparison = compare([1.0, 2.0, 3.0][: len(b) or 3] if b else [], b)
        assert (comparison.verdict, comparison.ratio, comparison.p) == (None, None, None)
        assert "there is nothing to compare" in comparison.reason


def test_a_pair_with_a_failed_run_is_left_out():
    """On either side."""
    comparison = paired([1.0, 2.0, np.nan, 4.0, 5.0], [1.1, 2.2, 3.3, np.inf, 5.5])
    assert comparison.pairs == 3
    assert comparison.verdict == "worse"
    assert unpaired([1.0, 1.1, np.nan, 1.2, 1.0], [1.0, 1.1, 1.0, 0.0]).pairs == 3
    assert paired([1.0, np.nan], [np.nan, 1.0]).verdict == "inconclusive"


def test_runs_without_spread_say_what_they_say():
    """The same numbers twice are equivalent; one tenth more in each is worse, and both are doubted."""
    same, slower = paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), paired([1.0, 2.0, 3.0], [1.1, 2.2, 3.3])
    assert (same.verdict, same.p, same.ci95) == ("equivalent", 1.0, (1.0, 1.0))
    assert (slower.verdict, slower.p) == ("worse", 0.0)
    assert slower.reason == "B is 10 % above A in all of 3 pairs, without any spread: are these different runs?"
    assert unpaired([1.0] * 3, [1.0] * 3).verdict == "equivalent"


def test_what_differs_without_bounds_has_no_number_of_pairs():
    """A margin that is nothing is never shown, and ratios beyond all numbers are still numbers."""
    assert paired([1.0, 2.0, 3.0], [1.1, 1.9, 3.0], margin=0.0).more_pairs is None
    wild = paired([1e-300, 1e300, 1.0], [1e300, 1e-300, 1.0])
    assert wild.verdict == "inconclusive"
    assert wild.ci95 is not None
    assert all(map(math.isfinite, wild.ci95))


@pytest.mark.parametrize(
    ("a", "b", "margin", "level"), [([1.0], [1.0, 2.0], 0.05, 0.95), ([1], [1], -0.1, 0.95), ([1], [1], 0.05, 1.0)]
)
def test_what_cannot_be_compared_is_refused(a: list[float], b: list[float], margin: float, level: float):
    """Pairs of unequal size, a margin below 0, a level that is none."""
    with pytest.raises(ValueError, match=r"compare runs that are not paired|a margin of"):
        paired(a, b, margin, level)


def test_holm_is_as_published():
    """The least p times their number, the next times one less, never below the one before, at most 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_and_never_reorders(p_values: list[float]):
    """An adjusted value is at least what it was, and the least of them so many times that."""
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    assert all(
        q <= max(len(p_values) * p, 0) or q == 1 for p, q in zip(p_values, adjusted, strict=True) if p == min(p_values)
    )
    order = np.argsort(p_values, kind="stable")
    assert list(np.array(adjusted)[order]) == sorted(adjusted)


def test_a_family_is_judged_together():
    """A difference that several metrics make likely by chance is none; what could not be compared is not counted."""
    random = np.random.default_rng(4)
    pairs = {f"m{number}": random.normal(0, 0.1, 5) for number in range(6)}
    family: dict[str, Comparison] = {name: paired(np.ones(5), np.exp(logs)) for name, logs in pairs.items()}
    family["weak"] = paired(np.ones(5), np.exp(0.1 + 0.07 * np.array([-1, -0.5, 0, 0.5, 1])))
    family["strong"] = paired(np.ones(5), np.exp(0.3 + 0.01 * np.array([-1, -0.5, 0, 0.5, 1])))
    family["failed"] = paired([np.nan] * 5, np.ones(5))
    assert (family["weak"].verdict, family["strong"].verdict) == ("worse", "worse")
    judged = of_family(family)
    assert (judged["weak"].verdict, judged["strong"].verdict) == ("inconclusive", "worse")
    assert judged["weak"].reason.endswith("beside 7 other metrics that may be chance")
    assert judged["strong"].p == pytest.approx(8 * (family["strong"].p or 0))
    assert judged["failed"] == family["failed"]
