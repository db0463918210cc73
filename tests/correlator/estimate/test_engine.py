"""Finish-time sums off real pages, and the histograms that cannot give them."""

from __future__ import annotations

import pytest

from correlator.estimate.engine import finish_sums
from rundir.stats import Missing
from scraper.series.log import rows
from scraper.series.table import EndpointSeries, build
from scraper.targets.fetch import Scrape

QUEUE = "vllm:request_queue_time_seconds"
PREFILL = "vllm:request_prefill_time_seconds"


def histogram(family: str, count: float, total: float, *, without: str = "") -> str:
    """A histogram of one bound, one of its sample names left out."""
    lines = [
        f'{family}_bucket{{le="1.0"}} {count}',
        f'{family}_bucket{{le="+Inf"}} {count}',
        f"{family}_sum {total}",
        f"{family}_count {count}",
    ]
    kept = [line for line in lines if not without or not line.startswith(family + without)]
    return "\n".join([f"# TYPE {family} histogram", *kept]) + "\n"


def scraped(*pages: str) -> EndpointSeries:
    """Pages a second apart. A gauge ends each: a page that ended in half a histogram would be taken for a cut one."""
    (endpoint,) = build(
        rows(
            Scrape(
                url="u",
                tick_ns=at,
                request_ns=at,
                response_ns=at,
                status=200,
                content_type="text/plain",
                body=f"{page}# TYPE end gauge\nend 1\n".encode(),
                error="",
            )
            for at, page in zip(range(0, 10**10, 10**9), pages, strict=False)
        )
    )
    return endpoint


def test_sums_rise_across_a_restart():
    """Count and sums of all label sets, going on from where they were after the engine restarted."""
    pages = [histogram(QUEUE, n, n / 2) + histogram(PREFILL, n, n / 4) for n in (2.0, 4.0, 1.0)]

    found = finish_sums(scraped(*pages))

    assert [2.0, 4.0, 5.0] == found.count.tolist()
    assert ([1.0, 2.0, 2.5], [0.5, 1.0, 1.25]) == (found.queue_s.tolist(), found.prefill_s.tolist())


@pytest.mark.parametrize("family", [QUEUE, PREFILL])
@pytest.mark.parametrize("without", ["_sum", "_count"])
def test_a_histogram_without_count_or_sum_is_a_reason(family: str, without: str):
    """Not the page's last column, which is what an index of -1 would read."""
    other = PREFILL if family == QUEUE else QUEUE
    page = histogram(family, 2, 1, without=without) + histogram(other, 2, 1)

    assert Missing(f"{family} has no {without}") == finish_sums(scraped(page, page))


def test_a_histogram_without_buckets_has_its_sums():
    """Means need no buckets."""
    page = histogram(QUEUE, 2, 1, without="_bucket") + histogram(PREFILL, 2, 0.5)

    found = finish_sums(scraped(page))

    assert ([2.0], [1.0], [0.5]) == (found.count.tolist(), found.queue_s.tolist(), found.prefill_s.tolist())


def test_sums_beyond_the_largest_number_are_a_reason():
    pages = [histogram(QUEUE, n, n) + histogram(PREFILL, n, n) for n in (0.0, 1.5e308, 0.0, 1.5e308, 0.0)]

    assert Missing("the server's sums are too large to add up") == finish_sums(scraped(*pages))


def test_histograms_of_another_moment_than_the_end_are_a_reason():
    """SGLang observes a queue time at the first forward pass: in a window, of other requests than ended in it."""
    families = ("sglang:queue_time_seconds", "sglang:per_stage_req_latency_seconds")
    page = "".join(histogram(family, 2, 1) for family in families).replace(
        "per_stage_req_latency_seconds_bucket{", 'per_stage_req_latency_seconds_bucket{stage="prefill_forward",'
    )
    for part in ("_sum", "_count"):
        page = page.replace(f"req_latency_seconds{part}", f'req_latency_seconds{part}{{stage="prefill_forward"}}')

    assert Missing(
        "sglang:queue_time_seconds is observed not when a request ends, but at its first forward: over a window it "
        "speaks of other requests than those that ended"
    ) == finish_sums(scraped(page))
