"""What gateways' pages showed of the window: their own time is what is left of their requests' without their calls."""

from __future__ import annotations

import json

import msgspec
import pytest
from series import END, SECOND, counter, endpoint_of, gauge, histogram

from sidelight.scraper.window.aggregate import TOO_LARGE
from sidelight.scraper.window.gateways import gateway_pages
from sidelight.scraper.window.quantities import GatewayPage
from sidelight.scraper.window.window import Window

WHOLE, CALL = "litellm_request_total_latency_metric", "litellm_llm_api_latency_metric"
QUEUE = "litellm_request_queue_time_seconds"
AVERAGE = "haproxy_backend_queue_time_average_seconds"
ROUND_TRIP = "dynamo_request_plane_roundtrip_ttft_seconds"


def litellm(requests: float, whole_s: float, call_s: float, queue_s: float) -> str:
    """Return a page after so many requests that took so long."""
    times = ((WHOLE, whole_s), (CALL, call_s), (QUEUE, queue_s))
    page = "".join(histogram(name, requests, total, buckets=(), labels='model="m"') for name, total in times)
    return page + counter("litellm_deployment_failure_responses_total", requests / 2) + END


def page_of(*pages: str) -> GatewayPage:
    """Return what pages a second apart show of the time from the first to the last of them."""
    window = Window(start_ns=SECOND, end_ns=len(pages) * SECOND)
    (page,) = gateway_pages([endpoint_of(pages)], window, SECOND)
    return page


def test_its_own_time_is_what_its_calls_leave():
    """Of the requests that ended in the window: ten of 3 s with calls of 2.4 s, after a wait of 0.1 s."""
    page = page_of(litellm(10, 20, 10, 5), litellm(14, 32, 19, 5.4), litellm(20, 50, 34, 6))
    assert ("litellm", f"metric {WHOLE}") == (page.gateway, page.detected_by)
    assert (600, 100, "end") == (pytest.approx(page.own_ms), pytest.approx(page.queue_ms), page.own_until)
    assert 0 == page.own_error_ms
    assert page.upstream_errors
    assert 5 == page.upstream_errors.stats.total
    assert page.missing
    assert "its page does not tell" == page.missing["requests_waiting"]


def test_a_queue_whose_sum_fell_is_no_time():
    """A page that contradicts itself: requests waited, and less than nothing in all."""
    page = page_of(litellm(10, 20, 10, 5), litellm(20, 50, 34, 1))
    assert page.queue_ms is None
    assert "queue_time: its sum falls while its count rises" == page.missing["queue_ms"]


def test_times_in_milliseconds_and_of_several_parts():
    """Envoy's: of the listeners and clusters that carry requests, the admin page and the receiver of spans apart."""

    def page(requests: float) -> str:
        whole, call = "envoy_http_downstream_rq_time", "envoy_cluster_upstream_rq_time"
        listener, cluster = ('envoy_http_conn_manager_prefix="{}"', 'envoy_cluster_name="{}"')
        shown = (
            histogram(whole, requests, 300 * requests, buckets=(), labels=listener.format("llm")),
            histogram(whole, 50 * requests, requests, labels=listener.format("admin")).partition("\n")[2],
            histogram(call, requests, 280 * requests, buckets=(), labels=cluster.format("engine")),
            histogram(call, requests, 9 * requests, labels=cluster.format("otlp")).partition("\n")[2],
        )
        return "".join(shown) + END

    shown = page_of(page(10), page(110))
    # 300 ms that may be off by 5 %, evenly, and twice so: of one request 12.2 ms.
    assert (20, 1.22) == (pytest.approx(shown.own_ms), pytest.approx(shown.own_error_ms, rel=0.01))
    assert shown.request_time
    assert "milliseconds" == shown.request_time.unit


