"""Memory Pressure Behavior: what becomes of requests when more are in flight than the system can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from correlator.statistics.server_load import leading_endpoints
from loadgen.requests.metrics import input_tokens
from methodology import search
from methodology.measures.paired import BOUNDS, grid, of_quantile
from methodology.procedures.capacity import CAPACITY, bracket, wilson
from methodology.study.findings import Evidence, Findings, Line, Plot, Quantity, Table
from methodology.study.model import Asked, Done, Finished, Parameters, Procedure, Reader, Step, StepData
from methodology.study.planning import content_seed, counting
from methodology.study.quantities import number
from methodology.study.server_side import NO_PAGE, reference
from rundir.columns import Floats
from scraper.exposition import histograms
from scraper.series.resets import restarts_of, rising, rising_histogram

LEVEL, SEARCHED = "level", "capacity"
HISTOGRAM = "request_num_preemptions"
FULL = 0.95  # KV cache usage from which on memory is short
EXACT_UP_TO = 5  # preemptions of a request, which have buckets of their own
# SGLang's counters of prefill: all that was computed, and what of it was for the first time.
RECOMPUTED = (("realtime_tokens_total", "prefill_compute"), ("prefill_effective_tokens_total", "input"))
NOTES = (
    (
        "The draft takes the capacity of another test's workload. It was measured again with this one: as many "
        "requests as the full engine ran at once, unless objectives or a number were given. Where its seats bound "
        "that, more requests in flight only queue, and memory is not under pressure."
    ),
    "Memory pressure can make a system fail: the test is for systems that serve nobody else.",
)
ISOLATED = "It was declared (--isolated) that the system served nobody else during this test."
REFUSED = (
    "this test drives the system beyond its memory, and other users of it would suffer: declare with --isolated that "
    "it serves nobody else"
)


def next_step(asked: Asked, finished: Sequence[Finished]) -> Step | Done:
    """Return the steps that show the capacity, then a closed loop at each level of it, ascending."""
    if not asked.isolated:
        return Done(reason=REFUSED, complete=False)
    base = capacity(asked, finished)
    if not isinstance(base, int):
        return base
    levels = sorted(asked.parameters.levels or (1.0,))
    ended = [each for each in finished if each.step.kind == LEVEL]
    if len(ended) == len(levels):
        return Done(reason="every level has been measured")
    share = levels[len(ended)]
    in_flight = max(1, round(share * base))
    return Step(
        kind=LEVEL,
        label=f"closed-{in_flight}",
        load="closed",
        level=in_flight,
        share=share,
        duration=asked.parameters.duration or 120.0,
        seed=content_seed(asked, len(finished) + 1),
        unpaired=True,
    )


def capacity(asked: Asked, finished: Sequence[Finished]) -> int | Step | Done:
    """Return how many requests in flight are 100 %, or the step that will tell.

    What was stated; with objectives what the capacity test finds by them; else as many as the full engine ran at once.
    """
    if asked.parameters.concurrency:
        return asked.parameters.concurrency
    if asked.parameters.slo:
        searched = [
            replace(each, step=replace(each.step, kind=LEVEL)) for each in finished if each.step.kind == SEARCHED
        ]
        decided = CAPACITY.next_step(asked, searched)
        passed = bracket(asked, searched)[0] if searched and isinstance(decided, Done) else None
        if passed is not None:
            return round(passed.step.level)
        return replace(decided, kind=SEARCHED) if isinstance(decided, Step) else replace(decided, complete=False)
    limit = search.saturated(asked, finished)
    if isinstance(limit, Step | Done):
        return limit
    best = search.fullest(finished)
    return round(best.outcome.running_max or best.step.level) if best else round(limit.step.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """How many requests were preempted, at least and at most, how many of them came to their end, and by whom."""

    low: float
    high: float
    finished: float | None
    source: str


def preempted(data: StepData, preemptions: float | None) -> Preempted | None:
    """Return the preempted requests of a step: by the histogram of preemptions per request, else by their counter.

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
    if len(counts) and np.isfinite(total):
        low, high = several(np.asarray(bounds), counts, total)
        return Preempted(low=low, high=high, finished=float(counts.sum()), source="the engine's histogram")
    if preemptions is None:
        return None
    high = min(preemptions, float(len(data.requests)))
    return Preempted(low=min(1.0, high), high=high, finished=None, source="the engine's counter, as bounds")


