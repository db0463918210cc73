"""Which part the TTFT varies by and its tail is made of: shares that add up, thresholds, and what stays unknown."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from autoregressive import autoregressive
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.statistics.bootstrap import block_count, block_length
from sidelight.correlator.statistics.tail import PARTS, TailShares, Threshold, tail_shares
from sidelight.rundir.stats import Missing


def no_threshold(reason: str) -> Threshold:
    return Threshold(waiting=None, requests=0, fewest=None, missing=reason)


UNSEEN = Missing("nobody looked")
Floats = np.ndarray


def columns(**given: Any) -> Parts:
    """Parts of n requests: 100 ms prefill, no queue, and 1 ms of network, from spans, where nothing else is given."""
    size = len(next(array for array in given.values() if isinstance(array, np.ndarray)))
    usual: dict[str, Any] = {
        "network_ms": 1.0,
        "gateway_ms": np.nan,
        "queue_ms": 0.0,
        "prefill_ms": 100.0,
        "error_ms": 0.0,
        "source": "trace",
        "merged": "",
        "quality": "exact",
    } | given
    values = {
        name: np.array(np.broadcast_to(value, size), dtype=np.object_ if isinstance(value, str) else None)
        for name, value in usual.items()
    }
    parts = (values[name] for name in ("network_ms", "gateway_ms", "queue_ms", "prefill_ms"))
    values.setdefault("ttft_ms", np.sum([np.nan_to_num(part) for part in parts], axis=0) + 2.0)
    for field in fields(Parts):
        name = field.name.removesuffix("_s")
        column = values.get(
            field.name, values.get(f"{name}_ms", np.full(size, "" if field.type == "Texts" else np.nan))
        )
        values[field.name] = column / 1e3 if field.name.endswith("_s") else column
    return Parts(**{field.name: values[field.name] for field in fields(Parts)})


def shares_of(parts: Parts, waiting: Floats | Missing = UNSEEN) -> TailShares:
    shares = tail_shares(parts, np.arange(len(parts)), waiting)
    assert isinstance(shares, TailShares)
    return shares


def exponential(seed: int, size: int, mean: float = 100.0) -> Floats:
    return np.random.default_rng(seed).exponential(mean, size)


@example(np.where(np.arange(80).reshape(20, 4) == 0, 1.7e-13, 0.0), 0.0)
@given(
    arrays(np.float64, st.tuples(st.integers(20, 60), st.just(4)), elements=st.floats(0, 1e5)),
    st.floats(0, 0.3),
)
def test_shares_add_up_to_the_whole(table: Floats, unknown_ratio: float):
    """Of the variance, of the mean, and of each tail, whichever parts are known."""
    network, gateway, queue, prefill = table.T.copy()
    gateway[: int(unknown_ratio * len(gateway))] = np.nan
    network[: int(unknown_ratio * len(gateway))] = np.nan
    result = tail_shares(
        columns(network_ms=network, gateway_ms=gateway, queue_ms=queue, prefill_ms=prefill),
        np.arange(len(table)),
        UNSEEN,
    )
    if isinstance(result, Missing):
        assert "the TTFT never varied" == result.reason
        return
    for shares in (result.variance_share, result.mean_share, *(tail.share for tail in result.tails.values())):
        assert list(PARTS) == list(shares)
        assert 1.0 == pytest.approx(sum(share for share in shares.values() if share is not None), abs=1e-6)


def test_a_share_is_the_textbooks_covariance():
    queue, prefill = exponential(1, 300), exponential(2, 300, 30)
    shares = shares_of(columns(queue_ms=queue, prefill_ms=prefill))
    ttft = queue + prefill

    assert np.cov(queue, ttft)[0, 1] / np.var(ttft, ddof=1) == pytest.approx(shares.variance_share["queue"])
    assert np.cov(prefill, ttft)[0, 1] / np.var(ttft, ddof=1) == pytest.approx(shares.variance_share["prefill"])
    assert 0.0 == pytest.approx(shares.variance_share["network"])


def test_a_part_that_never_varies_has_no_share_of_the_variance_but_one_of_the_mean():
    shares = shares_of(columns(queue_ms=exponential(1, 300)))

    assert (0.0, 1.0) == pytest.approx((shares.variance_share["prefill"], shares.variance_share["queue"]))
    assert 0.49 == pytest.approx(shares.mean_share["prefill"], abs=0.03)


def test_the_order_of_the_rows_does_not_matter():
    """Blocks are of requests that were submitted one after the other."""
    parts = {"queue_ms": np.cumsum(exponential(1, 200)), "prefill_ms": exponential(2, 200)}
    mixed = np.random.default_rng(3).permutation(200)
    sorted_found = tail_shares(columns(**parts), np.arange(200), UNSEEN)
    mixed_found = tail_shares(columns(**{name: column[mixed] for name, column in parts.items()}), mixed, UNSEEN)

    assert sorted_found == mixed_found


@pytest.mark.parametrize("phi", [0.0, 0.9])
def test_intervals_cover_the_share(phi: float):
    """50 runs of 1,000 requests, two thirds of the variance the queue's: inside in nearly nine of ten."""
    truth, covered = 1 / 1.5, []
    for seed in range(50):
        random = np.random.default_rng(np.random.SeedSequence(seed))
        queue = autoregressive(random, 1000, phi)
        shares = shares_of(columns(queue_ms=10 + queue, prefill_ms=10 + math.sqrt(0.5) * random.normal(size=1000)))
        interval = shares.ci95["queue"]
        covered.append(interval[0] <= truth <= interval[1])

    assert np.mean(covered) >= 0.86


