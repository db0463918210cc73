"""How right `sidelight predict` is: simulated engines of many kinds, each fitted to a minute at half of its capacity.

    PYTHONPATH=tests python benchmarks/prediction.py --worlds 200 --minutes 40

A world is an engine (seats 4 to 256, budget 256 to 8192, four speeds), a traffic (lengths, a shared prefix of 0 to
80 %) and KV blocks. Its run goes through the simulated engine, whose tokens are all that the twin gets, beside the
settings, or of each request its first and last token alone, as spans have them; other loads and settings are predicted,
and played on the true engine with fresh arrivals and requests.
Printed are the median error of the predicted median against that of the fresh runs, and how many of these each 90 %
interval holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

import numpy as np
from played_runs import NETWORK_S, arrivals, streamed
from played_twins import spanned

from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.stats import Missing
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings, SpeedProfile
from sidelight.simulator.virtual import SimulatedLoad, VirtualServer
from sidelight.twin.check import latencies_ms, quantiles_of
from sidelight.twin.engine.fit import EngineRequests
from sidelight.twin.engine.play import SEATS, EngineLoad, play
from sidelight.twin.engine.steps import StreamedRequests
from sidelight.twin.model import twin_of_engines
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict

BLOCK, FRESH, RUN_S, MOST_REQUESTS = 16, 9, 60.0, 3000
SPEEDS = {
    "demo": PROFILES["demo"],
    "fast": PROFILES["fast"],
    "gpu": SpeedProfile(step_s=12e-3, prefill_token_s=30e-6, sequence_s=50e-6, kv_token_s=0.02e-6, jitter_ratio=0.03),
    "slow": SpeedProfile(step_s=25e-3, prefill_token_s=400e-6, sequence_s=1e-3, kv_token_s=1e-6, jitter_ratio=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """An engine and its traffic: mean lengths, their variation, and the share of a prompt that all have in common."""

    number: int
    engine: EngineSettings
    prompt: float
    output: float
    variation: float
    shared: float

    def lengths(self, count: int, random: np.random.Generator) -> tuple[Ints, Ints]:
        """Return prompt and output tokens of requests."""
        sigma = float(np.sqrt(np.log1p(self.variation**2)))

        def drawn(mean: float) -> Ints:
            return np.maximum(2, random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)).astype(np.int64)

        return drawn(self.prompt), drawn(self.output)

    @property
    def prefix(self) -> int:
        return int(self.shared * self.prompt)

    def cached(self, prompts: Ints) -> Ints:
        """Return the tokens that a warm cache has of prompts: whole blocks of the prefix, but not the last token."""
        return np.minimum(self.prefix, prompts - 1) // BLOCK * BLOCK


def world(number: int) -> World:
    """Return a world by its number."""
    random = np.random.default_rng(number)
    budget = int(random.choice([256, 512, 1024, 2048, 4096, 8192]))
    seats = min(int(2 ** random.uniform(2, 8)), budget // 2)
    return World(
        number=number,
        engine=EngineSettings(
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            kv_blocks=200_000,
            max_model_len=100_000,
            eos_chance=0.0,
            seed=number,
            speed=SPEEDS[sorted(SPEEDS)[number % len(SPEEDS)]],
        ),
        prompt=float(random.choice([100, 400, 1500])),
        output=float(random.choice([40, 150, 400])),
        variation=float(random.uniform(0.2, 1.0)),
        shared=float(random.choice([0.0, random.uniform(0.0, 0.8)])),
    )


def load(of: World, random: np.random.Generator, at_s: Floats | None, count: int, concurrency: int = 1) -> EngineLoad:
    """Return fresh requests of a world."""
    prompts, outputs = of.lengths(count, random)
    return EngineLoad(
        prompt_tokens=prompts,
        cached_tokens=of.cached(prompts),
        output_tokens=outputs,
        arrival_s=at_s,
        concurrency=concurrency,
    )


def capacity(of: World) -> float:
    """Return the requests a second of an engine that is full, from the middle of a closed loop."""
    count = max(600, 6 * of.engine.max_num_seqs)
    full = load(of, np.random.default_rng([of.number, 1]), None, count, 2 * of.engine.max_num_seqs)
    ends_s = np.sort(play(full, of.engine).last_s)
    return 0.5 * count / float(ends_s[int(0.8 * count)] - ends_s[int(0.3 * count)])


def recorded(of: World, rate_per_s: float, duration_s: float) -> StreamedRequests:
    """Return a run on the simulated engine, with a warm cache, as its client saw it."""
    random = np.random.default_rng([of.number, 2])
    at_s = _within(rate_per_s, duration_s, of.number)
    prompts, outputs = of.lengths(len(at_s), random)
    server = VirtualServer(SimulatorSettings(engine_settings=of.engine), network_s=NETWORK_S, shown=False)
    shared = tuple(range(10, 10 + of.prefix))
    if shared:
        warm = EngineRequest(request_id="warm", prompt_token_ids=(*shared, 9), max_tokens=2)
        server.play(SimulatedLoad(requests=[warm]))
    requests = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=(*shared, *[10**6 + number] * prompt)[:prompt],
            max_tokens=output,
        )
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]
    offsets_ns = np.rint(at_s * 1e9).astype(np.int64).tolist()
    exchanges = server.play(SimulatedLoad(requests=requests, offsets_ns=offsets_ns)).exchanges
    cached = np.array([each.record.cached_tokens if each.record else 0 for each in exchanges])
    return replace(streamed(exchanges), cached_tokens=cached)


def fresh(of: World, scenario: Scenario, engine: EngineSettings, duration_s: float, seed: int) -> Floats:
    """Return the quantiles of a run of the true engine with other arrivals and requests [3, 3]."""
    at_s = _within(scenario.rate_per_s or 0.0, duration_s, 10**6 * (of.number + 1) + seed)
    whole = load(of, np.random.default_rng([of.number, 3, seed]), at_s + NETWORK_S, len(at_s))
    rows = []
    for replica in range(scenario.replicas):
        turns = slice(replica, None, scenario.replicas)
        part = EngineLoad(
            prompt_tokens=whole.prompt_tokens[turns],
            cached_tokens=whole.cached_tokens[turns],
            output_tokens=whole.output_tokens[turns],
            arrival_s=(at_s + NETWORK_S)[turns],
        )
        if len(part.prompt_tokens):
            rows.append(latencies_ms(part, play(part, engine, seed=seed), np.full(len(part.prompt_tokens), NETWORK_S)))
    return quantiles_of(np.concatenate(rows, axis=1))


def _within(rate_per_s: float, duration_s: float, seed: int) -> Floats:
    at_s = arrivals(int(rate_per_s * duration_s * 1.3) + 60, rate_per_s, seed)
    return at_s[at_s < duration_s]


def scenarios(of: World, most_per_s: float, blocks: int) -> Iterator[tuple[Scenario, EngineSettings]]:
    """Yield scenarios of a world with the engine that each is true of."""
    seats = of.engine.max_num_seqs
    for share in (0.3, 0.5, 0.7, 0.9, 1.3):
        yield Scenario(label=f"{share:g} of capacity", rate_per_s=share * most_per_s), of.engine
    for label, factor, rate in (("half the seats", 0.5, 0.5), ("twice the seats", 2.0, 0.9)):
        other = max(1, min(int(factor * seats), of.engine.max_num_batched_tokens))
        scenario = Scenario(label=label, rate_per_s=rate * most_per_s, settings={"max-num-seqs": other})
        yield scenario, replace(of.engine, max_num_seqs=other)
    yield Scenario(label="2 replicas at 1.4", rate_per_s=1.4 * most_per_s, replicas=2), of.engine
    if not of.prefix:
        scarce = Scenario(label="scarce blocks", rate_per_s=0.5 * most_per_s, settings={"kv-blocks": blocks})
        yield scarce, replace(of.engine, kv_blocks=blocks, max_model_len=BLOCK)


def scarce_blocks(requests: EngineRequests) -> int:
    """Return half of the blocks that a run had in use at its busiest, but enough for its longest request."""
    tokens = requests.prompt_tokens + requests.output_tokens
    order = np.argsort(np.concatenate([requests.first_s, requests.last_s]), kind="stable")
    held = np.cumsum(np.concatenate([tokens, -tokens])[order])
    return int(max(held.max() // (2 * BLOCK), 4 * tokens.max() // BLOCK + 8))


class Outcome(NamedTuple):
    """A prediction beside fresh runs of the true engine: its error and the share of them that it holds, [3, 3] each."""

    fitted_to: str
    label: str
    error: Floats
    held: Floats


def twin_of(of: World, requests: EngineRequests, duration_s: float) -> Twin | None:
    """Return the twin of a world's run, None where it is refused."""
    twin = twin_of_engines({"": requests}, {SEATS: of.engine.max_num_seqs})
    if isinstance(twin, Missing):
        return None
    return replace(twin, arrival=Arrival(kind="poisson", rate_per_s=1.0), duration_s=duration_s)


