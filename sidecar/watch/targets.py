"""Pages that a watch scrapes, as its options and the file of `--metrics-from` change."""

from __future__ import annotations

import asyncio

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.printable.numbers import count_of
from sidelight.scraper.commands import SetTargets
from sidelight.sidecar.options.discovery import FLAG
from sidelight.sidecar.options.watch import pages_of
from sidelight.sidecar.watch.processes import Watch, scraped_line

DISCOVERY_S = 30.0  # between two readings of the file


async def scrape_other(shared: Watch, pages: tuple[str, ...]) -> None:
    """Scrape these pages from now on, by the options as they are."""
    shared.pages = pages
    shared.view.scrape_only(pages)
    if shared.scraper.child is not None:
        await shared.scraper.child.send(SetTargets(targets=list(pages), interval_s=shared.options.scrape_interval))


async def follow_targets(shared: Watch) -> None:
    """Follow the file of --metrics-from, read each DISCOVERY_S. A file that cannot be used changes nothing."""
    refused = ""
    while True:
        await asyncio.sleep(DISCOVERY_S)
        try:
            pages = await asyncio.to_thread(pages_of, shared.options)
        except ConfigurationError as error:
            if refused != (refused := str(error)):
                shared.warn_and_record(f"the pages scraped are unchanged: {refused}")
            continue
        refused = ""
        new, gone = set(pages) - set(shared.pages), set(shared.pages) - set(pages)
        if new or gone:
            await scrape_other(shared, pages)
            shared.progress.stage(scraped_line(pages, shared.options))
            text = f"{FLAG}: {count_of(len(pages), 'page')} to scrape, {len(new)} new, {len(gone)} gone"
            shared.record("note", text=text)
