"""Requests that no engine told of, estimated as they come, from a real vLLM's pages and against its own spans."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import SERVER, S, body

from correlator.parts import select
from correlator.rolling import Ended
from correlator.rolling_estimate import RollingEstimate
from correlator.trace_window import TraceWindow
from correlator.traced_requests import TracedRequest
from scraper.exposition import Series
from scraper.log import Row
from scraper.span_log import packed

Floats = npt.NDArray[np.float64]
RECORDING = Path(__file__).parents[1] / "data/vllm_overload.npz"
URL = "http://engine.test/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """161 requests as a gateway's spans, the pages of the 38 s, and the truth in ms."""

    spans: list[Span]
    pages: list[Row]
    queue_ms: Floats
    prefill_ms: Floats


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    with np.load(RECORDING) as file:
        data = {name: file[name] for name in file.files}
    start_ns = int(data["start_ns"])
    series = tuple(
        Series(name=name, labels=tuple((key, value) for key, value in labels), family=family, type=kind, help="")
        for name, labels, family, kind in json.loads(str(data["series"]))
    )
    pages = [
        Row(
            url=URL,
            tick_ns=int(request_ns) + start_ns,
            request_ns=int(request_ns) + start_ns,
            response_ns=int(response_ns) + start_ns,
            series=series,
            values=values,
            changed=True,
        )
        for request_ns, response_ns, values in zip(
            data["scrape_request_ns"], data["scrape_response_ns"], data["scrape_values"], strict=True
        )
    ]
    return Traffic(
        spans=[_span(data, place, start_ns) for place in range(len(data["submit_ns"]))],
        pages=pages,
        queue_ms=data["queue_s"] * 1e3,
        prefill_ms=data["prefill_s"] * 1e3,
    )


def _span(data: dict[str, npt.NDArray[np.int64]], place: int, start_ns: int) -> Span:
    submit_ns, end_ns = int(data["submit_ns"][place]), int(data["end_ns"][place])
    one = Span(trace_id=(place + 1).to_bytes(16), span_id=(place + 1).to_bytes(8), kind=SERVER, name="chat")
    one.start_time_unix_nano, one.end_time_unix_nano = submit_ns + start_ns, end_ns + start_ns
    one.attributes.add(key="gen_ai.operation.name").value.string_value = "chat"
    told = {
        "gen_ai.response.time_to_first_chunk": (int(data["first_output_ns"][place]) - submit_ns) / 1e9,
        "gen_ai.usage.input_tokens": float(data["input_tokens"][place]),
        "gen_ai.usage.output_tokens": float(data["output_tokens"][place]),
    }
    for key, value in told.items():
        one.attributes.add(key=key).value.double_value = value
    return one


def watched(traffic: Traffic, estimate: RollingEstimate, window: TraceWindow) -> dict[int, Ended]:
    """Let time pass as it did, a second at a time; return what came out of each request, by its place."""
    found: dict[int, Ended] = {}
    spans = sorted(traffic.spans, key=lambda one: one.end_time_unix_nano)
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
        order += [_place(one) for one in finished]
        assert [] == estimate.hold(finished)
        for ended in estimate.estimated(now_ns):
            for row in range(len(ended)):
                found[order.pop(0)] = _row(ended, row)
    return found


def _place(request: TracedRequest) -> int:
    assert request.client is not None
    return int.from_bytes(request.client.span_id) - 1


def _row(ended: Ended, row: int) -> Ended:
    at = np.array([row])
    return Ended(parts=select(ended.parts, at), whole=select(ended.whole, at), reason=ended.reason[at])


def test_estimates_of_passing_traffic_are_near_the_engines_own_times(traffic: Traffic):
    """Of every request, as it passes, with what is known of it being a client's alone."""
    found = watched(traffic, RollingEstimate(), TraceWindow())
    assert set(range(161)) == set(found)
    assert {"histogram"} == {str(one.parts.source[0]) for one in found.values()}
    for part, truth_ms, wape in (("queue", traffic.queue_ms, 0.02), ("prefill", traffic.prefill_ms, 0.15)):
        told = np.array([float(getattr(found[place].parts, f"{part}_ms")[0]) for place in range(161)])
        assert np.abs(told - truth_ms).sum() / truth_ms.sum() < wape, part


def test_the_window_is_bounded(traffic: Traffic):
    """What it cannot hold is told as not estimated, and none is forgotten."""
    estimate = RollingEstimate(most=50)
    window = TraceWindow()
    estimate.scraped(traffic.pages[0])
    now_ns = max(one.end_time_unix_nano for one in traffic.spans)
    window.take(packed(now_ns, "grpc", body(traffic.spans)))
    assert [] == estimate.hold(window.finished(now_ns + 10 * S))
    assert {"requests": 50, "waiting": 50} == estimate.sizes
    reasons = [reason for ended in estimate.estimated(now_ns, all_of_it=True) for reason in ended.reason]
    assert (161, {"not_estimated"}) == (len(reasons), set(reasons))


def test_without_pages_nobody_waits_for_an_estimate(traffic: Traffic):
    """There will be none."""
    estimate, window = RollingEstimate(), TraceWindow()
    now_ns = max(one.end_time_unix_nano for one in traffic.spans)
    window.take(packed(now_ns, "grpc", body(traffic.spans)))
    assert 161 == len(estimate.hold(window.finished(now_ns + 10 * S)))


def test_pages_that_are_not_scraped_any_more_are_forgotten(traffic: Traffic):
    """Else their last scrape would be waited for."""
    estimate, window = RollingEstimate(), TraceWindow()
    estimate.scraped(traffic.pages[0])
    estimate.forget_pages([])
    now_ns = max(one.end_time_unix_nano for one in traffic.spans)
    window.take(packed(now_ns, "grpc", body(traffic.spans)))
    assert 161 == len(estimate.hold(window.finished(now_ns + 10 * S)))
