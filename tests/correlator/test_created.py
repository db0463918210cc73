"""A series that was reset, visible in its `_created` alone: no start time of the process, and no value that fell.

100, 110, (restart) 150, 160: from the first page to the last 170 were counted, with one reset. Everything that reads
cumulative series says so.
"""

from __future__ import annotations

import pytest
import series
from engine_series import requests
from series import WAITING, endpoint_of, gauge

from sidelight.correlator.estimate.intervals import Observed, observe
from sidelight.correlator.statistics.server_load import server_loads
from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import histograms
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.increase import CounterIncrease, HistogramIncrease, counter, histogram
from sidelight.scraper.window.window import ScrapeSelection, Window, select_scrapes

SECOND = 10**9
COUNTED = (100, 110, 150, 160)
CREATED = (1.7e9, 1.7e9, 1.7e9 + 60, 1.7e9 + 60)
TIMES = ("request_queue_time_seconds", "request_prefill_time_seconds", "time_to_first_token_seconds")
COUNTERS = ("num_preemptions", "prompt_tokens")


def page(count: int, created: float) -> str:
    """A page of vLLM whose histograms and counters all stand at one count."""
    text = gauge(WAITING, 0)
    for name in TIMES:
        text += series.histogram(f"vllm:{name}", count, count / 2) + gauge(f"vllm:{name}_created", created)
    for name in COUNTERS:
        text += series.counter(f"vllm:{name}_total", count) + gauge(f"vllm:{name}_created", created)
    return text


@pytest.fixture
def endpoint() -> EndpointSeries:
    return endpoint_of([page(*at) for at in zip(COUNTED, CREATED, strict=True)], url="http://engine:8000/metrics")


@pytest.fixture
def selection(endpoint: EndpointSeries) -> ScrapeSelection:
    scrapes = select_scrapes(endpoint, Window(start_ns=SECOND, end_ns=4 * SECOND), SECOND)
    assert not isinstance(scrapes, Missing)
    return scrapes


def test_increases_over_a_window(endpoint: EndpointSeries, selection: ScrapeSelection):
    """Counters and histograms."""
    column = next(i for i, series in enumerate(endpoint.series) if series.name == "vllm:num_preemptions_total")
    counted = counter(endpoint, column, selection)
    observed = histogram(endpoint, histograms(endpoint.series)[0], selection)
    assert isinstance(counted, CounterIncrease)
    assert isinstance(observed, HistogramIncrease)
    assert (170, 1) == (counted.total, counted.resets)
    assert (170, 85.0, 1) == (observed.count, observed.sum, observed.resets)


def test_scrape_intervals(endpoint: EndpointSeries):
    """The interval of the restart is lost: what the engine counted in it is not known."""
    observed = observe(endpoint)
    assert isinstance(observed, Observed)
    assert observed.firsts is not None
    for intervals in (observed.ends, observed.firsts):
        assert ([False, True, False], [10, 150, 10]) == (intervals.lost.tolist(), intervals.count.tolist())
    assert [10.0, 150.0, 10.0] == observed.firsts.sums["prompt_tokens"].tolist()
    assert [5.0, 75.0, 5.0] == observed.ends.sums["queue"].tolist() == observed.ends.sums["prefill"].tolist()


def test_recent_load(endpoint: EndpointSeries):
    """Preemptions per second since the first page."""
    load = server_loads(requests([2, 3, 4]), [endpoint])["preemptions"]
    assert not isinstance(load, Missing)
    assert [10.0, 160 / 2, 170 / 3] == pytest.approx(load.at(endpoint.at_ns[1:]).tolist())
