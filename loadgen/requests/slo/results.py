"""Service level objectives: which requests meet them (goodput), and whether a run did.

`objectives` says how they are written. An objective of a latency speaks of all requests of the measured phase:

ok                      its latency; a reply that has none (no usage, not streamed, one token) is left out
failed, refused, cancelled by the load generator, without an end
                        an infinite latency. A percentile stays finite while fewer have failed than lie above it; a
                        mean, a maximum and a plain metric, which bounds every request, are infinite with the first.
                        Of an itl, whose values are gaps, it stands for as many as an ok request has on the mean
in flight when the user stopped the run
                        left out: how it would have ended is not known. But an infinite TTFT or E2E where it had
                        waited for longer than the bound already

Goodput counts a request when the bound of each objective of a latency holds for that request, whatever statistic the
objective is about; so do other benchmarks, whose goodput bounds the request's own TTFT, TPOT and E2E. What an itl
objective bounds of one request is its mean gap; for `itl_max` and plain `itl` it is its longest.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from sidelight.loadgen.requests.metrics import RequestMetrics, in_one_read, later_tokens, span_ms
from sidelight.loadgen.requests.slo.objectives import (
    EVERY,
    Metric,
    Objective,
    Slo,
    Unit,
    parse_slo,
    parse_typed_slo,
    subject_of,
)
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Floats
from sidelight.rundir.fields import UNSET, Count, doc
from sidelight.rundir.fields import Missing as Why
from sidelight.rundir.stats import Missing, known

__all__ = [
    "Goodput",
    "ObjectiveResult",
    "Slo",
    "SloResult",
    "SloTally",
    "goodput",
    "parse_slo",
    "parse_typed_slo",
    "slo_result",
]

# The rates of a run that objectives bound, by their names in `throughput`.
_THROUGHPUT: Mapping[str, str] = {
    "goodput": "goodput_requests_per_s",
    "requests_per_s": "requests_per_s",
    "output_tokens_per_s": "output_tokens_per_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Masks of the requests that met all objectives, and of the undetermined ones.

    Both are bool[n]; undetermined requests count as not met.
    """

    met: Bools
    unknown: Bools


@dataclass(slots=True)
class _LatencySample:
    """A sample of a bound latency: its values and the numbers of requests.

    `valued` requests have values; `lost` requests count as infinite.
    """

    values_ms: array[float] = field(default_factory=lambda: array("d"))
    valued: int = 0
    lost: int = 0


class ObjectiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """One objective, and whether the run met it."""

    text: Annotated[str, doc("As it was written.")]
    metric: Annotated[Metric, doc("What is bound.")]
    statistic: Annotated[
        str,
        doc("Which statistic of it; `every`: each request, or each gap of an itl; `run`: the run's one number."),
    ]
    unit: Annotated[Unit, doc("The unit of `bound` and `value`.")]
    bound: Annotated[float, doc("The bound.", "as in `unit`")]
    value: Annotated[float | None, doc("The run's value; null where it is infinite, or not known.", "as in `unit`")]
    bound_ms: Annotated[float | None, doc("The bound of a latency.", "ms")]
    value_ms: Annotated[float | None, doc("The run's value of a latency.", "ms")]
    count: Annotated[Count, doc("Number of values that are finite.", "values")]
    requests: Annotated[Count, doc("Requests that the objective is about.", "requests")]
    failed_requests: Annotated[
        Count, doc("Of those, requests that did not end ok: their latency counts as infinite.", "requests")
    ]
    left_out_requests: Annotated[
        Count,
        doc(
            "Requests that it leaves out: ok without such a value, or in flight when the user stopped the run.",
            "requests",
        ),
    ]
    met: Annotated[bool | None, doc("Whether it was met; null: not known.")]
    missing: Why = UNSET

    @property
    def name(self) -> str:
        """Return the name of the bounded metric, as `--slo` writes it: `ttft_p99`, `error_rate`."""
        return subject_of(self.metric, self.statistic)


