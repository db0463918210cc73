"""The simulator's pages of TensorRT-LLM against the research and a real page, and against the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from simulated_load import ARRIVALS, LIMITS, ask, families_of, play, samples_of

from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import EngineSettings
from sidelight.simulator.telemetry.pages.trtllm import COLLECTOR_PATIENCE_NS, TrtllmPage

NONE: frozenset[tuple[str, str]] = frozenset()
#: In the research as a sibling of a metric that it describes.
SIBLINGS = {
    "kv_cache_free_blocks": "kv_cache_max_blocks",
    "kv_cache_used_blocks": "kv_cache_max_blocks",
    "kv_cache_tokens_per_block": "kv_cache_max_blocks",
    "max_batch_size_runtime": "max_batch_size_static",
    "max_num_tokens_runtime": "max_batch_size_static",
    "num_generation_requests": "num_context_requests",
    "num_paused_requests": "num_context_requests",
    "num_scheduled_requests": "num_context_requests",
}


def page_after(played: Any, limits: EngineSettings) -> TrtllmPage:
    """Return the page of an engine with this history."""
    page = TrtllmPage("m", limits)
    for outcome in played.outcomes:
        page.observe(outcome)
    return page


@pytest.fixture
def busy_page() -> str:
    """A page that shows every family: after prefills with cache hits."""
    played = play(LIMITS, [(at * 10**9, ask(str(at), 30, 24)) for at in range(3)])
    return page_after(played, LIMITS).page()[0].decode()


def test_each_family_is_as_the_research_says(busy_page: str, shared: Path):
    """Type, label names and bounds are those of 2026's main; gauges have multiprocess mode's label pid beside them."""
    research = yaml.safe_load((shared / "engines/trtllm.yaml").read_text())
    facts = {metric["name"].removeprefix("trtllm_"): metric for metric in research["metrics"]}
    families = {name.removeprefix("trtllm_"): family for name, family in families_of(busy_page).items()}
    described = {name: family for name, family in families.items() if not name.endswith("_config_info")}
    assert (36, 3) == (len(described), len(families) - len(described))
    for name, (kind, labels, bounds) in described.items():
        fact = facts[SIBLINGS.get(name, name)]
        assert fact["type"] == kind, name
        by_process = {"pid"} if kind == "gauge" else set()
        assert {*fact["labels"], *by_process} == set(labels) - {"le"}, name
        if kind == "histogram":
            assert fact["buckets"] == [float(bound) for bound in bounds[:-1]], name


def test_the_five_families_of_early_releases_are_as_a_real_page_shows_them(busy_page: str, shared: Path):
    """The same type, label names and bounds; its creation times came from a worker that was a single process."""
    real = families_of((shared / "fixtures/trtllm/prometheus_metrics.prom").read_text())
    real = {name: family for name, family in real.items() if not name.endswith("_created")}
    ours = families_of(busy_page)
    assert real == {name: ours[name] for name in real}
    assert 5 == len(real)


def test_before_the_first_request_little_is_shown():
    """The configuration, the empty batch, and the one counter that is made at the start."""
    shown = families_of(TrtllmPage("m", LIMITS).page()[0].decode())
    infos = {f"trtllm_{name}_config_info" for name in ("model", "parallel", "kv_cache")}
    assert infos | {"trtllm_prompt_cached_tokens_total", "trtllm_scheduled_batch_size"} == set(shown)


def test_everything_of_a_request_shows_when_it_finishes():
    """Until then there is nothing of it, not even of its iterations; then all comes at once."""
    engine, page = SimulatedEngine(LIMITS), TrtllmPage("m", LIMITS)
    engine.submit(ask("a", 30, 3), 0)
    seen, now_ns = [], 5
    while (duration_s := engine.begin_step(now_ns)) is not None:
        now_ns += round(duration_s * 1e9)
        page.observe(engine.finish_step(now_ns))
        samples = samples_of(page.page()[0])
        names = ("request_queue_time_seconds_count", "time_to_first_token_seconds_count", "prompt_tokens_total")
        shown = [samples.get((f"trtllm_{name}", NONE)) for name in (*names, "num_requests_running")]
        seen.append((samples["trtllm_scheduled_batch_size", NONE], *shown))
    nothing = (1, None, None, None, None)
    assert [nothing, nothing, nothing, (0, 1, 1, 30, 0)] == seen


def test_gauges_follow_the_iterations_until_half_a_second_without_one():
    """The collector wakes when a request finishes; after a pause it sleeps until the next one does."""
    page = TrtllmPage("m", LIMITS)
    outcomes = play(LIMITS, [(0, ask("a", 8, 1)), (1, ask("b", 8, 3)), (2 * 10**9, ask("c", 8, 2))]).outcomes
    seen = []
    for outcome in outcomes:
        page.observe(outcome)
        samples = samples_of(page.page()[0])
        seen.append((len(outcome.finished), samples["trtllm_num_requests_running", NONE]))
    assert [(1, 0), (0, 1), (0, 1), (1, 0), (0, 0), (1, 0)] == seen
    assert outcomes[4].at_ns - outcomes[3].at_ns > COLLECTOR_PATIENCE_NS
    assert 1 == outcomes[4].running


def test_reading_the_iterations_clears_them(shared: Path):
    """The JSON of /metrics has the fields of a real one, less the memory of a GPU, and is empty the second time."""
    page = page_after(play(LIMITS, [(0, ask("a", 8, 3))]), LIMITS)
    records = page.take_iterations()
    real = json.loads((shared / "fixtures/trtllm/iteration_stats.json").read_text())[0]
    assert [1, 2, 3] == [record["iter"] for record in records]
    assert {"gpuMemUsage"} == real.keys() - records[0].keys()
    assert {"allocNewBlocks", "allocTotalBlocks"} == real["kvCacheStats"].keys() - records[0]["kvCacheStats"].keys()
    assert [] == page.take_iterations()


@given(ARRIVALS)
@settings(max_examples=25, deadline=None)
def test_sums_on_the_page_are_the_sums_of_the_truth(arrivals: list[Any]):
    """Sums agree to 1e-9, and counts are those of spans above 0; queue time counts all, and from the arrival on."""
    played = play(LIMITS, arrivals)
    samples = samples_of(page_after(played, LIMITS).page()[0])
    records = played.records
    spans = {
        "request_queue_time_seconds": [(r.arrival_ns, r.scheduled_ns) for r in records],
        "request_prefill_time_seconds": [(r.scheduled_ns, r.first_token_ns) for r in records],
        "request_decode_time_seconds": [(r.first_token_ns, r.finished_ns) for r in records if r.output_tokens > 1],
        "request_inference_time_seconds": [(r.scheduled_ns, r.finished_ns) for r in records],
        "time_to_first_token_seconds": [(r.arrival_ns, r.first_token_ns) for r in records],
        "e2e_request_latency_seconds": [(r.arrival_ns, r.finished_ns) for r in records],
    }
    for name, ends in spans.items():
        assert len(ends) == samples.get((f"trtllm_{name}_count", NONE), 0), name
        total_s = sum(end - start for start, end in ends) / 1e9
        assert total_s == pytest.approx(samples.get((f"trtllm_{name}_sum", NONE), 0), abs=1e-9)
    expected = {
        ("request_success_total", frozenset({("finished_reason", "length")})): len(records),
        ("prompt_tokens_total", NONE): sum(r.prompt_tokens for r in records),
        ("generation_tokens_total", NONE): sum(r.output_tokens for r in records),
        ("prompt_cached_tokens_total", NONE): sum(r.cached_tokens for r in records),
        ("num_requests_completed_total", NONE): len(records),
        ("kv_cache_reused_blocks_total", NONE): sum(r.cached_tokens // 4 for r in records),
        ("kv_cache_missed_blocks_total", NONE): sum(-(-r.prompt_tokens // 4) - r.cached_tokens // 4 for r in records),
    }
    assert expected == {(name, labels): samples.get((f"trtllm_{name}", labels), 0) for name, labels in expected}
