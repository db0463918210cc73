"""Twins of runs of an engine whose speed is known, and what that engine shows under other loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from played_runs import NETWORK_S, arrivals, engine

from sidelight.correlator.breakdown import break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.table import unjoined
from sidelight.correlator.live.breakdown import EndedRequests
from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.loadgen.requests.table.log import unknown_requests
from sidelight.rundir.columns import Floats, Ints, same_text
from sidelight.simulator.settings import EngineSettings, SpeedProfile
from sidelight.twin.check import Misfit, engine_of, latencies_ms, misfit, quantiles_of
from sidelight.twin.engine.fit import EngineFit, EngineRequests, fit
from sidelight.twin.engine.play import EngineLoad, play
from sidelight.twin.engine.spans import SpannedRequests
from sidelight.twin.engine.steps import StreamedRequests
from sidelight.twin.scenario import Twin

GPU = SpeedProfile(step_s=12e-3, prefill_token_s=30e-6, sequence_s=50e-6, kv_token_s=0.05e-6, jitter_ratio=0.03)
POISSON = Arrival(kind="poisson", rate_per_s=1.0)


def longer(factor: float) -> SpeedProfile:
    """Return the speed of an engine whose steps take so many times as long as GPU's, whatever is in them."""
    return SpeedProfile(
        step_s=factor * GPU.step_s,
        prefill_token_s=factor * GPU.prefill_token_s,
        sequence_s=factor * GPU.sequence_s,
        kv_token_s=factor * GPU.kv_token_s,
        jitter_ratio=GPU.jitter_ratio,
    )


def slowing(
    at_s: Floats,
    prompts: Ints,
    outputs: Ints,
    *,
    changed_s: float,
    slower: float,
    seats: int,
    seed: int | None = None,
    cached: Ints | None = None,
) -> SpannedRequests:
    """Return the requests of an engine whose steps take so many times as long from a moment on."""
    first_s, last_s = np.empty(len(at_s)), np.empty(len(at_s))
    cached = np.zeros(len(at_s), np.int64) if cached is None else cached
    for rows, factor in ((at_s < changed_s, 1.0), (at_s >= changed_s, slower)):
        load = EngineLoad(
            prompt_tokens=prompts[rows],
            cached_tokens=cached[rows],
            output_tokens=outputs[rows],
            arrival_s=at_s[rows] + NETWORK_S,
        )
        times = play(load, engine(max_num_seqs=seats, speed=longer(factor)), seed=seed)
        first_s[rows], last_s[rows] = times.first_s + NETWORK_S, times.last_s + NETWORK_S
    return SpannedRequests(
        submit_s=at_s,
        prompt_tokens=prompts,
        cached_tokens=cached,
        output_tokens=outputs,
        first_s=first_s,
        last_s=last_s,
        served_by=same_text("", len(at_s)),
    )


def ended(requests: SpannedRequests) -> EndedRequests:
    """Return requests as a watch has them when they end; their times are s Unix."""
    count = len(requests)
    log = replace(
        unknown_requests(count),
        status=same_text("ok", count),
        submit_ns=_ns(requests.submit_s),
        first_token_ns=_ns(requests.first_s),
        end_ns=_ns(requests.last_s),
        input_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
        output_tokens=requests.output_tokens,
    )
    unknown = nothing(count, "")
    parts = replace(break_down(log, unjoined(count), unknown), engine=requests.served_by)
    return EndedRequests(requests=log, attribution=unknown, parts=parts, whole=parts, reason=same_text("", count))


def _ns(at_s: Floats) -> Ints:
    return np.rint(1e9 * at_s).astype(np.int64)


def fitted(requests: EngineRequests, **known: int) -> EngineFit:
    shown_fit = fit(requests, **known)
    assert isinstance(shown_fit, EngineFit)
    return shown_fit


def spanned(requests: StreamedRequests) -> SpannedRequests:
    """Return requests without the stamps between their first and last tokens."""
    return SpannedRequests(
        submit_s=requests.submit_s,
        prompt_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
        output_tokens=requests.output_tokens,
        first_s=requests.first_s,
        last_s=requests.last_s,
        served_by=same_text("", len(requests)),
    )


def twin_of(
    requests: EngineRequests, *, seats: int | None = 16, budget: int | None = None, arrival: Arrival | None = POISSON
) -> Twin:
    shown_fit = fit(requests, seats=seats, budget=budget)
    assert isinstance(shown_fit, EngineFit)
    missed = misfit(requests, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Misfit)
    return Twin(
        requests=requests,
        fitted=shown_fit,
        engine=engine_of(shown_fit),
        missed=missed,
        traffic=requests,
        arrival=arrival,
        duration_s=float(requests.submit_s[-1]),
    )


def truth(twin: Twin, engines: Sequence[EngineSettings], rate_per_s: float) -> Floats:
    """Return quantiles of runs as long as the twin's, of requests like its own, the median of nine [3, 3].

    The requests go to engines of these settings in turn.
    """
    count = round(rate_per_s * twin.duration_s)
    runs = []
    for seed in range(100, 109):
        drawn = np.random.default_rng(seed).integers(0, len(twin.requests), count)
        prompts, outputs = twin.requests.prompt_tokens[drawn], twin.requests.output_tokens[drawn]
        at_s = arrivals(count, rate_per_s, seed)
        rows = []
        for turn, settings in enumerate(engines):
            turns = slice(turn, None, len(engines))
            load = EngineLoad(
                prompt_tokens=prompts[turns],
                cached_tokens=np.zeros_like(prompts[turns]),
                output_tokens=outputs[turns],
                arrival_s=at_s[turns] + NETWORK_S,
            )
            rows.append(latencies_ms(load, play(load, settings, seed=seed), np.full(len(prompts[turns]), NETWORK_S)))
        runs.append(quantiles_of(np.concatenate(rows, axis=1)))
    median: Floats = np.median(runs, axis=0)
    return median
