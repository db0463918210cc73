"""A run's requests in parts while it goes: by spans once those had time to come, else by estimates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import recordings
from recordings import Case
from sent_spans import MS, NOON, S, engine, export, gateway, two_pods

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.columns import take
from sidelight.scraper.series.log import ScrapeRow
from sidelight.scraper.spans.log import ExportRecord
from sidelight.sidecar.live.breakdown import LiveParts
from sidelight.sidecar.live.tally import Tally


@pytest.fixture(scope="module")
def case() -> Case:
    """The overload phase of a recording, each request with a trace of its own."""
    overload = recordings.overload()
    log = overload.requests
    server_times = {
        "phase": np.full(len(log), "measure", dtype=np.object_),
        "trace_id": np.array([row.to_bytes(16).hex() for row in range(1, len(log) + 1)], dtype=np.object_),
        "dispatch_ns": log.submit_ns,
        "last_token_ns": log.end_ns,
    }
    return replace(overload, requests=replace(log, **server_times))


def pages_of(case: Case) -> list[ScrapeRow]:
    (endpoint,) = case.scrapes
    stamps = zip(endpoint.tick_ns.tolist(), endpoint.request_ns.tolist(), endpoint.response_ns.tolist(), strict=True)
    return [
        ScrapeRow(
            url=endpoint.url,
            tick_ns=tick_ns,
            request_ns=request_ns,
            response_ns=response_ns,
            series=endpoint.series,
            values=values,
            changed=True,
        )
        for (tick_ns, request_ns, response_ns), values in zip(stamps, endpoint.values, strict=True)
    ]


def passed(log: RequestLog, parts: LiveParts, pages: list[ScrapeRow], spans: dict[int, ExportRecord]) -> list[int]:
    """Let a run go by, a second at a time, and return how many estimates were counted in each; spans come a second
    after their request's end.
    """
    counts = []
    order = np.argsort(log.end_ns)
    now_ns, last_ns = int(log.submit_ns.min()), int(log.end_ns.max()) + 40 * S
    while now_ns < last_ns:
        for row in [row for row in order.tolist() if now_ns - 2 * S <= log.end_ns[row] < now_ns - S and row in spans]:
            parts.spans(list(spans[row].spans()))
        ended = order[(log.end_ns[order] >= now_ns) & (log.end_ns[order] < now_ns + S)]
        now_ns += S
        if len(ended):
            parts.ended(take(log, ended), now_ns)
        while pages and pages[0].response_ns < now_ns:
            parts.scraped(pages.pop(0))
        before = parts.counts.requests["histogram"]
        parts.poll(now_ns)
        counts.append(parts.counts.requests["histogram"] - before)
    return counts


def sum_s(parts: LiveParts, source: str) -> float:
    return sum(part.sum_s for (_, name), part in parts.counts.ttft.items() if name == source)


def test_requests_are_estimated_as_they_end(case: Case):
    """Each is counted once, the parts add up to what they waited, and the queue is near what the engine says it was."""
    log, parts = case.requests, LiveParts()
    passed(log, parts, pages_of(case), {})
    assert {"trace": 0, "response": 0, "histogram": 161, "none": 0} == parts.counts.requests
    assert float((log.first_token_ns - log.submit_ns).sum() / 1e9) == pytest.approx(sum_s(parts, "histogram"))
    assert ["queue"] == list(parts.largest)
    queue_s = parts.counts.ttft["queue", "histogram"].sum_s
    assert float(case.queue_s.sum()) == pytest.approx(queue_s, rel=0.01)


def test_of_few_requests_no_cause_is_named(case: Case):
    """Nor of none: fewer than twenty have no share that the next would not change."""
    parts = LiveParts()
    assert {} == parts.largest
    passed(take(case.requests, np.arange(19)), parts, pages_of(case), {})
    assert (19, {}) == (sum(parts.counts.requests.values()), parts.largest)


def test_requests_that_all_fail_are_said_since_when(case: Case):
    """Five in a row, by when the last one succeeded; and no longer once one does again."""
    tally, ended = Tally(), take(case.requests, np.argsort(case.requests.end_ns))
    failed = np.full(len(ended), "failed", dtype=np.object_)
    said = []
    for begin, end, goes in ((0, 50, True), (50, 54, False), (54, 60, False), (60, 61, True)):
        rows = np.arange(begin, end)
        tally.count(take(ended if goes else replace(ended, status=failed), rows))
        said.append(tally.failing)
    assert [{}] * 2 == said[:2]
    last_ok = iso_ms(int(ended.end_ns[49]))[11:19]
    assert [{"failing": f"{last_ok} UTC", "failures": 10}, {}] == said[2:]


def test_estimates_flow_out_as_evenly_as_requests_end(case: Case):
    """In each 5 s from the first to the last, and in none of them most; what is not counted yet is pending."""
    log, parts = case.requests, LiveParts()
    counts = passed(log, parts, pages_of(case), {})
    flowing = np.trim_zeros(counts)
    by_step = [sum(flowing[at : at + 5]) for at in range(len(flowing) - 4)]
    assert len(flowing) >= 25
    assert (True, True) == (min(by_step) > 0, max(by_step) < 161 / 2)
    half, gone = LiveParts(), take(log, np.flatnonzero(log.end_ns < np.median(log.end_ns)))
    half.ended(gone, int(log.end_ns.max()))
    half.poll(int(log.end_ns.max()))
    for page in pages_of(case):
        half.scraped(page)
    for second in range(30):
        half.poll(int(log.end_ns.max()) + second * S)
        assert len(gone) == half.pending + half.counts.requests["histogram"]
    assert half.pending == 0


def test_spans_that_come_in_time_go_before_estimates(case: Case):
    """To the number that the engine says; what has none is estimated all the same."""
    log, parts = case.requests, LiveParts()
    spans = {}
    for row in range(100):
        times = {"queue": case.queue_s[row], "prefill": case.prefill_s[row]}
        engine_span = engine(
            trace=(row + 1).to_bytes(16),
            queue_ms=1e3 * float(times["queue"]),
            prefill_ms=1e3 * float(times["prefill"]),
            ttft_ms=1e3 * float(times["queue"] + times["prefill"]),
            e2e_ms=float(log.end_ns[row] - log.submit_ns[row]) / 1e6,
            clock_ms=float(log.submit_ns[row] / 1e6) - 1.7e12,
        )
        spans[row] = export([engine_span], at_s=float(log.end_ns[row] / 1e9) - 1.7e9)
    first = min(spans)
    parts.spans(list(spans[first].spans()))
    passed(log, parts, pages_of(case), spans)
    assert {"trace": 100, "response": 0, "histogram": 61, "none": 0} == parts.counts.requests
    assert float(case.queue_s[:100].sum()) == pytest.approx(parts.counts.ttft["queue", "trace"].sum_s, abs=1e-6)


def test_a_gateways_part_is_taken_out_of_estimates_too(case: Case):
    """Where it sends spans and the engine none, the network is not said to be what it took."""
    log, alone, parts = case.requests, LiveParts(), LiveParts()
    spans = {}
    for row in range(len(log)):
        waited_ms = float(log.first_token_ns[row] - log.submit_ns[row]) / 1e6
        times = {"end_ms": waited_ms + 5.0, "clock_ms": float(log.submit_ns[row] / 1e6) - 1.7e12}
        passes = gateway("gateway", "client", first_ms=waited_ms, trace=(row + 1).to_bytes(16), **times)
        spans[row] = export([passes], at_s=float(log.end_ns[row] / 1e9) - 1.7e9)
    passed(log, alone, pages_of(case), {})
    passed(log, parts, pages_of(case), spans)
    assert {"trace": 0, "response": 0, "histogram": len(log), "none": 0} == parts.counts.requests
    outside_s = alone.counts.ttft["network", "histogram"].sum_s
    divided = [parts.counts.ttft[part, "histogram"].sum_s for part in ("network", "gateway")]
    assert outside_s == pytest.approx(sum(divided), rel=0.05)
    assert divided[1] > 0.9 * outside_s > 0


def test_without_pages_and_spans_requests_are_counted_without_a_breakdown(case: Case):
    """Each is counted once, and none stays in memory."""
    log, parts = case.requests, LiveParts()
    passed(log, parts, [], {})
    parts.poll(int(log.end_ns.max()) + 200 * S)
    assert 161 == parts.counts.requests["none"]


def test_spans_of_another_trace_are_joined_by_the_id_of_the_reply(case: Case):
    """As behind a router that begins a trace of its own at the engine."""
    log, parts = take(case.requests, np.arange(10)), LiveParts()
    log = replace(log, response_id=np.array([f"chatcmpl-{row}" for row in range(10)], dtype=np.object_))
    spans = {}
    for row in range(10):
        sent = engine(
            trace=b"e%015d" % row,
            queue_ms=float(row),
            prefill_ms=1.0,
            ttft_ms=float(row + 1),
            e2e_ms=20.0,
            clock_ms=float(log.submit_ns[row] / 1e6) - 1.7e12,
        )
        sent.attributes.add(key="gen_ai.request.id").value.string_value = f"chatcmpl-{row}"
        spans[row] = export([sent], at_s=float(log.end_ns[row] / 1e9) - 1.7e9)
    parts.spans(list(spans[0].spans()))
    passed(log, parts, [], spans)
    assert {"trace": 10, "response": 0, "histogram": 0, "none": 0} == parts.counts.requests
    assert sum(range(10)) / 1e3 == pytest.approx(parts.counts.ttft["queue", "trace"].sum_s)


def test_a_prefill_engines_span_is_there_still_when_its_decode_engine_has_ended():
    """Two minutes later, once two engines are known to share requests: no page says then that one served it."""
    parts = LiveParts()
    for number, lasting_s in enumerate((1, 120), start=1):
        trace, at_s = bytes([number]) * 16, 200.0 * number
        for place, (pod, sent) in enumerate(zip(("p", "d"), two_pods(trace=trace), strict=True)):
            sent.start_time_unix_nano += round(at_s * S)
            sent.end_time_unix_nano += round((at_s + lasting_s * place) * S)
            for attribute in sent.attributes:
                if attribute.key in ("gen_ai.latency.e2e", "gen_ai.latency.time_in_model_decode"):
                    attribute.value.double_value += lasting_s * place
            came_s = at_s + 1.0 + lasting_s * place
            parts.poll(NOON + round(came_s * S))
            parts.spans(list(export([sent], at_s=came_s, instance=pod, machine="node").spans()))
            parts.poll(NOON + round(came_s * S))
        begin_ns = NOON + round(at_s * S)
        stamps = {"submit_ns": begin_ns + 40 * MS, "end_ns": begin_ns + (700 + 1000 * lasting_s) * MS}
        first = dict.fromkeys(("first_output_ns", "first_token_ns"), begin_ns + 380 * MS)
        usual = {"status": "ok", "http_status": 200, "trace_id": trace.hex(), **stamps, **first}
        now_ns = NOON + round((at_s + lasting_s + 2) * S)
        parts.ended(recordings.request_log([usual]), now_ns)
        parts.poll(now_ns)
        assert 0.04 * number == pytest.approx(parts.counts.ttft["decode_queue", "trace"].sum_s)
