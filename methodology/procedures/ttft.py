"""Time to First Token: its distribution at a stated load, and which part of it makes the slow requests slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.breakdown import Parts, network_label
from sidelight.correlator.parts import NETWORK, SPENT, TTFT_PARTS
from sidelight.correlator.statistics.intervals import of_sorted
from sidelight.correlator.statistics.server_load import met_at_submission
from sidelight.correlator.statistics.tail import TailShares, tail_shares
from sidelight.methodology.measures.looks import LOOK_LEVEL, LOOKS, parse_until, tau_of, width_of
from sidelight.methodology.measures.paired import Times, measured, overloaded, times
from sidelight.methodology.study.findings import Cell, ResultQuantity, ResultTable, StudyFindings, evidence, table
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
from sidelight.methodology.study.outcome import QUANTILES
from sidelight.methodology.study.planning import LEVEL, counting, fresh, level_label, of_kind
from sidelight.methodology.study.quantities import (
    LABELS,
    cells,
    mean,
    metric_table,
    number,
    percentile,
    percentiles,
    plot_cumulative,
)
from sidelight.methodology.study.saturation import Capacity, capacity
from sidelight.rundir.columns import Floats, concat, take
from sidelight.rundir.printable.numbers import figure
from sidelight.rundir.stats import Missing

_SHOWN = ("p50", "p95", "p99")
_EDGES = (0, 256, 512, 1024, 2048, 4096, np.inf)
_NOTES = (
    "P99.9 needs 10,000 requests, and the draft requires it: of fewer it is a lower bound, and not compliant.",
    "1,000 requests give P99 within 10 % only where nothing queues and no tail is heavy: its interval is stated.",
    "The first tenth of each step is left out, as for throughput; that many more requests are sent.",
)


def _next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    try:
        until = parse_until(asked.parameters.until) if asked.parameters.until else None
    except ValueError as error:
        return Done(reason=str(error), complete=False)
    known = capacity(asked, finished)
    if not isinstance(known, Capacity):
        return known
    levels = of_kind(finished, LEVEL)
    if levels and until is None:
        return Done(reason="all requests were sent")
    if levels and until is not None:
        if "ttft_ms" not in levels[-1].outcome.percentiles:
            return Done(reason=f"{levels[-1].step.label} has no request with a TTFT", complete=False)
        width = width_of(levels, until[0])
        if width is not None and width <= until[1]:
            return Done(reason=f"{LABELS[until[0]]} is known within {100 * width:.2g} %, by look {len(levels)}")
        if len(levels) == LOOKS:
            reached = "no interval" if width is None else f"an interval of ±{100 * width:.2g} %"
            return Done(reason=f"after {LOOKS} looks {LABELS[until[0]]} has {reached}")
    load = asked.parameters.load or 0.7
    count = (asked.parameters.requests or 10_000) * 2 ** max(len(levels) - 1, 0)
    label = f"open-{level_label(load * known.per_s, load)}" + (f"-{len(levels) + 1}" if levels else "")
    requests, options = with_ramp(count), {"arrival": "poisson"}
    return fresh(asked, finished, label, "open", load * known.per_s, share=load, requests=requests, options=options)


def with_ramp(count: int) -> int:
    """Return the size of a Poisson load that leaves `count` requests after its ramp.

    The ramp is its first tenth; at least `count` are left all but surely.
    """
    return int(np.ceil((count + 1.3 * np.sqrt(count)) / 0.9))


def _requests(data: StepData) -> tuple[Times, Parts, Floats]:
    """Return the times and parts of a step's requests, and the queue that each met."""
    waiting = met_at_submission(data.requests, data.endpoints)["requests_waiting"]
    unknown = np.full(len(data.requests), np.nan)
    return times(data), data.parts, unknown if isinstance(waiting, Missing) else waiting


