"""Requests without an engine's span, estimated as they come, from a real vLLM's pages and against its own spans."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import recordings
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import SERVER, S, body, span

from sidelight.correlator.live.breakdown import EndedRequests, estimated
from sidelight.correlator.live.estimate import EstimateWindow, hold_traced
from sidelight.correlator.live.traces import TracedRequest
from sidelight.correlator.live.window import TraceWindow
from sidelight.correlator.replay import Replay
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.scraper.series.log import ScrapeRow
from sidelight.scraper.spans.log import packed

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """161 requests as a gateway's spans, the pages of the 38 s, and the truth in ms."""

    spans: list[Span]
    pages: list[ScrapeRow]
    queue_ms: Floats
    prefill_ms: Floats


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    case = recordings.overload()
    (page,) = case.scrapes
    pages = [
        ScrapeRow(
            url=page.url,
            tick_ns=int(request_ns),
            request_ns=int(request_ns),
            response_ns=int(response_ns),
            series=page.series,
            values=values,
            changed=True,
        )
        for request_ns, response_ns, values in zip(page.request_ns, page.response_ns, page.values, strict=True)
    ]
    return Traffic(
        spans=[_span(case.requests, place) for place in range(len(case.requests))],
        pages=pages,
        queue_ms=case.queue_s * 1e3,
        prefill_ms=case.prefill_s * 1e3,
    )


def _span(sent: RequestLog, place: int) -> Span:
    submit_ns = int(sent.submit_ns[place])
    attributes: dict[str, str | float] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.time_to_first_chunk": (int(sent.first_output_ns[place]) - submit_ns) / 1e9,
        "gen_ai.usage.input_tokens": float(sent.input_tokens[place]),
        "gen_ai.usage.output_tokens": float(sent.output_tokens[place]),
    }
    server_span = span("chat", "", kind=SERVER, attributes=attributes, trace=(place + 1).to_bytes(16))
    server_span.span_id = (place + 1).to_bytes(8)
    server_span.start_time_unix_nano, server_span.end_time_unix_nano = submit_ns, int(sent.end_ns[place])
    return server_span


def watched(traffic: Traffic, estimate: EstimateWindow, window: TraceWindow) -> dict[int, EndedRequests]:
    """Let time pass as it did, a second at a time; return what came out of each request, by its place."""
    by_place: dict[int, EndedRequests] = {}
    spans = sorted(traffic.spans, key=lambda span: span.end_time_unix_nano)
    pages = list(traffic.pages)
    now_ns = pages[0].request_ns
    last_ns = spans[-1].end_time_unix_nano + 40 * S
    order: list[int] = []
    while now_ns < last_ns:
        now_ns += S
        while pages and pages[0].response_ns < now_ns:
            estimate.scraped(pages.pop(0))
        while spans and spans[0].end_time_unix_nano < now_ns:
            window.take(packed(now_ns, "grpc", body([spans.pop(0)])))
        finished = window.finished(now_ns)
        order += [_place(request) for request in finished]
        assert [] == hold_traced(estimate, finished, now_ns)
        for batch in (*estimate.estimates(now_ns), *estimate.leaving(now_ns)):
            ended = estimated(batch.requests, batch.attribution, batch.parts)
            for row in range(len(ended)):
                by_place[order.pop(0)] = _row(ended, row)
    return by_place


def _place(request: TracedRequest) -> int:
    assert request.client is not None
    return int.from_bytes(request.client.span_id) - 1


def _row(ended: EndedRequests, row: int) -> EndedRequests:
    at = np.array([row])
    return replace(ended, parts=take(ended.parts, at), whole=take(ended.whole, at), reason=ended.reason[at])


def test_estimates_of_passing_traffic_are_near_the_engines_own_times(traffic: Traffic):
    """Of every request, as it passes, with what is known of it being a client's alone."""
    by_place = watched(traffic, EstimateWindow(), TraceWindow())
    assert set(range(161)) == set(by_place)
    assert {"histogram"} == {str(ended.parts.source[0]) for ended in by_place.values()}
    for part, truth_ms, wape in (("queue", traffic.queue_ms, 0.02), ("prefill", traffic.prefill_ms, 0.15)):
        estimated_ms = np.array([1e3 * float(getattr(by_place[place].parts, f"{part}_s")[0]) for place in range(161)])
        assert np.abs(estimated_ms - truth_ms).sum() / truth_ms.sum() < wape, part


