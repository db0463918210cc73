"""The live page says what the snapshot says, in the names that dashboards and alerts rely on, and nothing else."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import aiohttp
import numpy as np
import promql
import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from waiting import BOUND_S

from sidelight.correlator.live.reasons import REASONS
from sidelight.exporter.prometheus.counts import nothing_counted
from sidelight.exporter.prometheus.page import LivePage
from sidelight.exporter.prometheus.server import serving
from sidelight.exporter.prometheus.snapshot import (
    LATENCY_BOUNDS_S,
    LATENESS_BOUNDS_S,
    MEAN_BOUNDS_S,
    TOKEN_BOUNDS_S,
    ClientCounts,
    Cumulative,
    EngineCounts,
    GatewayCounts,
    GeneratorCounts,
    Snapshot,
    add,
    bucketize,
    traced,
)
from sidelight.exporter.prometheus.table import ENGINE_HISTOGRAMS

PROMTOOL = shutil.which("promtool")
BOUNDS_S = (0.1, 0.5, 1.0)
values = st.lists(st.floats(0, 1000, allow_nan=False), max_size=50)


def page_of(snapshot: Snapshot) -> str:
    page = LivePage()
    page.update(snapshot)
    return page.render().decode()


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def bare(**parts: object) -> Snapshot:
    return Snapshot(version="1", run_id="r", phase="warmup", **parts)  # type: ignore[arg-type]


CONTRACT = {
    "sidelight_build_info": {"version"},
    "sidelight_run_info": {"run_id", "phase", "model", "workload", "engine", "version"},
    "sidelight_run_verdict": {"of"},
    "sidelight_verdict": {"state", "cause"},
    "sidelight_advice_info": {"headline", "why", "do"},
    "sidelight_client_rate_per_second": {"of"},
    "sidelight_class_requests_total": {"class"},
    "sidelight_class_quantile_seconds": {"class", "of", "quantile"},
    "sidelight_client_requests_total": {"status"},
    "sidelight_client_requests_scheduled_total": set(),
    "sidelight_client_requests_submitted_total": set(),
    "sidelight_client_requests_in_flight": set(),
    "sidelight_client_quantile_seconds": {"of", "quantile"},
    "sidelight_client_input_tokens_total": set(),
    "sidelight_client_output_tokens_total": set(),
    "sidelight_client_ttft_seconds_bucket": {"le"},
    "sidelight_client_inter_token_latency_seconds_bucket": {"le"},
    "sidelight_client_time_per_output_token_seconds_bucket": {"le"},
    "sidelight_client_e2e_latency_seconds_bucket": {"le"},
    "sidelight_generator_schedule_lateness_seconds_bucket": {"le"},
    "sidelight_client_requests_good_total": set(),
    "sidelight_slo_limit": {"objective"},
    "sidelight_slo_value": {"objective"},
    "sidelight_slo_met": {"objective"},
    "sidelight_generator_schedule_lateness_quantile_seconds": {"quantile"},
    "sidelight_generator_cpu_seconds_total": {"process"},
    "sidelight_generator_loop_delay_max_seconds": set(),
    "sidelight_live_errors_total": set(),
    "sidelight_engine_info": {"endpoint", "engine", "version"},
    "sidelight_engine_queue_time_seconds_bucket": {"endpoint", "le"},
    "sidelight_engine_prefill_time_seconds_bucket": {"endpoint", "le"},
    "sidelight_engine_decode_time_seconds_bucket": {"endpoint", "le"},
    "sidelight_engine_ttft_seconds_bucket": {"endpoint", "le"},
    "sidelight_engine_inter_token_latency_seconds_bucket": {"endpoint", "le"},
    "sidelight_engine_e2e_latency_seconds_bucket": {"endpoint", "le"},
    "sidelight_engine_quantile_seconds": {"endpoint", "of", "quantile", "bound"},
    "sidelight_engine_requests_running": {"endpoint"},
    "sidelight_engine_requests_waiting": {"endpoint"},
    "sidelight_engine_kv_cache_usage_ratio": {"endpoint"},
    "sidelight_engine_highest": {"endpoint", "of"},
    "sidelight_engine_prompt_tokens_total": {"endpoint"},
    "sidelight_engine_generation_tokens_total": {"endpoint"},
    "sidelight_engine_preemptions_total": {"endpoint"},
    "sidelight_engine_prefix_cache_queries_total": {"endpoint"},
    "sidelight_engine_prefix_cache_hits_total": {"endpoint"},
    "sidelight_engine_requests_finished_total": {"endpoint"},
    "sidelight_engine_feature": {"endpoint", "of"},
    "sidelight_engine_feature_counted_total": {"endpoint", "of"},
    "sidelight_engine_feature_time_seconds_bucket": {"endpoint", "of", "le"},
    "sidelight_scrapes_total": {"endpoint", "outcome"},
    "sidelight_scrape_duration_seconds": {"endpoint"},
    "sidelight_engine_last_answer_timestamp_seconds": {"endpoint"},
    "sidelight_ttft_part_seconds_bucket": {"part", "source", "le"},
    "sidelight_e2e_part_seconds_bucket": {"part", "source", "le"},
    "sidelight_inner_part_seconds_bucket": {"part", "source", "le"},
    "sidelight_no_client_part_seconds_bucket": {"part", "le"},
    "sidelight_requests_total": {"source"},
    "sidelight_breakdown_pending": set(),
    **{f"sidelight_ttft_{name}": {"part"} for name in ("part_mean_seconds", "largest_part_ratio")},
    "sidelight_drift_since_seconds": {"process", "part"},
    "sidelight_breakdown_quality_total": {"quality"},
    "sidelight_gateway_requests_total": {"first_output"},
    "sidelight_breakdown_missing_total": {"reason"},
    "sidelight_receiver_exports_total": set(),
    "sidelight_receiver_spans_total": set(),
    "sidelight_receiver_forwarded_total": set(),
    "sidelight_receiver_forward_dropped_total": set(),
    "sidelight_receiver_forward_unknown_total": set(),
    "sidelight_receiver_forward_queue": {"what"},
    "sidelight_receiver_restarts_total": set(),
    "sidelight_receiver_cut_connections_total": set(),
    "sidelight_scraper_restarts_total": set(),
    "sidelight_scrapes_unwritten_total": set(),
    "sidelight_watch_lag_seconds": set(),
    "sidelight_receiver_refused_total": {"kind"},
    "sidelight_receiver_other_exports_total": {"signal"},
    "sidelight_receiver_other_dropped_total": {"signal"},
    "sidelight_watch_errors_total": set(),
    "sidelight_watch_cpu_seconds_total": set(),
    "sidelight_window_repeated_spans_total": set(),
    "sidelight_window_evicted_spans_total": set(),
    "sidelight_health_probes_total": set(),
    "sidelight_whole_traces_total": set(),
    "sidelight_broken_traces_total": {"service", "how"},
    "sidelight_window_size": {"what"},
    "sidelight_headroom_ratio": {"bound"},
    "sidelight_drift_ratio": {"process", "part", "bound"},
}


def test_names_and_labels_are_the_contract() -> None:
    """A full snapshot exposes exactly the promised names, each with exactly the promised labels."""
    exposed = {
        name: {label for label, _ in labels}
        for name, labels in samples_of(page_of(snapshots.snapshot(3)))
        if not name.endswith(("_sum", "_count"))
    }
    assert exposed == CONTRACT


def test_no_bound_of_a_latency_is_over_a_tenth_above_the_one_before() -> None:
    """From 1 ms to 10 minutes, of tokens to 10 s; those on which objectives are usually stated are among them."""
    for bounds_s, most_s in ((LATENCY_BOUNDS_S, 600.0), (TOKEN_BOUNDS_S, 10.0)):
        assert {0.01, 0.05, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0, 2.5, 5.0, 10.0} <= set(bounds_s)
        inside = [bound for bound in bounds_s if bound >= 0.001]
        assert (0.001, most_s) == (inside[0], inside[-1])
        assert all(after <= before * (1.1 + 1e-12) for before, after in pairwise(inside))


@given(st.lists(st.floats(0.001, 600.0), min_size=1, max_size=40), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_quantile_that_prometheus_interpolates_is_at_most_10_percent_off(values_s: list[float], q: float) -> None:
    """However they lie, also all in one bucket: it is beside the value at its rank."""
    counted = bucketize(values_s, LATENCY_BOUNDS_S)
    cumulative = np.concatenate([[0.0], np.cumsum(counted.counts[:-1])])
    bucket = np.searchsorted(cumulative, q * len(values_s))
    edges_s = np.array([0.0, *LATENCY_BOUNDS_S])[bucket - 1 : bucket + 1]
    drawn_s = np.interp(q * len(values_s), cumulative[bucket - 1 : bucket + 1], edges_s)
    if min(values_s) > LATENCY_BOUNDS_S[0]:
        assert drawn_s == pytest.approx(sorted(values_s)[math.ceil(q * len(values_s)) - 1], rel=0.1 + 1e-9)


async def test_prometheus_draws_the_quantiles_of_the_ttft_and_each_part(tmp_path: Path) -> None:
    """Within 10 %, of log-uniform durations, each part in a decade of its own."""
    if promql.PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    random, parts = np.random.default_rng(7), nothing_counted(sources=("trace",))
    spread_s = {
        part: np.exp(random.uniform(math.log(low_s), math.log(60 * low_s), 3000))
        for (part, _), low_s in zip(parts.ttft, (0.001, 0.01, 0.1, 1.0, 10.0), strict=True)
    }
    of_parts = {(part, "trace"): bucketize(values_s, LATENCY_BOUNDS_S) for part, values_s in spread_s.items()}
    client = ClientCounts(requests={}, ttft=of_parts["other", "trace"])
    page, expr = LivePage(), "histogram_quantile({}, sum by (le) ({}_bucket{}))"
    page.update(bare(client=client, parts=replace(parts, ttft=of_parts)))
    series = {
        ("sidelight_ttft_part_seconds", f'{{part="{part}"}}'): values_s for part, values_s in spread_s.items()
    } | {("sidelight_client_ttft_seconds", ""): spread_s["other"]}
    async with serving(page, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://").removesuffix("/metrics")
        async with promql.prometheus(scraping=[address], directory=tmp_path) as base_url, asyncio.timeout(BOUND_S):
            scraped = list[float]()
            while not scraped:
                scraped = await promql.values_at(base_url, "sidelight_client_ttft_seconds_sum", time.time())
                await asyncio.sleep(0.05)
            for (name, labels), values_s in series.items():
                for q in (0.5, 0.9, 0.99):
                    drawn_s = await promql.value_at(base_url, expr.format(q, name, labels), time.time())
                    assert drawn_s == pytest.approx(np.quantile(values_s, q), rel=0.1), (name, labels, q)


def test_a_page_has_at_most_3600_series() -> None:
    """Of a run with four engines of as many buckets as vLLM's, spans, estimates and objectives; and of such a watch."""
    known = snapshots.snapshot(3)
    engine_s = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, *map(float, range(5, 20)))  # 22 bounds, as vLLM has them
    histograms = {name: snapshots.observed(1, 1.0, engine_s) for name in ENGINE_HISTOGRAMS}
    bounds = ("estimate", "low", "high")
    levels = ("0.5", "0.9", "0.95", "0.99")
    quantiles = dict.fromkeys(product(ENGINE_HISTOGRAMS, levels, bounds), 1.0)
    engines = tuple(
        replace(known.engines[0], endpoint=f"http://{host}/metrics", histograms=histograms, quantiles=quantiles)
        for host in "abcd"
    )
    parts = replace(
        nothing_counted(sources=("trace", "histogram")),
        inner={("engine_frontend", "trace"): bucketize([1.0], MEAN_BOUNDS_S)},
        pending=1,
    )
    run = replace(known, engines=engines, parts=parts, watch=None)
    assert known.client is not None
    client = ClientCounts(requests=known.client.requests, ttft=known.client.ttft, e2e=known.client.e2e)
    missing = dict.fromkeys(REASONS, 1)
    watch = replace(known, engines=engines, parts=replace(parts, missing=missing), client=client, generator=None)
    sizes = [len(samples_of(page_of(snapshot))) for snapshot in (run, watch)]
    assert max(sizes) <= 3600, sizes


