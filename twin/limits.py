"""Highest rate and fewest replicas that meet objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from sidelight.loadgen.requests.slo.objectives import Objective
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Amount, Count, doc
from sidelight.rundir.stats import Missing
from sidelight.twin.check import PLACES
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict

_PLAYS = 12
_FAR = 64.0  # times the run's rate: beyond, nothing is looked for
_CLOSE = 1.02  # between a rate that meets the objectives and one that does not
_MOST_REPLICAS = 256


class HighestRate(Struct, frozen=True, kw_only=True):
    """The highest rate at which `--slo` is met, of one replica.

    Of a run of several engines it is of all. At `low` the whole interval of each percentile meets it, at `high` some of
    it does.
    """

    estimate: Annotated[Amount | None, doc("null where no rate meets it", "requests/s")]
    low: Annotated[Amount | None, doc("surely met up to this rate; null where nowhere", "requests/s")]
    high: Annotated[Amount | None, doc("surely missed beyond; null where nothing is predicted", "requests/s")]
    replicas: Annotated[Count | UnsetType, doc("fewest that surely meet it at the first predicted rate", "engines")] = (
        UNSET
    )


def check_objectives(objectives: Sequence[Objective]) -> None:
    """Raise ConfigurationError for an objective that a prediction says nothing of."""
    for each in objectives:
        if (each.metric, each.quantile) not in PLACES:
            raise ConfigurationError(
                "predict.slo", f"--slo {each.text}: a prediction has p50, p90 and p99 of ttft, tpot and e2e; write one "
                "like ttft_p99<500ms"
            )  # fmt: skip


def overruns(prediction: Prediction, objectives: Sequence[Objective]) -> Floats:
    """Return the logarithms of upper ends, medians and lower ends over objectives [objectives, 3].

    An objective of times that no request has is met by far.
    """
    ends_ms = np.stack([prediction.high, prediction.median, prediction.low])
    over = np.log([ends_ms[:, *PLACES[each.metric, each.quantile]] / each.bound for each in objectives])
    return np.where(np.isnan(over), -np.inf, over)


def is_met(prediction: Prediction, objectives: Sequence[Objective]) -> bool | None:
    """Return whether all objectives are met; None where the interval of one has both."""
    surely, _, perhaps = (overruns(prediction, objectives).max(axis=0) <= 0).tolist()
    return surely or (None if perhaps else False)


def highest_rate(twin: Twin, objectives: Sequence[Objective], scenario: Scenario) -> HighestRate:
    """Return the highest rate that meets objectives under a scenario's settings; replicas are for its own rate."""

    @cache
    def at(rate: float) -> Prediction | Missing:
        return predict(twin, replace(scenario, rate_per_s=rate, concurrency=None, replicas=1), plays=_PLAYS)

    def holds(rate: float, end: int) -> bool:
        prediction = at(rate)
        return isinstance(prediction, Prediction) and bool((overruns(prediction, objectives)[:, end] <= 0).all())

    surely_per_s, estimate, perhaps_per_s = (
        _highest(partial(holds, end=end), around=twin.rate_per_s) for end in range(3)
    )
    return HighestRate(
        estimate=estimate,
        low=surely_per_s,
        high=None if perhaps_per_s and isinstance(at(perhaps_per_s * _CLOSE), Missing) else perhaps_per_s,
        replicas=fewest_replicas(twin, objectives, scenario, surely_per_s),
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


def fewest_replicas(
    twin: Twin, objectives: Sequence[Objective], scenario: Scenario, surely_per_s: float | None
) -> int | UnsetType:
    """Return the fewest replicas that surely meet objectives at a scenario's rate; one does up to `surely_per_s`."""
    if surely_per_s is None or twin.beside:
        return UNSET
    rate = scenario.rate_per_s or twin.rate_per_s
    for replicas in range(max(1, int(rate / surely_per_s)), _MOST_REPLICAS):
        prediction = predict(
            twin, replace(scenario, rate_per_s=rate, concurrency=None, replicas=replicas), plays=_PLAYS
        )
        if isinstance(prediction, Prediction) and is_met(prediction, objectives):
            return replicas
    return UNSET
