"""Runs of the simulated engine in virtual time, for estimates from scrapes: pages, client stamps and the truth.

Arrivals are Poisson, prompts log-normal, outputs uniform in length; the way in and out takes a fixed time and an
exponential one. Nothing waits for a clock, so that ten minutes take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from recordings import Case, log_of

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import build
from sidelight.scraper.targets.scrape import Scrape
from sidelight.simulator.engine.history import EngineRequest, RequestRecord, StepOutcome
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import EngineSettings, SpeedProfile
from sidelight.simulator.telemetry.pages.vllm import VllmPage

Ints = npt.NDArray[np.int64]

START_NS = 1_800_000_000_000_000_000
SPEED = SpeedProfile(step_s=11e-3, prefill_token_s=60e-6, sequence_s=300e-6, kv_token_s=0.2e-6, jitter_ratio=0.15)
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the engines: `utilisation` of one engine's capacity, each, and how often they are scraped.

    `capacity_per_s` is the requests a second that one engine of this `speed` serves. `budget_tokens` is the token
    budget of a step: a small one cuts prefills into chunks. Half of the prompts begin with the same `prefix_tokens`,
    which the engine caches and whose usage does not say so. Of the packets, `spikes` come ten times as late.
    """

    utilisation: float
    seconds: float
    scrape_s: float
    engines: int = 1
    budget_tokens: int = 2048
    network_s: float = 0.001
    spikes: float = 0.0
    prefix_tokens: int = 0
    seed: int = 1
    speed: SpeedProfile = SPEED
    capacity_per_s: float = 25.5


def _chunking(
    requests: int, budget_tokens: int, utilisation: float, speed: SpeedProfile, capacity_per_s: float
) -> Load:
    return Load(
        utilisation=utilisation,
        seconds=requests / (utilisation * capacity_per_s),
        scrape_s=0.2,
        budget_tokens=budget_tokens,
        speed=speed,
        capacity_per_s=capacity_per_s,
    )


_MIDDLE = SpeedProfile(step_s=4e-3, prefill_token_s=400e-6, sequence_s=500e-6, kv_token_s=2e-6, jitter_ratio=0.3)
_SLOW = SpeedProfile(step_s=20e-3, prefill_token_s=1e-3, sequence_s=1e-3, kv_token_s=2e-6, jitter_ratio=0.2)
#: Loads whose prefills are chunked, from some tens of requests to some hundreds, on fast and slow engines.
CHUNKED = {
    "fast, 64 a step": _chunking(200, 64, 0.47, SPEED, 25.5),
    "fast, 256 a step": _chunking(300, 256, 0.9, SPEED, 25.5),
    "middle, 128 a step": _chunking(80, 128, 0.6, _MIDDLE, 12.0),
    "middle, 256 a step": _chunking(150, 256, 1.0, _MIDDLE, 12.0),
    "slow, 64 a step": _chunking(45, 64, 0.8, _SLOW, 4.0),
    "slow, 256 a step": _chunking(120, 256, 0.5, _SLOW, 4.0),
    "slow, 256 a step, full": _chunking(100, 256, 1.1, replace(_SLOW, jitter_ratio=0.4), 4.0),
    "middle, 256 a step, long": _chunking(400, 256, 0.7, _MIDDLE, 12.0),
}


@dataclass(slots=True)
class _Run:
    """What one engine's run leaves; the only record here that changes."""

    chunk_ns: dict[int, list[int]] = field(default_factory=dict)
    records: dict[int, RequestRecord] = field(default_factory=dict)
    pages: list[Scrape] = field(default_factory=list)


def simulated(name: str, load: Load) -> Case:
    """Run the engines under a load and gather what client and scraper saw."""
    seeds = np.random.SeedSequence(load.seed).spawn(2 + load.engines)
    random = np.random.default_rng(seeds[0])
    size = int(load.utilisation * load.capacity_per_s * load.engines * load.seconds)
    submit_ns = START_NS + np.sort(random.uniform(0, load.seconds * 1e9, size)).astype(np.int64)
    prompt = np.clip(random.lognormal(np.log(130), 0.9, size), 8, 2000).astype(np.int64)
    prefix = np.where(random.random(size) < 0.5, load.prefix_tokens, 0)
    output = random.integers(16, 80, size)
    engine = random.integers(0, load.engines, size)
    way_in = _way(random, size, load)
    runs = []
    for place in range(load.engines):
        routed = np.flatnonzero(engine == place)
        order = routed[np.argsort(submit_ns[routed] + way_in[routed], kind="stable")]
        settings = EngineSettings(
            max_num_seqs=48,
            max_num_batched_tokens=load.budget_tokens,
            kv_blocks=16384,
            seed=load.seed + place,
            speed=load.speed,
        )
        arrivals = [
            (
                int(submit_ns[i] + way_in[i]),
                int(i),
                _request(int(i), int(prefix[i]), int(prompt[i]), int(output[i])),
            )
            for i in order
        ]
        run = _Run()
        _drive(run, f"http://engine-{place}.test/metrics", settings, arrivals, load)
        runs.append(run)
    merged = {number: record for run in runs for number, record in run.records.items()}
    records = [merged[number] for number in range(size)]
    moments = [(record.queued_ns, record.scheduled_ns, record.first_token_ns) for record in records]
    queued_ns, scheduled_ns, first_token_ns = np.array(moments, dtype=np.int64).T
    return Case(
        name=name,
        requests=_seen(runs, records, submit_ns, np.random.default_rng(seeds[1]), load),
        scrapes=build(rows(page for run in runs for page in run.pages)),
        queue_s=(scheduled_ns - queued_ns) / 1e9,
        prefill_s=(first_token_ns - scheduled_ns) / 1e9,
    )


