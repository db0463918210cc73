"""Run directories as the processes of a run write them, record by record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from sent_requests import parts, planned
from series import scraped

from sidelight.loadgen.records import WorkerStat, append_record, plan_end
from sidelight.recorded.directory import create, write_json
from sidelight.recorded.events import Event
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.targets.scrape import Scrape

MANIFEST = {"run_id": "20260101-000000-abcdef", "status": "complete", "config": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What is written into a run directory: tokens of each request, waiting requests of each scrape."""

    tokens: list[int]
    waiting: list[int]
    stats: list[WorkerStat]
    events: list[Event]


def scrape(number: int, waiting: int) -> Scrape:
    """Return the scrape of a page with one gauge."""
    return scraped(1000 * number + 9, f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting {waiting}\n")


def write(path: Path, what: Recorded) -> dict[str, list[int]]:
    """Write a run directory with the writers that a run uses; returns for each log its size after each record."""
    create(path)
    write_json(path / "manifest.json", MANIFEST)
    raw = path / "raw"
    sizes: dict[str, list[int]] = {}
    requests = [part for index, tokens in enumerate(what.tokens) for part in parts(index, tokens)]
    plan = [*(planned(index, tokens) for index, tokens in enumerate(what.tokens)), plan_end("measure")]
    for name, records in (("plan-measure.log", plan), ("requests-0.log", [*what.stats, *requests])):
        frame_log = FrameLog(raw / name)
        for record in records:
            append_record(frame_log, record)
            sizes.setdefault(name, []).append((raw / name).stat().st_size)
        frame_log.close()
    log = ScrapeLog(raw / "scrapes-0.log")
    for number, waiting in enumerate(what.waiting):
        log.append(scrape(number, waiting))
        sizes.setdefault("scrapes-0.log", []).append((raw / "scrapes-0.log").stat().st_size)
    log.close()
    with FrameLog(raw / "events.log") as events_log:
        for event in what.events:
            events_log.append(msgspec.msgpack.encode(event))
            sizes.setdefault("events.log", []).append((raw / "events.log").stat().st_size)
    return sizes
