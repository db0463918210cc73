"""What a session tells its processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rundir.access import Access
from rundir.clock import anchor
from scraper.commands import Spec
from sidecar.options.load import RunOptions
from sidecar.options.scrape import ScrapeOptions
from sidecar.run.session import scraper_spec


def spec(options: RunOptions | ScrapeOptions) -> Spec:
    """Return the scraper's specification as the scraper reads it."""
    spec = scraper_spec(Path("run"), ["http://e/metrics"], options, anchor(), Access(headers={"X": "y"}))
    return msgspec.json.decode(msgspec.json.encode(spec), type=Spec)


def test_the_scraper_is_told_the_seed():
    """The same seed waits the same times after failures; a scrape without load has none to give."""
    assert 7 == spec(RunOptions(seed=7)).seed
    assert 0 == spec(ScrapeOptions()).seed


def test_the_scraper_is_told_where_spans_are_received():
    """And into which log; nothing of them where they were not asked for."""
    told = spec(ScrapeOptions(otlp_listen="127.0.0.1:4317"))
    assert told.spans is not None
    assert ("127.0.0.1:4317", "127.0.0.1:4318") == (told.spans.grpc, told.spans.http)
    assert (told.clock_offset_ns, "run/raw/spans-0.log") == (told.spans.clock_offset_ns, told.spans_out)
    assert spec(ScrapeOptions()).spans is None


def test_the_scraper_is_told_what_was_asked_for():
    """Targets, interval, time-out and access."""
    told = spec(ScrapeOptions(scrape_interval=0.5, scrape_timeout=2.0))
    assert (["http://e/metrics"], 0.5, 2.0, Access(headers={"X": "y"})) == (
        told.targets,
        told.interval_s,
        told.timeout_s,
        told.access,
    )