@pytest.mark.parametrize("before", [0, 40, 3000])
def test_a_mean_over_its_last_requests_is_taken_apart(before: int):
    """HAProxy's, which begins at zero: after a hundred that waited 0.4 s it is below 0.1 s. Another backend is idle."""
    sum_ms, pages = 0, []
    for number in range(before + 101):
        if number in (before, before + 100):
            backends = ('proxy="a"', 'proxy="idle"')
            mean_s = -(-sum_ms // 512) / 1e3
            replies = [f'{backend},code="{code}"' for backend in backends for code in ("2xx", "5xx")]
            answered = counter("haproxy_backend_http_responses_total", number, 0, 0, 0, labels=replies)
            pages.append(gauge(AVERAGE, mean_s, 0.5, labels=backends) + answered + END)
        sum_ms += (100 if number < before else 400) - -(-sum_ms // 512)
    page = page_of(*pages)
    assert page.queue_error_ms
    assert 3 > page.queue_error_ms
    assert 400 == pytest.approx(page.queue_ms, abs=3 * page.queue_error_ms)
    assert page.own_ms is None
    assert page.missing
    assert "the page shows no request_time" == page.missing["own_ms"]


def test_a_mean_over_requests_before_the_window_is_not_its_queue():
    """None was answered in the window."""
    answered = (counter("haproxy_backend_http_responses_total", number) for number in (7, 7 + 1e-9))
    page = page_of(*(gauge(AVERAGE, 0.4) + responses + END for responses in answered))
    assert page.queue_ms is None
    assert page.missing
    assert "no request was answered in the window" == page.missing["queue_ms"]


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (litellm(10, 20, 10, 5), "request_time has no observation in the window"),
        (litellm(12, 22, 19, 5), "upstream_time is more than request_time: they are not of the same requests"),
        (litellm(10.000001, 1e308, 10, 5), "the values are too large to add up"),
    ],
    ids=["idle", "impossible", "too large"],
)
def test_an_own_time_that_is_not_known_has_its_reason(later: str, reason: str):
    """And is never zero or less."""
    page = page_of(litellm(10, 20, 10, 5), later)
    assert page.own_ms is None
    assert page.own_until is None
    assert page.missing
    assert reason == page.missing["own_ms"]


def test_dynamo_s_frontend_tells_its_own_time_up_to_the_first_token():
    """Its page is an engine's as well."""

    def page(requests: float) -> str:
        times = (("dynamo_frontend_time_to_first_token_seconds", 0.05), (ROUND_TRIP, 0.04))
        return "".join(histogram(name, requests, requests * each) for name, each in times) + END

    shown = page_of(page(1), page(5))
    assert (10, "first_output") == (pytest.approx(shown.own_ms), shown.own_until)


def test_an_engine_s_page_is_no_gateway_s():
    endpoint = endpoint_of([gauge("vllm:num_requests_waiting", 1) + END] * 2)
    assert [] == gateway_pages([endpoint], Window(start_ns=SECOND, end_ns=2 * SECOND), SECOND)


@pytest.mark.parametrize(("whole_s", "queue_s"), [(1.7e308, 6.0), (1e308, 1e308), (50.0, 1.7e308)])
def test_times_that_no_number_of_milliseconds_holds_are_missing(whole_s: float, queue_s: float):
    """Else summary.json, which is strict JSON, could not be written."""
    page = page_of(litellm(10, 20, 10, 5), litellm(14, whole_s, 19, queue_s))
    json.dumps(msgspec.to_builtins(page), allow_nan=False)
    assert page.missing
    assert (page.own_ms is None) == (whole_s > 1e305)
    assert (page.queue_ms is None) == (queue_s > 1e305)


@pytest.mark.parametrize(("requests", "mean_s"), [(100, 1e308), (100_000, 1e306)])
def test_a_recent_mean_that_is_too_large_is_missing(requests: int, mean_s: float):
    """As a histogram's."""

    def page(count: int, mean_s: float) -> str:
        replies = counter("haproxy_backend_http_responses_total", count, labels=['proxy="a",code="2xx"'])
        return gauge(AVERAGE, mean_s, labels=['proxy="a"']) + replies + END

    shown = page_of(page(0, mean_s / 2), page(requests, mean_s))
    assert shown.queue_ms is None
    assert shown.missing
    assert TOO_LARGE == shown.missing["queue_ms"]
