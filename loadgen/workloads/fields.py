"""Reading a workload file field by field, so that an error names the field, its value and the cure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class WorkloadError(ValueError):
    """A workload is not as it must be; the message names what, where, and the cure."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of a workload file, and where in the file it stands ("" for the file itself)."""

    data: Mapping[Any, Any]
    where: str = ""

    def place(self, key: object = None) -> str:
        """Where a field stands, as in classes[1].input.uniform.min."""
        parts = [part for part in (self.where, "" if key is None else str(key)) if part]
        return ".".join(parts) or "the file"

    def has(self, key: object) -> bool:
        """Whether the field is there and not empty."""
        return self.data.get(key) is not None

    def take(self, key: object) -> Any:
        """The value of a field that must be there. Raises WorkloadError."""
        if not self.has(key):
            raise WorkloadError(f"{self.place(key)}: is missing; add it")
        return self.data[key]

    def within(self, key: object) -> Fields:
        """The mapping under a key. Raises WorkloadError when it is none."""
        value = self.take(key)
        if not isinstance(value, dict):
            raise WorkloadError(f"{self.place(key)}: {value!r} must be a mapping of fields to values")
        return Fields(value, self.place(key))

    def number(
        self,
        key: object,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        whole: bool = False,
        default: float | None = None,
    ) -> float:
        """A finite number within its bounds; `default` where the field is not there, unless that is None.

        Raises WorkloadError.
        """
        if default is not None and not self.has(key):
            return default
        return self._checked(self.place(key), self.take(key), least, most, whole=whole)

    def numbers(
        self,
        key: object,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        whole: bool = False,
        default: Sequence[float] | None = None,
    ) -> tuple[float, ...]:
        """A list of numbers, at least one, within their bounds. Raises WorkloadError."""
        if default is not None and not self.has(key):
            return tuple(default)
        values = self.take(key)
        if not isinstance(values, list) or not values:
            raise WorkloadError(f"{self.place(key)}: {values!r} must be a list of numbers, e.g. [64, 256]")
        return tuple(
            self._checked(f"{self.place(key)}[{at}]", value, least, most, whole=whole)
            for at, value in enumerate(values)
        )

    def text(self, key: object, *, default: str | None = None) -> str:
        """A string that is not empty. Raises WorkloadError."""
        if default is not None and not self.has(key):
            return default
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise WorkloadError(f"{self.place(key)}: {value!r} must be a text that is not empty")
        return value

    def one_of(self, key: object, names: Sequence[str], *, default: str) -> str:
        """One of some names. Raises WorkloadError with the nearest."""
        value = self.data[key] if self.has(key) else default
        if value not in names:
            raise WorkloadError(
                f"{self.place(key)}: {value!r} is not known{nearest(value, names)}; known: {', '.join(names)}"
            )
        return str(value)

    def refuse_others(self, known: Sequence[str]) -> None:
        """Raise WorkloadError for the first key that is none of the known ones."""
        for key in self.data:
            if known and key not in known:
                raise WorkloadError(f"{self.place(key)}: unknown field{nearest(key, known)}; known: {', '.join(known)}")

    @staticmethod
    def _checked(place: str, value: object, least: float, most: float, *, whole: bool) -> float:
        # A whole number of any length is YAML, but not all of them are finite floats.
        real = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
        if isinstance(value, bool) or not isinstance(value, int | float) or not real or not math.isfinite(value):
            raise WorkloadError(f"{place}: {value!r} must be a number")
        if whole and int(value) != value:
            raise WorkloadError(f"{place}: {value:g} must be a whole number")
        if value < least:
            raise WorkloadError(f"{place}: {value:g} must be at least {least:g}")
        if value > most:
            raise WorkloadError(f"{place}: {value:g} must be at most {most:g}")
        return int(value) if whole else value


def nearest(name: object, names: Sequence[str]) -> str:
    """The hint of an error: which known name comes near, or nothing."""
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
