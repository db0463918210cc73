"""The AIPerf-compatible JSON: names, presence rules and numbers against a recording."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from exports import Recorded, S, source_of
from prometheus_client.parser import text_string_to_metric_families
from series import URL, endpoint_of
from series import histogram as histogram_page

from sidelight.exporter.server_metrics import server_metrics_files
from sidelight.exporter.server_metrics.json import document
from sidelight.exporter.server_metrics.source import MetricsSource
from sidelight.rundir.files import replace_file

Small = Callable[..., dict[str, Any]]


@pytest.fixture
def small() -> Small:
    """Export the metrics of pages a second apart, from half a second after the first to half before the last."""

    def make(pages: Sequence[str], slice_ns: int = S) -> dict[str, Any]:
        source = source_of(endpoint_of(pages), start_ns=S * 3 // 2, end_ns=len(pages) * S - S // 2, slice_ns=slice_ns)
        metrics: dict[str, Any] = export(source)["metrics"]
        return metrics

    return make


def export(source: MetricsSource) -> dict[str, Any]:
    """Return the document, which JSON can hold as it is."""
    result = document(source)
    assert result == json.loads(json.dumps(result, allow_nan=False))
    return result


def test_top_level_and_summary(recorded: Recorded):
    """The top level, the summary and the endpoint's collection facts are the format's, field for field."""
    _, endpoint = recorded
    dead = endpoint_of([""], url="http://127.0.0.1:9/metrics")
    start_ns, end_ns = int(endpoint.response_ns[0]), int(endpoint.response_ns[-1])
    result = export(source_of(endpoint, dead, slice_ns=10 * S, configured=["http://never/metrics", URL]))
    assert ["1.0", None, {"name": "sidelight", "version": "0.1.0"}] == [
        result[key] for key in ("schema_version", "aiperf_version", "generator")
    ]
    assert {"model": "m", "concurrency": 4} == result["input_config"]
    summary = result["summary"]
    assert ["http://never/metrics", URL, "http://127.0.0.1:9/metrics"] == summary["endpoints_configured"]
    assert [URL] == summary["endpoints_successful"] == list(summary["endpoint_info"])
    assert ("2026-11-20T23:59:33.843733", 26) == (summary["start_time"], len(summary["end_time"]))
    info = summary["endpoint_info"][URL]
    assert (20, 20, start_ns, end_ns) == tuple(
        info[key] for key in ("total_fetches", "unique_updates", "first_fetch_ns", "last_update_ns")
    )
    assert 2.0 == info["avg_fetch_latency_ms"]
    assert pytest.approx(96_001.6 / 19, rel=1e-4) == info["avg_update_interval_ms"]
    assert (end_ns - start_ns) / S == info["duration_seconds"]


def test_totals_are_those_of_the_first_and_the_last_page(recorded: Recorded):
    """Every counter, count, sum and bucket is the difference of two pages as prometheus-client reads them."""
    pages, endpoint = recorded
    metrics = export(source_of(endpoint, slice_ns=10 * S))["metrics"]
    before = {(s.name, str(s.labels)): s.value for f in text_string_to_metric_families(pages[0]) for s in f.samples}
    compared = 0
    for family in text_string_to_metric_families(pages[-1]):
        for sample in family.samples:
            increase = sample.value - before.get((sample.name, str(sample.labels)), 0.0)
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            if family.type not in ("counter", "histogram") or sample.name.endswith("_created"):
                continue
            series = next(s for s in metrics[family.name]["series"] if s.get("labels", {}) == labels)
            if family.type == "counter":
                assert increase == series["stats"]["total"], sample
            elif sample.name.endswith("_bucket"):
                assert increase == series["buckets"][sample.labels["le"]], sample
            elif sample.name.endswith("_count") or series["stats"]["count"] > 0:
                assert increase == series["stats"][sample.name.rpartition("_")[2]], sample
            compared += 1
    assert compared > 300


def test_names_types_and_what_is_left_out(recorded: Recorded):
    """Counters lose `_total`, a histogram called `_total` keeps it; creation stamps and summaries are left out."""
    _, endpoint = recorded
    metrics = export(source_of(endpoint, slice_ns=10 * S))["metrics"]
    assert "vllm:request_success" in metrics
    assert "vllm:request_success_total" not in metrics
    assert "histogram" == metrics["vllm:iteration_tokens_total"]["type"]
    assert [] == [name for name in metrics if name.endswith("_created")]
    assert {"counter", "gauge", "histogram"} == {metric["type"] for metric in metrics.values()}
    assert "tokens" == metrics["vllm:generation_tokens"]["unit"]
    assert "ratio" == metrics["vllm:kv_cache_usage_perc"]["unit"]
    assert "http_request_size_bytes" not in metrics
    assert "labels" not in metrics["process_cpu_seconds"]["series"][0]


def test_counter_statistics(small: Small):
    """Rates over the window's own duration; their spread over whole slices; activity or none, all fields are there."""
    pages = [f"# HELP a_total A.\n# TYPE a_total counter\na_total {v}\n" for v in (5, 7, 11, 17, 20)]
    metric = small(pages)["a"]
    assert {"type": "counter", "description": "A.", "unit": "count"} == {
        k: metric[k] for k in ("type", "description", "unit")
    }
    expected = {"total": 15, "rate": 5, "rate_avg": 5, "rate_min": 2, "rate_max": 9, "rate_std": 13**0.5}
    assert pytest.approx(expected) == metric["series"][0]["stats"]
    assert [2.0, 4.0, 9.0] == [s["total"] for s in metric["series"][0]["timeslices"]]
    still = small(["# TYPE a_total counter\na_total 5\n"] * 4)["a"]["series"][0]["stats"]
    assert {"total", "rate", "rate_avg", "rate_min", "rate_max", "rate_std"} == set(still)
    assert {0.0} == set(still.values())