class SloResult(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives of `--slo`, and which requests met them."""

    text: Annotated[str, doc("The objectives as they were written.", source="`--slo`")]
    met: Annotated[bool | None, doc("Whether all were met; null when that is not known of one.")]
    good_requests: Annotated[Count, doc("Requests that met every objective of a latency.", "requests")]
    undetermined_requests: Annotated[
        Count, doc("Requests that ended ok, and it is not known whether they met every objective.", "requests")
    ]
    objectives: Annotated[list[ObjectiveResult], doc("The objectives one by one.")]


def all_met(objectives: Sequence[ObjectiveResult]) -> bool | None:
    """Return whether all objectives were met; None when that is not known of one, and none was missed."""
    met = [objective.met for objective in objectives]
    return False if False in met else None if None in met else True


def goodput(slo: Slo, log: RequestLog, metrics: RequestMetrics) -> Goodput:
    """Return masks of the requests that met all latency objectives, and of undetermined ones.

    `metrics` are those of the same log.

    - status other than ok: not met
    - one token, or one chunk: there is no interval that could be too long, tpot or itl is met
    - a metric that the reply does not give (no usage, not streamed, in one read): unknown, and not met
    """
    met, unknown = log.status == "ok", np.zeros(len(log), np.bool_)
    for objective in slo.latencies:
        values, vacuous = _of_request(objective, log, metrics)
        absent = np.isnan(values) & ~vacuous
        met &= vacuous | (~absent & _all_hold(objective, values))
        unknown |= absent
    return Goodput(met=met & ~unknown, unknown=unknown & (log.status == "ok"))


def slo_result(
    slo: Slo,
    log: RequestLog,
    metrics: RequestMetrics,
    rates: Mapping[str, float | Missing],
    *,
    stopped: bool = False,
) -> SloResult:
    """Judge a run by each objective, and count the requests that met all.

    log       all requests of the measured phase; `metrics` are theirs, whatever became of them
    rates     those of `throughput`, by name
    stopped   whether the user stopped the run

    `met` is true when every objective was met, false when one was not, null when that is not known of one of them.
    """
    tally = SloTally(slo, stopped=stopped)
    tally.add(log, metrics)
    return tally.result(rates)


@dataclass(slots=True)
class SloTally:
    """Running totals that the objectives need of a phase's requests.

    They are added up batch by batch: no batch is kept.

    `stopped` as for `slo_result`. `good` requests met every objective of a latency, of `undetermined` ones that ended
    ok that is not known.
    """

    slo: Slo
    stopped: bool = False
    requests: int = 0
    ok: int = 0
    cut_short: int = 0
    good: int = 0
    undetermined: int = 0
    _samples: dict[str, _LatencySample] = field(default_factory=dict)

    def add(self, log: RequestLog, metrics: RequestMetrics) -> None:
        """Add new requests; `metrics` are those of the same log. None of them was added before."""
        ok = log.status == "ok"
        cut_short = ((log.status == "cancelled") | (log.status == "in_flight")) & self.stopped | (log.status == "left")
        good = goodput(self.slo, log, metrics)
        self.requests += len(log)
        self.ok += int(ok.sum())
        self.cut_short += int(cut_short.sum())
        self.good += int(good.met.sum())
        self.undetermined += int(good.unknown.sum())
        for objective in self.slo.latencies:
            sample = self._samples.setdefault(objective.text, _LatencySample())
            of_request, _ = _of_request(objective, log, metrics)
            values_ms = of_request[ok]
            sample.valued += int((~np.isnan(values_ms)).sum())
            sample.lost += int(((~ok & ~cut_short) | (cut_short & _overdue(objective, log))).sum())
            if objective.metric == "itl":
                values_ms = metrics.itl_ms[np.repeat(ok, metrics.gap_count)]
            sample.values_ms.frombytes(known(values_ms).tobytes())

    def result(self, rates: Mapping[str, float | Missing]) -> SloResult:
        """Judge the requests so far by each objective; `rates` as for `slo_result`."""
        results = [
            self._of_latency(objective) if objective.of_latency else self._of_run(objective, rates)
            for objective in self.slo.objectives
        ]
        return SloResult(
            text=self.slo.text,
            met=all_met(results),
            good_requests=self.good,
            undetermined_requests=self.undetermined,
            objectives=results,
        )

    def _of_latency(self, objective: Objective) -> ObjectiveResult:
        sample = self._samples.get(objective.text, _LatencySample())
        values_ms = np.frombuffer(sample.values_ms.tobytes())
        infinite = sample.lost
        if objective.metric == "itl":
            infinite *= max(1, math.ceil(len(values_ms) / max(sample.valued, 1)))
        value_ms = _value_ms(objective, values_ms, infinite)
        requests = sample.valued + sample.lost
        missing = ""
        if value_ms is None:
            missing = f"no request that ended ok has a value of {objective.metric}"
        elif math.isinf(value_ms):
            of_all = f"{sample.lost} of {requests} requests"
            missing = f"{of_all} did not end ok, and their {objective.metric} counts as infinite"
        return self._result(objective, value_ms, sample.lost, requests=requests, count=len(values_ms), missing=missing)

    def _of_run(self, objective: Objective, rates: Mapping[str, float | Missing]) -> ObjectiveResult:
        requests = self.requests - self.cut_short
        lost = requests - self.ok
        value: float | Missing
        if objective.metric in _THROUGHPUT:
            value = rates[_THROUGHPUT[objective.metric]]
        elif not requests:
            value = Missing(reason="no request had ended")
        elif objective.metric == "error_rate":
            value = float(lost) / requests
        elif self.ok and self.undetermined == self.ok:
            value = Missing(reason="no reply has what the objectives of latencies bound")
        else:
            value = float(self.good) / requests
        missing = value.reason if isinstance(value, Missing) else ""
        amount = None if isinstance(value, Missing) else value
        return self._result(objective, amount, lost, requests=requests, count=requests, missing=missing)

    def _result(
        self, objective: Objective, value: float | None, lost: int, *, requests: int, count: int, missing: str
    ) -> ObjectiveResult:
        finite = value if value is not None and math.isfinite(value) else None
        return ObjectiveResult(
            text=objective.text,
            metric=objective.metric,
            statistic=objective.statistic,
            unit=objective.unit,
            bound=objective.bound,
            value=finite,
            bound_ms=objective.bound if objective.of_latency else None,
            value_ms=finite if objective.of_latency else None,
            count=count,
            requests=requests,
            failed_requests=lost,
            left_out_requests=self.requests - requests,
            met=None if value is None else objective.holds(value),
            missing=missing or UNSET,
        )


def _overdue(objective: Objective, log: RequestLog) -> Bools:
    """Return a mask of requests overdue when the run was stopped, bool[n].

    They had waited for longer than the bound.
    """
    if objective.metric == "ttft":
        waited_ms = span_ms(log.submit_ns, np.where(log.first_token_ns >= 0, log.first_token_ns, log.end_ns))
    elif objective.metric == "e2e":
        waited_ms = span_ms(log.submit_ns, log.end_ns)
    else:
        return np.zeros(len(log), np.bool_)
    return ~np.isnan(waited_ms) & ~_all_hold(objective, waited_ms)


def _value_ms(objective: Objective, sample: Floats, infinite: int) -> float | None:
    """Return a statistic of a sample and `infinite` further infinite values. None where there are neither."""
    if not len(sample) and not infinite:
        return None
    if objective.quantile is None:
        return math.inf if infinite else float(sample.mean() if objective.statistic == "mean" else sample.max())
    # Between the two values at which np.quantile looks, of which the larger may be infinite. Rounded, as products
    # like 0.99 * 100 may come out a hair above the place of the last finite value.
    place = round(objective.quantile * (len(sample) + infinite - 1), 9)
    if math.ceil(place) >= len(sample):
        return math.inf
    return float(np.quantile(np.append(sample, np.full(infinite, sample.max())), objective.quantile))


def _of_request(objective: Objective, log: RequestLog, metrics: RequestMetrics) -> tuple[Floats, Bools]:
    """Return each request's bounded value, float64[n], and a mask of vacuous ones, bool[n].

    A vacuous request has nothing to bound.
    """
    if objective.metric == "itl":
        values = metrics.max_pause_ms if objective.statistic in (EVERY, "max") else metrics.itl_mean_ms
        return values, np.isnan(values) & (np.diff(log.chunk_start) > 0) & (log.first_token_ns >= 0) & ~in_one_read(log)
    values = _column(objective, metrics)
    one_token = np.isnan(values) & (later_tokens(log) <= 0)
    return values, one_token if objective.metric == "tpot" else np.zeros(len(log), np.bool_)


def _column(objective: Objective, metrics: RequestMetrics) -> Floats:
    return {"ttft": metrics.ttft_ms, "tpot": metrics.tpot_ms, "e2e": metrics.e2e_ms}[objective.metric]


def _all_hold(objective: Objective, values_ms: Floats) -> Bools:
    """Return a mask of the latencies that keep the bound, bool[n]; NaN does not."""
    with np.errstate(invalid="ignore"):
        fits: Bools = values_ms <= objective.bound if objective.inclusive else values_ms < objective.bound
    return fits
