"""The server part of summary.json: recordings, several endpoints, and reasons in place of numbers."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import series
from series import QUEUE, WAITING, counter, gauge, histogram

from sidelight.scraper.engines.recognition import FEATURES, QUANTITIES
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import build
from sidelight.scraper.targets.scrape import Scrape
from sidelight.scraper.window.aggregate import IMPOSSIBLE, impossible_values
from sidelight.scraper.window.summary import Endpoint, Server, server_summary
from sidelight.scraper.window.window import Window

S = 10**9
SPECULATION = {"draft_tokens", "draft_tokens_accepted"}  # not on in any recording
DYNAMO = Path(__file__).parents[2] / "data" / "dynamo_pages.json.xz"


def page(requests: float, waiting: float, *, bounds: tuple[str, ...] = ("0.3", "1.0"), engine: str = "0") -> str:
    """A small vLLM page after a number of requests that queued half a second each."""
    label = f'engine="{engine}"'
    buckets = [(bound, requests if float(bound) >= 0.5 else 0) for bound in bounds]
    return (
        histogram(QUEUE, requests, requests * 0.5, buckets=buckets, labels=label)
        + counter("vllm:request_success_total", requests, labels=[label])
        + gauge(WAITING, waiting, labels=[label])
        + gauge("vllm:kv_cache_usage_perc", waiting / 10, labels=[label])
    )


def scrapes(url: str, pages: list[str | None], first_s: int = 1) -> list[Scrape]:
    return [
        replace(scrape, response_ns=scrape.tick_ns + 3, request_ns=scrape.tick_ns + 1)
        for scrape in series.scrapes(pages, url=url, first_s=first_s)
    ]


def summarised(
    records: list[Scrape], start_s: float, end_s: float, slice_ns: int = S, version: str | None = None
) -> dict[str, Any]:
    window = Window(start_ns=round(start_s * S), end_ns=round(end_s * S))
    return as_json(server_summary(build(rows(records)), window, slice_ns, engine_version=version))


def as_json(server: Server) -> dict[str, Any]:
    """Return the object as it is written: strict JSON that its type describes."""
    written: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(server), allow_nan=False))
    assert server == msgspec.convert(written, Server)
    return written


def test_main_recording_adds_up_to_its_spans(recording: Callable[[str], list[Scrape]]):
    """The sums over the whole recording are those of the engine's own spans, counts and tokens exactly."""
    endpoints = build(rows(recording("main")))
    stamps = endpoints[0].response_ns
    summary = as_json(server_summary(endpoints, Window(start_ns=int(stamps[0]), end_ns=int(stamps[-1])), 2 * S))
    spans = {
        "queue_time": 523.980877,
        "prefill_time": 39.125597,
        "decode_time": 412.870587,
        "inference_time": 451.996185,
        "ttft": 574.201821,
        "e2e_latency": 986.981339,
        "inter_token_latency": 412.870587,
    }
    for name, total in spans.items():
        stats = summary[name]["stats"]
        assert pytest.approx(total, rel=2e-9, abs=1e-6) == stats["sum"], name
        assert pytest.approx(stats["sum"], rel=1e-9) == sum(s.get("sum", 0) for s in summary[name]["timeslices"])
        assert name == "inter_token_latency" or stats["count"] == 397
    assert 397 == summary["requests_finished"]["stats"]["total"]
    assert 37 == summary["requests_waiting"]["stats"]["max"]
    assert SPECULATION == set(summary["missing"]), [summary.get(name) for name in SPECULATION]
    assert {0} == {summary[name].get("resets", 0) for name in QUANTITIES if name in summary}


@pytest.mark.parametrize("name", ["main", "edges", "engine_death", "multi_api_server"])
def test_recordings_give_strict_json_without_negative_rates(recording: Callable[[str], list[Scrape]], name: str):
    """Torn pages, a dead engine and late gauges give no NaN and nothing negative."""
    endpoints = build(rows(recording(name)))
    stamps = endpoints[0].response_ns
    summary = as_json(server_summary(endpoints, Window(start_ns=int(stamps[5]), end_ns=int(stamps[-5])), S))
    for quantity in set(QUANTITIES) - SPECULATION:
        numbers = [v for s in summary[quantity]["timeslices"] for v in s.values() if isinstance(v, float | int)]
        assert min(numbers, default=0) >= 0, quantity
    assert (66 if name == "engine_death" else 0) == summary["endpoints"][0]["scrapes"]["failed"]


