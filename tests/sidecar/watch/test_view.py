"""What a watch knows, from its logs alone."""

from __future__ import annotations

from pathlib import Path

from series import scraped

from rundir.frames import FrameLog
from scraper.series.log import ScrapeLog
from sidecar.watch.view import WatchView

URL = "http://127.0.0.1:8000/metrics"
PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(tmp_path: Path):
    """A record that nobody wrote, before a page in one log and alone in another."""
    with FrameLog(tmp_path / "scrapes-000000.log") as log:
        log.append(b"no record")
    pages = ScrapeLog(tmp_path / "scrapes-000000.log")
    pages.append(scraped(10**9, PAGE, url=URL))
    pages.close()
    with FrameLog(tmp_path / "spans-000000.log") as log:
        log.append(b"no record")
    with WatchView(tmp_path, run_id="r", pages=[URL]) as view:
        view.poll(2 * 10**9)
        shown = view.snapshot(restarts=0)
    assert shown.watch is not None
    assert 2 == shown.watch.errors
    assert [{"requests_running": 7.0}] == [engine.gauges for engine in shown.engines]