def outcomes(of: World) -> tuple[list[Outcome], list[str]]:
    """Return the outcomes of a world, and which fits are refused."""
    most_per_s = capacity(of)
    duration_s = min(RUN_S, MOST_REQUESTS / (0.5 * most_per_s))
    run = recorded(of, 0.5 * most_per_s, duration_s)
    twins = {"tokens": twin_of(of, run, duration_s), "spans": twin_of(of, spanned(run), duration_s)}
    rows = []
    for scenario, engine in scenarios(of, most_per_s, scarce_blocks(run)):
        predictions = {name: predict(twin, scenario) for name, twin in twins.items() if twin is not None}
        shown = np.array([fresh(of, scenario, engine, duration_s, seed) for seed in range(FRESH)] if predictions else 0)
        for name, prediction in predictions.items():
            if isinstance(prediction, Prediction):
                error = np.abs(np.log(prediction.median / np.median(shown, axis=0)))
                held = np.mean((shown >= prediction.low) & (shown <= prediction.high), axis=0)
                rows.append(Outcome(name, scenario.label, error, held))
    return rows, [name for name, twin in twins.items() if twin is None]


def main() -> None:
    """Print a row a scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first world")
    parser.add_argument("--minutes", type=float, default=np.inf, help="begin no world after these")
    asked = parser.parse_args()
    rows, refused, played = list[Outcome](), list[str](), 0
    end_s = monotonic() + 60 * asked.minutes
    for number in range(asked.first, asked.first + asked.worlds):
        if monotonic() < end_s:
            of_world, refusals = outcomes(world(number))
            rows, refused, played = rows + of_world, refused + refusals, played + 1
    for name in ("tokens", "spans"):
        print(f"{played} worlds by {name}, {refused.count(name)} refused; median error of TTFT, TPOT, E2E at p50, p90, "
              "p99 in %; held in %")  # fmt: skip
        for label in dict.fromkeys(row.label for row in rows):
            some = [row for row in rows if (row.fitted_to, row.label) == (name, label)]
            error = 100 * np.nanmedian([row.error for row in some], axis=0)
            held = 100 * np.nanmean([row.held for row in some], axis=0)
            shown_error = "  ".join(" ".join(f"{each:4.1f}" for each in row) for row in error)
            shown_held = "  ".join(" ".join(f"{each:3.0f}" for each in row) for row in held)
            print(f"{label:18}{len(some):4}   {shown_error}   | {shown_held}")


if __name__ == "__main__":
    main()
