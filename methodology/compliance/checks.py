"""The requirements that need more than a rule: each a function of the study."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from methodology.compliance.case import Answer, Case, inapplicable, judged
from methodology.study.model import Cell

ITL_LEVELS = (0.25, 0.5, 0.75, 0.9)
GUARDRAIL_LEVELS = (0.25, 0.5, 0.75)
MEMORY_LEVELS = (1.0, 1.1, 1.25, 1.5)
OTHER_WORKLOAD = ("fairness", "prefix-cache", "memory-pressure", "long-context", "guardrail", "sweep")
CLASSES = {"short": ((64, 256), (32, 128)), "long": ((1024, 4096), (256, 1024))}
STUDY = "study.json: asked.parameters"


def workload_engine(case: Case) -> Answer:
    if case.test in OTHER_WORKLOAD:
        return inapplicable("the test has a workload of its own")
    if case.system.boundary not in (None, "model engine"):
        return inapplicable("the boundary is not a model engine")
    names = sorted({facts.workload for _, facts in case.steps})
    return judged(names == ["synthetic-uniform"], f"the workload is {' and '.join(names) or 'not known'}",
                  "manifest.json: workload.label")  # fmt: skip


def tokenizer(case: Case) -> Answer:
    stated = [facts.about.get("tokenizer") or {} for _, facts in case.steps]
    unknown = [name for name in ("name", "version", "source") if not all(each.get(name) for each in stated)]
    sized = bool(stated) and all(each.get("vocab_size") for each in stated)
    if not (sized or case.system.vocabulary):
        unknown.append("vocabulary size")
    if unknown or not stated:
        return judged(False, f"not known: {', '.join(unknown)}", "manifest.json: tokenizer")
    if sized:
        return judged(True, "stated", "manifest.json: tokenizer.vocab_size", stated[0]["vocab_size"])
    return Answer(state="declared", reason="its vocabulary is declared", evidence="study.json: sut.vocabulary",
                  value=case.system.vocabulary)  # fmt: skip


def latency_adjustment(case: Case) -> Answer:
    notes = " ".join(case.findings.notes) if case.findings else ""
    results = case.findings.results if case.findings else {}
    adjusted = [name for name in results if "adjusted" in name or "less_network" in name]
    if adjusted and "adjusted" not in notes:
        return judged(False, f"no note says how {adjusted[0]} was adjusted", f"result.json: results.{adjusted[0]}")
    return judged(True, "stated in the notes" if adjusted else "no latency was adjusted", "result.json: notes")


def guardrail_comparative(case: Case) -> Answer:
    if case.system.boundary not in (None, "application gateway"):
        return inapplicable("the boundary is not an application gateway")
    ways = {case.system.of(step.step.variant).output_filtering for step, _ in case.steps}
    ways |= {case.system.of(step.step.variant).input_filtering for step, _ in case.steps}
    return judged(ways >= {True, False} and len(case.asked.variants) > 1, "variants: " + ", ".join(case.asked.variants),
                  "study.json: asked.variants")  # fmt: skip


def ttft_count(case: Case) -> Answer:
    count = sum(facts.ok for _, facts in case.measuring())
    return judged(count >= 10_000, f"{count:,} requests; P99 needs 1,000, P99.9 10,000", "requests.parquet", count)


def throughput_params(case: Case) -> Answer:
    asked = case.asked.parameters
    unset = [name for name in ("min", "max", "increment") if getattr(asked, name) is None]
    if unset:
        return judged(False, f"not stated: {', '.join(unset)}", STUDY)
    return _lasting(case, 60.0)


def _lasting(case: Case, least_s: float, *kinds: str) -> Answer:
    """Return whether every measuring step lasts so long."""
    steps = [step for step, _ in case.measuring() if not kinds or step.step.kind in kinds]
    shortest = min((step.step.duration or 0.0 for step in steps), default=0.0)
    return judged(shortest >= least_s, f"the shortest step lasts {shortest:g} s, of {least_s:g} s or more",
                  "study.json: asked.parameters.duration", shortest)  # fmt: skip


def throughput_search(case: Case) -> Answer:
    levels = [step.step.level for step, _ in case.steps]
    limits = [step.number for step, _ in case.steps if step.outcome.limit or step.outcome.stability]
    return judged(len(set(levels)) > 1 and bool(limits), f"{len(set(levels))} levels were run", "result.json: steps",
                  len(set(levels)))  # fmt: skip


def throughput_steady(case: Case) -> Answer:
    windows = [step.outcome.window for step, _ in case.measuring()]
    ok = bool(windows) and all(window and window.left_out >= 0.1 and window.enough is not False for window in windows)
    return judged(
        ok, "the first 10 % are left out" if ok else "a step had no steady window", "result.json: steps.window"
    )


def tradeoff_levels(case: Case) -> Answer:
    shares = [step.step.share or 0.0 for step, _ in case.measuring() if step.step.kind == "level"]
    ok = len(shares) >= 10 and min(shares) <= 0.1 and max(shares) >= 1.2 and shares == sorted(shares)
    lasting = _lasting(case, 60.0, "level")
    if not ok:
        return judged(False, f"{len(shares)} levels of {_percents(shares)}", "result.json: steps.share", len(shares))
    return lasting


def _percents(shares: Sequence[float]) -> str:
    return ", ".join(f"{100 * share:g}" for share in shares) + " % of the capacity"


def itl_min_output(case: Case) -> Answer:
    for step, facts in case.measuring():
        if facts.long_requests < 100 or facts.long_gaps < 5000:
            text = f"{facts.long_requests:,} requests of 50 output tokens or more with {facts.long_gaps:,} gaps"
            return judged(False, text, f"{step.run}/requests.parquet", facts.long_requests)
    return judged(bool(case.measuring()), "100 requests and 5,000 gaps a level", "requests.parquet")


def _levels(wanted: Sequence[float]) -> Callable[[Case], Answer]:
    """Return the check that levels were run at some shares of the capacity."""

    def check(case: Case) -> Answer:
        shares = sorted({round(step.step.share, 3) for step, _ in case.measuring() if step.step.share is not None})
        return judged(set(wanted) <= set(shares), f"levels: {_percents(shares)}", "result.json: steps.share")

    return check


def itl_excludes_ttft(case: Case) -> Answer:
    known = sum(facts.gaps for _, facts in case.steps)
    counted = max((quantity.n or 0 for name, quantity in (case.findings.results if case.findings else {}).items()
                   if name.startswith("itl_")), default=0)  # fmt: skip
    return judged(counted <= known, f"{counted:,} gaps counted, of {known:,} between chunks", "result.json: results",
                  counted)  # fmt: skip


def capacity_setup(case: Case) -> Answer:
    asked = case.asked.parameters
    unset = [name for name in ("output_tokens", "min", "max", "completion", "slo") if getattr(asked, name) is None]
    return judged(not unset, f"not stated: {', '.join(unset)}" if unset else "stated", STUDY)


def capacity_search(case: Case) -> Answer:
    per_slot = case.asked.parameters.per_slot or 0
    if per_slot < 100:
        return judged(False, f"{per_slot} completions a slot, of 100", STUDY, per_slot)
    return _lasting(case, 60.0)


def fairness_workload(case: Case) -> Answer:
    mixed = [(step, facts) for step, facts in case.measuring() if len(facts.classes) > 1]
    if not mixed:
        return judged(False, "no step had two classes of requests", "requests.parquet: workload_class")
    step, facts = mixed[-1]
    for name, count in facts.classes.items():
        if count < 500:
            return judged(False, f"{count} requests of class {name}, of 500", f"{step.run}/requests.parquet", count)
    stated = (facts.about.get("workload") or {}).get("classes") or ()
    ranges = [tuple((each.get(way, {}).get("min"), each.get(way, {}).get("max"))
              for way in ("input_tokens", "output_tokens")) for each in stated]  # fmt: skip
    other = [name for name, wanted in CLASSES.items() if wanted not in ranges]
    return judged(not other, f"no class has the draft's lengths of {' and '.join(other)} requests" if other else "so",
                  f"{step.run}/manifest.json: workload.classes")  # fmt: skip


def fairness_load(case: Case) -> Answer:
    share: Cell = case.asked.parameters.load
    ok = share is not None and 0.7 <= float(share) <= 0.9
    return judged(ok, f"{100 * float(share):g} % of the capacity" if share else "the load is not stated", STUDY, share)


def fairness_baseline(case: Case) -> Answer:
    kinds = {step.step.kind for step, _ in case.steps}
    if not {"alone", "mixed"} <= kinds:
        return judged(False, "classes were not measured alone and mixed", "result.json: steps.kind")
    return _lasting(case, 300.0, "mixed")


def cache_two_configs(case: Case) -> Answer:
    ways: dict[bool | None, set[str]] = {}
    for step, facts in case.measuring():
        caching = case.system.of(step.step.variant).prefix_caching
        ways.setdefault(caching, set()).add(str(facts.requests_sha256))
    if "prefix_caching" in case.system.contradictions:
        return judged(False, case.system.contradictions["prefix_caching"], "study.json: sut")
    if not {True, False} <= set(ways):
        return judged(False, "no two variants are declared, one with and one without prefix caching", "study.json: sut")
    same = bool(ways[True] & ways[False])
    return judged(
        same, "both had the same requests" if same else "their requests differ", "raw/events.log: planned.sha256"
    )


def memory_levels(case: Case) -> Answer:
    levels = _levels(MEMORY_LEVELS)(case)
    return levels if levels.state != "met" else _lasting(case, 120.0, "level")


def long_context_workload(case: Case) -> Answer:
    asked, steps = case.asked.parameters, [step for step, _ in case.measuring()]
    lengths, fewest = asked.lengths or (), min((facts.ok for _, facts in case.measuring()), default=0)
    problems = {
        f"the workload is {case.measuring()[0][1].workload}" if steps else "no length was run":
            any(facts.workload != "long-context" for _, facts in case.measuring()) or not steps,
        f"lengths: {', '.join(map(str, lengths))}": len(lengths) < 2 or list(lengths) != sorted(lengths),
        f"{asked.output_tokens} output tokens, not 256": asked.output_tokens != 256,
        f"{asked.concurrency} in flight, not 1 to 4": not 1 <= (asked.concurrency or 0) <= 4,
        f"{fewest} requests of a length, of 20": fewest < 20,
    }  # fmt: skip
    wrong = [text for text, fails in problems.items() if fails]
    return judged(not wrong, "; ".join(wrong) or "so", STUDY)


def guardrail_configs(case: Case) -> Answer:
    absent = {"baseline", "input", "output", "full"} - {step.step.variant for step, _ in case.steps}
    if absent:
        return judged(False, f"no variant {' and '.join(sorted(absent))}", "study.json: asked.variants")
    return _levels(GUARDRAIL_LEVELS)(case)


def compare_equivalence(case: Case) -> Answer:
    by_seed: dict[int, set[str]] = {}
    for step, facts in case.measuring():
        by_seed.setdefault(step.step.seed, set()).add(str(facts.requests_sha256))
    different = sum(len(hashes) > 1 for hashes in by_seed.values())
    if different or not by_seed:
        return judged(False, f"{different} pairs had different requests", "raw/events.log: planned.sha256", different)
    systems = [case.system.of(name) for name in case.asked.variants or ("",)]
    for name in ("boundary", "accelerator", "accelerator_count"):
        values = {getattr(system, name) for system in systems}
        if None in values or (
            len(values) > 1 and (name == "boundary" or any(not each.price_per_hour for each in systems))
        ):
            return judged(False, f"{name} is not declared of each, or differs", f"study.json: sut.{name}")
    return judged(True, "the same requests, boundary and comparable hardware", "raw/events.log: planned.sha256")


def compare_significance(case: Case) -> Answer:
    pairs = case.asked.parameters.pairs or 0
    return judged(pairs >= 3, f"{pairs} runs of each", STUDY, pairs)


def reported(case: Case) -> Answer:
    return judged(
        case.findings is not None, "written" if case.findings else "a plain run has no such report", "report.html"
    )


CHECKS: dict[str, Callable[[Case], Answer]] = {
    "workload-engine": workload_engine,
    "tokenizer": tokenizer,
    "latency-adjustment": latency_adjustment,
    "guardrail-comparative": guardrail_comparative,
    "ttft-count": ttft_count,
    "throughput-params": throughput_params,
    "throughput-search": throughput_search,
    "throughput-steady": throughput_steady,
    "tradeoff-levels": tradeoff_levels,
    "itl-min-output": itl_min_output,
    "itl-levels": _levels(ITL_LEVELS),
    "itl-excludes-ttft": itl_excludes_ttft,
    "capacity-setup": capacity_setup,
    "capacity-search": capacity_search,
    "fairness-workload": fairness_workload,
    "fairness-load": fairness_load,
    "fairness-baseline": fairness_baseline,
    "cache-two-configs": cache_two_configs,
    "memory-levels": memory_levels,
    "long-context-workload": long_context_workload,
    "guardrail-configs": guardrail_configs,
    "compare-equivalence": compare_equivalence,
    "compare-significance": compare_significance,
    "security-capacity": reported,
    "report-minimum": reported,
    "report-full": reported,
}
