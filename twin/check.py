"""The twin's test of itself: fitted to the beginning of a run, it must show the rest as it was.

Its misfit there is part of the error of each prediction. Where the steps' residuals depend on the batch or on the time,
or the rest of the run is missed, there is no prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.printable.numbers import duration
from sidelight.rundir.stats import Missing, known
from sidelight.simulator.settings import EngineSettings
from sidelight.twin.engine.fit import EngineFit, EngineRequests, fit
from sidelight.twin.engine.play import EngineLoad, EngineTimes, play
from sidelight.twin.engine.steps import StreamedRequests

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
QUANTILES = (0.5, 0.9, 0.99)
#: Where the quantile of a metric stands in arrays by these, with the names of objectives.
PLACES: dict[tuple[str, float | None], tuple[int, int]] = {
    (metric.removesuffix("_ms"), quantile): (row, column)
    for row, metric in enumerate(METRICS)
    for column, quantile in enumerate(QUANTILES)
}
_FITTED_SHARE = 0.6
_PLAYS = 5
MOST_MISFIT = 0.2  # of p50 and p90 in the time that the fit has not seen
MOST_BIAS = 0.1  # of steps of one part of the time
MOST_SPREAD = 0.35
LEAST_COHERENCE = 0.9
MOST_TOKENS_PER_CHUNK = 1.1
_TINY_MS = 2.0  # a misfit of less is none: stamps and front ends are not better
_BLOCK = 16  # tokens of a KV block
_ROOM = 1 << 40  # KV blocks that never run out


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Logarithms of played over observed latency, by METRICS and QUANTILES [3, 3], beyond the fit.

    `requests` is how many were sent in that time.
    """

    logs: Floats
    requests: int

    @property
    def worst(self) -> tuple[float, str]:
        """Return the largest misfit of p50 and p90, as a share, and its percentile."""
        apart = np.nan_to_num(np.abs(self.logs[:, :2]))
        metric, quantile = divmod(int(np.argmax(apart)), apart.shape[1])
        name = METRICS[metric].removesuffix("_ms").upper()
        return float(np.expm1(apart.max())), f"{name} p{100 * QUANTILES[quantile]:.0f}"

    @property
    def refusal(self) -> str:
        """Return the reason against using a fit with this misfit, or "" without one."""
        missed_by, latency = self.worst
        if missed_by <= MOST_MISFIT:
            return ""
        return (
            f"{latency} of the last 40 % of the time is missed by {missed_by:.0%} (at most {MOST_MISFIT:.0%} is taken)"
        )


def engine_of(fitted: EngineFit, *, kv_blocks: int | None = None) -> EngineSettings:
    """Return the settings under which the twin plays; seats and blocks that are not known do not run out."""
    return EngineSettings(
        max_num_seqs=fitted.seats or fitted.budget,
        max_num_batched_tokens=max(fitted.budget, fitted.seats or 0),
        kv_blocks=kv_blocks or _ROOM,
        max_model_len=_BLOCK,
        block_size=_BLOCK,
        eos_chance=0.0,
        speed=fitted.speed,
    )


def latencies_ms(load: EngineLoad, times: EngineTimes, frontend_s: Floats) -> Floats:
    """Return the latencies of played requests at their clients [3, n]; no TPOT of one token."""
    return _latencies_ms(times.arrival_s - frontend_s, times.first_s, times.last_s, load.output_tokens)


def quantiles_of(latencies: Floats) -> Floats:
    """Return the quantiles of latencies [3, n] by METRICS and QUANTILES [3, 3]; NaN where no request has one."""
    known_ms = [known(row) for row in latencies]
    return np.array([np.quantile(each, QUANTILES) if len(each) else [np.nan] * len(QUANTILES) for each in known_ms])


def replayed(requests: EngineRequests, engine: EngineSettings, fitted: EngineFit, *, seed: int) -> Floats:
    """Return the latencies of a run's requests [3, n], played as they were sent."""
    drawn_s = np.random.default_rng(seed).choice(fitted.frontend_s, len(requests))
    load = EngineLoad(
        prompt_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
        output_tokens=requests.output_tokens,
        arrival_s=requests.submit_s + drawn_s,
    )
    return latencies_ms(load, play(load, engine, seed=seed, factors=fitted.factors, by_size=fitted.by_size), drawn_s)


def observed_ms(requests: EngineRequests) -> Floats:
    """Return the TTFT, TPOT and E2E of a run's requests [3, n]."""
    return _latencies_ms(requests.submit_s, requests.first_s, requests.last_s, requests.output_tokens)


def _latencies_ms(submit_s: Floats, first_s: Floats, last_s: Floats, output_tokens: Ints) -> Floats:
    gaps = np.where(output_tokens > 1, output_tokens - 1, np.nan)
    return 1e3 * np.stack([first_s - submit_s, (last_s - first_s) / gaps, last_s - submit_s])


def misfit(requests: EngineRequests, fitted: EngineFit, engine: EngineSettings) -> Misfit | Missing:
    """Return the misfit of a fit to the run's beginning, or a reason.

    All requests are played as they were sent, a few times; those of the time to come are compared.
    """
    cut_s = _FITTED_SHARE * float(requests.last_s.max())
    early = fit(requests, budget=fitted.budget, seats=fitted.seats, until_s=cut_s)
    later = requests.submit_s >= cut_s
    if isinstance(early, Missing) or later.sum() < _PLAYS:
        wait_s = float(np.median(requests.first_s - requests.submit_s))
        if wait_s > cut_s / 3:
            return Missing(
                f"requests waited {duration(wait_s)} for their first token, and {duration(cut_s / _FITTED_SHARE)} of "
                "traffic were looked at, too few to fit and test: the engine is overloaded; give it less, or a replica"
            )
        if isinstance(early, Missing):
            return Missing(f"in the first 60 % of the time {early.reason}")
        return Missing(f"{int(later.sum())} requests were sent in the last 40 % of the time, which test the fit")
    engine = replace(engine, speed=early.speed)
    played = [quantiles_of(replayed(requests, engine, early, seed=seed)[:, later]) for seed in range(_PLAYS)]
    observed = quantiles_of(observed_ms(requests)[:, later])
    median = np.median(played, axis=0)
    logs = np.log(median / observed)
    logs[np.abs(median - observed) < _TINY_MS] = 0.0
    return Misfit(logs=logs, requests=int(later.sum()))


def refusal(requests: EngineRequests, fitted: EngineFit) -> str:
    """Return the reason against a fit by its steps, or "" without one."""
    if isinstance(requests, StreamedRequests) and requests.tokens_per_chunk > MOST_TOKENS_PER_CHUNK:
        return (
            f"a chunk has {requests.tokens_per_chunk:.2f} tokens in the mean, as with speculative decoding or a reader "
            "that lags: the steps of the engine are not seen"
        )
    if fitted.coherence < LEAST_COHERENCE:
        return (
            f"in a step only {fitted.coherence:.0%} of the sequences under way got a token: tokens are not of one "
            "engine's steps, as behind a router or a data-parallel engine, or with a client on a busy machine"
        )
    thirds = [float(np.median(part)) for part in np.array_split(fitted.residuals, 3)]
    if (change := max(thirds) - min(thirds)) > MOST_BIAS:
        return f"steps of the same batch changed by {change:.0%} within the run: the engine's speed is not one number"
    spread = fitted.speed.jitter_ratio
    if spread > MOST_SPREAD:
        return (
            f"steps of the same batch differ by {spread:.0%}: something that this run does not know of takes the time"
        )
    return ""