def several(bounds: Floats, counts: Floats, total: float) -> tuple[float, float]:
    """Return how many observations of a count were at least 1, at least and at most.

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


def findings(asked: Asked, finished: Sequence[Finished], read: Reader) -> Findings:
    """Return completion, preemption and latency of each level; what no page tells is missing, or has bounds."""
    # A level that made the engine fail counts for nothing but that it did.
    last = {each.step.share or 1.0: each for each in finished if each.step.kind == LEVEL}
    last |= {each.step.share or 1.0: each for each in counting(finished) if each.step.kind == LEVEL}
    levels = [last[share] for share in sorted(last)]
    results: dict[str, Quantity] = {}
    for each in levels:
        results |= {f"{name}_{_percents(each)}": quantity for name, quantity in _level(each, read(each)).items()}
    pressure = _pressure(levels)
    return Findings(
        answer=_answer(levels, results, pressure),
        results=results,
        evidence=tuple(
            Evidence(claim=pressure, quantity="kv_cache_max", run=each.run, value=each.outcome.kv_cache_max)
            for each in levels
        ),
        tables=(_table(levels, results),),
        plots=_plots(levels, results),
        notes=(
            *NOTES,
            ISOLATED if asked.isolated else f"Not run: {REFUSED}.",
            *(
                f"At {_percents(each)} % the step was void: {each.outcome.void}."
                for each in levels
                if each.outcome.void
            ),
        ),
    )


def _percents(each: Finished) -> str:
    return f"{round(100 * (each.step.share or 1))}"


def _level(each: Finished, data: StepData) -> dict[str, Quantity]:
    sent, usage = each.outcome.sent, each.outcome.kv_cache_max
    complete, (low, high) = each.outcome.ok / max(1, sent), wilson(each.outcome)
    ttft = each.outcome.percentiles.get("ttft_ms", {}).get("p99")
    results = {
        "completion_ratio": Quantity(value=complete, unit="ratio", ci95=(low, high), n=sent, method="Wilson"),
        "failure_ratio": Quantity(value=1 - complete, unit="ratio", ci95=(1 - high, 1 - low), n=sent, method="Wilson"),
        "in_flight": Quantity(value=each.step.level, unit="requests"),
        "kv_cache_max": Quantity(value=usage, unit="ratio", missing=NO_PAGE if usage is None else ""),
        "out_of_memory": Quantity(value=float(each.outcome.out_of_memory), unit="requests", n=sent),
        "ttft_p99_ms": of_quantile(ttft, "ms", each.outcome.ok)
        if ttft
        else number(None, "ms", missing="no request gave a token"),
    }
    times = preempted(data, each.outcome.preemptions)
    if times is None:
        unknown = {"preempted_ratio": "ratio", "recovered_ratio": "ratio"}
        return results | {name: number(None, unit, missing=NO_PAGE) for name, unit in unknown.items()}
    results["preempted_ratio"] = _bounded(times.low / max(1, sent), times.high / max(1, sent), sent, times.source)
    results["recovered_ratio"] = _recovered(times, sent - each.outcome.ok)
    if each.outcome.preemptions is not None:
        results["lost_tokens_per_preemption"] = _lost(data, each.outcome.preemptions)
        results["preemptions"] = Quantity(value=each.outcome.preemptions, unit="preemptions", n=sent)
    return results


def _lost(data: StepData, preemptions: float) -> Quantity:
    """Return the bounds of the tokens that a preemption discards, by the engine's counters where it has them.

    At least those that were computed again; at most the whole prompts and outputs so far of the preempted requests.
    """
    if not preemptions:
        return number(None, "tokens", missing="no request was preempted")
    whole = [_increase(data, f"num_retracted_{part}_tokens_total") for part in ("input", "output")]
    computed, fresh = (_increase(data, name, mode) for name, mode in RECOMPUTED)
    longest = float(np.nanmax(input_tokens(data.requests) + data.requests.max_tokens, initial=1.0))
    low = 1.0 if computed is None or fresh is None else (computed - fresh) / preemptions
    high = longest if None in whole else sum(each or 0.0 for each in whole) / preemptions
    return _bounded(min(low, high), high, round(preemptions), "the engine's page", "tokens")


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


def _recovered(times: Preempted, failed: int) -> Quantity:
    """Return which share of the preempted requests came to their end: whether those that failed were is not known."""
    if not times.high:
        return number(None, "ratio", missing="no request was preempted")
    if not failed:
        return Quantity(value=1.0, unit="ratio", ci95=(1.0, 1.0), n=round(times.high), method=times.source)
    ended = times.low if times.finished is not None else max(0.0, times.low - failed)
    return _bounded(ended / (ended + failed), 1.0, round(times.high), times.source)


def _bounded(low: float, high: float, n: int, source: str, unit: str = "ratio") -> Quantity:
    """Return a number that is known, or the bounds of it."""
    if low == high:
        return Quantity(value=low, unit=unit, ci95=(low, high), n=n, method=source)
    reason = f"{source} says only that it is between {low:.3g} and {high:.3g}"
    return Quantity(value=None, unit=unit, ci95=(low, high), n=n, method=BOUNDS, missing=reason)


def _pressure(levels: Sequence[Finished]) -> str:
    """Say whether memory was short at the highest level, or only seats."""
    if not levels:
        return "no level has been measured"
    out_of_memory = [each for each in levels if each.outcome.out_of_memory]
    if out_of_memory:
        count = sum(each.outcome.out_of_memory for each in out_of_memory)
        return f"memory ran out from {_percents(out_of_memory[0])} % on: {count:,.0f} requests failed for want of it"
    outcome = levels[-1].outcome
    usage = max((each.outcome.kv_cache_max or 0.0 for each in levels), default=0.0)
    if all(each.outcome.kv_cache_max is None for each in levels):
        return "whether memory was under pressure is not known: no page shows the usage of the KV cache"
    if any(each.outcome.preemptions for each in levels) or usage > FULL:
        return f"memory was under pressure: the KV cache was {100 * usage:.0f} % full at most" + (
            f", and running requests were preempted {outcome.preemptions:,.0f} times at the highest level"
            if outcome.preemptions
            else ""
        )
    queued = "none queued"
    if outcome.queued_ratio:
        places = "its seats were taken" if outcome.limit == "seats" else "it took no more"
        queued = f"with {outcome.running_max or 0:.0f} requests running {places}, and the others queued"
    return f"KV cache usage never passed {100 * usage:.0f} %: {queued}; memory was not under pressure"


def _percent(quantity: Quantity | None, digits: int = 1) -> str:
    if quantity is None or (quantity.value is None and quantity.ci95 is None):
        return "an unknown share"
    if quantity.value is not None:
        return f"{100 * quantity.value:.{digits}f} %"
    low, high = quantity.ci95 or (None, None)
    return f"between {100 * (low or 0):.{digits}f} and {100 * (high or 0):.{digits}f} %"


def _answer(levels: Sequence[Finished], results: Mapping[str, Quantity], pressure: str) -> tuple[str, ...]:
    if not levels:
        return ("Nothing is known of memory pressure: no level has been measured.",)
    share, first = _percents(levels[-1]), _percents(levels[0])
    complete, before = results[f"completion_ratio_{share}"], results[f"completion_ratio_{first}"]
    ttft, ttft_before = results[f"ttft_p99_ms_{share}"], results[f"ttft_p99_ms_{first}"]
    known = results[f"recovered_ratio_{share}"]
    recovered = f", and {_percent(known)} of those completed" if known.ci95 else ""
    slower = (
        f"; P99 TTFT is {ttft.value:,.0f} ms against {ttft_before.value:,.0f} ms"
        if ttft.value is not None and ttft_before.value is not None
        else ""
    )
    return (
        (
            f"At {share} % of the capacity ({levels[-1].step.level:g} in flight) {_percent(complete)} of the requests "
            f"completed, at {first} % {_percent(before)}{slower}."
        ),
        f"At {share} % {_percent(results[f'preempted_ratio_{share}'])} of the requests were preempted{recovered}.",
        f"{pressure[:1].upper()}{pressure[1:]}.",
    )


def _table(levels: Sequence[Finished], results: Mapping[str, Quantity]) -> Table:
    columns = {
        "level": "Oversub Level",
        "in_flight": "In flight",
        "completion_ratio": "Complete (ratio)",
        "preempted_ratio": "Preempt (ratio)",
        "failure_ratio": "Fail Rate (ratio)",
        "ttft_p99_ms": "TTFT P99 (ms)",
        "recovered_ratio": "Recovered (ratio)",
        "lost_tokens_per_preemption": "Lost (tokens per preemption)",
        "out_of_memory": "Out of memory",
        "kv_cache_max": "KV cache, most (ratio)",
    }
    rows = {_percents(each): f"{_percents(each)} %{' (base)' * (each.step.share == 1)}" for each in levels}
    return grid("memory-pressure-degradation", "Memory Pressure Degradation", rows, columns, results)


def _plots(levels: Sequence[Finished], results: Mapping[str, Quantity]) -> tuple[Plot, ...]:
    shares = tuple(100 * (each.step.share or 1) for each in levels)
    lines = tuple(
        Line(name=name, x=shares, y=tuple(results[f"{key}_{_percents(each)}"].value for each in levels))
        for name, key in (("completed", "completion_ratio"), ("preempted", "preempted_ratio"))
    )
    plot = Plot(
        name="memory-pressure",
        title="Degradation beyond the capacity",
        kind="line",
        x_title="requests in flight (% of the capacity)",
        y_title="share of the requests",
        lines=lines,
    )
    return (plot,) if len(levels) > 1 else ()


MEMORY_PRESSURE = Procedure(
    name="memory-pressure",
    title="Memory Pressure Behavior",
    section="test-memory",
    objective="How the system degrades when more requests are in flight than its memory holds: completion, preemption, "
    "recovery and lost work.",
    workload="long-context",
    presets={
        "letter": Parameters(levels=(1.0, 1.1, 1.25, 1.5), duration=120.0),
        "short": Parameters(levels=(1.0, 1.1, 1.25, 1.5), duration=30.0),
    },
    next_step=next_step,
    findings=findings,
    optional=("concurrency", "slo", "min", "max", "per_slot", "completion"),
)
