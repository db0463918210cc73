"""Search for the highest sustained load, and for the load at which objectives are reached.

Around what the saturated system serves, open loops show which levels are sustained; a logistic fit of the share of
requests beyond a bound, over their load, shows where an objective is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.statistics.intervals import Ends
from sidelight.methodology.fits.logistic import share_crossing
from sidelight.methodology.study.findings import ResultQuantity
from sidelight.methodology.study.model import Done, Finished, Step, StudySettings
from sidelight.methodology.study.planning import LEVEL, fresh, level_label, of_kind
from sidelight.methodology.study.quantities import number
from sidelight.methodology.study.saturation import DEFAULT_S, Capacity, load_of, measured_capacity, saturation
from sidelight.rundir.printable.numbers import count_of, figure

AT_SLO = "slo"

AROUND = 0.1  # of the limit, on both sides: where open loops are tried
INCREMENT = 0.05  # of the limit: nearer levels cannot be distinguished
SAME = 0.01  # levels within that are the same
MOST_LEVELS, MOST_SLO_LEVELS = 4, {"letter": 8, "short": 4}
LONGER = 3  # times the duration, of a level that was undecided
SLO_SHARES = (0.8, 0.5, 0.2, 0.1)  # of the limit: levels tried until one meets the objectives
NARROW = 0.03  # of the load at the objective: half its interval, that ends the search
APART = 0.03  # levels at an objective: a step nearer to another one says little that is new
LOWER = 0.8  # of the lowest level: where the fit leads below it, the next one is not lower than that
LONG_S = 300.0  # of a step: it sees enough requests beyond an objective
STEADY = 0.97  # of the limit: of higher loads, how many requests are late depends on how long they last


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Result of open loops: the highest level that was stable below all that grew, and the lowest that grew."""

    stable: Finished | None
    growing: Finished | None
    contradictions: int  # stable levels above one that grew
    undecided: tuple[Finished, ...]  # even in a longer step


