"""What a session passes to its processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rundir.access import Access
from rundir.clock import anchor
from scraper.commands import Spec
from sidecar.options.load import RunOptions
from sidecar.options.watch import ScrapeOptions
from sidecar.run.session import scraper_spec, spec_after


def spec(options: RunOptions | ScrapeOptions) -> Spec:
    """Return the scraper's specification as the scraper reads it."""
    spec = scraper_spec(Path("run"), ["http://e/metrics"], options, anchor(), Access(headers={"X": "y"}))
    return msgspec.json.decode(msgspec.json.encode(spec), type=Spec)


def test_the_scraper_gets_the_seed():
    """The same seed waits the same times after failures; a scrape without load has none to give."""
    assert 7 == spec(RunOptions(seed=7)).seed
    assert 0 == spec(ScrapeOptions()).seed


def test_the_scraper_gets_the_addresses_for_spans():
    """And into which log; nothing of them where they were not asked for."""
    scraper_spec = spec(ScrapeOptions(otlp_listen="127.0.0.1:4317"))
    assert scraper_spec.spans is not None
    assert ("127.0.0.1:4317", "127.0.0.1:4318") == (scraper_spec.spans.grpc, scraper_spec.spans.http)
    assert (scraper_spec.clock_offset_ns, "run/raw/spans-0.log") == (
        scraper_spec.spans.clock_offset_ns,
        scraper_spec.spans_out,
    )
    assert spec(ScrapeOptions()).spans is None


def test_the_scraper_gets_what_was_asked_for():
    """Targets, interval, time-out and access."""
    scraper_spec = spec(ScrapeOptions(scrape_interval=0.5, scrape_timeout=2.0))
    assert (["http://e/metrics"], 0.5, 2.0, Access(headers={"X": "y"})) == (
        scraper_spec.targets,
        scraper_spec.interval_s,
        scraper_spec.timeout_s,
        scraper_spec.access,
    )


def test_a_scraper_that_is_started_again_has_its_own_logs_and_the_same_ports():
    """Senders know the ports, where any free ones were asked for; all else is as before."""
    first = spec(ScrapeOptions(otlp_listen="127.0.0.1:0"))
    again = spec_after(first, 2, ["127.0.0.1:5001", "127.0.0.1:5002"])
    assert again.spans is not None
    assert ("127.0.0.1:5001", "127.0.0.1:5002") == (again.spans.grpc, again.spans.http)
    logs = ("out", "hardware_out", "timings_out", "spans_out")
    names = ["scrapes-2.log", "hardware-2.log", "timings-2.log", "spans-2.log"]
    assert [f"run/raw/{name}" for name in names] == [getattr(again, log) for log in logs]
    assert first == msgspec.structs.replace(again, spans=first.spans, **{log: getattr(first, log) for log in logs})
    assert "" == spec_after(spec(ScrapeOptions()), 1, []).spans_out