def test_promtool_accepts_the_page() -> None:
    """Prometheus' own linter has nothing to say about the page."""
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    page = page_of(snapshots.snapshot(3)).encode()
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_values_are_the_snapshots() -> None:
    """Counters, gauges and the breakdown stand on the page as they stand in the snapshot."""
    samples = samples_of(page_of(snapshots.snapshot(7)))
    endpoint = ("endpoint", snapshots.ENDPOINT)
    assert samples["sidelight_client_requests_total", frozenset({("status", "ok")})] == 35
    assert samples["sidelight_client_requests_total", frozenset({("status", "refused")})] == 0
    assert samples["sidelight_client_output_tokens_total", frozenset()] == 1400
    assert samples["sidelight_generator_cpu_seconds_total", frozenset({("process", "worker-0")})] == pytest.approx(0.7)
    assert samples["sidelight_engine_kv_cache_usage_ratio", frozenset({endpoint})] == 0.4
    assert samples["sidelight_engine_preemptions_total", frozenset({endpoint})] == 700
    ttft, errors = (frozenset({("objective", name)}) for name in ("ttft_p99", "error_rate"))
    assert [samples["sidelight_slo_limit", ttft], samples["sidelight_slo_limit", errors]] == [0.5, 0.1]
    assert ("sidelight_slo_value", ttft) not in samples  # infinite: a seventh of all failed
    assert samples["sidelight_slo_value", errors] == pytest.approx(1 / 6)
    assert [samples["sidelight_slo_met", ttft], samples["sidelight_slo_met", errors]] == [0, 0]
    assert samples["sidelight_scrapes_total", frozenset({endpoint, ("outcome", "ok")})] == 28
    queue = frozenset({("part", "queue"), ("source", "trace")})
    assert samples["sidelight_ttft_part_seconds_sum", queue] == pytest.approx(7 * 6.5 * 0.12)


