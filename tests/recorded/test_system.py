"""The declaration of the system under test: how it is read, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from sidelight.loadgen.plan.workloads.fields import WorkloadError
from sidelight.recorded.system import FIELDS, as_text, read_system, schema

DECLARED = {"boundary": "model engine", "accelerator-count": 2, "guardrails": [], "variants": {"off": {"model": "m"}}}


def test_a_file_and_a_mapping_and_a_text_declare_the_same(tmp_path: Path):
    """Names may have - or _; a configuration file's `sut` is a declaration too; what is recorded reads back."""
    path = tmp_path / "sut.yaml"
    path.write_text("boundary: model engine\naccelerator_count: 2\nguardrails: []\nvariants:\n  off: {model: m}\n")
    config = tmp_path / "config.yaml"
    config.write_text("rate: 3\nsut:\n  boundary: model engine\n  accelerator-count: 2\n  guardrails: []\n"
                      "  variants: {off: {model: m}}\n")  # fmt: skip
    system = read_system(DECLARED)
    assert system == read_system(path) == read_system(str(config)) == read_system(as_text(system))
    assert (2, ()) == (system.accelerator_count, system.guardrails)
    assert ("m", 2) == (system.of("off").model, system.of("off").accelerator_count)
    assert system.of("unknown").boundary == "model engine"


def test_a_system_without_accelerators_has_none_of_them():
    """Their number and memory need not be declared."""
    assert (0, 0) == ((system := read_system({"accelerator": "none"})).accelerator_count, system.accelerator_memory_gb)
    assert read_system({"accelerator": "H100"}).accelerator_count is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"boundry": 1}, "boundry: unknown field (did you mean 'boundary'?)"),
        ({"boundary": "gateway"}, "model engine, application gateway or compound system"),
        ({"accelerator_count": "two"}, "accelerator_count: 'two': expected `int | null`, got `str`"),
        ({"price_per_hour": -1}, "price_per_hour: -1"),
        ({"prefix_caching": "off"}, "true or false"),
        ({"guardrails": "Llama Guard"}, "[] where there are none"),
        ({"model": " "}, "model"),
        ({"model": "a\nb"}, "model: 'a\\nb'"),
        ({"price_per_hour": float("inf")}, "price_per_hour: inf"),
        ({"price_per_hour": float("nan")}, "price_per_hour: nan"),
        ({"engine_version": 0.10}, "engine_version: 0.1: expected `str | null`, got `float`; write it in quotes"),
        ({"variants": {"on": {"prefix_cachin": True}}}, "variants.on: prefix_cachin: unknown field"),
        ({"variants": 3}, "variants: 3: must be a mapping"),
        ("missing.yaml", "missing.yaml: No such file or directory; give the path of a YAML file"),
        ("{boundary: [", "not YAML"),
    ],
)
def test_a_wrong_declaration_names_the_field_the_value_and_the_cure(given: object, words: str):
    """One line each."""
    with pytest.raises(WorkloadError) as raised:
        read_system(given)  # type: ignore[arg-type]
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("names", ["{true: {model: m}, false: {model: n}}", "{on: {model: m}, off: {model: n}}"])
def test_variants_may_be_called_on_and_off(tmp_path: Path, names: str):
    """Although YAML reads these as true and false."""
    path = tmp_path / "sut.yaml"
    path.write_text(f"variants: {names}\n")
    system = read_system(path)
    assert ("m", "n") == (system.of("on").model, system.of("off").model)


def test_the_schema_describes_every_field():
    """What can be declared, also of a variant; what is only seen cannot."""
    described = schema()
    assert {*FIELDS, "variants"} == set(described["properties"])
    assert all(described["properties"][name]["description"] for name in FIELDS)
    jsonschema.validate({name.replace("-", "_"): value for name, value in DECLARED.items()}, described)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"seen": {}}, described)


def test_the_example_declares_everything():
    """examples/sut.yaml, which stands in docs/reference/compliance.md."""
    system = read_system(Path(__file__).parents[2] / "examples/sut.yaml")
    assert None not in {getattr(system, name) for name in FIELDS}
    assert system.of("cache-off").prefix_caching is False
