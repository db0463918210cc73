"""Limits and stalls of single features: each is said where it mattered, with the engine's own option."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import summaries

from sidelight.exporter.evaluation.server import feature_lines
from sidelight.scraper.window.pools import Rank
from sidelight.scraper.window.summary import DetectedEngine, Endpoint, Scrapes, Server

RANKS = [Rank(rank=f"{at}", requests=9, queue_ms=1.0, running=1.0, waiting=0.0) for at in range(4)]
PAGE = Endpoint(url="http://e/metrics", engine="sglang", scrapes=Scrapes(ok=9, failed=0, failures={}), ranks=RANKS)
NONE: dict[str, Any] = {}


def server(engine: str, quantities: dict[str, Any], endpoints: list[Endpoint]) -> Server:
    detected = DetectedEngine(name=engine, version=None, detected_by="metric some")
    return msgspec.structs.replace(summaries.server(**quantities), engine=detected, endpoints=endpoints)


def stalls(exposed: float, idle: float) -> dict[str, Any]:
    return {
        "scheduler_exposed_time": summaries.counter(60 * exposed, exposed),
        "scheduler_idle_time": summaries.counter(60 * idle, idle),
    }


def experts(balance: float, passes: float = 60.0) -> dict[str, Any]:
    return {
        "expert_passes": summaries.counter(passes, passes / 60),
        "expert_balance": summaries.counter(balance * passes, balance * passes / 60),
    }


@pytest.mark.parametrize(
    ("engine", "quantities", "models", "expected"),
    [
        ("vllm", {"admission_rejections": summaries.counter(12.0, 0.2)}, 0, ("12 requests", "--max-num-queued-reqs")),
        ("vllm", {"requests_waiting_deferred": summaries.gauge(max=19.0)}, 3, ("up to 19", "3 models", "--max-loras")),
        ("sglang", {"lora_usage": summaries.gauge(max=1.0)}, 2, ("--max-loras-per-batch",)),
        ("sglang", {"host_cache_usage": summaries.gauge(max=1.0)}, 0, ("--hicache-size",)),
        ("vllm", {"host_cache_usage": summaries.gauge(max=1.0)}, 0, ("--kv-offloading-size",)),
        ("sglang", experts(0.5), 0, ("2.00 times the mean load", "--enable-eplb, --ep-num-redundant-experts")),
        ("sglang", stalls(0.7, 0.5), 0, ("for 20 % of the time", "--disable-overlap-schedule")),
    ],
    ids=["refused", "adapters", "adapters of sglang", "host cache", "offloaded", "experts", "stalls"],
)
def test_a_limit_that_mattered_is_said_with_its_option(
    engine: str, quantities: dict[str, Any], models: int, expected: tuple[str, ...]
):
    (line,) = feature_lines(server(engine, quantities, []), models)
    for words in expected:
        assert words in line


@pytest.mark.parametrize(
    ("quantities", "models", "endpoints"),
    [
        (NONE, 3, []),
        ({"admission_rejections": summaries.counter(0.0, 0.0)}, 0, []),
        ({"requests_waiting_deferred": summaries.gauge(max=19.0)}, 1, []),
        ({"requests_waiting_deferred": summaries.gauge(max=0.0)}, 3, []),
        (dict.fromkeys(("requests_waiting_deferred", "kv_fetch_in_progress"), summaries.gauge(max=19.0)), 3, []),
        ({"lora_usage": summaries.gauge(max=0.5)}, 2, []),
        ({"host_cache_usage": summaries.gauge("no scrape")}, 0, []),
        (experts(0.85), 0, []),
        (experts(0.5, passes=0.0), 0, []),
        (stalls(0.55, 0.5), 0, []),
        (stalls(2.3, 2.0), 0, [PAGE]),
    ],
    ids=[
        "nothing on the page", "none refused", "one model", "none put off", "loads of KV caches", "places left",
        "not known", "experts in balance", "no pass", "hardly a stall", "a stall of four ranks together",
    ],
)  # fmt: skip
def test_nothing_is_said_where_nothing_mattered(quantities: dict[str, Any], models: int, endpoints: list[Endpoint]):
    assert not list(feature_lines(server("sglang", quantities, endpoints), models))
