"""The set of targets that are scraped now, and its exchange for another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from sidelight.rundir.access import bare
from sidelight.scraper.targets.scrape import clock_of
from sidelight.scraper.targets.target import Log, Say, ScrapeConfig, ScrapeTarget

_CLOCK_S = 1.0  # least time for reading clocks; trtllm-serve takes 0.2 s


class ScrapePool:
    """Targets scraped now and their tasks, exchanged by `set_targets`.

    Replies of a TensorRT-LLM `/perf_metrics`, and of its clock whenever all targets are scraped, go to `timings`.
    """

    def __init__(
        self, config: ScrapeConfig, *, log: Log, timings: Log | None = None, group: asyncio.TaskGroup, say: Say
    ) -> None:
        self._config, self._log, self._timings, self._group, self._say = config, log, timings or log, group, say
        self._targets: list[ScrapeTarget] = []
        self._clocks: list[str] = []
        self._ticking: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    def set_targets(self, urls: Sequence[str], interval_s: float, *, within_s: float) -> asyncio.Task[None]:
        """Scrape these at this interval from now on; the task is done when each has been scraped once, or could not be
        within that time. A URL that is listed twice is scraped once, and a clock of several pages is read once. A
        scrape of an earlier target that is under way goes on and is logged.
        """
        for target, task in zip(self._targets, self._ticking, strict=True):
            target.leave()
            if target.is_busy:
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            else:
                task.cancel()
        self._config = replace(self._config, interval_ns=round(interval_s * 1e9))
        pages = {bare(url): url for url in urls}.values()
        self._targets = [
            ScrapeTarget(url, self._config, log=self._timings if clock_of(url) else self._log, say=self._say)
            for url in pages
        ]
        # Pages that differ in their query have one clock: each reading of it waits for the one before.
        self._clocks = list({bare(clock): clock for url in pages if (clock := clock_of(url))}.values())
        first = self._group.create_task(self.scrape_all(within_s=within_s))
        # A target that has answered goes on: one that hangs delays only our word that all are ready.
        self._ticking = [self._group.create_task(target.tick()) for target in self._targets]
        return first

    def stop_schedule(self) -> None:
        """Stop scraping, and cancel scrapes under way, those of earlier targets too."""
        for task in (*self._ticking, *self._leaving):
            task.cancel()

    async def scrape_last(self, *, within_s: float) -> None:
        """Scrape each a last time, after a scrape that is under way: its page may be handed out once. Then no more."""
        for target in self._targets:
            target.stop()
        await self.scrape_all(within_s=within_s)
        self.stop_schedule()

    async def scrape_all(self, *, within_s: float) -> None:
        """Scrape each now, at a tick that none of them has answered: the first such one, also if it is to come."""
        interval_ns = self._config.interval_ns
        begun_ns = self._config.now_ns()
        this_ns = begun_ns // interval_ns * interval_ns
        tick_ns = max([this_ns, *(target.last_tick_ns + interval_ns for target in self._targets)])
        async with asyncio.TaskGroup() as group:
            for target in self._targets:
                group.create_task(target.scrape(tick_ns, within_s=within_s))
        # Not beside the others: what the reply waits for them is error of the clock.
        left_s = max(_CLOCK_S, within_s - (self._config.now_ns() - begun_ns) / 1e9)
        for url in self._clocks:
            await self._read_clock(url, tick_ns, left_s / len(self._clocks))

    async def _read_clock(self, url: str, tick_ns: int, within_s: float) -> None:
        limits = self._config.limits
        limits = replace(limits, timeout_s=min(limits.timeout_s, within_s))
        self._timings.append(await self._config.scrape(url, tick_ns, limits, any_json=True))

    def counts(self) -> dict[str, int]:
        """Return the targets' numbers of scrapes by outcome, and of targets that do not answer."""
        return {
            "ok": sum(target.ok for target in self._targets),
            "failed": sum(target.failed for target in self._targets),
            "skipped": sum(target.skipped for target in self._targets),
            "stale": sum(target.stale for target in self._targets),
        }
