"""Scheduling Fairness: what classes of short and long requests cost each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from sidelight.loadgen.plan.workloads.fields import WorkloadError
from sidelight.methodology.measures.fairness import STARVED, Scheduling, jain, scheduling, starved
from sidelight.methodology.measures.paired import (
    PERCENTILES,
    Times,
    bootstrapped,
    clipped,
    measured,
    of_ends,
    overloaded,
    times,
)
from sidelight.methodology.measures.traffic import NAME, Traffic, traffic
from sidelight.methodology.study.findings import ResultQuantity, ResultTable, StudyFindings, SupportingNumber
from sidelight.methodology.study.model import Done, Finished, Parameters, Procedure, Reader, Step, StudySettings
from sidelight.methodology.study.planning import counting, fresh, of_kind
from sidelight.methodology.study.quantities import (
    grid,
    in_percent,
    mean,
    metric_table,
    number,
    percentiles,
    plot_cumulative,
    reported_times,
    slug,
)
from sidelight.methodology.study.saturation import SATURATE, capacity, fullest
from sidelight.rundir.columns import Floats, take

ALONE, MIXED = "alone", "mixed"
ROOM = 1.25  # times the requests that a class needs, since the classes are drawn
UNFAIR = 0.9
NEAR = 0.95  # of the capacity: a higher load is soon one that is not sustained
_EXACT = 0.9  # share of the requests whose queue time spans or replies tell
_LETTER = Parameters(load=0.8, duration=300.0, requests=500, mix=0.8)
NOTES = (
    (
        "Synthetic-Skewed seldom falls into the ranges that the draft gives its classes: its log-normal lengths are "
        "truncated to them (drawn again outside), not held at their ends."
    ),
    (
        "Each class alone is offered the same tokens per second, input and output together, as the mixed load: with "
        "the same requests per second the long class alone would be several times the load."
    ),
    (
        "Normalised latency is the median TTFT of a class in the mixed load over its median alone; Jain's index is "
        "over the classes. The index over requests stands beside it: exponential waits alone give it 0.5."
    ),
    "A wait is the TTFT; starved requests wait longer than five times the median of their class in the mixed load.",
)


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the saturated step of the mixed load, then each class alone, then all together."""
    try:
        classes = traffic(asked)
    except WorkloadError as error:
        return Done(reason=f"{error}", complete=False)
    limit = capacity(asked, of_kind(finished, SATURATE))
    if isinstance(limit, Done):
        return limit
    if isinstance(limit, Step):
        return replace(limit, options=limit.options | {"workload": classes.mapping()})
    parameters = asked.parameters
    load, wanted = parameters.load or 0.8, parameters.requests or 500
    mixed_per_s = load * (_requests_per_s(classes, finished) or limit.per_s)
    steps = [
        (ALONE, f"{ALONE}-{slug(name, 'class')}", classes.per_s(at, mixed_per_s), 1.0, classes.mapping(at))
        for at, name in enumerate(classes.names)
    ]
    steps.append((MIXED, MIXED, mixed_per_s, min(classes.shares), classes.mapping()))
    ended = [each for each in finished if each.step.kind in (ALONE, MIXED)]
    if len(ended) == len(steps):
        return Done(reason="each class alone and the mixed load have been measured")
    kind, label, per_s, share, workload = steps[len(ended)]
    duration_s, options = max(parameters.duration or 300.0, ROOM * wanted / (share * per_s)), {"workload": workload}
    return fresh(asked, finished, label, "open", per_s, kind=kind, share=load, duration=duration_s, options=options)


def _requests_per_s(classes: Traffic, finished: Sequence[Finished]) -> float | None:
    """Return the mixed load's requests/s at the token rate of the saturated step.

    By its requests alone the capacity would depend on how many long ones it happened to draw.
    """
    best = fullest(finished)
    served = best.outcome if best else None
    if served is None or served.input_tokens_per_s is None or served.output_tokens_per_s is None:
        return None
    return (served.input_tokens_per_s + served.output_tokens_per_s) / classes.mean_tokens


