"""Lines on gateways' pages in the measured window, and whether their spans agree."""

from __future__ import annotations

from collections.abc import Iterator

from sidelight.exporter.summary.gateways import PageBesideSpans
from sidelight.exporter.summary.result import Summary
from sidelight.rundir.printable.numbers import cell, percent, spoken, spoken_together
from sidelight.scraper.gateways.catalogue import gateway
from sidelight.scraper.window.quantities import GatewayPage

AGREES_MS, AGREES_RATIO = 5.0, 0.1  # what page and spans may be apart


def gateway_lines(summary: Summary) -> Iterator[str]:
    """Yield the own time, queue and errors of each gateway's page; nothing without a page."""
    for page in summary.server.gateways or ():
        title = gateway(page.gateway).title
        facts = ", ".join(_facts(page)) or "no request was counted"
        if page.own_ms is None and page.queue_ms is None:
            facts += "; it tells neither its own time nor its queue"
        yield f"{title}, by its page: {facts}.{_beside(summary, page)}"


def _facts(page: GatewayPage) -> Iterator[str]:
    if page.requests and page.requests.stats.total:
        yield f"{cell(page.requests.stats.total)} requests"
    if page.own_ms is not None:
        until = " up to its first output" if page.own_until == "first_output" else ""
        error = f" (± {spoken(page.own_error_ms)})" if page.own_error_ms else ""
        yield f"{spoken(page.own_ms)}{error} of a request{until} are its own in the mean"
    if page.queue_ms is not None:
        error = f" (± {spoken(page.queue_error_ms)})" if page.queue_error_ms else ""
        yield f"{spoken(page.queue_ms)}{error} in its queue"
    for gauge, what in ((page.requests_waiting, "waiting"), (page.requests_in_flight, "in flight")):
        if gauge and gauge.stats.max:
            yield f"at most {cell(gauge.stats.max)} {what}"
    for counter, what in ((page.retries, "retries"), (page.upstream_errors, "failed calls of the next server")):
        if counter and counter.stats.total:
            yield f"{cell(counter.stats.total)} {what}"


def _beside(summary: Summary, page: GatewayPage) -> str:
    """Return a sentence on whether the page's own time agrees with the gateway's spans. Without spans, it gives the
    queue's share of the time outside the engine.
    """
    correlation = summary.correlation
    for passed in correlation.gateways:
        if passed.name == page.gateway and passed.by_page:
            return _compared(passed.by_page)
    outside_ms = correlation.breakdown.network_ms.mean
    if page.queue_ms and outside_ms and not any(passed.name == page.gateway for passed in correlation.gateways):
        share = percent(min(page.queue_ms / outside_ms, 1.0))
        return f" Its queue is {share} of the {spoken(outside_ms)} outside the engine."
    return ""


def _compared(beside: PageBesideSpans) -> str:
    low, high, apart = spoken_together(beside.low_ms, beside.high_ms, beside.apart_ms)
    room = f"between {low} and {high}"
    if beside.apart_ms <= max(AGREES_MS, AGREES_RATIO * beside.high_ms, 2 * beside.own_error_ms):
        return f" Its spans agree ({room})."
    return f" Its spans do not agree: they leave room for {room}, {apart} away."
