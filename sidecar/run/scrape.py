"""A session without load: targets are scraped and spans received, for a duration or until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, TypeVar

from sidelight.recorded import directory as run_directory
from sidelight.rundir.clock import anchor
from sidelight.sidecar.options.access import metrics_access
from sidelight.sidecar.options.spans import receiver_spec, require_ports
from sidelight.sidecar.options.watch import ScrapeOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run import children
from sidelight.sidecar.run import manifest as manifests
from sidelight.sidecar.run.phases import (
    Session,
    record,
    settle,
    stop_on_signals,
    unless_stopped,
    unless_stopped_for,
    warn_and_record,
    watching,
)
from sidelight.sidecar.run.processes.child import RECEIVER, SCRAPER, Child

if TYPE_CHECKING:
    from sidelight.sidecar.live.view import LiveRun
    from sidelight.sidecar.run.session import Finish

T = TypeVar("T")


async def scrape(options: ScrapeOptions, *, command: Sequence[str], progress: Progress, finish: Finish[T]) -> T:
    """Scrape targets without any load, and return the result of `finish`. It lasts for a duration or until a signal."""
    with ExitStack() as reading:
        result, _ = finish((await _scrape(options, reading, command=command, progress=progress)).logs.run())
        return result


async def _scrape(options: ScrapeOptions, reading: ExitStack, *, command: Sequence[str], progress: Progress) -> LiveRun:
    """Scrape to the end of the scraper; return the reader of its logs, which `reading` closes."""
    from sidelight.scraper.targets.target import STALE_TICKS  # noqa: PLC0415  as in run
    from sidelight.sidecar.live.view import LiveRun  # noqa: PLC0415
    from sidelight.sidecar.run.preparation.pages import prepare_scrape  # noqa: PLC0415

    async with stop_on_signals() as stop:
        run_directory.require_free(options.out)
        require_ports(options)
        clock = anchor()
        prepared = await unless_stopped(stop, prepare_scrape(options))
        # Ctrl-C is how a scrape without a duration is meant to end.
        awaited = stop if options.duration is not None else asyncio.Event()
        recorded = manifests.recorded(options, options.out, command, clock, awaited, about=prepared.about)
        async with recorded as (run_id, path), AsyncExitStack() as stack:
            stale_s = STALE_TICKS * options.scrape_interval
            live = reading.enter_context(
                LiveRun(path, run_id=run_id, clock=clock, planned_s=options.duration, stale_s=stale_s, loaded=False)
            )
            session = Session(run_id=run_id, path=path, clock=clock, progress=progress, stop=stop, live=live)
            for text in filter(None, (*prepared.notes, run_directory.scarce(path))):
                warn_and_record(session, text)
            scraper = await stack.enter_async_context(Child("scraper", SCRAPER))
            spec = children.scraper_spec(path, prepared.targets, options, clock, metrics_access(options))
            session = await children.scraping(session, stack, scraper, spec)
            if (spans := receiver_spec(options, clock)) is not None:
                receiver = await stack.enter_async_context(Child("receiver", RECEIVER))
                session = await children.receiving(session, stack, receiver, children.span_spec(path, spans))
            await asyncio.gather(*(each.ready() for each in session.supervised))
            await stack.enter_async_context(watching(session))
            live.enter("measure")
            record(session, "phase_start", phase="measure")
            await unless_stopped_for(stop, options.duration)
            record(session, "phase_end", phase="measure")
            await settle(session, options.scrape_interval, listening=session.listening)
    return live
