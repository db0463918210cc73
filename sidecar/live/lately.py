"""What panels show of the last seconds or minutes: how much was offered and served, and how many requests waited."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RATE_S, LEAST_S = 10.0, 1.0


@dataclass(slots=True)
class Flow:
    """Keeps the counts of the last seconds."""

    counts: deque[tuple[float, int, int]] = field(default_factory=deque)

    def rates(self, at_s: float, offered: int, served: int) -> tuple[float | None, float | None]:
        """Take the counts since a phase began, and return how many a second were offered and served of late; None
        before there is a second of them.
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
    """Keeps the largest value of a gauge in each of the last `columns` of `column_s`, for a sparkline."""

    columns: int
    column_s: float = 1.25
    values: deque[float | None] = field(default_factory=deque)
    column: int = 0

    def take(self, at_s: float, value: float | None) -> list[float | None]:
        """Take the value at a moment, None where it is not known, and return those of the columns, the latest last."""
        column = int(at_s / self.column_s)
        begun = max(0, column - self.column) if self.values else 1
        self.values.extend([None] * min(begun, self.columns))
        self.column = column
        known = [each for each in (self.values[-1], value) if each is not None]
        self.values[-1] = max(known, default=None)
        while len(self.values) > self.columns:
            self.values.popleft()
        return list(self.values)
