"""What the report says of gateways' pages, and whether their spans agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import summaries
from msgspec import structs

from sidelight.correlator.gateways import GatewayPart
from sidelight.exporter.report.conclusion import conclusion
from sidelight.exporter.report.tables.gateways import gateway_lines
from sidelight.exporter.summary.gateways import beside_pages
from sidelight.exporter.summary.result import Summary
from sidelight.scraper.window.quantities import GatewayPage


def page(gateway: str = "litellm", **changes: object) -> GatewayPage:
    """Return a page on which 100 requests took 500 ms, 60 ms of them in the gateway and 20 in its queue."""
    shown = {
        "url": "http://gateway.test/metrics",
        "gateway": gateway,
        "detected_by": "metric some",
        "own_ms": 60.0,
        "own_error_ms": 0.0,
        "own_until": "end",
        "queue_ms": 20.0,
        "queue_error_ms": 0.0,
        "request_time": summaries.histogram(0.5, 0.5),
        **changes,
    }
    return GatewayPage(**shown)  # type: ignore[arg-type]


def summary(*pages: GatewayPage, passed: GatewayPart | None = None) -> Summary:
    """Return a run's summary with pages of gateways, whose requests passed this one."""
    parts = summaries.parts()
    if passed is not None:
        gateways = np.empty(len(parts.gateways), dtype=np.object_)
        gateways.fill((passed,))
        parts = replace(parts, gateways=gateways)
    correlation = summaries.correlated(summaries.findings(parts))
    correlation = structs.replace(correlation, gateways=beside_pages(correlation.gateways, pages))
    return summaries.summary(correlation, structs.replace(summaries.server(), gateways=list(pages)))


def passed(*, before_ms: float = 40.0, whole_ms: float = 80.0, name: str = "litellm") -> GatewayPart:
    """Return what the spans of a gateway say that do not tell its first output."""
    return GatewayPart(
        service="proxy",
        part_s=before_ms / 1e3,
        request_s=before_ms / 1e3,
        at_most_s=whole_ms / 1e3,
        first_by="",
        of_whole_s=whole_ms / 1e3,
        name=name,
    )


@pytest.mark.parametrize(
    ("part", "said", "apart_ms"),
    [
        (passed(), "Its spans agree (between 40 ms and 80 ms).", 0.0),
        (passed(whole_ms=58.0), "Its spans agree (between 40 ms and 58 ms).", 2.0),
        (
            passed(before_ms=200.0, whole_ms=250.0),
            "Its spans do not agree: they leave room for between 200 ms and 250 ms, 140 ms away.",
            140.0,
        ),
        (
            passed(before_ms=5.0, whole_ms=10.0),
            "Its spans do not agree: they leave room for between 5 ms and 10 ms, 50 ms away.",
            50.0,
        ),
    ],
    ids=["inside", "nearly", "below", "above"],
)
def test_a_page_is_set_beside_the_spans_of_its_gateway(part: GatewayPart, said: str, apart_ms: float):
    """Spans leave room from what passed before the call to what is more than the engine's."""
    known = summary(page(), passed=part)
    (line,) = gateway_lines(known)
    shown = "60 ms of a request are its own in the mean, 20 ms in its queue"
    assert line.startswith(f"LiteLLM proxy, by its page: {shown}.")
    assert line.endswith(said)
    by_page = known.correlation.gateways[0].by_page
    assert by_page
    assert (60.0, pytest.approx(apart_ms)) == (by_page.own_ms, by_page.apart_ms)


def test_an_own_time_of_rounded_times_bears_its_error():
    """Spans that are no farther off than twice that agree."""
    (line,) = gateway_lines(summary(page(own_error_ms=30.0), passed=passed(before_ms=5.0, whole_ms=10.0)))
    assert "60 ms (± 30 ms) of a request are its own" in line
    assert line.endswith("Its spans agree (between 5 ms and 10 ms).")


UNSAID = "gateway proxy do not say when its first output left. In the mean it held requests for 40 ms before it called"


@pytest.mark.parametrize(
    ("part", "said", "end"),
    [
        (passed(name=""), UNSAID, "set gen_ai.response.time_to_first_chunk (seconds) on its server span."),
        (passed(name="envoy"), UNSAID, "server, and took at most 80 ms altogether."),
        (replace(passed(), first_by="inner_call", part_s=0.06), "reached it, not when", "between 60 ms and 80 ms."),
    ],
    ids=["home-made", "envoy", "by its call"],
)
def test_the_bounds_of_a_gateway_are_said_with_what_can_be_done(part: GatewayPart, said: str, end: str):
    """An attribute can be set by who wrote the gateway, not by who runs Envoy."""
    (line,) = (line for line in conclusion(summary(passed=part)) if line.startswith("The spans of"))
    assert said in line
    assert line.endswith(end)


def test_another_gateway_s_spans_are_not_compared():
    (line,) = gateway_lines(summary(page("haproxy", own_ms=None, own_error_ms=None, own_until=None), passed=passed()))
    assert "spans" not in line


def test_a_queue_without_spans_is_set_beside_the_time_outside_the_engine():
    """HAProxy sends no spans: the page is all that tells its part."""
    recent = {"queue_ms": 4.0, "queue_error_ms": 0.5}
    (line,) = gateway_lines(summary(page("haproxy", own_ms=None, own_error_ms=None, own_until=None, **recent)))
    assert line == (
        "HAProxy, by its page: 4 ms (± 0.5 ms) in its queue. Its queue is 80 % of the 5 ms outside the engine."
    )


def test_a_run_without_such_a_page_says_nothing():
    assert [] == list(gateway_lines(summary()))