def test_the_report_of_a_watch_estimates_as_it_did_while_it_went(traffic: Traffic):
    """From the same logs: every request by its trace, with the same estimates as when it passed."""
    live = watched(traffic, EstimateWindow(), TraceWindow())
    replay = Replay(recordings.overload().scrapes, [], nullcontext)
    for sent in sorted(traffic.spans, key=lambda sent: sent.end_time_unix_nano):
        replay.take(packed(sent.end_time_unix_nano + 1, "grpc", body([sent])))
    replayed = replay.replayed()
    assert {"histogram": 161} == Counter(replayed.parts.source.tolist())
    places = [int(trace_id, 16) - 1 for trace_id in replayed.requests.trace_id]
    for part, wape in (("queue_s", 0.02), ("prefill_s", 0.02)):
        before_s = np.array([float(getattr(live[place].parts, part)[0]) for place in places])
        assert np.abs(getattr(replayed.parts, part) - before_s).sum() < wape * before_s.sum(), part


def all_at_once(traffic: Traffic) -> tuple[list[TracedRequest], int]:
    """All requests, and when the last of them had ended."""
    window = TraceWindow()
    now_ns = max(span.end_time_unix_nano for span in traffic.spans)
    window.take(packed(now_ns, "grpc", body(traffic.spans)))
    return window.finished(now_ns + 10 * S), now_ns


def test_the_window_is_bounded(traffic: Traffic):
    """What it cannot hold is returned as not estimated; no request is lost."""
    estimate = EstimateWindow(most=50)
    estimate.scraped(traffic.pages[0])
    requests, now_ns = all_at_once(traffic)
    assert [] == hold_traced(estimate, requests, now_ns)
    assert {"requests": 50, "waiting": 50} == estimate.sizes
    given_up = estimate.leaving(now_ns, all_of_it=True)
    reasons = [
        reason for batch in given_up for reason in estimated(batch.requests, batch.attribution, batch.parts).reason
    ]
    assert (161, {"not_estimated"}) == (len(reasons), set(reasons))


def test_a_window_that_is_half_full_is_estimated_before_requests_have_to_make_room(traffic: Traffic):
    """At more requests a second than it can hold between two of its steps, each is estimated all the same."""
    by_place = watched(traffic, EstimateWindow(most=40), TraceWindow())
    assert 161 == len(by_place)
    assert {"histogram"} == {str(ended.parts.source[0]) for ended in by_place.values()}


def test_an_estimate_that_fails_costs_none_that_is_given_out(traffic: Traffic, monkeypatch: pytest.MonkeyPatch):
    """Those that were made before it wait to be counted one by one, and are."""
    estimate = EstimateWindow[RequestLog]()
    for page in traffic.pages:
        estimate.scraped(page)
    requests, now_ns = all_at_once(traffic)
    hold_traced(estimate, requests, now_ns)
    counts = [len(batch.parts) for batch in estimate.estimates(now_ns + 5 * S)]
    assert sum(counts) < 161 / 2
    hold_traced(estimate, requests[:1], now_ns + 6 * S)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("sidelight.correlator.live.estimate.attribute", fail)
        with pytest.raises(ZeroDivisionError):
            estimate.estimates(now_ns + 13 * S)
    counts += [len(batch.parts) for batch in estimate.estimates(now_ns + 14 * S, all_of_it=True)]
    assert sum(counts) == 162


def test_without_pages_no_request_waits_for_an_estimate(traffic: Traffic):
    """There will be none; nor where they are not scraped any more, whose last scrape would else be waited for."""
    never, no_more = EstimateWindow(), EstimateWindow()
    no_more.scraped(traffic.pages[0])
    no_more.forget_pages([])
    requests, now_ns = all_at_once(traffic)
    assert [161, 161] == [len(hold_traced(estimate, requests, now_ns)) for estimate in (never, no_more)]
