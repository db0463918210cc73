from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from correlator.statistics.decompose import FinishSums, decompose

SECOND = 10**9


def sums(at_s: list[float], count: list[float], queue_s: list[float], prefill_s: list[float]) -> FinishSums:
    return FinishSums(
        at_ns=np.array([int(at * SECOND) for at in at_s], dtype=np.int64),
        count=np.array(count, dtype=np.float64),
        queue_s=np.array(queue_s, dtype=np.float64),
        prefill_s=np.array(prefill_s, dtype=np.float64),
    )


def stamps(*at_s: float) -> np.ndarray:
    return np.array([int(at * SECOND) for at in at_s], dtype=np.int64)


def test_the_mean_ttft_is_queue_plus_prefill_plus_the_rest():
    """Two requests waited 200 ms each; the server says 300 ms of queue and 60 ms of prefill between them."""
    server = sums([0, 1, 2], [10, 11, 12], [5.0, 5.1, 5.3], [1.0, 1.02, 1.06])

    whole = decompose(stamps(0.5, 1.5), np.array([200.0, 200.0]), [server], start_ns=0, end_ns=2 * SECOND)

    assert (200.0, 2, 2, 1.0) == (whole.ttft_ms, whole.client_requests, whole.server_requests, whole.coverage)
    assert whole.queue_ms == pytest.approx(150.0, abs=1e-5)
    assert whole.prefill_ms == pytest.approx(30.0, abs=1e-5)
    assert whole.other_ms == pytest.approx(20.0, abs=1e-5)


def test_what_settles_after_the_window_belongs_to_requests_that_ended_in_it():
    server = sums([0, 1, 2], [0, 0, 1], [0.0, 0.0, 0.05], [0.0, 0.0, 0.01])

    whole = decompose(stamps(0.9), np.array([100.0]), [server], start_ns=0, end_ns=SECOND)

    assert 1 == whole.server_requests
    assert whole.queue_ms == pytest.approx(50.0, abs=1e-5)


def test_a_request_that_ended_after_the_last_scrape_is_in_no_sum():
    """The scraper died at 2 s: what ended later is left out on the client's side too."""
    server = sums([0, 1, 2], [0, 1, 2], [0.0, 0.1, 0.2], [0.0, 0.0, 0.0])
    longer = sums([0, 1, 3], [0, 0, 0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])

    whole = decompose(
        stamps(0.5, 1.5, 2.5, 9.5),
        np.array([150.0, 150.0, 900.0, 900.0]),
        [server, longer],
        start_ns=0,
        end_ns=10 * SECOND,
    )

    assert (150.0, 2, 2, 1.0) == (whole.ttft_ms, whole.client_requests, whole.server_requests, whole.coverage)
    assert whole.other_ms == pytest.approx(50.0, abs=1e-5)


def test_a_request_that_ended_before_a_late_first_scrape_is_in_no_sum():
    """Without a scrape before the window the first one is the reference, on the client's side too."""
    server = sums([1, 2, 3], [5, 6, 7], [0.0, 0.1, 0.2], [0.0, 0.0, 0.0])

    whole = decompose(
        stamps(0.5, 1.0, 1.5, 2.5), np.array([900.0, 900.0, 150.0, 150.0]), [server], start_ns=0, end_ns=3 * SECOND
    )

    assert (150.0, 2, 2) == (whole.ttft_ms, whole.client_requests, whole.server_requests)


def test_a_request_at_the_very_start_counts_where_the_reference_is_no_later():
    server = sums([0, 1], [0, 1], [0.0, 0.1], [0.0, 0.0])

    whole = decompose(stamps(0), np.array([150.0]), [server], start_ns=0, end_ns=SECOND)

    assert 1 == whole.client_requests


@pytest.mark.parametrize("value", [1e308, np.inf, np.nan])
def test_sums_that_cannot_be_calculated_with_are_a_reason(value: float):
    one = sums([0, 1], [0, value], [0, value], [0, value])

    whole = decompose(stamps(0.5), np.array([1.0]), [one, one], start_ns=0, end_ns=SECOND)

    assert (None, "the server's sums are too large to calculate with") == (whole.other_ms, whole.missing)


def test_several_servers_add_up():
    one = sums([0, 1], [0, 1], [0.0, 0.1], [0.0, 0.02])
    other = sums([0, 1], [7, 8], [3.0, 3.3], [1.0, 1.04])

    whole = decompose(stamps(0.5, 0.6), np.array([300.0, 500.0]), [one, other], start_ns=0, end_ns=SECOND)

    assert 2 == whole.server_requests
    assert whole.queue_ms == pytest.approx(200.0, abs=1e-5)


@pytest.mark.parametrize(
    ("servers", "ttft_ms", "reason"),
    [
        ([], [1.0], "no server offers queue and prefill times"),
        ([sums([0, 1], [0, 1], [0, 1], [0, 1])], [np.nan], "no request with a first token ended here"),
        ([sums([0, 1], [4, 4], [1, 1], [1, 1])], [1.0], "the server observed no finished request here"),
    ],
)
def test_what_cannot_be_known_is_missing_with_a_reason(servers: list[FinishSums], ttft_ms: list[float], reason: str):
    whole = decompose(stamps(0.5), np.array(ttft_ms), servers, start_ns=0, end_ns=SECOND)

    assert (None, None, None, reason) == (whole.queue_ms, whole.prefill_ms, whole.other_ms, whole.missing)


@given(
    ttft_ms=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30),
    queue_s=st.floats(0, 1e3),
    prefill_s=st.floats(0, 1e3),
)
def test_the_parts_sum_to_the_whole(ttft_ms: list[float], queue_s: float, prefill_s: float):
    count = len(ttft_ms)
    server = sums([0, 1], [0, count], [0, queue_s], [0, prefill_s])

    whole = decompose(stamps(*[0.5] * count), np.array(ttft_ms), [server], start_ns=0, end_ns=SECOND)

    assert whole.ttft_ms == pytest.approx(whole.queue_ms + whole.prefill_ms + whole.other_ms, rel=1e-9, abs=1e-6)


def test_why_there_are_no_server_sums_is_what_the_caller_knows():
    """It stands in place of the general reason."""
    why = "x is observed at another moment"

    assert why == decompose(stamps(0.5), np.array([1.0]), [], start_ns=0, end_ns=SECOND, no_server=why).missing
