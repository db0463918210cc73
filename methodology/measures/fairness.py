"""How evenly classes of requests are served, and by which rule the engine seems to choose who is next.

Jain, Chiu and Hawe 1984, "A quantitative measure of fairness and discrimination for resource allocation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from methodology.measures.paired import bootstrapped
from rundir.columns import Bools, Floats, Ints

Policy = Literal["fcfs", "shortest-first", "priority", "unknown"]
STARVED = 5.0  # times the median of its class
LEAST_WAITED = 30
# Ratio of two classes' mean queue times within which they count as equal; rank correlation that chance does not make.
EQUAL, CORRELATED = 1.33, 0.1


def jain(values: Floats) -> float:
    """Return Jain's index of values [n > 0], from 1 / n to 1: all the same; NaN where all are 0."""
    squares = len(values) * float(values @ values)
    return float(values.sum()) ** 2 / squares if squares else float("nan")


def starved(waits: Floats) -> Bools:
    """Return which waits [n] are longer than five times their median; none where that is 0."""
    median = float(np.median(waits)) if len(waits) else 0.0
    return np.asarray((waits > STARVED * median) & (median > 0), dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """The rule that the queue times follow, which class is served first (empty: none), and the evidence in words."""

    policy: Policy
    first: str = ""
    reason: str


def scheduling(queue_s: Floats, tokens: Floats, class_of: Ints, names: Sequence[str]) -> Scheduling:
    """Judge by which rule n requests, in the order of their submission, were taken from the queue.

    queue_s, tokens  time in the engine's queue and input length [n]
    class_of         place of their class in `names` [n]; the first class has the shortest inputs

    - Requests that arrive at random meet the same queue whatever their class: equal queue times are first come, first
      served. Where the longer of the same class wait longer, short ones go first. Where a class waits less, but within
      a class the length does not matter, that class has priority.
    """
    if int((queue_s > 0).sum()) < LEAST_WAITED:
        return Scheduling(policy="unknown", reason=f"fewer than {LEAST_WAITED} requests waited in the queue")

    def measures(samples: Sequence[Floats]) -> list[float]:
        queue, lengths, classes = samples[0].T
        members = [classes == at for at in range(len(names))]
        ratio = float(np.log(queue[members[-1]].mean() / queue[members[0]].mean()))
        return [ratio, float(np.mean([_rank_correlation(queue[rows], lengths[rows]) for rows in members]))]

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, within = bootstrapped([np.column_stack([queue_s, tokens, class_of])], measures)
    if ratio[1] is None or ratio[2] is None or within[1] is None:
        return Scheduling(policy="unknown", reason="too few requests to tell chance from a rule")
    times, low, high = np.exp([ratio[0], ratio[1], ratio[2]]).tolist()
    waited = f"{names[-1]} requests waited {times:.2f} times as long in the queue as {names[0]} ones"
    if within[1] > 0 and within[0] > CORRELATED:
        reason = f"{waited}, and within a class the longer waited longer (rank correlation {within[0]:.2f})"
        return Scheduling(policy="shortest-first", first=names[0], reason=reason)
    even = f"and within a class the length did not matter (rank correlation {within[0]:.2f})"
    if low > EQUAL or high < 1 / EQUAL:
        return Scheduling(policy="priority", first=names[0] if times > 1 else names[-1], reason=f"{waited}, {even}")
    if 1 / EQUAL < times < EQUAL:
        return Scheduling(policy="fcfs", reason=f"{waited}, {even}")
    return Scheduling(policy="unknown", reason=f"{waited}, which may be chance; a longer run can tell")


def _rank_correlation(first: Floats, second: Floats) -> float:
    if len(first) < 3:
        return 0.0
    ranks = np.array([np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (first, second)])
    correlation = float(np.corrcoef(ranks)[0, 1])
    return correlation if np.isfinite(correlation) else 0.0
