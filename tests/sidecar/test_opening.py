"""The directory of a watch as a run: by one clock, as much of it as is asked for, and what can be read of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sent_spans import INTERNAL, NOON, S, call, engine, export, span
from series import scraped

from exporter.summary.watched import BrokenTraces
from rundir.frames import FrameLog
from scraper.series.log import ScrapeLog
from scraper.spans.log import Counts, SpanLog, StateRecord
from sidecar.directory import CLOCK_SET, Event, append_event, create, write_json
from sidecar.report.derive import derive
from sidecar.run import open_run

HOUR = 3600 * S
URL = "http://127.0.0.1:8000/metrics"
PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """An empty watch that began at NOON."""
    path = create(tmp_path / "watch")
    config = {"keep": "1h", "keep_bytes": "1GB", "slice_duration": 10.0, "scrape_interval": 1.0, "metrics": [URL]}
    manifest = {"run_id": "r", "tool": {"name": "sidelight", "version": "0"}, "config": config}
    write_json(path / "manifest.json", {**manifest, "started_at": "2023-11-14T22:13:20.000Z", "started_ns": NOON})
    append_event(path, Event(at_ns=NOON, name="phase_start", data={"phase": "measure"}))
    return path


def fill(path: Path, number: int, *, late_ns: int = 0, seconds: int = 10) -> None:
    """Write logs of a request and a page each second, by a clock that is late."""
    spans, pages = SpanLog(path / f"raw/spans-{number:06d}.log"), ScrapeLog(path / f"raw/scrapes-{number:06d}.log")
    spans.append(StateRecord(at_ns=NOON - late_ns, state="started", counts=Counts()))
    for second in range(seconds):
        trace = (seconds * number + second + 1).to_bytes(16)
        both = [engine(trace=trace, clock_ms=1e3 * second), call(trace=trace, clock_ms=1e3 * second)]
        record = export(both, at_s=second + 1 - late_ns / S)
        spans.append(record)
        pages.append(scraped(NOON + second * S - late_ns, PAGE, url=URL))
    spans.close()
    pages.close()


def test_what_was_stamped_before_the_clock_was_set_is_moved_by_as_much(watched: Path):
    """An hour slow at first: the spans that were refused then are used, and no page is an hour away."""
    fill(watched, 0, late_ns=HOUR)
    step = {"moved_ns": HOUR, "first_log": 1, "offset_ns": 0}
    append_event(watched, Event(at_ns=NOON + 10 * S, name=CLOCK_SET, data=step))
    fill(watched, 1)
    run = open_run(watched)
    assert {"trace"} == set(run.watched.parts.source) if run.watched else False
    assert 20 == len(run.requests)
    (page,) = run.endpoints
    assert (20, 9 * S) == (len(page.response_ns), page.response_ns[-1] - page.response_ns[0])
    assert NOON + HOUR == run.phases[0].start_ns


def test_only_the_last_bytes_are_evaluated_where_that_is_asked_for(watched: Path):
    """And what is covered is said: the window begins there."""
    fill(watched, 0, seconds=200)
    whole = derive(watched).summary
    part = derive(watched, span_bytes=(watched / "raw/spans-000000.log").stat().st_size // 2).summary
    assert whole.watch
    assert part.watch
    assert (200, False) == (whole.client.requests.sent, whole.watch.shortened)
    assert part.watch.shortened
    assert 80 < part.client.requests.sent < 120
    assert part.window.start_ns > whole.window.start_ns
    text = " ".join((watched / "report.txt").read_text().split())
    assert "older logs were deleted (--keep 1h, --keep-bytes 1GB) or left out" in text


def test_a_record_that_cannot_be_read_costs_no_other(watched: Path):
    """It is counted; and a watch without an end may still go on."""
    fill(watched, 0)
    with FrameLog(watched / "raw/spans-000000.log") as log:
        log.append(b"no record")
    fill(watched, 1)
    summary = derive(watched).summary
    assert 20 == summary.client.requests.ok
    assert any("raw/spans-000000.log: 1 records make no sense" in text for text in summary.warnings)
    assert "the watch goes on, or was killed; numbers cover what was recorded up to now" in summary.warnings


@pytest.mark.parametrize("name", ["events.log", "spans-000000.log"])
def test_a_log_that_is_a_link_is_damage_and_no_end(watched: Path, tmp_path: Path, name: str):
    """It is not followed, and what the others hold is reported all the same; of a part of the watch too."""
    fill(watched, 0)
    fill(watched, 1)
    (watched / "raw" / name).rename(tmp_path / name)
    (watched / "raw" / name).symlink_to(tmp_path / name)
    for span_bytes in (None, 3000):
        summary = derive(watched, span_bytes=span_bytes).summary
        assert summary.integrity.state == "damaged"
        assert any(
            f"raw/{name}: it is damaged (is a link, and links are not followed" in text for text in summary.warnings
        )


def test_where_the_last_bytes_begin_a_record_that_cannot_be_read_costs_no_other(watched: Path):
    with FrameLog(watched / "raw/spans-000000.log") as log:
        log.append(*[b"no record"] * 1000)
    fill(watched, 1)
    assert 10 == derive(watched, span_bytes=20_000).summary.client.requests.ok


def test_the_service_that_breaks_traces_is_named_in_the_report(watched: Path):
    """And requests that only an engine knows are counted beside those of clients."""
    spans = SpanLog(watched / "raw/spans-000000.log")
    for number in range(20):
        clock_ms, trace = 1e3 * number, b"engine" + number.to_bytes(10)
        root = span("http_request", "root", kind=INTERNAL, trace=trace, clock_ms=clock_ms)
        user = call(trace=b"client" + number.to_bytes(10), clock_ms=clock_ms)
        spans.append(export([user], at_s=number + 1.0, service="users"))
        spans.append(export([root], at_s=number + 1.0, service="router"))
        spans.append(export([engine(parent="root", trace=trace, clock_ms=clock_ms)], at_s=number + 1.0, service="llm"))
    direct = [engine(parent="", trace=bytes([number]) * 16, end_ms=9e3) for number in (1, 2, 3)]
    spans.append(export(direct, at_s=9.0, service="llm"))
    spans.close()
    summary = derive(watched).summary
    assert summary.watch
    assert [BrokenTraces(service="router", how="new_trace", requests=20)] == summary.watch.broken_traces
    report = " ".join((watched / "report.txt").read_text().split())
    assert "20 requests, all ok, by their outermost spans; 3 more by their engine's spans alone" in report
    assert (
        "! 20 of 20 requests have their client's spans in one trace and their engine's in another, so that the two are "
        "not joined by trace: router begins a new trace instead of going on with that of the header traceparent."
    ) in report


def test_a_watch_that_saw_nothing_has_a_report(watched: Path):
    """Without requests, and without an error."""
    summary = derive(watched).summary
    assert (0, 0.0) == (summary.client.requests.sent, summary.window.duration_s)
    assert "\nno requests\n" in (watched / "report.txt").read_text()
