"""A workload from a YAML file; docs/reference/workloads.md describes every field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sidelight.loadgen.plan.workloads.content import CONTENTS
from sidelight.loadgen.plan.workloads.distributions import (
    MOST_TOKENS,
    BinnedDistribution,
    Choice,
    Distribution,
    Fixed,
    LogNormal,
    Normal,
    Percentiles,
    Uniform,
)
from sidelight.loadgen.plan.workloads.fields import (
    WorkloadError,
    convert,
    nearest,
    place,
    read_text,
    read_yaml,
    refuse_others,
)
from sidelight.loadgen.plan.workloads.mix import RequestClass, Sharing

# As a file names them.
KINDS: dict[str, type[Distribution]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "normal": Normal,
    "log-normal": LogNormal,
    "percentiles": Percentiles,
    "choice": Choice,
    "histogram": BinnedDistribution,
}
_EXAMPLES = {
    "uniform": "e.g. {min: 64, max: 256}",
    "normal": "e.g. {mean: 100, std: 20}",
    "log-normal": "e.g. {mu: 5.5, sigma: 1.0, min: 32, max: 4096}",
    "percentiles": "e.g. {50: 156, 95: 892, 99: 2134}",
    "choice": "e.g. {values: [8192, 16384], weights: [1, 1]}",
    "histogram": "e.g. {edges: [1, 100, 500], counts: [30, 70]}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on the values of a distribution, and whether they must be whole numbers."""

    least: float = 0
    most: float = MOST_TOKENS
    whole: bool = True

    def check(self, place: str, value: object, *, whole: bool | None = None) -> None:
        """Raise WorkloadError if the value is not a number or is out of bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**63) < value < 2**63:
            raise WorkloadError("workload.not-a-number", f"{place}: {value!r} must be a number")
        if (self.whole if whole is None else whole) and int(value) != value:
            raise WorkloadError("workload.not-a-number", f"{place}: {value:g} must be a whole number")
        if value < self.least:
            raise WorkloadError("workload.out-of-range", f"{place}: {value:g} must be at least {self.least:g}")
        if value > self.most:
            raise WorkloadError("workload.out-of-range", f"{place}: {value:g} must be at most {self.most:g}")


_TOKENS = Bounds(least=1)
_TURNS = Bounds(least=1, most=1000)
_LEAST_INSIDE = 0.001  # of a distribution, to draw from within bounds
_THINK = Bounds(least=0, most=86_400, whole=False)
_Text = Annotated[str, Meta(pattern=r"\S")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomWorkload:
    """The contents of a workload file."""

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
    model: str = ""
    body: dict[str, Any] = msgspec.field(default_factory=dict)


class _Sharing(msgspec.Struct, frozen=True, kw_only=True):
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    tokens: Any
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    zipf: Annotated[float, Meta(ge=0, le=100)] = 0.0


# The parameters of a distribution in an option, in the order in which they are written.
_WRITTEN = {"normal": ("mean", "std"), "log-normal": ("mu", "sigma")}
_SHORT = (
    "write a number of tokens, or a distribution: uniform:128-1024, normal:512,64, log-normal:5.5,1, "
    "percentiles:50=156,95=892, choice:512,2048 or histogram:1-100=30,100-500=70"
)


def read(path: Path) -> CustomWorkload:
    """Read a workload file. Raises WorkloadError naming the file, the field, its value and the cure."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise WorkloadError("file.not-a-mapping", f"{path}: must be a mapping with input and output, or with classes")
    try:
        return parse(data, name=path.stem)
    except WorkloadError as error:
        raise WorkloadError(error.code, f"{path}: {error}") from error


def read_inline(text: str) -> CustomWorkload:
    """Read a workload from the text of a workload file.

    Raises WorkloadError naming the field, its value and the cure.
    """
    data = read_text(text)
    if not isinstance(data, dict):
        raise WorkloadError("file.not-a-mapping", "must be a mapping with input and output, or with classes")
    return parse(data, name="inline")


