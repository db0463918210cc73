"""What a terminal shows of a watch: the last minutes, in the words and numbers of a report."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from rich.console import Console
from sent_spans import NOON, S, call, engine, export, gateway
from series import WAITING, gauge, scraped
from snapshots import VERDICT

from sidelight.exporter.prometheus.page import LivePage
from sidelight.exporter.prometheus.snapshot import said
from sidelight.scraper.series.log import FailureRecord, ScrapeLog
from sidelight.scraper.spans.log import SpanLog
from sidelight.sidecar.live.lately import WINDOW_S
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.watch.panel import EngineState, WatchState, panel
from sidelight.sidecar.watch.view import WatchView

URL = "http://127.0.0.1:8000/metrics"
PAGE = (
    gauge("vllm:num_requests_running", 7)
    + gauge(WAITING, 3)
    + gauge("vllm:kv_cache_usage_perc", 0.21)
    + gauge("process_start_time_seconds", "{started}")
)


def shown(state: WatchState, *, width: int = 80) -> str:
    """Return the panel as text."""
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(panel(state))
    return text.getvalue()


def words(text: str) -> str:
    """Return a text without borders, its words one space apart."""
    return " ".join(re.sub("[│─╭╮╰╯]", " ", text).split())


def looked(view: WatchView, now_ns: int, *, down: str = "") -> WatchState:
    """Return what a view shows after a look at a moment."""
    view.poll(now_ns)
    return view.state(now_ns, elapsed_s=30.0, stale_s=5.0, restarts=0, receiver_down=down)


def traced(number: int, *, first_ms: float = 300.0, failed: bool = False) -> list[Span]:
    """Return spans of a request, ms: 40 network, 60 gateway, 50 in the engine's front end, 50 queue, 100 prefill."""
    trace = number.to_bytes(16)
    return [
        call(first_ms=first_ms, trace=trace, failed=failed),
        gateway("gate", "client", first_ms=260, trace=trace),
        engine(parent="gate", trace=trace),
    ]


def logged(path: Path, *requests: Sequence[Span]) -> None:
    """Write the log of a receiver."""
    spans = SpanLog(path / "spans-000000.log")
    for request in requests:
        spans.append(export(request))
    spans.close()


def test_it_has_the_parts_of_the_last_minutes_and_the_slowest_requests(tmp_path: Path):
    """With the labels of a report, and the sums of the page: two requests whose spans came, one without an engine's."""
    logged(tmp_path, traced(1), traced(2, first_ms=400.0), [call(trace=b"t" * 16)])
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        state = looked(view, NOON + 30 * S)
        counted = view.parts
    text = words(shown(state))
    assert "Where the TTFT went: 2 requests" in text
    for row in (
        "mean ms p50 p95 share known from",
        "network 90.0 90.0 135.0 26 %",
        "gateway 60.0 60.0 60.0 17 %",
        "queue 50.0 50.0 50.0 14 %",
        "prefill 100.0 100.0 100.0 29 %",
        "TTFT 350.0 350.0 395.0 100 %",
        f"slow 400 ms, network 140 ms trace {2:032x}",
        "1 request without a breakdown of the TTFT: 1: no engine's span came for it",
        "served 3 requests/s",
        "failed 0 of 3",
        "pending 0",
        "spans received 7 refused 0 since the start",
    ):
        assert row in text
    assert state.recent.group
    for part in ("network", "gateway", "queue", "prefill", "other"):
        described = getattr(state.recent.group.breakdown, f"{part}_ms")
        assert counted.ttft[part, "trace"].sum_s == pytest.approx(described.mean * described.count / 1e3)


def test_the_page_names_the_largest_part_of_the_ttft_where_it_is_certain(tmp_path: Path):
    """Of twenty requests, with the share that the sentence of the panel has; of fewer, none."""
    for count in (19, 20):
        raw = tmp_path / str(count)
        raw.mkdir()
        logged(raw, *(traced(number) for number in range(1, count + 1)))
        with WatchView(raw, run_id="r", read_s=inf) as view:
            state = looked(view, NOON + 40 * S)
            parts = view.snapshot(restarts=0).parts
        assert parts is not None
        assert bool(parts.largest) == (count == 20)
    ((part, share),) = parts.largest.items()
    assert f"{100 * share:.0f} % was spent" in words(shown(state, width=100))
    assert state.recent.group is not None
    assert getattr(state.recent.group.breakdown, f"{part}_ms").share_of_ttft == share


