"""Time that passes only when all tasks wait, and a loop that lives in it.

`looptime` moves a loop's own time alone. Here all who ask for the time, by whichever clock, get the same virtual one,
so that stamps, time-outs and ages agree; and nothing waits for a socket, a thread or a process of this machine.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

S = 10**9
EPOCH_NS = 1_700_000_000 * S  # of the virtual wall clock, far from that of this machine
BOOT_NS = 5_000 * S
_TICK_NS = 1_000_000  # how far a look at the performance counter may move it: slices of work come to their ends
cpu_s = time.process_time


class DeadlockError(Exception):
    """Nothing can happen any more, and something is still waited for."""


class Watched(Protocol):
    """What a loop tells its reader that something is to be read."""

    def watch(self, callback: Callable[[], object] | None) -> None: ...


class Time:
    """The virtual clocks. The wall clock may be set; the monotonic one goes on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.now_ns, self.ahead_ns, self._counted_ns = BOOT_NS, 0, 0

    def wall_ns(self) -> int:
        return EPOCH_NS - BOOT_NS + self.now_ns + self.ahead_ns

    def counter_ns(self) -> int:
        self._counted_ns += _TICK_NS
        return self.now_ns + self._counted_ns

    def install(self) -> None:
        """Be the time of this process. To be called before modules are imported that keep its functions."""
        time.monotonic_ns = lambda: self.now_ns
        time.monotonic = lambda: self.now_ns / 1e9
        time.time_ns = self.wall_ns
        time.time = lambda: self.wall_ns() / 1e9
        time.perf_counter_ns = self.counter_ns
        time.perf_counter = lambda: self.counter_ns() / 1e9


class Task(asyncio.Task[Any]):
    """A task that stands in sets at the same place in every process: where several are cancelled, in this order."""

    _numbers = itertools.count()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._number = next(self._numbers)
        self.owner: Any = None  # the process that it is of
        super().__init__(*arguments, **named)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose selector waits for nothing: where all wait, the next timer is due at once.

    What is done in a thread is done at one moment, some time after it was asked for, as `rng` says.
    """

    def __init__(self, clock: Time, rng: random.Random) -> None:
        super().__init__()
        self._clock, self._rng = clock, rng
        self._clock_resolution = 1e-9
        self._selector = self
        self.signals: dict[int, Callable[[], object]] = {}
        self.trouble: list[str] = []
        self.started: Callable[[Task], object] = lambda _: None
        self.is_ghost: Callable[[Any], bool] = lambda _: False
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._clock.now_ns / 1e9

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass up to the next timer."""
        if timeout is None:
            raise DeadlockError("all wait, and no timer is set")
        self._clock.now_ns += math.ceil(timeout * 1e9)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **named: Any) -> Task:
        task = Task(coroutine, loop=loop, **named)
        self.started(task)
        return task

    def _note(self, _: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        if not self.is_ghost(about.get("task") or about.get("future")):
            self.trouble.append(f"{about.get('message')}: {about.get('exception')!r}")

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ARG002
        """Do it later, whether or not it is still waited for then."""
        result = self.create_future()
        context = contextvars.copy_context()

        def deliver(set_result: Callable[[Any], None], value: Any) -> None:
            if not result.done():
                set_result(value)

        def run() -> None:
            try:
                value = work(*arguments)
            except BaseException as error:  # noqa: BLE001  as a thread hands it over
                self._soon(deliver, result.set_exception, error, context=context)
            else:
                self._soon(deliver, result.set_result, value, context=context)

        self._soon(run, context=context)
        return result

    def _soon(self, call: Callable[..., Any], *arguments: Any, context: contextvars.Context) -> None:
        delay_s = 0.0 if self._rng.random() < 0.9 else self._rng.expovariate(20.0)
        self.call_later(delay_s, call, *arguments, context=context)

    def add_reader(self, source: Watched, callback: Callable[..., Any], *arguments: Any) -> None:
        source.watch(lambda: callback(*arguments))

    def remove_reader(self, source: Watched) -> None:
        source.watch(None)

    def add_signal_handler(self, number: int, callback: Callable[..., Any], *arguments: Any) -> None:
        self.signals[number] = lambda: callback(*arguments)

    def remove_signal_handler(self, number: int) -> bool:
        return self.signals.pop(number, None) is not None
