"""Clients that leave before their replies end: the value of --leave, and the requests that it concerns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

# A share and a time: 5%@2s.
FORM = r"(100|\d{1,2}(?:\.\d+)?)%@(\d{1,6}(?:\.\d+)?)(ms|s|m)"
_UNIT_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A share of the requests, ended by their clients `after_ns` behind the dispatch."""

    ratio: float
    after_ns: int
    seed: int

    def after(self, index: int) -> int:
        """Return the time of one request, -1 if its client stays; the same for the same seed and index."""
        return self.after_ns if Random(f"leave {self.seed} {index}").random() < self.ratio else -1


def leaving_of(text: str | None, seed: int) -> Leaving | None:
    """Return the clients that leave by a value of --leave. Raises ValueError for any other text."""
    if text is None:
        return None
    if (match := re.fullmatch(FORM, text)) is None:
        raise ValueError("must be a share and a time, like 5%@2s")
    return Leaving(ratio=float(match[1]) / 100, after_ns=round(float(match[2]) * _UNIT_NS[match[3]]), seed=seed)
