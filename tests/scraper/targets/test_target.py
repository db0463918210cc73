"""When a target is scraped, and how it is left alone after failures. That it is so is shown in test_worker."""

from __future__ import annotations

import random
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.scraper.targets.target import next_tick, offset_ns, wait_ticks

S = 10**9


def test_next_tick():
    """The next tick is a multiple of the interval, strictly later."""
    assert [20, 20, 40] == [next_tick(now, 20) for now in (1, 19, 20)]


def test_targets_spread_over_the_interval():
    """Two hundred targets of neighbouring addresses leave no twentieth of the interval empty, and crowd none."""
    tenths = [0] * 20
    for number in range(200):
        tenths[offset_ns(f"http://10.0.0.{number}:8000/metrics", S) * 20 // S] += 1
    assert 1 <= min(tenths) <= max(tenths) <= 25


@given(st.text(), st.integers(10**7, 86400 * S))
def test_an_offset_is_within_the_interval(url: str, interval_ns: int):
    """Of any URL, the same each time, in proportion to the interval."""
    offset = offset_ns(url, interval_ns)
    assert 0 <= offset < interval_ns
    assert offset == offset_ns(url, interval_ns)
    assert offset_ns(url, 2 * interval_ns) - 2 * offset in (0, 1)


def test_offsets_are_the_same_in_every_release():
    """A run and its repetition scrape at the same moments of the clock."""
    assert 781_494_579 == offset_ns("http://127.0.0.1:8000/metrics", S)


@pytest.mark.parametrize(
    ("failures", "interval_ns", "least", "most"),
    [
        (0, S, 1, 1),
        (1, S, 1, 1),
        (2, S, 1, 2),
        (3, S, 2, 4),
        (4, S, 4, 8),
        (5, S, 5, 10),
        (10_000, S, 5, 10),
        (10_000, S // 4, 5, 10),
        (10_000, 10 * S, 2, 3),
        (10_000, 60 * S, 1, 1),
    ],
)
def test_waiting_after_failures(failures: int, interval_ns: int, least: int, most: int):
    """First not at all, then twice as long each time, to ten intervals and thirty seconds, with jitter."""
    jitter = random.Random(5)
    seen = {wait_ticks(failures, interval_ns, jitter) for _ in range(500)}
    assert (least, most) == (min(seen), max(seen))


def test_jitter_repeats_with_its_seed_and_differs_between_targets():
    """Targets that failed together do not return together; a run with the same seed does the same."""

    def waits(seed: str) -> list[int]:
        jitter = random.Random(seed)
        return [wait_ticks(9, S, jitter) for _ in range(50)]

    assert waits("0 http://a") == waits("0 http://a") != waits("0 http://b")
    assert pstdev(waits("0 http://a")) > 1