def parse(data: dict[str, Any], *, name: str) -> CustomWorkload:
    """Return a workload from a file's content; `name` where the file has none. Raises WorkloadError."""
    file = convert({key: data[key] for key in ("name", "classes") if key in data}, _File, "")
    above = {key: value for key, value in data.items() if key not in ("name", "classes")}
    named = file.name or name
    if file.classes is None:
        return CustomWorkload(name=named, classes=(_class({**above, "name": named}, ""),))
    refuse_others(above, _Class, "")
    # What a class leaves out stands at the top of the file, or has a default.
    given = [above | {key: value for key, value in fields.items() if value is not None} for fields in file.classes]
    classes = tuple(_class(fields, f"classes[{at}]") for at, fields in enumerate(given))
    for at, traffic_class in enumerate(classes):
        if any(traffic_class.name == other.name for other in classes[:at]):
            raise WorkloadError(
                "workload.duplicate",
                f"classes[{at}].name: {traffic_class.name!r} is another class's already; name them apart",
            )
    return CustomWorkload(name=named, classes=classes)


def _class(given: dict[str, Any], where: str) -> RequestClass:
    said = convert(given, _Class, where)
    if said.content not in CONTENTS:
        hint = f"{nearest(said.content, [*CONTENTS])}; known: {', '.join(CONTENTS)}"
        raise WorkloadError("workload.content", f"{place(where, 'content')}: {said.content!r} is not known{hint}")
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
        model=said.model,
        body=said.body,
    )


def _sharing(given: object, where: str) -> Sharing | None:
    if given is None:
        return None
    said = convert(given, _Sharing, where)
    tokens = read_distribution(said.tokens, place(where, "tokens"), _TOKENS)
    return Sharing(count=said.count, tokens=tokens, share=said.share, zipf=said.zipf)


def read_distribution(value: object, where: str, bounds: Bounds) -> Distribution:
    """Read a distribution: a number (fixed), or a mapping of one kind to its parameters.

    `where` is its place in the file.

    Raises WorkloadError naming the field, its value and the cure.
    """
    if isinstance(value, int | float):
        bounds.check(where, value)
        return Fixed(value)
    if not (isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS):
        raise WorkloadError(
            "workload.distribution",
            f"{where}: {value!r} is no distribution; write a number, or one of {', '.join(KINDS)} with its "
            f"parameters, e.g. {where.rpartition('.')[2]}: {{uniform: {{min: 64, max: 256}}}}",
        )
    ((kind, given),) = value.items()
    place = f"{where}.{kind}"
    if kind == "fixed":
        bounds.check(place, given)
        return Fixed(given)
    if not isinstance(given, dict):
        raise WorkloadError("file.not-a-mapping", f"{place}: {given!r} must be a mapping; {_EXAMPLES[kind]}")
    if kind == "percentiles":
        given = _with_points(given, place)
    elif kind == "choice" and isinstance(values := given.get("values"), list):
        given = {"weights": [1] * len(values)} | given
    if kind in ("normal", "log-normal", "percentiles"):
        given = {"min": bounds.least, "max": bounds.most} | given
    read = convert(given, KINDS[kind], place)
    _check(read, place, bounds)
    return read


def parse_lengths(text: str) -> Distribution:
    """Read the lengths that an option gives: a number, KIND:PARAMETERS, or a file's mapping as JSON.

    Raises WorkloadError naming what cannot be read and what can be written.
    """
    kind, separator, rest = text.strip().partition(":")
    try:
        if text.lstrip().startswith("{"):
            return read_distribution(read_text(text), "lengths", _TOKENS)
        if not separator:
            return read_distribution(_number(kind), "tokens", _TOKENS)
        given = _parameters(kind, [item.strip() for item in rest.split(",")])
        return read_distribution({kind: given}, "lengths", _TOKENS)
    except WorkloadError as error:
        raise WorkloadError(error.code, f"{str(error).removeprefix('lengths.')}; {_SHORT}") from error


