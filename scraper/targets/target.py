"""One target: when it is scraped, how scrapes back off after failures, and when it counts as stale.

Ticks are multiples of the interval on the Unix clock, shared by all targets. Each target is scraped at an offset
after the tick that its URL determines, so that many targets spread over the interval.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from dataclasses import dataclass, replace
from typing import Protocol

import aiohttp

from sidelight.rundir.access import Access, bare, masked
from sidelight.scraper.targets.fetch import FetchLimits, scrape
from sidelight.scraper.targets.scrape import Scrape

MOST_WAIT_NS = 30_000_000_000
MOST_WAIT_TICKS = 10
STALE_TICKS = 5
log = logging.getLogger(__name__)


class Say(Protocol):
    """Report an event, as `rundir.child.say` does."""

    def __call__(self, event: str, **data: object) -> None: ...


class Log(Protocol):
    """A log of scrapes; `append` returns why a page cannot be used, "" if it can."""

    def append(self, scrape: Scrape, /) -> str:
        """Write one scrape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeConfig:
    """Configuration of scrapes: interval and clock offset, client identity, limits, session, jitter seed.

    Interval and clock offset (monotonic to Unix) are in ns; the jitter is that after failures.
    """

    interval_ns: int = 0
    clock_offset_ns: int
    seed: int = 0
    access: Access
    limits: FetchLimits
    session: aiohttp.ClientSession

    def now_ns(self) -> int:
        """Return this moment in Unix ns."""
        return time.monotonic_ns() + self.clock_offset_ns

    async def scrape(self, url: str, tick_ns: int, limits: FetchLimits, *, any_json: bool = False) -> Scrape:
        """Fetch one page as `targets.fetch.scrape` does."""
        return await scrape(
            self.session,
            url,
            tick_ns=tick_ns,
            clock_offset_ns=self.clock_offset_ns,
            limits=limits,
            access=self.access,
            any_json=any_json,
        )


