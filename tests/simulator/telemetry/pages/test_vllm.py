"""The simulator's /metrics page against vLLM's, and against the truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from prometheus_client import generate_latest
from simulated_load import ARRIVALS, LIMITS, families_of, play, samples_of

from sidelight.simulator.settings import EngineSettings
from sidelight.simulator.telemetry.pages.vllm import VllmPage, one_two_five_bounds

#: Canonical in vLLM, but only shown with an option that the simulator does not have, or by older versions.
NOT_SHOWN = {"vllm:lora_requests_info"}


@pytest.fixture(scope="session")
def idle_page() -> str:
    """The page of an engine that has done nothing, with the recorded engine's model length."""
    return VllmPage("tiny-llama", EngineSettings(max_model_len=2048)).page()[0].decode()


def test_every_canonical_family_of_vllm_is_on_the_page(idle_page: str, shared: Path):
    """What the research file marks as canonical and unconditional is exposed."""
    research = yaml.safe_load((shared / "engines/vllm.yaml").read_text())
    wanted = {
        str(quantity[key]).split()[0]
        for quantity in research["canonical"].values()
        for key in ("metric", "queries", "hits", "split")
        if key in quantity
    }
    assert set() == wanted - NOT_SHOWN - set(families_of(idle_page))
    assert len(wanted) >= 20


def test_types_labels_and_buckets_are_those_of_a_real_page(idle_page: str, shared: Path):
    """Each vllm: family has the type, label names and bounds that a recorded vLLM 0.32 shows."""
    recorded = (shared / "fixtures/vllm/recorded/pages/idle_before_first_request.prom").read_text()
    real = families_of(recorded)
    info = "vllm:cache_config_info"
    ours = {name: family for name, family in families_of(idle_page).items() if name != info}
    assert {name: real.get(name) for name in ours} == ours
    assert set(families_of(idle_page)[info][1]) <= set(real[info][1])


def test_process_and_python_families_are_there(idle_page: str):
    """Like a real page, it shows its own process."""
    assert {"process_cpu_seconds_total", "python_info", "python_gc_collections_total"} <= set(families_of(idle_page))


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [(1, (1,)), (4, (1, 2)), (10, (1, 2, 5, 10)), (2048, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000))],
)
def test_size_buckets_end_at_the_limit(limit: int, bounds: tuple[float, ...]):
    """1-2-5 up to the model's length."""
    assert bounds == one_two_five_bounds(limit)


@pytest.mark.parametrize("host_blocks", [0, 5, 1000])
@given(arrivals=ARRIVALS)
@settings(max_examples=25, deadline=None)
def test_sums_on_the_page_are_the_sums_of_the_truth(host_blocks: int, arrivals: list[Any]):
    """Counts are equal and sums agree to 1e-9, under preemption, prefix hits and chunks; the page is written as
    prometheus_client writes it.
    """
    limits = replace(LIMITS, eos_chance=0.1, kv_host_blocks=host_blocks)
    arrivals = [(at, replace(request, ignore_eos=bool(index % 2))) for index, (at, request) in enumerate(arrivals)]
    played = play(limits, arrivals)
    metrics = VllmPage("m", limits, start_s=1.0)
    assert metrics.page()[0].endswith(generate_latest(metrics.registry))
    for outcome in played.outcomes:
        metrics.observe(outcome)
    assert metrics.page()[0].endswith(generate_latest(metrics.registry))
    samples = samples_of(metrics.page()[0])
    records = played.records
    expected_s = {
        "request_queue_time_seconds": [(r.queued_ns, r.scheduled_ns) for r in records],
        "request_prefill_time_seconds": [(r.scheduled_ns, r.first_token_ns) for r in records],
        "request_decode_time_seconds": [(r.first_token_ns, r.finished_ns) for r in records],
        "request_inference_time_seconds": [(r.scheduled_ns, r.finished_ns) for r in records],
        "e2e_request_latency_seconds": [(r.arrival_ns, r.finished_ns) for r in records],
        "time_to_first_token_seconds": [(r.arrival_ns, r.first_token_ns) for r in records],
    }
    for name, spans in expected_s.items():
        assert len(spans) == samples[f"vllm:{name}_count", frozenset()]
        total_s = sum(end - start for start, end in spans) / 1e9
        assert total_s == pytest.approx(samples[f"vllm:{name}_sum", frozenset()], abs=1e-9)
    gaps_s = samples["vllm:inter_token_latency_seconds_sum", frozenset()]
    assert gaps_s == pytest.approx(samples["vllm:request_decode_time_seconds_sum", frozenset()], abs=1e-9)
    tokens = sum(r.output_tokens for r in records)
    assert tokens - len(records) == samples["vllm:inter_token_latency_seconds_count", frozenset()]
    computed = sum(r.prompt_tokens - r.cached_tokens for r in records)
    reasons = [r.finish_reason for r in records]
    expected = {
        ("vllm:generation_tokens_total", ()): tokens,
        ("vllm:prompt_tokens_total", ()): sum(r.prompt_tokens for r in records),
        ("vllm:prefix_cache_queries_total", ()): sum(r.prompt_tokens for r in records),
        ("vllm:prefix_cache_hits_total", ()): sum(r.cached_tokens - r.host_tokens for r in records),
        ("vllm:prompt_tokens_cached_total", ()): sum(r.cached_tokens for r in records),
        ("vllm:request_prefill_kv_computed_tokens_sum", ()): computed,
        ("vllm:iteration_tokens_total_sum", ()): computed + tokens,
        ("vllm:iteration_tokens_total_count", ()): sum(bool(outcome.tokens) for outcome in played.outcomes),
        ("vllm:num_preemptions_total", ()): sum(r.preemptions for r in records),
        ("vllm:request_success_total", (("finished_reason", "length"),)): reasons.count("length"),
        ("vllm:request_success_total", (("finished_reason", "stop"),)): reasons.count("stop"),
        ("vllm:num_requests_running", ()): 0,
        ("vllm:num_requests_waiting", ()): 0,
        ("vllm:kv_cache_usage_perc", ()): 0,
    }
    if host_blocks:
        used = played.outcomes[-1].host_blocks / host_blocks
        by_source = "vllm:prompt_tokens_cached_by_source_total"
        expected |= {
            (by_source, (("source", "host"),)): sum(r.host_tokens for r in records),
            (by_source, (("source", "device"),)): sum(r.cached_tokens - r.host_tokens for r in records),
            ("vllm:kv_offload_cpu_cache_usage_perc", ()): used,
        }
    assert ("kv_offload" in metrics.page()[0].decode()) == bool(host_blocks)
    assert expected == {(name, labels): samples[name, frozenset(labels)] for name, labels in expected}
