"""Objectives of a watch: of which time and source they are, and when they are not judged."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from sent_spans import NOON, S, call, export
from series import gauge, histogram, scraped

from sidelight.loadgen.requests.slo.results import SloResult
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.spans.log import SpanLog
from sidelight.sidecar.watch.objectives import watched_objectives
from sidelight.sidecar.watch.view import WatchView

URL = "http://127.0.0.1:8000/metrics"
SLO = "ttft_p90<400ms,itl_p50<100ms,error_rate<10%,requests_per_s>0.2"


def standing(view: WatchView, second: int) -> SloResult:
    """Return the objectives on the page after a look at a second."""
    view.poll(NOON + second * S)
    view.judge(NOON + second * S, stale_s=1e6)
    client = view.snapshot(restarts=0).client
    assert client is not None
    assert client.slo is not None
    return client.slo


def sent(path: Path, *, ok: int, failed: int = 0, first_ms: float = 300.0) -> None:
    """Write the spans of clients, which end at NOON and one second."""
    with_spans = SpanLog(path / "spans-000000.log")
    for number in range(ok + failed):
        with_spans.append(export([call(first_ms=first_ms, trace=number.to_bytes(16), failed=number >= ok)], at_s=1))
    with_spans.close()


@pytest.mark.parametrize(
    ("ok", "failed", "first_ms", "met"),
    [
        (40, 0, 300.0, [True, None, True, True]),
        (40, 0, 500.0, [False, None, True, True]),
        (30, 10, 300.0, [False, None, False, True]),
        (19, 0, 300.0, [None, None, None, True]),
        (0, 0, 300.0, [None, None, None, None]),
    ],
)
def test_objectives_are_judged_by_clients_spans(
    tmp_path: Path, ok: int, failed: int, first_ms: float, met: list[bool | None]
):
    """A failed request is infinitely slow; of few only a rate is judged; what spans lack is not known."""
    sent(tmp_path, ok=ok, failed=failed, first_ms=first_ms)
    with WatchView(tmp_path, run_id="r", read_s=inf, objectives=watched_objectives(SLO)) as view:
        standing(view, 0)
        slo = standing(view, 55)
    assert met == [objective.met for objective in slo.objectives]
    assert [known is None for known in met] == [
        bool(objective.missing) and objective.met is None for objective in slo.objectives
    ]


def test_requests_of_more_than_a_minute_ago_are_not_judged(tmp_path: Path):
    sent(tmp_path, ok=40, first_ms=500.0)
    with WatchView(tmp_path, run_id="r", read_s=inf, objectives=watched_objectives(SLO)) as view:
        standing(view, 0)
        seen = [standing(view, second).met for second in (40, 200)]
    assert [False, None] == seen


@pytest.mark.parametrize(
    ("most_s", "met"), [("0.25", True), ("0.5", None), ("10.0", False)], ids=["below", "around the bound", "above"]
)
def test_without_clients_spans_the_pages_of_engines_decide(tmp_path: Path, most_s: str, met: bool | None):
    """A histogram decides where both ends of its interval are on one side of the bound."""
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    family, seconds = "vllm:time_to_first_token_seconds", {"0.25": 0.2, "0.5": 0.36, "10.0": 5.0}[most_s]
    for second, count in ((1, 0), (50, 100)):
        buckets = [
            (bound, count if float(bound) >= float(most_s) else 0)
            for bound in ("0.1", "0.25", "0.3", "0.5", "4.0", "10.0")
        ]
        page = histogram(family, count, count * seconds, buckets=buckets) + gauge("vllm:num_requests_running", 7)
        pages.append(scraped(NOON + second * S, page, url=URL))
    pages.close()
    with WatchView(tmp_path, run_id="r", pages=[URL], read_s=inf, objectives=watched_objectives(SLO)) as view:
        standing(view, 0)
        ttft, itl, errors, rate = standing(view, 55).objectives
        verdict = view.verdict(NOON + 55 * S, stale_s=1e6)
    assert (met, None, None, None) == (ttft.met, itl.met, errors.met, rate.met)
    assert 1e3 * seconds == pytest.approx(ttft.value_ms or 0.0, rel=0.3)
    assert ("missed" if met is False else "not_judged") == verdict.state
