"""What a page's metrics mean: names old and new, renamed ones, formulas, and label sets that must not be added."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import series
import yaml

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import catalogue, engine_names
from sidelight.scraper.engines.recognition import FEATURES, QUANTITIES, RecognisedEngine, canonical, detect
from sidelight.scraper.exposition import Page, histograms, parse
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import build
from sidelight.scraper.spans.request_times import TIMES
from sidelight.scraper.targets.scrape import Scrape

DIRECTORY = Path(str(resources.files("sidelight.scraper.engines")))
PAIR = Path(__file__).parents[1] / "data/vllm_pd_pages.txt.xz"


@pytest.mark.parametrize("engine", engine_names())
def test_every_file_fits_the_schema(engine: str):
    """Each engine's file is as schema.json has it."""
    schema = json.loads((DIRECTORY / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    table = yaml.safe_load((DIRECTORY / f"{engine}.yaml").read_text(encoding="utf-8"))
    assert engine == table["engine"]
    jsonschema.Draft202012Validator(schema).validate(table)
    assert set(table.get("spans", {}).get("times", {})) <= set(TIMES)


@pytest.mark.parametrize(
    "entry",
    [
        {"metric": "a", "add": ["a", "b"]},
        {"sum": "a"},
        {"histogram": "a", "over": "b"},
        {"add": ["a"]},
        {"metric": "a b"},
        {"metric": "a", "where": {}},
        {"metric": "a", "sinc": "1"},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_no_formula(entry: dict[str, object]):
    """An entry is one of the known forms, whole."""
    schema = json.loads((DIRECTORY / "schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema | {"$ref": "#/$defs/entry", "required": [], "type": "object"})
    definitions = {key: value for key, value in validator.schema.items() if key in ("$defs", "$ref")}
    assert not jsonschema.Draft202012Validator(definitions).is_valid(entry)


@pytest.mark.parametrize("engine", engine_names())
def test_every_engine_says_of_each_quantity_where_it_is_or_why_not(engine: str):
    """Also of those that its file leaves out; none is unknown; and no file is without an engine."""
    assert set(QUANTITIES | FEATURES) == set(catalogue(engine).quantities)
    assert all(bool(quantity.metrics) != bool(quantity.absent) for quantity in catalogue(engine).quantities.values())
    assert {f"{name}.yaml" for name in engine_names()} == {path.name for path in DIRECTORY.glob("*.yaml")}


def test_units_are_the_same_for_all_engines():
    """So that quantities of different engines can be set side by side; but TensorRT-LLM counts cached blocks."""
    for name, common in (QUANTITIES | FEATURES).items():
        units = {catalogue(engine).quantities[name].unit for engine in engine_names()}
        assert units in ({common["unit"]}, {"tokens", "blocks"})


def test_queue_and_prefill_are_observed_together_at_the_end_by_two_engines_only():
    """Only there their sums are of the requests that a client saw end."""
    ends = [
        engine
        for engine in engine_names()
        if {"finish"} == {catalogue(engine).quantities[name].observed for name in ("queue_time", "prefill_time")}
    ]
    assert ["vllm", "trtllm"] == ends
    assert "first_forward" == catalogue("sglang").quantities["queue_time"].observed
    assert "finish" == catalogue("trtllm").quantities["ttft"].observed
    assert "first_token" == catalogue("vllm").quantities["ttft"].observed


def test_unknown_engine():
    """An engine that is not in the catalogue is named, with those that are."""
    with pytest.raises(ValueError, match="no engine foo; known: vllm, sglang"):
        catalogue("foo")


def test_recorded_vllm_has_every_quantity(vllm_scrapes: list[Scrape]):
    """A current vLLM provides every canonical quantity under its current name; those of speculation where it is on."""
    (endpoint,) = build(rows(vllm_scrapes))
    sources = canonical(endpoint.series, "vllm")
    assert [*QUANTITIES, *(name for name in FEATURES if name in sources)] == list(sources)
    absent = {name: source.reason for name, source in sources.items() if isinstance(source, Missing)}
    assert {"draft_tokens", "draft_tokens_accepted"} == absent.keys()
    assert all("--speculative-config switches it on" in reason for reason in absent.values())
    for name in sources.keys() - absent.keys():
        assert catalogue("vllm").quantities[name].metrics[0].text() == source_of(sources, name).metric
    assert 5 == len(source_of(sources, "requests_finished").columns)
    assert RecognisedEngine(name="vllm", version=None, detected_by="metric vllm:num_requests_running") == detect(
        endpoint.series
    )


def test_a_prefill_and_a_decode_engine_show_their_features():
    """Pages of a real vLLM pair with NIXL: only the one that takes KV cache has its fetches, and has made transfers."""
    sections = lzma.decompress(PAIR.read_bytes()).decode().removeprefix("## ").split("\n## ")
    shown = {}
    for section in sections:
        name, text = section.split("\n", 1)
        page = parse(f"{text}\n")
        sources = {key: source for key, source in canonical(page.series, "vllm").items() if key in FEATURES}
        shown[name] = {
            key: float(page.values[list(source.columns)].sum())
            if source.columns
            else float(page.values[[columns.count for columns in source.histograms]].sum())
            for key, source in sources.items()
            if isinstance(source, CanonicalSource)
        }
    fetches = {
        "kv_fetch_waiting_to_start": 0.0,
        "kv_fetch_in_progress": 1.0,
        "kv_fetch_completed_waiting": 1.0,
    }
    assert fetches.items() <= shown["decode"].items()
    assert not fetches.keys() & shown["prefill"].keys()
    for name, decode, prefill in (
        ("kv_transfer_time", 48.0, 0.0),
        ("kv_transfer_failures", 0.0, 0.0),
        ("prefix_cache_hits_remote", 27520.0, 0.0),
        ("requests_waiting_capacity", 0.0, 10.0),
        ("requests_waiting_deferred", 2.0, 0.0),
    ):
        assert (decode, prefill) == (shown["decode"][name], shown["prefill"][name]), name


def test_draft_tokens_accepted_by_place_add_up():
    """As vLLM 0.33 counted them, with drafts of up to three tokens: a fourth place is not shown."""
    places = [f'position="{place}"' for place in range(3)]
    page = parse(
        series.counter("vllm:spec_decode_num_accepted_tokens_total", 2601)
        + series.counter("vllm:spec_decode_num_accepted_tokens_per_pos_total", 1036, 814, 751, labels=places)
    )
    sources = canonical(page.series, "vllm")
    shown = [
        page.values[list(source_of(sources, f"draft_tokens_accepted_at_{place}").columns)].sum() for place in (1, 2, 3)
    ]
    assert page.values[list(source_of(sources, "draft_tokens_accepted").columns)].sum() == sum(shown)
    assert "draft_tokens_accepted_at_4" not in sources


def test_stages_of_sglang_s_scheduler_are_exposed_where_no_forward_pass_ran():
    """Neither the running of batches nor what a forward pass hides; all stages of an idle scheduler are idle time."""
    page = parse(
        "# TYPE sglang:scheduler_stage_seconds_total counter\n"
        + "".join(
            f'sglang:scheduler_stage_seconds_total{{category="{category}",forward_overlap="{overlap}"}} {value}\n'
            for category, overlap, value in (
                ("idle", "none", 7),
                ("run_batch", "none", 10),
                ("process_batch_result", "full", 5),
                ("process_batch_result", "none", 2),
                ("recv_requests", "none", 1),
            )
        )
    )
    source = source_of(canonical(page.series, "sglang"), "scheduler_exposed_time")
    assert 10.0 == page.values[list(source.columns)].sum()


def test_the_balance_of_sglang_s_experts_is_the_sum_of_a_summary_over_its_count():
    """Of prefills and decodes together; a summary has no buckets."""
    page = parse(
        "# TYPE sglang:eplb_balancedness summary\n"
        + "".join(
            f'sglang:eplb_balancedness_{suffix}{{forward_mode="{mode}",moe_ep_rank="0",tp_rank="0"}} {value}\n'
            for mode, passes, balance in (("extend", 10, 6.0), ("decode", 90, 54.0))
            for suffix, value in (("count", passes), ("sum", balance))
        )
    )
    sources = canonical(page.series, "sglang")
    passes, balance = (
        page.values[list(source_of(sources, name).columns)].sum() for name in ("expert_passes", "expert_balance")
    )
    assert (100.0, 60.0) == (passes, balance)


def test_old_names_are_fallbacks():
    """An old page's names are used where the current ones are absent, and never counted twice beside them."""
    page = parse("# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.5\n")
    source = source_of(canonical(page.series, "vllm"), "kv_cache_usage")
    assert ("vllm:gpu_cache_usage_perc", (0,)) == (source.metric, source.columns)
    both = parse(
        "# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.5\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\n"
    )
    source = source_of(canonical(both.series, "vllm"), "kv_cache_usage")
    assert ("vllm:kv_cache_usage_perc", (1,)) == (source.metric, source.columns)
    reason = "the page shows no gauge vllm:num_requests_running"
    assert Missing(reason) == canonical(page.series, "vllm")["requests_running"]


@pytest.mark.parametrize("prefix", ["vllm_", "ray_vllm_", "ray_vllm:"])
def test_renamed_metrics_are_the_same_ones(prefix: str):
    """Ray, and vLLM's own page at /metrics/, change the prefix; a histogram without its TYPE is one by its buckets."""
    page = parse(
        f'{prefix}request_queue_time_seconds_bucket{{le="+Inf"}} 3\n'
        f"{prefix}request_queue_time_seconds_sum 1.5\n"
        f"{prefix}request_queue_time_seconds_count 3\n"
        f'{prefix}iteration_tokens_total_bucket{{le="+Inf"}} 9\n'
        f"{prefix}generation_tokens_total 40\n"
    )
    assert "vllm" == engine_of(page)
    sources = canonical(page.series, "vllm")
    (queue,) = source_of(sources, "queue_time").histograms
    assert (f"{prefix}request_queue_time_seconds", (0,), 1, 2) == (queue.family, queue.buckets, queue.sum, queue.count)
    tokens = source_of(sources, "generation_tokens")
    assert (f"{prefix}generation_tokens_total", (4,)) == (tokens.metric, tokens.columns)


def test_a_histogram_that_ends_in_total_is_one(shared: Path):
    """vLLM's tokens of an iteration, 666 in 600 of them on this page."""
    page = parse((shared / "fixtures/vllm/worker_v1.prom").read_text())
    (tokens,) = [
        histogram for histogram in histograms(page.series) if histogram.family == "vllm:iteration_tokens_total"
    ]
    assert (600.0, 666.0) == (page.values[tokens.count], page.values[tokens.sum])


@pytest.mark.parametrize(
    ("inside", "engine"), [("vllm/worker_v1.prom", "vllm"), ("sglang/server.prom", "sglang"), ("", "dynamo_worker")]
)
def test_a_dynamo_worker_is_the_engine_inside(shared: Path, inside: str, engine: str):
    """Its own metrics count only where the engine's are absent."""
    worker_page = (shared / "fixtures/dynamo/worker_component.prom").read_text()
    page = parse(worker_page + ((shared / "fixtures" / inside).read_text() if inside else ""))
    assert engine == engine_of(page)


def test_pages_without_an_engine(shared: Path):
    """A cache's families, a Triton of other models and a bare Python process are no engine's."""
    lmcache = (shared / "fixtures/vllm/lmcache_families_without_samples.prom").read_text()
    for text in (
        lmcache,
        '# TYPE nv_inference_request_success counter\nnv_inference_request_success{model="resnet"} 4\n',
        "# TYPE python_info gauge\npython_info 1\nvllm_router_build 3\n",
        "",
    ):
        assert detect(parse(text).series) is None


def test_a_page_that_states_its_version():
    """A build_info metric of the engine's own is used."""
    page = parse('vllm:num_requests_running 1\nvllm:build_info{version="1.2"} 1\npython_build_info{version="3.11"} 1\n')
    assert RecognisedEngine(name="vllm", version="1.2", detected_by="metric vllm:num_requests_running") == detect(
        page.series
    )


def test_sglang_counts_each_group_of_ranks_once():
    """Every tensor rank of a group counts the same requests; data-parallel ranks count their own."""
    ranks = [(0, 0), (1, 0), (2, 1), (3, 1)]  # (tp_rank, dp_rank): the second group begins at rank 2
    page = parse(
        "# TYPE sglang:num_running_reqs gauge\n"
        + "".join(
            f'sglang:num_running_reqs{{tp_rank="{tp}",pp_rank="0",moe_ep_rank="{tp}",dp_rank="{dp}"}} {10 + dp}\n'
            for tp, dp in ranks
        )
    )
    source = source_of(canonical(page.series, "sglang"), "requests_running")
    assert [10.0, 11.0] == page.values[list(source.columns)].tolist()


def test_sglang_takes_the_total_of_its_schedulers_priorities():
    """An empty priority is the total of those beside it where ranks stand; elsewhere they add up."""
    for ranks, chosen, expected in (
        ('tp_rank="0",', ("", "1", "2"), [5.0]),
        ('tp_rank="0",', ("1", "2"), [2.0, 3.0]),
        ("", ("", "1", "2"), [5.0, 2.0, 3.0]),
    ):
        values = {"": 5, "1": 2, "2": 3}
        lines = [f'sglang:num_queue_reqs{{{ranks}priority="{name}"}} {values[name]}\n' for name in chosen]
        page = parse("# TYPE sglang:num_queue_reqs gauge\n" + "".join(lines))
        source = source_of(canonical(page.series, "sglang"), "requests_waiting")
        assert expected == page.values[list(source.columns)].tolist()


PRIORITIES = ('priority=""', 'priority="5"')


@pytest.mark.parametrize("name", ["prompt_tokens", "generation_tokens", "num_requests"])
def test_sglangs_requests_without_a_priority_and_with_one_add_up(name: str):
    """Its API process has no ranks: an empty priority there is no total, and may stand at 0 for ever."""
    page = parse(series.counter(f"sglang:{name}_total", 0, 528, labels=PRIORITIES))
    quantity = "requests_finished" if name == "num_requests" else name
    source = source_of(canonical(page.series, "sglang"), quantity)
    assert [0.0, 528.0] == page.values[list(source.columns)].tolist()


@pytest.mark.parametrize("quantity", ["ttft", "e2e_latency"])
def test_sglangs_latencies_of_all_priorities_add_up(quantity: str):
    family = {"ttft": "sglang:time_to_first_token_seconds", "e2e_latency": "sglang:e2e_request_latency_seconds"}
    page = parse("".join(series.histogram(family[quantity], 10, 1.0, labels=each) for each in PRIORITIES))
    assert 2 == len(source_of(canonical(page.series, "sglang"), quantity).histograms)


def test_sglang_prefix_cache_is_read_from_one_family():
    """What was found is part of what was looked up, whichever of its families the version has."""
    new = (
        "# TYPE sglang:prefill_effective_tokens_total counter\n"
        'sglang:prefill_effective_tokens_total{mode="input"} 100\n'
        'sglang:prefill_effective_tokens_total{mode="device_hit"} 30\n'
        'sglang:prefill_effective_tokens_total{mode="host_hit"} 5\n'
    )
    old = (
        "# TYPE sglang:prompt_tokens_total counter\nsglang:prompt_tokens_total 70\n"
        '# TYPE sglang:cached_tokens_total counter\nsglang:cached_tokens_total{cache_source="total"} 20\n'
    )
    for text, queries, hits, moment in ((new + old, 135.0, 35.0, "report"), (old, 70.0, 20.0, "finish")):
        page = parse(text)
        by_name = canonical(page.series, "sglang")
        sources = [source_of(by_name, name) for name in ("prefix_cache_queries", "prefix_cache_hits")]
        assert [queries, hits] == [float(page.values[list(source.columns)].sum()) for source in sources]
        assert {moment} == {source.quantity.observed for source in sources}


def test_old_trtllm_prefill_is_a_difference_of_sums(shared: Path):
    """Both are observed when a request ends; Dynamo's prefix before 0.8 changes nothing; no percentile is possible."""
    text = (shared / "fixtures/trtllm/prometheus_metrics.prom").read_text()
    for page in (parse(text), parse(text.replace("trtllm_", "trtllm:"))):
        source = source_of(canonical(page.series, "trtllm"), "prefill_time")
        (columns,) = source.histograms
        assert ((), ()) == (columns.bounds, columns.buckets)
        seconds = page.values[columns.sum] - page.values[columns.less]
        assert (2.0, pytest.approx(0.067953 - 0.011815, abs=1e-6)) == (page.values[columns.count], seconds)
        assert "finish" == source.quantity.observed
    assert "trtllm:time_to_first_token_seconds - trtllm:request_queue_time_seconds" == source.metric


def test_new_trtllm_names_come_first():
    """A build of 2026 shows prefill, gauges and counters itself; reused and missed blocks together were looked up."""
    page = parse(
        "# TYPE trtllm_request_prefill_time_seconds histogram\n"
        'trtllm_request_prefill_time_seconds_bucket{le="+Inf"} 2\n'
        "trtllm_request_prefill_time_seconds_sum 0.5\ntrtllm_request_prefill_time_seconds_count 2\n"
        "# TYPE trtllm_num_requests_waiting gauge\ntrtllm_num_requests_waiting 7\n"
        "# TYPE trtllm_kv_cache_reused_blocks_total counter\ntrtllm_kv_cache_reused_blocks_total 40\n"
        "# TYPE trtllm_kv_cache_missed_blocks_total counter\ntrtllm_kv_cache_missed_blocks_total 60\n"
    )
    sources = canonical(page.series, "trtllm")
    assert "trtllm_request_prefill_time_seconds" == source_of(sources, "prefill_time").metric
    assert [7.0] == page.values[list(source_of(sources, "requests_waiting").columns)].tolist()
    assert 100.0 == page.values[list(source_of(sources, "prefix_cache_queries").columns)].sum()
    assert 40.0 == page.values[list(source_of(sources, "prefix_cache_hits").columns)].sum()


def test_llamacpp_token_latency_is_a_mean_of_two_counters():
    """It has no histograms: seconds over tokens, without buckets."""
    page = parse(
        "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 400\n"
        "# TYPE llamacpp:tokens_predicted_seconds_total counter\nllamacpp:tokens_predicted_seconds_total 8\n"
    )
    source = source_of(canonical(page.series, "llamacpp"), "inter_token_latency")
    (columns,) = source.histograms
    assert ((), 1, 0) == (columns.bounds, columns.sum, columns.count)
    assert "llamacpp:tokens_predicted_seconds_total / llamacpp:tokens_predicted_total" == source.metric


def test_a_switch_stands_in_the_reason():
    """What a flag would show is missing with the flag; what the engine never shows, with why."""
    sources = canonical((), "trtllm")
    running = "the page shows no gauge trtllm_num_requests_running; enable_iter_perf_stats: true switches it on"
    assert Missing(running) == sources["requests_running"]
    assert Missing(catalogue("trtllm").quantities["preemptions"].absent) == sources["preemptions"]


def engine_of(page: Page) -> str | None:
    engine = detect(page.series)
    return engine.name if engine else None


def source_of(sources: Mapping[str, CanonicalSource | Missing], name: str) -> CanonicalSource:
    source = sources[name]
    assert isinstance(source, CanonicalSource)
    return source
