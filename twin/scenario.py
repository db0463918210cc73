"""Scenarios: the requests of a run at another rate, under other settings, on more replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import Floats
from sidelight.rundir.stats import Missing
from sidelight.simulator.settings import EngineSettings, SettingsError
from sidelight.twin.check import Misfit, latencies_ms, observed_ms, quantiles_of
from sidelight.twin.engine.fit import BUDGETS, LEAST_REQUESTS, EngineFit, EngineRequests
from sidelight.twin.engine.play import BLOCKS, BUDGET, MOST_STEPS, SEATS, SETTINGS, EngineLoad, Router, play, stretches
from sidelight.twin.engine.steps import AnsweredRequests

_SETTING = re.compile(r"([a-z-]+)=(\d{1,12})")
LEVEL = 0.9
_REQUESTS, _MOST_PLAYS, _LEAST_PLAYS = 60_000, 24, 8  # played for a scenario, in all
_MOST_EVENTS = 100_000  # of a play: some minute of a scenario
_SHARE = 0.05  # of the time: a limit that binds for less does not bind
_SAME = 0.2  # of the logarithm: predictions with few and with many seats that say the same
_WAITED = 0.002  # of the time: a limit that is waited for less makes no difference
_BEYOND = 1.2  # times what the run had: more is extrapolated
_FEW = 200  # requests after the cut: fewer say little of p99, so that p90's misfit stands for it


def settings_of(name: str, text: str) -> dict[str, int]:
    """Return the settings in an option's value; raises ConfigurationError for others than SETTINGS."""
    pairs = [_SETTING.fullmatch(each.strip()) for each in text.split(",") if each.strip()]
    for pair in pairs:
        if pair is None or pair[1] not in SETTINGS or int(pair[2]) < 1:
            raise ConfigurationError(
                "option.value", f"{name} {text}: must be settings of {', '.join(SETTINGS)}, as max-num-seqs=32"
            )
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load and settings to predict for; None: as in the run.

    rate_per_s   of all replicas together; or `concurrency`, of a closed loop
    arrival      process of an open loop, at any rate
    replicas     equal engines, to which requests go by turns, or by `router`
    settings     of the engine, by vLLM's names (SETTINGS)
    """

    label: str
    rate_per_s: float | None = None
    concurrency: int | None = None
    arrival: Arrival | None = None
    replicas: int = 1
    router: Router = "round-robin"
    settings: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A fitted engine, the measured requests of its run, and the traffic to predict.

    traffic      the run's, or other; what is sent is drawn from it, but of a replay, which is sent as it stands
    duration_s   for how long requests are sent
    arrival      its process, None where gaps are drawn from its own
    concurrency  of a closed loop, else None
    longest      tokens of a request that the model takes, None where that is not known
    has_prefix_cache  by the engine's page, None where it does not say
    notes        what holds of the traffic
    name         the engine's, "" of the only one
    beside       twins of the other engines that shared the run's requests, each with those that it served
    """

    requests: EngineRequests
    fitted: EngineFit
    engine: EngineSettings
    missed: Misfit
    traffic: AnsweredRequests
    duration_s: float
    arrival: Arrival | None = None
    concurrency: int | None = None
    longest: int | None = None
    has_prefix_cache: bool | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    beside: tuple[Twin, ...] = ()

    @property
    def engines(self) -> tuple[Twin, ...]:
        return self, *self.beside

    @property
    def rate_per_s(self) -> float:
        """Return the rate of all engines."""
        return sum(len(each.traffic) / span_s(each.traffic) for each in self.engines)

    @property
    def observed_ms(self) -> Floats:
        """Return the latencies of the measured requests of all engines [3, n]."""
        return np.concatenate([observed_ms(each.requests) for each in self.engines], axis=1)


