"""The engine in real time: one task that runs its steps and hands each token to its reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from simulator.engine.history import EngineRequest, RequestRecord, StepOutcome, TokenOutput
from simulator.engine.scheduler import Engine


def anchored_clock() -> Callable[[], int]:
    """Return a clock of int64 ns since the Unix epoch that is monotonic: its distance to the epoch is taken once."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: time.monotonic_ns() + offset_ns


class EngineStoppedError(Exception):
    """The engine does not run any more, so no further token will come."""


class TokenStream:
    """The tokens of one request on their way to its reader, which may lag behind.

    It holds at most the request's max_tokens. `record` is the request's history, as soon as it has finished.
    """

    __slots__ = ("_arrival", "_closed", "_pending", "number", "record")

    def __init__(self, number: int) -> None:
        self.number = number
        self.record: RequestRecord | None = None
        self._pending: list[TokenOutput] = []
        self._closed = False
        self._arrival = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        self._pending.append(output)
        self._arrival.set()

    def close(self) -> None:
        self._closed = True
        self._arrival.set()

    async def take(self) -> list[TokenOutput]:
        """Wait for tokens and return all there are, at least one; the last one of a request has a finish_reason.

        Raises EngineStoppedError when the stream was closed and is empty.
        """
        await self._arrival.wait()
        if not self._pending:
            raise EngineStoppedError("the engine has stopped")
        if not self._closed:
            self._arrival.clear()
        taken, self._pending = self._pending, []
        return taken


class EngineDriver:
    """Own the engine's time: run it, feed it, deliver its tokens.

    `on_step` sees every outcome before any reader gets a token of it, `on_abort` every request that was aborted at
    once. With `late_aborts` a request without a reader goes on until an output shows that, as long as the engine runs.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], int],
        on_step: Callable[[StepOutcome], None],
        on_abort: Callable[[RequestRecord], None],
        late_aborts: bool = False,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_step = on_step
        self._on_abort = on_abort
        self._late_aborts = late_aborts
        self._streams: dict[int, TokenStream] = {}
        self._work = asyncio.Event()
        self._stopped = False

    def submit(self, request: EngineRequest, arrival_ns: int) -> TokenStream:
        """Hand a request to the engine and return the stream of its tokens.

        Raises EngineStoppedError when the engine does not run any more.
        """
        if self._stopped:
            raise EngineStoppedError("the engine has stopped")
        stream = TokenStream(self._engine.submit(request, arrival_ns, self._clock()))
        self._streams[stream.number] = stream
        self._work.set()
        return stream

    def abandon(self, stream: TokenStream) -> None:
        """Abort the request of a stream that has lost its reader; do nothing when it has finished."""
        self._streams.pop(stream.number, None)
        if self._late_aborts and not self._stopped:
            self._engine.abandon(stream.number)
        else:
            self._abort(stream.number)

    def _abort(self, number: int) -> None:
        record = self._engine.abort(number, self._clock())
        if record is not None:
            self._on_abort(record)

    async def run(self) -> NoReturn:
        """Run steps until cancelled; then, or if the engine fails, every stream is closed.

        A step ends when the event loop wakes up, which is up to a millisecond late (the resolution of epoll): the
        engine gets the actual time, so that its reports match what happened.
        """
        try:
            while True:
                await self._run_step()
        finally:
            self._stopped = True
            for number in self._engine.abandoned:
                self._abort(number)
            for stream in self._streams.values():
                stream.close()

    async def _run_step(self) -> None:
        begin_ns = self._clock()
        duration_s = self._engine.begin_step(begin_ns)
        if duration_s is None:
            self._work.clear()
            await self._work.wait()
            return
        await asyncio.sleep(duration_s - (self._clock() - begin_ns) / 1e9)
        outcome = self._engine.finish_step(self._clock())
        self._on_step(outcome)
        # A last token and its request's record stand in the same order.
        records = iter(outcome.finished)
        for output in outcome.tokens:
            record = None if output.finish_reason is None else next(records)
            stream = self._streams.get(output.number)
            if stream is None:
                continue
            if record is not None:
                stream.record = record
                del self._streams[output.number]
            stream.put(output)
