"""The breakdown as histograms by part: what is on the page adds up to what requests waited."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from sent_spans import NOON, S, call, engine, export, gateway

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.live.breakdown import EndedRequests, break_down_ended
from sidelight.correlator.live.reasons import REASONS
from sidelight.correlator.live.window import TraceWindow
from sidelight.correlator.parts import E2E_PARTS, SHARED_PARTS, TTFT_PARTS
from sidelight.exporter.prometheus.counts import counted, nothing_counted
from sidelight.exporter.prometheus.page import LivePage
from sidelight.exporter.prometheus.snapshot import PartCounts, Snapshot, WatchCounts

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(parts: PartCounts | None, watch: WatchCounts | None = None) -> Samples:
    page = LivePage()
    page.update(Snapshot(version="0", run_id="r", phase="watch", parts=parts, watch=watch))
    families = text_string_to_metric_families(page.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def ended(number: int) -> EndedRequests:
    window = TraceWindow()
    for place in range(number):
        trace = (place + 1).to_bytes(16)
        spans = [call(first_ms=300 + place, trace=trace), gateway("gate", "client", first_ms=250, trace=trace)]
        window.take(export([*spans, engine(parent="gate", trace=trace)]))
    window.take(export([call(trace=b"without a first." * 1, first_ms=None), engine(trace=b"without a first.")]))
    window.take(export([call(trace=b"without an engin")]))
    return break_down_ended(window.finished(NOON + S, all_of_it=True))


def count(table: EndedRequests) -> PartCounts:
    start = nothing_counted(reasons=REASONS)
    return counted(start, table.parts, whole=table.whole, reasons=table.reason)


def summed(page: Samples, name: str, source: str) -> float:
    return sum(
        value
        for (sample_name, labels), value in page.items()
        if sample_name == f"{name}_sum" and ("source", source) in labels
    )


def test_every_series_is_there_before_the_first_request():
    """With 0: Prometheus does not see the first rise of a series that begins above it.

    Not those of requests that two engines share, which most never serve.
    """
    page = samples(nothing_counted(sources=("trace",), reasons=REASONS))
    for part in set(TTFT_PARTS) - set(SHARED_PARTS):
        assert 0 == page["sidelight_ttft_part_seconds_count", (("part", part.name), ("source", "trace"))]
    for part in set(E2E_PARTS) - set(SHARED_PARTS):
        assert 0 == page["sidelight_e2e_part_seconds_count", (("part", part.name), ("source", "trace"))]
    for reason in REASONS:
        assert 0 == page["sidelight_breakdown_missing_total", (("reason", reason),)]


def test_what_parts_consist_of_has_the_bounds_of_the_parts():
    """Dashboards draw the p99 of both: between 0.1 s and 1 s without one more, it would be said of 60 ms."""
    start = nothing_counted()
    assert {each.bounds_s for each in start.inner.values()} == {each.bounds_s for each in start.ttft.values()}


def test_requests_are_counted_by_source_quality_and_reason():
    """One without a TTFT has a source all the same, for its whole is broken down."""
    page = samples(count(ended(3)))
    totals = {source: page["sidelight_requests_total", (("source", source),)] for source in ("trace", "none")}
    assert {"trace": 4, "none": 1} == totals
    assert 4 == page["sidelight_breakdown_quality_total", (("quality", "exact"),)]
    ways = ("attribute", "unknown", "no_gateway")
    gateways = [page["sidelight_gateway_requests_total", (("first_output", way),)] for way in ways]
    assert [3, 0, 1] == gateways
    missing = {reason: page["sidelight_breakdown_missing_total", (("reason", reason),)] for reason in REASONS}
    assert {"no_first_token": 1, "no_engine_span": 1} == {reason: n for reason, n in missing.items() if n}


@given(st.integers(0, 30))
def test_the_parts_on_the_page_add_up_to_the_waits(number: int):
    """Of TTFT and whole, whatever buckets they fall into."""
    table = ended(number)
    page = samples(count(table))
    ttft_s = np.nansum(np.where(table.parts.covered, table.parts.ttft_s, np.nan))
    e2e_s = np.nansum(np.where(table.whole.source != "none", table.whole.e2e_s, np.nan))
    assert float(ttft_s) == pytest.approx(summed(page, "sidelight_ttft_part_seconds", "trace"))
    assert float(e2e_s) == pytest.approx(summed(page, "sidelight_e2e_part_seconds", "trace"))


def test_counting_on_is_counting_all_at_once():
    """A page of ten polls says what one of all of them would."""
    table = ended(4)
    once = count(table)
    twice = counted(once, table.parts, whole=table.whole, reasons=table.reason)
    key = ("queue", "trace")
    assert [2 * number for number in once.ttft[key].counts] == list(twice.ttft[key].counts)
    assert {name: 2 * n for name, n in once.requests.items()} == twice.requests


def test_stamps_that_are_late_let_no_sum_fall():
    """A part a little below 0 counts as 0: Prometheus takes a sum that falls for a restart."""
    table = ended(1)
    late = _with_network(table.parts, -0.003)
    after = counted(nothing_counted(), late)
    assert 0.0 == after.ttft["network", "trace"].sum_s


def _with_network(parts: Parts, time_s: float) -> Parts:
    parts.network_s[:] = np.where(np.isfinite(parts.network_s), time_s, np.nan)
    return parts


def test_a_run_breaks_down_both_by_the_same_table():
    """One without a first token has its whole broken down; reasons are in its report, not in labels."""
    table = ended(2)
    after = counted(nothing_counted(), table.parts)
    assert (2, 3, {}) == (
        *(sum(counts["queue", "trace"].counts) for counts in (after.ttft, after.e2e)),
        dict(after.missing),
    )


def test_what_a_watch_says_of_itself_is_on_the_page():
    """Refusals by kind, restarts, and how much is kept."""
    watch = WatchCounts(
        receiver={
            "exports": 5,
            "spans": 50,
            "bad_spans": 2,
            "off_clock": 4,
            "malformed": 1,
            "too_large": 0,
            "turned_away": 3,
            "incomplete": 5,
            "no_memory": 7,
            "cut_connections": 9,
        },
        forward_queue={"exports": 3, "bytes": 1200, "limit_bytes": 4000},
        restarts=1,
        errors=0,
        cpu_s=1.5,
        sizes={"spans": 40, "pending": 2},
        repeated=4,
        evicted=0,
        read_to_s=time.monotonic() - 100,
    )
    page = samples(None, watch)
    assert 100 == pytest.approx(page["sidelight_watch_lag_seconds", ()], abs=60)
    assert 9 == page["sidelight_receiver_cut_connections_total", ()]
    assert 50 == page["sidelight_receiver_spans_total", ()]
    assert 1 == page["sidelight_receiver_restarts_total", ()]
    kinds = ("off_clock", "malformed", "turned_away", "no_memory", "incomplete")
    assert [4, 1, 3, 7, 5] == [page["sidelight_receiver_refused_total", (("kind", kind),)] for kind in kinds]
    assert 2 == page["sidelight_window_size", (("what", "pending"),)]


def test_other_on_the_page_is_the_summarys():
    """The engine's front end is in it, and beside it by itself."""
    table = ended(5)
    page = samples(count(table))
    other_s, frontend_s = (np.nansum(column) for column in (table.parts.other_s, table.parts.engine_frontend_s))
    of = {name: (("part", name), ("source", "trace")) for name in ("other", "engine_frontend")}
    assert other_s > 0.1
    assert other_s == pytest.approx(page["sidelight_ttft_part_seconds_sum", of["other"]])
    assert ("sidelight_ttft_part_seconds_sum", of["engine_frontend"]) not in page
    assert frontend_s == pytest.approx(page["sidelight_inner_part_seconds_sum", of["engine_frontend"]])
