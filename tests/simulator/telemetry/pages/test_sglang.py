"""The simulator's page of SGLang against the research and a real page, and against the truth."""

from __future__ import annotations

import json
import lzma
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from simulated_load import ARRIVALS, LIMITS, ask, families_of, play, samples_of

from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import PROFILES, EngineSettings
from sidelight.simulator.telemetry.pages.sglang import DECODE_LOG_INTERVAL, IDLE_REPORT_NS, SglangPage

NONE: frozenset[tuple[str, str]] = frozenset()
STREAM = frozenset({("is_streaming", "true")})


def page_after(played: Any, limits: EngineSettings) -> SglangPage:
    """Return the page of an engine with this history."""
    page = SglangPage("m", limits, lambda: 0)
    for outcome in played.outcomes:
        page.observe(outcome)
    return page


@pytest.fixture
def busy_page() -> str:
    """A page that shows every family: after a chunked prefill, cache hits, retractions and an abort."""
    played = play(LIMITS, [(at, ask(str(at), 30, 24, token=256 + at // 2)) for at in range(6)])
    page = page_after(played, LIMITS)
    page.abort(RequestRecord(**BASE, finish_reason="abort"))
    return page.page()[0].decode()


BASE: dict[str, Any] = {
    "request_id": "cmpl-a",
    "arrival_ns": 0,
    "queued_ns": 1,
    "scheduled_ns": -1,
    "first_token_ns": -1,
    "finished_ns": 9,
    "prompt_tokens": 30,
    "cached_tokens": 0,
    "output_tokens": 0,
    "max_tokens": 24,
    "preemptions": 0,
}


def test_each_family_is_as_the_research_says(busy_page: str, shared: Path):
    """Type, label names and bounds are those of the wheel that was read; the label pid is multiprocess mode's."""
    research = yaml.safe_load((shared / "engines/sglang.yaml").read_text())
    facts = {metric["name"]: metric for metric in research["metrics"]}
    families = families_of(busy_page)
    assert 38 == len(families)
    del families["sglang:fwd_occupancy"]  # is named there without its labels
    for name, (kind, labels, bounds) in families.items():
        fact = facts[name]
        assert fact["type"] == kind, name
        required = [label for label in fact["labels"] if not label.endswith("?")]
        by_process = {"pid"} if name.endswith(("num_retracted_reqs", "num_paused_reqs")) else set()
        assert {*required, *by_process} == set(labels) - {"le"}, name
        if isinstance(fact.get("buckets"), list):
            assert fact["buckets"] == pytest.approx([float(bound) for bound in bounds[:-1]], abs=1e-6), name


def test_each_family_is_as_a_real_page_of_january_2026_shows_it(busy_page: str, shared: Path):
    """The same type; since then the tokenizer's families got two labels, and the queue time finer buckets."""
    real = families_of((shared / "fixtures/sglang/server.prom").read_text())
    ours = families_of(busy_page)
    both = real.keys() & ours.keys()
    assert {"sglang:num_retractions", "sglang:spec_accept_length", "sglang:utilization"} == real.keys() - both
    for name in both:
        assert real[name][0] == ours[name][0]
        assert set(ours[name][1]) - set(real[name][1]) <= {"engine_type", "is_streaming"}, name
        assert set(real[name][1]) <= set(ours[name][1]), name
        if name == "sglang:queue_time_seconds":
            assert set(ours[name][2]) - set(real[name][2]) == {"0.001", "0.005", "0.01", "0.05"}
            assert set(real[name][2]) <= set(ours[name][2])
        else:
            assert real[name][2] == ours[name][2], name


def recorded_page(name: str) -> str:
    """Return a page of a real server as it was scraped."""
    packed = (Path(__file__).parents[3] / "data/sglang_pages.json.xz").read_bytes()
    page: str = json.loads(lzma.decompress(packed))["pages"][name]
    return page


def test_each_family_is_as_a_recorded_page_shows_it(busy_page: str):
    """Type, label names and bounds, to the last; those of retractions and aborts stand on pages of their own."""
    ours = families_of(busy_page)
    real = {
        name: family
        for page in ("edges/after", "retract/after", "main/after")
        for name, family in families_of(recorded_page(page)).items()
    }
    assert {name: family for name, family in real.items() if name in ours} == ours


def test_the_first_page_has_the_series_of_a_recorded_one():
    """No series more and none fewer, in the families that are imitated."""
    page = SglangPage("m", EngineSettings(), lambda: 0).page()[0]
    families = families_of(page.decode())
    imitated = re.compile(rf"(?:{'|'.join(map(re.escape, families))})(?:_bucket|_sum|_count)?")
    real = {key for key in samples_of(recorded_page("main/idle_before_first_request").encode())
            if imitated.fullmatch(key[0])}  # fmt: skip
    assert real == samples_of(page).keys()


def test_it_is_a_page_of_multiprocess_mode(busy_page: str):
    """Neither creation times nor the process are shown, and a sum stands before its buckets."""
    names = [line.partition("{")[0] for line in busy_page.splitlines() if not line.startswith("#")]
    assert not [name for name in names if name.endswith("_created") or not name.startswith("sglang:")]
    suffixes = [name.rpartition("_")[2] for name in names if name.startswith("sglang:queue_time_seconds")]
    assert ["sum", "bucket", "count"] == list(dict.fromkeys(suffixes))


def test_what_has_not_happened_has_no_series():
    """After the warm-up there are zeros, but no gaps between tokens, retractions, aborts or cache hits."""
    page = SglangPage("m", EngineSettings(), lambda: 0).page()[0]
    names = {name for name, _ in samples_of(page)}
    late = {"num_retracted_requests_total", "num_aborted_requests_total", "cached_tokens_total"}
    late |= {"inter_token_latency_seconds_count"}
    assert {"sglang:queue_time_seconds_count", "sglang:num_running_reqs"} <= names
    assert not names & {f"sglang:{name}" for name in late}


def test_a_request_shows_stage_by_stage():
    """Queue time with the first chunk, time to first token with the first output, the rest when it finishes."""
    limits = EngineSettings(max_num_batched_tokens=16, max_num_seqs=4, speed=PROFILES["fast"])
    engine, page = SimulatedEngine(limits), SglangPage("m", limits, lambda: 0)
    engine.submit(ask("a", 24, 3), 0)
    seen, now_ns = [], 5
    while (duration_s := engine.begin_step(now_ns)) is not None:
        now_ns += round(duration_s * 1e9)
        page.observe(engine.finish_step(now_ns))
        samples = samples_of(page.page()[0])
        seen.append(
            (
                samples["sglang:queue_time_seconds_count", NONE],
                samples.get(("sglang:time_to_first_token_seconds_count", STREAM), 0),
                samples.get(("sglang:inter_token_latency_seconds_count", NONE), 0),
                samples.get(("sglang:e2e_request_latency_seconds_count", STREAM), 0),
                samples.get(("sglang:prompt_tokens_total", STREAM), 0),
                samples.get(("sglang:generation_tokens_total", STREAM), 0),
            )
        )
    assert [(1, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0), (1, 1, 2, 1, 24, 3)] == seen


def test_gauges_are_as_old_as_the_last_report():
    """After a prefill they change with every 40th decode, and once more when the engine falls idle; the real-time count
    of decoded tokens changes with each. A prefill's report counts who ran before it: a lone request runs, by the page,
    only from its 40th decode on.
    """
    limits = EngineSettings(speed=PROFILES["fast"])
    page, seen = SglangPage("m", limits, lambda: 0), []
    for outcome in play(limits, [(0, ask("a", 16, 100))]).outcomes:
        page.observe(outcome)
        samples = samples_of(page.page()[0])
        decoded = samples["sglang:realtime_tokens_total", frozenset({("mode", "decode")})]
        seen.append((samples["sglang:num_used_tokens", NONE], decoded, samples["sglang:num_running_reqs", NONE]))
    assert 100 == len(seen)
    changes = [index for index in range(1, 100) if seen[index][0] != seen[index - 1][0]]
    assert [DECODE_LOG_INTERVAL, 2 * DECODE_LOG_INTERVAL, 99] == changes
    assert [16, 64, 96, 0] == [seen[index][0] for index in (0, *changes)]
    assert list(range(100)) == [decoded for _, decoded, _ in seen]
    assert [0] * 40 + [1] * 59 + [0] == [running for *_, running in seen]
    assert math.isnan(samples["sglang:fwd_occupancy", NONE])


def test_what_stays_when_the_engine_falls_idle():
    """The hit rate of the last prefill and the lengths of the last report of decodes; the throughput does not."""
    limits = EngineSettings(speed=PROFILES["fast"])
    page = SglangPage("m", limits, lambda: 0)
    arrivals = [(0, ask("a", 48, 100)), (10**9, ask("b", 48, 100))]
    for outcome in play(limits, arrivals).outcomes:
        page.observe(outcome)
    samples = samples_of(page.page()[0])
    names = ("cache_hit_rate", "decode_sum_seq_lens", "gen_throughput", "num_running_reqs", "num_used_tokens")
    assert (32 / 48, 48 + 160 - 99, 0, 0, 0) == tuple(samples[f"sglang:{name}", NONE] for name in names)


def test_an_idle_scheduler_reports_after_30_seconds():
    """Until then the last report of the load stands, where that was of a prefill."""
    limits = EngineSettings(speed=PROFILES["fast"])
    now_ns = 0
    page = SglangPage("m", limits, lambda: now_ns)
    outcomes = play(limits, [(0, ask("a", 16, 20))]).outcomes
    for outcome in outcomes:
        page.observe(outcome)
    now_ns = outcomes[0].at_ns + IDLE_REPORT_NS - 1
    assert 16 == samples_of(page.page()[0])["sglang:num_used_tokens", NONE]
    now_ns += 1
    assert 0 == samples_of(page.page()[0])["sglang:num_used_tokens", NONE]


@pytest.mark.parametrize(("scheduled_ns", "counted_as_finished"), [(-1, 0), (5, 1)])
def test_an_abort_is_counted(scheduled_ns: int, counted_as_finished: int):
    """Among the finished requests too, unless it came while the request was queued."""
    page = SglangPage("m", LIMITS, lambda: 0)
    page.abort(RequestRecord(**BASE | {"scheduled_ns": scheduled_ns}, finish_reason="abort"))
    samples = samples_of(page.page()[0])
    assert 1 == samples["sglang:num_aborted_requests_total", NONE]
    assert counted_as_finished == samples.get(("sglang:num_requests_total", STREAM), 0)


def test_the_format_is_negotiated():
    """As prometheus_client's server does: OpenMetrics where it is asked for first, else the text format."""
    page = SglangPage("m", LIMITS, lambda: 0)
    body, content_type = page.page("application/openmetrics-text,text/plain;q=0.5")
    assert (CONTENT_TYPE_LATEST, b"# EOF\n") == (content_type, body[-6:])
    assert "text/plain; version=0.0.4; charset=utf-8" == page.page("*/*")[1]


@pytest.mark.parametrize("host_blocks", [0, 5, 1000])
@given(arrivals=ARRIVALS)
@settings(max_examples=25, deadline=None)
def test_sums_on_the_page_are_the_sums_of_the_truth(host_blocks: int, arrivals: list[Any]):
    """Counts are equal and sums agree to 1e-9, under retraction, prefix hits and chunks."""
    limits = replace(LIMITS, kv_host_blocks=host_blocks)
    played = play(limits, arrivals)
    samples = samples_of(page_after(played, limits).page()[0])
    records = played.records
    forward = frozenset({("stage", "prefill_forward")})
    spans = {
        ("queue_time_seconds", NONE): [(r.queued_ns, r.scheduled_ns) for r in records],
        ("per_stage_req_latency_seconds", forward): [(r.scheduled_ns, r.first_token_ns) for r in records],
        ("time_to_first_token_seconds", STREAM): [(r.arrival_ns, r.first_token_ns) for r in records],
        ("e2e_request_latency_seconds", STREAM): [(r.arrival_ns, r.finished_ns) for r in records],
    }
    for (name, labels), ends in spans.items():
        assert len(ends) == samples[f"sglang:{name}_count", labels]
        total_s = sum(end - start for start, end in ends) / 1e9
        assert total_s == pytest.approx(samples[f"sglang:{name}_sum", labels], abs=1e-9)
    prompts, tokens = sum(r.prompt_tokens for r in records), sum(r.output_tokens for r in records)
    expected = {
        ("num_requests_total", STREAM): len(records),
        ("prompt_tokens_total", STREAM): prompts,
        ("generation_tokens_total", STREAM): tokens,
        ("inter_token_latency_seconds_count", NONE): tokens - len(records),
        ("prompt_tokens_histogram_sum", NONE): prompts,
        ("generation_tokens_histogram_sum", NONE): tokens,
        ("cached_tokens_total", frozenset({("cache_source", "host")})): sum(r.host_tokens for r in records),
        ("cached_tokens_total", frozenset({("cache_source", "device")})): sum(
            r.cached_tokens - r.host_tokens for r in records
        ),
        ("num_retracted_requests_total", NONE): sum(r.preemptions for r in records),
    }
    assert expected == {(name, labels): samples.get((f"sglang:{name}", labels), 0) for name, labels in expected}
    fresh = [
        samples["sglang:prefill_effective_tokens_total", frozenset({("mode", m)})]
        for m in ("input", "device_hit", "host_hit")
    ]
    assert prompts == sum(fresh)
    assert fresh[2] >= sum(r.host_tokens for r in records)
    if host_blocks:
        assert samples["sglang:hicache_host_total_tokens", NONE] == 4 * host_blocks
        reported = {0, *(4 * outcome.host_blocks for outcome in played.outcomes)}
        assert samples["sglang:hicache_host_used_tokens", NONE] in reported
