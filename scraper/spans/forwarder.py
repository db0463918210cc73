"""Forwarding of exports to another OTLP collector, for a receiver in an existing pipeline.

What is passed on is what came, byte for byte. An unavailable collector is tried again at growing intervals, while
exports wait in a bounded queue in memory; what does not fit there is dropped and counted, and nothing else waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

from sidelight.rundir.access import Access, masked
from sidelight.rundir.framing import inflate
from sidelight.scraper.spans.forward import CollectorConnection, Rejected, Unavailable
from sidelight.scraper.spans.log import BODY_BYTES, ForwardQueue
from sidelight.scraper.spans.spec import SIGNALS, TRACES

QUEUE_BYTES = 32 * 1024 * 1024  # of exports as they are packed, to about a fifth
FLUSH_S = 2.0


class Forwarder:
    """Sender of exports to the next collector, with a bounded queue in memory.

    Owns the queue and the connection; an async context manager.

    Exports go out in the order of their signal, and no signal waits for another. Beyond `queue_bytes` of them, packed,
    the oldest of the signal that takes most are dropped; so is what waits at the end.
    """

    def __init__(self, url: str, access: Access, *, say: Callable[[str], None], queue_bytes: int = QUEUE_BYTES) -> None:
        """Read the URL. Raises ValueError for one that Wire cannot use."""
        self.sent: Counter[str] = Counter()  # exports by signal
        self.dropped: Counter[str] = Counter()
        self._url, self._say, self._most_bytes = url, say, queue_bytes
        self._wire = CollectorConnection(url, access)
        self._queues: dict[str, asyncio.Queue[bytes]] = {signal: asyncio.Queue() for signal in SIGNALS}
        self._exports: Counter[str] = Counter()  # those that wait, and the one of each signal that is on its way
        self._sizes: Counter[str] = Counter()  # bytes of them
        self._away: set[str] = set()  # signals that the collector did not take last
        self._said: set[str] = set()

    async def __aenter__(self) -> Self:
        """Open the connection, and begin to send. Raises what Wire does."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._wire)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._tasks = [group.create_task(self._send_on(signal)) for signal in SIGNALS]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send the queued exports within FLUSH_S seconds; the rest is dropped."""
        try:
            async with asyncio.timeout(FLUSH_S):
                for queue in self._queues.values():
                    await queue.join()
        except TimeoutError:
            self._say(f"{self.queue.exports} exports did not reach {masked(self._url)}, and are dropped")
        finally:
            for task in self._tasks:
                task.cancel()
            await self._stack.aclose()
            self.dropped += self._exports
            self._exports.clear()
            self._sizes.clear()

    @property
    def queue(self) -> ForwardQueue:
        """Return the state of the queue."""
        return ForwardQueue(exports=self._exports.total(), size_bytes=self._sizes.total(), limit_bytes=self._most_bytes)

    def offer(self, packed: bytes, signal: str) -> None:
        """Queue an export, as `log.compressed` packs it; where it is too much, the oldest are dropped and counted."""
        self._queues[signal].put_nowait(packed)
        self._exports[signal] += 1
        self._sizes[signal] += len(packed)
        while self._sizes.total() > self._most_bytes:
            largest = max((name for name, queue in self._queues.items() if queue.qsize()), key=self._sizes.__getitem__)
            self._leave(largest, self._queues[largest].get_nowait(), self.dropped)
            self._say_once("full", f"more waits for {masked(self._url)} than is kept in memory: the oldest are dropped")

    async def _send_on(self, signal: str) -> None:
        what = "spans" if signal == TRACES else signal

        def note_away(away: Unavailable) -> None:
            if signal not in self._away:
                self._away.add(signal)
                self._say(f"{what} cannot be forwarded to {masked(self._url)}: {away}")

        while True:
            packed = await self._queues[signal].get()
            body = inflate(packed, BODY_BYTES)
            try:
                await self._wire.deliver(body, signal, on_away=note_away)
            except Rejected as refused:
                self._leave(signal, packed, self.dropped)
                self._say_once(signal, f"{masked(self._url)} refuses {what}: {refused}")
                continue
            self._leave(signal, packed, self.sent)
            if signal in self._away:
                self._away.remove(signal)
                self._say(f"{what} are forwarded to {masked(self._url)} again")

    def _leave(self, signal: str, packed: bytes, counts: Counter[str]) -> None:
        """Count an export that waits no more."""
        counts[signal] += 1
        self._exports[signal] -= 1
        self._sizes[signal] -= len(packed)
        self._queues[signal].task_done()

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)
