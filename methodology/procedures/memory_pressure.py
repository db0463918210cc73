"""Memory Pressure Behavior: what becomes of requests when more are in flight than the system can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from sidelight.methodology.measures.preemption import bounded, lost_tokens, preempted, recovered
from sidelight.methodology.procedures.capacity import CAPACITY, bracket
from sidelight.methodology.study.findings import (
    Plot,
    PlotLine,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    SupportingNumber,
    plot,
)
from sidelight.methodology.study.model import (
    Done,
    Finished,
    Parameters,
    Procedure,
    Reader,
    Step,
    StepData,
    StudySettings,
)
from sidelight.methodology.study.planning import LEVEL, counting, fresh, level_label, of_kind, percents
from sidelight.methodology.study.quantities import grid, in_percent, latency, number, percentile, reported_times, wilson
from sidelight.methodology.study.saturation import fullest, saturated
from sidelight.methodology.study.server_side import NO_PAGE

SEARCHED = "capacity"
FULL = 0.95  # KV cache usage from which on memory is short
_LETTER = Parameters(levels=(1.0, 1.1, 1.25, 1.5), duration=120.0)
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


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the next step: those that show the capacity, then a closed loop at each level of it, ascending."""
    if not asked.isolated:
        return Done(reason=REFUSED, complete=False)
    base = capacity(asked, finished)
    if not isinstance(base, int):
        return base
    levels = sorted(asked.parameters.levels or (1.0,))
    ended = of_kind(finished, LEVEL)
    if len(ended) == len(levels):
        return Done(reason="every level has been measured")
    share = levels[len(ended)]
    in_flight, duration_s = max(1, round(share * base)), asked.parameters.duration or 120.0
    label = f"closed-{level_label(in_flight)}"
    return fresh(asked, finished, label, "closed", in_flight, share=share, duration=duration_s)