def span_s(requests: AnsweredRequests) -> float:
    """Return for how long requests were sent, the gap behind the last included."""
    return float(requests.submit_s[-1] - requests.submit_s[0]) * len(requests) / (len(requests) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of a scenario: medians of plays by METRICS and QUANTILES [3, 3] with 90 % intervals, ms.

    The interval is that of a run as long as the fitted one: other arrivals, other requests of the same kind, the fit's
    error and its misfit. `binds` is the limit that requests waited for most, "" where for none; `waited` is whether any
    did for seats or the budget. `notes` say what the prediction rests on beyond what the run had shown.
    """

    scenario: Scenario
    median: Floats
    low: Floats
    high: Floats
    requests_per_s: float
    output_tokens_per_s: float
    busy: float
    binds: str
    most_running: int
    waited: bool
    notes: tuple[str, ...] = ()


def predict(twin: Twin, scenario: Scenario, *, plays: int | None = None) -> Prediction | Missing:
    """Return the prediction of a scenario, or why there is none.

    Each play draws the fit's parameters, the population of requests, those that are sent, and their arrivals. Where the
    engine's seats or its budget did not show, it is played with all that they can be, as far as it matters: what all
    say is predicted, and what they differ in is refused. Of several engines each has its share of the load.
    """
    if twin.beside and scenario.replicas > 1:
        return Missing(f"the run had {len(twin.engines)} engines, and replicas are of one")
    try:
        shares = _shares(twin, scenario)
        limits = [_possible_engines(each.twin, scenario.settings) for each in shares]
    except SettingsError as error:
        return Missing(str(error))
    shown: list[Prediction] = []
    for at in range(max(map(len, limits))):
        shares = [
            share._replace(engine=each[min(at, len(each) - 1)]) for share, each in zip(shares, limits, strict=True)
        ]
        prediction = _predict(scenario, shares, plays)
        if isinstance(prediction, Missing):
            return prediction
        shown.append(prediction)
        if not prediction.waited:
            break  # larger limits make no difference
    medians = np.log([each.median for each in shown])
    if np.nanmax(np.ptp(medians, axis=0)) > _SAME:
        return _unknown(twin, scenario, shown[-1])
    return replace(
        shown[-1],
        median=np.exp(medians.mean(axis=0)),
        low=np.min([each.low for each in shown], axis=0),
        high=np.max([each.high for each in shown], axis=0),
    )


class _Share(NamedTuple):
    """An engine's share of a load: `concurrency` of a closed loop, else a rate, by a process or by the run's gaps."""

    twin: Twin
    engine: EngineSettings
    rate_per_s: float
    concurrency: int | None
    arrival: Arrival | None

    @property
    def about(self) -> int:
        """Return about how many requests a play sends to the engine and its replicas."""
        if self.concurrency is not None:
            return len(self.twin.requests)
        about = round(self.rate_per_s * self.twin.duration_s)
        trace_ns = self.arrival.trace_ns if self.arrival else None
        return about if trace_ns is None else min(about, len(trace_ns))


def _shares(twin: Twin, scenario: Scenario) -> list[_Share]:
    """Return the share of each engine: of the rate as in the run, of those in flight by Little's law."""
    alone = [replace(each, beside=()) for each in twin.engines]
    if concurrency := scenario.concurrency or (None if scenario.rate_per_s else twin.concurrency):
        counts = _in_flight(alone, concurrency)
        return [_Share(each, each.engine, 0.0, count, None) for each, count in zip(alone, counts, strict=True)]
    rate, all_per_s = scenario.rate_per_s or twin.rate_per_s, twin.rate_per_s
    return [
        _Share(each, each.engine, rate * (each.rate_per_s / all_per_s), None, scenario.arrival or each.arrival)
        for each in alone
    ]


def _in_flight(twins: Sequence[Twin], concurrency: int) -> list[int]:
    """Return the requests in flight at each engine by Little's law, at least 1; raises SettingsError for fewer."""
    if concurrency < len(twins):
        raise SettingsError(f"{concurrency} in flight are fewer than the {len(twins)} engines of the run")
    held = np.array([observed_ms(each.requests)[2].sum() for each in twins])
    further = np.maximum(concurrency * held / held.sum() - 1, 0.0)
    ends = np.rint(np.cumsum(further) * (concurrency - len(twins)) / max(1e-9, float(further.sum())))
    counts: list[int] = (1 + np.diff(ends, prepend=0.0)).astype(np.int64).tolist()
    return counts


def _possible_engines(twin: Twin, settings: Mapping[str, int]) -> list[EngineSettings]:
    """Return the engines that a twin's can be under settings, the lowest limits first.

    For requests as the run's, a budget that did not show is one that it would not have met. One that is not set has
    room for the seats. Raises SettingsError where there can be none.
    """
    fitted, seats = twin.fitted, settings.get(SEATS, twin.fitted.seats)
    least, most = (fitted.budget, fitted.budget) if twin.traffic is twin.requests else fitted.budgets
    least, most = settings.get(BUDGET, least), settings.get(BUDGET, most)
    budgets = sorted({least, most, *(each for each in BUDGETS if least < each < most)})
    limits = [(seats or each, each) for each in budgets]
    if seats is None:
        limits = [(fitted.most_sequences, budgets[0]), *limits]
    blocks = settings.get(BLOCKS, twin.engine.kv_blocks)
    engines = [
        replace(
            twin.engine,
            max_num_seqs=seats,
            max_num_batched_tokens=budget if BUDGET in settings else max(budget, seats),
            kv_blocks=blocks,
        )
        for seats, budget in limits
    ]
    longest, size = int((twin.traffic.prompt_tokens + twin.traffic.output_tokens).max()), twin.engine.block_size
    if (needed := -(-longest // size)) > blocks:
        raise SettingsError(f"the longest request has {longest:,} tokens and needs {needed:,} blocks of {size}")
    return engines


def _unknown(twin: Twin, scenario: Scenario, many: Prediction) -> Missing:
    """Return the reason that a limit which did not show matters."""
    fitted = next((each.fitted for each in twin.engines if each.fitted.seats is None), twin.fitted)
    most = many.most_running
    if fitted.seats is None and SEATS not in scenario.settings and most > fitted.most_sequences:
        return Missing(
            f"up to {most} sequences would run at a time, the run had at most {fitted.most_sequences}, and where the "
            "engine's limit lies did not show; state it, as in --known max-num-seqs=64"
        )
    return Missing(
        "prompts would meet a limit on the tokens of a step, and the run shows only that it is at least "
        f"{fitted.budgets[0]:,}; state the engine's, as in --known max-num-batched-tokens=2048"
    )


def _predict(scenario: Scenario, shares: Sequence[_Share], plays: int | None) -> Prediction | Missing:
    for share in shares:
        if reason := _too_few_or_many(share, scenario.replicas):
            return Missing(reason)
    about = sum(each.about for each in shares)
    plays = plays or int(np.clip(_REQUESTS // about, _LEAST_PLAYS, _MOST_PLAYS))
    played = [
        [_played(share, scenario, seed=plays * at + number) for at, share in enumerate(shares)]
        for number in range(plays)
    ]
    latencies = [np.concatenate([each.latencies_ms for each in play], axis=1) for play in played]
    logs = np.log([np.maximum(quantiles_of(each), 1e-6) for each in latencies])
    missed = np.mean([_misfit(each.twin.missed) for each in shares], axis=0)
    spread = np.hypot(logs.std(axis=0, ddof=1) * np.sqrt(1 + 1 / plays), missed)
    from scipy.special import stdtrit  # noqa: PLC0415  as in `correlator.load.steady`

    wide = stdtrit(plays - 1, (1 + LEVEL) / 2) * spread
    middle = np.median(logs, axis=0)
    by_engine = list(zip(*played, strict=True))
    # Of the engine that waits most: a mean of all would hide it among many.
    waited = {name: max(float(np.mean([each.waited[name] for each in of])) for of in by_engine) for name in SETTINGS}
    binding = max(waited, key=lambda name: waited[name])
    most = [max(each.most_running for each in of_engine) for of_engine in by_engine]
    notes: dict[str, None] = {}
    for share, running in zip(shares, most, strict=True):
        fitted = share.twin.fitted
        if fitted.by_size is not None and running > fitted.most_sequences:
            return Missing(
                f"steps depend on the size of the batch otherwise than by a line, and {running} sequences would run "
                f"where the run had at most {fitted.most_sequences}"
            )
        notes |= dict.fromkeys((*share.twin.notes, *_notes(share.twin, scenario, running)))
    return Prediction(
        scenario=scenario,
        median=np.exp(middle),
        low=np.exp(middle - wide),
        high=np.exp(middle + wide),
        requests_per_s=float(np.median([sum(each.requests_per_s for each in play) for play in played])),
        output_tokens_per_s=float(np.median([sum(each.output_tokens_per_s for each in play) for play in played])),
        busy=float(np.mean([each.busy for play in played for each in play])),
        binds=binding if waited[binding] > _SHARE else "",
        most_running=max(most),
        waited=max(waited[SEATS], waited[BUDGET]) > _WAITED,
        notes=tuple(notes),
    )


def _too_few_or_many(share: _Share, replicas: int) -> str:
    """Return the reason against so few or many requests, or "" without one."""
    twin, about = share.twin, share.about
    if about < LEAST_REQUESTS * replicas:
        return (
            f"{about} requests are sent in {twin.duration_s:.0f} s, and each replica needs {LEAST_REQUESTS}: give a "
            "higher rate, or a longer run"
        )
    tokens, outputs = twin.traffic.prompt_tokens.mean(), twin.traffic.output_tokens.mean()
    if about * (1 + tokens / share.engine.max_num_batched_tokens + outputs / MOST_STEPS) > _MOST_EVENTS:
        return (
            f"{about:,} requests, of {tokens:,.0f} and {outputs:,.0f} tokens in the mean, are more than can be played: "
            "give a lower rate, a shorter trace, or shorter lengths"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Play:
    latencies_ms: Floats
    requests_per_s: float
    output_tokens_per_s: float
    busy: float
    waited: dict[str, float]
    most_running: int


def _played(share: _Share, scenario: Scenario, *, seed: int) -> _Play:
    twin = share.twin
    random = np.random.default_rng([seed, len(twin.requests)])
    population = random.integers(0, len(twin.traffic), len(twin.traffic))
    engine = replace(share.engine, speed=twin.fitted.draws[seed % len(twin.fitted.draws)])
    is_replay = share.arrival is not None and share.arrival.kind == "replay"
    arrival_s = _arrivals(share, seed, random) if share.concurrency is None else None
    count = len(twin.requests) if arrival_s is None else len(arrival_s)
    drawn = np.arange(count) if is_replay else population[random.integers(0, len(population), count)]
    frontend_s = random.choice(twin.fitted.frontend_s, count)
    load = EngineLoad(
        prompt_tokens=twin.traffic.prompt_tokens[drawn],
        cached_tokens=twin.traffic.cached_tokens[drawn],
        output_tokens=twin.traffic.output_tokens[drawn],
        arrival_s=None if arrival_s is None else arrival_s + frontend_s,
        concurrency=share.concurrency or 1,
        think_s=float(np.median(frontend_s)),
    )
    times = play(
        load,
        engine,
        replicas=scenario.replicas,
        router=scenario.router,
        seed=int(random.integers(1 << 31)),
        factors=twin.fitted.factors,
        by_size=twin.fitted.by_size,
    )
    end_s = float(times.last_s.max()) if arrival_s is None else twin.duration_s
    if arrival_s is not None and is_replay:  # at another rate it has another length
        end_s = min(end_s, float(arrival_s.max()))
    ended = times.last_s <= end_s
    busy_s = max(1e-9, times.busy_s)
    return _Play(
        latencies_ms=latencies_ms(load, times, frontend_s),
        requests_per_s=float(ended.sum()) / end_s,
        output_tokens_per_s=float(load.output_tokens[ended].sum()) / end_s,
        busy=min(1.0, busy_s / (scenario.replicas * max(end_s, 1e-9))),
        waited={name: waited_s / busy_s for name, waited_s in times.waited_s.items()},
        most_running=times.most_running,
    )


def _arrivals(share: _Share, seed: int, random: np.random.Generator) -> Floats:
    """Return the seconds of arrivals; without a process, gaps are drawn from those that were."""
    twin, rate = share.twin, share.rate_per_s
    if share.arrival is not None:
        return schedule(replace(share.arrival, rate_per_s=rate), seed=1 + seed, duration_s=twin.duration_s) / 1e9
    gaps_s = np.diff(twin.traffic.submit_s) * twin.rate_per_s / rate
    count = round(rate * twin.duration_s * 1.5) + 10
    drawn = stretches(random, len(gaps_s), max(1, round(len(gaps_s) ** (1 / 3))), count)[:count]
    at_s: Floats = np.cumsum(gaps_s[drawn])
    return at_s[at_s < twin.duration_s]


def _misfit(missed: Misfit) -> Floats:
    logs = np.abs(np.nan_to_num(missed.logs))
    if missed.requests < _FEW:
        logs[:, -1] = logs[:, -2]
    return logs


def _notes(twin: Twin, scenario: Scenario, most: int) -> Iterator[str]:
    if most > _BEYOND * twin.fitted.most_sequences:
        yield f"extrapolated: the run had at most {twin.fitted.most_sequences} sequences in a step, this has {most}"
    had, longest = (int((each.prompt_tokens + each.output_tokens).max()) for each in (twin.requests, twin.traffic))
    if longest > _BEYOND * had:
        yield f"extrapolated: the run's longest request had {had:,} tokens, the longest here has {longest:,}"
    if twin.traffic.cached_tokens.any() and (BLOCKS in scenario.settings or scenario.replicas > 1):
        yield "prefixes are assumed to stay cached as in one engine with the blocks of the run"
