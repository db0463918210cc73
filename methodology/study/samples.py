"""Samples of whole runs, one value per metric: what comparisons and sweeps put beside each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.methodology.study.model import Finished, Kind, StepData
from sidelight.methodology.study.outcome import KIND_OF, trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMetric:
    """A number of each run that is compared; `kind` is what of the load generator it rests on, beside the load."""

    name: str
    title: str
    unit: str
    lower_is_better: bool = True
    kind: Kind | None = None


_TIMES = {"ttft_ms": (50, 90, 99), "tpot_ms": (50, 99), "e2e_ms": (50, 99)}
TIMES = tuple(
    ComparedMetric(
        name=f"{time[:-3]}_p{percent}_ms",
        title=f"{time[:-3].upper()} P{percent}",
        unit="ms",
        kind=KIND_OF.get(time[:-3]),
    )
    for time, percents in _TIMES.items()
    for percent in percents
)
RATES = (
    ComparedMetric(name="output_tokens_per_s", title="Output tokens/s", unit="tokens/s", lower_is_better=False),
    ComparedMetric(
        name="completed_requests_per_s", title="Completed requests/s", unit="requests/s", lower_is_better=False
    ),
)
FAMILY = (*TIMES, *RATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """Sample of a run: a value a metric, the mean of each part of its TTFT, and its success rate; NaN where unknown.

    A request that failed took for ever: a percentile that falls on one is infinite. `error_ms`: as of StepData.
    """

    finished: Finished
    metrics: Mapping[str, float]
    parts_ms: Mapping[str, float]
    success: float
    error_ms: Mapping[Kind, float] = field(default_factory=dict)


def sample(finished: Finished, data: StepData, doubts: Collection[Kind]) -> RunSample:
    """Return the sample of one run, without the times that rest on doubted data."""
    outcome, requests = finished.outcome, request_metrics(data.requests)
    ok = data.requests.status == "ok"
    values = {
        "output_tokens_per_s": math.nan if outcome.output_tokens_per_s is None else outcome.output_tokens_per_s,
        "completed_requests_per_s": math.nan if outcome.completed_per_s is None else outcome.completed_per_s,
    }
    for name, percents in _TIMES.items():
        times_ms = trusted(name, np.where(ok, getattr(requests, name), np.inf), doubts)
        ascending = np.sort(times_ms[~np.isnan(times_ms)])
        for percent in percents:
            place = math.ceil(percent / 100 * len(ascending)) - 1
            value = float(ascending[place]) if len(ascending) else math.nan
            values[f"{name.removesuffix('_ms')}_p{percent}_ms"] = value
    covered = data.parts.covered
    means_ms = {part.name: 1e3 * np.nan_to_num(data.parts.seconds(part)[covered]) for part in TTFT_PARTS}
    return RunSample(
        finished=finished,
        metrics=values,
        parts_ms={name: float(values_ms.mean()) for name, values_ms in means_ms.items()} if covered.any() else {},
        success=outcome.ok / outcome.sent if outcome.sent else math.nan,
        error_ms=data.error_ms,
    )
