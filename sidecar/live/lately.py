"""Recent values on panels: rates offered and served, and numbers of waiting requests. They are of the last seconds or
minutes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RATE_S, LEAST_S = 10.0, 1.0


@dataclass(slots=True)
class Flow:
    """Counts of the last seconds."""

    counts: deque[tuple[float, int, int]] = field(default_factory=deque)

    def rates(self, at_s: float, offered: int, served: int) -> tuple[float | None, float | None]:
        """Add the counts since a phase began, and return the recent rates. The rates are the requests offered and
        served a second; None before there is a second of them.
        """
        self.counts.append((at_s, offered, served))
        while self.counts[0][0] < at_s - RATE_S:
            self.counts.popleft()
        since_s, offered_then, served_then = self.counts[0]
        elapsed_s = at_s - since_s
        if elapsed_s < LEAST_S:
            return None, None
        return (offered - offered_then) / elapsed_s, (served - served_then) / elapsed_s


@dataclass(slots=True, kw_only=True)
class Peaks:
    """Largest values of a gauge in each of the last `columns`, for a sparkline. A column is `column_s` long."""

    columns: int
    column_s: float = 1.25
    values: deque[float | None] = field(default_factory=deque)
    column: int = 0

    def take(self, at_s: float, value: float | None) -> list[float | None]:
        """Add the value at a moment, and return the columns, the latest last. The value is None where it is not
        known.
        """
        column = int(at_s / self.column_s)
        begun = max(0, column - self.column) if self.values else 1
        self.values.extend([None] * min(begun, self.columns))
        self.column = column
        known = [each for each in (self.values[-1], value) if each is not None]
        self.values[-1] = max(known, default=None)
        while len(self.values) > self.columns:
            self.values.popleft()
        return list(self.values)
