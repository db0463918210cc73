"""Data-parallel ranks of one page: what each waited, and when one of them is called slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
import series
from msgspec.structs import replace
from played_runs import arrivals, engine, lengths
from series import QUEUE, counter, gauge, histogram
from virtual_runs import endpoint_of

from sidelight.exporter.evaluation.server import slow_ranks
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.window.pools import Rank, SlowRank
from sidelight.scraper.window.summary import Endpoint, Server, server_summary
from sidelight.scraper.window.window import Window
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.virtual import SimulatedLoad, VirtualServer

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


@cache
def rank(seed: int, slow: float) -> tuple[EndpointSeries, float]:
    """The page of one simulated engine, scraped each second while seven requests come, and the mean true wait in ms.

    The wait is of those that ended from its 10th page, after a warm-up, to its 40th.
    """
    prompts, outputs = lengths(280, seed, prompt=100, output=40)
    sent = [
        EngineRequest(request_id=f"cmpl-{number}", prompt_token_ids=(number + 5,) * prompt, max_tokens=output)
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]
    at_ns = np.rint(1e9 * arrivals(280, 7.0, seed)).astype(np.int64).tolist()
    server = VirtualServer(SimulatorSettings(engine_settings=engine(max_num_seqs=4, seed=seed, slow=slow)))
    played = server.play(SimulatedLoad(requests=sent, offsets_ns=at_ns), scrape_s=1.0)
    first_ns, last_ns = (played.pages[at].request_ns for at in (10, 39))
    records = [each.record for each in played.exchanges if each.record]
    waits_s = [each.queue_s for each in records if first_ns < each.finished_ns <= last_ns]
    return endpoint_of(played), 1e3 * float(np.mean(waits_s))


def of_engines(pages: Sequence[EndpointSeries]) -> Server:
    """Engines' pages as the ranks of one."""
    labelled = [
        replace(each, labels=tuple((name, f"{at}" if name == "engine" else value) for name, value in each.labels))
        for at, page in enumerate(pages)
        for each in page.series
    ]
    stamps = {name: getattr(pages[0], name)[10:40] for name in ("request_ns", "response_ns")}
    whole = series.endpoint_of_columns(labelled, np.hstack([page.values[10:40] for page in pages]), **stamps)
    window = Window(start_ns=int(whole.response_ns[0]), end_ns=int(whole.response_ns[-1]))
    return server_summary([whole], window, S)


@pytest.mark.parametrize("slow", [1.3, 1.0])
def test_the_slow_one_of_simulated_engines_is_named(slow: float):
    """Waits are those of its requests; of engines that are equal none is named."""
    pages, waits_ms = zip(*(rank(seed, each) for seed, each in enumerate((1.0, 1.0, slow))), strict=True)
    shown = of_engines(pages)
    (only,) = shown.endpoints
    assert only.ranks
    assert waits_ms == pytest.approx([each.queue_ms for each in only.ranks])
    if slow == 1.0:
        assert not only.slow_rank
        return
    expected = {"queue_ms": pytest.approx(waits_ms[2]), "others_ms": pytest.approx(np.mean(waits_ms[:2]))}
    assert only.slow_rank == SlowRank(rank="2", **expected)
    assert "rank 2" in next(iter(slow_ranks(shown)))