def test_intervals_cover_the_share_of_a_queue_with_a_long_tail():
    """300 runs of 300 requests, 10 to 13 blocks, a lognormal queue whose variance few of them make: in 84 of 100."""
    covered = []
    for sigma, seed in itertools.product((0.7, 1.0, 1.3), range(100)):
        variances = [(math.exp(spread**2) - 1) * math.exp(spread**2) for spread in (sigma, 0.6)]
        random = np.random.default_rng(np.random.SeedSequence(seed))
        queue = np.exp(sigma * autoregressive(random, 300, 0.9))
        shares = shares_of(columns(queue_ms=queue, prefill_ms=np.exp(0.6 * random.normal(size=300))))
        interval = shares.ci95["queue"]
        covered.append(interval[0] <= variances[0] / sum(variances) <= interval[1])

    assert np.mean(covered) >= 0.84


def test_blocks_are_as_long_as_the_slowest_part_wants_them():
    """A prefill that drifts behind a queue that does not is a fifth of the variance, and is not taken for noise."""
    random = np.random.default_rng(np.random.SeedSequence(4))
    prefill = 10 + autoregressive(random, 2000, 0.97)
    queue = exponential(5, 2000, 2.0)
    shares = shares_of(columns(queue_ms=queue, prefill_ms=prefill))

    assert block_count(2000, block_length(prefill)) == shares.blocks
    assert shares.blocks < block_count(2000, block_length(queue + prefill))


def test_a_part_that_hardly_counts_does_not_lengthen_the_blocks():
    random = np.random.default_rng(np.random.SeedSequence(4))
    shares = shares_of(columns(queue_ms=exponential(5, 2000), prefill_ms=10 + autoregressive(random, 2000, 0.97)))

    assert shares.blocks >= 500


def test_a_gateway_known_for_few_requests_counts_as_network():
    gateway = np.where(np.arange(100) < 50, 5.0, np.nan)
    shares = shares_of(columns(queue_ms=exponential(1, 100), gateway_ms=gateway))

    assert shares.mean_share["gateway"] is None
    assert (1.0 + 2.5) / (1e3 * shares.mean_s) == pytest.approx(shares.mean_share["network"])


def test_a_part_known_for_few_requests_counts_as_other():
    """And the counts say which parts are merged."""
    network = np.where(np.arange(100) < 50, 1.0, np.nan)
    words = np.where(np.arange(100) < 50, "", "network and engine frontend").astype(np.object_)
    shares = shares_of(columns(queue_ms=exponential(1, 100), network_ms=network, merged=words))

    assert shares.variance_share["network"] is None
    assert shares.ci95["network"] is None
    assert (2.0 + 0.5) / (1e3 * shares.mean_s) == pytest.approx(shares.mean_share["other"])
    assert {"network and engine frontend": 50} == shares.merged


def test_requests_without_parts_are_counted():
    source = np.where(np.arange(100) < 40, "none", "trace").astype(np.object_)
    shares = shares_of(columns(queue_ms=exponential(1, 100), source=source))

    assert (60, 100) == (shares.requests, shares.with_ttft)


def test_the_tail_is_set_against_the_middle():
    """Of 1,000 requests 20 queue for a second; those at and above p99 are of these, and differ by it from the rest."""
    queue = np.where(np.arange(1000) % 50 == 0, 1000.0, 0.0) + np.arange(1000) / 1e6
    shares = shares_of(columns(queue_ms=queue))
    tail = shares.tails["p99"]

    assert (10, 10, 0) == (tail.requests, tail.explained, tail.estimated)
    assert 1000 / 1103 == pytest.approx(tail.share["queue"], rel=1e-4)
    assert 1000.0 == pytest.approx(tail.above_median_ms["queue"], rel=1e-4)
    assert 0.0 == pytest.approx(tail.above_median_ms["prefill"])
    assert 0.0 == tail.error_ms