def _findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    levels = [each for each in of_kind(counting(finished), LEVEL) if each.outcome.ttft_counts]
    if not levels:
        missing = number(None, "ms", missing="no step at the stated load counts")
        results = {f"ttft_{name}_ms": missing for name in (*QUANTILES, "mean", "min", "max")}
        return StudyFindings(answer=("The TTFT is not known: no step at the stated load counts.",), results=results)
    logs, parts_of, waiting = zip(*(_requests(measured(each, read(each))) for each in levels), strict=True)
    requests, parts = concat(logs), concat(parts_of)
    known = requests.ok & np.isfinite(requests.ttft_ms)
    timed, parts = take(requests, known), take(parts, known)
    results = _results(timed, levels, LOOK_LEVEL if asked.parameters.until else 0.95) | _part_results(parts)
    tail = tail_shares(parts, timed.submit_ns, np.concatenate(waiting)[known])
    results |= _tail_results(tail)
    blamed = _blame(tail)
    shares = [name for name in results if name.startswith("ttft_p99_") and name.endswith("_ratio")]
    shown = {name: value for name in (*shares, "ttft_queue_from_waiting") if (value := results[name].value) is not None}
    return StudyFindings(
        answer=(_what(levels, results), _how_sure(asked, levels, results), blamed),
        results=results,
        evidence=tuple(evidence(blamed, levels[-1].run, shown)),
        tables=(_results_table(results), _length_table(timed), *_parts_tables(parts, results)),
        plots=plot_cumulative("ttft-cdf", "TTFT Distribution", {"TTFT": timed.ttft_ms}),
        notes=(*_NOTES, *_deviations(levels, requests)),
    )


def _results(timed: Times, levels: Sequence[Finished], level: float) -> dict[str, ResultQuantity]:
    ascending = np.sort(timed.ttft_ms)
    results = {
        f"ttft_{name}_ms": percentile(
            of_sorted(ascending, q, tau_of(levels, name), level), name, len(ascending), level=level
        )
        for name, q in QUANTILES.items()
    }
    results |= {
        "ttft_mean_ms": mean(timed.ttft_ms),
        "ttft_min_ms": number(float(ascending[0]), "ms", n=len(ascending)),
        "ttft_max_ms": number(float(ascending[-1]), "ms", n=len(ascending)),
        **percentiles(timed.tpot_ms, "tpot_{}_ms", _SHOWN),
    }
    return {name: replace(each, at=levels[0].step.load_words) for name, each in results.items()} | {
        "ttft_requests": number(len(ascending), "requests"),
        "offered_requests_per_s": number(levels[0].step.level, "requests/s"),
    }


def _part_results(parts: Parts) -> dict[str, ResultQuantity]:
    results: dict[str, ResultQuantity] = {}
    for part in TTFT_PARTS:
        values = 1e3 * parts.seconds(part)[parts.covered]
        values = values[np.isfinite(values)]
        if len(values) or part.name in ("queue", "prefill"):
            results |= percentiles(values, f"{part.name}_{{}}_ms", _SHOWN) | {f"{part.name}_mean_ms": mean(values)}
            whole_s = float(parts.ttft_s[parts.covered].sum()) or np.nan
            results[f"{part.name}_ratio"] = number(float(values.sum()) / 1e3 / whole_s, "ratio", n=len(values))
    return results


def _tail_results(tail: TailShares | Missing) -> dict[str, ResultQuantity]:
    if isinstance(tail, Missing):
        return {"ttft_queue_from_waiting": number(None, "requests", missing=tail.reason)}
    shares = {
        f"ttft_p99_{name}_ratio": number(share, "ratio", n=tail.tails["p99"].explained, missing="part of `other`")
        for name, share in tail.tails["p99"].share.items()
    }
    threshold = tail.threshold
    reason = threshold.missing or "queueing is most of the TTFT at no length of the queue"
    waiting = number(threshold.waiting, "requests", n=threshold.requests, missing=str(reason))
    return {**shares, "ttft_queue_from_waiting": waiting}


def _what(levels: Sequence[Finished], results: dict[str, ResultQuantity]) -> str:
    step = levels[0].step
    said = [
        f"{LABELS[name]} {figure(value)} ms"
        for name in ("p50", "p99")
        if (value := results[f"ttft_{name}_ms"].shown) is not None
    ]
    head = f"At {figure(step.level)} requests/s ({100 * (step.share or 0):.3g} % of the capacity, Poisson arrivals)"
    return f"{head} the TTFT has {' and '.join(said) or 'no percentile: too few requests were measured'}."


def _how_sure(asked: StudySettings, levels: Sequence[Finished], results: dict[str, ResultQuantity]) -> str:
    p99, extreme = results["ttft_p99_ms"], results["ttft_p99_9_ms"]
    low, high = p99.ends
    requests = f"{p99.n:,} requests"
    if low is not None and high is not None:
        said = f"P99 lies between {figure(low)} and {figure(high)} ms (95 %, {requests})"
    else:
        least = "" if low is None else f" is at least {figure(low)} ms (95 %)"
        said = f"P99{least}; {requests} are too few to say how large it can be" if least else (
            f"{requests} are too few to say how sure P99 is"
        )  # fmt: skip
    if extreme.value is None and extreme.sample is not None:
        said += f"; P99.9 is {extreme.in_sample()}"
    if asked.parameters.until:
        looks = "1 look" if len(levels) == 1 else f"{len(levels)} looks"
        said += f"; `--until {asked.parameters.until}` took {looks}"
    return f"{said}."


