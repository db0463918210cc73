"""The report for people: how numbers look, what is certain of a percentile, and that it fits its width."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import msgspec
import numpy as np
import pytest
import summaries
from logs import request_log
from rich.console import Console

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import Prose
from sidelight.exporter.report.sections import as_text
from sidelight.exporter.report.verdict import where_it_went
from sidelight.exporter.summary.breakdown import json_name
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.slowest import SlowRequest
from sidelight.exporter.summary.timeline import COLUMNS, Timeline
from sidelight.exporter.text import WIDTH, print_on, render
from sidelight.loadgen.requests.summary import client_summary
from sidelight.loadgen.requests.warmup import parse_warmup, statement
from sidelight.rundir.printable.numbers import cell, ms, percent
from sidelight.rundir.stats import Missing
from sidelight.scraper.window.quantities import Histogram
from sidelight.scraper.window.summary import DetectedEngine

VLLM = DetectedEngine(name="vllm", version=None, detected_by="metric vllm:num_requests_running")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.0049, "0.00"),
        (1.234, "1.23"),
        (-1.234, "-1.23"),
        (9.99, "9.99"),
        (10.0, "10.0"),
        (-10.05, "-10.1"),
        (2634.78, "2,634.8"),
        (1_234_567.0, "1,234,567.0"),
    ],
)
def test_milliseconds(value: float | None, shown: str):
    """About three digits, thousands apart, "-" where missing."""
    assert shown == ms(value)


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (None, "-"),
        (0.0, "0 %"),
        (-1e-9, "0 %"),
        (0.004, "0 %"),
        (0.977, "98 %"),
        (1.0, "100 %"),
        (-0.12, "-12 %"),
        (2.5, "250 %"),
    ],
)
def test_percent(ratio: float | None, shown: str):
    """Whole percent, "-" where missing; neither end is cut off."""
    assert shown == percent(ratio)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (117, "117"),
        (38752.0, "38,752"),
        (-3.0, "-3"),
        (0.03, "0.03"),
        (7.8, "7.80"),
        (21.45, "21.4"),
        (1234.56, "1,234.6"),
    ],
)
def test_cells(value: float | None, shown: str):
    """Whole numbers whole, whatever their type, others with about three digits, "-" where missing."""
    assert shown == cell(value)


def row(text: str, label: str) -> list[str]:
    """Return the columns of the last row of this label: the server's table comes after the client's."""
    rows = [line for line in text.splitlines() if line.strip().startswith(label)]
    return re.split(r" {2,}", rows[-1].strip())[1:]


@pytest.mark.parametrize(
    ("quantity", "shown"),
    [
        (summaries.histogram(0.15, 0.16, 0.12, 0.2), "120-200"),
        (summaries.histogram(0.15, 0.16, 0.0, 0.3, resolved=False), "≤ 300"),
        (summaries.histogram(0.15, 0.195, 0.19, 0.2), "195.0"),
        (summaries.histogram(15.0, 15.5, 12.0, 20.0), "12,000-20,000"),
        (summaries.histogram(300.0, 300.0, 256.0, None, resolved=False), "≥ 256,000"),
        (summaries.histogram(3000.0, None), "-"),
    ],
)
def test_a_percentile_is_shown_as_certain_as_it_is(quantity: Histogram, shown: str):
    """Its 90 % interval where that is wide, the value where it is narrow, one end where the value is lost in it."""
    text = as_text(summaries.summary(summaries.correlated(), summaries.server(queue_time=quantity)))
    assert ["100", ms(1e3 * (quantity.stats.mean or 0.0)), shown, shown] == row(text, "queue time, ms")


@pytest.mark.parametrize(
    ("value_s", "low_s", "high_s", "shown"), [(0.15, 0.149, 0.151, "150.0"), (0.15, 0.12, 0.2, "120-200")]
)
def test_a_percentile_through_the_clients_eyes_goes_before_that_of_buckets(
    value_s: float, low_s: float, high_s: float, shown: str
):
    """Where hardly any other client was served; that of buckets alone stays where it is the only one."""
    columns = {"values_s": value_s, "low_s": low_s, "high_s": high_s}
    seen = replace(summaries.PERCENTILES, source="client spans", **{key: np.full(10, s) for key, s in columns.items()})
    findings = replace(summaries.findings(), percentiles={"queue_ms": seen, "prefill_ms": Missing("why")})
    text = as_text(summaries.summary(summaries.correlated(findings)))
    assert ["100", "150.0", shown, shown] == row(text, "queue time, ms")
    assert ["100", "30.0", "≤ 300", "≤ 300"] == row(text, "prefill time, ms")


def test_quantities_stand_by_kind_and_absent_ones_not_at_all():
    """Histograms in ms, gauges over scrapes, counters as totals; one without statistics has no row."""
    text = as_text(summaries.summary(summaries.correlated()))
    assert ["7.80", "8", "21.4", "22"] == row(text, "requests waiting")
    assert (["0"], ["38,752"]) == (row(text, "preemptions"), row(text, "prompt tokens"))
    assert not [name for name in ("requests running", "decode time", "draft tokens") if name in text]
    assert "TPOT: n/a (no reply had two tokens)" in text.splitlines()
    assert "Throughput: 10 requests/s, 3,333.3 input tokens/s" in text.splitlines()


@pytest.mark.parametrize(("drafted", "shown"), [(3677.0, ["3,525", "96 %"]), (0.0, None)])
def test_the_share_of_draft_tokens_that_were_accepted(drafted: float, shown: list[str] | None):
    """Beside their count, where the engine speculates."""
    counters = {
        "draft_tokens": summaries.counter(drafted, 0.0),
        "draft_tokens_accepted": summaries.counter(3525.0, 0.0),
    }
    text = as_text(summaries.summary(summaries.correlated(), summaries.server(**counters)))
    assert shown == (row(text, "draft tokens accepted") if "draft tokens" in text else None)


@pytest.mark.parametrize(("gap_ms", "is_said"), [(539.0, True), (11.0, False)])
def test_gaps_of_several_tokens_are_explained(gap_ms: float, is_said: bool):
    """Where they are much longer than the time per output token beside them."""
    shown = summaries.summary(summaries.correlated())
    gaps, tokens = (msgspec.structs.replace(summaries.BLOCK, p50=value) for value in (gap_ms, 10.2))
    client = msgspec.structs.replace(shown.client, time_between_chunks_ms=gaps, tpot_ms=tokens)
    assert is_said == ("Chunks hold several tokens" in as_text(msgspec.structs.replace(shown, client=client)))


def test_an_engine_without_a_scrape_in_the_window_is_named():
    """A reason stands where the table would."""
    nothing = msgspec.structs.replace(summaries.NO_SERVER, engine=VLLM)
    text = as_text(summaries.summary(summaries.correlated(), nothing))
    assert "Server: vllm, no scrape within the measured window" in text.splitlines()


@pytest.mark.parametrize(
    "correlation",
    [
        summaries.correlated(),
        summaries.correlated(summaries.findings(summaries.parts("histogram"))),
        summaries.correlated(summaries.findings(summaries.parts("response", merged="network and engine frontend"))),
        summaries.correlated(summaries.findings(summaries.parts("none", reason="why"), why="why " * 20)),
        summaries.uncorrelated("no server offers queue and prefill times"),
        summaries.uncorrelated("the server's sums are too large to calculate with, and this reason is " + "long " * 20),
    ],
)
def test_the_report_fits_its_width_and_holds_the_answer(correlation: Correlation):
    """100 columns, however the lines break; the answer's words follow each other."""
    text = as_text(summaries.summary(correlation))
    assert [] == [line for line in text.splitlines() if len(line) > WIDTH]
    assert [] == [line for line in text.splitlines() if line != line.rstrip()]
    assert where_it_went(summaries.summary(correlation)) in " ".join(text.split())
    assert text.endswith("\n")
    assert "\x1b" not in text


