"""Result of `sidelight predict` as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from sidelight.loadgen.requests.slo.objectives import Objective, Slo
from sidelight.rundir.fields import NO_UNIT, Amount, Count, Ratio, Reason, doc
from sidelight.rundir.stats import Missing
from sidelight.twin.check import METRICS
from sidelight.twin.engine.play import Router
from sidelight.twin.limits import HighestRate, check_objectives, highest_rate, is_met
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict
from sidelight.twin.seats import PredictedTime, predicted_time

VERSION = "1.3"
LEVELS = ("p50", "p90", "p99")


class MeasuredLoad(Struct, frozen=True, kw_only=True):
    """A predicted load as `--validate` measured it."""

    directory: Annotated[str, doc("of the run")]
    ttft_ms: Annotated[dict[str, Amount], doc("p50, p90 and p99", "ms")]
    tpot_ms: Annotated[dict[str, Amount], doc("p50, p90 and p99", "ms")]
    e2e_ms: Annotated[dict[str, Amount], doc("p50, p90 and p99", "ms")]
    inside: Annotated[Count, doc("of these percentiles, those within their predicted intervals", "percentiles")]


class PredictedLoad(Struct, frozen=True, kw_only=True):
    """A scenario and its prediction."""

    label: Annotated[str, doc("the scenario in words")]
    rate_per_s: Annotated[Amount | None, doc("requests sent, to all replicas; null of a closed loop", "requests/s")]
    concurrency: Annotated[Count | None, doc("requests in flight of a closed loop, else null", "requests")]
    replicas: Annotated[Count, doc("equal engines that share the requests", "engines")]
    router: Annotated[Router, doc("which replica gets a request: by turns, or the one that has the fewest")]
    settings: Annotated[dict[str, int], doc("settings of the engine that differ from the run's")]
    refused: Annotated[Reason | UnsetType, doc("why there is no prediction")] = UNSET
    ttft_ms: Annotated[dict[str, PredictedTime] | UnsetType, doc("p50, p90 and p99")] = UNSET
    tpot_ms: Annotated[dict[str, PredictedTime] | UnsetType, doc("p50, p90 and p99")] = UNSET
    e2e_ms: Annotated[dict[str, PredictedTime] | UnsetType, doc("p50, p90 and p99")] = UNSET
    requests_per_s: Annotated[Amount | UnsetType, doc("that end within the load", "requests/s")] = UNSET
    output_tokens_per_s: Annotated[Amount | UnsetType, doc("of these", "tokens/s")] = UNSET
    busy: Annotated[Ratio | UnsetType, doc("share of the load's time with work", "ratio")] = UNSET
    binds: Annotated[str | UnsetType, doc("what requests waited for most, by the name of the option")] = UNSET
    met: Annotated[
        bool | UnsetType | None,
        doc("whether `--slo` is met: null where the interval has both; absent without"),
    ] = UNSET
    price_per_h: Annotated[Amount | UnsetType, doc("of all engines, by `--price`", "1/h")] = UNSET
    million_output_tokens: Annotated[Amount | UnsetType, doc("cost of a million output tokens", NO_UNIT)] = UNSET
    notes: Annotated[list[str], doc("what it rests on beyond what the run had shown")] = []
    measured: Annotated[MeasuredLoad | UnsetType, doc("the same load, sent by `--validate`; absent without")] = UNSET


class TwinFit(Struct, frozen=True, kw_only=True):
    """The engine as the run shows it.

    A step lasts step + prefill_token x prompt tokens computed + sequence x sequences + kv_token x tokens held.
    """

    engine: Annotated[str, doc("its URL, or its process by its spans; empty of the only one")]
    step_ms: Annotated[Amount, doc("of a step without anything", "ms")]
    prefill_token_us: Annotated[Amount, doc("of a prompt token computed", "us")]
    sequence_us: Annotated[Amount, doc("of a sequence in the step", "us")]
    kv_token_ns: Annotated[Amount, doc("of a token in the KV cache", "ns")]
    jitter: Annotated[Amount, doc("spread of steps that are alike, of the logarithm", NO_UNIT)]
    frontend_ms: Annotated[Amount, doc("what a first token takes beyond its steps, median", "ms")]
    max_num_seqs: Annotated[Count | None, doc("most sequences at a time; null where it did not show", "sequences")]
    max_num_batched_tokens: Annotated[Count, doc("budget of a step, or more than the run had in one", "tokens")]
    shows_budget: Annotated[bool, doc("whether the run shows that budget, or it was stated")]
    requests: Annotated[Count, doc("requests that it rests on", "requests")]
    steps: Annotated[Count, doc("steps of known duration", "steps")]
    most_sequences: Annotated[Count, doc("most sequences in a step: more is extrapolated", "sequences")]
    misfit: Annotated[
        dict[str, list[float]], doc("played over observed p50, p90, p99 of the last 40 % of the time", "ratio")
    ]


class Predicted(Struct, frozen=True, kw_only=True):
    """`sidelight predict --json`."""

    schema_version: Annotated[str, doc("version of this format")] = VERSION
    run_id: Annotated[str, doc("the run that it rests on")]
    traffic: Annotated[str, doc("options that give other requests than the run's; empty without")]
    slo: Annotated[str | None, doc("the objectives, null without")]
    duration_s: Annotated[Amount, doc("length of the load that is predicted, that of the run or trace", "s")]
    fit: TwinFit
    other_fits: Annotated[list[TwinFit], doc("of the run's other engines, each of its own requests")] = []
    loads: list[PredictedLoad]
    highest_rate: Annotated[HighestRate | UnsetType, doc("by `--slo`; absent without")] = UNSET

    @property
    def fits(self) -> list[TwinFit]:
        return [self.fit, *self.other_fits]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of `predict --json`."""
    described: dict[str, Any] = msgspec.json.schema(Predicted)
    return described


