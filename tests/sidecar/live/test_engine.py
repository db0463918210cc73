"""An endpoint's live view keeps going whatever a page holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from series import END, PREFILL, QUEUE, WAITING, counter, gauge, histogram, scraped

from sidelight.exporter.prometheus.snapshot import Cumulative, EngineCounts, Snapshot
from sidelight.exporter.prometheus.table import points
from sidelight.scraper.series.log import rows
from sidelight.scraper.targets.scrape import Scrape
from sidelight.sidecar.live.engine import Engines, EngineView


def scrape(second: int, page: str, *, error: str = "") -> Scrape:
    """A page ended by a gauge, so that half a histogram is not taken for a cut page; or why there is none."""
    return scraped(second * 10**9, page + END, error=error)


def viewed(*pages: str) -> EngineView:
    """Pages a second apart."""
    view = EngineView(counts=EngineCounts(endpoint="u"))
    for row in rows(scrape(second, page) for second, page in enumerate(pages)):
        view.take(row)
    return view


def test_a_page_is_seen_in_canonical_quantities():
    page = histogram(QUEUE, 2, 1, labels='e="0"') + histogram(QUEUE, 3, 2, labels='e="1"') + histogram(PREFILL, 5, 1)
    view = viewed(page, page)
    assert Cumulative(bounds_s=(1.0,), counts=(5.0, 0.0), sum_s=3.0) == view.counts.histograms["queue_time"]
    assert {"ok": 2, "failed": 0} == view.outcomes


def test_means_of_the_last_minute_are_of_all_engines():
    """An engine that began anew does not count until it has counted more than before."""
    engines = Engines()
    for url, counts in (("a", ((2, 1), (4, 2))), ("b", ((0, 0), (6, 1))), ("c", ((9, 9), (1, 1)))):
        pages = (histogram(QUEUE, *each) for each in counts)
        for row in rows(replace(scrape(second, page), url=url) for second, page in enumerate(pages)):
            engines.take(row)
    assert {"queue": 250.0} == engines.means_ms()


def test_engines_of_a_pair_have_roles_that_a_pause_does_not_take():
    """Of what is kept, ten seconds here; an engine that is gone has none."""
    engines = Engines(keep_s=10.0)

    def scraped_until(second: int, ended: int) -> dict[str, str]:
        text = counter("vllm:request_success_total", ended) + counter("vllm:generation_tokens_total", ended)
        text += counter("vllm:prompt_tokens_total", 100 * ended)
        loads = gauge("vllm:num_requests_kv_fetch_by_stage", 0, labels=('stage="in_progress"',))
        loads += counter("vllm:prompt_tokens_cached_by_source_total", 99 * ended, labels=('source="p2p"',))
        for url, page in (("p", text), ("d", text + loads)):
            for row in rows([replace(scrape(second, page), url=url)]):
                engines.take(row)
        engines.estimate_quantiles((second - 10) * 10**9, second * 10**9)
        return {each.endpoint: each.role for each in engines.counts()}

    assert {"p": "", "d": ""} == scraped_until(20, 0)
    assert {"p": "prefill", "d": "decode"} == scraped_until(28, 40)
    assert [{"p": "prefill", "d": "decode"}] * 2 == [scraped_until(second, 40) for second in (60, 90)]
    engines.keep(["p"])
    assert {"p": "prefill"} == {each.endpoint: each.role for each in engines.counts()}


def test_a_pool_is_a_label_of_its_engines_alone():
    """An engine without a role, and a count of scrapes, have the labels that they had."""
    engines = [
        EngineCounts(endpoint=role or "c", role=role, gauges={"requests_waiting": 2.0}, scrapes={"ok": 3})
        for role in ("prefill", "decode", "")
    ]
    shown = points(Snapshot(version="1", run_id="r", phase="measure", engines=tuple(engines)))
    labels = {row.name: [each.labels for each in values] for row, values in shown}
    pools = [{"endpoint": role, "role": role} for role in ("prefill", "decode")]
    assert [*pools, {"endpoint": "c"}] == labels["engine_requests_waiting"]
    assert [{"endpoint": url, "outcome": "ok"} for url in ("prefill", "decode", "c")] == labels["scrapes"]


@pytest.mark.parametrize("without", ["_bucket", '_bucket{le="+Inf"}', "_sum"])
def test_a_histogram_that_lacks_a_part_is_left_out(without: str):
    """No exception, which would freeze the view, and not the page's last column in place of the sum."""
    view = viewed(histogram(QUEUE, 2, 1, without=without) + histogram(PREFILL, 5, 1))
    assert {"prefill_time"} == set(view.counts.histograms)
    assert {"ok": 1, "failed": 0} == view.outcomes


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_values_that_are_not_finite_are_left_out(value: str):
    """A label set without a finite value counts for nothing, and a quantity without one is absent."""
    page = gauge(WAITING, 2, value, labels=('e="0"', 'e="1"')) + gauge("vllm:kv_cache_usage_perc", value)
    page += histogram(QUEUE, 2, float(value))
    counts = viewed(page).counts
    assert {"requests_waiting": 2.0} == counts.gauges
    assert {} == counts.histograms