def test_gauge_statistics(small: Small):
    """Exact percentiles of the samples inside the window; a constant has no spread; a partial slice says so."""
    metric = small([f'# TYPE g gauge\ng{{a="b"}} {v}\n' for v in (9, 1, 2, 6, 0)], slice_ns=S * 2)["g"]
    (series,) = metric["series"]
    assert (3.0, 1.0, 6.0, 2.0) == tuple(series["stats"][key] for key in ("avg", "min", "max", "p50"))
    assert pytest.approx(7**0.5) == series["stats"]["std"]
    assert {"a": "b"} == series["labels"]
    assert {"avg": 1.5, "min": 1.0, "max": 2.0, "start_ns": S * 3 // 2, "end_ns": S * 7 // 2} == series["timeslices"][0]
    assert series["timeslices"][1]["is_complete"] is False
    constant = small(["# TYPE g gauge\ng 1795271142.71\n"] * 23)["g"]["series"][0]["stats"]
    assert {1795271142.71} == {value for key, value in constant.items() if key != "std"}
    assert (0.0, 13) == (constant["std"], len(constant))


def histogram(low: int, count: int, total: float) -> str:
    return histogram_page("h_seconds", count, total, buckets=(("1.0", low),))


def test_histogram_statistics(small: Small):
    """Buckets are cumulative increases under their own keys, counts are integers, slices have their own buckets."""
    (series,) = small([histogram(1, 1, 0.5), histogram(3, 4, 4.5), histogram(5, 6, 6.0)])["h_seconds"]["series"]
    assert {"1.0": 4, "+Inf": 5} == series["buckets"]
    assert (5, 5.5, 1.1, 5.0, 5.5) == tuple(
        series["stats"][key] for key in ("count", "sum", "avg", "count_rate", "sum_rate")
    )
    assert isinstance(series["stats"]["count"], int)
    assert 14 == len(series["stats"])
    assert series["stats"]["p50_estimate"] <= 1.0 <= series["stats"]["p99_estimate"]
    (timeslice,) = series["timeslices"]
    assert (5, 5.5, {"1.0": 4, "+Inf": 5}) == (timeslice["count"], timeslice["sum"], timeslice["buckets"])


def test_histogram_without_observations(small: Small):
    """Only `count: 0`, and buckets of zeros."""
    (series,) = small([histogram(1, 1, 0.5)] * 3)["h_seconds"]["series"]
    assert {"endpoint_url": URL, "stats": {"count": 0}, "buckets": {"1.0": 0, "+Inf": 0}} == series


def test_gauge_and_counter_of_one_short_name_are_both_kept(small: Small):
    """Where a gauge already has a counter's short name, the counter keeps its long one."""
    metrics = small(["# TYPE x gauge\nx 1\n# TYPE x_total counter\nx_total 2\n"] * 3)
    assert {"x": "gauge", "x_total": "counter"} == {name: metric["type"] for name, metric in metrics.items()}


def test_endpoints_that_disagree_about_a_type_are_both_kept():
    """What is met later has its type in its name."""
    first = endpoint_of(["# TYPE x gauge\nx 1\n"] * 3)
    other = endpoint_of(["# TYPE x counter\nx 1\n"] * 3, url="http://b/metrics")
    metrics = export(source_of(first, other))["metrics"]
    assert {"x": "gauge", "x:counter": "counter"} == {name: metric["type"] for name, metric in metrics.items()}


def test_the_exposed_name_stands_beside_another(small: Small):
    """A PromQL query finds what the page says; where the names are equal, nothing is added."""
    metrics = small(["# TYPE a_total counter\na_total 2\n# TYPE g gauge\ng 1\n"] * 3)
    assert "a_total" == metrics["a"]["exposed_name"]
    assert "exposed_name" not in metrics["g"]


def test_series_of_several_endpoints_stand_under_one_name():
    """Metrics are grouped by name over endpoints, a series for each endpoint and label set."""
    page = '# TYPE g gauge\ng{a="1"} 1\ng{a="2"} 2\n'
    endpoints = [endpoint_of([page] * 3, url=url) for url in ("http://a/metrics", "http://b/metrics")]
    series = export(source_of(*endpoints))["metrics"]["g"]["series"]
    assert [
        ("http://a/metrics", "1"),
        ("http://a/metrics", "2"),
        ("http://b/metrics", "1"),
        ("http://b/metrics", "2"),
    ] == [(entry["endpoint_url"], entry["labels"]["a"]) for entry in series]


def test_fields_are_those_of_a_real_file(recorded: Recorded, reference: Path):
    """A real AIPerf file has no field in a metric, series, statistics or slice that ours lacks."""
    theirs = json.loads((reference / "server_metrics_export.json").read_text())
    ours = export(source_of(recorded[1], slice_ns=10 * S))
    assert {"metrics_phase", "warmup_metrics"} == set(theirs) - set(ours)
    assert {"generator"} == set(ours) - set(theirs)
    assert set(theirs["summary"]) - {"phase_time_ranges"} == set(ours["summary"])
    theirs_info, ours_info = (next(iter(r["summary"]["endpoint_info"].values())) for r in (theirs, ours))
    assert list(theirs_info) == list(ours_info)
    shared = [name for name in theirs["metrics"] if name in ours["metrics"]]
    assert 15 < len(shared)
    for name in shared:
        metric, our_metric = theirs["metrics"][name], ours["metrics"][name]
        assert set(metric) <= set(our_metric), name
        assert metric["type"] == our_metric["type"], name
        assert metric.get("unit", our_metric["unit"]) == our_metric["unit"], name
        their_series, other = metric["series"][0], our_metric["series"][0]
        if other["stats"].get("count") != 0:
            assert set(their_series) <= set(other), name
            assert set(their_series["stats"]) == set(other["stats"]), name
            assert set(their_series["timeslices"][0]) <= {field for piece in other["timeslices"] for field in piece}, (
                name
            )


def test_rates_of_a_window_shorter_than_two_slices(small: Small):
    """Their spread is that of scrape intervals: every counter has all rates."""
    pages = [f"# TYPE a_total counter\na_total {v}\n" for v in (5, 7, 11, 17, 20)]
    stats = small(pages, slice_ns=60 * S)["a"]["series"][0]["stats"]
    expected = {"total": 15, "rate": 5, "rate_avg": 3.75, "rate_min": 2, "rate_max": 6, "rate_std": 35**0.5 / 12**0.5}
    assert pytest.approx(expected) == stats


def test_only_what_is_asked_for_is_written(tmp_path: Path, recorded: Recorded):
    """A format a file, the same bytes each time; formats that are not of this family are another's."""
    source = source_of(recorded[1], slice_ns=10 * S)
    formats = ("text", "json", "csv", "jsonl", "parquet")
    names = [f"server_metrics_export.{ending}" for ending in formats[1:]]
    assert names == [name for name, _ in server_metrics_files(source, formats)]
    assert [] == list(server_metrics_files(source, ["text"]))
    for name, write in server_metrics_files(source, formats):
        replace_file(tmp_path / name, write)
        replace_file(tmp_path / f"again.{name}", write)
        assert (tmp_path / name).read_bytes() == (tmp_path / f"again.{name}").read_bytes()
    assert document(source) == json.loads((tmp_path / names[0]).read_text())


def test_rates_are_over_what_scrapes_cover():
    """Where scrapes ended in the middle of the window, rates divide by the part they cover."""
    pages = [f"# TYPE a_total counter\na_total {10 * n}\n{histogram(0, 10 * n, 20.0 * n)}" for n in range(5)]
    source = source_of(endpoint_of(pages), start_ns=S * 3 // 2, end_ns=S * 23 // 2, slice_ns=4 * S)
    metrics = export(source)["metrics"]
    stats = metrics["a"]["series"][0]["stats"]
    assert (40, pytest.approx(40 / 3.5)) == (stats["total"], stats["rate"])
    assert pytest.approx([40 / 3.5]) == [piece["rate"] for piece in metrics["a"]["series"][0]["timeslices"]]
    stats = metrics["h_seconds"]["series"][0]["stats"]
    assert pytest.approx((40 / 3.5, 80 / 3.5)) == (stats["count_rate"], stats["sum_rate"])


def test_numbers_too_large_are_left_out(small: Small):
    """What no number can hold is left out; the export stays strict JSON (as `export` asserts)."""
    values = (0.0, 1.5e308, 0.0, 1.7e308, 0.0, 1.0)
    metrics = small(
        [f"# TYPE a_total counter\na_total {v}\n# TYPE g gauge\ng {v}\n{histogram(0, 1, v)}" for v in values]
    )
    assert {"g", "h_seconds"} == set(metrics)
    stats = metrics["g"]["series"][0]["stats"]
    assert ("avg" in stats, "std" in stats, stats["max"]) == (True, False, 1.7e308)
    fallen = small([histogram(0, v, 1.0).replace(" 0\n", " 0.0\n") for v in (0.0, 1.5e308, 0.0, 1.7e308, 0.0)])  # type: ignore[arg-type]
    assert {} == fallen
    infinite = small(["# TYPE g gauge\ng +Inf\n", "# TYPE g gauge\ng 1\n", "# TYPE g gauge\ng -Inf\n"])
    assert 1.0 == infinite["g"]["series"][0]["stats"]["avg"]