def _fit(twin: Twin) -> TwinFit:
    fitted, speed = twin.fitted, twin.fitted.speed
    ratios = np.exp(np.nan_to_num(twin.missed.logs))
    return TwinFit(
        engine=twin.name,
        step_ms=1e3 * speed.step_s,
        prefill_token_us=1e6 * speed.prefill_token_s,
        sequence_us=1e6 * speed.sequence_s,
        kv_token_ns=1e9 * speed.kv_token_s,
        jitter=speed.jitter_ratio,
        frontend_ms=1e3 * float(np.median(fitted.frontend_s)),
        max_num_seqs=fitted.seats,
        max_num_batched_tokens=fitted.budget,
        shows_budget=fitted.budgets[0] == fitted.budgets[1],
        requests=len(twin.requests),
        steps=fitted.steps,
        most_sequences=fitted.most_sequences,
        misfit={name: ratios[at].tolist() for at, name in enumerate(METRICS)},
    )


def _load(
    scenario: Scenario,
    prediction: Prediction | Missing,
    objectives: Sequence[Objective],
    price: float | None,
    measure: Callable[[Prediction], MeasuredLoad | UnsetType],
) -> PredictedLoad:
    """Return a scenario with its prediction, or with the reason why there is none."""
    names = ("label", "rate_per_s", "concurrency", "replicas", "router", "settings")
    about: dict[str, Any] = {name: getattr(scenario, name) for name in names}
    if isinstance(prediction, Missing):
        return PredictedLoad(**about, refused=prediction.reason)
    hourly = UNSET if price is None else price * scenario.replicas
    tokens_per_h = 3600 * prediction.output_tokens_per_s
    about |= {name: _times(prediction, at) for at, name in enumerate(METRICS)}
    return PredictedLoad(
        **about,
        requests_per_s=prediction.requests_per_s,
        output_tokens_per_s=prediction.output_tokens_per_s,
        busy=prediction.busy,
        binds=prediction.binds or UNSET,
        met=is_met(prediction, objectives) if objectives else UNSET,
        price_per_h=hourly,
        million_output_tokens=UNSET if hourly is UNSET or not tokens_per_h else 1e6 * hourly / tokens_per_h,
        notes=list(prediction.notes),
        measured=measure(prediction),
    )


def _times(prediction: Prediction, at: int) -> dict[str, PredictedTime]:
    times = {name: predicted_time(prediction, (at, quantile)) for quantile, name in enumerate(LEVELS)}
    return {name: time for name, time in times.items() if np.isfinite(time.estimate)}


def answer(
    twin: Twin,
    loads: Sequence[Scenario],
    *,
    run_id: str,
    traffic: str = "",
    slo: Slo | None,
    price: float | None,
    measure: Callable[[Prediction], MeasuredLoad | UnsetType] = lambda _: UNSET,
) -> Predicted:
    """Return the predictions of scenarios, at least one; with objectives also the rate and replicas that meet them.

    `measure` sends a load that was predicted, if it is to be sent.

    Raises ConfigurationError for an objective that a prediction says nothing of.
    """
    objectives = slo.objectives if slo else ()
    check_objectives(objectives)
    price = None if price is None else price * len(twin.engines)
    return Predicted(
        run_id=run_id,
        traffic=traffic,
        slo=slo.text if slo else None,
        duration_s=twin.duration_s,
        fit=_fit(twin),
        other_fits=[_fit(each) for each in twin.beside],
        loads=[_load(each, predict(twin, each), objectives, price, measure) for each in loads],
        highest_rate=highest_rate(twin, objectives, loads[0]) if slo else UNSET,
    )