def test_buckets_are_cumulative_on_the_page_only() -> None:
    """Counts a bucket in the snapshot become counts at or below a bound on the page."""
    ttft = Cumulative(bounds_s=(0.1, 1.0), counts=(2.0, 3.0, 1.0), sum_s=4.5)
    text = page_of(bare(client=ClientCounts(requests={}, ttft=ttft)))
    lines = [line for line in text.splitlines() if line.startswith("sidelight_client_ttft_seconds")]
    assert lines == [
        'sidelight_client_ttft_seconds_bucket{le="0.1"} 2.0',
        'sidelight_client_ttft_seconds_bucket{le="1.0"} 5.0',
        'sidelight_client_ttft_seconds_bucket{le="+Inf"} 6.0',
        "sidelight_client_ttft_seconds_count 6.0",
        "sidelight_client_ttft_seconds_sum 4.5",
    ]


def test_the_page_is_empty_before_the_first_snapshot() -> None:
    """Nothing is known yet, so nothing is shown."""
    assert LivePage().render() == b""


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"client": ClientCounts(requests={})},
        {"generator": GeneratorCounts()},
        {"parts": None, "engines": ()},
    ],
)
def test_what_is_not_known_is_absent(parts: dict[str, object]) -> None:
    """No family, no help line and no zero stands in for something unknown."""
    text = page_of(bare(**parts))
    assert {line.split()[2] for line in text.splitlines() if line.startswith("#")} == {
        "sidelight_build_info",
        "sidelight_run_info",
    }


