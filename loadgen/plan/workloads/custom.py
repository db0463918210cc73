"""A workload from a YAML file; docs/workloads.md describes every field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loadgen.plan.workloads.content import CONTENTS
from loadgen.plan.workloads.fields import (
    Bounds,
    WorkloadError,
    convert,
    nearest,
    place,
    read_distribution,
    refuse_others,
)
from loadgen.plan.workloads.mix import RequestClass, Sharing

_TOKENS = Bounds(least=1)
_TURNS = Bounds(least=1, most=1000)
_THINK = Bounds(least=0, most=86_400, whole=False)
_Text = Annotated[str, Meta(pattern=r"\S")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomWorkload:
    """What a workload file says."""

    name: str
    classes: tuple[RequestClass, ...]


class _File(msgspec.Struct, frozen=True):
    name: _Text | None = None
    classes: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None


class _Class(msgspec.Struct, frozen=True, kw_only=True):
    name: _Text
    weight: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    input: Any
    output: Any
    content: str = "random-tokens"
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0
    system_prompt: Any = None
    prefixes: Any = None
    question: _Text = ""
    turns: Any = 1
    think_time_s: Any = 0


class _Sharing(msgspec.Struct, frozen=True, kw_only=True):
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    tokens: Any
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    zipf: Annotated[float, Meta(ge=0, le=100)] = 0.0


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


def parse(data: dict[str, Any], *, name: str) -> CustomWorkload:
    """A workload from a file's content; `name` where the file has none. Raises WorkloadError."""
    file = convert({key: data[key] for key in ("name", "classes") if key in data}, _File, "")
    above = {key: value for key, value in data.items() if key not in ("name", "classes")}
    named = file.name or name
    if file.classes is None:
        return CustomWorkload(name=named, classes=(_class({**above, "name": named}, ""),))
    refuse_others(above, _Class, "")
    # What a class leaves out stands at the top of the file, or has a default.
    given = [above | {key: value for key, value in one.items() if value is not None} for one in file.classes]
    classes = tuple(_class(one, f"classes[{at}]") for at, one in enumerate(given))
    for at, one in enumerate(classes):
        if any(one.name == other.name for other in classes[:at]):
            raise WorkloadError(f"classes[{at}].name: {one.name!r} is another class's already; name them apart")
    return CustomWorkload(name=named, classes=classes)


def _class(given: dict[str, Any], where: str) -> RequestClass:
    said = convert(given, _Class, where)
    if said.content not in CONTENTS:
        hint = f"{nearest(said.content, CONTENTS)}; known: {', '.join(CONTENTS)}"
        raise WorkloadError(f"{place(where, 'content')}: {said.content!r} is not known{hint}")
    return RequestClass(
        name=said.name,
        weight=said.weight,
        input_tokens=read_distribution(said.input, place(where, "input"), _TOKENS),
        output_tokens=read_distribution(said.output, place(where, "output"), _TOKENS),
        content=said.content,
        temperature=said.temperature,
        system=_sharing(said.system_prompt, place(where, "system_prompt")),
        prefixes=_sharing(said.prefixes, place(where, "prefixes")),
        question=said.question,
        turns=read_distribution(said.turns, place(where, "turns"), _TURNS),
        think_s=read_distribution(said.think_time_s, place(where, "think_time_s"), _THINK),
    )


def _sharing(given: object, where: str) -> Sharing | None:
    if given is None:
        return None
    said = convert(given, _Sharing, where)
    tokens = read_distribution(said.tokens, place(where, "tokens"), _TOKENS)
    return Sharing(count=said.count, tokens=tokens, share=said.share, zipf=said.zipf)