def test_a_tail_without_breakdowns_has_no_shares():
    queue = np.arange(200.0)
    shares = shares_of(columns(queue_ms=queue, source=np.where(queue > 150, "none", "trace").astype(np.object_)))
    tail = shares.tails["p99"]

    assert (2, 0, None) == (tail.requests, tail.explained, tail.mean_ms)
    assert {None} == set(tail.share.values())


def test_what_was_joined_by_time_is_no_estimate():
    """They are the engine's own numbers."""
    quality = np.full(1000, "by_time", dtype=np.object_)
    tail = shares_of(columns(queue_ms=np.arange(1000.0), quality=quality)).tails["p95"]

    assert (50, 0) == (tail.explained, tail.estimated)


def test_estimates_are_counted_with_their_error():
    quality = np.where(np.arange(1000) % 2 == 0, "shared", "exact").astype(np.object_)
    error = np.where(np.arange(1000) % 2 == 0, 4.0, 0.0)
    shares = shares_of(columns(queue_ms=np.arange(1000.0), quality=quality, error_ms=error))

    assert {"shared": 500, "exact": 500} == shares.quality
    assert (50, 25, pytest.approx(2.0, rel=1e-12)) == (
        shares.tails["p95"].explained,
        shares.tails["p95"].estimated,
        shares.tails["p95"].error_ms,
    )


WAITING = np.repeat(np.arange(10.0), 10)


@pytest.mark.parametrize(
    ("queue", "waiting", "expected"),
    [
        (np.where(WAITING > 3, 500.0, 5.0), WAITING, Threshold(waiting=4.0, requests=60, fewest=0.0, below=40)),
        (np.full(100, 5.0), WAITING, Threshold(waiting=None, requests=0, fewest=0.0)),
        (np.full(100, 500.0), WAITING, Threshold(waiting=0.0, requests=100, fewest=0.0)),
        (np.where(WAITING == 4, 500.0, 5.0), WAITING, Threshold(waiting=None, requests=0, fewest=0.0)),
        (
            np.where((WAITING > 3) & (WAITING != 6), 500.0, 5.0),
            WAITING,
            no_threshold(
                "of 70 requests before which the last scrape showed fewer than 7 waiting, 20 queued for most of their "
                "TTFT"
            ),
        ),
        (
            np.where(WAITING > 3, 500.0, 5.0),
            np.where(WAITING > 8, np.nan, WAITING),
            Threshold(waiting=4.0, requests=50, fewest=0.0, below=40),
        ),
    ],
    ids=["from 4 on", "never", "always", "not above", "but for one above", "where known"],
)
def test_queueing_dominates_from_a_length_of_the_queue_on(queue: Floats, waiting: Floats, expected: Threshold):
    """The least number at which the median request queued for more than half of its TTFT, there and at all above.

    But where as many did below it, as with old samples of the queue, the length tells nothing.
    """
    jitter = np.arange(100) / 1e3
    assert expected == shares_of(columns(queue_ms=queue + jitter), waiting).threshold


def test_a_length_that_few_requests_met_counts_with_the_next_below():
    """A single request of the longest queue, which hardly waited, does not undo what forty others say."""
    waiting = np.append(np.repeat(np.arange(5.0), 10), 9.0)
    queue = np.append(np.where(waiting[:-1] > 2, 500.0, 5.0), 5.0) + np.arange(51) / 1e6

    expected = Threshold(waiting=3.0, requests=21, fewest=0.0, below=30)
    assert expected == shares_of(columns(queue_ms=queue), waiting).threshold


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        (UNSEEN, "nobody looked"),
        (np.full(100, np.nan), "only 0 requests with a sample of the queue's length beside"),
    ],
)
def test_a_threshold_that_is_not_known_is_a_reason(waiting: Floats | Missing, reason: str):
    assert no_threshold(reason) == shares_of(columns(queue_ms=exponential(1, 100)), waiting).threshold


def test_a_queue_that_is_not_separated_has_no_threshold():
    shares = shares_of(columns(queue_ms=np.full(100, np.nan), prefill_ms=exponential(1, 100)), np.zeros(100))
    assert no_threshold("the queue is not known apart from the rest") == shares.threshold


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (columns(queue_ms=np.arange(19.0)), "only 19 requests with a TTFT and the parts of it; at least 20 are needed"),
        (
            columns(queue_ms=np.arange(50.0), source="none"),
            "only 0 requests with a TTFT and the parts of it; at least 20 are needed",
        ),
        (columns(queue_ms=np.full(50, 3.0)), "the TTFT never varied"),
    ],
)
def test_no_shares_are_a_reason(parts: Parts, reason: str):
    assert Missing(reason) == tail_shares(parts, np.arange(len(parts)), UNSEEN)