def test_shape_of_each_kind():
    """A histogram has sum, count, mean and bracketed percentiles; a counter a total and a rate; a gauge its spread."""
    shown = scrapes("a", [page(0, 0), page(4, 2), page(10, 4), page(12, 0), page(13, 0)])
    summary = summarised(shown, 1.5, 3.5, version="0.32.0")
    engine = {"name": "vllm", "version": "0.32.0", "detected_by": "metric vllm:request_queue_time_seconds"}
    assert engine == summary["engine"]
    queue = summary["queue_time"]
    assert ("vllm:request_queue_time_seconds", "histogram", "seconds") == (
        queue["metric"],
        queue["type"],
        queue["unit"],
    )
    assert (13, 6.5, 0.5) == tuple(queue["stats"][key] for key in ("count", "sum", "mean"))
    assert pytest.approx(0.5) == queue["stats"]["p50"]
    interval, bracket = queue["intervals"]["p50"], queue["brackets"]["p50"]
    assert 0.3 <= bracket["low"] <= interval["low"] <= 0.5 <= interval["high"] <= bracket["high"] <= 1.0
    assert [] == [name for name in queue["unresolved"] if name == "p50"]
    assert all(0.3 <= timeslice["p50"] <= 1.0 for timeslice in queue["timeslices"])
    assert "a histogram keeps no single values" == queue["missing"]["std"]
    frames = [(s["start_ns"] / S, s["end_ns"] / S, s["count"]) for s in queue["timeslices"]]
    assert [(1.5, 2.5, 4), (2.5, 3.5, 9)] == frames
    assert {"total": 13.0, "rate_per_s": 6.5} == summary["requests_finished"]["stats"]
    waiting = summary["requests_waiting"]
    assert (2, 3.0, 2.0, 4.0) == tuple(waiting["stats"][key] for key in ("count", "mean", "min", "max"))
    assert "sum" == waiting["across"]
    assert "the page shows no histogram vllm:time_to_first_token_seconds" == summary["missing"]["ttft"]
    assert "ttft" not in summary


def test_endpoints_add_up():
    """Counters and histograms add over endpoints, queues add tick by tick, cache fills take the fullest."""
    first = scrapes("a", [page(0, 1), page(4, 2), page(10, 4), page(12, 0)])
    second = scrapes("b", [page(100, 5), page(101, 1), None, page(104, 1)])
    summary = summarised([*first, *second], 1.5, 4.5, 3 * S)
    assert 16 == summary["queue_time"]["stats"]["count"]
    assert pytest.approx(8.0) == summary["queue_time"]["stats"]["sum"]
    assert 16.0 == summary["requests_finished"]["stats"]["total"]
    waiting = summary["requests_waiting"]["stats"]
    assert (2, 3.0, 1.0) == (waiting["count"], waiting["max"], waiting["min"])
    assert (0.2, "max") == (summary["kv_cache_usage"]["stats"]["max"], summary["kv_cache_usage"]["across"])
    assert [12, 4] == [entry["queue_time"]["stats"]["count"] for entry in summary["endpoints"]]
    assert {"ok": 3, "failed": 1, "failures": {"connect: refused": 1}} == summary["endpoints"][1]["scrapes"]


def test_label_sets_add_up():
    """Two engines on one page (data parallel ranks) are one quantity."""
    both = [page(n, n) + page(2 * n, n, engine="1") for n in (0.0, 2.0, 3.0)]
    summary = summarised(scrapes("a", both), 1.5, 3.5)
    assert 9 == summary["queue_time"]["stats"]["count"]
    assert 6.0 == summary["requests_waiting"]["stats"]["max"]
    assert pytest.approx(0.3) == summary["kv_cache_usage"]["stats"]["max"]