class ScrapeTarget:
    """One URL, scraped by one request at a time. `ok`, `failed` and `skipped` (ticks without a scrape) count; `defects`
    are those failed scrapes whose page our own code could not take.

    A target that has not answered for STALE_TICKS intervals is said to be stale, once, and fresh when it answers again.
    """

    def __init__(self, url: str, config: ScrapeConfig, *, log: Log, say: Say) -> None:
        self.ok = 0
        self.failed = 0
        self.skipped = 0
        self.defects = 0
        self.stale = False
        self.last_tick_ns = 0
        self.shown = masked(url)
        self._url, self._config, self._log, self._say = url, config, log, say
        self._stopping = self._leaving = False
        self._begun = asyncio.Event()
        self._busy = asyncio.Lock()
        self._offset_ns = offset_ns(bare(url), config.interval_ns)
        self._jitter = random.Random(f"{config.seed} {bare(url)}")
        self._failures = 0  # in a row
        self._answered_ns = config.now_ns()

    @property
    def is_busy(self) -> bool:
        """Return whether a scrape is under way."""
        return self._busy.locked()

    def stop(self) -> None:
        """Begin no more scrapes at ticks; one under way goes on."""
        self._stopping = True

    def leave(self) -> None:
        """Stop, and report no more whether the target answers."""
        self._stopping = self._leaving = True

    async def tick(self) -> None:
        """Scrape at every tick until stopped, and at fewer of them while the target fails.

        Begins when `scrape` has been done once. A tick that finds a scrape under way is skipped.
        """
        interval_ns = self._config.interval_ns
        await self._begun.wait()
        now_ns = self._config.now_ns() - self._offset_ns
        self.last_tick_ns = max(self.last_tick_ns, next_tick(now_ns, interval_ns) - interval_ns)
        while not self._stopping:
            due_ns = self.last_tick_ns + wait_ticks(self._failures, interval_ns, self._jitter) * interval_ns
            now_ns = self._config.now_ns()
            tick_ns = max(due_ns, next_tick(now_ns - self._offset_ns, interval_ns))
            self.skipped += (tick_ns - due_ns) // interval_ns
            await asyncio.sleep((tick_ns + self._offset_ns - now_ns) / 1e9)
            if self._stopping or tick_ns <= self.last_tick_ns:  # a scrape at a stated moment took this tick
                continue
            self.last_tick_ns = tick_ns
            if self._busy.locked():
                self.skipped += 1
                continue
            async with self._busy:
                await self._scrape(tick_ns, self._config.limits)

    async def scrape(self, tick_ns: int, *, within_s: float) -> None:
        """Scrape now, whatever failed before, after a scrape that may be under way; done in `within_s` seconds."""
        self.last_tick_ns = tick_ns
        asked_ns = self._config.now_ns()
        try:
            await asyncio.wait_for(self._busy.acquire(), within_s)
        except TimeoutError:
            error = "timeout: the scrape before was still under way"
            now_ns = self._config.now_ns()
            self._keep(Scrape(url=self.shown, tick_ns=tick_ns, request_ns=asked_ns, response_ns=now_ns, error=error))
            return
        try:
            left_s = within_s - (self._config.now_ns() - asked_ns) / 1e9
            limits = self._config.limits
            limits = replace(limits, timeout_s=max(0.001, min(limits.timeout_s, left_s)))
            await self._scrape(tick_ns, limits)
        finally:
            self._busy.release()
            self._begun.set()

    async def _scrape(self, tick_ns: int, limits: FetchLimits) -> None:
        """Fetch and keep one page. A page that our own code fails on is one failed scrape: the other targets, and the
        receiver of spans beside them, go on.
        """
        asked_ns = self._config.now_ns()
        try:
            self._keep(await self._config.scrape(self._url, tick_ns, limits))
        except OSError:  # of the log: what is scraped from now on would be lost
            raise
        except Exception as error:
            if not self.defects:
                log.exception("a page of %s cannot be read for a defect in Sidelight; scraping goes on", self.shown)
            self.defects += 1
            reason = f"defect: {type(error).__name__}"
            now_ns = self._config.now_ns()
            self._keep(Scrape(url=self.shown, tick_ns=tick_ns, request_ns=asked_ns, response_ns=now_ns, error=reason))

    def _keep(self, page: Scrape) -> None:
        error = self._log.append(page) or page.error
        if error:
            self.failed += 1
            self._failures += 1
        else:
            self.ok += 1
            self._failures = 0
            self._answered_ns = page.response_ns
        self._judge(error)

    def _judge(self, error: str) -> None:
        if self._leaving:
            return
        silent_s = (self._config.now_ns() - self._answered_ns) / 1e9
        if error and not self.stale and silent_s * 1e9 > STALE_TICKS * self._config.interval_ns:
            self.stale = True
            self._say("stale", url=self.shown, silent_s=round(silent_s, 3), reason=error)
        elif self.stale and not error:
            self.stale = False
            self._say("fresh", url=self.shown)


def next_tick(now_ns: int, interval_ns: int) -> int:
    """Return the first multiple of the interval after `now_ns` on the Unix clock: all targets share their ticks."""
    return (now_ns // interval_ns + 1) * interval_ns


def offset_ns(url: str, interval_ns: int) -> int:
    """Return a URL's delay after a tick, in [0, interval), the same in every process."""
    digest = hashlib.blake2b(url.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") * interval_ns >> 64


def wait_ticks(failures: int, interval_ns: int, jitter: random.Random) -> int:
    """Return the number of ticks to the next try after `failures` failures in a row.

    - None or one failed: the next tick.
    - Then twice as long each time, to at most 10 intervals and 30 s, but never less than one.
    - Of that, a random share between a half and the whole: targets that failed together do not return together.
    """
    if failures <= 1:
        return 1
    most_ticks = max(1, min(MOST_WAIT_TICKS, MOST_WAIT_NS // interval_ns))
    ticks = min(most_ticks, 1 << min(failures - 1, 8))
    return max(1, int(ticks * jitter.uniform(0.5, 1.0) + 0.5))
