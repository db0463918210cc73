"""The value of --rate: a rate, a ramp from one rate to another, or how many times as fast as a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"\d+(?:\.\d+)?"
FORM = rf"{_NUMBER}\.\.{_NUMBER}|{_NUMBER}x"  # besides a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of arrivals: requests/s, and at the end of a ramp, each None if not stated; and the speed of a trace."""

    per_s: float | None = None
    to_per_s: float | None = None
    speed: float = 1.0

    @property
    def most_per_s(self) -> float:
        """Return the highest rate, 0 if none is stated."""
        return max(self.per_s or 0.0, self.to_per_s or 0.0)


def pace_of(rate: float | str | None) -> Pace:
    """Return the pace of a value of --rate. Raises ValueError for any other text."""
    if not isinstance(rate, str):
        return Pace(per_s=rate)
    if not re.fullmatch(FORM, rate):
        raise ValueError("must be a number, a ramp like 4..20, or with --trace a speed like 2x")
    if rate.endswith("x"):
        return Pace(speed=float(rate[:-1]))
    begin, _, end = rate.partition("..")
    return Pace(per_s=float(begin), to_per_s=float(end))
