"""Preempted requests of an engine, those that came to their end, and their loss: by its page alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidelight.correlator.statistics.server_load import leading_endpoints
from sidelight.loadgen.requests.metrics import input_tokens
from sidelight.methodology.study.findings import ResultQuantity
from sidelight.methodology.study.model import StepData
from sidelight.methodology.study.quantities import BOUNDS, number
from sidelight.methodology.study.server_side import reference
from sidelight.rundir.columns import Floats
from sidelight.rundir.printable.numbers import figure
from sidelight.scraper.exposition import histograms
from sidelight.scraper.series.resets import restarts_of, rising, rising_histogram

HISTOGRAM = "request_num_preemptions"
# SGLang's counters of prefill: all that was computed, and what of it was for the first time.
RECOMPUTED = (("realtime_tokens_total", "prefill_compute"), ("prefill_effective_tokens_total", "input"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Numbers of preempted requests: at least and at most, those that came to their end, and by which source."""

    low: float
    high: float
    finished: float | None
    source: str


def preempted(data: StepData, preemptions: float | None) -> Preempted | None:
    """Return the preempted requests of a step, from the histogram per request, else the counter.

    The histogram's first bucket holds 0 and 1: n1 = sum - 2 n2 - 3 n3 ..., exact where no request had more than five.
    """
    bounds: tuple[float, ...] = ()
    counts, total = np.zeros(0), 0.0
    for page, _ in leading_endpoints(data.endpoints):
        row = reference(page, data.start_ns)
        for columns in (group for group in histograms(page.series) if group.family.endswith(HISTOGRAM)):
            shown = rising_histogram(page, columns, restarts_of(page))
            buckets = np.diff(shown.buckets[-1] - shown.buckets[row], prepend=0.0)
            # Of several engines the buckets are those of one version, or they say nothing together.
            total += float(shown.sum[-1] - shown.sum[row]) if bounds in ((), columns.bounds) else np.nan
            counts, bounds = (counts + buckets if len(counts) == len(buckets) else buckets), columns.bounds
    if len(counts) and np.isfinite([total, *counts]).all():
        low, high = several(np.asarray(bounds), counts, total)
        return Preempted(low=low, high=high, finished=float(counts.sum()), source="the engine's histogram")
    if preemptions is None:
        return None
    high = min(preemptions, float(len(data.requests)))
    return Preempted(low=min(1.0, high), high=high, finished=None, source="the engine's counter, as bounds")


def several(bounds: Floats, counts: Floats, total: float) -> tuple[float, float]:
    """Return the least and the most observations of a count that were at least 1.

    bounds, counts  upper bounds of the buckets, which hold whole numbers, and the observations in each; the first
                    bucket is of 0 and 1
    total           sum of the observations
    """
    least = np.concatenate([[0.0], bounds[:-1] + 1])
    more = float(counts[1:].sum())
    at_most = total - float(counts[1:] @ least[1:])
    most = np.where(np.isfinite(bounds), bounds, np.inf)[1:]
    with np.errstate(invalid="ignore"):
        at_least = total - float(np.where(counts[1:] > 0, counts[1:] * most, 0.0).sum())
    return more + max(0.0, at_least), more + min(float(counts[0]), max(0.0, at_most))


def lost_tokens(data: StepData, preemptions: float) -> ResultQuantity:
    """Return the bounds of the tokens discarded per preemption.

    They are by the engine's counters where it has them. At least those that were computed again; at most the whole
    prompts and outputs so far of the preempted requests.
    """
    if not preemptions:
        return number(None, "tokens", missing="no request was preempted")
    whole = [_increase(data, f"num_retracted_{part}_tokens_total") for part in ("input", "output")]
    computed, fresh = (_increase(data, name, mode) for name, mode in RECOMPUTED)
    longest = float(np.nanmax(input_tokens(data.requests) + data.requests.max_tokens, initial=1.0))
    low = 1.0 if computed is None or fresh is None else (computed - fresh) / preemptions
    high = longest if None in whole else sum(each or 0.0 for each in whole) / preemptions
    return bounded(min(low, high), high, round(preemptions), "the engine's page", "tokens")


def _increase(data: StepData, metric: str, mode: str = "") -> float | None:
    """Return the increase of a counter by its name without the engine's prefix; None where no page has it."""
    total = None
    for page, _ in leading_endpoints(data.endpoints):
        columns = [
            at
            for at, series in enumerate(page.series)
            if series.name.endswith(metric) and (not mode or dict(series.labels).get("mode") == mode)
        ]
        for values in (rising(page, column, restarts_of(page)).values for column in columns):
            total = (total or 0.0) + float(values[-1] - values[reference(page, data.start_ns)])
    return total


def recovered(times: Preempted, failed: int) -> ResultQuantity:
    """Return the share of the preempted requests that came to their end.

    Whether failed requests were preempted is not known.
    """
    if not times.high:
        return number(None, "ratio", missing="no request was preempted")
    if not failed:
        return number(1.0, "ratio", ci95=(1.0, 1.0), n=round(times.high), method=times.source)
    ended = times.low if times.finished is not None else max(0.0, times.low - failed)
    return bounded(ended / (ended + failed), 1.0, round(times.high), times.source)


def bounded(low: float, high: float, n: int, source: str, unit: str = "ratio") -> ResultQuantity:
    """Return a number that is known, or the bounds of it."""
    if low == high:
        return number(low, unit, ci95=(low, high), n=n, method=source)
    reason = f"{source} says only that it is between {figure(low)} and {figure(high)}"
    return ResultQuantity(value=None, unit=unit, ci95=(low, high), n=n, method=BOUNDS, missing=reason)