def test_metrics_alone_give_the_servers_part_alone():
    """Without requests there are neither the client's tables nor an answer."""
    summary = summaries.summary(summaries.uncorrelated("no request with a first token ended here"))
    client = client_summary(request_log())
    config = summary.config | {"url": None, "model": None, "metrics": ["http://127.0.0.1:8000/metrics"]}
    text = as_text(msgspec.structs.replace(summary, client=client, config=config))
    assert "server metrics only at http://127.0.0.1:8000/metrics, vllm 0.32.0" in text.splitlines()
    assert "Where the TTFT went" not in text
    assert "requests waiting" in text


def slow(number: int, **change: Any) -> SlowRequest:
    """One of the slowest requests, of which the engine's page was not scraped."""
    known = dict.fromkeys(map(json_name, TTFT_PARTS))
    return SlowRequest(
        **known
        | {
            "request_id": f"sl-{number}",
            "trace_id": f"{number:032x}",
            "workload_class": "chat",
            "endpoint_url": "http://127.0.0.1:8000",
            "status": "ok",
            "submitted_s": 1.0,
            "ttft_ms": 700.0 - number,
            "source": "none",
            "error_ms": None,
            "input_tokens": 50,
            "requests_waiting": None,
            "requests_running": None,
            "in_flight": 3,
        }
        | change
    )


def report_of_slow(*requests: SlowRequest) -> str:
    return as_text(summaries.summary(msgspec.structs.replace(summaries.correlated(), slowest=list(requests))))


