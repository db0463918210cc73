"""Scrapes of a page, as the scraper logs them."""

from __future__ import annotations

from scraper.targets.fetch import Scrape


def scraped(at_ns: int, page: str, *, url: str = "http://engine.test/metrics", error: str = "") -> Scrape:
    """Return a scrape that ended at this moment and took 2 ms; one with an error has no page."""
    return Scrape(
        url=url,
        tick_ns=at_ns,
        request_ns=at_ns - 2_000_000,
        response_ns=at_ns,
        status=0 if error else 200,
        content_type="text/plain",
        body=b"" if error else page.encode(),
        error=error,
    )
