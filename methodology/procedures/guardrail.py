"""Guardrail Overhead: what safety systems before and behind the model cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from sidelight.loadgen.requests.metrics import refused_by_filter, request_metrics
from sidelight.methodology.measures.paired import (
    PERCENTILES,
    bootstrapped,
    measured,
    of_ends,
    overloaded,
    paired,
    throughput,
    throughput_sentence,
)
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings
from sidelight.methodology.study.model import Done, Finished, Parameters, Procedure, Reader, Step, StudySettings
from sidelight.methodology.study.planning import LEVEL, content_seed, counting, level_label, percents
from sidelight.methodology.study.quantities import (
    grid,
    number,
    percentiles,
    plot_cumulative,
    reported_times,
    unknown,
    wilson,
)
from sidelight.methodology.study.saturation import fullest, saturated
from sidelight.rundir.columns import Bools, Floats
from sidelight.rundir.printable.numbers import figure

BASELINE = "baseline"
VARIANTS = {BASELINE: "Baseline", "input": "Input Filter", "output": "Output Filter", "full": "Full Filter"}
FILTERS = {
    name: {"input_filtering": name in ("input", "full"), "output_filtering": name in ("output", "full")}
    for name in VARIANTS
}
SATURATED = "saturated"
REDUCTION = "Reduction: change against the baseline, below zero where throughput fell, as in the draft's example."
LEAST_SATURATED_S = 20.0
NEEDS = (
    "this test compares a system without guardrails with others of the same model: give each with --variant NAME=URL, "
    f"one of them named {BASELINE}; the draft has {', '.join(VARIANTS)}"
)
NOTES = (
    (
        "All configurations are sent the same requests at the same moments, at shares of the baseline's capacity; "
        "overhead is the median over pairs of the same request."
    ),
    "Throughput at a fixed rate cannot fall before the system is overloaded: its reduction is that of saturated steps.",
    "Prefix caches are emptied before each step where the server can, since the requests are the same in each.",
    "Content is benign as far as the workload's is: nothing in it asks for what guardrails refuse.",
)


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the baseline's saturated step and levels, then the same of each other configuration.

    The saturated step comes first, since what warms a configuration up takes less time the more is in flight.
    """
    if BASELINE not in asked.variants or len(asked.variants) < 2:
        return Done(reason=NEEDS, complete=False)
    parameters = asked.parameters
    length_s, least = parameters.duration or 60.0, parameters.requests or 0
    lasting = replace(parameters, duration=max(length_s, LEAST_SATURATED_S))
    options = {"output_tokens": str(parameters.output_tokens)} if parameters.output_tokens else {}
    limit = saturated(replace(asked, parameters=lasting), finished)
    if isinstance(limit, Done):
        return limit
    if isinstance(limit, Step):
        return replace(limit, variant=BASELINE, reset_cache=True, options=options)
    levels = [
        Step(
            kind=LEVEL,
            label=level_label(share * limit.per_s, share),
            load="open",
            level=share * limit.per_s,
            share=share,
            duration=max(length_s, float(math.ceil(least / (share * limit.per_s)))),
            seed=content_seed(asked, 100 + at),
            reset_cache=True,
            options=options,
        )
        for at, share in enumerate(parameters.levels or (0.5,))
    ]
    others = [name for name in asked.variants if name != BASELINE]
    steps = [replace(step, variant=BASELINE, label=f"{BASELINE}-{step.label}") for step in levels]
    for name in others:
        steps.append(replace(limit.step, kind=SATURATED, variant=name, label=f"{name}-{limit.step.label}"))
        steps += [replace(step, variant=name, label=f"{name}-{step.label}") for step in levels]
    ended = {each.step.label for each in finished if each.step.kind in (LEVEL, SATURATED)}
    done = Done(reason="every configuration has been measured at each level")
    return next((step for step in steps if step.label not in ended), done)


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Return latency, overhead and throughput by configuration; what has not been measured is missing."""
    steps = counting(finished)
    levels = {(each.step.variant, each.step.share): each for each in steps if each.step.kind == LEVEL}
    names = [name for name in asked.variants if name == BASELINE] + [n for n in asked.variants if n != BASELINE]
    shares = sorted({share for _, share in levels if share is not None})
    results: dict[str, ResultQuantity] = {}
    times: dict[str, Floats] = {}
    differences: dict[str, list[Floats]] = {name: [] for name in names}
    sent: dict[str, list[Bools]] = {name: [] for name in names}  # which of the requests were refused
    for share in shares:
        base = measured(levels[BASELINE, share], read(levels[BASELINE, share])) if (BASELINE, share) in levels else None
        for name in (each for each in names if (each, share) in levels):
            whole = read(levels[name, share])
            data = measured(levels[name, share], whole)
            suffix = f"{name}_{percents(share)}"
            metrics = request_metrics(data.requests)
            ok = data.requests.status == "ok"
            sent[name].append(refused_by_filter(whole.requests))
            times.setdefault(name, metrics.ttft_ms[ok])
            for metric, values in (("ttft", metrics.ttft_ms), ("e2e", metrics.e2e_ms)):
                results |= percentiles(values[ok], f"{metric}_{{}}_ms_{suffix}", tuple(PERCENTILES), least=1)
            # Timings in replies do not tell what is before the engine from its own front end.
            outside_ms = 1e3 * (data.parts.ttft_s - data.parts.queue_s - data.parts.prefill_s)
            results |= percentiles(outside_ms, f"outside_engine_{{}}_ms_{suffix}", ("p50",), least=1)
            if base is not None and name != BASELINE:
                rows, others = paired(base, data)
                before = request_metrics(base.requests)
                gaps = [getattr(metrics, m)[others] - getattr(before, m)[rows] for m in ("ttft_ms", "e2e_ms")]
                differences[name].append(np.column_stack(gaps)[np.isfinite(gaps).all(axis=0)])
                results |= _overheads(suffix, differences[name][-1:])
    for name in names[1:]:
        results |= _overheads(name, differences[name])
    full, served = {each.step.variant: each for each in steps if each.step.kind == SATURATED}, fullest(steps)
    for name in names:
        results |= throughput(name, served if name == BASELINE else full.get(name), served)
    results |= _reported(names, levels, results)
    for name in (each for each in names if sent[each]):
        results |= _refusals(name, np.concatenate(sent[name]))
    by_level = {f"{n}_{percents(s)}": f"{VARIANTS.get(n, n)}, {percents(s)} %" for n in names for s in shares}
    latency = {f"{of}_{q}_ms": f"{of.upper()} {q.upper()} (ms)" for of in ("ttft", "e2e") for q in PERCENTILES}
    latency |= {"overhead_ttft_ms": "TTFT overhead (ms)", "overhead_e2e_ms": "E2E overhead (ms)"}
    latency |= {"outside_engine_p50_ms": "TTFT less queue and prefill, P50 (ms)"}
    impact = {"max_output_tokens_per_s": "Max Throughput (tok/s)", "throughput_change_ratio": "Reduction (ratio)"}
    impact |= {"refused": "Refused", "refused_ratio": "Refused (ratio)"}
    by_name = {name: VARIANTS.get(name, name) for name in names}
    heading = {"configuration": "Configuration"}
    return StudyFindings(
        answer=_answer(names, results),
        results=results,
        tables=(
            grid("guardrail-overhead", "Guardrail Overhead", by_level, heading | latency, results),
            grid("guardrail-throughput", "Throughput Impact", by_name, heading | impact, results, REDUCTION),
        ),
        plots=plot_cumulative("guardrail-ttft-cdf", "TTFT by configuration, lowest level", times),
        notes=(*NOTES, *_notes(asked, results, names), *overloaded(steps)),
    )


def _reported(
    names: Sequence[str], levels: Mapping[tuple[str, float | None], Finished], results: Mapping[str, ResultQuantity]
) -> dict[str, ResultQuantity]:
    """Return the minimum report's values for the answer's configuration: at its highest level."""
    last = _last(names, results) or BASELINE
    step = max((each for (name, _), each in levels.items() if name == last), key=lambda e: e.step.level, default=None)
    share = f"{100 * (step.step.share or 0):g} % of the capacity of the {BASELINE}" if step else ""
    reported = reported_times(step, f"{last} configuration, {share}", f"no level of the {last} configuration counts")
    if (served := results.get(f"max_output_tokens_per_s_{last}")) is not None:
        reported["max_output_tokens_per_s"] = replace(served, at=f"{last} configuration, saturated closed loop")
    return reported


def _last(names: Sequence[str], results: Mapping[str, ResultQuantity]) -> str:
    """Return the answer's configuration, empty if none was measured beside the baseline."""
    last = "full" if "full" in names else names[-1] if len(names) > 1 else ""
    return last if f"overhead_e2e_ms_{last}" in results else ""