def test_the_slowest_requests_have_their_ids_and_what_ran_beside_them():
    """What is known of none has no column; the ids of all stand below, whole, for a search elsewhere."""
    text = report_of_slow(slow(1, queue_ms=600.0, requests_waiting=4.0), slow(2, status="failed"))
    (heading,) = (line.split() for line in text.splitlines() if "waiting" in line.split() and "input" in line)
    assert ["TTFT", "queue", "waiting", "input"] == heading
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "699.0", "600.0", "4", "50"] in rows
    assert ["2", "698.0", "-", "-", "50"] in rows
    assert f" 1 trace {1:032x} request sl-1" in text.splitlines()
    assert f" 2 trace {2:032x} request sl-2 failed" in text.splitlines()


def test_without_an_engines_page_our_own_requests_are_shown_beside_a_slow_one():
    rows = [line.split() for line in report_of_slow(slow(1)).splitlines()]
    assert ["TTFT", "in", "flight", "input"] in rows
    assert ["1", "699.0", "3", "50"] in rows


def test_classes_are_a_column_only_where_there_are_several():
    assert "class" not in report_of_slow(slow(1), slow(2))
    assert any(
        line.split()[-1:] == ["code"] for line in report_of_slow(slow(1), slow(2, workload_class="code")).splitlines()
    )


def test_a_class_is_shown_as_it_is_called():
    """A name that looks like markup is printed, and is not an error."""
    assert "[/red]" in report_of_slow(slow(1), slow(2, workload_class="[/red]"))


def test_a_servers_version_is_shown_as_it_is_stated():
    engine = msgspec.structs.replace(VLLM, version="[/b]1")
    server = msgspec.structs.replace(summaries.server(), engine=engine)
    assert "Server: vllm [/b]1" in as_text(summaries.summary(summaries.correlated(), server)).splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_parted_from_its_unit(width: int):
    """However narrow the terminal is, and no line is wider than it."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(render([Prose("Of the mean, 75 % was spent in the queue and 1,234 ms elsewhere. " * 10)]))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert not any(line.startswith(("%", "ms")) for line in lines)


@pytest.mark.parametrize(("height", "last"), [(24, "again"), (100, "29")])
def test_on_a_low_terminal_the_verdict_stands_below_the_report(height: int, last: str):
    """It has left the screen at the top; where nothing has, and in a file, nothing is said twice."""
    for is_terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=is_terminal, width=80, height=height, color_system=None)
        print_on(console, [Prose(str(number)) for number in range(30)], again=[Prose("again")])
        lines = console.file.getvalue().split()  # type: ignore[attr-defined]
        assert (last if is_terminal else "29") == lines[-1]


def test_every_alert_is_a_sentence_and_stands_once():
    warned = msgspec.structs.replace(
        summaries.summary(summaries.correlated()), warnings=["16 of 27 failed", "it ended"]
    )
    assert ["! 16 of 27 failed.", "! It ended."] == [
        line for line in as_text(warned).splitlines() if line.startswith("!")
    ]


def test_the_draft_is_stated_only_where_its_warm_up_was_asked_for():
    plain = summaries.summary(summaries.correlated())
    assert "draft-gaikwad-00" not in as_text(plain)
    warmup = msgspec.structs.replace(
        statement(parse_warmup("draft"), request_log(), drained=True), sentence="Warm-up: as asked."
    )
    asked = msgspec.structs.replace(
        plain,
        config=plain.config | {"warmup": "draft"},
        methodology=msgspec.structs.replace(plain.methodology, warmup=warmup),
    )
    assert "draft-gaikwad-00: none of the draft's tests. Warm-up: as asked." in as_text(asked)


def test_the_run_is_drawn_on_one_axis():
    """A block a column, the largest value beside it; what is known of no column has no line, and any width is kept."""
    columns = [None] * COLUMNS
    ttft_ms, waiting = [*columns[:-2], 50.0, 1604.0], [0.0, 1.0, *columns[2:-1], 5.0]
    drawn = Timeline(column_s=10.7 / COLUMNS, ttft_ms=ttft_ms, requests_waiting=waiting, requests_running=columns)
    text = as_text(summaries.summary(msgspec.structs.replace(summaries.correlated(), timeline=drawn)))
    rows = [line for line in text.splitlines() if line.startswith(("TTFT  ", "waiting", "running", "         0 s"))]
    assert rows == [
        f"TTFT     {'':{COLUMNS - 2}}▂█  up to 1,604 ms",
        f"waiting  ▁▃{'':{COLUMNS - 3}}█  up to 5",
        f"         0 s{'10.7 s':>{COLUMNS - 3}}  TTFT by when sent",
    ]
    assert "up to" not in as_text(summaries.summary(summaries.correlated()))
