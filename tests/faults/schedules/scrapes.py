"""What must hold of scrapes after a schedule, whatever scrapers died of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from faults.schedules.engine import FINISHED, PAGES
from faults.schedules.network import Weather
from faults.schedules.virtual_time import BOOT_NS, EPOCH_NS
from faults.schedules.watching import Played, Watched

from sidelight.exporter.evaluation.server import gaps_of
from sidelight.recorded.events import SCRAPER_DIED
from sidelight.recorded.run import Run
from sidelight.rundir.frames import FrameTail, in_order
from sidelight.scraper.series.log import FailureRecord, ScrapeRow, read_log
from sidelight.sidecar.watch.processes import UNCOUNTED

IN_HAND_S, CALM_S = 6.0, 0.2  # that a scrape may take, its time-out included, and where nothing is slow
NOTICED_S = 1.0  # within which a death is noticed


def scrape_faults(run: Run, watch: Watched, played: Played) -> Iterator[str]:
    """Yield what is wrong with the scrapes of one watch."""
    yield from _pages(run, played)
    yield from _logs(watch)
    if played.schedule.has_page and watch.process.code == 0:
        scrapes = [scrape for path in _paths(watch) for scrape in read_log(path)]
        yield from _counts(scrapes, watch)
        if len(played.watches) == 1:
            yield from _served(scrapes, played, watch)
            yield from _holes(run, played)


def _paths(watch: Watched) -> list[Path]:
    return in_order((watch.path / "raw").glob("scrapes-*.log"))


def _logs(watch: Watched) -> Iterator[str]:
    """Yield which logs are damaged before their ends; a scraper that was killed may leave a torn frame there."""
    for path in _paths(watch):
        with FrameTail(path) as tail:
            while tail.read_block() or tail.read_rest():
                pass
            if tail.extent.lost_frames or tail.extent.lost_bytes:
                yield f"{path.name} is damaged: {tail.extent}"


def _counts(scrapes: Sequence[ScrapeRow | FailureRecord], watch: Watched) -> Iterator[str]:
    """Yield where the watch counts other scrapes than are in its logs."""
    (view,) = watch.views
    logged = Counter("ok" if isinstance(scrape, ScrapeRow) else "failed" for scrape in scrapes)
    counted = Counter[str]()
    for engine in view.snapshot(restarts=0).engines:
        counted += Counter(engine.scrapes)
    if +counted != +logged:
        yield f"scrapes: {dict(counted)} are counted, {dict(logged)} logged"


def _served(scrapes: Sequence[ScrapeRow | FailureRecord], played: Played, watch: Watched) -> Iterator[str]:
    """Yield what was served, is in no log, neither as a page nor as a failure, and is not said to be lost."""
    asked_ns = [(scrape.request_ns, scrape.response_ns) for scrape in scrapes]
    died_ns = [scraper.died_ns for scraper in played.scrapers if scraper.died_ns]
    in_hand_ns = CALM_S * 1e9 if played.schedule.weather == Weather() else IN_HAND_S * 1e9
    lost = []
    for number, page in enumerate(played.engine.served, start=1):
        at_ns = page.at_ns + EPOCH_NS - BOOT_NS
        is_logged = any(begin_ns <= at_ns <= end_ns for begin_ns, end_ns in asked_ns)
        if not is_logged and not any(0 <= end_ns - page.at_ns <= in_hand_ns for end_ns in died_ns):
            lost.append(number)
    latest = watch.pages[0].latest
    assert latest is not None
    assert latest.watch is not None
    unwritten = latest.watch.unwritten
    last_ns = in_hand_ns + 1e9  # of what it could not write in that time, a scraper has counted nothing
    late = [
        number
        for number in lost
        if any(0 <= end_ns - played.engine.served[number - 1].at_ns <= last_ns for end_ns in died_ns)
    ]
    is_said = any(UNCOUNTED in line for line in watch.said.lines)
    if len(lost) > unwritten + (len(late) if is_said else 0):
        yield f"pages {lost} are in no log; {unwritten} are counted, scrapers died at {died_ns}"
    if unwritten and not played.disk.failures:
        yield f"{unwritten} scrapes are counted as not written, and all could be"


def _holes(run: Run, played: Played) -> Iterator[str]:
    """Yield the deaths of scrapers that are not recorded, and what is recorded without one."""
    died = [scraper for scraper in played.scrapers if scraper.died_ns]
    events = [event for event in run.events if event.name == SCRAPER_DIED]
    if len(events) != len(died):
        yield f"{len(died)} scrapers died, {len(events)} deaths are recorded"
    gaps = gaps_of(run)
    if any(gap.end_ns is None for gap in gaps):
        yield f"a scraper was up at the end, and the report says that none was: {gaps}"
    for scraper in died:
        at_ns = scraper.died_ns + EPOCH_NS - BOOT_NS
        if not any(gap.start_ns - NOTICED_S * 1e9 <= at_ns <= (gap.end_ns or at_ns) for gap in gaps):
            yield f"a scraper died at {at_ns}, which is in no gap: {gaps}"


def _pages(run: Run, played: Played) -> Iterator[str]:
    """Each page in the log was served as it is there, while it was asked for; none is there twice."""
    for endpoint in run.endpoints:
        names = [series.name for series in endpoint.series]
        if PAGES not in names:
            continue
        numbers = endpoint.values[:, names.index(PAGES)].astype(int).tolist()
        if sorted(set(numbers)) != numbers:
            yield f"pages in the log: {numbers}"
        finished = endpoint.values[:, names.index(FINISHED)].tolist()
        wrong = [
            number
            for number, count in zip(numbers, finished, strict=True)
            if played.engine.served[number - 1].finished != count
        ]
        if wrong:
            yield f"pages that were not served as they are in the log: {wrong}"
        at_ns = np.array([played.engine.served[number - 1].at_ns for number in numbers]) + EPOCH_NS - BOOT_NS
        is_between = (endpoint.request_ns <= at_ns) & (at_ns <= endpoint.response_ns)
        if not played.schedule.steps and not is_between.all():
            yield f"pages that were served at other times than those in the log: {np.array(numbers)[~is_between]}"
