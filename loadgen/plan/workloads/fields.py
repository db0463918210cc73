"""Reading a workload file: a mapping becomes a struct, and an error names the field, its value and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

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
