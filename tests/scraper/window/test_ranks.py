"""Data-parallel ranks of one page: what each waited, and when one of them is called slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import series
from series import QUEUE, counter, gauge, histogram

from sidelight.exporter.evaluation.server import slow_ranks
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import build
from sidelight.scraper.window.pools import Rank, SlowRank
from sidelight.scraper.window.summary import Endpoint, Server, server_summary
from sidelight.scraper.window.window import Window

S = 10**9
Page = Callable[[int, Sequence[float]], str]


def vllm(requests: int, waited_s: Sequence[float]) -> str:
    """A page after so many requests of each rank, which waited for these sums."""
    labels = [f'engine="{rank}"' for rank in range(len(waited_s))]
    queues = (histogram(QUEUE, requests, total, labels=label) for label, total in zip(labels, waited_s, strict=True))
    return (
        "".join(queues)
        + gauge("vllm:num_requests_running", *range(2, 2 + len(labels)), labels=labels)
        + gauge("vllm:num_requests_waiting", *range(len(labels)), labels=labels)
    )


def sglang(requests: int, waited_s: Sequence[float]) -> str:
    """The same of SGLang, each rank of two tensor-parallel ones that count the same."""
    labels = [f'dp_rank="{rank}",tp_rank="{tp}"' for rank in range(len(waited_s)) for tp in range(2)]
    totals = [total for total in waited_s for _ in range(2)]
    queues = (
        histogram("sglang:queue_time_seconds", requests, total, labels=label)
        for label, total in zip(labels, totals, strict=True)
    )
    running = gauge("sglang:num_running_reqs", *(each // 2 + 2 for each in range(len(labels))), labels=labels)
    waiting = gauge("sglang:num_queue_reqs", *(each // 2 for each in range(len(labels))), labels=labels)
    return "".join(queues) + running + waiting


def server(waits_s: Sequence[Sequence[float]], page: Page = vllm) -> Server:
    """Ranks of which each ends ten requests a second, with these mean waits second by second."""
    totals = [[0.0, *accumulate(10 * wait_s for wait_s in rank)] for rank in waits_s]
    pages: list[str | None] = [page(10 * second, [rank[second] for rank in totals]) for second in range(len(totals[0]))]
    records = series.scrapes(pages, first_s=1)
    window = Window(start_ns=records[0].response_ns, end_ns=records[-1].response_ns)
    return server_summary(build(rows(records)), window, S)


def endpoint(waits_s: Sequence[Sequence[float]], page: Page = vllm) -> Endpoint:
    (only,) = server(waits_s, page).endpoints
    return only


@pytest.mark.parametrize("page", [vllm, sglang])
def test_each_rank_is_stated_alone(page: Page):
    """Where tensor-parallel ranks repeat it, once."""
    ranks = endpoint([[0.1] * 24, [0.2] * 24, [0.3] * 24], page).ranks
    assert ranks
    assert [
        Rank(rank=f"{at}", requests=240, queue_ms=pytest.approx(100.0 * (at + 1)), running=at + 2.0, waiting=float(at))
        for at in range(3)
    ] == ranks


@pytest.mark.parametrize("page", [vllm, sglang])
def test_a_rank_that_waits_longer_all_the_time_is_slow(page: Page):
    """However the waits of all rise and fall."""
    common = [0.02 + 0.03 * (second % 7) for second in range(36)]
    shown = server([common, common, common, [4.1 * wait_s for wait_s in common]], page)
    mean_ms = 1e3 * sum(common) / len(common)
    slow = shown.endpoints[0].slow_rank
    expected = SlowRank(rank="3", queue_ms=pytest.approx(4.1 * mean_ms), others_ms=pytest.approx(mean_ms))
    assert expected == slow
    (warning,) = slow_ranks(shown)
    assert "rank 3" in warning
    assert "4.1 times" in warning


@pytest.mark.parametrize(
    "waits_s",
    [
        [[0.1] * 36] * 4,
        [[0.1] * 36, [0.14] * 36],
        [[0.1] * 36, [0.1] * 18 + [0.9] * 18],
        [[0.0] * 36, [0.004] * 36],
        [[0.0] * 36] * 4,
        [[0.1] * 8, [0.5] * 8],
    ],
    ids=["equal", "by too little", "half of the time", "in no time", "without waits", "for too short"],
)
def test_others_are_not(waits_s: Sequence[Sequence[float]]):
    shown = server(waits_s)
    assert not shown.endpoints[0].slow_rank
    assert not list(slow_ranks(shown))


def test_a_page_of_one_rank_or_without_queue_times_says_nothing_of_ranks():
    assert not endpoint([[0.1] * 36]).ranks
    labels = ['engine="0"', 'engine="1"']
    page = gauge("vllm:num_requests_running", 1, 2, labels=labels) + counter(
        "vllm:prompt_tokens_total", 1, 2, labels=labels
    )
    records = series.scrapes([page] * 20)
    window = Window(start_ns=records[0].response_ns, end_ns=records[-1].response_ns)
    (only,) = server_summary(build(rows(records)), window, S).endpoints
    assert not only.ranks
