"""SGLang 0.5.23 as it was recorded: its spans, its replies and its page tell the parts of the same requests."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import recordings
from recordings import Recording

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.intervals import observe
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.table import SLACK_S, Joined
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.server_times import ServerMeans, drained_means, server_means
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.requests.metrics import span_s
from sidelight.rundir.columns import take
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
# What the page says of the 151 requests of main.
TTFT_S, E2E_S, QUEUE_S, PREFILL_S = 501.929047, 843.628695, 427.368042, 36.828236


@pytest.fixture(scope="module")
def main() -> Recording:
    return recordings.recording("main", "sglang")


@pytest.fixture(scope="module")
def edges() -> Recording:
    return recordings.recording("edges", "sglang", scraped=False)


def parts_of(recorded: Recording) -> Parts:
    requests = recorded.requests
    return break_down(requests, join(requests, recorded.spans), nothing(len(requests), ""))


def phase(recorded: Recording, name: str) -> tuple[Joined, Parts]:
    """The requests of one phase."""
    rows = recorded.requests.workload_class == name
    assert rows.any()
    return take(join(recorded.requests, recorded.spans), rows), take(parts_of(recorded), rows)


def test_every_request_is_joined_by_its_trace_and_the_sums_are_the_pages(main: Recording):
    """151 of 151, each with the id of its reply: TTFT, whole, queue and prefill add up to what the page counted."""
    joined = join(main.requests, main.spans)
    assert (["trace"] * 151, {""}) == (joined.source.tolist(), set(joined.reason))
    own_id = dict(zip(main.spans.trace_id, main.spans.request_id, strict=True))
    assert main.requests.response_id.tolist() == [own_id[trace] for trace in main.requests.trace_id]
    sums = [float(column.sum()) for column in (joined.ttft_s, joined.e2e_s, joined.queue_s, joined.prefill_s)]
    assert [TTFT_S, E2E_S, QUEUE_S, PREFILL_S] == pytest.approx(sums, abs=1e-5)


def test_the_wait_for_the_scheduler_is_a_part_and_the_parts_are_the_ttft(main: Recording):
    """221 ms in the mean, 2.5 s at most, which is in neither queue nor prefill; what is left is the front end's."""
    parts = parts_of(main)
    assert (0.221, 2.5) == pytest.approx((parts.scheduler_intake_s.mean(), parts.scheduler_intake_s.max()), rel=0.02)
    assert (parts.engine_frontend_s > -SLACK_S).all()
    whole_s = np.sum([np.nan_to_num(parts.seconds(part)) for part in TTFT_PARTS], axis=0)
    assert whole_s == pytest.approx(parts.ttft_s, abs=1e-9)
    inside_s = parts.scheduler_intake_s + parts.engine_frontend_s + parts.blank_output_s
    assert inside_s == pytest.approx(parts.other_s, abs=1e-9)
    assert {""} == set(parts.merged)


def test_no_queue_of_a_retracted_request_is_larger_than_its_ttft():
    """Its later waits are stages of their own: 2 of 18 were retracted."""
    recorded = recordings.recording("retract", "sglang", scraped=False)
    parts = parts_of(recorded)
    assert ["trace"] * 18 == parts.source.tolist()
    for part in (parts.queue_s, parts.prefill_s, parts.scheduler_intake_s, parts.engine_frontend_s):
        assert ((part > -SLACK_S) & (part < parts.ttft_s)).all()


@pytest.mark.parametrize("name", ["n2", "n3_completions"])
def test_several_choices_are_one_request_with_the_parts_of_the_first(edges: Recording, name: str):
    """Before them one request fills the prefix cache, without a token; what it waited and computed is theirs."""
    joined, parts = phase(edges, name)
    assert {"trace"} == set(joined.source)
    assert np.isfinite(joined.ttft_s).all()
    assert (np.abs(parts.network_s) < 0.05).all()
    assert (parts.queue_s + parts.prefill_s > 0.5 * parts.ttft_s).all()


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("no_traceparent", "request id", ""),
        ("unsampled", "none", "no span of it came; its reply tells neither queue nor prefill"),
        ("malformed", "request id", ""),
        ("zero_traceid", "request id", ""),
        ("nonstream", "trace", ""),
        ("same_x_request_id", "trace", ""),
        ("one_token", "trace", ""),
        ("unknown_model", "trace", ""),
        ("bad_param", "none", "the server answered HTTP 400"),
        ("cancel_decode", "trace", ""),
    ],
)
def test_every_odd_case_has_its_source(edges: Recording, name: str, source: str, reason: str):
    """The id of a reply is that of its span, whatever trace that is in; a model's name is not looked at."""
    joined, _ = phase(edges, name)
    assert {(source, reason)} == set(zip(joined.source, joined.reason, strict=True))


