"""Prefix Cache Effectiveness: what the prefix cache saves where requests begin alike."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from sidelight.correlator.statistics.server_load import leading_endpoints
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.requests.metrics import counts, input_tokens, request_metrics
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
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings, SupportingNumber
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
from sidelight.methodology.study.planning import POPULATE, content_seed, counting
from sidelight.methodology.study.quantities import (
    grid,
    in_percent,
    number,
    percentiles,
    plot_cumulative,
    reported_times,
)
from sidelight.methodology.study.saturation import SATURATE, fullest, saturated
from sidelight.methodology.study.server_side import increase
from sidelight.rundir.columns import Floats
from sidelight.rundir.printable.numbers import figure

NAME = "code-completion"
_LETTER = Parameters(load=0.7, requests=1000, duration=60.0)
OFF, COLD, WARM = "off", "cold", "warm"
CONFIGURATIONS = {OFF: "Cache Disabled", COLD: "Cache (Cold)", WARM: "Cache (Warm)"}
VARIANTS = {"off": {"prefix_caching": False}, "on": {"prefix_caching": True}}
SATURATED = "saturated"
# What the shared pieces of the named workloads are; those of other workloads stand in their mapping.
SHARED: Mapping[str, dict[str, Any]] = {
    NAME: {
        "content": "code",
        "prefixes": {"count": 10, "tokens": {"uniform": {"min": 512, "max": 1024}}, "share": 0.8, "zipf": 1.5},
    },
    "conversation": {"content": "words", "system_prompt": {"tokens": 200, "share": 0.5}},
}
OTHER_CONTENT = ("dataset", "prompts", "replay_requests", "trace")  # whose shared pieces are not known by themselves
POPULATING = 100  # requests, evenly over the shared prefixes
NEEDS = "a workload whose requests share prefixes: code-completion, conversation, or a mapping with prefixes"
EMULATED = (
    "Not met: the draft's MUST of two configurations. Both were emulated on one by the field cache_salt of each "
    "request: of its own for a disabled cache, of its step for one that is empty at first; --variant off=URL and "
    "--variant on=URL measure two configurations."
)
NOTES = (
    (
        "The same requests at the same moments are sent with the cache disabled, enabled and cold, and enabled and "
        "warm. Before the warm step only the shared prefixes are sent: the draft's identical workload behind a cold "
        "run would find whole prompts in the cache."
    ),
    "The draft's hit rate is over prefix tokens, engines count all prompt tokens: both are given.",
    "Throughput at a fixed rate cannot improve: its improvement is that of saturated steps.",
)


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the next step: saturated without cache, then the same requests off, cold and warm, and saturated steps."""
    shared = _shared(asked)
    if shared is None:
        return Done(reason=f"this test needs {NEEDS}", complete=False)
    if asked.variants and set(asked.variants) != set(VARIANTS):
        named = ", ".join(asked.variants)
        return Done(reason=f"the configurations of this test are named off and on, not {named}", complete=False)
    limit = saturated(asked, finished)
    if isinstance(limit, Done):
        return limit
    if isinstance(limit, Step):
        return _configured(asked, limit, OFF)
    load = asked.parameters.load or 0.7
    count, seed = asked.parameters.requests or 1000, content_seed(asked, 100)
    latency = Step(kind=OFF, label=OFF, load="open", level=load * limit.per_s, share=load, requests=count, seed=seed)
    options = {"workload": shared}
    populate = Step(
        kind=POPULATE, label=POPULATE, load="closed", level=1, requests=POPULATING, seed=seed, options=options
    )
    steps = [_configured(asked, latency, OFF)]
    for name, step in ((COLD, latency), (COLD, limit.step), (WARM, latency), (WARM, limit.step)):
        kind = name if step is latency else f"{SATURATED}-{name}"
        if name == WARM:
            before = replace(populate, seed=step.seed, label=f"{POPULATE}-{kind}")
            steps.append(_configured(asked, before, kind, resets=True))
        steps.append(_configured(asked, replace(step, kind=kind, label=kind), kind, resets=name == COLD))
    ended = sum(each.step.kind != SATURATE for each in finished)
    return steps[ended] if ended < len(steps) else Done(reason="the cache has been measured off, cold and warm")


def _configured(asked: StudySettings, step: Step, state: str, *, resets: bool = False) -> Step:
    """Return a step of the configuration with the cache off or on.

    It may emulate the cache; `resets`: empty at first. Requests see what those of the same `cache_salt` left in the
    cache: with a salt of its own each, nothing.
    """
    if asked.variants:
        return replace(step, variant=OFF if state == OFF else "on", reset_cache=resets)
    given = asked.options.get("extra_body") or {}
    body = json.loads(given) if isinstance(given, str) else dict(given)
    salt = f"{step.seed:08x}-{step.kind}-{{request}}" if state == OFF else f"{step.seed:08x}-{state}"
    return replace(step, options=step.options | {"extra_body": json.dumps(body | {"cache_salt": salt})})


