"""What a user sees while a run goes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from io import BytesIO, StringIO, TextIOWrapper

import msgspec
import pytest
from rich.console import Console

from sidelight.exporter.html.markup import blocks
from sidelight.exporter.summary.verdict import PartShare, RunVerdict, VerdictFigure
from sidelight.rundir.printable.text import LONGEST_WORD
from sidelight.sidecar.progress.panel import BAR, Standing, View, line, panel, panel_rows
from sidelight.sidecar.progress.reporter import MOST_REMEMBERED, Mode, Progress, Terminal, mode_for

VIEW = View(
    loaded=True,
    phase="measure",
    elapsed_s=12.4,
    planned_s=30.0,
    sent=61,
    ok=48,
    failed=3,
    in_flight=10,
    output_tokens_per_s=1234.5,
    ttft_p50_ms=9.44,
    ttft_p99_ms=140.0,
    running=7.0,
    waiting=3.0,
    kv_cache_usage_ratio=0.213,
    lateness_p99_ms=0.412,
    verdict=RunVerdict(
        state="missed",
        cause="queue",
        headline="Objective missed so far: ttft_p99<300ms.",
        figures=[
            VerdictFigure(name="served", label="served", value=5.43, text="5.43 of 6 requests/s"),
            VerdictFigure(
                name="ttft_p99", label="TTFT p99", value=1524.0, text="1,524 ms (< 300 ms: MISSED)", bad=True
            ),
        ],
        parts=[
            PartShare(part="queue", label="queue", mean_ms=168.4, share=0.7, known_from="estimate"),
            PartShare(part="prefill", label="prefill", mean_ms=60.1, share=0.3, known_from="estimate"),
        ],
        why="Of the mean TTFT of the last 41 requests, 70 % was spent in the engine's queue.",
        do="Add a replica.",
    ),
    waiting_lately=[None, 0.0, 0.0, 1.0, 2.5, 5.0, 3.1],
    objectives=[
        Standing(objective="tpot_p99<50ms", met=True, value=18.1, unit="ms"),
        Standing(objective="ttft_p99<300ms", met=False, value=1524.1, unit="ms"),
    ],
)
_NUMBERS = re.compile(r"\d[\d.,]*(?: [%a-zA-Z]+)?")
UNKNOWN = {field.name for field in dataclasses.fields(View) if str(field.type).endswith("| None")}
BARE = dataclasses.replace(VIEW, **dict.fromkeys(UNKNOWN))


def rendered(view: View, width: int = 120) -> str:
    """Return the panel as text."""
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(panel(view))
    return text.getvalue()


@pytest.mark.parametrize(
    ("quiet", "as_json", "terminal", "mode"),
    [
        (False, False, True, "panel"),
        (False, False, False, "lines"),
        (True, False, True, "quiet"),
        (True, True, True, "json"),
        (False, True, False, "json"),
    ],
)
def test_the_mode_follows_what_was_asked_and_who_reads(quiet: bool, as_json: bool, terminal: bool, mode: Mode):
    """A machine's wish goes before silence, and a panel is for terminals only."""
    assert mode == mode_for(quiet=quiet, as_json=as_json, stream_is_terminal=terminal)


def test_a_load_that_ends_by_its_requests_shows_how_many_ended():
    """Not a duration, which says nothing of when it ends."""
    view = replace(VIEW, planned_s=None, planned_requests=60)
    for shown in (rendered(view), line(view)):
        assert "51 of 60 requests, 12 s" in shown


def test_the_panel_shows_both_sides():
    """Elapsed and planned time, requests, tokens and TTFT of the client, and the engine's gauges."""
    shown = rendered(VIEW)
    for words in (
        "measure  12 of 30 s",
        "sent 61",
        "ok 48",
        "in flight 10",
        "up to 0.41 ms late (p99)",
        "served 5.43 of 6 requests/s",
        "tokens/s 1234",
        "TTFT p99 1,524 ms (< 300 ms: MISSED)",
        "█ queue 70 %   ▓ prefill 30 % (all: estimate)",
        "Do this: Add a replica.",
        "ttft_p99<300ms MISSED  tpot_p99<50ms met",
        "running 7",
        "waiting 3",
        "KV cache 21 %",
        "▁▁▃▅█▆  up to 5",
    ):
        assert words in shown


