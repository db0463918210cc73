"""The engine in real time: one task that runs its steps and hands each token to its reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from sidelight.rundir.clock import time_of_day_ns
from sidelight.simulator.engine.history import OUT_OF_MEMORY, EngineRequest, RequestRecord, StepOutcome, TokenOutput
from sidelight.simulator.engine.scheduler import SimulatedEngine

#: A longer pause of the process stays in the truth.
_MOST_CAUGHT_UP_NS = 10_000_000


def anchored_clock() -> Callable[[], int]:
    """Return a monotonic clock of int64 ns since the Unix epoch, its offset taken once."""
    offset_ns = time_of_day_ns() - time.monotonic_ns()
    return lambda: time.monotonic_ns() + offset_ns


class EngineStoppedError(Exception):
    """The engine does not run any more, so no further token will come."""


class TokenStream:
    """The tokens of one request on their way to its reader, which may lag behind.

    It holds at most the request's max_tokens. `record` is the request's history, as soon as it has finished. With a
    `hold`, tokens come in groups of its size, each its seconds after the last token and after the group before.
    """

    __slots__ = ("_arrival", "_closed", "_failure", "_hold", "_pending", "number", "record")

    def __init__(self, number: int, hold: tuple[int, float] | None = None) -> None:
        self.number = number
        self.record: RequestRecord | None = None
        self._hold = hold
        self._failure = "the engine has stopped"
        self._pending: list[TokenOutput] = []
        self._closed = False
        self._arrival = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        self._pending.append(output)
        self._arrival.set()

    def close(self, failure: str = "") -> None:
        self._closed = True
        self._failure = failure or self._failure
        self._arrival.set()

    async def take(self) -> list[TokenOutput]:
        """Wait for tokens and return all there are, at least one; the last one of a request has a finish_reason.

        Raises EngineStoppedError when the stream was closed and is empty.
        """
        tokens, hold_s = self._hold or (1, 0.0)
        while True:
            await self._arrival.wait()
            if self._closed or len(self._pending) >= tokens or self._pending[-1].finish_reason is not None:
                break
            self._arrival.clear()
        if self._hold and self._pending:
            await asyncio.sleep(hold_s)
        if not self._pending:
            raise EngineStoppedError(self._failure)
        at = tokens if self._hold else len(self._pending)
        taken, self._pending = self._pending[:at], self._pending[at:]
        if not self._pending and not self._closed:
            self._arrival.clear()
        return taken


class EngineDriver:
    """Driver of the engine in its own time: runs it, feeds it, delivers its tokens.

    `on_step` sees every outcome before any reader gets a token of it, `on_abort` every request that was aborted at
    once. With `late_aborts` a request without a reader goes on until an output shows that, as long as the engine runs.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
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
        self._due_ns = 0  # when the last step was to end

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; false, and nothing forgotten, while a request holds blocks."""
        return self._engine.reset_prefix_cache()

    def submit(self, request: EngineRequest, arrival_ns: int, hold: tuple[int, float] | None = None) -> TokenStream:
        """Submit a request to the engine and return its token stream, held back by `hold`.

        Raises EngineStoppedError when the engine does not run any more.
        """
        if self._stopped:
            raise EngineStoppedError("the engine has stopped")
        stream = TokenStream(self._engine.submit(request, arrival_ns, self._clock()), hold)
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

        A step ends when the event loop wakes up, which is up to a millisecond late (the resolution of epoll), and later
        on a busy machine: the engine gets the actual time, so that its reports match what happened. The next step is
        shorter by as much, so that in the mean steps take what the engine says.
        """
        self._due_ns = self._clock()
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
            self._due_ns = self._clock()
            return
        self._due_ns = max(self._due_ns, begin_ns - _MOST_CAUGHT_UP_NS) + round(duration_s * 1e9)
        await asyncio.sleep((self._due_ns - self._clock()) / 1e9)
        outcome = self._engine.finish_step(self._clock())
        self._on_step(outcome)
        for number, lost in outcome.lost:
            self._on_abort(lost)
            if (stream := self._streams.pop(number, None)) is not None:
                stream.close(OUT_OF_MEMORY)
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