def test_bounds_that_disagree_still_give_percentiles():
    """Histograms of different bounds are each read under their own, and the percentile is that of the union."""
    first = scrapes("a", [page(0, 0), page(4, 0), page(5, 0)])
    second = scrapes("b", [page(0, 0, bounds=("0.5",)), page(2, 0, bounds=("0.5",)), page(3, 0, bounds=("0.5",))])
    queue = summarised([*first, *second], 1.5, 3.5)["queue_time"]
    assert 8 == queue["stats"]["count"]
    assert 0.3 <= queue["stats"]["p50"] <= 1.0
    assert "p50" not in queue["missing"]


def test_percentile_beyond_the_last_bound_is_estimated_from_the_sums():
    """What lies above the last bound has no upper edge in the buckets, but the sum of what was seen there has one."""
    queue = summarised(scrapes("a", [page(0, 0, bounds=("0.3",)), page(4, 0, bounds=("0.3",))]), 1.5, 2.5)["queue_time"]
    bracket = queue["brackets"]["p50"]
    assert 0.3 <= bracket["low"] <= queue["stats"]["p50"] <= bracket["high"] <= 2.0


def test_reasons_instead_of_numbers():
    """No observation has no mean, no earlier scrape is noted, and a slice without a scrape says so."""
    summary = summarised(scrapes("a", [page(3, 1), None, None, page(3, 1)], first_s=2), 1.5, 5.5)
    assert {"count": 0, "sum": 0.0} == summary["queue_time"]["stats"]
    assert ("no observation", "no observation") == tuple(summary["queue_time"]["missing"][k] for k in ("mean", "p50"))
    assert ["a: no scrape before the window opened, counted from the first one"] == summary["queue_time"]["notes"]
    assert "no scrape fell into the slice" == summary["requests_finished"]["timeslices"][1]["missing"]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no metrics endpoint was scraped"),
        (scrapes("a", [None, None]), "no scrape succeeded: connect: refused"),
        (scrapes("a", ["x 1\n", "x 2\n"]), "no known engine's metrics are on the page"),
    ],
)
def test_nothing_known_of_the_server(records: list[Scrape], reason: str):
    """Without an engine every quantity is missing for one stated reason."""
    summary = summarised(records, 1, 2)
    assert (None, reason) == (summary["engine"], summary["reason"])
    assert dict.fromkeys(QUANTITIES, reason) == summary["missing"]


def test_restart_is_counted_and_reported():
    """An engine that restarts in the window: what came after counts from zero, and the reset is reported."""
    summary = summarised(scrapes("a", [page(100, 0), page(200, 0), page(30, 0), page(50, 0)]), 1.5, 4.5)
    assert (150, 1) == (summary["queue_time"]["stats"]["count"], summary["queue_time"]["resets"])
    assert (150.0, 1) == (summary["requests_finished"]["stats"]["total"], summary["requests_finished"]["resets"])


