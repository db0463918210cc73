"""The directory of a watch as a run: by one clock, as much of it as is asked for, and what can be read of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from codes import raises
from sent_spans import INTERNAL, NOON, S, call, engine, export, span
from series import scraped
from watch_directories import URL, begin, fill

from sidelight.exporter.summary.watched import BrokenTraces
from sidelight.recorded.directory import RAW
from sidelight.recorded.events import ESTIMATED, Event, append_event
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.spans.log import ForwardQueue, ReceiverCounts, SpanLog, StateRecord
from sidelight.sidecar.report.derive import derive
from sidelight.sidecar.run import open_run

HOUR = 3600 * S


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """An empty watch that began at NOON."""
    return begin(tmp_path / "watch")


def test_a_directory_whose_stamps_are_of_two_clocks_is_refused(watched: Path):
    """As earlier builds wrote it, which went on in the same directory when the clock was set."""
    append_event(watched, Event(at_ns=NOON + 10 * S, name="clock_set", data={"moved_ns": HOUR, "first_log": 1}))
    with raises("run.clock-set"):
        open_run(watched)


def test_what_a_killed_receiver_had_not_counted_is_said(watched: Path):
    """Whether the collector has what waited when it stated itself last, and what came since, is unknown."""
    spans = SpanLog(watched / "raw/spans-000000.log")
    queue = ForwardQueue(exports=2, size_bytes=200, limit_bytes=1000)
    counts = ReceiverCounts(exports=5, spans=5, forwarded=3, logs=1)
    spans.append(
        StateRecord(at_ns=NOON, state="started", counts=ReceiverCounts(), queue=ForwardQueue(limit_bytes=1000))
    )
    for number in range(9):
        if number == 5:
            spans.append(StateRecord(at_ns=NOON + 5 * S, state="counted", counts=counts, queue=queue))
        spans.append(export([call(trace=bytes([number + 1]) * 16)], at_s=number + 1.0))
    followed = ReceiverCounts(exports=1, forwarded=1)  # it had taken the last before it said that it was there
    for state in ("started", "ended"):
        spans.append(StateRecord(at_ns=NOON + 10 * S, state=state, counts=followed, queue=ForwardQueue(limit_bytes=1)))
    spans.close()
    run = open_run(watched)
    assert run.span_counts is not None
    assert (9, 4, 5, 1) == (
        run.span_counts.exports, run.span_counts.forwarded, run.span_counts.forward_unknown, run.receiver_deaths
    )  # fmt: skip
    assert any("5 exports may not have been" in text for text in derive(watched).summary.warnings)


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


def test_the_last_bytes_may_begin_with_a_scrape_that_failed(watched: Path):
    """And no page behind it is another than those that are left out."""
    fill(watched, 0, seconds=200)
    pages = ScrapeLog(watched / RAW / "scrapes-000001.log")
    for second in range(200):
        error = "timeout" if 80 <= second < 150 else ""
        pages.append(scraped(NOON + second * S + 1, "vllm:num_requests_running 7\n", url=f"{URL}/2", error=error))
    pages.close()
    part = derive(watched, ("json",), span_bytes=(watched / "raw/spans-000000.log").stat().st_size // 4).summary
    assert 0 < part.client.requests.sent < 100


def test_a_record_that_cannot_be_read_costs_no_other(watched: Path):
    """It is counted; and a watch without an end may still go on."""
    fill(watched, 0)
    with FrameLog(watched / "raw/spans-000000.log") as log:
        log.append(b"no record")
    fill(watched, 1)
    summary = derive(watched).summary
    assert 20 == summary.client.requests.ok
    assert any("raw/spans-000000.log: 1 record makes no sense" in text for text in summary.warnings)
    assert "the watch goes on, or was killed; numbers cover what was recorded up to now" in summary.warnings


def test_a_file_that_only_has_the_name_of_a_log_costs_no_other(watched: Path):
    """As a copy that somebody made beside it; it is said that it makes no sense."""
    fill(watched, 0)
    (watched / "raw" / "spans-000000 (copy).log").write_bytes(b"no log")
    summary = derive(watched).summary
    assert 10 == summary.client.requests.ok
    assert ["spans-000000 (copy).log"] == [log.log for log in summary.integrity.logs if log.lost_bytes]


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
    """Engines' requests without a client's span are counted beside clients', also where one is in another trace."""
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
    assert (
        "20 requests, all ok, by their outermost spans; 23 engine requests without a client's span "
        "(by the engine, on average: queue 50 ms, prefill 100 ms)"
    ) in report
    assert (
        "! 20 of 20 requests with the client's spans in one trace and the engine's in another, so that the two are not "
        "joined by trace: router begins a new trace instead of going on with that of the header traceparent."
    ) in report


def test_a_watch_that_saw_nothing_has_a_report(watched: Path):
    """Without requests, and without an error."""
    summary = derive(watched).summary
    assert (0, 0.0) == (summary.client.requests.sent, summary.window.duration_s)
    assert "\nno client's spans\n" in (watched / "report.txt").read_text()


def test_headroom_and_changes_are_in_the_summary_as_they_were_said(watched: Path):
    """Each headroom, and each change as it was said last; the heading has the last headroom and the least."""
    change = {"part": "step", "since_ns": NOON, "text": "Steps take longer.", "low": 1.04, "high": 1.06}
    for minute, (headroom, ratio) in enumerate([({"text": "A.", "estimate": 1.1}, 1.04), ({"text": "B."}, 1.05)]):
        data = {"headroom": headroom, "changes": [{**change, "estimate": ratio}]}
        append_event(watched, Event(at_ns=NOON + minute * 60 * S, name=ESTIMATED, data=data))
    derived = derive(watched)
    assert derived.summary.watch
    assert [each.text for each in derived.summary.watch.headroom or ()] == ["A.", "B."]
    assert [each.estimate for each in derived.summary.watch.changes or ()] == [1.05]
    assert ["A.", "B."] == sorted(re.findall(r"UTC: ([AB]\.)", (watched / "report.txt").read_text()))
