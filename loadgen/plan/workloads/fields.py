"""Reading a file of a user's: which file it was, and of YAML a mapping that becomes a struct.

An error names the file, the place in it, the value there and what would be valid.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sidelight.rundir.printable.errors import CodedError

_DEEPEST = 100  # brackets in brackets: no file of a person has more

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class WorkloadError(CodedError, ValueError):
    """A workload is not as it must be; the message names what, where, and the cure."""


def read_yaml(path: Path) -> object:
    """Return the content of a YAML file. Raises WorkloadError naming the file, and the line and column of a mistake."""
    try:
        return read_text(path.read_text(encoding="utf-8"), f"{path}")
    except OSError as error:
        raise WorkloadError("file.unreadable", f"{path}: {error.strerror}; give the path of a YAML file") from error
    except ValueError as error:
        raise error if isinstance(error, WorkloadError) else _not_yaml(f"{path}", error) from error


def read_text(text: str, source: str = "") -> object:
    """Return the content of a text in YAML or JSON. Raises WorkloadError as `read_yaml` does, naming the source."""
    import yaml  # noqa: PLC0415  15 ms, and most runs read none

    class Loader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, token: Any) -> None:
            # Each bracket takes as long as there are brackets around it: 3 kB of them took seconds.
            if self.flow_level >= _DEEPEST:
                raise RecursionError
            super().fetch_flow_collection_start(token)

    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506  it is a safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _not_yaml(f"{source}{where}", error.problem) from error
    except RecursionError as error:
        raise _not_yaml(source, "nested too deeply") from error
    # Of a scalar that its tag or its form promises to be a number or a date, and that is none, the constructors raise
    # whatever int() and the like raise.
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise _not_yaml(source, error) from error


def _not_yaml(where: str, why: object) -> WorkloadError:
    return WorkloadError(
        "file.not-yaml", f"{where.removeprefix(', ')}: not YAML: {' '.join(str(why).split())}".removeprefix(": ")
    )


def convert(given: object, kind: type[_Struct], where: str) -> _Struct:
    """Convert a mapping at `where` in the file; empty fields count as left out. For `where`, "" is the file itself.

    Raises WorkloadError.
    """
    if not isinstance(given, dict):
        raise WorkloadError("file.not-a-mapping", f"{where}: {given!r} must be a mapping of fields to values")
    refuse_others(given, kind, where)
    filled = {key: value for key, value in given.items() if value is not None}
    try:
        return msgspec.convert(filled, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        if not path:  # Object missing required field `NAME`
            raise WorkloadError("field.missing", f"{place(where, what.split('`')[1])}: is missing; add it") from error
        path = path.rstrip("`")
        value = filled[path.partition("[")[0]]
        raise WorkloadError("field.value", f"{place(where, path)}: {value!r}: {what[0].lower()}{what[1:]}") from error


def refuse_others(given: Iterable[object], kind: type[msgspec.Struct], where: str) -> None:
    """Raise WorkloadError for the first key that is not a field of a struct."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in given:
        if key not in known:
            raise WorkloadError(
                "field.unknown", f"{place(where, key)}: unknown field{nearest(key, known)}; known: {', '.join(known)}"
            )


def place(where: str, key: object) -> str:
    """Return the place of a field, as in classes[1].input.uniform.min."""
    return f"{where}.{key}" if where else str(key)


def nearest(name: object, names: Sequence[str]) -> str:
    """Return the hint of an error: which known name comes near, or nothing."""
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def about_file(path: Path, option: str = "--dataset") -> dict[str, Any]:
    """Return name, size and SHA-256 of a file, which tell its version. Raises WorkloadError naming the option."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"file": path.name, "bytes": file.tell(), "sha256": digest}
    except OSError as error:
        raise unreadable(path, error, option) from error


def file_state(path: Path, option: str = "--dataset") -> tuple[int, int]:
    """Return a file's time of change in ns and its size.

    They change when the file is written anew. Raises WorkloadError.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error, option) from error
    return status.st_mtime_ns, status.st_size


def unreadable(path: Path, error: OSError, option: str = "--dataset") -> WorkloadError:
    """Return the error of a file that cannot be opened or read."""
    return WorkloadError(
        "file.unreadable", f"{path}: {error.strerror or error}; give the path of a readable file with {option}"
    )
