"""Directories of watches as their processes leave them, built by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
from sent_spans import NOON, S, call, engine, export
from series import scraped

from sidelight.recorded.directory import MANIFEST, RAW, create, log_ends, read_manifest, write_json
from sidelight.recorded.events import Event, append_event
from sidelight.rundir.frames import Rotation
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.spans.log import ReceiverCounts, SpanLog, StateRecord

URL = "http://127.0.0.1:8000/metrics"
PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"
COLLECTOR = "http://127.0.0.1:4318"


def begin(path: Path) -> Path:
    """Make the directory of a watch that began at NOON, and has seen nothing."""
    create(path)
    config = {"keep": "1h", "keep_bytes": "1GB", "slice_duration": 10.0, "scrape_interval": 1.0, "metrics": [URL]}
    manifest = {"run_id": "r", "tool": {"name": "sidelight", "version": "0"}, "config": config}
    write_json(path / MANIFEST, {**manifest, "started_at": "2023-11-14T22:13:20.000Z", "started_ns": NOON})
    append_event(path, Event(at_ns=NOON, name="phase_start", data={"phase": "measure"}))
    return path


def fill(
    path: Path,
    number: int,
    *,
    late_ns: int = 0,
    seconds: int = 10,
    rotation: Rotation | None = None,
    ends: bool = False,
    is_here: bool = False,
) -> None:
    """Write logs of a request and a page each second, by a clock that is late; `ends`: of a receiver that has ended;
    `is_here`: spans are by that clock, too.
    """
    spans = SpanLog(path / f"{RAW}/spans-{number:06d}.log", rotation)
    pages = ScrapeLog(path / f"{RAW}/scrapes-{number:06d}.log", rotation)
    spans.append(StateRecord(at_ns=NOON - late_ns, state="started", counts=ReceiverCounts()))
    for second in range(seconds):
        trace = (seconds * number + second + 1).to_bytes(16)
        clock_ms = 1e3 * second - late_ns / 1e6 * is_here
        both = [engine(trace=trace, clock_ms=clock_ms), call(trace=trace, clock_ms=clock_ms)]
        record = export(both, at_s=second + 1 - late_ns / S)
        spans.append(record)
        pages.append(scraped(NOON + second * S - late_ns, PAGE, url=URL))
    if ends:
        counts = ReceiverCounts(exports=seconds, spans=2 * seconds)
        spans.append(StateRecord(at_ns=NOON + seconds * S, state="ended", counts=counts))
    spans.close()
    pages.close()


def whole(path: Path, *, seconds: int = 40) -> Path:
    """Make the directory of a watch that ended: logs that went on in others."""
    begin(path)
    fill(path, 0, seconds=seconds, rotation=Rotation(most_bytes=4000, most_s=1e9), ends=True)
    append_event(path, Event(at_ns=NOON + seconds * S, name="phase_end", data={"phase": "measure"}))
    ends = {name: end and msgspec.structs.asdict(end) for name, end in log_ends(path).items()}
    about = {"status": "complete", "ended_at": "2023-11-14T22:14:00.000Z", "ended_ns": NOON + seconds * S, "logs": ends}
    write_json(path / MANIFEST, read_manifest(path) | about)
    return path
