"""Concurrent Request Capacity: how many requests in flight meet the criteria, and what makes more of them fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from sidelight.methodology.measures import criteria
from sidelight.methodology.measures.held import HeldTokens, held_by
from sidelight.methodology.study.findings import (
    Cell,
    Plot,
    PlotLine,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    SupportingNumber,
    evidence,
    plot,
    table,
)
from sidelight.methodology.study.model import (
    Done,
    Finished,
    Outcome,
    Parameters,
    Procedure,
    Reader,
    Step,
    StudySettings,
)
from sidelight.methodology.study.planning import LEVEL, counting, fresh, level_label, of_kind
from sidelight.methodology.study.quantities import (
    latency,
    latency_line,
    number,
    reported_times,
    served_tokens,
    unknown,
    wilson,
)
from sidelight.rundir.printable.numbers import count_of, figure

NARROW = 0.05  # of the highest level that passed: the bracket's width that ends the search
LEAST_S = 60.0
LEAST_COMPLETION = 0.99
SELDOM = 0.01  # share of the scrapes with requests waiting, up to which P99 is not of waiting
SERVER_LIMITS = ("seats", "kv_cache", "steps")
_LETTER = Parameters(
    min=8, max=512, increment=1, duration=60, per_slot=100, output_tokens=256, completion=0.99, slo="ttft_p99<500ms"
)
_NOTES = (
    (
        "All requests of a level are first sent at one instant: this first wave is P99 by itself, so that it stands "
        "apart, and the first tenth of each level is left out."
    ),
    (
        "More requests in flight than the engine runs only wait in its queue: the limit that is named says whether "
        "places, the KV cache or the objective ended the search."
    ),
    "Completion passes where its share reaches what was asked for; its interval (Wilson) stands beside it.",
)


def _next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    parameters = asked.parameters
    first, most = max(1, round(parameters.min or 8)), max(1, round(parameters.max or 512))
    levels = of_kind(finished, LEVEL)
    if not levels:
        return _level(asked, levels, min(first, most))
    if _is_short(asked, levels[-1]):
        return _level(asked, levels, round(levels[-1].step.level))
    passed, failed = bracket(asked, levels)
    if passed is None:
        return Done(reason=f"not even {count_of(first, 'request')} in flight, the lowest level, meet the criteria")
    low = round(passed.step.level)
    if failed is None:
        if low >= most:
            level = f"{count_of(most, 'request')} in flight, the highest level"
            return Done(reason=f"{level}, meet the criteria: it may be more (--max)")
        return _level(asked, levels, min(2 * low, most))
    high = round(failed.step.level)
    if high - low <= max(NARROW * low, parameters.increment or 1, 1):
        return Done(reason=f"between {low} and {high} requests in flight the criteria cease to hold")
    return _level(asked, levels, (low + high) // 2)


def _level(asked: StudySettings, levels: Sequence[Finished], concurrency: int) -> Step:
    """Return a level long enough for its completions per slot and its duration.

    Earlier levels tell how many completions the duration takes, as far as they can.
    """
    parameters = asked.parameters
    rate = max((each.outcome.completed_per_s or 0.0 for each in levels), default=0.0)
    count = max((parameters.per_slot or 1) * concurrency, math.ceil(1.3 * rate * (parameters.duration or LEAST_S)))
    again = any(each.step.level == concurrency for each in levels)
    options = {"output_tokens": str(parameters.output_tokens)} if parameters.output_tokens else {}
    options |= {"slo": parameters.slo} if parameters.slo else {}
    label = f"closed-{level_label(concurrency)}" + ("-longer" if again else "")
    return fresh(asked, levels, label, "closed", concurrency, requests=count, options=options)


def _is_short(asked: StudySettings, each: Finished) -> bool:
    """Return whether a level must be run again: its requests ended before its duration had passed."""
    load_s = each.outcome.window.load_s if each.outcome.window else 0.0
    longer = _level(asked, [each], round(each.step.level)).requests or 0
    return load_s < 0.95 * (asked.parameters.duration or LEAST_S) and longer > (each.step.requests or 0)


def _failures(asked: StudySettings, outcome: Outcome) -> list[str]:
    """Return the criteria that a level does not meet, in words."""
    failures = []
    completion = outcome.success or 0.0
    if completion < (asked.parameters.completion or LEAST_COMPLETION):
        failures.append(f"{100 * completion:.1f} % of the requests ended ok")
    if outcome.slo is not None and outcome.slo.met is not True:
        failures += [
            f"{each.name} was {figure(each.value)} {each.unit}" if each.value is not None else f"{each.name} was missed"
            for each in outcome.slo.objectives
            if each.met is not True
        ] or [f"{outcome.slo.text} was missed"]
    if outcome.out_of_memory:
        failures.append(f"{outcome.out_of_memory} requests met an engine out of memory")
    return failures


def bracket(asked: StudySettings, levels: Sequence[Finished]) -> tuple[Finished | None, Finished | None]:
    """Return the highest level that passed below all that failed, and the lowest that failed; the last run counts."""
    latest = {each.step.level: each for each in levels}
    failed = min((each for each in latest.values() if _failures(asked, each.outcome)), key=_level_of, default=None)
    below = [each for each in latest.values() if failed is None or each.step.level < failed.step.level]
    return max(below, key=_level_of, default=None), failed


def _level_of(each: Finished) -> float:
    return each.step.level


def _findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    levels = of_kind(counting(finished), LEVEL)
    if not levels:
        results = unknown("no level counts", "requests", "max_concurrency") | reported_times(None)
        return StudyFindings(answer=("The capacity is not known: no level counts.",), results=results)
    held = {each.number: held_by(each, read(each)) for each in levels}
    passed, failed = bracket(asked, levels)
    results = _results(passed, held) | _reported(passed, levels)
    return StudyFindings(
        answer=tuple(_answer(asked, levels, passed, failed)),
        results=results,
        evidence=tuple(_evidence(passed, failed)),
        tables=(_table(asked, levels, held),),
        plots=_plots(levels),
        notes=(*_NOTES, *_deviations(asked, levels)),
    )


def _results(passed: Finished | None, held: dict[int, HeldTokens]) -> dict[str, ResultQuantity]:
    least = "not even the lowest level meets the criteria"
    if passed is None:
        names = {"max_concurrency": "requests", "output_tokens_per_s": "tokens/s", "tokens_in_flight": "tokens"}
        return {name: number(None, unit, missing=least) for name, unit in names.items()}
    came, of = passed.outcome, held[passed.number]
    method = "highest level that passed below all that failed"
    requests = came.throughput_ci95
    stamps, page = "integral over stamps: input and output so far", "KV cache usage x blocks x block size"
    not_stated = "the engine's page does not state its cache's size"
    not_shown = "no page of an engine shows what runs"
    return {
        "max_concurrency": number(passed.step.level, "requests", n=came.sent, method=method),
        "output_tokens_per_s": served_tokens(came),
        "requests_per_s": number(came.completed_per_s, "requests/s", ci95=requests, method="batch means"),
        "tokens_in_flight": number(of.tokens, "tokens", method=stamps),
        "tokens_in_kv_cache": number(of.cached_tokens, "tokens", method=page, missing=not_stated),
        "running_max": number(came.running_max, "requests", missing=not_shown),
    }


def _reported(passed: Finished | None, levels: Sequence[Finished]) -> dict[str, ResultQuantity]:
    """Return the values for the minimum report.

    They are the times of the level that passed, else of the lowest, and the throughput of the level that served most.
    """
    lowest, fastest = min(levels, key=_level_of), max(levels, key=lambda e: e.outcome.output_tokens_per_s or 0.0)
    at = f"{fastest.step.load_words}, the most of these levels, step {fastest.number}"
    times = reported_times(passed, "the most that pass") if passed else reported_times(lowest, "the lowest level")
    return times | {"max_output_tokens_per_s": served_tokens(fastest.outcome, at)}


def _answer(
    asked: StudySettings, levels: Sequence[Finished], passed: Finished | None, failed: Finished | None
) -> Iterator[str]:
    completion = f"completion of {100 * (asked.parameters.completion or LEAST_COMPLETION):g} %"
    text = ", ".join(filter(None, (asked.parameters.slo, completion, "never out of memory")))
    if passed is None:
        yield f"No level that was tried meets the criteria ({text})."
    else:
        served = f"{figure(passed.outcome.output_tokens_per_s or 0)} output tokens/s"
        yield f"{count_of(passed.step.level, 'request')} in flight meet the criteria ({text}), with {served}."
    if failed is None:
        yield "No level that was tried fails: the capacity may be higher (--max)."
        if passed is not None and passed.outcome.limit == "client":
            yield f"{criteria.WORDS['client']}: {passed.outcome.limit_reason}."
        return
    yield f"{failed.step.level:g} in flight fail: {'; '.join(_failures(asked, failed.outcome))}."
    yield _binding(levels, failed, asked)


def _binding(levels: Sequence[Finished], failed: Finished, asked: StudySettings) -> str:
    """Return the cause of a level's failure: memory, errors, a wait, or the running requests themselves.

    What they waited for shows best where most did: of all levels that failed.
    """
    came = failed.outcome
    if came.out_of_memory:
        return f"Memory binds: the engine ran out of it with {failed.step.level:g} in flight."
    if came.sent and came.ok / came.sent < (asked.parameters.completion or LEAST_COMPLETION):
        kinds = ", ".join(f"{count} x {kind}" for kind, count in came.failed.items())
        return f"Failed requests end it: {kinds}."
    if came.running_max is None or came.queued_ratio is None:
        return f"{criteria.WORDS['unknown']}: {came.limit_reason or 'no page of an engine shows it'}."
    full = [each for each in levels if each.step.level >= failed.step.level and each.outcome.limit in SERVER_LIMITS]
    if came.queued_ratio > SELDOM and full:
        best = max(full, key=lambda each: each.outcome.queued_ratio or 0.0)
        limit, ran = best.outcome.limit or "unknown", best.outcome.running_max or 0.0
        at = f"with {best.step.level:g} in flight, "
        if ran < best.step.level:
            at = f"of {best.step.level:g} requests in flight {ran:g} ran at once at most, and the others waited; "
        return f"{criteria.WORDS[limit]}: {at}{best.outcome.limit_reason}."
    return (
        f"The objective binds: {came.running_max:g} of {failed.step.level:g} requests ran at once, and requests waited "
        f"in {100 * came.queued_ratio:.0f} % of the scrapes; neither places nor the KV cache are short."
    )


def _evidence(passed: Finished | None, failed: Finished | None) -> list[SupportingNumber]:
    said: list[SupportingNumber] = []
    if passed is not None:
        served = {"output_tokens_per_s": passed.outcome.output_tokens_per_s}
        said += evidence("the highest level that passes", passed.run, served)
    if failed is not None:
        names = ("running_max", "queued_ratio", "kv_cache_max", "preemptions")
        said += evidence("what makes more fail", failed.run, {name: getattr(failed.outcome, name) for name in names})
    return said


def _table(asked: StudySettings, levels: Sequence[Finished], held: dict[int, HeldTokens]) -> ResultTable:
    columns = {
        "concurrency": "Concurrency", "completion_ratio": "Completion", "ttft_p99_ms": "TTFT P99 (ms)",
        "tpot_p99_ms": "TPOT P99 (ms)", "errors": "Errors", "status": "Status",
        "completion_low": "Completion, 95 % from",
        "completion_high": "to", "first_wave_ttft_p99_ms": "First wave P99 (ms)", "running_max": "Ran at most",
        "queued_ratio": "Scrapes with waiting", "kv_cache_max": "KV cache", "output_tokens_per_s": "Output (tok/s)",
        "tokens_in_flight": "Tokens in flight", "limit": "Bound by", "fails": "Fails because",
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for each in sorted(levels, key=_level_of):
        came, of = each.outcome, held[each.number]
        low, high = wilson(came.ok, came.sent)
        failures, ran = _failures(asked, came), None if came.running_max is None else round(came.running_max)
        rows.append((round(each.step.level), came.success, criteria.ttft_ms(each, "p99"),
                     latency(came, "tpot", "p99").estimate, came.sent - came.ok, "Fail" if failures else "Pass",
                     low, high, of.first_wave_ms, ran, came.queued_ratio, came.kv_cache_max, came.output_tokens_per_s,
                     of.tokens, came.limit, "; ".join(failures)))  # fmt: skip
    note = "TTFT and TPOT are of requests submitted after the first tenth; the first wave is apart."
    return table("capacity-search", "Capacity Search Results", columns, rows, note)


def _plots(levels: Sequence[Finished]) -> tuple[Plot, ...]:
    ordered = sorted(levels, key=_level_of)
    tried = PlotLine(name="level", x=tuple(float(each.number) for each in levels), y=tuple(map(_level_of, levels)))
    p99 = latency_line(ordered, list(map(_level_of, ordered)), "ttft", "p99")
    axes = ("Requests in flight", "TTFT P99 (ms)")
    return (
        plot("search-path", "Search path", ("Step", "Requests in flight"), [tried], kind="marks"),
        plot("ttft-concurrency", "TTFT P99 over requests in flight", axes, [p99], log_y=True),
    )


def _deviations(asked: StudySettings, levels: Sequence[Finished]) -> Iterator[str]:
    if (asked.parameters.per_slot or 0) < 100:
        yield f"{asked.parameters.per_slot} completions a slot were asked for; the draft wants 100, or 60 s if longer."
    wanted = asked.parameters.completion or LEAST_COMPLETION
    intervals = [(each.step.label, *wilson(each.outcome.ok, each.outcome.sent)) for each in levels]
    unsure = [label for label, low, high in intervals if low < wanted < high]
    if unsure:
        yield (
            f"Too few requests to be sure on which side of {100 * wanted:g} % completion lies, by its interval: "
            f"{', '.join(unsure)}."
        )


CAPACITY = Procedure(
    name="capacity",
    objective="How many requests in flight the system serves within its latency objective, and what ends that.",
    workload="synthetic-uniform",
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=30, per_slot=10)},
    next_step=_next_step,
    findings=_findings,
)
