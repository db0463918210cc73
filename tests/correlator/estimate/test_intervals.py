"""What engines count between two scrapes, off real pages; the means of it; and histograms that cannot give them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series import END, PREFILL, QUEUE, endpoint_of, histogram

from sidelight.correlator.estimate.intervals import Observed, observe
from sidelight.correlator.statistics.server_times import ServerMeans, drained_means, server_means
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window


def scraped(*pages: str, first_s: int = 0) -> EndpointSeries:
    """Return pages a second apart, each with an end."""
    return endpoint_of([page + END for page in pages], url="u", first_s=first_s, took_ns=0)


def page(count: float | str, queue_s: float | str, prefill_s: float | str) -> str:
    """What an engine shows after so many requests."""
    return histogram(QUEUE, count, queue_s) + histogram(PREFILL, count, prefill_s)


def test_an_interval_with_a_restart_is_lost():
    """What the engine counted before it restarted is unknown; counts and sums go on after it."""
    observed = observe(scraped(*(page(n, n / 2, n / 4) for n in (2.0, 4.0, 1.0, 3.0))))

    assert isinstance(observed, Observed)
    assert ([2, 1, 2], [False, True, False]) == (observed.ends.count.tolist(), observed.ends.lost.tolist())
    assert [1.0, 0.5, 1.0] == observed.ends.sums["queue"].tolist()
    assert [0.5, 0.25, 0.5] == observed.ends.sums["prefill"].tolist()


def test_an_interval_in_which_a_label_changes_is_lost():
    """What the engine counted across the change is unknown; counts and sums go on after it."""
    labelled = [(50, "a"), (52, "a"), (55, "b"), (57, "b")]
    pages = [
        histogram(QUEUE, n, n / 2, labels=f'model_name="{name}"')
        + histogram(PREFILL, n, n / 4, labels=f'model_name="{name}"')
        for n, name in labelled
    ]
    observed = observe(scraped(*pages))

    assert isinstance(observed, Observed)
    assert ([2, 0, 2], [False, True, False]) == (observed.ends.count.tolist(), observed.ends.lost.tolist())
    assert [1.0, 0.0, 1.0] == observed.ends.sums["queue"].tolist()


@pytest.mark.parametrize("family", [QUEUE, PREFILL])
@pytest.mark.parametrize("without", ["_sum", "_count"])
def test_a_histogram_without_count_or_sum_is_a_reason(family: str, without: str):
    """Not the page's last column, which is what an index of -1 would read."""
    other = PREFILL if family == QUEUE else QUEUE
    shown = histogram(family, 2, 1, without=without) + histogram(other, 2, 1)

    assert Missing(f"{family} has no {without}") == observe(scraped(shown, shown))


def test_a_histogram_without_buckets_has_its_sums():
    """Means need no buckets."""
    pages = [histogram(QUEUE, n, n / 2, without="_bucket") + histogram(PREFILL, n, n / 4) for n in (0.0, 2.0)]

    observed = observe(scraped(*pages))

    assert isinstance(observed, Observed)
    assert ([2], [1.0], [0.5]) == (
        observed.ends.count.tolist(),
        observed.ends.sums["queue"].tolist(),
        observed.ends.sums["prefill"].tolist(),
    )
    assert {"prefill"} == set(observed.ends.buckets)


@pytest.mark.parametrize("largest", [1e17, 1e308])
def test_sums_beyond_the_largest_number_are_a_reason(largest: float):
    """Restarts add them up to more than a number holds."""
    pages = [page(n, n, n) for n in (0.0, largest, 0.0, largest, 0.0)]

    assert Missing("the server's sums are too large to add up") == observe(scraped(*pages))


@pytest.mark.parametrize("sums", [(90.0, 60.0, 30.0), (0.0, 300.0, 0.5)])
@pytest.mark.parametrize("family", [QUEUE, PREFILL])
def test_a_sum_that_falls_while_its_count_rises_is_a_reason(family: str, sums: tuple[float, ...]):
    """No wait is below 0; one of two processes' clocks may be so by some ms."""
    other = PREFILL if family == QUEUE else QUEUE

    def shown(*family_sums: float) -> Observed | Missing:
        return observe(
            scraped(*(histogram(family, 2 * n, s) + histogram(other, 2 * n, n) for n, s in enumerate(family_sums)))
        )

    refused = shown(*sums)
    assert isinstance(refused, Missing)
    assert family in refused.reason
    assert isinstance(shown(90.0, 89.995, 90.0), Observed)


