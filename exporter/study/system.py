"""The system under test in words: for the draft's fields, and as a table that says from where each fact is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from exporter.study.tables import number
from methodology.study.result import Reproduction

NOT_DECLARED = "not declared"
# What is known without a declaration is what the steps' runs say.
_FACTS = """
boundary model model_version quantization engine engine_version accelerator accelerator_count accelerator_memory_gb
prefix_caching input_filtering output_filtering guardrails guardrails_default price_per_hour largest_batch isolated
same_machine
"""


def system_in_words(system: Mapping[str, Any], origin: Reproduction) -> dict[str, str]:
    """Return the fields of the minimum report by name: model, hardware, software, boundary, guardrails, caching."""
    model = [system.get("model") or origin.model, *(system.get(name) for name in ("model_version", "quantization"))]
    engine = [system.get("engine") or origin.versions.get("engine"), system.get("engine_version")]
    filters = [f"{name} filtering {_in_words(system.get(f'{name}_filtering'))}" for name in ("input", "output")]
    names = system.get("guardrails")
    if names:
        filters.append(", ".join(names))
    return {
        "model": " ".join(filter(None, model)) or NOT_DECLARED,
        "hardware": _hardware(system.get("accelerator"), system.get("accelerator_count")),
        "software": " ".join(filter(None, engine)) or NOT_DECLARED,
        "boundary": system.get("boundary") or NOT_DECLARED,
        "guardrails": "none" if names == [] else "; ".join(filters),
        "prefix_caching": _in_words(system.get("prefix_caching")),
    }


def _hardware(accelerator: str | None, count: int | None) -> str:
    if accelerator == "none":
        return "no accelerator"
    if accelerator is None:
        return NOT_DECLARED
    return f"{accelerator} x {count or '(count not declared)'}"


def system_rows(system: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each fact: its name, its value, and whether it was declared or what showed it; "" where it is missing."""
    seen = system.get("seen", {})
    for name in dict.fromkeys(
        (*_FACTS.split(), *(key for key in system if key not in ("seen", "contradictions", "variants")))
    ):
        value = system.get(name)
        source = "" if value is None else f"seen: {seen[name]}" if name in seen else "declared"
        yield name.replace("_", " "), _in_words(value), source


def _in_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return NOT_DECLARED if value is None else number(value)