def test_another_state_is_news_once(tmp_path: Path):
    """A log without a panel has it in a line: the first, then that requests only fail."""
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        log, news = SpanLog(tmp_path / "spans-000000.log"), []
        for second, failed in ((10, False), (110, True)):
            for number in range(20):
                spans = traced(100 * second + number, failed=failed)
                log.append(export(spans[:1] if failed else spans, at_s=second))
            view.poll(NOON + (second + 1) * S)
            view.poll(NOON + (second + 40) * S)
            for _ in range(2):
                view.judge(NOON + (second + 40) * S, stale_s=9.0)
                news.append(view.fresh_verdict())
        log.close()
        shown = view.snapshot(restarts=0).verdict
    assert [True, False, True, False] == [bool(text) for text in news]
    assert news[2].startswith("Failing since")
    assert shown is not None
    assert (shown.state, shown.cause) == ("failing", "server")


def test_the_sentences_of_the_page_stay_for_half_a_minute():
    """Each is a series of its own; another state or cause has its own at once."""
    texts, said_now = [], None
    for second, state, text in ((0, "failing", "a"), (29, "failing", "b"), (31, "failing", "c"), (32, "missed", "d")):
        verdict = replace_struct(VERDICT, state=state, headline=text)
        said_now = said(said_now, verdict, NOON + second * S)
        texts.append(said_now.verdict.headline)
    assert ["a", "a", "c", "d"] == texts


def test_no_part_is_the_largest_while_requests_only_fail(tmp_path: Path):
    """From five failures in a row until a request succeeds again."""
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        seen, number = [], 0
        log = SpanLog(tmp_path / "spans-000000.log")
        for second, count, failed in ((10, 20, False), (60, 4, True), (110, 1, True), (160, 1, False)):
            for _ in range(count):
                number += 1
                spans = traced(number, failed=failed)
                log.append(export(spans[:1] if failed else spans, at_s=second))
            view.poll(NOON + (second + 1) * S)
            view.poll(NOON + (second + 40) * S)
            parts = view.snapshot(restarts=0).parts
            assert parts is not None
            seen.append(bool(parts.largest))
        log.close()
    assert [True, True, False, True] == seen


def test_the_network_before_a_gateway_is_not_seen_where_clients_send_no_spans(tmp_path: Path):
    """On the terminal and on the page: neither a 0 nor a share, and the TTFT is the gateway's."""
    logged(tmp_path, *(traced(number)[1:] for number in range(1, 4)))
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        text = words(shown(looked(view, NOON + 20 * S), width=100))
        snapshot = view.snapshot(restarts=0)
    assert "network not seen gateway" in text
    assert "TTFT 260.0 260.0 260.0 100 % gateway's spans" in text
    page = LivePage()
    page.update(snapshot)
    parts = set(re.findall(r'sidelight_(\w+?)(?:_bucket)?{.*part="(\w+)"', page.render().decode()))
    assert ("ttft_part_mean_seconds", "gateway") in parts
    assert "network" not in {part for _, part in parts}
    assert b"client_output_tokens" not in page.render()


def test_of_engines_spans_alone_queue_and_prefill_are_shown_and_no_more(tmp_path: Path):
    """Their requests have no breakdown and no rate, which only a client states: neither is a zero."""
    logged(tmp_path, *(traced(number)[2:] for number in range(1, 4)))
    page = LivePage()
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        text = words(shown(looked(view, NOON + 40 * S), width=100))
        page.update(view.snapshot(restarts=0))
    assert "served - requests/s" in text
    assert "3: no client's span came for it in time; by the engine, on average: queue 50 ms, prefill 100 ms" in text
    sums_s = dict(re.findall(rb'sidelight_no_client_part_seconds_sum{.*part="(\w+)".*} (.*)', page.render()))
    assert {b"queue": 0.15, b"prefill": 0.3} == {part: pytest.approx(float(sum_s)) for part, sum_s in sums_s.items()}
    assert not re.findall(rb"sidelight_requests_total{.*} [^0]", page.render())


def test_requests_go_after_five_minutes(tmp_path: Path):
    """What is too old is shown no more."""
    logged(tmp_path, traced(1))
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        looked(view, NOON + 30 * S)
        later = looked(view, NOON + 60 * S)
        last = looked(view, NOON + round(WINDOW_S + 31) * S)
    assert "Where the TTFT went: 1 request in" in words(shown(later))
    assert "No request with a known TTFT in the last 5 min" in words(shown(last))


def test_it_says_where_traces_break(tmp_path: Path):
    """Once that has been so for a minute; the log has it once."""
    spans = SpanLog(tmp_path / "spans-000000.log")
    for second in range(0, 120, 3):
        trace, clock_ms = second.to_bytes(15), 1e3 * second
        halves = [call(trace=b"c" + trace, clock_ms=clock_ms), engine(parent="", trace=b"e" + trace, clock_ms=clock_ms)]
        spans.append(export(halves, at_s=second + 1.0))
    spans.close()
    logged_texts: list[str] = []
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        for second in range(0, 120, 2):
            state = looked(view, NOON + second * S)
            logged_texts += view.fresh_breaks()
    (text,) = logged_texts
    assert "so that the two are not joined by trace: something between client and engine does not pass the" in text
    assert f"! In the last minute {state.breaks[0]}" in words(shown(state))


