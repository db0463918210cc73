"""The system under test: its declaration, its own statements, and contradictions between the two.

A declaration is a mapping, `sut:` of a configuration file or a file of its own. What is not declared is taken from what
the server tells where it does, and is missing else: nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from sidelight.loadgen.plan.workloads.fields import WorkloadError, convert, nearest, read_text, read_yaml
from sidelight.rundir.fields import doc

Boundary = Literal["model engine", "application gateway", "compound system"]
Text = Annotated[str, Meta(pattern=r"^\S([^\x00-\x1f\x7f]*\S)?$", max_length=200)]
Amount = Annotated[float, Meta(ge=0, le=1e9)]
Number = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Declaration(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Declarable properties of a system; null: not declared."""

    boundary: Annotated[
        Boundary | None, doc("What is measured: model engine, application gateway or compound system.")
    ] = None
    model: Annotated[Text | None, doc("Name of the model.")] = None
    served_as: Annotated[Text | None, doc("Name by which the server lists it, where that is another.")] = None
    model_version: Annotated[Text | None, doc("Its version: a revision, a date or a commit.")] = None
    quantization: Annotated[
        Text | None, doc("Its quantization, as in fp8 or awq-int4; none of a model that is not quantized.")
    ] = None
    vocabulary: Annotated[
        Positive | None, doc("Size of its vocabulary, where lengths are in the server's tokens.", "tokens")
    ] = None
    engine: Annotated[Text | None, doc("The inference engine.")] = None
    engine_version: Annotated[Text | None, doc("Its version.")] = None
    accelerator: Annotated[
        Text | None,
        doc("Type of its accelerators, as in NVIDIA H100 SXM; none of a system on CPUs, which has 0 of them."),
    ] = None
    accelerator_count: Annotated[Number | None, doc("Their number.", "accelerators")] = None
    accelerator_memory_gb: Annotated[Amount | None, doc("Memory of each.", "GB")] = None
    prefix_caching: Annotated[bool | None, doc("Whether the engine caches prefixes: true or false.")] = None
    input_filtering: Annotated[bool | None, doc("Whether inputs pass a content filter: true or false.")] = None
    output_filtering: Annotated[bool | None, doc("Whether outputs pass a content filter: true or false.")] = None
    guardrails: Annotated[tuple[Text, ...] | None, doc("Names of the safety systems; [] where there are none.")] = None
    guardrails_default: Annotated[
        bool | None, doc("Whether safety systems have their default configuration: true or false.")
    ] = None
    price_per_hour: Annotated[Amount | None, doc("Price of the whole system.", "US dollars/h")] = None
    largest_batch: Annotated[Positive | None, doc("Most requests that the engine runs at once.", "requests")] = None
    isolated: Annotated[bool | None, doc("Whether it serves nobody else meanwhile: true or false.")] = None
    recovery: Annotated[Text | None, doc("How it is brought back after a failure.")] = None
    same_machine: Annotated[bool | None, doc("Whether the load generator runs on its machine: true or false.")] = None
    clock_method: Annotated[
        Text | None, doc("What synchronises the clock of its machine, as in PTP or NTP from time.example.")
    ] = None
    clock_error_ms: Annotated[Amount | None, doc("By how much that clock may be off.", "ms")] = None
    production: Annotated[bool | None, doc("Whether it is configured as in production: true or false.")] = None


FIELDS = Declaration.__struct_fields__


class System(Declaration, frozen=True, kw_only=True, omit_defaults=True):
    """A system as declared and as seen."""

    variants: Annotated[dict[str, Declaration], doc("What differs in the variants of --variant, by their names.")] = {}
    seen: Annotated[dict[str, str], doc("Where the values that were not declared were seen, by name.")] = {}
    contradictions: Annotated[dict[str, str], doc("What the server shows that was declared otherwise, by name.")] = {}

    def of(self, variant: str) -> System:
        """Return the system as a variant has it."""
        other = self.variants.get(variant, Declaration())
        changed = {name: value for name in FIELDS if (value := getattr(other, name)) is not None}
        seen = {name: source for name, source in self.seen.items() if name not in changed}
        return replace(self, **{**changed, "seen": seen, "variants": {}})


def read_system(given: Path | str | Mapping[str, Any] | None) -> System:
    """Return the declaration in a mapping, JSON text or YAML file; None declares nothing.

    A file may also be a configuration whose `sut` is the declaration.

    Raises WorkloadError (a ValueError) naming the file, the field, its value and the cure.
    """
    if given is None or isinstance(given, Mapping):
        return _system(given or {}, "")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return _system(read_text(given), "")
    content = read_yaml(Path(given))
    return _system(content["sut"] if isinstance(content, dict) and "sut" in content else content, f"{given}: ")


def as_text(system: System) -> str:
    """Return a declaration as a text that `read_system` reads: what is recorded of it."""
    stated = {name: value for name in (*FIELDS, "variants") if (value := getattr(system, name)) not in (None, {})}
    return msgspec.json.encode(stated).decode()


def _system(given: object, where: str) -> System:
    """Return the declaration in a mapping; `where` begins an error, with a colon behind it."""
    fields = _named(given, where)
    variants = _named(fields.pop("variants", None) or {}, f"{where}variants: ")
    different = {name: _declaration(each, f"{where}variants.{name}: ") for name, each in variants.items()}
    return System(**msgspec.structs.asdict(_declaration(fields, where)), variants=different)


def _named(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        example = "must be a mapping of fields to values, e.g. boundary: model engine"
        raise WorkloadError("file.not-a-mapping", f"{where}{given!r}: {example}")
    # YAML 1.1 reads bare on and off as true and false.
    return {{"true": "on", "false": "off"}.get(str(key).lower(), str(key)): value for key, value in given.items()}


def _declaration(given: object, where: str) -> Declaration:
    fields = {name.replace("-", "_"): value for name, value in _named(given, where).items()}
    if fields.get("accelerator") == "none":
        fields = {"accelerator_count": 0, "accelerator_memory_gb": 0} | fields
    try:
        return convert(fields, Declaration, "")
    except WorkloadError as error:
        name = str(error).partition(":")[0].partition("[")[0]
        choice = nearest(fields.get(name), get_args(Boundary)) if name == "boundary" else ""
        choice = "; write it in quotes" if "expected `str" in str(error) else choice
        meaning = f"; {MEANINGS[name]}" if name in MEANINGS else ""
        raise WorkloadError(error.code, f"{where}{error}{choice}{meaning}") from error


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a declaration, with descriptions and, for numbers, units."""
    generated = msgspec.json.schema(System)
    definitions = generated.pop("$defs")
    system = definitions.pop("System")
    for name in ("seen", "contradictions"):
        del system["properties"][name]
    for described in (system, definitions["Declaration"]):
        described["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **system,
            "title": "Declaration of a system under test", "$defs": definitions}  # fmt: skip


MEANINGS = {
    name: described["description"] for name, described in schema()["$defs"]["Declaration"]["properties"].items()
}
