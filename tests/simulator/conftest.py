"""The simulated engine in virtual time, and its pages taken apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

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


@pytest.fixture(scope="session")
def samples_of() -> Callable[[bytes], dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Every sample of a page, by prometheus_client's own parser, without the labels that are the same everywhere."""
    return _samples_of


@pytest.fixture(scope="session")
def families_of() -> Callable[[str], dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]]:
    """Type, label names and bucket bounds of each family, as the page spells them."""
    return _families_of


_EVERYWHERE = {"engine", "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "pid", "rank"}


def _samples_of(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k not in _EVERYWHERE)): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def _families_of(page: str) -> dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    families = {}
    for name, kind in types.items():
        own = f"{name}_bucket" if kind == "histogram" else name
        labels = re.findall(rf"^{own}(?:\{{(.*)\}})? ", page, re.MULTILINE)
        names = {tuple(re.findall(r'(\w+)="', text)) for text in labels}
        bounds = dict.fromkeys(bound for text in labels for bound in re.findall(r'le="([^"]+)"', text))
        families[name] = (kind, max(names, default=()), tuple(bounds))
    return families