def test_an_engine_shows_only_what_it_exposes() -> None:
    """Quantities an engine lacks, unknown names and values that are no numbers are left out, the rest stays."""
    engine = EngineCounts(
        endpoint="a",
        gauges={"requests_running": 1.0, "kv_cache_usage": math.nan, "not_canonical": 3.0},
        histograms={"ttft": Cumulative(bounds_s=(1.0,), counts=(math.nan, 0.0), sum_s=0.0)},
    )
    names = {name for name, _ in samples_of(page_of(bare(engines=(engine,)))) if "engine" in name}
    assert names == {"sidelight_engine_info", "sidelight_engine_requests_running"}


def test_a_gateway_s_page_has_series_of_its_own() -> None:
    """Beside those of an engine on the same page; what it does not tell is not there."""
    gateway = GatewayCounts(
        gateway="litellm",
        own_s=0.06,
        histograms={"queue_time": Cumulative(bounds_s=(1.0,), counts=(2.0, 0.0), sum_s=0.5)},
        gauges={"requests_in_flight": 3.0},
        counters={"retries": 4.0},
    )
    samples = samples_of(page_of(bare(engines=(EngineCounts(endpoint="a", gateway=gateway),))))
    where = ("endpoint", "a")
    assert not any(name.startswith("sidelight_engine") for name, _ in samples)
    shown = {name: value for (name, labels), value in samples.items() if "gateway" in name and where in labels}
    assert {
        "sidelight_gateway_info": 1.0,
        "sidelight_gateway_own_seconds": 0.06,
        "sidelight_gateway_queue_seconds_bucket": 2.0,
        "sidelight_gateway_queue_seconds_sum": 0.5,
        "sidelight_gateway_queue_seconds_count": 2.0,
        "sidelight_gateway_requests_in_flight": 3.0,
        "sidelight_gateway_retries_total": 4.0,
    } == shown


