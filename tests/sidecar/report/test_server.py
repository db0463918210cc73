"""When the scraper of a run was down, by the events of the run, and what that means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from codes import raises
from logs import request_log
from series import endpoint_of, gauge

from sidelight.exporter.evaluation.server import gaps_of, require_server, span_gaps_of
from sidelight.exporter.report.alerts import gap_line, span_gap_line
from sidelight.recorded.events import RECEIVER_DIED, RECEIVER_RESTARTED, SCRAPER_DIED, SCRAPER_RESTARTED, Event
from sidelight.recorded.run import Run
from sidelight.scraper.spans.requests import engine_spans
from sidelight.scraper.window.summary import Gap, server_summary
from sidelight.scraper.window.window import Window

S = 10**9
UP = gauge("up", 1)
NEVER_BACK = [(6, SCRAPER_DIED)]


def run(*events: tuple[float, str], status: str = "complete", **config: Any) -> Run:
    """Return a run with nothing but these events, each with its second."""
    return Run(
        path=Path("run"),
        manifest={"status": status, "config": config},
        requests=request_log(),
        worker_stats=(),
        endpoints=(),
        spans=engine_spans([]),
        events=tuple(Event(at_ns=round(at_s * S), name=name, data={"reason": f"at {at_s}"}) for at_s, name in events),
    )


def test_a_gap_lasts_until_a_scraper_is_up_again():
    """Those that died on the way there are in it; the last one may have no end."""
    gaps = gaps_of(run((2, SCRAPER_DIED), (2.5, SCRAPER_DIED), (4, SCRAPER_RESTARTED), (5, "note"), (6, SCRAPER_DIED)))
    assert [Gap(start_ns=2 * S, end_ns=4 * S, reason="at 2"), Gap(start_ns=6 * S, end_ns=None, reason="at 6")] == gaps
    assert [] == gaps_of(run((5, "note")))


def test_a_gap_begins_with_the_last_scrape():
    """A scraper that stands still is noticed when it does not answer, which may be half a minute later."""
    page, other = endpoint_of([UP, None], at_ns=[S, 4 * S], took_ns=0), endpoint_of([UP, UP], at_ns=[3 * S, 30 * S])
    stood_still = replace(run((20, SCRAPER_DIED), (21, SCRAPER_RESTARTED)), endpoints=(page, other))
    gaps = gaps_of(stood_still)
    assert [Gap(start_ns=4 * S, end_ns=21 * S, reason="at 20")] == gaps
    assert "incomplete" == server_summary((page, other), Window(start_ns=S, end_ns=5 * S), S, gaps=gaps).status


def test_a_receiver_dies_by_itself():
    """Its gaps are its own."""
    events = run((2, RECEIVER_DIED), (4, RECEIVER_RESTARTED), (6, SCRAPER_DIED))
    assert [Gap(start_ns=2 * S, end_ns=4 * S, reason="at 2")] == span_gaps_of(events)
    assert [Gap(start_ns=6 * S, end_ns=None, reason="at 6")] == gaps_of(events)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"url": ["http://e"], "metrics": ["http://e/metrics"]},
        {"url": ["http://e"], "otlp_listen": "127.0.0.1:4317"},
    ],
    ids=["scrape", "metrics", "spans"],
)
def test_a_run_whose_server_half_was_asked_for_and_is_lost_ends_with_3(config: dict[str, Any]):
    """Where it came back, or the run had another end, it does not."""
    with raises("process.not-restarted") as caught:
        require_server(run(*NEVER_BACK, **config))
    assert 3 == caught.value.exit_code
    require_server(run(*NEVER_BACK, (7, SCRAPER_RESTARTED), **config))
    require_server(run(*NEVER_BACK, status="interrupted", **config))


def test_a_run_whose_receiver_was_lost_ends_with_3():
    """Where it came back, it does not."""
    with raises("process.not-restarted"):
        require_server(run((6, RECEIVER_DIED), url=["http://e"], otlp_listen="127.0.0.1:4317"))
    require_server(run((6, RECEIVER_DIED), (7, RECEIVER_RESTARTED), url=["http://e"], otlp_listen="127.0.0.1:4317"))


def test_a_load_alone_has_its_clients_half():
    require_server(run(*NEVER_BACK, url=["http://e"], metrics=[], otlp_listen=None))


def test_a_server_without_pages_is_missing():
    assert "missing" == server_summary((), Window(start_ns=0, end_ns=S), S).status


def gap(start_s: float, end_s: float | None) -> Gap:
    return Gap(start_ns=round(start_s * S), end_ns=None if end_s is None else round(end_s * S), reason="killed")


def test_a_hole_is_said_with_what_it_means():
    """When, for how long, what is whole and what is lost; of several the first, and all of their time."""
    whole = "totals are whole, since the engine's counters went on; when within that time they rose is not known"
    assert (
        "the scraper died 5.7 s into the measurement (killed) and was started again: nothing was scraped for 1.3 s; "
        f"{whole}"
    ) == gap_line([gap(15.7, 17)], start_ns=10 * S)
    assert (
        "the scraper died 1.0 s before the measurement, the first of 2 times (killed) and was started again: nothing "
        f"was scraped for 3.0 s; {whole}"
    ) == gap_line([gap(9, 11), gap(12, 13)], start_ns=10 * S)


def test_a_hole_of_spans_is_said_with_what_it_means():
    """Spans that were not sent again are lost, or all that came later."""
    assert (
        "the receiver died 5.7 s into the measurement (killed) and was started again: no span was received for at "
        "least 1.3 s; spans that were sent meanwhile are lost unless their sender sent them again"
    ) == span_gap_line([gap(15.7, 17)], start_ns=10 * S)
    assert (
        "the receiver died 2.0 s into the measurement (killed) and could not be started again: no span was received "
        "after that, and later requests have no times from spans"
    ) == span_gap_line([gap(12, None)], start_ns=10 * S)


def test_a_scraper_that_was_not_started_again_is_said():
    """And since when there is nothing."""
    assert (
        "the scraper died 2.0 s into the measurement (killed) and could not be started again: nothing was scraped "
        "after that, and the server's results end there"
    ) == gap_line([gap(12, None)], start_ns=10 * S)
    assert "nothing was scraped after 7.0 s, and" in gap_line([gap(12, 13), gap(17, None)], start_ns=10 * S)