def _request(number: int, prefix: int, prompt: int, output: int) -> EngineRequest:
    # Behind the prefix no two prompts share a block, so that nothing else is cached.
    suffix = ((number * 7919 + np.arange(prompt) * (number % 97 + 1)) % 2000).tolist()
    return EngineRequest(
        request_id=str(number), prompt_token_ids=(*range(1, prefix + 1), *suffix), max_tokens=output, ignore_eos=True
    )


def _way(random: np.random.Generator, size: int, load: Load) -> Ints:
    late = np.where(random.random(size) < load.spikes, 10.0, 1.0)
    return np.asarray(load.network_s * 1e9 * late * (0.5 + random.exponential(0.5, size))).astype(np.int64)


def _drive(
    run: _Run,
    url: str,
    settings: EngineSettings,
    arrivals: Sequence[tuple[int, int, EngineRequest]],
    load: Load,
) -> None:
    """Run one engine to its end, a page at each scrape."""
    engine, page = SimulatedEngine(settings), VllmPage("sim", settings)
    numbers: list[int] = []
    now_ns, tick_ns, upto = START_NS - 10**9, START_NS - 10**9, 0
    interval_ns = int(load.scrape_s * 1e9)

    def scrape_until(at_ns: int) -> None:
        nonlocal tick_ns
        while tick_ns < at_ns:
            run.pages.append(_scraped(url, tick_ns, page))
            tick_ns += interval_ns

    while upto < len(arrivals) or len(run.records) < len(arrivals):
        while upto < len(arrivals) and arrivals[upto][0] <= now_ns:
            arrival_ns, number, request = arrivals[upto]
            engine.submit(request, arrival_ns)
            numbers.append(number)
            upto += 1
        duration_s = engine.begin_step(now_ns)
        if duration_s is None:
            now_ns = arrivals[upto][0]
            continue
        now_ns += int(duration_s * 1e9)
        scrape_until(now_ns)
        outcome = engine.finish_step(now_ns)
        page.observe(outcome)
        _keep(run, outcome, numbers)
    scrape_until(now_ns + int(SETTLE_S * 1e9))


def _keep(run: _Run, outcome: StepOutcome, numbers: Sequence[int]) -> None:
    for token in outcome.tokens:
        run.chunk_ns.setdefault(numbers[token.number], []).append(outcome.at_ns)
    for record in outcome.finished:
        run.records[int(record.request_id)] = record


def _scraped(url: str, tick_ns: int, page: VllmPage) -> Scrape:
    body, content_type = page.page()
    return Scrape(
        url=url,
        tick_ns=tick_ns,
        request_ns=tick_ns - 1_000_000,
        response_ns=tick_ns + 1_000_000,
        status=200,
        content_type=content_type,
        body=body,
        error="",
    )


def _seen(
    runs: Sequence[_Run], records: Sequence[RequestRecord], submit_ns: Ints, random: np.random.Generator, load: Load
) -> RequestLog:
    """Return what the client saw: every chunk after its way out, in the order in which a stream keeps them."""
    size = len(submit_ns)
    sent_ns = {number: chunks for run in runs for number, chunks in run.chunk_ns.items()}
    chunks = [np.array(sent_ns[number], dtype=np.int64) for number in range(size)]
    chunks = [np.maximum.accumulate(stream + _way(random, len(stream), load)) for stream in chunks]
    first_ns = np.array([stream[0] for stream in chunks])
    return log_of(
        size,
        submit_ns=submit_ns,
        first_output_ns=first_ns,
        first_token_ns=first_ns,
        end_ns=np.array([stream[-1] for stream in chunks]) + 100_000,
        input_tokens=np.array([record.prompt_tokens for record in records]),
        output_tokens=np.array([record.output_tokens for record in records]),
        status="ok",
        finish_reason="length",
        endpoint_url="http://gateway.test/v1",
        chunk_ns=np.concatenate(chunks),
        chunk_start=np.concatenate([[0], np.cumsum([len(stream) for stream in chunks])]),
    )