def moments() -> Iterator[View]:
    """Give a run from its first moment on: nothing known, then small and large numbers."""
    yield dataclasses.replace(BARE, waiting_lately=[])
    yield BARE
    yield VIEW
    yield dataclasses.replace(BARE, silent={"http://e/metrics": "since 12:00:00 UTC: connect: Connection refused"})
    yield dataclasses.replace(VIEW, silent={"http://e/metrics": "since 12:00:00 UTC: timeout"})
    yield dataclasses.replace(
        VIEW, elapsed_s=3600.0, planned_s=10.0, sent=12_345_678, ok=9_876_543, failed=12_345, in_flight=4321,
        output_tokens_per_s=123_456.7, ttft_p50_ms=123_456.0, ttft_p99_ms=9_999.0, running=4096.0, waiting=65_536.0,
        lateness_p99_ms=12_345.0, waiting_lately=[65_536.0] * BAR,
        objectives=[dataclasses.replace(VIEW.objectives[0], value=None, met=None)] * 9,
    )  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_keeps_its_size(width: int):
    """From refresh to refresh, whatever its numbers: 80 columns, or what a narrower terminal has."""
    frames = [rendered(view, width).splitlines() for view in moments()]
    assert {min(width, 80)} == {len(row) for frame in frames for row in frame}
    assert 1 == len({len(frame) for frame in frames})


def test_the_live_page_has_every_line_of_the_panel():
    """With the words that a wide terminal has, and none of ours for how a line is made."""
    for view in moments():
        wide = StringIO()
        Console(file=wide, width=400, color_system=None).print(panel(view).renderable)
        page = unescape(re.sub("<title>.*?</title>|<[^>]*>", " ", blocks(panel_rows(view))))
        shown, page = (re.sub("[▁▂▃▄▅▆▇█▓]", "", text) for text in (wide.getvalue(), page))
        assert shown.split() == page.split()


@pytest.mark.parametrize("width", [60, 62, 67, 71, 80])
def test_a_narrow_panel_cuts_no_number(width: int):
    """What has no room goes as a whole, with its unit; the most that waited stays."""
    for view in moments():
        whole = StringIO()
        Console(file=whole, width=400, color_system=None).print(panel(view).renderable)
        numbers = set(_NUMBERS.findall(whole.getvalue()))
        text = rendered(view, width)
        assert numbers >= set(_NUMBERS.findall(text))
        assert "  up to " in text


@pytest.mark.parametrize(
    ("lateness_ms", "shown"),
    [(0.00001, "0 ms"), (9.4, "9.4 ms"), (9.96, "10 ms"), (99.7, "100 ms"), (9_999.0, "9999 ms"), (9_999.6, "10.0 s")],
)
def test_times_have_no_exponent(lateness_ms: float, shown: str):
    assert f"up to {shown} late" in rendered(dataclasses.replace(VIEW, lateness_p99_ms=lateness_ms))


def test_a_server_that_says_less_than_nothing_waits_is_drawn_at_zero():
    """Whatever a page says, the panel of a run goes on."""
    assert "▁▁" in rendered(dataclasses.replace(VIEW, waiting_lately=[-5.0, -10.0]))


def test_a_line_says_the_same():
    """For logs, where no panel can stand."""
    assert (
        "measure 12 of 30 s: sent 61, ok 48, failed 3, in flight 10, 1234 tokens/s, TTFT p50 9.4 p99 140 ms, "
        "engine running 7 waiting 3 KV 21 %"
    ) == line(VIEW)


def test_what_is_not_known_is_a_dash():
    """Never a zero."""
    assert (
        "measure 12 s: sent 61, ok 48, failed 3, in flight 10, - tokens/s, TTFT p50 - p99 - ms, "
        "engine running - waiting - KV -"
    ) == line(BARE)
    assert "KV cache -" in rendered(BARE)
    assert "running -" in rendered(BARE)


def test_json_progress_is_a_line_an_event(capsys: pytest.CaptureFixture[str]):
    """With nothing between, so that a machine can read on; null where not known."""
    with Progress("json") as progress:
        progress.stage("preparing")
        progress.warn("no metrics\nhere")
        progress.update(VIEW)
        progress.update(BARE)
    shown = capsys.readouterr()
    stage, warning, known, bare = [json.loads(row) for row in shown.err.splitlines()]
    assert "" == shown.out
    assert {"event": "stage", "stage": "preparing"} == stage
    assert {"event": "warning", "text": "no metrics\nhere"} == warning
    assert {"event": "progress", **msgspec.to_builtins(VIEW)} == known
    assert UNKNOWN == {name for name, value in bare.items() if value is None}