def _refusals(name: str, refused: Bools) -> dict[str, ResultQuantity]:
    count, sent = int(refused.sum()), len(refused)
    ratio = number(count / sent if sent else None, "ratio", ci95=wilson(count, sent), n=sent, method="Wilson")
    return {f"refused_{name}": number(count, "requests"), f"refused_ratio_{name}": ratio}


def _overheads(suffix: str, differences: Sequence[Floats]) -> dict[str, ResultQuantity]:
    """Return the medians over pairs of requests, ms; the pairs of each level are drawn by themselves."""
    known = [each for each in differences if len(each)]
    keys = (f"overhead_ttft_ms_{suffix}", f"overhead_e2e_ms_{suffix}")
    if not known:
        return unknown("no request ended in both configurations", "ms", *keys)
    ends = bootstrapped(known, lambda drawn: np.median(np.concatenate(drawn), axis=0).tolist())
    return {key: of_ends(each, "ms", sum(map(len, known))) for key, each in zip(keys, ends, strict=True)}


def _answer(names: Sequence[str], results: dict[str, ResultQuantity]) -> tuple[str, ...]:
    def sentence(what: str, key: str, verb: str) -> str:
        quantity = results[key]
        if quantity.value is None:
            return f"What {what} adds {verb} is not known: {quantity.missing}."
        return f"{what[0].upper()}{what[1:]} adds {figure(quantity.value)} ms{quantity.interval()} {verb}."

    last = _last(names, results)
    if not last:
        return ("The overhead of guardrails is not known: no configuration was measured beside the baseline.",)
    sentences = [sentence(f"the {last} configuration", f"overhead_e2e_ms_{last}", "to a request, end to end")]
    if "input" in names:
        sentences.append(sentence("input filtering", "overhead_ttft_ms_input", "to the TTFT"))
    change = results[f"throughput_change_ratio_{last}"]
    return (*sentences, throughput_sentence(change, f"with the {last} configuration"))


