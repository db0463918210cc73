"""Targets that are exchanged while scrapes are under way, and what is said of one that answers at a stated moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from served import Serve, answer
from waiting import BOUND_S

from sidelight.rundir.access import Access
from sidelight.scraper.targets.fetch import FetchLimits, open_session
from sidelight.scraper.targets.pool import ScrapePool
from sidelight.scraper.targets.scrape import Scrape
from sidelight.scraper.targets.target import Say, ScrapeConfig

PAGE = "# TYPE up gauge\nup 1\n"


class Kept:
    """What was scraped, as it comes; no page is looked at."""

    def __init__(self) -> None:
        self.scrapes: asyncio.Queue[Scrape] = asyncio.Queue()

    def append(self, scrape: Scrape) -> str:
        self.scrapes.put_nowait(scrape)
        return scrape.error

    async def next_of(self, url: str) -> Scrape:
        """Return the next scrape of a page."""
        while (scrape := await self.scrapes.get()).url != url:
            pass
        return scrape


@asynccontextmanager
async def pooled(log: Kept, say: Say) -> AsyncIterator[ScrapePool]:
    """A pool that ends with the block."""
    async with open_session() as session, asyncio.TaskGroup() as group:
        config = ScrapeConfig(
            clock_offset_ns=0, access=Access(), limits=FetchLimits(timeout_s=BOUND_S), session=session
        )
        pool = ScrapePool(config, log=log, group=group, say=say)
        yield pool
        pool.stop_schedule()


async def test_a_scrape_under_way_is_logged_though_its_target_was_exchanged(serve: Serve):
    """A page that is handed out once would be lost."""
    asked, answers = asyncio.Event(), asyncio.Event()
    answers.set()

    async def slow(_: web.Request) -> web.Response:
        asked.set()
        await answers.wait()
        return web.Response(text=PAGE)

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    base = await serve({"/slow": slow, "/quick": quick})
    log = Kept()
    async with asyncio.timeout(BOUND_S), pooled(log, lambda _: None) as pool:
        await pool.set_targets([f"{base}/slow"], 0.02, within_s=BOUND_S)
        answers.clear()
        asked.clear()
        await asked.wait()
        while not log.scrapes.empty():
            log.scrapes.get_nowait()
        await pool.set_targets([f"{base}/quick"], 0.02, within_s=BOUND_S)
        answers.set()
        assert ("", PAGE) == ((scrape := await log.next_of(f"{base}/slow")).error, scrape.body.decode())
        asked.clear()
        for _ in range(10):
            await log.next_of(f"{base}/quick")
        assert not asked.is_set()


async def test_a_target_that_answers_at_a_stated_moment_is_fresh_at_once(serve: Serve):
    """Its next tick may be thirty seconds away."""
    up = asyncio.Event()

    async def moody(_: web.Request) -> web.Response:
        return web.Response(text=PAGE) if up.is_set() else web.Response(status=503)

    base = await serve({"/metrics": moody})
    said: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def say(event: str, **data: object) -> None:
        said.put_nowait({"event": event, **data})

    async with asyncio.timeout(BOUND_S), pooled(Kept(), say) as pool:
        await pool.set_targets([f"{base}/metrics"], 0.02, within_s=BOUND_S)
        assert "stale" == (await said.get())["event"]
        pool.stop_schedule()
        up.set()
        await pool.scrape_all(within_s=BOUND_S)
        assert {"event": "fresh", "url": f"{base}/metrics"} == said.get_nowait()
        assert 0 == pool.counts()["stale"]


async def test_a_page_that_a_defect_cannot_take_is_one_failed_scrape(serve: Serve, caplog: pytest.LogCaptureFixture):
    """Of its target alone: the others are scraped on, and so is it; the traceback stands in the log once."""

    class Defective(Kept):
        def append(self, scrape: Scrape) -> str:
            if scrape.body == b"poison":
                raise ZeroDivisionError
            return super().append(scrape)

    base = await serve({"/good": answer(PAGE), "/poison": answer("poison")})
    log, poison = Defective(), f"{base}/poison"
    async with asyncio.timeout(BOUND_S), pooled(log, lambda *_, **__: None) as pool:
        await pool.set_targets([f"{base}/good", poison], 0.02, within_s=BOUND_S)
        for _ in range(3):
            assert "defect: ZeroDivisionError" == (await log.next_of(poison)).error
            assert PAGE == (await log.next_of(f"{base}/good")).body.decode()
        assert 3 <= pool.counts()["failed"]
    assert 1 == sum(record.levelname == "ERROR" for record in caplog.records)


async def test_a_clock_is_read_once_however_often_its_page_is_listed(serve: Serve):
    """Also where the pages differ in what has nothing to do with it: user, slash, query."""
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response([])

    base = await serve({"/perf_metrics": note, "/perf_metrics/": note, "/steady_clock_offset": note})
    other = base.replace("://", "://user:password@")
    urls = [f"{base}/perf_metrics", f"{base}/perf_metrics", f"{other}/perf_metrics/", f"{base}/perf_metrics?all=1"]
    async with asyncio.timeout(BOUND_S), pooled(Kept(), lambda *_, **__: None) as pool:
        await pool.set_targets(urls, 3600.0, within_s=BOUND_S)
        assert 1 == asked.count("/steady_clock_offset")
        assert 3 == len(asked) - 1
