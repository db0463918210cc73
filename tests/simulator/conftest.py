"""The simulated engine in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from simulator.engine import Engine
from simulator.history import EngineRequest, RequestRecord, StepOutcome
from simulator.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of a list of arrivals: the engine after it, each step's outcome, and the most blocks ever in use."""

    engine: Engine
    outcomes: tuple[StepOutcome, ...]
    most_blocks: int

    @property
    def records(self) -> list[RequestRecord]:
        return [record for outcome in self.outcomes for record in outcome.finished]


@pytest.fixture(scope="session")
def play() -> Callable[[EngineSettings, Iterable[tuple[int, EngineRequest]]], Played]:
    """Plays (arrival_ns, request) pairs through an engine until all have finished, at the pace that it says."""
    return _play


def _play(limits: EngineSettings, arrivals: Iterable[tuple[int, EngineRequest]]) -> Played:
    engine = Engine(limits)
    to_come = sorted(arrivals, key=lambda arrival: arrival[0])
    outcomes: list[StepOutcome] = []
    now_ns = most_blocks = 0
    while True:
        while to_come and to_come[0][0] <= now_ns:
            at_ns, request = to_come.pop(0)
            engine.submit(request, at_ns)
        duration_s = engine.begin_step(now_ns)
        if duration_s is None:
            if not to_come:
                return Played(engine=engine, outcomes=tuple(outcomes), most_blocks=most_blocks)
            now_ns = to_come[0][0]
            continue
        most_blocks = max(most_blocks, engine.pool.used)
        now_ns += round(duration_s * 1e9)
        outcomes.append(engine.finish_step(now_ns))
