"""Scrapes laid under each other by endpoint and series."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sidelight.scraper.exposition import histograms
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.targets.scrape import Scrape


def record(at_s: float, page: str, *, url: str = "u", error: str = "", content_type: str = "text/plain") -> Scrape:
    at_ns = round(at_s * 1e9)
    return Scrape(
        url=url,
        tick_ns=at_ns - 20,
        request_ns=at_ns - 10,
        response_ns=at_ns,
        content_type=content_type,
        body=page.encode(),
        error=error,
    )


def test_columns_are_the_union_over_layouts():
    """A series that appears late, or is gone, is NaN where it was not on the page."""
    (endpoint,) = build(rows([record(1, "a 1\nb 2\n"), record(2, "b 3\nc 4\n"), record(3, 'a{x="1"} 5\nc 6\n')]))
    assert ["a", "b", "c", "a"] == [series.name for series in endpoint.series]
    expected = np.array([[1, 2, np.nan, np.nan], [np.nan, 3, 4, np.nan], [np.nan, np.nan, 6, 5]])
    np.testing.assert_array_equal(expected, endpoint.values)


def test_stamps_failures_and_updates():
    """Rows are usable scrapes in order of their responses; failures keep their reasons; unchanged pages are marked."""
    (endpoint,) = build(
        rows(
            [
                record(1, "a 1\n"),
                record(2, "a 1\n"),
                record(3, "", error="connect: refused"),
                record(4, "a 1"),
                record(5, "a 2\n"),
            ]
        )
    )
    assert [10**9, 2 * 10**9, 5 * 10**9] == endpoint.response_ns.tolist()
    assert [10**9 - 5, 2 * 10**9 - 5, 5 * 10**9 - 5] == endpoint.at_ns.tolist()
    assert [True, False, True] == endpoint.changed.tolist()
    assert (3 * 10**9 - 10, "connect: refused") == endpoint.failures[0]
    assert "malformed page: the page is cut off: its last line has no end (line 1, byte 3)" == endpoint.failures[1][1]


def test_endpoints_are_apart_even_if_all_their_scrapes_failed():
    """Each URL has its own series, in order of appearance; one that never answered has none, and its failures."""
    first, second = build(rows([record(1, "", url="b", error="x"), record(1, "a 1\n", url="a")]))
    assert ("b", 0, 0, 1) == (first.url, len(first.response_ns), len(first.series), len(first.failures))
    assert (0, 0) == first.values.shape
    assert "a" == second.url


def test_openmetrics_is_held_to_its_end():
    """A page that calls itself OpenMetrics must end in EOF."""
    (endpoint,) = build(rows([record(1, "a 1\n", content_type="application/openmetrics-text; version=1.0.0")]))
    assert "without # EOF" in endpoint.failures[0][1]


def test_bucket_bounds_are_numbers():
    """`le="1"` and `le="1.0"` are one column, so a changed spelling does not change the layout."""
    page = '# TYPE h histogram\nh_bucket{{le="{}"}} 1\nh_bucket{{le="+Inf"}} 1\nh_sum 1\nh_count 1\n'
    (endpoint,) = build(rows([record(1, page.format("1.0")), record(2, page.format("1"))]))
    (columns,) = histograms(endpoint.series)
    assert ((1.0, np.inf), ("1.0", "+Inf")) == (columns.bounds, columns.le)
    assert not np.isnan(endpoint.values).any()


def test_histograms_are_grouped_by_labels():
    """Every label set of a family is a histogram of its own, its bounds in order, its sum and count found."""
    page = (
        "# TYPE h histogram\n"
        'h_bucket{a="1",le="+Inf"} 3\nh_bucket{a="1",le="0.5"} 2\nh_sum{a="1"} 1\nh_count{a="1"} 3\n'
        'h_bucket{a="2",le="+Inf"} 1\nh_count{a="2"} 1\nh_sum{a="2"} 1\n# TYPE x gauge\nx 1\n'
    )
    (endpoint,) = build(rows([record(1, page)]))
    first, second = histograms(endpoint.series)
    assert ((0.5, np.inf), (1, 0), 2, 3) == (first.bounds, first.buckets, first.sum, first.count)
    assert (("a", "2"),) == second.labels


@pytest.mark.parametrize(("name", "shape", "failed"), [("engine_death", 85, 66), ("multi_api_server", 126, 0)])
def test_recordings(recording: Callable[[str], list[Scrape]], name: str, shape: int, failed: int):
    """A dead engine is a series that ends and failures; a gauge that appears late is missing before, not zero."""
    endpoint: EndpointSeries = build(rows(recording(name)))[0]
    assert (shape, failed) == (len(endpoint.values), len(endpoint.failures))
    running = [column for column, series in enumerate(endpoint.series) if series.name == "vllm:num_requests_running"]
    assert (name == "multi_api_server") == bool(np.isnan(endpoint.values[0, running]).any())