@pytest.mark.parametrize("each_s", [0.0, "NaN", 0.01, 0.2])
def test_a_sum_that_its_buckets_cannot_hold_is_a_reason(each_s: float | str):
    """A sum that stands still, of half the times, or of twice: all observations lie between 0.05 and 0.1 s."""

    def shown(each_s: float | str) -> Observed | Missing:
        pages = (
            histogram(PREFILL, n, each_s if isinstance(each_s, str) else each_s * n, buckets=[("0.05", 0), ("0.1", n)])
            + histogram(QUEUE, n, 0)
            for n in range(0, 40, 4)
        )
        return observe(scraped(*pages))

    refused = shown(each_s)
    assert isinstance(refused, Missing)
    assert PREFILL in refused.reason
    assert isinstance(shown(0.07), Observed)


def test_histograms_of_another_moment_than_the_end_are_a_reason():
    """SGLang observes a queue time at the first forward pass: in a window, of other requests than ended in it."""
    families = ("sglang:queue_time_seconds", "sglang:per_stage_req_latency_seconds")
    shown = "".join(histogram(family, 2, 1) for family in families).replace(
        "per_stage_req_latency_seconds_bucket{", 'per_stage_req_latency_seconds_bucket{stage="prefill_forward",'
    )
    for part in ("_sum", "_count"):
        shown = shown.replace(f"req_latency_seconds{part}", f'req_latency_seconds{part}{{stage="prefill_forward"}}')

    assert Missing(
        "sglang:queue_time_seconds is observed not when a request ends, but at its first forward: over a window it "
        "speaks of other requests than those that ended"
    ) == observe(scraped(shown))


def means(
    ended_s: list[float], ttft_s: list[float], *endpoints: EndpointSeries, end_s: float, no_server: str = ""
) -> ServerMeans:
    """Average over a window from 0 s on."""
    return server_means(
        np.array([round(at * 1e9) for at in ended_s], dtype=np.int64),
        np.array(ttft_s),
        [observe(endpoint) for endpoint in endpoints],
        Window(start_ns=0, end_ns=round(end_s * 1e9)),
        no_server=no_server,
    )


def test_means_are_those_of_the_requests_that_ended():
    """Two requests waited 200 ms each; the server says 300 ms of queue and 60 ms of prefill between them."""
    server = scraped(page(10, 5.0, 1.0), page(11, 5.1, 1.02), page(12, 5.3, 1.06))

    mean = means([0.5, 1.5], [0.2, 0.2], server, end_s=2)

    assert (2, 2, 1.0, 0.2) == (mean.client_requests, mean.server_requests, mean.ratio, mean.ttft_s)
    assert (0.15, 0.03) == (pytest.approx(mean.queue_s), pytest.approx(mean.prefill_s))


def test_what_settles_after_the_window_belongs_to_requests_that_ended_in_it():
    mean = means([0.9], [0.1], scraped(page(0, 0, 0), page(0, 0, 0), page(1, 0.05, 0.01)), end_s=1)

    assert (1, pytest.approx(0.05)) == (mean.server_requests, mean.queue_s)


def test_a_request_that_ended_after_the_last_scrape_is_in_no_sum():
    """The scraper died at 2 s: what ended later is left out on the client's side too."""
    server = scraped(page(0, 0, 0), page(1, 0.1, 0), page(2, 0.2, 0))
    longer = scraped(*[page(0, 0, 0)] * 4)

    mean = means([0.5, 1.5, 2.5, 9.5], [0.15, 0.15, 0.9, 0.9], server, longer, end_s=10)

    assert (0.15, 2, 2, 1.0) == (mean.ttft_s, mean.client_requests, mean.server_requests, mean.ratio)


def test_a_request_that_ended_before_a_late_first_scrape_is_in_no_sum():
    """Without a scrape before the window the first one is the reference, on the client's side too."""
    server = scraped(page(5, 0, 0), page(6, 0.1, 0), page(7, 0.2, 0), first_s=1)

    mean = means([0.5, 1.0, 1.5, 2.5], [0.9, 0.9, 0.15, 0.15], server, end_s=3)

    assert (0.15, 2, 2) == (mean.ttft_s, mean.client_requests, mean.server_requests)


def test_a_request_at_the_very_start_counts_where_the_reference_is_no_later():
    assert 1 == means([0], [0.15], scraped(page(0, 0, 0), page(1, 0.1, 0)), end_s=1).client_requests


