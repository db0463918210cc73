"""Service level objectives: how they are written, which requests meet them (goodput), and whether a run did.

An objective is METRIC[_STATISTIC]<BOUND, several are separated by commas: `ttft_p99<500ms,tpot_p99<50ms`.

metric      ttft, tpot, itl (time between chunks where chunks are not tokens), e2e
statistic   p1 to p99.99, mean, max; none: every request, or every gap of an itl, is bound
bound       a number with its unit, ms or s, after `<` or `<=`

Goodput counts a request when each objective's bound holds for that request, whatever statistic the objective is about;
so do other benchmarks, whose goodput bounds the request's own TTFT, TPOT and E2E. What an itl objective bounds of one
request is its mean gap; for `itl_max` and plain `itl` it is its longest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np

from loadgen.requests.metrics import RequestMetrics
from loadgen.requests.table import RequestLog
from rundir.columns import Bools, Floats
from rundir.fields import UNSET, Count, Missing, doc
from rundir.stats import known

Metric = Literal["ttft", "tpot", "itl", "e2e"]
METRICS: tuple[Metric, ...] = get_args(Metric)
EVERY = "every"
_UNITS_MS = {"ms": 1.0, "s": 1000.0}
_TERM = re.compile(r"([a-z0-9]+)(?:_([a-z0-9._]+))?\s*(<=|<)\s*([0-9.eE+-]+)\s*([a-z]*)")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:[._]\d{1,2})?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One bound: `quantile` is 0 to 1 where the statistic is a percentile, else None."""

    text: str
    metric: Metric
    statistic: str
    quantile: float | None
    bound_ms: float
    inclusive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What `--slo` asks for."""

    text: str
    objectives: tuple[Objective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Which requests met all objectives, bool[n], and of which that is not known, bool[n] (they count as not met)."""

    met: Bools
    unknown: Bools


class ObjectiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """One objective, and whether the run met it."""

    text: Annotated[str, doc("As it was written.")]
    metric: Annotated[Metric, doc("What is bound.")]
    statistic: Annotated[str, doc("Which statistic of it; `every`: each request, or each gap of an itl.")]
    bound_ms: Annotated[float, doc("The bound.", "ms")]
    count: Annotated[Count, doc("Number of values.", "values")]
    value_ms: Annotated[float | None, doc("The run's value.", "ms")]
    met: Annotated[bool | None, doc("Whether it was met; null: not known.")]
    missing: Missing = UNSET