def test_a_ratio_of_two_gauges_is_shown_as_one():
    """TGI's cache fill is the tokens reserved over the tokens there are, live as in the summary."""
    gauges = {"tgi_queue_size": 0, "tgi_batch_current_max_tokens": 3, "tgi_batch_max_total_tokens": 12}
    page = "".join(gauge(name, value) for name, value in gauges.items())
    assert 0.25 == viewed(page).counts.gauges["kv_cache_usage"]


def gateway_page(requests: int, whole_s: float, call_s: float) -> str:
    """Return a page of LiteLLM's that is an engine's as well."""
    whole, call = "litellm_request_total_latency_metric", "litellm_llm_api_latency_metric"
    in_flight = gauge("litellm_in_flight_requests", 2) + gauge(WAITING, 3)
    return histogram(whole, requests, whole_s) + histogram(call, requests, call_s) + in_flight


def test_a_gateway_s_own_time_is_that_since_the_first_page():
    """What its calls leave of its requests'; a gateway that began anew is counted from there."""
    pages = [gateway_page(10, 20, 10), gateway_page(14, 32, 20)]
    counts = viewed(*pages).counts
    assert {"requests_waiting": 3.0} == counts.gauges
    assert counts.gateway is not None
    assert ("litellm", 0.5) == (counts.gateway.gateway, counts.gateway.own_s)
    assert {"requests_in_flight": 2.0} == counts.gateway.gauges
    again = viewed(*pages, gateway_page(1, 2, 1), gateway_page(2, 4.25, 2)).counts.gateway
    assert again is not None
    assert 1.25 == again.own_s
    more_than_at_first = viewed(*pages, gateway_page(12, 24, 12), gateway_page(13, 26.25, 13)).counts.gateway
    assert more_than_at_first is not None
    assert 1.25 == more_than_at_first.own_s
    first = viewed(pages[0]).counts.gateway
    assert first is not None
    assert first.own_s is None


def test_milliseconds_become_seconds():
    """Envoy's histograms are in them."""
    counts = viewed(histogram("envoy_http_downstream_rq_time", 2, 300, buckets=[("250.0", 2)])).counts.gateway
    assert counts is not None
    assert Cumulative(bounds_s=(0.25,), counts=(2.0, 0.0), sum_s=0.3) == counts.histograms["request_time"]


def test_what_a_layout_means_is_found_out_once():
    """Pages of one layout share what is known of it; another layout is looked at anew, and shown as it is."""
    pages = [histogram(QUEUE, n, n) for n in (1, 2, 3)] + [histogram(PREFILL, 4, 1)]
    view = EngineView(counts=EngineCounts(endpoint="u"))
    known = []
    for row in rows(scrape(second, page) for second, page in enumerate(pages)):
        view.take(row)
        known.append(view.known)
    assert known[0] is known[1] is known[2]
    assert known[2] is not known[3]
    assert {"prefill_time"} == set(view.counts.histograms)


def test_series_twice_on_a_page_do_not_shift_what_is_read():
    """Of duplicates the first counts; what a layout means is said of the columns that are left."""
    twice = "# TYPE x gauge\nx 1\nx 2\n"
    view = viewed(twice + histogram(QUEUE, 2, 1))
    assert Cumulative(bounds_s=(1.0,), counts=(2.0, 0.0), sum_s=1.0) == view.counts.histograms["queue_time"]


def test_a_page_is_silent_when_scrapes_have_failed_for_long():
    """Not by a single failure; and it is back with its next page."""
    view = EngineView(counts=EngineCounts(endpoint="u"))
    said, answers_s = [], []
    for row in rows(
        scrape(second, histogram(QUEUE, 1, 1), error="" if second in (1, 10) else "gone") for second in range(11)
    ):
        view.take(row)
        said.append(view.silence(5.0))
        answers_s.append(view.counts.last_answer_s)
    assert [""] * 7 + ["since 00:00:01 UTC: gone"] * 3 + [""] == said
    assert [None] + [pytest.approx(1.0, abs=0.5)] * 9 + [pytest.approx(10.0, abs=0.5)] == answers_s
