"""What a session passes to its processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sidelight.rundir.access import Access
from sidelight.rundir.clock import anchor
from sidelight.scraper.commands import SpanSpec, Spec
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.spans import receiver_spec
from sidelight.sidecar.options.watch import ScrapeOptions
from sidelight.sidecar.run.children import scraper_spec, span_spec, span_spec_after, spec_after


def spec(options: RunOptions | ScrapeOptions) -> Spec:
    """Return the scraper's specification as the scraper reads it."""
    spec = scraper_spec(Path("run"), ["http://e/metrics"], options, anchor(), Access(headers={"X": "y"}))
    return msgspec.json.decode(msgspec.json.encode(spec), type=Spec)


def test_the_scraper_gets_the_seed():
    """The same seed waits the same times after failures; a scrape without load has none to give."""
    assert 7 == spec(RunOptions(seed=7)).seed
    assert 0 == spec(ScrapeOptions()).seed


def span_spec_of(listen: str) -> SpanSpec:
    """Return the receiver's specification as the receiver reads it."""
    receiver = receiver_spec(ScrapeOptions(otlp_listen=listen), anchor())
    assert receiver is not None
    return msgspec.json.decode(msgspec.json.encode(span_spec(Path("run"), receiver)), type=SpanSpec)


def test_the_receiver_gets_the_addresses_for_spans():
    """And into which log."""
    spec = span_spec_of("127.0.0.1:4317")
    assert ("127.0.0.1:4317", "127.0.0.1:4318") == (spec.receiver.grpc, spec.receiver.http)
    assert "run/raw/spans-0.log" == spec.out


def test_the_scraper_gets_what_was_asked_for():
    """Targets, interval, time-out and access."""
    scraper_spec = spec(ScrapeOptions(scrape_interval=0.5, scrape_timeout=2.0))
    assert (["http://e/metrics"], 0.5, 2.0, Access(headers={"X": "y"})) == (
        scraper_spec.targets,
        scraper_spec.interval_s,
        scraper_spec.timeout_s,
        scraper_spec.access,
    )


def test_a_scraper_that_is_started_again_has_its_own_logs():
    """All else is as before."""
    first = spec(ScrapeOptions())
    again = spec_after(first, 2)
    logs = ("out", "hardware_out", "timings_out")
    names = ["scrapes-2.log", "hardware-2.log", "timings-2.log"]
    assert [f"run/raw/{name}" for name in names] == [getattr(again, log) for log in logs]
    assert first == msgspec.structs.replace(again, **{log: getattr(first, log) for log in logs})


def test_a_receiver_that_is_started_again_has_its_own_log_and_the_same_ports():
    """Senders know the ports, where any free ones were asked for; all else is as before."""
    first = span_spec_of("127.0.0.1:0")
    again = span_spec_after(first, 2, "127.0.0.1:5001", "127.0.0.1:5002")
    assert ("127.0.0.1:5001", "127.0.0.1:5002") == (again.receiver.grpc, again.receiver.http)
    assert "run/raw/spans-2.log" == again.out
    assert first == msgspec.structs.replace(again, out=first.out, receiver=first.receiver)