class SloResult(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives of `--slo`, and which requests met them."""

    text: Annotated[str, doc("The objectives as they were written.", source="`--slo`")]
    met: Annotated[bool | None, doc("Whether all were met; null when that is not known of one.")]
    good_requests: Annotated[Count, doc("Requests that met every objective.", "requests")]
    undetermined_requests: Annotated[
        Count, doc("Requests that ended ok of which it is not known whether they met every objective.", "requests")
    ]
    objectives: Annotated[list[ObjectiveResult], doc("The objectives one by one.")]


def parse_slo(text: str) -> Slo:
    """Read objectives. Raises ValueError, which names the term, what is wrong with it, and the cure."""
    terms = [term.strip() for term in text.split(",")]
    objectives = tuple(_objective(term) for term in terms)
    names = [(objective.metric, objective.statistic) for objective in objectives]
    for name, term in zip(names, terms, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"--slo: {term!r}: {name[0]}_{name[1]} is bound twice; keep one of the bounds")
    return Slo(text=",".join(objective.text for objective in objectives), objectives=objectives)


def goodput(slo: Slo, log: RequestLog, metrics: RequestMetrics) -> Goodput:
    """Return which requests of a log met all objectives; `metrics` are those of the same log.

    - status other than ok: not met
    - one token, or one chunk: there is no interval that could be too long, tpot or itl is met
    - a metric that the reply does not give (no usage, not streamed): unknown, and not met
    """
    met, unknown = log.status == "ok", np.zeros(len(log), np.bool_)
    for objective in slo.objectives:
        values, vacuous = _of_request(objective, log, metrics)
        absent = np.isnan(values) & ~vacuous
        met &= vacuous | (~absent & _holds(objective, values))
        unknown |= absent
    return Goodput(met=met & ~unknown, unknown=unknown & (log.status == "ok"))


def slo_result(slo: Slo, log: RequestLog, metrics: RequestMetrics) -> SloResult:
    """Return whether the requests that ended ok met each objective, and how many met all of them.

    `met` is true when every objective was met, false when one was not, null when that is not known of one of them.
    """
    ok, good = log.status == "ok", goodput(slo, log, metrics)
    results = [_result(objective, _sample(objective, metrics, ok)) for objective in slo.objectives]
    met = [result.met for result in results]
    return SloResult(
        text=slo.text,
        met=False if False in met else None if None in met else True,
        good_requests=int(good.met.sum()),
        undetermined_requests=int(good.unknown.sum()),
        objectives=results,
    )


def _objective(term: str) -> Objective:
    match = _TERM.fullmatch(term)
    if match is None:
        raise ValueError(f"--slo: {term!r} is not an objective; write one like ttft_p99<500ms")
    name, statistic, sign, number, unit = match.groups()
    metric = next((metric for metric in METRICS if metric == name), None)
    if metric is None:
        raise ValueError(f"--slo: {term!r}: unknown metric {name!r}; choose from {', '.join(METRICS)}")
    if unit not in _UNITS_MS:
        named = f"unknown unit {unit!r}" if unit else "no unit"
        raise ValueError(f"--slo: {term!r}: {named}; write the bound in ms or s, like 500ms")
    try:
        bound_ms = float(number) * _UNITS_MS[unit]
    except ValueError:
        bound_ms = float("nan")
    if not 0 < bound_ms < float("inf"):
        raise ValueError(f"--slo: {term!r}: {number!r} is not a bound; write a number above zero, like 500ms")
    label, quantile = _statistic(term, statistic)
    subject = metric if label == EVERY else f"{metric}_{label}"
    return Objective(
        text=f"{subject}{sign}{number}{unit}",
        metric=metric,
        statistic=label,
        quantile=quantile,
        bound_ms=bound_ms,
        inclusive=sign == "<=",
    )


def _statistic(term: str, statistic: str | None) -> tuple[str, float | None]:
    if statistic is None:
        return EVERY, None
    if statistic in ("mean", "max"):
        return statistic, None
    match = _PERCENTILE.fullmatch(statistic)
    if match is None or not float(match[1].replace("_", ".")):
        raise ValueError(f"--slo: {term!r}: unknown statistic {statistic!r}; choose p50, p99, p99.9, …, mean or max")
    label = match[1].replace("_", ".")
    return f"p{label}", float(label) / 100


def _of_request(objective: Objective, log: RequestLog, metrics: RequestMetrics) -> tuple[Floats, Bools]:
    """Return what an objective bounds of each request, float64[n], and where there is nothing to bound, bool[n]."""
    if objective.metric == "itl":
        values = metrics.max_pause_ms if objective.statistic in (EVERY, "max") else metrics.itl_mean_ms
        return values, np.isnan(values) & (log.first_token_ns >= 0) & (np.diff(log.chunk_start) > 0)
    values = _column(objective, metrics)
    one_token = np.isnan(values) & ((log.output_tokens == 0) | (log.output_tokens == 1))
    return values, one_token if objective.metric == "tpot" else np.zeros(len(log), np.bool_)


def _sample(objective: Objective, metrics: RequestMetrics, ok: Bools) -> Floats:
    if objective.metric == "itl":
        return metrics.itl_ms[ok[metrics.itl_request]]
    return known(_column(objective, metrics)[ok])


def _column(objective: Objective, metrics: RequestMetrics) -> Floats:
    return {"ttft": metrics.ttft_ms, "tpot": metrics.tpot_ms, "e2e": metrics.e2e_ms}[objective.metric]


def _result(objective: Objective, sample: Floats) -> ObjectiveResult:
    value_ms = _value_ms(objective, sample) if len(sample) else None
    met = None if value_ms is None else bool(_holds(objective, np.array([value_ms]))[0])
    return ObjectiveResult(
        text=objective.text,
        metric=objective.metric,
        statistic=objective.statistic,
        bound_ms=objective.bound_ms,
        count=len(sample),
        value_ms=value_ms,
        met=met,
        missing=UNSET if len(sample) else f"no request that ended ok has a value of {objective.metric}",
    )


def _value_ms(objective: Objective, sample: Floats) -> float:
    if objective.quantile is not None:
        return float(np.quantile(sample, objective.quantile))
    return float(sample.mean() if objective.statistic == "mean" else sample.max())


def _holds(objective: Objective, values: Floats) -> Bools:
    with np.errstate(invalid="ignore"):
        fits: Bools = values <= objective.bound_ms if objective.inclusive else values < objective.bound_ms
    return fits
