"""Server-sent events for browsers: each is made once, and kept for those that come later or come back.

What they say is left to `exporter.html.live`, which takes long to import.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from time import monotonic

KEPT_S = 900.0
KEPT_BYTES = 16_000_000  # some 500,000 requests
EVENT_S, IDLE_S = 0.9, 15.0  # between events, while a browser is connected and while none is
MOST_BROWSERS = 16


class EventStream:
    """Owner of the events of the last KEPT_S, KEPT_BYTES at most, for browsers.

    A browser that reads too slowly misses what is dropped meanwhile, and keeps nothing else waiting.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, bytes]] = deque()
        self._first = self._size = 0  # the number of the first event that is kept; bytes
        self._dropped_s: float | None = None  # when the last of those was made that were too many
        self._state, self._states = b"", 0
        self._final: Callable[[], bytes] | None = None
        self._published_s: float | None = None
        self._browsers = 0
        self._news, self._gone = asyncio.Event(), asyncio.Event()

    @property
    def is_watched(self) -> bool:
        """Whether a browser is connected."""
        return self._browsers > 0

    @property
    def is_full(self) -> bool:
        """Whether no more browsers are taken."""
        return self._browsers >= MOST_BROWSERS

    @property
    def is_due(self) -> bool:
        """Whether it is time to publish: a browser that has just come is not kept waiting."""
        every_s = EVENT_S if self.is_watched else IDLE_S
        return self._published_s is None or monotonic() - self._published_s >= every_s

    @property
    def kept_s(self) -> float:
        """Return the age of the oldest events kept, s: KEPT_S, or less where they are too many."""
        return KEPT_S if self._dropped_s is None else min(KEPT_S, monotonic() - self._dropped_s)

    def publish(self, event: bytes, state: bytes) -> None:
        """Publish an event, which is kept, and the state; b"" for none. Only the last state is kept."""
        self._published_s = now_s = monotonic()
        if event:
            self._events.append((now_s, event))
            self._size += len(event)
        while self._events and (self._size > KEPT_BYTES or self._events[0][0] < now_s - KEPT_S):
            if self._size > KEPT_BYTES:
                self._dropped_s = self._events[0][0]
            self._first, self._size = self._first + 1, self._size - len(self._events.popleft()[1])
        if state:
            self._state, self._states = state, self._states + 1
        self._wake()

    def end(self, final: Callable[[], bytes]) -> None:
        """Publish the last event, which releases the browsers; it is made when one is there."""
        self._final = final
        self._wake()

    async def until_left(self, most_s: float) -> None:
        """Wait until no browser is connected. Ctrl-C ends the wait: the last event comes when all else is done."""
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(most_s):
                while self.is_watched:
                    self._gone.clear()
                    await self._gone.wait()

    async def events(self, last_id: str = "") -> AsyncGenerator[bytes]:
        """Yield the events for one browser: the last state, and the events after that with `last_id`, else all."""
        self._browsers += 1
        self._published_s = None
        at, states = int(last_id) + 1 if last_id.isdecimal() and len(last_id) < 16 else 0, 0
        try:
            while True:
                news = self._news
                if self._states > states:
                    states = self._states
                    yield self._state
                while (at := max(at, self._first)) < self._first + len(self._events):
                    at += 1
                    yield b"id: %d\n%b" % (at - 1, self._events[at - 1 - self._first][1])
                if self._final is not None:
                    yield self._final()
                    return
                await news.wait()
        finally:
            self._browsers -= 1
            self._gone.set()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
