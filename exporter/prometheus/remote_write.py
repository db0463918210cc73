"""`--prometheus-write`: the live page, every few seconds or after the fact, sent by Prometheus' remote write 1.0.

Samples bear the run's own time stamps, so that what comes twice changes nothing. Messages: `write_request`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Self

import aiohttp

from sidelight.exporter.prometheus.page import families
from sidelight.exporter.prometheus.snapshot import Exemplar, Snapshot
from sidelight.exporter.prometheus.write_request import by_step, encoded, samples_of, write_requests
from sidelight.rundir.access import Access, aiohttp_tls, bare, connection_problem, headers_for
from sidelight.scraper.spans.forward import Rejected, Unavailable, again_while_away

STEP_S = 5.0
PATIENCE_S = 10.0  # how long one request is tried
REPORT_EVERY_S = 5.0
STEPS_WAITING = 60  # of a server that is away: 5 minutes
_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
_REPLY_BYTES, _REASON_CHARACTERS = 4096, 200
# What a server says of samples that it takes no more: as Prometheus without an out-of-order window does after an hour,
_TOO_OLD = ("too old", "out of bounds")
# and of those that it has, or has newer ones of.
_THERE = ("out of order", "duplicate sample")


class _Late(Rejected):
    """The server takes samples of these moments no more; `is_too_old`, or it has them or newer ones."""

    def __init__(self, reason: str, *, is_too_old: bool) -> None:
        super().__init__(reason)
        self.is_too_old = is_too_old


class RemoteWriter:
    """Owner of the connection to a server, and counter of the samples taken; an async context manager.

    `samples` were taken, `there` the server had already, `too_old` it refused as such. `late` is its last answer about
    samples that were late, and `reason` why it was given no more, or "".
    """

    def __init__(self, url: str, access: Access) -> None:
        self.samples = self.there = self.too_old = 0
        self.late: Rejected | None = None
        self.reason = ""
        self._url, self._access = url, access
        self._shown: dict[Hashable, Exemplar] = {}

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableFile."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
            connector=aiohttp.TCPConnector(ssl=aiohttp_tls(self._access)),
            headers={**_HEADERS, **headers_for(self._access, self._url)},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def write(
        self,
        history: Iterable[tuple[int, Snapshot]],
        *,
        patience_s: float,
        on_away: Callable[[Unavailable], object] = lambda _: None,
        on_request: Callable[[], object] = lambda: None,
    ) -> None:
        """Send snapshots, each with its moment (int64 ns Unix, ascending).

        A server that is away, or asks for later (429, 5xx), is tried again for `patience_s`; samples that are late are
        counted and left out. Raises Rejected, and Unavailable as `again_while_away` does.
        """
        for request in write_requests(history, self._shown):
            deliver = partial(self._deliver, patience_s=patience_s, on_away=on_away)
            try:
                await deliver(request)
            except _Late:
                # Of the moments of one request only some may be late.
                for step in by_step(request):
                    try:
                        await deliver(step)
                    except _Late as late:
                        self.late = late
                        self.too_old += samples_of(step) if late.is_too_old else 0
                        self.there += 0 if late.is_too_old else samples_of(step)
            on_request()

    async def _deliver(self, request: Any, *, patience_s: float, on_away: Callable[[Unavailable], object]) -> None:
        await again_while_away(partial(self._send, encoded(request)), patience_s=patience_s, on_away=on_away)
        self.samples += samples_of(request)

    async def _send(self, body: bytes) -> None:
        """Send one request, once. Raises Unavailable, Rejected."""
        try:
            async with self._session.post(bare(self._url), data=body, allow_redirects=False) as response:
                status, reply = response.status, await response.content.read(_REPLY_BYTES)
                again = response.headers.get("Retry-After", "")
        except TimeoutError:
            raise Unavailable(f"no answer within {PATIENCE_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"connect: {connection_problem(error)}") from error
        text = " ".join(reply.decode(errors="replace").split())[:_REASON_CHARACTERS]
        reason = f"HTTP {status}{f': {text}' if text else ''}"
        if status == 429 or status >= 500:
            raise Unavailable(reason, again_s=float(again) if again.isdecimal() else 0.0)
        if status >= 300:
            raise _refusal(status, reason)


def _refusal(status: int, reason: str) -> Rejected:
    for words, is_too_old in ((_TOO_OLD, True), (_THERE, False)):
        if any(word in reason.lower() for word in words):
            return _Late(reason, is_too_old=is_too_old)
    if status in (404, 405):
        return Rejected(
            f"{reason}; start Prometheus with --web.enable-remote-write-receiver; its path is /api/v1/write"
        )
    return Rejected(reason)


async def write(
    history: Iterable[tuple[int, Snapshot]],
    url: str,
    access: Access,
    *,
    report: Callable[[str], None],
) -> RemoteWriter:
    """Send a run's history after the fact; one that refuses for another reason than age is given nothing more.

    `report` is called every few seconds with how many samples were taken. Raises UnusableFile.
    """
    loop = asyncio.get_running_loop()
    reported_s = loop.time()
    async with RemoteWriter(url, access) as writer:

        def tell() -> None:
            nonlocal reported_s
            if loop.time() - reported_s >= REPORT_EVERY_S:
                reported_s = loop.time()
                report(f"{writer.samples:,} samples sent")

        try:
            await writer.write(history, patience_s=PATIENCE_S, on_request=tell)
        except (Unavailable, Rejected) as error:
            writer.reason = str(error)
    return writer


class LiveWriter:
    """Owner of the snapshots that wait for a server, and the task that sends them; an async context manager.

    `say` is called once when the server stops taking them, and once when it goes on. `on_sending` is called with each
    moment before it is sent. `on_taken` is called with the last moment that it took, and with how many samples it took
    so far and were `lost`: those that had to make room for newer ones while it was away, and those that it refused.
    """

    def __init__(
        self,
        url: str,
        access: Access,
        *,
        say: Callable[[str], object],
        on_sending: Callable[[int], object] = lambda _: None,
        on_taken: Callable[[int, int, int], object] = lambda *_: None,
    ) -> None:
        self._writer = RemoteWriter(url, access)
        self._say, self._on_sending, self._on_taken = say, on_sending, on_taken
        self._waiting: deque[tuple[int, Snapshot]] = deque()
        self._filled, self._empty = asyncio.Event(), asyncio.Event()
        self._problem = ""
        self.lost = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open the connection and begin to send. Raises UnusableFile."""
        await self._stack.enter_async_context(self._writer)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Discard the snapshots that are not sent."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._stack.aclose()

    def offer(self, at_ns: int, snapshot: Snapshot) -> None:
        """Queue a snapshot; never waits. The oldest makes room for one that does not fit."""
        if len(self._waiting) == STEPS_WAITING:
            _, oldest = self._waiting.popleft()
            self.lost += _samples(oldest)
        self._waiting.append((at_ns, snapshot))
        self._empty.clear()
        self._filled.set()

    async def sent(self, most_s: float) -> None:
        """Wait until nothing is left to send, at most `most_s` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), most_s)

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._empty.set()
                self._filled.clear()
                await self._filled.wait()
            await self._send(*self._waiting.popleft())

    async def _send(self, at_ns: int, snapshot: Snapshot) -> None:
        before, self._writer.late = self._writer.samples, None
        self._on_sending(at_ns)
        try:
            await self._writer.write([(at_ns, snapshot)], patience_s=math.inf, on_away=self._note)
            refusal: Exception | None = self._writer.late
        except (Rejected, ValueError) as error:  # ValueError: it cannot be encoded
            refusal = error
        if refusal is not None:
            self._note(refusal)
        elif self._problem:
            self._say("takes the series again")
            self._problem = ""
        taken = self._writer.samples - before
        self.lost += max(0, _samples(snapshot) - taken)
        if taken:
            self._on_taken(at_ns, self._writer.samples, self.lost)

    def _note(self, problem: Exception) -> None:
        if not self._problem:
            self._say(f"does not take the series: {problem}; it is asked again")
        self._problem = str(problem)


def _samples(snapshot: Snapshot) -> int:
    return sum(len(family.samples) for family in families(snapshot))
