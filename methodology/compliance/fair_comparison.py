"""The draft's fair comparison checklist: each line checked from what the runs recorded, declared, or not met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sidelight.methodology.study.findings import ResultTable, table
from sidelight.methodology.study.model import Finished, StudySettings

Facts = Mapping[str, Any]

CHECKED, DECLARED, NOT_MET, NOT_JUDGED = "checked", "declared", "not met", "not judged"
_LOAD = ("rate", "concurrency", "arrival", "burstiness")
# Settings that say nothing about what was measured.
_OURS = {"out", "formats", "quiet", "json", "verbose", "listen", "linger", "url", "seed", "tag", "config", "warmup"}


def checklist(asked: StudySettings, runs: Sequence[Finished], facts: Sequence[Facts]) -> ResultTable:
    """Return the checklist of a comparison from its runs [n] and their recorded `facts` [n]."""
    titles = {"line": "Line", "state": "State", "evidence": "Evidence"}
    lines = _lines(asked, runs, facts) if runs else _unjudged(asked)
    return table("fair-comparison-checklist", "Fair Comparison Checklist", titles, lines)


def _unjudged(asked: StudySettings) -> Iterator[tuple[str, str, str]]:
    """Yield the checklist where no run counts: what is declared stands, nothing else can be said."""
    for line, state, evidence in _lines(asked, (), ()):
        yield (line, state, evidence) if state == DECLARED else (line, NOT_JUDGED, "no run counts")


def refusals(runs: Sequence[Finished], facts: Sequence[Facts]) -> list[str]:
    """Return reasons against comparing runs that were not made for each other; empty where they may be compared."""
    reasons = []
    hashes: dict[str, set[str]] = {}
    for each, fact in zip(runs, facts, strict=True):
        hashes.setdefault(each.step.variant, set()).add(_hash(fact))
    if {"None"} in hashes.values():
        reasons.append("whether they sent the same requests is not known")
    elif len(set(map(frozenset, hashes.values()))) > 1:
        reasons.append("they did not send the same requests (the SHA-256 of their requests differ)")
    for name, words in (("duration", "durations"), ("endpoint", "endpoints, that is boundaries")):
        values = {str(_config(each).get(name)) for each in facts}
        if len(values) > 1:
            reasons.append(f"their {words} differ ({', '.join(sorted(values))})")
    return reasons


def _lines(asked: StudySettings, runs: Sequence[Finished], facts: Sequence[Facts]) -> Iterator[tuple[str, str, str]]:
    same, evidence = _same_requests(runs, facts)
    line = "Same workload: the same requests, in the same order, by the same seeds"
    yield line, CHECKED if same else NOT_MET, evidence
    load = _equal(facts, lambda each: {name: _config(each).get(name) for name in _LOAD})
    yield "Same load model and parameters", *load
    yield "Same test duration (s)", *_equal(facts, lambda each: _config(each).get("duration"))
    yield "Same warm-up procedure", *_equal(_warmed(facts), lambda each: (each.get("warmup") or {}).get("policy"))
    yield "Same success criteria", *_equal(facts, lambda each: _config(each).get("slo"))
    order = _in_whole_pairs(asked, runs)
    interleaved = all(
        set(order[at : at + len(asked.variants)]) == set(asked.variants)
        for at in range(0, len(order), max(1, len(asked.variants)))
    )
    state = CHECKED if interleaved and order else NOT_MET
    yield "Tested at the same time: configurations in turn", state, ", ".join(order)
    for line, name in (
        ("Equivalent SUT boundary", "boundary"),
        ("Comparable hardware, or normalised", "accelerator"),
        ("Production-representative configuration", "production"),
    ):
        declared = asked.system.get(name)
        value = "yes" if declared is True else str(declared or f"not declared: sut.{name}")
        yield line, DECLARED if declared else NOT_MET, value
    differences = "; ".join(_differences(runs, facts))
    yield "Differences in configuration noted", CHECKED, differences or "no difference in what Sidelight recorded"


def _in_whole_pairs(asked: StudySettings, runs: Sequence[Finished]) -> list[str]:
    """Return the configurations of whole pairs, in order. A pair may lack one, as void runs leave it."""
    seeds = {(each.step.seed, each.step.variant) for each in runs}
    whole = {seed for seed, _ in seeds if all((seed, name) in seeds for name in asked.variants)}
    return [each.step.variant for each in runs if each.step.seed in whole]


def _same_requests(runs: Sequence[Finished], facts: Sequence[Facts]) -> tuple[bool, str]:
    """Return whether runs of equal seeds sent equal requests, and the evidence."""
    hashes: dict[int, set[str]] = {}
    for each, fact in zip(runs, facts, strict=True):
        hashes.setdefault(each.step.seed, set()).add(_hash(fact))
    if any("None" in group for group in hashes.values()):
        return False, "hashes of requests are not known"
    paired = hashes and all(len(group) == 1 for group in hashes.values())
    shown = ", ".join(sorted(digest[:12] for group in hashes.values() for digest in group))
    return bool(paired), f"SHA-256 by pair: {shown}"


def _hash(facts: Facts) -> str:
    return str((facts.get("planned") or {}).get("sha256"))


def _equal(facts: Sequence[Facts], value: Callable[[Facts], object]) -> tuple[str, str]:
    values = {_in_words(value(each)) for each in facts}
    return (CHECKED if len(values) == 1 else NOT_MET), "; ".join(sorted(values))


def _in_words(value: object) -> str:
    """Return a setting, or several by name without those that are not set."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items() if each not in (None, False))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none stated" if value is None else str(value)


def _warmed(facts: Sequence[Facts]) -> Sequence[Facts]:
    """Return the facts of runs with a warm-up of their own: later ones find the system warm by it."""
    return [each for each in facts if (each.get("warmup") or {}).get("policy") != "earlier"] or facts


def _differences(runs: Sequence[Finished], facts: Sequence[Facts]) -> Iterator[str]:
    """Yield every setting and version that differs between configurations."""
    by_variant = {each.step.variant: fact for each, fact in zip(runs, facts, strict=True)}
    described = {variant: _settings(fact) for variant, fact in by_variant.items()}
    for name in sorted({name for settings in described.values() for name in settings}):
        values = {variant: str(settings.get(name, "-")) for variant, settings in described.items()}
        if len(set(values.values())) > 1:
            yield f"{name}: {', '.join(f'{variant} {value}' for variant, value in values.items())}"


def _settings(facts: Facts) -> dict[str, object]:
    target = facts.get("target") or {}
    named = {name: value for name, value in _config(facts).items() if name not in _OURS}
    return {**named, "model": target.get("model"), "engine version": target.get("version"), "url": target.get("url")}


def _config(facts: Facts) -> Mapping[str, Any]:
    return facts.get("config") or {}