def test_slices_that_differ_between_endpoints_are_not_added():
    """Where slices fell back to one endpoint's own intervals, only that endpoint has them."""
    first = scrapes("a", [page(n, 0) for n in (0, 4, 5, 6)])
    second = [replace(r, response_ns=r.response_ns + 5) for r in scrapes("b", [page(n, 0) for n in range(4)])]
    summary = summarised([*first, *second], 1.5, 3.5, S // 10)
    assert [] == summary["queue_time"]["timeslices"]
    assert (
        "slices are shorter than an update interval: see each endpoint's own"
        == summary["queue_time"]["missing"]["timeslices"]
    )
    assert summary["endpoints"][0]["per_interval_slices"]
    assert [4, 1, 1] == [s["count"] for s in summary["endpoints"][0]["queue_time"]["timeslices"]]


def test_scrapes_that_ended_early_give_rates_over_what_they_cover():
    """The scraper died in the middle: rates are over the part it saw, and the note says so."""
    dead = scrapes("a", [page(10.0 * n, n) for n in range(5)])
    whole = scrapes("b", [page(10.0 * n, n) for n in range(13)])
    alone = summarised(dead, 1.5, 11.5, 4 * S)
    finished = alone["requests_finished"]
    assert 40 == finished["stats"]["total"]
    assert pytest.approx(40 / 3.5) == finished["stats"]["rate_per_s"]
    ended = "a: scrapes ended 6.5 s before the window did"
    assert [f"{ended}; rates are over the 3.5 s they cover"] == finished["notes"]
    assert [ended] == alone["queue_time"]["notes"] == alone["requests_waiting"]["notes"]
    both = summarised([*dead, *whole], 1.5, 11.5, 4 * S)["requests_finished"]
    assert pytest.approx(40 / 3.5 + 12) == both["stats"]["rate_per_s"]
    assert [f"{ended}; rates are over the 3.5 s they cover"] == both["notes"]
    assert "notes" not in summarised(whole, 1.5, 11.5, 4 * S)["requests_finished"]


def test_a_gauge_that_is_infinite_in_one_label_set_is_the_others():
    """An infinite or NaN value does not count: it neither spoils a sum nor is a maximum."""
    pages = [page(n, 3) + page(n, value, engine="1") for n, value in enumerate((1, float("inf"), -float("inf"), 2, 0))]
    summary = summarised(scrapes("a", [text.replace("inf", "Inf") for text in pages]), 1.5, 4.5)
    waiting = summary["requests_waiting"]["stats"]
    assert (3, 3.0, 5.0) == (waiting["count"], waiting["min"], waiting["max"])
    assert 0.3 == summary["kv_cache_usage"]["stats"]["max"]


def test_gauges_that_cannot_be_are_missing():
    """No count is below 0 and no share over 1: such values neither show nor spoil those of other scrapes."""
    records = scrapes("a", [page(n, waiting) for n, waiting in enumerate((-5, 3, 170, 10, -1))])
    whole, wrong = summarised(records, 1.5, 5.5), summarised(records, 4.5, 5.5)
    waiting, usage = whole["requests_waiting"]["stats"], whole["kv_cache_usage"]["stats"]
    assert (3, 3.0, 170.0) == (waiting["count"], waiting["min"], waiting["max"])
    assert (2, 0.3, 1.0) == (usage["count"], usage["min"], usage["max"])
    for name in ("requests_waiting", "kv_cache_usage"):
        assert wrong["missing"][name] == IMPOSSIBLE
    (endpoint,) = build(rows(records))
    assert {WAITING: [-5.0, -1.0], "vllm:kv_cache_usage_perc": [-0.5, 17.0, -0.1]} == impossible_values(endpoint)


def test_what_is_too_large_to_add_up_is_a_reason():
    """Sums beyond the largest number are missing everywhere; the report stays strict JSON."""
    pages = [page(n, n) + page(n, n, engine="1") for n in (0.0, 1.5e308, 0.0, 1.7e308)]
    summary = summarised(scrapes("a", pages), 1.5, 4.5)
    for name in ("queue_time", "requests_finished"):
        assert ({}, "the values are too large to add up") == (
            summary[name]["stats"],
            summary[name]["missing"]["stats"],
        ), name
    assert 0.0 == summary["requests_waiting"]["stats"]["max"]
    spread = summarised(scrapes("a", [page(1, n) for n in (0, 1e308, 1.7e308, 1e200)]), 1.5, 4.5)
    assert 1.7e308 == spread["requests_waiting"]["stats"]["max"]
    assert "std" not in spread["requests_waiting"]["stats"]
    assert "the values are too large to add up" == spread["requests_waiting"]["missing"]["std"]
    assert 3 == len(spread["requests_waiting"]["timeslices"])


def test_a_spread_too_large_is_missing_alone():
    """Where only the standard deviation overflows, the other statistics stand."""
    summary = summarised(scrapes("a", [page(1, n) for n in (0, 1e200, 3e200)]), 1.5, 3.5)
    waiting = summary["requests_waiting"]
    assert 2e200 == waiting["stats"]["mean"]
    assert "std" not in waiting["stats"]
    assert "the values are too large to add up" == waiting["missing"]["std"]


def test_a_sum_too_large_leaves_the_count():
    """A histogram's count and percentiles stand where only its sum overflows."""
    pages = [page(n, 0).replace(f"{n * 0.5}", f"{1.7e308 * min(n, 1)}", 1) for n in (0.0, 4.0)]
    pages = [text + text.replace('engine="0"', 'engine="1"') for text in pages]
    queue = summarised(scrapes("a", pages), 1.5, 2.5)["queue_time"]
    assert 8 == queue["stats"]["count"]
    assert "p50" in queue["stats"]
    assert ("the values are too large to add up",) * 3 == (
        queue["missing"]["sum"],
        queue["missing"]["mean"],
        queue["timeslices"][0]["missing"],
    )


def test_percentiles_of_what_lies_beyond_every_bound_without_a_sum():
    """Nothing shows how far they reach; no bucket contradicts another."""
    text = '# TYPE {0} histogram\n{0}_bucket{{le="0"}} 0\n{0}_bucket{{le="+Inf"}} {1}\n{0}_count {1}\nx 1\n'
    pages = [text.format("vllm:request_queue_time_seconds", n) for n in (0, 3, 7)]
    queue = summarised(scrapes("a", pages), 1.5, 3.5)["queue_time"]
    assert 7 == queue["stats"]["count"]
    assert "nothing that was observed is below a finite bound, and no sum is known" == queue["missing"]["p50"]


def test_label_sets_of_one_page_restart_together():
    """One restart is one, however many label sets show it; endpoints restart each for itself."""
    both = [page(n, n) + page(2 * n, n, engine="1") for n in (4.0, 5.0, 1.0, 2.0)]
    alone = summarised(scrapes("a", both), 1.5, 4.5)
    assert (1, 1) == (alone["queue_time"]["resets"], alone["requests_finished"]["resets"])
    two = summarised([*scrapes("a", both), *scrapes("b", both)], 1.5, 4.5)
    assert (2, 2) == (two["queue_time"]["resets"], two["requests_finished"]["resets"])


def test_a_frontend_listed_first_does_not_hide_its_workers():
    """The totals are of the endpoints that show queue times; a frontend alone is summarised as itself."""
    name = "dynamo_frontend_requests_total"
    front = [f"# TYPE {name} counter\n{name} {n}\n" for n in (0, 5, 9)]
    workers = [*scrapes("b", [page(n, 0) for n in (0, 3, 5)]), *scrapes("c", [page(n, 0) for n in (0, 1, 4)])]
    summary = summarised([*scrapes("a", front), *workers], 1.5, 3.5)
    assert ("vllm", 9) == (summary["engine"]["name"], summary["queue_time"]["stats"]["count"])
    assert ["dynamo", "vllm", "vllm"] == [endpoint["engine"] for endpoint in summary["endpoints"]]
    alone = summarised(scrapes("a", front), 1.5, 3.5)
    assert ("dynamo", 9.0) == (alone["engine"]["name"], alone["requests_finished"]["stats"]["total"])


@pytest.mark.parametrize("first", ["frontend", "worker"])
def test_what_dynamo_s_worker_does_not_count_its_frontend_does(first: str):
    """As recorded of 1.6.1, with its mocker for a worker, which shows neither requests nor tokens. Whichever page is
    named first; each count bears the name of where it is from, and gauges stay the worker's.
    """
    pages: dict[str, str] = json.loads(lzma.decompress(DYNAMO.read_bytes()))
    before = re.sub(
        r"^(dynamo_frontend_(?:requests|output_tokens)_total\S*) \d+$", r"\1 7", pages["frontend"], flags=re.MULTILINE
    )
    frames = {"frontend": [before, before, pages["frontend"]], "worker": [pages["worker"]] * 3}
    names = [first, *(name for name in frames if name != first)]
    summary = summarised([scrape for name in names for scrape in scrapes(name, frames[name])], 1.5, 3.5)
    assert "vllm" == summary["engine"]["name"]
    assert (27 - 7, "dynamo_frontend_requests_total") == (
        summary["requests_finished"]["stats"]["total"],
        summary["requests_finished"]["metric"],
    )
    assert 2279 - 7 == summary["generation_tokens"]["stats"]["total"]
    assert "vllm:num_requests_waiting" == summary["requests_waiting"]["metric"]
    assert "vllm:time_to_first_token_seconds" == summary["ttft"]["metric"]
    assert {"queue_time", "prefill_time"} <= set(summary["missing"])


RETRACTED = "sglang:num_retracted_requests_total"
PREFILLED = "sglang:prefill_effective_tokens_total"


def sglang(tokens: float, retracted: float | None, *, younger: bool = True) -> str:
    """Return an SGLang page on which nothing, or so much, was retracted; a younger one counts prefill tokens."""
    page = gauge("sglang:num_retracted_reqs", 0) + gauge("sglang:token_usage", 0.5)
    page += counter(PREFILLED, tokens, labels=['mode="input"']) if younger else ""
    return page + (counter(RETRACTED, retracted) if retracted is not None else "")


def test_a_counter_that_sglang_has_not_created_yet_has_counted_nothing():
    """Its first retraction creates it; a page with a younger counter is of a version that has it. The note says so."""
    never = summarised(scrapes("a", [sglang(n, None) for n in (1, 2, 3)]), 1.5, 3.5)
    assert {"total": 0.0, "rate_per_s": 0.0} == never["preemptions"]["stats"]
    assert [0.0, 0.0] == [timeslice["total"] for timeslice in never["preemptions"]["timeslices"]]
    assert ["a: not on the page, on which it appears with its first count"] == never["preemptions"]["notes"]
    assert RETRACTED == never["preemptions"]["metric"]
    late = summarised(scrapes("a", [sglang(1, None), sglang(2, None), sglang(3, 2)]), 1.5, 3.5)
    assert (2.0, [0.0, 2.0]) == (
        late["preemptions"]["stats"]["total"],
        [timeslice["total"] for timeslice in late["preemptions"]["timeslices"]],
    )
    both = [*scrapes("a", [sglang(n, None) for n in (1, 2, 3)]), *scrapes("b", [sglang(n, n) for n in (1, 2, 4)])]
    assert 3.0 == summarised(both, 1.5, 3.5)["preemptions"]["stats"]["total"]


def test_an_older_sglang_page_without_that_counter_shows_nothing():
    """Versions before 0.5.7 have none: then it is missing, as where the version is unknown."""
    pages = [sglang(n, None, younger=False) for n in (1, 2, 3)]
    summary = summarised(scrapes("a", pages), 1.5, 3.5)
    assert f"the page shows no counter {RETRACTED}" == summary["missing"]["preemptions"]


def test_features_are_stated_where_a_page_shows_them():
    """They add up, in the unit in which they are exposed; where no page shows one nothing is said of it."""

    def shown(n: int, *, features: bool) -> str:
        transfers = histogram("sglang:kv_transfer_latency_ms", n, 20 * n, buckets=[("25", n)])
        extra = gauge("sglang:num_decode_transfer_queue_reqs", 2) + transfers
        return gauge("sglang:num_running_reqs", 1) + (extra if features else "")

    records = scrapes("a", [shown(n, features=True) for n in (1, 2, 4)])
    records += scrapes("b", [shown(n, features=True) for n in (1, 3, 3)])
    records += scrapes("c", [shown(n, features=False) for n in (1, 3, 3)])
    summary = summarised(records, 1.5, 3.5)
    assert 4 == summary["kv_fetch_in_progress"]["stats"]["max"]
    transfers = summary["kv_transfer_time"]
    assert ("milliseconds", 5, 20.0) == (transfers["unit"], transfers["stats"]["count"], transfers["stats"]["mean"])
    assert not FEATURES.keys() & (summary["missing"].keys() | summary["endpoints"][2]["missing"].keys())
    assert "kv_transfer_time" not in summary["endpoints"][2]


def test_every_canonical_quantity_has_a_field():
    """In the order of the list, in the whole and in each endpoint."""
    for kind in (Server, Endpoint):
        known = QUANTITIES | FEATURES
        assert tuple(known) == tuple(name for name in kind.__struct_fields__ if name in known)