def test_quiet_still_warns(capsys: pytest.CaptureFixture[str]):
    """What a reader must know is said; how it goes is not."""
    with Progress("quiet") as progress:
        progress.stage("preparing")
        progress.update(VIEW)
        progress.warn("no metrics")
    assert ("", "! no metrics\n") == capsys.readouterr()


def test_the_same_warning_of_several_steps_is_printed_once(capsys: pytest.CaptureFixture[str]):
    """Of a study; each run by itself says all of its own."""
    for study, times in (("step 2 of about 8", 1), ("", 2)):
        with Progress("quiet") as progress:
            progress.study = study
            progress.warn("no --dataset")
            progress.warn("no --dataset")
            assert len(progress.warned) == 2
        assert capsys.readouterr().err.count("! no --dataset") == times


def test_of_warnings_the_latest_are_remembered(capsys: pytest.CaptureFixture[str]):
    """A watch goes on for months, and warns of each engine that goes and comes."""
    with Progress("json") as progress:
        for number in range(MOST_REMEMBERED + 7):
            progress.warn(f"warning {number}")
    assert [f"warning {number}" for number in range(7, MOST_REMEMBERED + 7)] == list(progress.warned)
    assert MOST_REMEMBERED + 7 == capsys.readouterr().err.count("\n")


@pytest.mark.parametrize("mode", ["lines", "panel"])
def test_a_long_warning_stays_one_line(capsys: pytest.CaptureFixture[str], mode: Mode):
    """Nothing is folded or left out, so that it can be searched for."""
    text = "no server metrics from " + ", ".join(f"http://127.0.0.1:{8000 + page}/very/long" for page in range(20))
    with Progress(mode) as progress:
        progress.warn(text)
    assert f"! {text}\n" == capsys.readouterr().err


@pytest.mark.parametrize("mode", ["lines", "panel"])
def test_a_long_word_of_a_warning_is_cut_and_its_sentence_is_not(capsys: pytest.CaptureFixture[str], mode: Mode):
    """It stays one line; the beginning of the word, and all that stands around it, is said."""
    url = "http://127.0.0.1:8000" + "/very/long" * 40
    text = f"no server metrics from {url} (connection refused)"
    with Progress(mode) as progress:
        progress.warn(text)
    assert f"! no server metrics from {url[:LONGEST_WORD]}... (connection refused)\n" == capsys.readouterr().err


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]):
    """One at once, then one every five seconds of the run's own time."""
    with Progress("lines") as progress:
        for half_seconds in range(25):
            progress.update(dataclasses.replace(VIEW, elapsed_s=half_seconds / 2))
    shown = capsys.readouterr().err.splitlines()
    assert [0, 5, 10] == [int(row.split()[1]) for row in shown]


def test_a_new_phase_is_said_at_once(capsys: pytest.CaptureFixture[str]):
    """However short the one before was."""
    with Progress("lines") as progress:
        progress.update(dataclasses.replace(VIEW, phase="warmup", elapsed_s=0.0))
        progress.update(dataclasses.replace(VIEW, phase="warmup", elapsed_s=0.5))
        progress.update(dataclasses.replace(VIEW, phase="measure", elapsed_s=0.6))
    assert ["warmup", "measure"] == [row.split()[0] for row in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("mode", ["lines", "panel", "quiet"])
def test_a_page_that_falls_silent_is_said_once_and_so_is_its_return(capsys: pytest.CaptureFixture[str], mode: Mode):
    """In a line each, whatever else is shown."""
    down = dataclasses.replace(VIEW, silent={"http://e/metrics": "since 12:00:00 UTC: connect: Connection refused"})
    with Progress(mode) as progress:
        for view in (VIEW, down, down, VIEW, VIEW):
            progress.update(view)
    said = [row for row in capsys.readouterr().err.splitlines() if row.startswith("!")]
    assert [
        "! http://e/metrics has not answered since 12:00:00 UTC: connect: Connection refused",
        "! http://e/metrics answers again",
    ] == said


def test_what_a_terminal_cannot_write_is_written_in_ascii(monkeypatch: pytest.MonkeyPatch):
    """A report on one was an error: blocks, rules and signs have lookalikes, any other character a question mark."""
    written = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written, encoding="ascii", write_through=True))
    Terminal().print("▁▂▃▄▅▆▇█ ── ≤ 3 ±1 é ok", soft_wrap=True)
    assert b"_.:-=+*# -- < 3 ~1 ? ok\n" == written.getvalue()