def test_what_was_cancelled_before_its_first_token_was_served_all_the_same(edges: Recording):
    """SGLang notices with the first output: each has a whole span, in which it waited longer than its client did."""
    joined, _ = phase(edges, "cancel_in_queue")
    rows = edges.requests.workload_class == "cancel_in_queue"
    gone = (edges.requests.status[rows] == "cancelled") & (edges.requests.first_token_ns[rows] < 0)
    assert 8 == int(gone.sum())
    why = "it was cancelled, and the engine went on: its span tells longer times than the client waited"
    assert {why} >= set(joined.reason[gone & (joined.source == "none")])
    spans = edges.spans
    places = [list(spans.trace_id).index(trace) for trace in edges.requests.trace_id[rows][gone]]
    waited_s = span_s(edges.requests.submit_ns[rows][gone], edges.requests.end_ns[rows][gone])
    assert (spans.ttft_s[places] > 0).all()
    assert int((spans.ttft_s[places] > waited_s).sum()) >= 7


def test_a_reply_tells_what_spans_tell():
    """Of 18 native replies: the decode is by the API process, and what is before the queue is the rest of the way."""
    path = recordings.present("native_generate.jsonl.gz", "sglang")
    records = list(recordings.lines(path))
    assert 18 == len(records)
    for record in records:
        events = [(at_ns, f"data: {text}\n\n".encode()) for at_ns, text in record["events"]]
        body, ends = b"".join(text for _, text in events), np.cumsum([len(text) for _, text in events])
        stamps_ns = np.array([at_ns for at_ns, _ in events], dtype=np.int64)
        reply = PROTOCOLS["sglang"].read_reply(200, HEAD, body, stamps_ns, ends.astype(np.int64))
        meta = json.loads(record["events"][-2][1])["meta_info"]
        timings = reply.timings
        assert timings is not None
        assert timings.decode_ms == pytest.approx(timings.e2e_ms - timings.ttft_ms)
        before_ms = 1e3 * (meta["api_server_dispatch_finish_ts"] - meta["request_received_ts"])
        inside_ms = before_ms + timings.scheduler_intake_ms + timings.queue_ms + timings.prefill_ms
        assert 0 <= timings.scheduler_intake_ms < timings.ttft_ms
        assert 0 <= timings.ttft_ms - inside_ms < 25  # the output on its way through the detokenizer


def drained(recorded: Recording, *others: EndpointSeries, sent: int = 151) -> ServerMeans:
    """What the page alone says of the run as a whole, beside the pages of others."""
    requests = recorded.requests
    window = Window(start_ns=int(requests.submit_ns.min()), end_ns=int(requests.end_ns.max()))
    waits_s = span_s(requests.submit_ns, requests.first_output_ns)
    means = server_means(requests.end_ns, waits_s, [observe(endpoint) for endpoint in recorded.endpoints], window)
    return drained_means(means, [*recorded.endpoints, *others], window, sent=sent, wait_s=float(waits_s.mean()))


def test_a_drained_run_has_means_from_the_page_alone(main: Recording):
    """All four histograms counted 151 requests, as many as were sent: their sums are of the same requests."""
    means, joined = drained(main), join(main.requests, main.spans)
    waits_s = span_s(main.requests.submit_ns, main.requests.first_output_ns)
    outside_s = float((waits_s - joined.ttft_s).mean())
    expected = [float(joined.queue_s.mean()), float(joined.prefill_s.mean()), outside_s]
    assert expected == pytest.approx([means.queue_s, means.prefill_s, means.outside_s], abs=1e-6)
    assert (None, 151, 1.0) == (means.missing, means.server_requests, means.ratio)
    assert "151 requests each" in means.proof
    gateway = replace(main.endpoints[0], series=())
    assert means == drained(main, gateway)


def test_a_run_whose_counts_differ_has_no_means(main: Recording):
    """A request of others, or a health probe, is in the sums, and no sum says which."""
    means = drained(main, sent=150)
    assert (None, None, "") == (means.queue_s, means.outside_s, means.proof)
    counted = "queue 151, prefill 151, TTFT 151, end-to-end 151"
    assert f"over the whole run it counted {counted}, of 150 requests sent" in (means.missing or "")
