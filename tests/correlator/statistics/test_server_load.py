"""The engines' load as requests met it: gauges, recent rates and ratios, of one engine or of several together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_series import SECOND, engine, requests
from series import scraped

from sidelight.correlator.statistics.server_load import gauge_samples, met_at_submission, most_within, server_loads
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.window.summary import server_summary
from sidelight.scraper.window.window import Window

NAN = float("nan")


def met(name: str, sent: object, *engines: EndpointSeries) -> list[float | None]:
    """The quantity at each submission, None where unknown."""
    load = server_loads(sent, engines)[name]  # type: ignore[arg-type]
    values = load.at(sent.submit_ns)  # type: ignore[attr-defined]
    return [None if np.isnan(value) else value for value in values.tolist()]


def test_a_gauge_is_what_the_last_scrape_before_showed():
    """Its label sets added up; before the first scrape and after the last it is unknown."""
    shown = engine([1, 2, 3], waiting=[[1, 10], [2, 20], [3, 30]])

    assert [None, 11.0, 11.0, 22.0, 33.0, None] == met("requests_waiting", requests([0.5, 1, 1.9, 2, 3, 3.1]), shown)


def test_the_queue_of_several_engines_is_their_sum():
    """At the scrapes of the first; unknown where one of them is, and nothing at all without a page."""
    first = engine([1, 2, 3], waiting=[1, 2, 3])
    second = engine([1.5, 2, 2.5], waiting=[10, 20, 30])
    queue = gauge_samples([first, second], "requests_waiting")

    assert (first.at_ns == queue.at_ns).all()
    assert [None, 22.0, None] == [None if np.isnan(value) else value for value in queue.amount.tolist()]
    assert 0 == len(gauge_samples([], "requests_waiting").at_ns)


def test_a_gauge_that_counts_nothing_real_is_unknown():
    """Whatever a page says, what is made of it stays a number."""
    queue = gauge_samples([engine([1, 2, 3], waiting=[1e308, 2, -1e308])], "requests_waiting")
    np.testing.assert_array_equal([NAN, 2.0, NAN], queue.amount)


def test_the_most_of_a_gauge_between_two_moments_counts_what_it_stood_at():
    """The scrape before the first moment too; nothing is known before the first scrape and after the last."""
    queue = gauge_samples([engine([2, 3, 3.4, 6], waiting=[4, 1, 9, 2])], "requests_waiting")
    edges_ns = np.array([0, 1, 2.5, 3.2, 3.3, 5, 6, 8]) * 1e9
    most = most_within(queue, edges_ns.astype(np.int64))
    assert [None, 4.0, 4.0, 1.0, 9.0, 9.0, 2.0] == [None if np.isnan(value) else value for value in most.tolist()]


def test_a_gauge_grows_stale():
    """Five scrape intervals without a page, and it is unknown until the next."""
    shown = engine([1, 2, 3, 4, 20, 21], waiting=[1, 2, 3, 4, 5, 6])

    assert [4.0, None, 5.0] == met("requests_waiting", requests([9, 9.1, 20]), shown)


def test_a_gauge_that_a_page_lacks_is_unknown_there():
    assert [None, 2.0] == met("requests_waiting", requests([1, 2]), engine([1, 2, 3], waiting=[NAN, 2, 3]))


def test_preemptions_are_those_of_the_last_five_seconds():
    """Per second, across a restart that counts from zero; of less than five seconds at the start, of none at first."""
    shown = engine(range(10), waiting=np.zeros(10), preemptions=[0, 1, 2, 3, 4, 5, 5, 5, 2, 2])

    assert [None, 1.0, 1.0, 0.8, 0.6, 0.8, 0.6] == pytest.approx(
        met("preemptions", requests([0, 1, 5, 6, 7, 8, 9]), shown)
    )


def test_a_rate_beyond_the_largest_number_is_unknown():
    """And no warning of numpy is on anybody's terminal."""
    shown = engine([0, 0.5, 1], waiting=np.zeros(3), preemptions=[0, 1.7e308, 1.7e308])
    assert [None, None, 1.7e308] == met("preemptions", requests([0, 0.5, 1]), shown)


def test_the_hit_rate_is_that_of_the_last_five_seconds():
    """Hits over look-ups; where nothing was looked up it is unknown, not zero."""
    queries, hits = [0, 10, 20, 20, 20, 20, 20, 20, 24], [0, 0, 10, 10, 10, 10, 10, 10, 11]
    shown = engine(range(9), waiting=np.zeros(9), queries=queries, hits=hits)

    assert [0.0, 0.5, 1.0, None, 0.25] == met("prefix_cache_hit_rate", requests([1, 2, 6, 7, 8]), shown)


def behind_a_gateway() -> tuple[EndpointSeries, EndpointSeries]:
    counters = {"preemptions": [0, 1, 2], "queries": [0, 10, 20], "hits": [0, 10, 20]}
    idle = {"preemptions": [0, 2, 4], "queries": [0, 30, 60], "hits": [0, 0, 0]}
    return (
        engine([0, 1, 2], "http://a:1/metrics", waiting=[1, 2, 3], running=[1, 1, 1], kv=[0.1, 0.2, 0.3], **counters),
        engine([0, 1, 2], "http://b:1/metrics", waiting=[10, 20, 30], running=[2, 2, 2], kv=[0.9, 0.1, 0.1], **idle),
    )


