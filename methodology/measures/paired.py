"""Pairs of the same requests in several steps, and statistics with block bootstrap intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sidelight.correlator.statistics.bootstrap import block_count, block_length, interval95, resampled_rows
from sidelight.correlator.statistics.intervals import Ends
from sidelight.loadgen.requests.metrics import input_tokens, request_metrics
from sidelight.methodology.study.findings import ResultQuantity
from sidelight.methodology.study.model import Finished, StepData
from sidelight.methodology.study.outcome import submitted_within, trusted
from sidelight.methodology.study.quantities import in_percent, number
from sidelight.rundir.columns import Bools, Floats, Indices, Ints, Texts, take

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
RESAMPLES = 500


def of_ends(ends: Ends, unit: str, n: int) -> ResultQuantity:
    """Return an estimate and its interval as a result; a value that is not finite is missing."""
    return number(ends[0], unit, ci95=ends[1:], n=n, method="circular block bootstrap", missing="too few values")


def bootstrapped(
    samples: Sequence[Floats], statistic: Callable[[Sequence[Floats]], Sequence[float]], *, logs: bool = False
) -> list[Ends]:
    """Return statistics [M] of independent series, with 95 % intervals.

    Each series is [n] or [n, columns] in the order of time. What resembles its neighbours is drawn with them: a block
    is as long as the first column of its series asks for. `logs`: the statistics are positive ratios, whose logarithms
    are nearer to normal.
    """

    def on_scale(values: Sequence[float]) -> Floats:
        array = np.asarray(values, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(array) if logs else array

    centre = on_scale(statistic(samples))
    if not all(map(len, samples)):
        return [(value, None, None) for value in _off_scale(centre, logs=logs)]
    blocks = [block_length(sample if sample.ndim == 1 else sample[:, 0]) for sample in samples]
    drawn = [
        resampled_rows(len(sample), block, resamples=RESAMPLES, seed=seed)
        for seed, (sample, block) in enumerate(zip(samples, blocks, strict=True), 1)
    ]
    resampled = np.array(
        [
            on_scale(statistic([s[rows] for s, rows in zip(samples, row, strict=True)]))
            for row in zip(*drawn, strict=True)
        ]
    )
    count = min(block_count(len(sample), block) for sample, block in zip(samples, blocks, strict=True))
    ends: list[Ends] = []
    for value, column in zip(centre.tolist(), resampled.T, strict=True):
        interval = interval95(value, column, count) if math.isfinite(value) else None
        middle, *outer = _off_scale(np.array([value, *(interval or ())]), logs=logs)
        ends.append((middle, outer[0], outer[1]) if outer else (middle, None, None))
    return ends


def _off_scale(values: Floats, *, logs: bool) -> list[float]:
    scaled: list[float] = (np.exp(values) if logs else values).tolist()
    return scaled


def clipped(ends: Ends, low: float, high: float) -> Ends:
    """Return an estimate with its interval clipped to the possible range."""
    value, first, last = ends
    return value, None if first is None else max(low, first), None if last is None else min(high, last)


def measured(step: Finished, data: StepData) -> StepData:
    """Return a step's tables for the requests submitted in its window, in order of submission.

    `index` is then a request's place in the plan, from 0.
    """
    window, log = step.outcome.window, data.requests
    rows = np.flatnonzero(submitted_within(log, window)) if window else np.zeros(0, np.int64)
    rows = rows[np.argsort(log.submit_ns[rows], kind="stable")]
    places = dataclasses.replace(log, index=log.index - log.index.min(initial=2**62))
    return dataclasses.replace(data, requests=take(places, rows), parts=take(data.parts, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of a step's requests [n], in the order of submission; NaN: not known."""

    ok: Bools
    submit_ns: Ints
    ttft_ms: Floats
    tpot_ms: Floats
    queue_ms: Floats
    prefill_ms: Floats
    tokens: Floats
    blank: Bools  # whether the reply began with blank content
    classes: Texts
    exact: Bools  # whether spans or the reply tell the queue time

    def of(self, name: str) -> Times:
        return take(self, self.classes == name)


def times(data: StepData) -> Times:
    """Return the times of measured requests."""
    log, parts, metrics = data.requests, data.parts, request_metrics(data.requests)
    return Times(
        ok=log.status == "ok",
        submit_ns=log.submit_ns,
        ttft_ms=metrics.ttft_ms,
        tpot_ms=trusted("tpot_ms", metrics.tpot_ms, data.doubts),
        queue_ms=1e3 * parts.queue_s,
        prefill_ms=1e3 * parts.prefill_s,
        tokens=input_tokens(log),
        blank=log.blank_before_first > 0,
        classes=log.workload_class,
        exact=np.isin(parts.source, ("trace", "response")) & np.isfinite(parts.queue_s),
    )


def paired(first: StepData, second: StepData) -> tuple[Indices, Indices]:
    """Return the rows of the same requests in two steps, in order.

    They ended ok in both. Steps of equal seeds send the same requests at the same moments: a request is known by its
    place in the plan.
    """
    ended = [np.flatnonzero(each.requests.status == "ok") for each in (first, second)]
    places, other_places = (each.requests.index[rows] for each, rows in zip((first, second), ended, strict=True))
    _, at, others = np.intersect1d(places, other_places, return_indices=True)
    return ended[0][at], ended[1][others]


def throughput(suffix: str, step: Finished | None, base: Finished | None) -> dict[str, ResultQuantity]:
    """Return the output tokens/s of a saturated step, and their change against another; its interval is of both."""
    names = (f"max_output_tokens_per_s_{suffix}", f"throughput_change_ratio_{suffix}")
    served = step.outcome.output_tokens_per_s if step else None
    if step is None or served is None:
        reason = "no saturated step counts"
        return {names[0]: number(None, "tokens/s", missing=reason), names[1]: number(None, "ratio", missing=reason)}
    ci95, count = step.outcome.output_tokens_ci95, step.outcome.ok
    results = {names[0]: number(served, "tokens/s", ci95=ci95, n=count, method="batch means")}
    before = base.outcome.output_tokens_per_s if base else None
    if base is None or not before or step is base:
        return results | {names[1]: number(None, "ratio", missing="it is what the others are compared with")}
    change = served / before - 1
    halves = [
        (ends[1] - ends[0]) / 2 / value
        for value, ends in ((served, ci95), (before, base.outcome.output_tokens_ci95))
        if ends
    ]
    half = (1 + change) * math.hypot(*halves)
    ends = (change - half, change + half) if len(halves) == 2 else None
    method = "batch means, their relative errors added in squares"
    return results | {names[1]: number(change, "ratio", ci95=ends, n=count, method=method)}


def throughput_sentence(change: ResultQuantity, where: str) -> str:
    """Return by how much a configuration changes the throughput of the saturated system."""
    if change.value is None:
        return f"How the throughput of the saturated system changes {where} is not known: {change.missing}."
    sign = "+" if change.value > 0 else ""
    return f"The throughput of the saturated system changes by {sign}{in_percent(change)} {where}."


def overloaded(steps: Sequence[Finished]) -> list[str]:
    """Return a note of the steps with piled-up requests, or nothing."""
    labels = [f"{each.number} ({each.step.label})" for each in steps if each.outcome.verdict == "growing"]
    if not labels:
        return []
    named = f"Step {labels[0]} was" if len(labels) == 1 else f"Steps {', '.join(labels)} were"
    return [f"{named} overloaded: latencies there, and what follows from them, depend on how long the load lasted."]
