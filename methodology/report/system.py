"""The system under test in words: for the draft's fields, and as a table that says from where each fact is known."""

from __future__ import annotations

from collections.abc import Iterator

from sidelight.methodology.report.tables import number
from sidelight.methodology.study.findings import Cell
from sidelight.methodology.study.result import Reproduction
from sidelight.recorded.system import FIELDS, System

NOT_DECLARED = "not declared"


def system_in_words(system: System, origin: Reproduction) -> dict[str, str]:
    """Return the fields of the minimum report by name: model, hardware, software, boundary, guardrails, caching."""
    quantization = "not quantized" if system.quantization == "none" else system.quantization
    model = (system.model or origin.model, system.model_version, quantization and f"({quantization})")
    engine = (system.engine, system.engine_version or origin.versions.get("engine"))
    guards = [f"input filtering: {_in_words(system.input_filtering)}"]
    guards += [f"output filtering: {_in_words(system.output_filtering)}"]
    guards += [f"safety systems: {_in_words(system.guardrails)}"] if system.guardrails is not None else []
    return {
        "model": " ".join(filter(None, model)) or NOT_DECLARED,
        "hardware": _hardware(system),
        "software": " ".join(filter(None, engine)) or NOT_DECLARED,
        "boundary": system.boundary or NOT_DECLARED,
        "guardrails": ", ".join(guards),
        "prefix_caching": _in_words(system.prefix_caching),
    }


def _hardware(system: System) -> str:
    if system.accelerator is None:
        return NOT_DECLARED
    if system.accelerator == "none":
        return "no accelerator"
    if system.accelerator_count is None:
        return f"{system.accelerator}, count not declared"
    return f"{system.accelerator} x {system.accelerator_count}"


def system_rows(system: System) -> Iterator[tuple[str, str, str]]:
    """Yield each fact: its name, its value, and whether it was declared or what showed it; "" where it is missing."""
    for name in FIELDS:
        value = getattr(system, name)
        source = "" if value is None else f"seen: {system.seen[name]}" if name in system.seen else "declared"
        yield name.replace("_", " "), _in_words(value), source


def _in_words(value: Cell | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return NOT_DECLARED if value is None else number(value)
