"""What stands where a number cannot be given: the reason why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that cannot be known, with the reason in words a reader of the report understands."""

    reason: str
