"""A workload from a YAML file; docs/workloads.md describes every field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadgen.workloads.content import CONTENTS
from loadgen.workloads.distributions import MOST_TOKENS, Bounds, Distribution, Fixed, read_distribution
from loadgen.workloads.fields import Fields, WorkloadError
from loadgen.workloads.mix import RequestClass, Sharing

MOST_TURNS = 1000
MOST_PIECES = 10_000
MOST_THINK_S = 86_400.0

_CLASS_FIELDS = (
    "input",
    "output",
    "content",
    "temperature",
    "system_prompt",
    "prefixes",
    "question",
    "turns",
    "think_time_s",
)
_TOKENS = Bounds(least=1)
_TURNS = Bounds(least=1, most=MOST_TURNS)
_THINK = Bounds(least=0, most=MOST_THINK_S, whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomWorkload:
    """What a workload file says."""

    name: str
    classes: tuple[RequestClass, ...]


def read(path: Path) -> CustomWorkload:
    """Read a workload file. Raises WorkloadError naming the file, the field, its value and the cure."""
    import yaml  # noqa: PLC0415  15 ms, and most workloads are in no file

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}; give the path of a YAML file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise WorkloadError(f"{path}{where}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise WorkloadError(f"{path}: must be a mapping with input and output, or with classes")
    try:
        return parse(data, name=path.stem)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from error


def parse(data: dict[str, object], *, name: str) -> CustomWorkload:
    """A workload from a file's content; `name` where the file has none. Raises WorkloadError."""
    fields = Fields(data)
    named = fields.text("name", default=name)
    if "classes" not in data:
        fields.refuse_others(("name", *_CLASS_FIELDS))
        return CustomWorkload(name=named, classes=(_class(fields, fields, named, 1.0),))
    fields.refuse_others(("name", "classes", *_CLASS_FIELDS))
    listed = data["classes"]
    if not isinstance(listed, list) or not listed or not all(isinstance(one, dict) for one in listed):
        raise WorkloadError(f"classes: {listed!r} must be a list of mappings, each a class of requests")
    classes = []
    for at, one in enumerate(listed):
        inner = Fields(one, f"classes[{at}]")
        inner.refuse_others(("name", "weight", *_CLASS_FIELDS))
        weight = inner.number("weight", least=0, most=1e9, default=1.0)
        if not weight > 0:
            raise WorkloadError(f"{inner.place('weight')}: {weight:g} must be greater than 0; or leave the class out")
        classes.append(_class(inner, fields, inner.text("name"), weight))
    names = [one.name for one in classes]
    for at, one_name in enumerate(names):
        if one_name in names[:at]:
            raise WorkloadError(f"classes[{at}].name: {one_name!r} is another class's already; name them apart")
    return CustomWorkload(name=named, classes=tuple(classes))


def _class(fields: Fields, outer: Fields, name: str, weight: float) -> RequestClass:
    """One class; what it leaves out stands at the top of the file, or has a default."""

    def having(key: str) -> Fields:
        return fields if fields.has(key) else outer

    def drawn(key: str, bounds: Bounds, default: float | None = None) -> Distribution:
        if default is not None and not having(key).has(key):
            return Fixed(default)
        # A field that is nowhere is missed in the class, not at the top.
        return read_distribution(having(key) if having(key).has(key) else fields, key, bounds)

    return RequestClass(
        name=name,
        weight=weight,
        input_tokens=drawn("input", _TOKENS),
        output_tokens=drawn("output", _TOKENS),
        content=having("content").one_of("content", CONTENTS, default="random-tokens"),
        temperature=having("temperature").number("temperature", least=0, most=10, default=0.0),
        system=_sharing(having("system_prompt"), "system_prompt"),
        prefixes=_sharing(having("prefixes"), "prefixes"),
        question=having("question").text("question", default=""),
        turns=drawn("turns", _TURNS, 1),
        think_s=drawn("think_time_s", _THINK, 0),
    )


def _sharing(fields: Fields, key: str) -> Sharing | None:
    if not fields.has(key):
        return None
    inner = fields.within(key)
    inner.refuse_others(("count", "tokens", "share", "zipf"))
    return Sharing(
        count=int(inner.number("count", least=1, most=MOST_PIECES, whole=True, default=1)),
        tokens=read_distribution(inner, "tokens", Bounds(least=1, most=MOST_TOKENS)),
        share=inner.number("share", least=0, most=1, default=1.0),
        zipf=inner.number("zipf", least=0, most=100, default=0.0),
    )
