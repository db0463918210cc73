"""A disk without room: the scraper goes on, counts what it could not keep, and keeps again when there is room."""

from __future__ import annotations

import time

from scraper.targets.scrape import Scrape
from scraper.targets.target import Log, Say

_SAY_EVERY_S = 1.0


class Unwritten:
    """Counts the scrapes and readings of hardware that could not be written.

    Says `unwritten`, once a second at most, and `written` when scrapes are kept again.
    """

    def __init__(self, say: Say) -> None:
        self.count = 0
        self._say = say
        self._said_s: float | None = None  # since scrapes are kept

    def add(self, error: OSError) -> None:
        """Count one more."""
        self.count += 1
        now_s = time.monotonic()
        if self._said_s is None or now_s >= self._said_s + _SAY_EVERY_S:
            self._said_s = now_s
            self._say("unwritten", count=self.count, reason=error.strerror or str(error))

    def end(self) -> None:
        """Note that there is room."""
        if self._said_s is not None:
            self._said_s = None
            self._say("written", count=self.count)


class PatientLog:
    """A log that may fail to keep a scrape; `written` counts those that it has."""

    def __init__(self, log: Log, unwritten: Unwritten) -> None:
        self.written = 0
        self._log, self._unwritten = log, unwritten

    def append(self, scrape: Scrape) -> str:
        """Keep a scrape, or count it; return why its page cannot be used, as far as that is known."""
        try:
            error = self._log.append(scrape)
        except OSError as full:
            self._unwritten.add(full)
            return scrape.error
        self.written += 1
        self._unwritten.end()
        return error
