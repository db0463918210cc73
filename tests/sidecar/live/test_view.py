"""The view of a run while it goes, from the logs alone."""

from __future__ import annotations

from pathlib import Path

from scraped import scraped

from rundir.clock import anchor
from scraper.series.log import ScrapeLog
from sidecar.directory import RAW
from sidecar.live.view import LiveRun

PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"
URL = "http://127.0.0.1:8000/metrics"


def test_an_engine_that_is_down_is_said_to_be_and_its_last_gauges_are_not_shown(tmp_path: Path):
    """From when it has not answered for as long as was said, until it answers again."""
    (tmp_path / RAW).mkdir()
    log = ScrapeLog(tmp_path / RAW / "scrapes-0.log")
    seen = []
    with LiveRun(tmp_path, run_id="r", clock=anchor(), planned_s=None, stale_s=2.5, loaded=False) as live:
        for second, error in enumerate(["", "refused", "refused", "refused", ""]):
            log.append(scraped(second * 10**9, PAGE, url=URL, error=error))
            live.poll()
            view = live.view()
            seen.append((dict(view.silent), view.running))
    log.close()
    assert [({}, 7.0)] * 3 + [({URL: "refused"}, None), ({}, 7.0)] == seen
