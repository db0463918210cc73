"""What a watch knows, from its logs alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import inf
from pathlib import Path

import numpy as np
import pytest
from sent_spans import NOON, S, call, engine, export
from series import histogram, scraped

from sidelight.correlator.exact.clock_offset import EngineClocks
from sidelight.correlator.live import breakdown, window
from sidelight.correlator.live.breakdown import EndedRequests
from sidelight.correlator.live.traces import SpanTrace, TracedRequest
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.spans.log import ForwardQueue, ReceiverCounts, SpanLog, StateRecord
from sidelight.sidecar.watch.view import WatchView

URL = "http://127.0.0.1:8000/metrics"
PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(tmp_path: Path):
    """A record that no process writes, before a page in one log and alone in another."""
    with FrameLog(tmp_path / "scrapes-000000.log") as log:
        log.append(b"no record")
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    pages.append(scraped(10**9, PAGE, url=URL))
    pages.close()
    with FrameLog(tmp_path / "spans-000000.log") as log:
        log.append(b"no record")
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf) as view:
        view.poll(2 * 10**9)
        shown = view.snapshot(restarts=0)
    assert shown.watch is not None
    assert 2 == shown.watch.errors
    assert [{"requests_running": 7.0}] == [engine.gauges for engine in shown.engines]
    assert shown.client is not None
    assert (None, None) == (shown.client.input_tokens, shown.client.output_tokens)


def test_a_view_that_is_behind_ends_no_request_early(tmp_path: Path):
    """More spans have come than a look reads: it goes on where it was, and what is not read yet is not missing."""
    spans = SpanLog(tmp_path / "spans-000000.log")
    spans.append(export([call()], at_s=1))
    spans.append(export([call(trace=b"o" * 16)], at_s=1))
    spans.append(export([engine()], at_s=3))
    with WatchView(tmp_path, run_id="r", read_s=-1.0) as view:
        seen = []
        for look in range(1, 6):
            if look == 4:
                spans.close()
            view.poll(NOON + 30 * S + look * S)
            watch = view.snapshot(restarts=0).watch
            assert watch is not None
            assert watch.read_to_s is not None
            lag_s = round(time.monotonic() - watch.read_to_s)
            seen.append((view.is_behind, lag_s, view.parts.requests["trace"], view.parts.requests["none"]))
    assert [(True, 30, 0, 0), (True, 31, 0, 0), (True, 30, 0, 0)] == seen[:3]
    assert [(False, 0, 1, 1)] * 2 == seen[3:]


def test_spans_that_come_twice_count_once(tmp_path: Path):
    """Each for ten minutes, the second time one to 300 s late: as many requests are counted as were sent."""
    late_s = np.random.default_rng(17).uniform(1, 300, 2 * 600)
    came = []
    for number in range(600):
        trace, clock_ms = (number + 1).to_bytes(16), 1e3 * number
        for side, sent in enumerate((call(trace=trace, clock_ms=clock_ms), engine(trace=trace, clock_ms=clock_ms))):
            came += [(at_s, sent) for at_s in (number, number + late_s[2 * number + side])]
    came.sort(key=lambda coming: coming[0])
    with closing(SpanLog(tmp_path / "spans-000000.log")) as spans, WatchView(tmp_path, run_id="r", read_s=inf) as view:
        polled_s = 0.0
        for second, sent in came:
            spans.append(export([sent], at_s=second))
            if second > polled_s + 5:
                polled_s = second
                view.poll(NOON + round(second * S))
        view.poll(NOON + 1000 * S)
        shown = view.snapshot(restarts=0)
    assert shown.parts is not None
    assert shown.watch is not None
    assert shown.client is not None
    assert (600, 0) == (shown.parts.requests["trace"], shown.parts.requests["none"])
    assert (600, 1200) == (shown.client.requests["ok"], shown.watch.repeated)


def test_what_a_killed_receiver_had_in_memory_is_counted_as_unknown(tmp_path: Path):
    """As in its report; that of the one that goes on is shown as what waits."""
    queue = ForwardQueue(exports=2, size_bytes=200, limit_bytes=1000)
    with closing(SpanLog(tmp_path / "spans-000000.log")) as spans, WatchView(tmp_path, run_id="r", read_s=inf) as view:
        for _ in range(2):
            spans.append(StateRecord(at_ns=NOON, state="started", counts=ReceiverCounts(), queue=queue))
            spans.append(export([call()]))
        view.poll(NOON)
        shown = view.snapshot(restarts=1).watch
    assert shown is not None
    assert (3, {"exports": 2, "bytes": 200, "limit_bytes": 1000}) == (
        shown.receiver["forward_unknown"], shown.forward_queue
    )  # fmt: skip


POISON = b"P" * 16


def polled(path: Path) -> WatchView:
    """Return a view of five requests, one of them of the trace POISON, that have all ended."""
    spans = SpanLog(path / "spans-000000.log")
    for trace in (b"1" * 16, b"2" * 16, POISON, b"3" * 16, b"4" * 16):
        spans.append(export([call(trace=trace), engine(trace=trace)]))
    spans.close()
    with WatchView(path, run_id="r", read_s=inf) as view:
        view.poll(NOON + 30 * S)
    return view


def test_a_request_that_cannot_be_broken_down_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A defect on one is counted as what it is; the others of that look are broken down."""

    def fail(requests: Sequence[TracedRequest], late: EngineClocks) -> EndedRequests:
        if any(request.engine[0].span.trace_id == POISON for request in requests):
            raise ZeroDivisionError
        return breakdown.break_down_ended(requests, late)

    monkeypatch.setattr("sidelight.correlator.live.requests.break_down_ended", fail)
    parts = polled(tmp_path).parts
    assert (4, 1) == (parts.requests["trace"], parts.requests["none"])
    assert {"defect": 1} == {reason: count for reason, count in parts.missing.items() if count}