def test_each_endpoint_has_its_own_series() -> None:
    """Two engines make one family with two series, and their bounds may differ."""
    engines = tuple(
        EngineCounts(
            endpoint=endpoint, histograms={"ttft": Cumulative(bounds_s=bounds_s, counts=(1.0, 1.0), sum_s=bounds_s[0])}
        )
        for endpoint, bounds_s in (("a", (0.5,)), ("b", (2.0,)))
    )
    text = page_of(bare(engines=engines))
    assert text.count("# TYPE sidelight_engine_ttft_seconds histogram") == 1
    samples = samples_of(text)
    assert samples["sidelight_engine_ttft_seconds_sum", frozenset({("endpoint", "a")})] == 0.5
    assert samples["sidelight_engine_ttft_seconds_bucket", frozenset({("endpoint", "b"), ("le", "2.0")})] == 1.0


@pytest.mark.parametrize(
    ("text", "label"),
    [(same, same) for same in ('a"b', "a\\b", "a}b,c={", "http://[::1]:8000/metrics", "日本語", "")]
    + [("a\nb", "a\\x0ab"), ("\x1b[2J\u202e", "\\x1b[2J\\u202e")],
)
def test_hostile_label_values_survive(text: str, label: str) -> None:
    """Whatever an endpoint or a version is called, a parser reads the same name back; controls are escaped."""
    engine = EngineCounts(endpoint=text, version=text, gauges={"requests_running": 1.0})
    samples = samples_of(page_of(bare(engines=(engine,))))
    assert samples["sidelight_engine_requests_running", frozenset({("endpoint", label)})] == 1.0


def test_what_is_no_text_is_shown_as_what_it_is() -> None:
    """A path on a command line need not be UTF-8, and the page is."""
    assert r'workload="\\udcff.jsonl"' in page_of(bare(about={"workload": "\udcff.jsonl"}))


@pytest.mark.parametrize(
    ("observed", "counts"),
    [
        ([], (0.0, 0.0, 0.0, 0.0)),
        ([0.1], (1.0, 0.0, 0.0, 0.0)),
        ([0.10001], (0.0, 1.0, 0.0, 0.0)),
        ([0.0, 1.0, 1.5, math.inf], (1.0, 0.0, 1.0, 2.0)),
        ([math.nan, 0.3], (0.0, 1.0, 0.0, 0.0)),
    ],
)
def test_bucketize(observed: list[float], counts: tuple[float, ...]) -> None:
    """A bound belongs to its bucket, what is above all goes to +Inf, and a missing value is not counted."""
    assert bucketize(observed, BOUNDS_S).counts == counts


@given(first=values, second=values)
def test_adding_is_bucketizing_together(first: list[float], second: list[float]) -> None:
    """Two parts of a run, added, are the histogram of the whole."""
    whole = bucketize(np.array(first + second, dtype=np.float64), BOUNDS_S)
    parts = add(bucketize(first, BOUNDS_S), bucketize(second, BOUNDS_S))
    assert parts.counts == whole.counts
    assert parts.sum_s == pytest.approx(whole.sum_s)
    assert sum(whole.counts) == len(first) + len(second)


def test_different_bounds_do_not_add() -> None:
    """Histograms over different bounds are not comparable."""
    with pytest.raises(ValueError, match="different bounds"):
        add(bucketize([], (1.0,)), bucketize([], (2.0,)))