@pytest.mark.parametrize(
    ("name", "combined", "expected"),
    [
        ("requests_waiting", "sum", 22.0),
        ("requests_running", "sum", 3.0),
        ("kv_cache_usage", "max", 0.2),
        ("preemptions", "sum", 3.0),
        ("prefix_cache_hit_rate", "ratio", 0.25),
    ],
)
def test_engines_behind_a_gateway_are_taken_together(name: str, combined: str, expected: float):
    """Counts add up, of the caches the fullest counts, and the hit rate is that of all look-ups."""
    sent = requests([1], "http://gateway/v1")
    load = server_loads(sent, behind_a_gateway())[name]

    assert combined == load.combined
    assert [expected] == met(name, sent, *behind_a_gateway())


def test_a_request_meets_the_engine_that_it_was_sent_to():
    """Where addresses show it; one that went to a server that is not scraped has nothing known."""
    sent = requests([1, 1, 1], ["http://a:1/v1", "http://b:1/v1", "http://c:1/v1"])
    load = server_loads(sent, behind_a_gateway())["requests_waiting"]

    assert "own" == load.combined
    assert [2.0, 20.0, None] == met("requests_waiting", sent, *behind_a_gateway())


def test_engines_whose_pages_want_a_password_are_met_by_their_address():
    first, second = behind_a_gateway()
    secured = [replace(endpoint, url=endpoint.url.replace("//", "//***@")) for endpoint in (first, second)]
    sent = requests([1, 1], ["http://A:1/v1", "http://b:1/v1"])

    assert "own" == server_loads(sent, secured)["requests_waiting"].combined  # type: ignore[union-attr]
    assert [2.0, 20.0] == met("requests_waiting", sent, *secured)


def dynamo(waiting: int) -> str:
    """A page of a Dynamo frontend, which counts those being prefilled as queued."""
    return f"# TYPE dynamo_frontend_queued_requests gauge\ndynamo_frontend_queued_requests {waiting}\n"


def vllm(waiting: int) -> str:
    name = "vllm:request_queue_time_seconds"
    histogram = f'# TYPE {name} histogram\n{name}_bucket{{le="+Inf"}} 1\n{name}_sum 1\n{name}_count 1\n'
    return f"{histogram}# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting {waiting}\n"


def test_a_frontend_listed_before_its_worker_does_not_lead():
    """The worker has the queue: its number of waiting requests counts, as its queue times do in the summary."""
    pages = [
        scraped(at * SECOND, page, url=url)
        for at in (1, 2, 3)
        for url, page in (("http://front/metrics", dynamo(9)), ("http://worker/metrics", vllm(at)))
    ]
    endpoints = build(rows(pages))
    summary = server_summary(endpoints, Window(start_ns=SECOND, end_ns=3 * SECOND), SECOND)

    assert ["http://front/metrics", "http://worker/metrics"] == [endpoint.url for endpoint in endpoints]
    assert "vllm" == summary.engine.name
    assert [1.0, 2.0] == met("requests_waiting", requests([1.5, 2.5], "http://front/v1"), *endpoints)


def test_part_of_a_sum_is_not_the_sum():
    """An engine whose scrapes ended leaves the whole unknown."""
    first, _ = behind_a_gateway()
    ended = engine([0, 1], "http://b:1/metrics", waiting=[10, 20])

    assert [22.0, None] == met("requests_waiting", requests([1, 2], "http://gateway/v1"), first, ended)


def test_an_engine_without_the_gauge_leaves_the_whole_unknown():
    first, second = behind_a_gateway()
    silent = engine([0, 1, 2], "http://c:1/metrics", running=[1, 1, 1])
    load = server_loads(requests([1], "http://gateway/v1"), [first, second, silent])["requests_waiting"]

    assert "the page shows no gauge vllm:num_requests_waiting" == load.reason


def test_one_engine_is_met_whatever_its_address():
    """The page may stand at another address than the API."""
    sent = requests([1], "http://elsewhere/v1")
    load = server_loads(sent, [engine([0, 1], waiting=[1, 2])])["requests_waiting"]

    assert "one" == load.combined
    assert [2.0] == met("requests_waiting", sent, engine([0, 1], waiting=[1, 2]))


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ([], "no server that was scraped shows the metrics of a known engine"),
        ([engine([])], "no scrape succeeded"),
        ([engine([1, 2])], "no server that was scraped shows the metrics of a known engine"),
    ],
)
def test_no_engine_is_a_reason(engines: list[EndpointSeries], reason: str):
    assert {reason} == {load.reason for load in server_loads(requests([1]), engines).values()}  # type: ignore[union-attr]
    assert Missing(reason) == met_at_submission(requests([1]), engines)["requests_waiting"]


def test_a_request_that_was_never_submitted_met_nothing():
    values = met_at_submission(requests([-1, 1]), [engine([-5, -1, 1], waiting=[5, 4, 3])])["requests_waiting"]

    assert not isinstance(values, Missing)
    assert [True, False] == np.isnan(values).tolist()