def test_engines_are_shown_with_what_became_of_them(tmp_path: Path):
    """Their gauges, that one restarted, and that it answers no more."""
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    pages.append(scraped(NOON, PAGE.format(started=100), url=URL))
    pages.append(scraped(NOON + S, PAGE.format(started=200), url=URL))
    gone_ns = NOON + 3 * S
    pages.append(
        FailureRecord(url=URL, tick_ns=gone_ns, request_ns=gone_ns, response_ns=gone_ns, status=0, error="refused")
    )
    pages.close()
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf) as view:
        before = words(shown(looked(view, NOON + 4 * S), width=120))
        after = words(shown(looked(view, NOON + 7 * S), width=120))
    assert "vllm running 7 waiting 3 KV cache 21 % restarted 3 s ago 127.0.0.1:8000" in before
    assert "vllm 127.0.0.1:8000 has not answered since 22:13:21 UTC: refused" in after


def test_the_last_queue_of_an_engine_that_answers_no_more_is_not_drawn(tmp_path: Path):
    """As in a run: it waits there no longer, as far as is known."""
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    pages.append(scraped(NOON, PAGE.format(started=100), url=URL))
    pages.append(scraped(NOON + 3 * S, "", url=URL, error="refused"))
    pages.close()
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf) as view:
        first, *_, last = [looked(view, NOON + second * S).waiting_lately[-1] for second in (1, 20)]
    assert (3.0, None) == (first, last)


def state_of(**changes: object) -> WatchState:
    """Return a state without requests."""
    with WatchView(Path(os.devnull), run_id="r", read_s=inf) as view:
        bare = view.state(NOON, elapsed_s=1.0, stale_s=5.0, restarts=0, receiver_down="")
    return replace(bare, **changes)  # type: ignore[arg-type]


FOREIGN = EngineState(
    url=URL, engine="vllm", version="\x1b[2J[red]1", running=None, waiting=None, kv_cache_usage_ratio=None
)


def test_what_others_wrote_does_not_control_the_terminal():
    """Controls are escaped, markup is text; what is not known is a dash."""
    silent = replace(FOREIGN, silence="since 12:00:00 UTC: \x1b]0;owned\x07[/red]")
    text = shown(state_of(engines=[FOREIGN, silent], receiver_down="the receiver is down"), width=120)
    assert "\x1b" not in text
    assert r"vllm \x1b[2J[red]1   running -   waiting -   KV cache -" in text
    assert r"127.0.0.1:8000 has not answered since 12:00:00 UTC: \x1b]0;owned\x07[/red]" in text
    assert "! the receiver is down" in text


def test_it_says_what_is_still_to_come():
    """Estimates come now and then, all of the last seconds at once."""
    text = words(shown(state_of(awaiting_spans=2, awaiting_estimates=30, refused=4, receiver_restarts=1, errors=5)))
    assert "pending 32 30 of them for an estimate" in text
    assert "spans received 0 refused 4 receiver restarts 1 defects of Sidelight's 5" in text


@pytest.mark.parametrize("width", [20, 80])
def test_a_narrow_terminal_gets_no_line_that_is_too_long(width: int, tmp_path: Path):
    """Whatever stands in it."""
    logged(tmp_path, traced(1))
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        state = replace(looked(view, NOON + 30 * S), engines=[replace(FOREIGN, url="http://" + "e" * 200)] * 6)
    assert width >= max(map(len, shown(state, width=width).splitlines()))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_its_width_stays_and_the_queue_of_the_last_minutes_is_drawn(width: int, tmp_path: Path):
    """Of all engines together, the latest to the right; as wide whatever it holds."""
    (tmp_path / "raw").mkdir()
    logged(tmp_path, traced(1))
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    pages.append(scraped(NOON, PAGE.format(started=100), url=URL))
    pages.close()
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf) as view:
        frames = [shown(state, width=width) for state in (state_of(), looked(view, NOON + 2 * S))]
    assert {min(width, 100)} == {len(row) for frame in frames for row in frame.splitlines()}
    assert width == 60 or "█  up to 3 " in frames[1]


def test_a_terminal_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch):
    """As after a hang-up: each write fails."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with Progress("panel") as progress:
            progress.show(panel(state_of()))
            os.close(ours)
            progress.show(panel(state_of()))
            progress.warn("this is read by nobody")
            progress.show(panel(state_of()))
    assert ["this is read by nobody"] == list(progress.warned)