def _served(finished: Finished, read: Reader) -> Times:
    """Return the successful requests of a step's window that have a first token."""
    data = measured(finished, read(finished))
    return take(times(data), (data.requests.status == "ok") & (data.requests.first_token_ns >= 0))


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Return the effect of the classes on each other; what has not been measured is missing."""
    names = traffic(asked).names
    steps = [each for each in counting(finished) if each.step.kind in (ALONE, MIXED)]
    alone = {name: _served(step, read) for name, step in zip(names, steps, strict=False)}
    mixed = _served(steps[-1], read) if len(steps) > len(names) else None
    results = _class_results(names, alone, mixed) | _index_results(names, alone, mixed)
    results |= reported_times(steps[-1] if mixed else None, "all classes, mixed", "the mixed load was not measured")
    rule = _scheduling(names, mixed)
    curves = {f"{name}, mixed": mixed.of(name).ttft_ms for name in names if mixed}
    curves |= {f"{name}, alone": served.ttft_ms for name, served in alone.items()}
    return StudyFindings(
        answer=_answer(asked, names, results, rule),
        results=results,
        evidence=tuple(
            SupportingNumber(
                claim=rule.reason, quantity=f"queue_mean_ms_{name}", run=steps[-1].run, value=quantity.value
            )
            for name in names
            if mixed and (quantity := results.get(f"queue_mean_ms_{name}")) is not None
        ),
        tables=_tables(names, results),
        plots=plot_cumulative("fairness-ttft-cdf", "TTFT by class, mixed and alone", curves),
        notes=(*NOTES, *_notes(asked, names, steps, mixed)),
    )


def _class_results(names: Sequence[str], alone: Mapping[str, Times], mixed: Times | None) -> dict[str, ResultQuantity]:
    results: dict[str, ResultQuantity] = {}
    for name in names:
        both = {name: mixed.of(name) if mixed else None, f"alone_{name}": alone.get(name)}
        for suffix, served in both.items():
            if served is None:
                results[f"ttft_p50_ms_{suffix}"] = number(None, "ms", missing="the step has not been measured")
                continue
            results[f"requests_{suffix}"] = number(len(served.ttft_ms), "requests")
            for metric, values in (("ttft", served.ttft_ms), ("tpot", served.tpot_ms)):
                results |= percentiles(values, f"{metric}_{{}}_ms_{suffix}", tuple(PERCENTILES), least=1)
            results[f"queue_mean_ms_{suffix}"] = mean(served.queue_ms)
            results[f"prefill_mean_ms_{suffix}"] = mean(served.prefill_ms)
        if mixed and mixed.exact.any():
            waits = mixed.of(name).queue_ms
            waits = waits[np.isfinite(waits)]
            share = float(starved(waits).mean()) if len(waits) and np.median(waits) > 0 else None
            reason = "the median queue time is 0, which has no five times"
            results[f"queue_starvation_ratio_{name}"] = number(share, "ratio", n=len(waits), missing=reason)
    return results


def _index_results(names: Sequence[str], alone: Mapping[str, Times], mixed: Times | None) -> dict[str, ResultQuantity]:
    """Return inflation, Jain's index and starvation, with intervals over blocks of all steps."""
    if mixed is None or any(not len(mixed.of(name).ttft_ms) or not len(alone[name].ttft_ms) for name in names):
        reason = "needs each class alone and the mixed load"
        return {name: number(None, "1", missing=reason) for name in ("jain_index", "jain_index_requests")}
    place = {name: at for at, name in enumerate(names)}
    both = np.column_stack([mixed.ttft_ms, [place.get(name, -1) for name in mixed.classes.tolist()]])
    samples = [both, *(alone[name].ttft_ms for name in names)]

    def ratios(drawn: Sequence[Floats]) -> list[float]:
        qs = list(PERCENTILES.values())
        classes = [drawn[0][drawn[0][:, 1] == at, 0] for at in range(len(names))]
        pairs = zip(classes, drawn[1:], strict=True)
        return [float(r) for a, b in pairs for r in _quantiles(a, qs) / _quantiles(b, qs)]

    def shares(drawn: Sequence[Floats]) -> list[float]:
        classes = [drawn[0][drawn[0][:, 1] == at, 0] for at in range(len(names))]
        medians = np.array([_quantiles(a, (0.5,))[0] for a in drawn[1:]])
        inflated = np.array([_quantiles(a, (0.5,))[0] for a in classes]) / medians
        each = np.concatenate([a / median for a, median in zip(classes, medians, strict=True)])
        return [jain(inflated), jain(each), *(float(starved(a).mean()) if len(a) else np.nan for a in classes)]

    inflation, indices = bootstrapped(samples, ratios, logs=True), bootstrapped(samples, shares)
    count = len(mixed.ttft_ms)
    labels = [f"ttft_inflation_{q}_{name}" for name in names for q in PERCENTILES]
    results = {label: of_ends(ends, "ratio", count) for label, ends in zip(labels, inflation, strict=True)}
    ones = ["jain_index", "jain_index_requests", *(f"starvation_ratio_{name}" for name in names)]
    for label, ends in zip(ones, indices, strict=True):
        unit = "ratio" if label.startswith("starvation") else "1"
        least = 1 / len(names) if label == "jain_index" else 0.0
        results[label] = of_ends(clipped(ends, least, 1.0), unit, count)
    return results


def _quantiles(values: Floats, qs: Sequence[float]) -> Floats:
    return np.quantile(values, qs) if len(values) else np.full(len(qs), np.nan)


def _scheduling(names: Sequence[str], mixed: Times | None) -> Scheduling:
    if mixed is None:
        return Scheduling(policy="unknown", reason="the mixed load has not been measured")
    if mixed.exact.sum() < _EXACT * max(1, len(mixed.exact)):
        reason = "the queue time of single requests is not known: it needs spans, or timings in the replies"
        return Scheduling(policy="unknown", reason=reason)
    place = {name: at for at, name in enumerate(names)}
    rows = np.isfinite(mixed.prefill_ms) & np.isfinite(mixed.tokens) & np.isin(mixed.classes, names)
    class_of = np.array([place[name] for name in mixed.classes[rows].tolist()], dtype=np.int64)
    arrived_s = mixed.submit_ns[rows] / 1e9
    begun_s = arrived_s + (mixed.ttft_ms - mixed.prefill_ms)[rows] / 1e3
    return scheduling(arrived_s, begun_s, mixed.tokens[rows], class_of, names)