def _shared(asked: StudySettings) -> dict[str, Any] | None:
    """Return the workload that sends only the study's shared pieces; None without any."""
    given = asked.options.get("workload", NAME)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = json.loads(given)
    name = given if isinstance(given, str) else given.get("name", POPULATE)
    mapping: dict[str, Any] | None = SHARED.get(given) if isinstance(given, str) else dict(given)
    if not mapping or "classes" in mapping or any(asked.options.get(name) for name in OTHER_CONTENT):
        return None
    fields = {field: mapping[field] for field in ("content", "prefixes", "system_prompt") if mapping.get(field)}
    pieces: dict[str, Any] = {
        field: {**fields[field], "share": 1.0, "zipf": 0.0}
        for field in ("prefixes", "system_prompt")
        if field in fields
    }
    return {"name": f"{name}: shared pieces alone", **fields, **pieces, "input": 1, "output": 1} if pieces else None


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Return TTFT, reduction, hit rates and throughput with the cache off, cold and warm."""
    steps = {each.step.kind: each for each in counting(finished)}
    whole = {name: read(steps[name]) for name in CONFIGURATIONS if name in steps}
    data = {name: measured(steps[name], step) for name, step in whole.items()}
    ttft = {name: request_metrics(each.requests).ttft_ms for name, each in data.items()}
    results: dict[str, ResultQuantity] = {}
    for name, step in data.items():
        of_step = percentiles(ttft[name][step.requests.status == "ok"], "ttft_{}_ms", tuple(PERCENTILES), least=1)
        of_step |= _hits(asked, steps[name], whole[name])
        if name != OFF and OFF in data:
            of_step |= _reductions(data[OFF], step)
        results |= {f"{key}_{name}": quantity for key, quantity in of_step.items()}
    base = fullest(counting(finished))
    for name in CONFIGURATIONS:
        results |= throughput(name, base if name == OFF else steps.get(f"{SATURATED}-{name}"), base)
    results |= _reported(steps, results)
    curves = {CONFIGURATIONS[name]: ttft[name] for name in data}
    columns = {"configuration": "Configuration"} | {f"ttft_{q}_ms": f"TTFT {q.upper()} (ms)" for q in PERCENTILES}
    columns |= {f"ttft_reduction_{q}_ratio": f"Reduction {q.upper()} (ratio)" for q in PERCENTILES}
    columns |= {"prefix_hit_ratio": "Hits / prefix tokens", "prompt_hit_ratio": "Hits / prompt tokens"}
    columns |= {"max_output_tokens_per_s": "Max Throughput (tok/s)", "throughput_change_ratio": "Improvement (ratio)"}
    return StudyFindings(
        answer=_answer(results),
        results=results,
        evidence=tuple(
            SupportingNumber(
                claim="tokens found in the cache", quantity="prefix_cache_hits", run=steps[name].run, value=value
            )
            for name in data
            if (value := increase(leading_endpoints(data[name].endpoints), "prefix_cache_hits", data[name].start_ns))
        ),
        tables=(grid("cache-effectiveness", "Cache Effectiveness", CONFIGURATIONS, columns, results),),
        plots=plot_cumulative("cache-ttft-cdf", "TTFT with the cache off, cold and warm", curves),
        notes=(*NOTES, *_notes(asked, results), *overloaded(counting(finished))),
    )


def _reported(steps: Mapping[str, Finished], results: Mapping[str, ResultQuantity]) -> dict[str, ResultQuantity]:
    """Return the minimum report's values for the last measured configuration.

    In a whole study it is the one with a warm cache.
    """
    last = next((name for name in reversed(CONFIGURATIONS) if name in steps), "")
    of = CONFIGURATIONS.get(last, "")
    reported = reported_times(steps.get(last), of, "no step with the cache off, cold or warm counts")
    if (served := results.get(f"max_output_tokens_per_s_{last}")) is not None:
        reported["max_output_tokens_per_s"] = replace(served, at=f"{of}, saturated closed loop")
    return reported


def _reductions(off: StepData, on: StepData) -> dict[str, ResultQuantity]:
    """Return the reductions of the TTFT's percentiles over the pairs that ended in both."""
    rows, others = paired(off, on)
    ttft_ms = [request_metrics(each.requests).ttft_ms[at] for each, at in ((off, rows), (on, others))]
    prefill_s = [each.parts.prefill_s[at] for each, at in ((off, rows), (on, others))]
    cached = counts(on.requests.cached_tokens[others])
    pairs = np.column_stack([*ttft_ms, *prefill_s, cached])
    pairs = pairs[np.isfinite(pairs[:, :2]).all(axis=1)]
    labels = [f"ttft_reduction_{q}_ratio" for q in PERCENTILES]
    if not len(pairs):
        return {label: number(None, "ratio", missing="no request ended in both") for label in labels}

    def reduced(drawn: Sequence[Floats]) -> list[float]:
        off_ms, on_ms = (np.quantile(drawn[0][:, at], list(PERCENTILES.values())) for at in (0, 1))
        return list(map(float, 1 - on_ms / off_ms))

    ends = bootstrapped([pairs], reduced)
    results = {label: of_ends(each, "ratio", len(pairs)) for label, each in zip(labels, ends, strict=True)}
    known = pairs[np.isfinite(pairs).all(axis=1)]
    if len(known) and known[:, 4].sum() > 0:
        saved = bootstrapped([known], lambda d: [1e6 * float((d[0][:, 2] - d[0][:, 3]).sum() / d[0][:, 4].sum())])
        results["prefill_saved_us_per_cached_token"] = of_ends(saved[0], "us/token", len(known))
    return results


