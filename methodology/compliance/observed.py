"""Observed properties of a system, beside the declared ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from sidelight.methodology.compliance.facts import StepFacts
from sidelight.methodology.study.model import Finished
from sidelight.methodology.study.outcome import MOST_FOREIGN
from sidelight.recorded.system import System
from sidelight.rundir.printable.numbers import agree, count_of
from sidelight.scraper.engines.catalogue import catalogue

# How the names of quantized models say so; from a name without any of these nothing follows.
_QUANTIZED = re.compile(
    r"(?<![a-z0-9])(awq|gptq|fp8|fp4|nvfp4|mxfp4|int8|int4|w[48]a(?:4|8|16)|gguf|q[2-8]_[0-9a-z_]+|[48]-?bit)(?![a-z0-9])"
)
_WHOLE = ("none", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32")


Known = Sequence[tuple[Finished, StepFacts]]


def observed(system: System, steps: Known, finished: Sequence[Finished] = (), void: Known = ()) -> System:
    """Return a system with undeclared values filled in from its steps, and with contradictions.

    Contradictions are between the steps and the declaration. Values that differ between variants are not filled: they
    are to be declared of each. `finished` are all steps, void ones too: a step may be void for what contradicts the
    declaration. `void` ones tell where none counts, and are named.
    """
    shown: dict[str, dict[str, Any]] = {}
    for _, facts in (*steps, *void):
        for name, value, source in _shown(facts):
            shown.setdefault(name, {})[f"{source}, in a void step" if void else source] = value
    seen = {
        name: next(iter(values))
        for name, values in shown.items()
        if getattr(system, name) is None and len(set(values.values())) == 1
    }
    filled = replace(system, **{name: shown[name][source] for name, source in seen.items()}, seen=system.seen | seen)
    contradicting = [
        *(each for step in finished for each in _by_outcome(system.of(step.step.variant), step)),
        *(each for step, facts in steps for each in _by_facts(system.of(step.step.variant), step, facts)),
    ]
    return replace(filled, contradictions=dict(reversed(contradicting)))


def _shown(facts: StepFacts) -> Iterator[tuple[str, Any, str]]:
    """Yield the values that a step shows: name, value, and where it is from."""
    target = facts.about.get("target") or {}
    if model := target.get("model"):
        yield "model", str(model), "the server's list of models"
    if facts.engine:
        yield "engine", facts.engine, "the engine's page"
    if version := facts.engine_version or target.get("version"):
        yield "engine_version", str(version), "the engine's page" if facts.engine_version else "the server"
    if (caching := _caching(facts)) is not None:
        yield "prefix_caching", *caching
    if gpus := facts.about.get("gpus"):
        yield "accelerator", " and ".join(dict.fromkeys(map(str, gpus))), "NVML or DCGM"
        yield "accelerator_count", len(gpus), "NVML or DCGM"
    round_trips = facts.about.get("network_rtt_ms") or ()
    if round_trips and all(each.get("own_address") or _is_loopback(each) for each in round_trips):
        yield "same_machine", True, "the server's address is this machine's"


def _is_loopback(round_trip: dict[str, Any]) -> bool:
    host = str(round_trip.get("host"))
    return host in ("localhost", "::1") or host.startswith("127.")


def _caching(facts: StepFacts) -> tuple[bool, str] | None:
    """Return the state of prefix caching and its evidence; None without any."""
    if facts.hits:
        return True, f"prefix cache hits on its page, which rose by {facts.hits:,.0f} tokens"
    if facts.cached_ratio:
        return True, f"its replies, by which {100 * facts.cached_ratio:.1f} % of the prompt tokens were cached"
    stated = facts.cache_config.get("enable_prefix_caching", "").lower()
    return (stated == "true", "enable_prefix_caching on its page") if stated in ("true", "false") else None


def _by_facts(system: System, finished: Finished, facts: StepFacts) -> Iterator[tuple[str, str]]:
    """Yield contradictions between a step's facts and the declaration: the field, and a sentence."""
    where = _where(finished)
    caching = _caching(facts)
    if caching and system.prefix_caching is not None and system.prefix_caching != caching[0]:
        stated, shown = ("on", "off") if system.prefix_caching else ("off", "on")
        yield "prefix_caching", f"prefix caching is declared {stated}, but is {shown} {where} by {caching[1]}"
    target = facts.about.get("target") or {}
    served = str(target.get("model") or "")
    listed = system.served_as or system.model
    if listed and served and _short(listed) != _short(served):
        cure = "" if system.served_as else "; declare `served_as` where these are one"
        yield "model", f"the model is declared as {listed}, but {where} {served} is served{cure}"
    marks = _QUANTIZED.findall(served.lower())
    if system.quantization and marks and _is_other(system.quantization.lower(), marks):
        yield "quantization", f"quantization is declared as {system.quantization}, but {where} {served} is served"
    if system.engine and facts.engine and not _is_alike(system.engine, facts.engine):
        yield "engine", f"the engine is declared as {system.engine}, but {where} the page is that of {facts.engine}"
    version = str(facts.engine_version or target.get("version") or "").lstrip("v")
    if system.engine_version and version and not version.startswith(system.engine_version.lstrip("v")):
        yield "engine_version", f"version {system.engine_version} is declared, but {version} serves {where}"
    if facts.refused and system.input_filtering is False and system.output_filtering is False:
        refused = f"{count_of(facts.refused, 'request')} {agree(facts.refused, 'was', 'were')} refused"
        yield (
            "output_filtering",
            f"filters are declared off, but {where} {refused}",
        )


def _by_outcome(system: System, finished: Finished) -> Iterator[tuple[str, str]]:
    """Yield contradictions between a step's outcome and the declaration, in the same form."""
    foreign, running = finished.outcome.foreign_ratio or 0.0, finished.outcome.running_max or 0.0
    if system.isolated and foreign > MOST_FOREIGN:
        share = f"{100 * foreign:.0f} % of its requests"
        yield "isolated", f"the system is declared isolated, but {share} were not ours {_where(finished)}"
    if system.largest_batch and running > system.largest_batch:
        batch = f"the largest batch is declared as {system.largest_batch}"
        yield "largest_batch", f"{batch}, but {running:.0f} requests ran at once {_where(finished)}"


def _where(finished: Finished) -> str:
    return f"in {finished.run}" if finished.run else "in this run"


def _is_alike(declared: str, engine: str) -> bool:
    """Return whether the declared name of an engine is known, whole or in part."""
    name, *known = (re.sub(r"[^a-z]", "", text.lower()) for text in (declared, engine, catalogue(engine).title))
    return any(each in name or name in each for each in known)


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _is_other(declared: str, marks: list[str]) -> bool:
    plain = re.sub(r"[^a-z0-9]", "", declared)
    return declared in _WHOLE or not any(re.sub(r"[^a-z0-9]", "", mark) in plain for mark in marks)