def _blame(tail: TailShares | Missing) -> str:
    if isinstance(tail, Missing):
        return f"What makes slow requests slow is not known: {tail.reason}."
    shares = {name: share for name, share in tail.tails["p99"].share.items() if share is not None}
    if not shares:
        return "What makes the slowest 1 % slow is not known: none of them has a breakdown."
    largest = max(shares, key=lambda name: shares[name])
    said = f"The slowest 1 % spent {100 * shares[largest]:.2g} % of their TTFT {SPENT[largest]}"
    if tail.threshold.waiting is not None:
        count = tail.threshold.waiting
        waiting = "1 request is waiting" if count == 1 else f"{count:g} requests are waiting"
        said += f"; once {waiting}, queueing is most of the TTFT"
    return f"{said}."


def _results_table(results: dict[str, ResultQuantity]) -> ResultTable:
    titles = {"ttft_requests": "Requests", **{f"ttft_{name}_ms": f"TTFT {LABELS[name]}" for name in QUANTILES}}
    titles |= {f"ttft_{name}_ms": f"TTFT {name.capitalize()}" for name in ("mean", "min", "max")}
    reasons = [results[f"ttft_{name}_ms"].missing for name in QUANTILES]
    note = "".join(f"{reason}. " for reason in reasons if reason).rstrip()
    return metric_table("ttft-results", "TTFT Results", titles, results, note)


def _length_table(timed: Times) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for low, high in itertools.pairwise(_EDGES):
        inside = timed.ttft_ms[(timed.tokens >= low) & (timed.tokens < high)]
        if len(inside):
            quantities = percentiles(inside, "{}", _SHOWN).values()
            label = f"{low:g}-{high:g}" if np.isfinite(high) else f"{low:g}+"
            ends = (end for each in quantities for end in each.ends)
            rows.append((label, len(inside), *(each.shown for each in quantities), *ends))
    titles = {"input_tokens": "Input Tokens", "requests": "Requests"}
    titles |= {f"{name}_ms": f"{LABELS[name]} (ms)" for name in _SHOWN}
    for name in _SHOWN:
        titles |= {f"{name}_low_ms": f"{LABELS[name]} from", f"{name}_high_ms": "to"}
    note = "Where a percentile has no upper end, it is that of these requests alone: they are too few to say more."
    return table("ttft-by-length", "TTFT by Input Length", titles, rows, note, {"requests": None})


def _parts_tables(parts: Parts, results: dict[str, ResultQuantity]) -> tuple[ResultTable, ...]:
    covered = parts.covered
    labels = {part.name: part.label for part in TTFT_PARTS} | {NETWORK: network_label(parts, covered)}
    titles = {"mean_ms": "Mean (ms)", **{f"{name}_ms": f"{LABELS[name]} (ms)" for name in _SHOWN}}
    titles["ratio"] = "Share of TTFT"
    rows = tuple(
        (label, *cells(results, *(f"{name}_{key}" for key in titles), f"ttft_p99_{name}_ratio"))
        for name, label in labels.items()
        if covered.any() and f"{name}_ratio" in results
    )
    heads = {"part": "Part", **titles, "slowest_ratio": "Share in the slowest 1 %"}
    note = f"Of {int(covered.sum()):,} of {len(parts):,} requests; queue wait and prefill as the draft asks for them."
    return (table("ttft-parts", "TTFT by Part", heads, rows, note),) if rows else ()


def _deviations(levels: Sequence[Finished], requests: Times) -> list[str]:
    notes = []
    if len(levels) > 1:
        notes.append(
            f"{len(levels)} steps at the same load were pooled in order: each began with a drained engine, without its "
            f"first tenth. Each of at most {LOOKS} looks has a level of {100 * LOOK_LEVEL:g} %, so that 95 % holds "
            "after any of them."
        )
    if failed := int((~requests.ok).sum()):
        notes.append(f"{failed:,} of {len(requests.ok):,} requests did not end ok and have no TTFT here.")
    if blank := int(requests.blank.sum()):
        notes.append(
            f"{blank:,} replies began with blank content: TTFT is the time to the first token that is not blank."
        )
    return [*notes, *overloaded(levels)]


TTFT = Procedure(
    name="ttft",
    objective="How long users wait for the first token at a stated load.",
    workload="synthetic-uniform",
    rests_on=("ttft",),
    presets={"letter": Parameters(load=0.7, requests=10_000), "short": Parameters(load=0.7, requests=1000)},
    next_step=_next_step,
    findings=_findings,
    optional=("until",),
)
