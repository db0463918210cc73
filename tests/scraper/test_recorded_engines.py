"""Pages of a real SGLang and a real llama.cpp server, before and after a load, against what each request was served.

The files in tests/data hold the pages and, of each request, its usage or the `timings` of its reply.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import msgspec
import pytest
import series

from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.exposition import parse
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import build
from sidelight.scraper.window.summary import server_summary
from sidelight.scraper.window.window import Window

DATA = Path(__file__).parents[1] / "data"


def recorded(name: str) -> dict[str, Any]:
    """Return the pages by name, and what is known of the requests between them."""
    loaded: dict[str, Any] = json.loads(lzma.decompress((DATA / f"{name}_pages.json.xz").read_bytes()))
    return loaded


def summarised(before: str, after: str) -> dict[str, Any]:
    """Return the server part of the summary of a run with these first and last pages, as it is written."""
    endpoints = build(rows(series.scrapes([before, after])))
    start_ns, end_ns = endpoints[0].response_ns.tolist()
    written: dict[str, Any] = msgspec.to_builtins(
        server_summary(endpoints, Window(start_ns=start_ns, end_ns=end_ns), series.SECOND)
    )
    return written


def test_sglangs_page_adds_up_to_its_spans_and_its_replies():
    """151 requests; the sums are those of the spans' attributes and stages. Most series appeared within the load."""
    recording = recorded("sglang")
    summary = summarised(recording["pages"]["main/idle_before_first_request"], recording["pages"]["main/after"])
    prompt, output, cached = (sum(column) for column in zip(*recording["usage"], strict=True))
    assert (151, 67246, 8999, 18644) == (len(recording["usage"]), prompt, output, cached)
    spans = {"ttft": 501.929047, "e2e_latency": 843.628695, "queue_time": 427.368042, "prefill_time": 36.828236}
    for name, total_s in spans.items():
        assert (151, pytest.approx(total_s, abs=1e-5)) == (
            summary[name]["stats"]["count"],
            summary[name]["stats"]["sum"],
        ), name
    # One gap fewer than tokens; their sum is not the spans' decode (341.700 s).
    gaps = summary["inter_token_latency"]["stats"]
    assert (output - 151, pytest.approx(341.577, abs=1e-3)) == (gaps["count"], gaps["sum"])
    totals = {
        "requests_finished": 151,
        "prompt_tokens": prompt,
        "generation_tokens": output,
        "prefix_cache_queries": prompt,
        "prefix_cache_hits": cached,
        "preemptions": 0,
    }
    assert totals == {name: summary[name]["stats"]["total"] for name in totals}


def test_sglangs_real_time_counts_are_the_replies_too():
    """Prefills by cached and computed tokens, and a decoded token for each gap."""
    recording = recorded("sglang")
    before, after = (
        {dict(each.labels).get("mode"): value for each, value in zip(page.series, page.values, strict=True)
         if each.name == "sglang:realtime_tokens_total"}
        for page in (parse(recording["pages"][f"main/{name}"]) for name in ("idle_before_first_request", "after"))
    )  # fmt: skip
    assert {"prefill_compute": 48602, "prefill_cache": 18644, "decode": 8848} == {
        mode: value - before.get(mode, 0) for mode, value in after.items()
    }


def test_sglangs_edges_and_retractions_are_counted():
    """A reply of n samples counts n + 1 requests, an abort counts as finished; a retraction shows from the first on."""
    pages = recorded("sglang")["pages"]
    idle = pages["main/idle_before_first_request"]
    assert 51 == summarised(idle, pages["edges/after"])["requests_finished"]["stats"]["total"]
    assert 2 == summarised(idle, pages["retract/after"])["preemptions"]["stats"]["total"]


def test_llamacpps_counters_are_the_sums_of_its_timings():
    """To the token; the seconds to six digits, of which the notes say so."""
    recording = recorded("llamacpp")
    timings = recording["timings"]
    summary = summarised(recording["pages"]["idle_before_first_request"], recording["pages"]["after"])
    evaluated, cached, predicted = (
        sum(each[name] for each in timings) for name in ("prompt_n", "cache_n", "predicted_n")
    )
    totals = {
        "prompt_tokens": evaluated + cached,
        "prefix_cache_queries": evaluated + cached,
        "prefix_cache_hits": cached,
        "generation_tokens": predicted,
    }
    assert totals == {name: summary[name]["stats"]["total"] for name in totals}
    seconds = sum(each["predicted_ms"] for each in timings) / 1e3
    assert (82.856454, "82.8565") == (pytest.approx(seconds, abs=1e-9), f"{seconds:.6g}")
    assert 82.8565 == summary["inter_token_latency"]["stats"]["sum"]
    assert any("six digits" in note for note in catalogue("llamacpp").notes)


def test_llamacpps_token_latency_is_low_by_one_token_a_request():
    """Its seconds run from the first token, which its count holds: 6.46 ms of 6.57; each reply's own mean is right."""
    recording = recorded("llamacpp")
    timings = recording["timings"]
    tokens = sum(each["predicted_n"] for each in timings)
    gaps = tokens - len(timings)
    stats = summarised(recording["pages"]["idle_before_first_request"], recording["pages"]["after"])[
        "inter_token_latency"
    ]["stats"]
    true_s = sum(each["predicted_ms"] for each in timings) / 1e3 / gaps
    assert true_s * gaps / tokens == pytest.approx(stats["mean"], rel=1e-6)
    assert (6.57, 6.46) == (round(true_s * 1e3, 2), round(stats["mean"] * 1e3, 2))
    for each in timings:
        assert each["predicted_ms"] == pytest.approx(each["predicted_per_token_ms"] * (each["predicted_n"] - 1))
    assert any("low by one token a request" in note for note in catalogue("llamacpp").notes)


def test_llamacpps_seconds_of_prefill_are_no_sum_over_requests():
    """Prompts that share a batch count once: 19.7 s of 22.5 s. So the page has no prefill time."""
    recording = recorded("llamacpp")
    summary = summarised(recording["pages"]["idle_before_first_request"], recording["pages"]["after"])
    page = parse(recording["pages"]["after"])
    (seconds,) = [
        value
        for each, value in zip(page.series, page.values, strict=True)
        if each.name == "llamacpp:prompt_seconds_total"
    ]
    of_requests = sum(each["prompt_ms"] for each in recording["timings"]) / 1e3
    assert (19.7337, 22.478) == (seconds, round(of_requests, 3))
    assert "prefill_time" in summary["missing"]
