"""Highest rate and fewest replicas that meet objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from sidelight.loadgen.requests.slo.objectives import Objective
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import Floats
from sidelight.rundir.stats import Missing
from sidelight.twin.check import METRICS, QUANTILES
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict

_PLAYS = 12
_FAR = 64.0  # times the run's rate: beyond, nothing is looked for
_CLOSE = 1.02  # between a rate that meets the objectives and one that does not
_MOST_REPLICAS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Highest rates at which objectives are met: surely, by the medians, and perhaps; None where at none."""

    surely_per_s: float | None
    likely_per_s: float | None
    perhaps_per_s: float | None


def check_objectives(objectives: Sequence[Objective]) -> None:
    """Raise ConfigurationError for an objective that a prediction says nothing of."""
    for each in objectives:
        if f"{each.metric}_ms" not in METRICS or each.quantile not in QUANTILES:
            raise ConfigurationError(
                "predict.slo", f"--slo {each.text}: a prediction has p50, p90 and p99 of ttft, tpot and e2e; write one "
                "like ttft_p99<500ms"
            )  # fmt: skip


def is_met(prediction: Prediction, objectives: Sequence[Objective]) -> bool | None:
    """Return whether all objectives are met; None where the interval of one has both."""
    if all(_within(prediction.high, each) for each in objectives):
        return True
    return None if all(_within(prediction.low, each) for each in objectives) else False


def _within(times_ms: Floats, objective: Objective) -> bool:
    value = float(times_ms[METRICS.index(f"{objective.metric}_ms"), QUANTILES.index(objective.quantile or 0.0)])
    return not value > objective.bound  # also where no request has such a time


def highest_rates(twin: Twin, objectives: Sequence[Objective], scenario: Scenario) -> RateLimits:
    """Return the highest rates at which one replica meets objectives under a scenario's settings."""

    @cache
    def at(rate: float) -> Prediction | Missing:
        return predict(twin, replace(scenario, rate_per_s=rate, concurrency=None, replicas=1), plays=_PLAYS)

    def by(ends: Callable[[Prediction], Floats]) -> float | None:
        def holds(rate: float) -> bool:
            prediction = at(rate)
            return isinstance(prediction, Prediction) and all(_within(ends(prediction), each) for each in objectives)

        return _highest(holds, twin.rate_per_s)

    return RateLimits(
        surely_per_s=by(lambda each: each.high),
        likely_per_s=by(lambda each: each.median),
        perhaps_per_s=by(lambda each: each.low),
    )


def _highest(holds: Callable[[float], bool], around: float) -> float | None:
    """Return the highest rate of those that hold, which are all below it; None for none near."""
    low = high = around
    if holds(around):
        while holds(high):
            low, high = high, 1.5 * high
            if high > _FAR * around:
                return low
    else:
        while not holds(low):
            low, high = low / 1.5, low
            if low < around / _FAR:
                return None
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def fewest_replicas(twin: Twin, objectives: Sequence[Objective], scenario: Scenario, limits: RateLimits) -> int | None:
    """Return the fewest replicas that surely meet objectives at a scenario's rate, else None."""
    rate = scenario.rate_per_s or twin.rate_per_s
    if limits.surely_per_s is None:
        return None
    for replicas in range(max(1, int(rate / limits.surely_per_s)), _MOST_REPLICAS):
        prediction = predict(twin, replace(scenario, rate_per_s=rate, replicas=replicas), plays=_PLAYS)
        if isinstance(prediction, Prediction) and is_met(prediction, objectives):
            return replicas
    return None