def _hits(asked: StudySettings, step: Finished, data: StepData) -> dict[str, ResultQuantity]:
    """Return the shares of prefix and prompt tokens from the cache, in the whole step."""
    requests = data.requests
    engines = leading_endpoints(data.endpoints)
    hits, queries = (increase(engines, f"prefix_cache_{name}", data.start_ns) for name in ("hits", "queries"))
    cached, prompt = counts(requests.cached_tokens), input_tokens(requests)
    stated = np.isfinite(cached) & np.isfinite(prompt)
    prefixes = _prefix_tokens(asked, step, requests.index)
    results: dict[str, ResultQuantity] = {}
    if hits is not None and queries is not None:
        method = "the page: hits over queries" if queries else "the page: nothing was looked up"
        results["prompt_hit_ratio"] = number(hits / (queries or 1), "ratio", method=method)
    elif stated.any():
        share = float(cached[stated].sum() / prompt[stated].sum())
        results["prompt_hit_ratio"] = number(share, "ratio", n=int(stated.sum()), method="usage of the replies")
    else:
        reason = "neither a page nor the replies say what was found in the cache"
        results["prompt_hit_ratio"] = number(None, "ratio", missing=reason)
    sent = float(prefixes.sum()) if prefixes is not None else 0.0
    if prefixes is not None and stated.any() and prefixes[stated].sum():
        share = float(np.minimum(cached, prefixes)[stated].sum() / prefixes[stated].sum())
        method = "cached tokens of each reply, at most its prefix"
        results["prefix_hit_ratio"] = number(share, "ratio", n=int(stated.sum()), method=method)
    elif hits is not None and sent:
        method = "the page's hits over the prefix tokens that were sent"
        results["prefix_hit_ratio"] = number(hits / sent, "ratio", n=len(requests), method=method)
    else:
        reason = "what of the prompts was a prefix is not known" if not sent else results["prompt_hit_ratio"].missing
        results["prefix_hit_ratio"] = number(None, "ratio", missing=reason)
    return results


def _prefix_tokens(asked: StudySettings, step: Finished, index: Any) -> Floats | None:
    """Return the tokens of each request's shared pieces. They are drawn by its workload again from the step's seed."""
    given = step.step.options.get("workload", asked.options.get("workload", NAME))
    name = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    if asked.options.get("sessions") or not len(index):
        return None
    places = index - index.min()
    drawn = itertools.islice(workloads.build(name, seed=step.step.seed).requests, int(places.max()) + 1)
    tokens = [sum(piece.tokens for piece in (each.system, each.prefix) if piece) for each in drawn]
    prefixes: Floats = np.array(tokens, np.float64)[places]
    return prefixes


def _answer(results: Mapping[str, ResultQuantity]) -> tuple[str, ...]:
    reduced, before = results.get(f"ttft_reduction_p50_ratio_{WARM}"), results.get(f"ttft_p50_ms_{OFF}")
    after = results.get(f"ttft_p50_ms_{WARM}")
    if not (reduced and before and after) or None in (reduced.value, before.value, after.value):
        return ("What the prefix cache saves is not known: the steps with the cache off and warm are needed.",)
    hit, change = results[f"prefix_hit_ratio_{WARM}"], results[f"throughput_change_ratio_{WARM}"]
    return (
        (
            f"A warm prefix cache takes the median TTFT from {figure(before.value or 0)} to "
            f"{figure(after.value or 0)} ms: for the same requests it is lower by {in_percent(reduced)}."
        ),
        f"The cache held {in_percent(hit)} of the prefix tokens that were sent.",
        throughput_sentence(change, "with a warm cache"),
    )


def _notes(asked: StudySettings, results: Mapping[str, ResultQuantity]) -> list[str]:
    notes = [] if asked.variants else [EMULATED]
    if (hit := results.get(f"prompt_hit_ratio_{OFF}")) and (hit.value or 0) > 0:
        notes.append(
            f"The engine found tokens in the cache that was declared off: {100 * (hit.value or 0):.1f} % of them."
        )
    return notes


PREFIX_CACHE = Procedure(
    name="prefix-cache",
    objective="What prefix caching saves of the TTFT, and adds to the throughput, where requests share prefixes.",
    workload=NAME,
    rests_on=("ttft",),
    presets={"letter": _LETTER, "short": replace(_LETTER, requests=200, duration=20.0)},
    next_step=next_step,
    findings=findings,
    variants=VARIANTS,
)