def _parameters(kind: str, items: list[str]) -> object:
    """Return the parameters of a distribution as a file has them. Raises WorkloadError."""
    if kind == "fixed" and len(items) == 1:
        return _number(items[0])
    if kind == "uniform" and len(items) == 1:
        low, _, high = items[0].partition("-")
        return {"min": _number(low), "max": _number(high)}
    pairs = [(name, _number(value)) for name, separator, value in (i.partition("=") for i in items) if separator]
    plain = [item for item in items if "=" not in item]
    if kind == "choice" and not (plain and pairs):
        weights = {"weights": [weight for _, weight in pairs]} if pairs else {}
        return {"values": [_number(value) for value in (plain or [name for name, _ in pairs])], **weights}
    written = _WRITTEN.get(kind, ())
    if len(plain) > len(written) or kind == "choice":
        raise WorkloadError("workload.value", f"{kind}: {','.join(items)!r} cannot be read")
    if kind == "histogram":
        return {"edges": _edges([name for name, _ in pairs]), "counts": [count for _, count in pairs]}
    named = dict(pairs) | dict(zip(written, map(_number, plain), strict=False))
    if len(named) < len(items):
        raise WorkloadError("workload.duplicate", f"{kind}: {','.join(items)!r} gives a parameter twice")
    if kind == "percentiles":
        return {name if name in ("min", "max") else _number(name): value for name, value in pairs}
    return named


def _edges(ranges: list[str]) -> list[float]:
    """Return the edges of ranges like 1-100 and 100-500. Raises WorkloadError where there is a gap between them."""
    lows, highs = zip(
        *((_number(low), _number(high)) for low, _, high in (r.partition("-") for r in ranges)), strict=True
    )
    if lows[1:] != highs[:-1]:
        raise WorkloadError(
            "workload.not-ascending",
            f"histogram: {', '.join(ranges)}: each range must begin where the one before it ends",
        )
    return [*lows, highs[-1]]


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise WorkloadError("workload.not-a-number", f"{text!r} is not a number") from None


def _with_points(given: dict[Any, Any], place: str) -> dict[str, Any]:
    """Return percentiles as the fields of `Percentiles`: what is neither min nor max is a point."""
    points = {percent: value for percent, value in given.items() if percent not in ("min", "max")}
    for percent, value in points.items():
        if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 < percent < 100:
            raise WorkloadError(
                "workload.out-of-range",
                f"{place}.{percent}: {percent!r} must be a percentile between 0 and 100, as in 95",
            )
        Bounds(whole=False).check(f"{place}.{percent}", value)
    ordered = sorted(points.items())
    values = [0, *(value for _, value in ordered)]
    if len(ordered) < 2 or any(low >= high for low, high in pairwise(values)):
        raise WorkloadError(
            "workload.not-ascending",
            f"{place}: {points} must be two or more percentiles whose values ascend from above 0; "
            f"{_EXAMPLES['percentiles']}",
        )
    return {"points": ordered, **{key: given[key] for key in ("min", "max") if key in given}}


def _check(read: Distribution, place: str, bounds: Bounds) -> None:
    """Check the constraints between the fields of a distribution, and the bounds of its values."""
    if isinstance(read, Choice):
        for at, value in enumerate(read.values):
            bounds.check(f"{place}.values[{at}]", value)
        _check_weights(f"{place}.weights", read.weights, len(read.values))
    elif isinstance(read, BinnedDistribution):
        for at, edge in enumerate(read.edges):
            bounds.check(f"{place}.edges[{at}]", edge, whole=False)
        if len(read.edges) < 2 or any(low >= high for low, high in pairwise(read.edges)):
            raise WorkloadError(
                "workload.not-ascending", f"{place}.edges: {list(read.edges)} must be two or more, each above the last"
            )
        _check_weights(f"{place}.counts", read.counts, len(read.edges) - 1)
    elif not isinstance(read, Fixed):
        for name, value in (("min", read.least), ("max", read.most)):
            bounds.check(f"{place}.{name}", value)
        if read.least > read.most:
            raise WorkloadError(
                "workload.min-above-max",
                f"{place}.min: {read.least:g} is above max {read.most:g}; make it at most that",
            )
        if isinstance(read, LogNormal) and read.truncated and read.inside < _LEAST_INSIDE:
            raise WorkloadError(
                "workload.truncated",
                f"{place}.truncated: only {100 * read.inside:.2g} % of the distribution is within min and max; widen "
                "them, or leave it out",
            )


def _check_weights(place: str, weights: tuple[float, ...], count: int) -> None:
    if len(weights) != count:
        raise WorkloadError(
            "workload.weights", f"{place}: {len(weights)} of them for {count} values or bins; give one for each"
        )
    if not 0 < sum(weights) < math.inf:
        raise WorkloadError("workload.weights", f"{place}: {list(weights)} must have a positive sum")