def _notes(asked: StudySettings, results: dict[str, ResultQuantity], names: Sequence[str]) -> list[str]:
    notes = []
    if tokens := asked.parameters.output_tokens:
        notes.append(f"All outputs have {tokens} tokens: those of the workload, of which some are long, take longer.")
    if missing := [name for name in VARIANTS if name not in asked.variants]:
        notes.append(f"Not measured of the draft's configurations: {', '.join(missing)}.")
    refused = {name: results[f"refused_ratio_{name}"] for name in names if f"refused_ratio_{name}" in results}
    shares = [f"{name} {100 * each.value:.1f} % of {each.n:,}" for name, each in refused.items() if each.value]
    if shares:
        notes.append(f"Safety systems refused requests, which are in no latency: {', '.join(shares)}.")
    return notes


GUARDRAIL = Procedure(
    name="guardrail",
    objective="What safety systems and content filters cost in latency and throughput.",
    workload="conversation",
    rests_on=("ttft",),
    presets={
        "letter": Parameters(levels=(0.25, 0.5, 0.75), duration=60.0, requests=50),
        "short": Parameters(levels=(0.25, 0.5, 0.75), duration=20.0, requests=30, output_tokens=128),
    },
    next_step=next_step,
    findings=findings,
    independent=(LEVEL, SATURATED),
    variants=FILTERS,
)