def test_the_sums_of_several_servers_add_up():
    first, other = scraped(page(0, 0, 0), page(1, 0.1, 0.02)), scraped(page(7, 3.0, 1.0), page(8, 3.3, 1.04))

    mean = means([0.5, 0.6], [0.3, 0.5], first, other, end_s=1)

    assert (2, pytest.approx(0.2), pytest.approx(0.03)) == (mean.server_requests, mean.queue_s, mean.prefill_s)


def test_requests_that_ended_while_nothing_was_scraped_are_the_reason():
    """Not that none ended: the scraper came late, or was lost."""
    late = scraped(page(0, 0, 0), page(1, 1, 1), first_s=2)

    mean = means([0.5, 0.6, 0.7], [0.3, 0.3, np.nan], late, end_s=1)

    assert "requests with a first token ended here (2), but only while nothing was scraped" == mean.missing


@pytest.mark.parametrize(
    ("pages", "ttft_s", "reason"),
    [
        ([], 1.0, "no server offers queue and prefill times"),
        ([page(0, 0, 0), page(1, 1, 1)], np.nan, "no request with a first token ended here"),
        ([page(4, 1, 1), page(4, 1, 1)], 1.0, "the server observed no finished request here"),
        ([page(0, 0, 0), page(1e308, 1, 1)], 1.0, "the server's sums are too large to add up"),
        ([page(0, 0, 0)], 1.0, "fewer than two scrapes are usable"),
    ],
)
def test_means_that_cannot_be_known_have_a_reason(pages: list[str], ttft_s: float, reason: str):
    mean = means([0.5], [ttft_s], *([scraped(*pages)] if pages else []), end_s=1)

    assert (None, None, reason) == (mean.queue_s, mean.prefill_s, mean.missing)


def test_why_nothing_was_scraped_is_what_the_caller_knows():
    """It stands in place of the general reason."""
    assert "it was switched off" == means([0.5], [1.0], end_s=1, no_server="it was switched off").missing


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_means_are_sums_over_counts(ttft_s: list[float], queue_s: float, prefill_s: float):
    count = len(ttft_s)

    shown = scraped(page(0, 0, 0), page(count, queue_s * count, prefill_s * count))
    mean = means([0.5] * count, ttft_s, shown, end_s=1)

    assert mean.ttft_s == pytest.approx(sum(ttft_s) / count)
    assert (mean.queue_s, mean.prefill_s) == (pytest.approx(queue_s), pytest.approx(prefill_s))


@pytest.mark.parametrize("stated", ["NaN", "-Inf", "+Inf"])
@pytest.mark.parametrize("family", [QUEUE, PREFILL])
def test_a_sum_that_is_not_finite_is_a_reason(family: str, stated: str):
    """Not a sum of 0, which the buckets could hold; one page alone with it is left out."""
    other = PREFILL if family == QUEUE else QUEUE

    def shown(*sums: float | str) -> Observed | Missing:
        return observe(
            scraped(*(histogram(family, n, total) + histogram(other, n, n / 2) for n, total in enumerate(sums)))
        )

    refused, once = shown(*[stated] * 4), shown(0, 0.5, stated, 1.5)
    assert isinstance(refused, Missing)
    assert family in refused.reason
    assert isinstance(once, Observed)
    assert [1, 2] == once.ends.count.tolist()


@pytest.mark.parametrize("stated", ["7.5", "NaN", "-Inf", "each"])
def test_a_drained_run_takes_no_mean_from_a_sum_that_cannot_be(stated: str):
    """One that stands still, or is not finite: a prefill of 0 ms was said, and the rest of the TTFT called `other`."""

    def prefill_of(total: str) -> ServerMeans:
        families = (QUEUE, "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds", PREFILL)
        pages = (
            "".join(
                histogram(
                    family,
                    n,
                    total if family == PREFILL and total != "each" else 0.07 * n,
                    buckets=[("0.05", 0), ("0.1", n)],
                )
                for family in families
            )
            for n in range(0, 40, 4)
        )
        client = means([1.0] * 36, [0.1] * 36, end_s=9.5, no_server="none")
        window = Window(start_ns=round(0.5e9), end_ns=round(9.5e9))
        return drained_means(client, [scraped(*pages)], window, sent=36, wait_s=0.1)

    assert prefill_of(stated).prefill_s == (pytest.approx(0.07) if stated == "each" else None)
