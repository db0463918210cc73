"""An engine that restarts twice while it is scraped: three lives on one port, and one file with what was true."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from sidelight.scraper.series.log import ScrapeLog, read_log
from sidelight.scraper.series.table import build
from sidelight.scraper.targets.fetch import FetchLimits, open_session, scrape
from sidelight.scraper.window.summary import server_summary
from sidelight.scraper.window.window import Window
from sidelight.simulator.server import running
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings

# Two at a time, so that requests queue.
ENGINE = EngineSettings(speed=PROFILES["fast"], max_model_len=512, max_num_seqs=2, seed=5)
PAGES = {"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics"}
# TensorRT-LLM's queue time begins with the request's arrival, the others' when it is put into the queue.
QUEUED_FROM = {"vllm": "queued_ns", "sglang": "queued_ns", "trtllm": "arrival_ns"}
# Prompt and output tokens of the requests of each life, in two halves with a scrape after each. The second life has by
# its first scrape served more tokens than the first life in all, and fewer requests.
LIVES = (((5, 9), (3, 4)), ((7, 20, 30), (6, 8, 11, 3)), ((2, 40), (5, 6, 7)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """What the scrapes of all lives say together, and what was true."""

    server: dict[str, Any]
    truth: list[dict[str, Any]]

    def totals(self) -> dict[str, float]:
        """Return the counters, and the counts of the histograms of whole requests."""
        counted = {name: self.server[name]["stats"]["total"] for name in COUNTED}
        return counted | {f"{name} seen": self.server[name]["stats"]["count"] for name in OBSERVED}

    def true_totals(self) -> dict[str, float]:
        """Return the same by the truth."""
        requests = len(self.truth)
        tokens = {"prompt_tokens": "prompt_tokens", "generation_tokens": "tokens"}
        counted = {name: sum(record[key] for record in self.truth) for name, key in tokens.items()}
        return counted | {"requests_finished": requests} | {f"{name} seen": requests for name in OBSERVED}

    def true_sums_s(self, engine: str) -> dict[str, float]:
        """Return what the durations of all requests add up to."""
        spans = {
            "queue_time": (QUEUED_FROM[engine], "scheduled_ns"),
            "prefill_time": ("scheduled_ns", "first_token_ns"),
            "ttft": ("arrival_ns", "first_token_ns"),
            "e2e_latency": ("arrival_ns", "finished_ns"),
        }
        return {
            name: sum(record[end] - record[start] for record in self.truth) / 1e9
            for name, (start, end) in spans.items()
        }


COUNTED = ("prompt_tokens", "generation_tokens", "requests_finished")
OBSERVED = ("queue_time", "prefill_time", "ttft", "e2e_latency")


async def live(engine: str, directory: Path, *, last_seen: bool) -> Lived:
    """Scrape an engine through three lives; `last_seen`: also after the last request of each."""
    truth, path = directory / "truth.jsonl", directory / "scrapes.log"
    settings = SimulatorSettings(engine=engine, truth=truth, engine_settings=ENGINE)
    offset_ns = time.time_ns() - time.monotonic_ns()
    with closing(ScrapeLog(path)) as log:
        async with aiohttp.ClientSession() as client, open_session() as session:

            async def look(url: str) -> int:
                at_ns = time.monotonic_ns() + offset_ns
                page = url + PAGES[engine]
                answer = await scrape(session, page, tick_ns=at_ns, clock_offset_ns=offset_ns, limits=FetchLimits())
                assert "" == log.append(answer)
                return answer.response_ns

            start_ns = 0
            for life, halves in enumerate(LIVES):
                async with running(settings) as url:
                    settings = replace(settings, port=urlsplit(url).port or 0)
                    start_ns = start_ns or await look(url)
                    for half, lengths in enumerate(halves):
                        await ask(client, url, f"{life}-{half}", lengths)
                        if last_seen or half == 0:
                            end_ns = await look(url)
    read = list(read_log(path))
    summary = server_summary(build(read), Window(start_ns=start_ns, end_ns=end_ns), 10**9)
    return Lived(
        server=msgspec.to_builtins(summary), truth=[json.loads(line) for line in truth.read_text().splitlines()]
    )


async def ask(client: aiohttp.ClientSession, url: str, name: str, lengths: Iterable[int]) -> None:
    """Have requests answered, all sent at once."""

    async def send(length: int) -> None:
        body = {"prompt": "hello " * length, "max_tokens": length, "ignore_eos": True}
        headers = {"X-Request-Id": f"{name}-{length}"}
        async with client.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            assert 200 == response.status
            await response.read()

    await asyncio.gather(*(send(length) for length in lengths))


@pytest.mark.parametrize("engine", PAGES)
async def test_totals_over_two_restarts_are_the_truth(engine: str, tmp_path: Path):
    """Where a scrape follows the last request of each life, nothing is lost.

    Exact: counters and the counts of histograms; their sums, to the digits that adding floats leaves. Two restarts are
    reported, whatever the number of label sets, and also of a counter that has already passed its last value by the
    first page of the new life: vLLM's page states its start time, of the others' most counters have fallen.
    """
    lived = await live(engine, tmp_path, last_seen=True)

    assert sum(len(half) for halves in LIVES for half in halves) == len(lived.truth)
    assert lived.true_totals() == lived.totals()
    sums_s = {name: lived.server[name]["stats"]["sum"] for name in OBSERVED}
    assert pytest.approx(lived.true_sums_s(engine), rel=1e-9) == sums_s
    assert {2} == {lived.server[name]["resets"] for name in (*COUNTED, *OBSERVED)}


@pytest.mark.parametrize("engine", PAGES)
async def test_nothing_is_counted_twice_where_the_last_scrape_of_a_life_is_missing(engine: str, tmp_path: Path):
    """What no scrape saw before a kill is lost: totals are bounded from above by the truth.

    vLLM's page shows a restart that no counter does, so that what was scraped of each life is counted whole: the
    second life had by its first scrape served more requests than any scrape had seen of the first. Of SGLang and
    TensorRT-LLM, which state no start time, such a total is only bounded from below by the difference.
    """
    lived = await live(engine, tmp_path, last_seen=False)

    assert {} == {name: seen for name, seen in lived.totals().items() if seen > lived.true_totals()[name]}
    if engine == "vllm":
        scraped = [length for halves in LIVES for length in halves[0]]
        assert (len(scraped), sum(scraped)) == (lived.totals()["e2e_latency seen"], lived.totals()["generation_tokens"])
        assert {2} == {lived.server[name]["resets"] for name in (*COUNTED, *OBSERVED)}