def capacity(asked: StudySettings, finished: Sequence[Finished]) -> int | Step | Done:
    """Return the number of requests in flight that is 100 %, or the next step.

    What was stated; with objectives what the capacity test finds by them; else as many as the full engine ran at once.
    """
    if asked.parameters.concurrency:
        return asked.parameters.concurrency
    if asked.parameters.slo:
        searched = [replace(each, step=replace(each.step, kind=LEVEL)) for each in of_kind(finished, SEARCHED)]
        decided = CAPACITY.next_step(asked, searched)
        passed = bracket(asked, searched)[0] if searched and isinstance(decided, Done) else None
        if passed is not None:
            return round(passed.step.level)
        return replace(decided, kind=SEARCHED) if isinstance(decided, Step) else replace(decided, complete=False)
    limit = saturated(asked, finished)
    if isinstance(limit, Step | Done):
        return limit
    best = fullest(finished)
    return round(best.outcome.running_max or best.step.level) if best else round(limit.step.level)


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Return completion, preemption and latency of each level; what no page tells is missing, or has bounds."""
    # A level that made the engine fail counts for nothing but that it did.
    last = {each.step.share or 1.0: each for each in of_kind([*finished, *counting(finished)], LEVEL)}
    levels = [last[share] for share in sorted(last)]
    results: dict[str, ResultQuantity] = {}
    for each in levels:
        results |= {f"{name}_{_percents(each)}": quantity for name, quantity in _level(each, read(each)).items()}
    highest = levels[-1] if levels else None
    results |= reported_times(highest, f"{_percents(highest)} % of the capacity" if highest else "")
    pressure = _pressure(levels)
    return StudyFindings(
        answer=_answer(levels, results, pressure),
        results=results,
        evidence=tuple(
            SupportingNumber(claim=pressure, quantity="kv_cache_max", run=each.run, value=each.outcome.kv_cache_max)
            for each in levels
        ),
        tables=(_table(levels, results),),
        plots=_plots(levels, results),
        notes=(
            *NOTES,
            ISOLATED if asked.isolated else f"Not run: {REFUSED}.",
            *(f"At {_percents(e)} % the step was void: {e.outcome.void}." for e in levels if e.outcome.void),
            *(
                f"{_percents(e)} % of {levels[0].step.level:g} in flight is {e.step.level:g}, too, in whole requests."
                for e in levels[1:]
                if e.step.level == levels[0].step.level
            ),
        ),
    )


def _percents(each: Finished) -> str:
    return percents(each.step.share or 1)


def _level(each: Finished, data: StepData) -> dict[str, ResultQuantity]:
    came, sent, (low, high) = each.outcome, each.outcome.sent, wilson(each.outcome.ok, each.outcome.sent)
    complete, ttft = came.ok / max(1, sent), latency(came, "ttft", "p99")
    results = {
        "completion_ratio": number(complete, "ratio", ci95=(low, high), n=sent, method="Wilson"),
        "failure_ratio": number(1 - complete, "ratio", ci95=(1 - high, 1 - low), n=sent, method="Wilson"),
        "in_flight": number(each.step.level, "requests"),
        "kv_cache_max": number(came.kv_cache_max, "ratio", missing=NO_PAGE),
        "out_of_memory": number(came.out_of_memory, "requests", n=sent),
        "ttft_p99_ms": percentile(ttft, "p99", came.ok, least=1)
        if ttft.estimate is not None
        else number(None, "ms", missing="no request gave a token"),
    }
    times = preempted(data, came.preemptions)
    if times is None:
        return results | {
            name: number(None, "ratio", missing=NO_PAGE) for name in ("preempted_ratio", "recovered_ratio")
        }
    results["preempted_ratio"] = bounded(times.low / max(1, sent), times.high / max(1, sent), sent, times.source)
    results["recovered_ratio"] = recovered(times, sent - came.ok)
    if came.preemptions is not None:
        results["lost_tokens_per_preemption"] = lost_tokens(data, came.preemptions)
        results["preemptions"] = number(came.preemptions, "preemptions", n=sent)
    return results


def _pressure(levels: Sequence[Finished]) -> str:
    """Return a sentence on shortage of memory, or of seats alone, at the highest level."""
    if not levels:
        return "no level counts"
    out_of_memory = [each for each in levels if each.outcome.out_of_memory]
    if out_of_memory:
        count = sum(each.outcome.out_of_memory for each in out_of_memory)
        return f"memory ran out from {_percents(out_of_memory[0])} % on: {count:,.0f} requests failed for want of it"
    outcome = levels[-1].outcome
    usage = max((each.outcome.kv_cache_max or 0.0 for each in levels), default=0.0)
    if all(each.outcome.kv_cache_max is None for each in levels):
        return "whether memory was under pressure is not known: no page shows the usage of the KV cache"
    if any(each.outcome.preemptions for each in levels) or usage > FULL:
        said = f"memory was under pressure: the KV cache was {100 * usage:.0f} % full at most"
        if outcome.preemptions:
            said += f", and running requests were preempted {outcome.preemptions:,.0f} times at the highest level"
        return said
    queued = "none queued"
    if outcome.queued_ratio:
        places = "its seats were taken" if outcome.limit == "seats" else "it took no more"
        queued = f"with {outcome.running_max or 0:.0f} requests running {places}, and the others queued"
    return f"KV cache usage never passed {100 * usage:.0f} %: {queued}; memory was not under pressure"


def _answer(levels: Sequence[Finished], results: Mapping[str, ResultQuantity], pressure: str) -> tuple[str, ...]:
    if not levels:
        return ("Nothing is known of memory pressure: no level counts.",)
    share, first = _percents(levels[-1]), _percents(levels[0])
    complete, before = results[f"completion_ratio_{share}"], results[f"completion_ratio_{first}"]
    ttft, ttft_before = results[f"ttft_p99_ms_{share}"], results[f"ttft_p99_ms_{first}"]
    known = results[f"recovered_ratio_{share}"]
    recovered = f", and {in_percent(known)} of those completed" if known.ci95 else ""
    slower = (
        f"; the TTFT P99 is {ttft.shown:,.0f} ms against {ttft_before.shown:,.0f} ms"
        if ttft.shown is not None and ttft_before.shown is not None
        else ""
    )
    return (
        (
            f"At {share} % of the capacity ({levels[-1].step.level:g} in flight) {in_percent(complete)} of the "
            f"requests completed, at {first} % ({levels[0].step.level:g} in flight) {in_percent(before)}{slower}."
        ),
        f"At {share} % {in_percent(results[f'preempted_ratio_{share}'])} of the requests were preempted{recovered}.",
        f"{pressure[:1].upper()}{pressure[1:]}.",
    )


def _table(levels: Sequence[Finished], results: Mapping[str, ResultQuantity]) -> ResultTable:
    columns = {
        "level": "Oversub Level", "in_flight": "In flight", "completion_ratio": "Complete (ratio)",
        "preempted_ratio": "Preempt (ratio)", "failure_ratio": "Fail Rate (ratio)", "ttft_p99_ms": "TTFT P99 (ms)",
        "recovered_ratio": "Recovered (ratio)", "lost_tokens_per_preemption": "Lost (tokens per preemption)",
        "out_of_memory": "Out of memory", "kv_cache_max": "KV cache, most (ratio)",
    }  # fmt: skip
    rows = {_percents(each): f"{_percents(each)} %{' (base)' * (each.step.share == 1)}" for each in levels}
    return grid("memory-pressure-degradation", "Memory Pressure Degradation", rows, columns, results)


def _plots(levels: Sequence[Finished], results: Mapping[str, ResultQuantity]) -> tuple[Plot, ...]:
    shares = tuple(100 * (each.step.share or 1) for each in levels)
    lines = (
        PlotLine(name=name, x=shares, y=tuple(results[f"{key}_{_percents(each)}"].value for each in levels))
        for name, key in (("completed", "completion_ratio"), ("preempted", "preempted_ratio"))
    )
    axes = ("requests in flight (% of the capacity)", "share of the requests")
    return (plot("memory-pressure", "Degradation beyond the capacity", axes, lines),) if len(levels) > 1 else ()


MEMORY_PRESSURE = Procedure(
    name="memory-pressure",
    objective="How the system degrades when more requests are in flight than its memory holds: completion, preemption, "
    "recovery and lost work.",
    workload="long-context",
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=30.0)},
    next_step=next_step,
    findings=findings,
    optional=("concurrency", "slo", "min", "max", "per_slot", "completion"),
)
