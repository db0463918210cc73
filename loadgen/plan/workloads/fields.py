"""Reading a workload file: a mapping becomes a struct or a distribution, and an error names the field and its value.

An error says what would be valid as well.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from loadgen.plan.workloads.distributions import (
    MOST_TOKENS,
    Choice,
    Distribution,
    Fixed,
    Histogram,
    LogNormal,
    Normal,
    Percentiles,
    Uniform,
)

# As a file names them.
KINDS: dict[str, type[Distribution]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "normal": Normal,
    "log-normal": LogNormal,
    "percentiles": Percentiles,
    "choice": Choice,
    "histogram": Histogram,
}
_EXAMPLES = {
    "uniform": "e.g. {min: 64, max: 256}",
    "normal": "e.g. {mean: 100, std: 20}",
    "log-normal": "e.g. {mu: 5.5, sigma: 1.0, min: 32, max: 4096}",
    "percentiles": "e.g. {50: 156, 95: 892, 99: 2134}",
    "choice": "e.g. {values: [8192, 16384], weights: [1, 1]}",
    "histogram": "e.g. {edges: [0, 100, 500], counts: [30, 70]}",
}

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class WorkloadError(ValueError):
    """A workload is not as it must be; the message names what, where, and the cure."""


def convert(given: object, kind: type[_Struct], where: str) -> _Struct:
    """A mapping that stands at `where` in the file ("" is the file itself); empty fields count as left out.

    Raises WorkloadError.
    """
    if not isinstance(given, dict):
        raise WorkloadError(f"{where}: {given!r} must be a mapping of fields to values")
    refuse_others(given, kind, where)
    filled = {key: value for key, value in given.items() if value is not None}
    try:
        return msgspec.convert(filled, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        if not path:  # Object missing required field `NAME`
            raise WorkloadError(f"{place(where, what.split('`')[1])}: is missing; add it") from error
        path = path.rstrip("`")
        value = filled[path.partition("[")[0]]
        raise WorkloadError(f"{place(where, path)}: {value!r}: {what[0].lower()}{what[1:]}") from error


def refuse_others(given: Iterable[object], kind: type[msgspec.Struct], where: str) -> None:
    """Raise WorkloadError for the first key that is no field of a struct."""
    known = [one.encode_name for one in msgspec.structs.fields(kind)]
    for key in given:
        if key not in known:
            raise WorkloadError(f"{place(where, key)}: unknown field{nearest(key, known)}; known: {', '.join(known)}")


def place(where: str, key: object) -> str:
    """Where a field stands, as in classes[1].input.uniform.min."""
    return f"{where}.{key}" if where else str(key)


def nearest(name: object, names: Sequence[str]) -> str:
    """The hint of an error: which known name comes near, or nothing."""
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What values of a distribution may be, and whether only whole ones."""

    least: float = 0
    most: float = MOST_TOKENS
    whole: bool = True

    def check(self, place: str, value: object, *, whole: bool | None = None) -> None:
        """Raise WorkloadError for what is no number, or is out of bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**63) < value < 2**63:
            raise WorkloadError(f"{place}: {value!r} must be a number")
        if (self.whole if whole is None else whole) and int(value) != value:
            raise WorkloadError(f"{place}: {value:g} must be a whole number")
        if value < self.least:
            raise WorkloadError(f"{place}: {value:g} must be at least {self.least:g}")
        if value > self.most:
            raise WorkloadError(f"{place}: {value:g} must be at most {self.most:g}")


def read_distribution(value: object, where: str, bounds: Bounds) -> Distribution:
    """What stands at `where` in a file: a number (fixed), or a mapping of one kind to its parameters.

    Raises WorkloadError naming the field, its value and the cure.
    """
    if isinstance(value, int | float):
        bounds.check(where, value)
        return Fixed(value)
    if not (isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS):
        raise WorkloadError(
            f"{where}: {value!r} is no distribution; write a number, or one of {', '.join(KINDS)} with its "
            f"parameters, e.g. {where.rpartition('.')[2]}: {{uniform: {{min: 64, max: 256}}}}"
        )
    ((kind, given),) = value.items()
    place = f"{where}.{kind}"
    if kind == "fixed":
        bounds.check(place, given)
        return Fixed(given)
    if not isinstance(given, dict):
        raise WorkloadError(f"{place}: {given!r} must be a mapping; {_EXAMPLES[kind]}")
    if kind == "percentiles":
        given = _with_points(given, place)
    elif kind == "choice" and isinstance(values := given.get("values"), list):
        given = {"weights": [1] * len(values)} | given
    if kind in ("normal", "log-normal", "percentiles"):
        given = {"min": bounds.least, "max": bounds.most} | given
    read = convert(given, KINDS[kind], place)
    _check(read, place, bounds)
    return read


def _with_points(given: dict[Any, Any], place: str) -> dict[str, Any]:
    """Percentiles as the fields of `Percentiles`: what is neither min nor max is a point."""
    points = {percent: value for percent, value in given.items() if percent not in ("min", "max")}
    for percent, value in points.items():
        if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 < percent < 100:
            raise WorkloadError(f"{place}.{percent}: {percent!r} must be a percentile between 0 and 100, as in 95")
        Bounds(whole=False).check(f"{place}.{percent}", value)
    ordered = sorted(points.items())
    values = [0, *(value for _, value in ordered)]
    if len(ordered) < 2 or any(low >= high for low, high in pairwise(values)):
        raise WorkloadError(
            f"{place}: {points} must be two or more percentiles whose values ascend from above 0; "
            f"{_EXAMPLES['percentiles']}"
        )
    return {"points": ordered, **{key: given[key] for key in ("min", "max") if key in given}}


def _check(read: Distribution, place: str, bounds: Bounds) -> None:
    """What the fields of a distribution cannot say each for itself."""
    if isinstance(read, Choice):
        for at, value in enumerate(read.values):
            bounds.check(f"{place}.values[{at}]", value)
        _check_weights(f"{place}.weights", read.weights, len(read.values))
    elif isinstance(read, Histogram):
        for at, edge in enumerate(read.edges):
            bounds.check(f"{place}.edges[{at}]", edge, whole=False)
        if len(read.edges) < 2 or any(low >= high for low, high in pairwise(read.edges)):
            raise WorkloadError(f"{place}.edges: {list(read.edges)} must be two or more, each above the last")
        _check_weights(f"{place}.counts", read.counts, len(read.edges) - 1)
    elif not isinstance(read, Fixed):
        for name, value in (("min", read.least), ("max", read.most)):
            bounds.check(f"{place}.{name}", value)
        if read.least > read.most:
            raise WorkloadError(f"{place}.min: {read.least:g} is above max {read.most:g}; make it at most that")


def _check_weights(place: str, weights: tuple[float, ...], count: int) -> None:
    if len(weights) != count:
        raise WorkloadError(f"{place}: {len(weights)} of them for {count} values or bins; give one for each")
    if not 0 < sum(weights) < math.inf:
        raise WorkloadError(f"{place}: {list(weights)} must have a positive sum")