def test_a_trace_that_cannot_be_read_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is dropped, and its requests are counted as lost to a defect."""
    whole = window.requests_of

    def fail(trace: SpanTrace) -> Iterator[tuple[TracedRequest, int, bool]]:
        if any(span.span.trace_id == POISON for span in trace.engine.values()):
            raise ZeroDivisionError
        return whole(trace)

    monkeypatch.setattr(window, "requests_of", fail)
    view = polled(tmp_path)
    assert (4, 1, 1) == (view.parts.requests["trace"], view.parts.requests["none"], view.parts.missing["defect"])
    snapshot = view.snapshot(restarts=0)
    assert snapshot.watch is not None
    assert (1, 0) == (snapshot.watch.errors, snapshot.watch.sizes["pending"])


@pytest.mark.parametrize(
    ("shard", "counted"), [(None, [(1, 0), (1, 0), (0, 1)]), ("2/4", [(1, 0), (0, 1), (0, 1)])], ids=["whole", "shard"]
)
def test_a_request_that_is_not_counted_yet_is_pending(
    tmp_path: Path, shard: str | None, counted: list[tuple[int, int]]
):
    """While its engine's span may come, and while it waits for an estimate, which a shard has none of."""
    spans = SpanLog(tmp_path / "spans-000000.log")
    spans.append(export([call()]))
    spans.close()
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    pages.append(scraped(NOON, PAGE, url=URL))
    pages.close()
    seen = []
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf, shard=shard) as view:
        for second in (2, 30, 200):
            view.poll(NOON + second * S)
            parts = view.snapshot(restarts=0).parts
            assert parts is not None
            seen.append((parts.pending, parts.requests["none"]))
        assert ({} if shard is None else {"shard": shard}) == view.snapshot(restarts=0).labels
    assert counted == seen


def test_quantiles_of_an_engine_are_of_the_last_five_minutes(tmp_path: Path):
    """What it observed before them is on its page, and in no quantile."""
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    nothing, slow, quick = ((0, 0), 0.0), ((0, 100), 500.0), ((100, 200), 505.0)
    seen = []
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf) as view:
        for second, (counts, total) in ((1, nothing), (10, slow), (400, slow), (450, quick)):
            buckets = list(zip(("0.1", "10.0"), counts, strict=True))
            page = histogram("vllm:time_to_first_token_seconds", counts[-1], total, buckets=buckets) + PAGE
            pages.append(scraped(second * S, page, url=URL))
            view.poll(second * S + 1)
            (engine,) = view.snapshot(restarts=0).engines
            seen.append(engine.quantiles.get(("ttft", "0.5", "estimate"), -1.0))
    pages.close()
    assert [-1.0, pytest.approx(5.0, rel=0.2), -1.0, pytest.approx(0.05, rel=0.2)] == seen
