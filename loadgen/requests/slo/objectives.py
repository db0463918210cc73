"""Syntax and parser of the objectives of `--slo`.

Several are separated by commas: `ttft_p99<500ms,tpot_p99<50ms,error_rate<1%`.

METRIC[_STATISTIC]<BOUND, of a latency
    metric      ttft, tpot, itl (time between chunks where chunks are not tokens), e2e
    statistic   p50 to p99.99, mean, max; none: every request, or every gap of an itl, is bound. Below p50 a
                percentile has a decimal, as in p9.0: p9 is most often p90 or p99 with a digit left out
    bound       a number with its unit, ms or s, after `<` or `<=`
METRIC<SHARE, METRIC>SHARE or METRIC>RATE, of the run as a whole (RUN_METRICS)
    error_rate<1%, goodput_ratio>95%                        a percentage, or a number from 0 to 1
    goodput>3, requests_per_s>3, output_tokens_per_s>100    a number a second, `/s` behind it or not
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Latency = Literal["ttft", "tpot", "itl", "e2e"]
Metric = Literal[
    "ttft", "tpot", "itl", "e2e", "error_rate", "goodput", "goodput_ratio", "requests_per_s", "output_tokens_per_s"
]
Unit = Literal["ms", "ratio", "requests/s", "tokens/s"]
LATENCIES: tuple[Latency, ...] = get_args(Latency)
METRICS: tuple[Metric, ...] = get_args(Metric)
EVERY = "every"
WHOLE_RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunMetric:
    """A metric with one value per run, with an example of its objective."""

    unit: Unit
    from_below: bool
    example: str


RUN_METRICS: Mapping[str, _RunMetric] = {
    "error_rate": _RunMetric(unit="ratio", from_below=False, example="error_rate<1%"),
    "goodput": _RunMetric(unit="requests/s", from_below=True, example="goodput>3"),
    "goodput_ratio": _RunMetric(unit="ratio", from_below=True, example="goodput_ratio>95%"),
    "requests_per_s": _RunMetric(unit="requests/s", from_below=True, example="requests_per_s>3"),
    "output_tokens_per_s": _RunMetric(unit="tokens/s", from_below=True, example="output_tokens_per_s>100"),
}
_OF_GOOD = ("goodput", "goodput_ratio")
_UNITS_MS = {"ms": 1.0, "s": 1000.0}
_UNITS_RATIO = {"": 1.0, "%": 0.01}
_SHARE_DECIMALS = 12
_MEDIAN = 50
_UNITS_PER_S = {"": 1.0, "/s": 1.0}
_TERM = re.compile(r"([a-z0-9._]+)\s*(<=|<|>=|>)\s*([0-9.eE+-]+)\s*([a-z/%]*)")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:[._]\d{1,2})?)")
_EXAMPLE = "write one like ttft_p99<500ms or error_rate<1%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One bound, in `unit`: from below where more is better, else from above.

    `quantile` is 0 to 1 where the statistic is a percentile, else None.
    """

    text: str
    metric: Metric
    statistic: str
    quantile: float | None
    bound: float
    unit: Unit
    from_below: bool
    inclusive: bool

    @property
    def of_latency(self) -> bool:
        """Return whether the objective bounds a latency. Else it bounds a number that the run as a whole has."""
        return self.statistic != WHOLE_RUN

    def holds(self, value: float) -> bool:
        """Return whether a value keeps the bound; NaN does not."""
        if self.inclusive and value == self.bound:
            return True
        return value > self.bound if self.from_below else value < self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The service level objectives of `--slo`."""

    text: str
    objectives: tuple[Objective, ...]

    @property
    def latencies(self) -> tuple[Objective, ...]:
        """The objectives of latencies, which decide on good requests."""
        return tuple(objective for objective in self.objectives if objective.of_latency)


def parse_slo(text: str) -> Slo:
    """Read objectives. Raises ValueError, which names the term, what is wrong with it, and the cure."""
    terms = [term.strip() for term in text.split(",")]
    objectives = tuple(_objective(term) for term in terms)
    names = [subject_of(objective.metric, objective.statistic) for objective in objectives]
    for name, term, objective in zip(names, terms, objectives, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"--slo: {term!r}: {name} is bound twice; keep one of the bounds")
        if objective.metric in _OF_GOOD and not any(each.of_latency for each in objectives):
            raise ValueError(
                f"--slo: {term!r}: no objective says which requests are good; add one of a latency, like "
                f"{term},ttft<500ms"
            )
    return Slo(text=",".join(objective.text for objective in objectives), objectives=objectives)


def parse_typed_slo(text: str) -> Slo:
    """Read objectives as people type them. Raises ValueError as `parse_slo`, and for p9: p90 or p99 may be meant."""
    slo = parse_slo(text)
    for objective in slo.objectives:
        low = objective.statistic.removeprefix("p")
        if low.isdecimal() and int(low) < _MEDIAN:
            raise ValueError(
                f"--slo: {objective.text!r}: p{low} lets {100 - int(low)} % of the requests be slower; choose p50, "
                f"p90, p99, or write p{low}.0 if it is meant"
            )
    return slo


def _objective(term: str) -> Objective:
    match = _TERM.fullmatch(term)
    if match is None:
        hint = ", in quotes: a shell takes < and > for files" if term.replace("_", "").isalnum() else ""
        raise ValueError(f"--slo: {term!r} is not an objective; {_EXAMPLE}{hint}")
    name, sign, number, unit = match.groups()
    if name in RUN_METRICS:
        return _of_run(term, name, sign, number, unit)
    subject, _, statistic = name.partition("_")
    metric = next((metric for metric in LATENCIES if metric == subject), None)
    if metric is None:
        owner = next((owner for owner in RUN_METRICS if name.startswith(f"{owner}_")), None)
        if owner is not None:
            problem = f"{owner} is one number of a run and has no statistics; write {RUN_METRICS[owner].example}"
            raise ValueError(f"--slo: {term!r}: {problem}")
        if statistic in LATENCIES:
            raise ValueError(
                f"--slo: {term!r}: the metric comes first; write {statistic}_{subject}{sign}{number}{unit}"
            )
        raise ValueError(f"--slo: {term!r}: unknown metric {subject!r}; choose from {', '.join(METRICS)}")
    if ">" in sign:
        raise ValueError(f"--slo: {term!r}: a latency is bound from above; write < or <=, like ttft_p99<500ms")
    if unit not in _UNITS_MS:
        problem = f"unknown unit {unit!r}" if unit else "no unit"
        raise ValueError(f"--slo: {term!r}: {problem}; write the bound in ms or s, like 500ms")
    bound_ms = _number(number) * _UNITS_MS[unit]
    if not 0 < bound_ms < math.inf:
        raise ValueError(f"--slo: {term!r}: {number!r} is not a bound; write a number above zero, like 500ms")
    label, quantile = _statistic(term, statistic)
    return Objective(
        text=f"{subject_of(metric, label)}{sign}{number}{unit}",
        metric=metric,
        statistic=label,
        quantile=quantile,
        bound=bound_ms,
        unit="ms",
        from_below=False,
        inclusive=sign == "<=",
    )


def _of_run(term: str, name: str, sign: str, number: str, unit: str) -> Objective:
    """Return the objective of a number that a run has one of."""
    metric = RUN_METRICS[name]
    if (">" in sign) != metric.from_below:
        side, signs = ("below", "> or >=") if metric.from_below else ("above", "< or <=")
        raise ValueError(f"--slo: {term!r}: {name} is bound from {side}; write {signs}, like {metric.example}")
    units = _UNITS_RATIO if metric.unit == "ratio" else _UNITS_PER_S
    if unit not in units:
        of_ratio = "; the share of good requests is goodput_ratio" if (name, unit) == ("goodput", "%") else ""
        raise ValueError(f"--slo: {term!r}: unknown unit {unit!r}; write it like {metric.example}{of_ratio}")
    bound = _number(number) * units[unit]
    if metric.unit == "ratio":
        bound = round(bound, _SHARE_DECIMALS)  # 95 % of requests is 0.95, but 95 * 0.01 is a hair above that
        if not 0 <= bound <= 1:
            raise ValueError(f"--slo: {term!r}: {number!r} is not a share; write a percentage, or a number from 0 to 1")
        if (sign == "<" and bound == 0) or (sign == ">" and bound == 1):
            raise ValueError(f"--slo: {term!r}: no run can meet this; write {name}{sign}={number}{unit}")
    elif not 0 <= bound < math.inf:
        raise ValueError(f"--slo: {term!r}: {number!r} is not a rate; write a number a second, like {metric.example}")
    return Objective(
        text=f"{name}{sign}{number}{unit}",
        metric=next(each for each in METRICS if each == name),
        statistic=WHOLE_RUN,
        quantile=None,
        bound=bound,
        unit=metric.unit,
        from_below=metric.from_below,
        inclusive="=" in sign,
    )


def _number(text: str) -> float:
    """Parse a number, NaN for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def subject_of(metric: str, statistic: str) -> str:
    """Return the name of an objective's subject, as it is written."""
    return metric if statistic in (EVERY, WHOLE_RUN) else f"{metric}_{statistic}"


def _statistic(term: str, statistic: str) -> tuple[str, float | None]:
    if not statistic:
        return EVERY, None
    if statistic in ("mean", "max"):
        return statistic, None
    match = _PERCENTILE.fullmatch(statistic)
    if match is None or not float(match[1].replace("_", ".")):
        raise ValueError(f"--slo: {term!r}: unknown statistic {statistic!r}; choose p50, p99, p99.9, …, mean or max")
    label = match[1].replace("_", ".")
    return f"p{label}", float(label) / 100
