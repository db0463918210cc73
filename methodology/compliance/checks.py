"""The requirements that no rule can state, each a function of the study."""

from __future__ import annotations

from collections.abc import Callable

from sidelight.methodology.compliance.case import Case, CheckResult, judged
from sidelight.methodology.measures.traffic import RANGES

LEAST_OF_CLASS = 500
SHA256 = "summary.json: workload.requests_sha256"


def latency_adjustment(case: Case) -> CheckResult:
    results = case.findings.results if case.findings else {}
    adjusted = next((name for name in results if "adjusted" in name), "")
    is_stated = not adjusted or any("adjusted" in note for note in (case.findings.notes if case.findings else ()))
    reason = f"no note says how {adjusted} was adjusted" if not is_stated else "no latency was adjusted"
    return judged(is_stated, "stated in the notes" if adjusted and is_stated else reason, "result.json: notes")


def itl_excludes_ttft(case: Case) -> CheckResult:
    known = sum(facts.gaps for _, facts in case.steps)
    results = case.findings.results if case.findings else {}
    counted = max((quantity.n or 0 for name, quantity in results.items() if name.startswith("itl_")), default=0)
    text = f"{counted:,} gaps counted, of {known:,} between chunks"
    return judged(counted <= known, text, "result.json: results", counted)


def fairness_workload(case: Case) -> CheckResult:
    mixed = [(step, facts) for step, facts in case.measuring if len(facts.classes) > 1]
    if not mixed:
        return judged(False, "no step had requests of two classes", "requests.parquet: workload_class")
    step, facts = mixed[-1]
    name, count = min(facts.classes.items(), key=lambda each: each[1])
    if count < LEAST_OF_CLASS:
        text = f"{count} requests of class {name}, of {LEAST_OF_CLASS}"
        return judged(False, text, f"{step.run}/requests.parquet: workload_class", count)
    stated = (facts.about.get("workload") or {}).get("classes") or ()
    lengths = [[(each[way].get("min"), each[way].get("max")) for way in ("input_tokens", "output_tokens")]
               for each in stated]  # fmt: skip
    other = [name for name, wanted in RANGES.items() if list(wanted) not in lengths]
    reason = (
        f"no class has the draft's lengths of {' and of '.join(other)} requests" if other else "as the draft has it"
    )
    return judged(not other, reason, f"{step.run}/manifest.json: workload.classes")


def cache_two_configs(case: Case) -> CheckResult:
    if "prefix_caching" in case.system.contradictions:
        return judged(False, case.system.contradictions["prefix_caching"], "result.json: sut.prefix_caching")
    hashes: dict[bool | None, set[str | None]] = {}
    for step, facts in case.measuring:
        hashes.setdefault(case.system.of(step.step.variant).prefix_caching, set()).add(facts.requests_sha256)
    if not {True, False} <= set(hashes):
        reason = "no two variants are declared, one without and one with prefix caching"
        return judged(False, reason, "result.json: sut.variants")
    same = bool((hashes[True] & hashes[False]) - {None})
    return judged(same, "both had the same requests" if same else "their requests differ", SHA256)


def compare_equivalence(case: Case) -> CheckResult:
    hashes: dict[int, set[str | None]] = {}
    for step, facts in case.measuring:
        hashes.setdefault(step.step.seed, set()).add(facts.requests_sha256)
    different = sum(len(each) > 1 or None in each for each in hashes.values())
    if different or not hashes:
        return judged(
            False, f"of {different} of {len(hashes)} pairs, requests differ or are not known", SHA256, different
        )
    systems = [case.system.of(name) for name in case.asked.variants or ("",)]
    is_normalised = all(system.price_per_hour and system.accelerator_count is not None for system in systems)
    for name in ("boundary", "accelerator", "accelerator_count"):
        values = {getattr(system, name) for system in systems}
        if None in values or (len(values) > 1 and (name == "boundary" or not is_normalised)):
            return judged(False, f"`{name}` is not declared of each system, or differs", f"result.json: sut.{name}")
    return judged(True, "the same requests, boundary and comparable hardware", SHA256)


CHECKS: dict[str, Callable[[Case], CheckResult]] = {
    "latency-adjustment": latency_adjustment,
    "itl-excludes-ttft": itl_excludes_ttft,
    "fairness-workload": fairness_workload,
    "cache-two-configs": cache_two_configs,
    "compare-equivalence": compare_equivalence,
}
