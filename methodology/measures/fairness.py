"""Fairness between classes of requests, and the scheduling rule that the engine seems to follow.

Jain, Chiu and Hawe 1984, "A quantitative measure of fairness and discrimination for resource allocation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Ints

Policy = Literal["fcfs", "shortest-first", "priority", "unknown"]
STARVED = 5.0  # times the median of its class
LEAST_PAIRS = 10  # of requests that waited at the same time
LEAST_WITHIN = 5  # of those, that tell one rule from another
APART_S = 0.005  # what came or was begun within it is not known to be in order
# Share of the pairs in which the later request went first: of a rule, and of none.
OFTEN, SELDOM = 0.5, 0.1


def jain(values: Floats) -> float:
    """Return Jain's index of values [n > 0], from 1 / n to 1: all the same; NaN where all are 0."""
    squares = len(values) * float(values @ values)
    return float(values.sum()) ** 2 / squares if squares else float("nan")


def starved(waits: Floats) -> Bools:
    """Return a mask of waits [n] over five times their median; none where that is 0."""
    median = float(np.median(waits)) if len(waits) else 0.0
    return np.asarray((waits > STARVED * median) & (median > 0), dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """The rule that the engine follows, which class it serves first (empty: none), and the evidence in words."""

    policy: Policy
    first: str = ""
    reason: str
    is_few: bool = False  # whether it is unknown because too few requests waited at the same time


def scheduling(arrived_s: Floats, begun_s: Floats, tokens: Floats, class_of: Ints, names: Sequence[str]) -> Scheduling:
    """Infer the scheduling rule for n requests: by who overtook whom while both waited.

    arrived_s, begun_s  when each came, ascending, and when its prefill began [n]
    tokens, class_of    its input length, and the place of its class in `names` [n]

    First come, first served: none is overtaken. Shortest first: the shorter overtake the longer, within a class too.
    Priority: requests of a class overtake those of another, and never those of their class.
    """
    earlier, later, overtook = _pairs(arrived_s, begun_s)
    if len(earlier) < LEAST_PAIRS:
        reason = f"only {len(earlier)} pairs of requests waited at the same time, at least {LEAST_PAIRS} are needed"
        return Scheduling(policy="unknown", reason=reason, is_few=True)
    same = class_of[earlier] == class_of[later]
    shorter = tokens[later] < tokens[earlier]
    within = _share(overtook[same & shorter]) - _share(overtook[same & (tokens[later] > tokens[earlier])])
    across = {
        (first, second): overtook[(class_of[later] == first) & (class_of[earlier] == second)]
        for first in range(len(names))
        for second in range(len(names))
        if first != second
    }
    # Few pairs of two classes tell nothing: a class that has priority may not have been the later one.
    few = any(len(flags) < LEAST_WITHIN for flags in across.values())
    known = {ways: _share(flags) for ways, flags in across.items() if len(flags) >= LEAST_WITHIN}
    (first, second), most = max(known.items(), key=lambda item: item[1], default=((0, 0), 0.0))
    pairs = f"of {len(earlier):,} pairs that waited at the same time, the later went first in"
    alike = int((same & shorter).sum())
    if alike >= LEAST_WITHIN and within > OFTEN:
        share = 100 * _share(overtook[shorter])
        return Scheduling(policy="shortest-first", reason=f"{pairs} {share:.0f} % where it was shorter")
    if most > OFTEN:
        reason = f"{pairs} {100 * most:.0f} % where it was {names[first]} and the other {names[second]}"
        if alike < LEAST_WITHIN:
            reason += "; too few of the same class waited together to say whether by class or by length"
            return Scheduling(policy="unknown", first=names[first], reason=reason, is_few=True)
        return Scheduling(policy="priority", first=names[first], reason=reason)
    reason = f"{pairs} {100 * _share(overtook):.0f} %"
    if few or alike < LEAST_WITHIN:
        reason += "; too few pairs of each two classes to tell"
        return Scheduling(policy="unknown", reason=reason, is_few=True)
    return Scheduling(policy="fcfs" if max(within, most, _share(overtook)) < SELDOM else "unknown", reason=reason)


def _pairs(arrived_s: Floats, begun_s: Floats) -> tuple[Ints, Ints, Bools]:
    """Return the pairs of requests that waited simultaneously, and a mask of overtaking.

    It marks pairs with the later one begun first.
    """
    earlier: list[Ints] = []
    later: list[Ints] = []
    ends = np.searchsorted(arrived_s, begun_s - APART_S)
    for row, end in enumerate(ends.tolist()):
        behind = np.arange(row + 1, end)
        behind = behind[
            (arrived_s[behind] > arrived_s[row] + APART_S) & (abs(begun_s[behind] - begun_s[row]) > APART_S)
        ]
        earlier.append(np.full(len(behind), row))
        later.append(behind)
    first, second = (np.concatenate([np.zeros(0, np.int64), *rows]) for rows in (earlier, later))
    return first, second, np.asarray(begun_s[second] < begun_s[first], dtype=np.bool_)


def _share(flags: Bools) -> float:
    return float(flags.mean()) if len(flags) else 0.0