def bracket(levels: Sequence[Finished], limit: Capacity) -> Bracket:
    """Return the bracket of the sustained load from open-loop levels [n]; verdicts go by the realised load."""
    stable, growing = ([each for each in levels if each.outcome.verdict == name] for name in ("stable", "growing"))

    def load(each: Finished) -> float:
        return load_of(each, limit)

    lowest = min(growing, key=load, default=None)
    below = [each for each in stable if lowest is None or load(each) < load(lowest)]
    last = {each.step.level: each for each in levels}.values()  # a longer step of the same level counts
    return Bracket(
        stable=max(below, key=load, default=None),
        growing=lowest,
        contradictions=len(stable) - len(below),
        undecided=tuple(each for each in last if each.outcome.verdict == "undecided"),
    )


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the next step of the search for the maximum throughput.

    It has (a) closed loops until the server is full, (b) open loops around what it then serves, (c) open loops where
    the objectives are reached.
    """
    if (decided := saturation(asked, finished, confirm=True)) is not None:
        return decided
    limit = measured_capacity(finished)
    if limit is None or not limit.filled:
        return Done(reason="the load generator's requests in flight never filled the server: it bounds the throughput")
    levels = of_kind(finished, LEVEL)
    if (level := _next_level(asked, levels, limit)) is not None:
        return _open(asked, finished, LEVEL, *level)
    if not asked.parameters.slo:
        return Done(reason="the highest level that is sustained is known")
    rate = _next_at_slo(asked, finished, limit)
    if isinstance(rate, Done):
        return rate
    return _open(asked, finished, AT_SLO, rate, 1)


def _next_level(asked: StudySettings, levels: Sequence[Finished], limit: Capacity) -> tuple[float, int] | None:
    """Return the open-loop search's next rate, and the multiple of its step's duration; None: it has ended."""
    parameters = asked.parameters
    verdicts = bracket(levels, limit)
    if len(levels) >= MOST_LEVELS:
        return None
    for each in verdicts.undecided:
        if (each.step.duration or 0) < LONGER * (parameters.duration or DEFAULT_S):
            return each.step.level, LONGER
    ceiling = min((1 + AROUND) * limit.per_s, parameters.max or math.inf)
    floor = min(max((1 - AROUND) * limit.per_s, parameters.min or 0.0), ceiling)
    low = load_of(verdicts.stable, limit) if verdicts.stable else None
    high = load_of(verdicts.growing, limit) if verdicts.growing else None
    ends: tuple[float, ...] = ()
    if verdicts.contradictions:
        rate = float(np.median([load_of(each, limit) for each in levels if each.outcome.stability]))
    elif low is None:
        rate, ends = (floor + min(high or limit.per_s, limit.per_s)) / 2, (floor,)
    elif high is None:
        rate, ends = (max(low, limit.per_s) + ceiling) / 2, (ceiling,)
    elif high - low <= max(parameters.increment or 0.0, INCREMENT * limit.per_s):
        return None
    else:
        rate = (low + high) / 2
    tried = [] if verdicts.contradictions else [each.step.level for each in levels]
    for level in (min(max(rate, floor), ceiling), *ends):  # none is tried twice for the same question
        if not any(abs(level - other) < SAME * level for other in tried):
            return level, 1
    return None


def _open(asked: StudySettings, finished: Sequence[Finished], kind: str, rate: float, times: int) -> Step:
    label = f"open-{level_label(rate)}" + ("-longer" if times > 1 else "")
    options = {"slo": asked.parameters.slo} if asked.parameters.slo else {}
    duration_s = times * (asked.parameters.duration or DEFAULT_S)
    return fresh(asked, finished, label, "open", rate, kind=kind, duration=duration_s, options=options)


def _next_at_slo(asked: StudySettings, finished: Sequence[Finished], limit: Capacity) -> float | Done:
    """Return the next rate of the search for the load that reaches the objectives."""
    judged = _judged(finished)
    met, failed = _loads_judged(judged, limit)
    if not failed:
        return Done(reason="the objectives hold up to the highest load that is sustained")
    is_last = sum(each.step.kind == AT_SLO for each in judged) >= MOST_SLO_LEVELS[asked.scale]
    if not met:
        floor = asked.parameters.min or 0.0
        rates = [rate for share in SLO_SHARES if (rate := max(share * limit.per_s, floor)) < 0.95 * min(failed)]
        if not rates or is_last:
            return Done(reason="the objectives fail even at the lowest load that was tried")
        return rates[0]
    reached, lowest = crossing_of(finished, limit), min((*met, *failed))
    if is_last or (reached is not None and reached[0] >= lowest and _is_narrow(reached)):
        return Done(reason="the load at which the objectives are reached is known")
    at = (max(met) + min(failed)) / 2
    if reached is not None and (reached[0] >= lowest or lowest in failed):
        at = max(reached[0], LOWER * lowest, asked.parameters.min or 0.0)
    # A step tells most at the load that is sought, and little at a rate that was offered before.
    tried = [each.step.level for each in judged]
    places = (at * (1 + APART * offset) for offset in (0, 1, -1, 2, -2, 3, -3, 4, -4))
    return next((place for place in places if all(abs(place / rate - 1) > APART / 2 for rate in tried)), at)


def _judged(finished: Sequence[Finished]) -> list[Finished]:
    """Return the open loops that were judged by objectives."""
    return [each for each in finished if each.step.load == "open" and each.outcome.slo is not None]


def _is_narrow(reached: Ends) -> bool:
    at, low, high = reached
    return low is not None and high is not None and (high - low) / 2 < NARROW * at


def crossing_of(finished: Sequence[Finished], limit: Capacity) -> Ends | None:
    """Return the load at which the first percentile objective is reached, with its interval.

    It is by the open loops, and may lie below all levels.

    None without two that had a steady state, and where it lies above all levels. The steps have one tau: by its own, a
    step would count the less the more it has beyond the bound.
    """
    judged = _judged(finished)
    loads = [load_of(each, limit) for each in judged]
    crossings = []
    for text in {text: None for each in judged for text in each.outcome.beyond}:
        points = [
            (load, each.outcome.beyond[text])
            for load, each in zip(loads, judged, strict=True)
            if text in each.outcome.beyond and load < STEADY * limit.per_s
        ]
        seen = [(beyond.n, beyond.tau) for _, beyond in points if beyond.share]
        if len(points) < 2 or not seen:
            continue
        tau = float(np.average([each for _, each in seen], weights=[n for n, _ in seen]))
        reached = share_crossing(
            [load for load, _ in points],
            [beyond.share for _, beyond in points],
            [beyond.n / tau for _, beyond in points],
            points[0][1].allowed,
        )
        if reached is not None and reached[0] <= max(loads):
            crossings.append(reached)
    return min(crossings, key=lambda each: each[0], default=None)


def at_objective(asked: StudySettings, steps: Sequence[Finished], limit: Capacity) -> ResultQuantity:
    """Return the highest load that meets the objectives; where none can be said, why, and what is known of it."""
    text, judged = asked.parameters.slo, _judged(steps)
    if not text or not judged:
        missing = "no objective was stated (--slo)" if not text else "no open loop was judged by the objective"
        return number(None, "requests/s", missing=missing)
    met, failed = _loads_judged(judged, limit)
    if not met and not failed:
        return number(None, "requests/s", n=len(judged), missing=f"at no level is it known whether {text} holds")
    lowest = min((*met, *failed), default=math.inf)
    reached, disputed = crossing_of(steps, limit), contradiction(asked, steps, limit)
    if reached is not None and reached[0] >= lowest:
        method = (
            f"where a logistic fit of the share of requests beyond the bound over the load sent, of {len(judged)} open "
            f"loops, reaches what {text} allows; interval by Fieller"
        )
        return number(reached[0], "requests/s", ci95=reached[1:], n=len(judged), method=method)
    if met and not disputed:
        failing = f"the lowest that fails it is {figure(min(failed))} requests/s" if failed else "none fails it"
        method = f"the highest level that meets {text}; {failing}"
        return number(max(met), "requests/s", n=len(judged), method=method)
    missing = f"{text} fails even at {figure(lowest)} requests/s, the lowest level"
    if reached is not None and reached[0] >= LOWER * lowest:
        interval = number(reached[0], "requests/s", ci95=reached[1:]).interval()
        at = f"{figure(reached[0])} requests/s{interval}"
        missing = f"{text} is reached at about {at}, below the lowest level, {figure(lowest)}"
    elif lowest >= limit.per_s:
        missing = f"every level judged was above what it serves, {figure(limit.per_s)} requests/s; try lower (--min)"
    elif disputed:
        missing = f"{text} cannot be placed"
    unknown = number(None, "requests/s", n=len(judged), missing="; ".join(filter(None, (missing, disputed))))
    return replace(unknown, ci95=reached[1:] if reached else None)


def contradiction(asked: StudySettings, steps: Sequence[Finished], limit: Capacity) -> str:
    """Return a sentence if levels contradict each other, else nothing.

    They do if some meet the objectives that fail at a lower load.
    """
    met, failed = _loads_judged(_judged(steps), limit)
    above = sum(load > min(failed, default=math.inf) for load in met)
    below = sum(load < max(met, default=0.0) for load in failed)
    if not above:
        return ""
    duration_s = asked.parameters.duration or DEFAULT_S
    longer_s = max(LONG_S, LONGER * duration_s)
    return (
        f"{count_of(above, 'level')} met it and {below} at lower load did not: steps of "
        f"{duration_s:g} s have too few requests to judge it, lengthen them with --duration {longer_s:g}"
    )


def _loads_judged(judged: Sequence[Finished], limit: Capacity) -> tuple[list[float], list[float]]:
    """Return the loads of levels that meet the objectives, and of those that fail them."""
    met, failed = (
        [load_of(each, limit) for each in judged if each.outcome.slo_met is is_met] for is_met in (True, False)
    )
    return met, failed