@pytest.mark.parametrize("bounds_s", [LATENCY_BOUNDS_S, TOKEN_BOUNDS_S, LATENESS_BOUNDS_S, MEAN_BOUNDS_S])
def test_standard_bounds_make_histograms(bounds_s: tuple[float, ...]) -> None:
    """The standard bounds ascend and are finite; how many series they make has a test above."""
    assert all(low_s < high_s for low_s, high_s in pairwise((0.0, *bounds_s, math.inf)))


def test_the_latest_request_of_a_bucket_is_its_exemplar() -> None:
    """By when it was observed, whichever batch it came in; what has no trace or no value is none."""
    at_ns = np.array([30, 10, 20, 40, 50], dtype=np.int64) * 10**9
    traces = np.array(["c" * 32, "a" * 32, "b" * 32, "", "d" * 32], dtype=object)
    first = traced(np.array([0.05, 0.06, 2.0, 0.07, math.nan]), BOUNDS_S, traces, at_ns)
    assert first.counts == bucketize([0.05, 0.06, 2.0, 0.07], BOUNDS_S).counts
    assert first.exemplars == {0: ("c" * 32, 0.05, 30.0), 3: ("b" * 32, 2.0, 20.0)}
    late = traced(np.array([0.01, 3.0]), BOUNDS_S, traces[:2], at_ns[[1, 3]])
    both = {0: ("c" * 32, 0.05, 30.0), 3: ("a" * 32, 3.0, 40.0)}
    assert add(first, late).exemplars == add(late, first).exemplars == both


async def test_prometheus_keeps_the_exemplars_of_the_page(tmp_path: Path) -> None:
    """Each in the bucket that its value belongs to. It asks for OpenMetrics; text 0.0.4 has none."""
    if promql.PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    now_ns, traces = time.time_ns(), np.array(["a" * 32, "b" * 32], dtype=object)
    ttft = traced(np.array([0.05, 0.7]), BOUNDS_S, traces, np.array([now_ns - 10**9, now_ns]))
    page = LivePage()
    page.update(bare(client=ClientCounts(requests={}, ttft=ttft)))
    assert b"trace_id" not in page.render()
    async with serving(page, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://").removesuffix("/metrics")
        async with promql.prometheus(scraping=[address], directory=tmp_path) as base_url, asyncio.timeout(BOUND_S):
            exemplars = list[promql.Exemplar]()
            while len(exemplars) < 2:
                exemplars = await promql.exemplars(
                    base_url, "sidelight_client_ttft_seconds_bucket", since_s=now_ns / 1e9
                )
                await asyncio.sleep(0.05)
    assert {("0.1", "a" * 32, 0.05), ("1.0", "b" * 32, 0.7)} == {
        (exemplar.series["le"], exemplar.trace_id, exemplar.value) for exemplar in exemplars
    }


async def test_the_page_is_served_as_text() -> None:
    """GET /metrics answers 0.0.4 text with the latest snapshot; /healthz answers ok."""
    page = LivePage()
    async with serving(page, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        for step in (1, 2):
            page.update(snapshots.snapshot(step))
            async with session.get(url) as response:
                body = await response.text()
                assert response.status == 200
                assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert body == page.render().decode()
            assert f'sidelight_client_requests_total{{status="ok"}} {5.0 * step}' in body
        async with session.get(url.replace("/metrics", "/healthz")) as response:
            assert (response.status, await response.text()) == (200, "ok\n")


async def test_openmetrics_is_negotiated() -> None:
    """A scraper that asks for OpenMetrics gets it, with the same names."""
    page = LivePage()
    page.update(snapshots.snapshot(2))
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with (
        serving(page, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url) as response,
    ):
        body = await response.text()
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {sample.name for family in parse_openmetrics(body) for sample in family.samples}
    assert CONTRACT.keys() <= names
    assert body.endswith("# EOF\n")


async def test_a_port_in_use_is_an_os_error() -> None:
    """The caller decides what to do without a live page: nothing is swallowed, nothing is left listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="Address already in use"):
            async with serving(LivePage(), "127.0.0.1", taken.getsockname()[1]):
                pass


async def test_the_port_is_free_afterwards() -> None:
    """Leaving the context closes the listener."""
    async with serving(LivePage(), "127.0.0.1", 0) as url:
        port = int(url.split(":")[2].split("/")[0])
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0