def _rule_sentence(rule: Scheduling, results: Mapping[str, ResultQuantity], first: str) -> str:
    queue, before = (results.get(f"queue_mean_ms_{prefix}{first}") for prefix in ("", "alone_"))
    if rule.policy == "fcfs" and queue and before and queue.value is not None and before.value is not None:
        blocked = queue.value > 1.5 * before.value
        cost = f"a {first} request waits {queue.value:.0f} ms in the queue, alone {before.value:.0f} ms"
        before_it = "it is held up by what stands before it (head-of-line blocking)"
        held = before_it if blocked else "nothing holds it up more"
        return f"The engine serves first come, first served: {cost}, so that {held}; {rule.reason}."
    words = {
        "fcfs": "The engine serves first come, first served", "unknown": "By which rule the engine serves is not known",
        "shortest-first": "The engine serves shorter requests first",
        "priority": f"The engine gives {rule.first} requests priority",
    }  # fmt: skip
    return f"{words[rule.policy]}: {rule.reason}."


def _cure(asked: StudySettings, rule: Scheduling) -> Iterator[str]:
    """Yield advice where too few requests waited together to show the rule."""
    load = asked.parameters.load or 0.8
    longer = f"longer steps (--duration, now {asked.parameters.duration or 300.0:g} s)"
    nearer = f"a load nearer to the capacity (--load, now {100 * load:g} %) and " if load < NEAR else ""
    if rule.is_few:
        yield f"To see the rule, run the test again with {nearer}{longer}: more requests then wait at the same time."


def _answer(
    asked: StudySettings, names: Sequence[str], results: Mapping[str, ResultQuantity], rule: Scheduling
) -> tuple[str, ...]:
    index = results["jain_index"]
    if index.value is None:
        return (f"Fairness is not known: it {index.missing}.",)
    costs = ", ".join(f"{results[f'ttft_inflation_p50_{name}'].value:.2f} ({name})" for name in names)
    starving = " and ".join(f"{in_percent(results[f'starvation_ratio_{name}'])} of the {name} ones" for name in names)
    bound = f"below {UNFAIR} the draft speaks of significant unfairness"
    return (
        f"In the mixed load the median TTFT of the classes is {costs} times what it is alone.",
        f"Jain's index over these is {index.value:.3f}{index.interval()}; {bound}.",
        f"Of the requests, {starving} waited over {STARVED:g} times the median of their class.",
        _rule_sentence(rule, results, names[0]),
        *_cure(asked, rule),
    )


def _tables(names: Sequence[str], results: Mapping[str, ResultQuantity]) -> tuple[ResultTable, ...]:
    percentiles = {f"ttft_{q}_ms": f"TTFT {q.upper()} (ms)" for q in PERCENTILES}
    columns = {"class": "Class", "requests": "Count", **percentiles}
    columns |= {f"tpot_{q}_ms": f"TPOT {q.upper()} (ms)" for q in ("p50", "p99")}
    columns |= {f"{key}_alone": f"Alone {title}" for key, title in percentiles.items()}
    columns |= {f"ttft_inflation_{q}": f"Inflation {q.upper()}" for q in PERCENTILES}
    columns |= {"queue_mean_ms": "Queue, mean (ms)", "prefill_mean_ms": "Prefill, mean (ms)"}
    rows = {"jain_index": "Jain's Fairness Index", "jain_index_requests": "Jain's index over requests"}
    rows |= {f"starvation_ratio_{name}": f"{name.capitalize()} Class Starvation (ratio)" for name in names}
    rows |= {f"queue_starvation_ratio_{name}": f"{name.capitalize()} class, by queue time (ratio)" for name in names}
    note = "The mixed load, and beside it each class alone at the same offered tokens per second."
    return (
        grid("fairness-per-class", "Per-Class Results", {name: name for name in names}, columns, results, note=note),
        metric_table("fairness-metrics", "Fairness Metrics", rows, results),
    )


def _notes(asked: StudySettings, names: Sequence[str], steps: Sequence[Finished], mixed: Times | None) -> list[str]:
    notes = []
    if (scale := traffic(asked).scale) < 1:
        lengths = f"the lengths of both classes are {scale:.2f} times the draft's"
        notes.append(f"The model takes {asked.max_model_len:,} tokens: {lengths}.")
    notes += overloaded(steps)
    wanted = asked.parameters.requests or 500
    few = [name for name in names if mixed and len(mixed.of(name).ttft_ms) < wanted]
    if few:
        notes.append(f"Fewer than {wanted} requests in the mixed load's window: {', '.join(few)}.")
    return notes


FAIRNESS = Procedure(
    name="fairness",
    objective="How evenly the system serves classes of requests with different lengths: head-of-line blocking, "
    "starvation and priority.",
    workload=NAME,
    rests_on=("ttft",),
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=60.0, requests=60)},
    next_step=next_step,
    findings=findings,
)
