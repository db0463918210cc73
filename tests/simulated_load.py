"""Arrivals at a small simulated engine that has to chunk, to find prefixes and to preempt; its pages taken apart."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientSession
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sidelight.simulator.engine.history import EngineRequest, RequestRecord, StepOutcome
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.server import running
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog
from sidelight.simulator.virtual import SimulatedLoad, VirtualServer

LIMITS = EngineSettings(
    max_num_seqs=4, max_num_batched_tokens=24, kv_blocks=20, block_size=4, max_model_len=64, speed=PROFILES["fast"]
)


def ask(name: object, length: int, max_tokens: int, *, token: int = 256) -> EngineRequest:
    return EngineRequest(request_id=f"cmpl-{name}", prompt_token_ids=(token,) * length, max_tokens=max_tokens)


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 200_000_000), st.integers(256, 258), st.integers(1, 40), st.integers(1, 24)),
    min_size=1,
    max_size=12,
).map(
    lambda drawn: [
        (at, ask(number, length, max_tokens, token=token))
        for number, (at, token, length, max_tokens) in enumerate(drawn)
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of a list of arrivals: the engine after it, and each step's outcome."""

    engine: SimulatedEngine
    outcomes: tuple[StepOutcome, ...]

    @property
    def records(self) -> list[RequestRecord]:
        return [record for outcome in self.outcomes for record in outcome.finished]


def play(limits: EngineSettings, arrivals: Iterable[tuple[int, EngineRequest]], *, keep_steps: bool = False) -> Played:
    """Play (arrival_ns, request) pairs through an engine until all have finished, at the pace that it says."""
    server = VirtualServer(SimulatorSettings(engine_settings=limits), shown=False, start_ns=0, keep_steps=keep_steps)
    in_order = sorted(arrivals, key=lambda arrival: arrival[0])
    load = SimulatedLoad(requests=[request for _, request in in_order], offsets_ns=[at_ns for at_ns, _ in in_order])
    return Played(engine=server.engine, outcomes=tuple(server.play(load, keep_steps=True).steps))


_EVERYWHERE = {"engine", "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "pid", "rank"}


def samples_of(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of a page, by prometheus_client's own parser, without labels that are the same everywhere."""
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k not in _EVERYWHERE)): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def families_of(page: str) -> dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return type, label names and bucket bounds of each family, as the page spells them."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    families = {}
    for name, kind in types.items():
        sample = f"{name}_bucket" if kind == "histogram" else name
        labels = re.findall(rf"^{sample}(?:\{{(.*)\}})? ", page, re.MULTILINE)
        names = {tuple(re.findall(r'(\w+)="', text)) for text in labels}
        bounds = dict.fromkeys(bound for text in labels for bound in re.findall(r'le="([^"]+)"', text))
        families[name] = (kind, max(names, default=()), tuple(bounds))
    return families


@asynccontextmanager
async def client_of(settings: SimulatorSettings, *, truth: TruthLog | None = None) -> AsyncIterator[ClientSession]:
    """Run a simulator for as long as the block lasts, and give a client of it."""
    async with running(settings, truth=truth) as url, ClientSession(url) as client:
        yield client
