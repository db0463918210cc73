"""How much a system can serve: the capacity that levels of load are shares of, and the search for it.

By the saturation rule the stability limit of an open loop is the throughput of the saturated system (Baccelli and Foss
1995): a closed loop that always leaves requests waiting shows it in one step. Open loops around it then show which
levels are sustained, and a monotone fit of latency over load where an objective is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from methodology.fits.logistic import share_crossing
from methodology.fits.monotone import Crossing
from methodology.study.model import Asked, Done, Finished, Limit, Outcome, Step
from methodology.study.planning import LEVEL, fresh, of_kind

SATURATE, AT_SLO = "saturate", "slo"
Interval = tuple[float, float]

FIRST_CONCURRENCY, MOST_CONCURRENCY = 64, 1024
ALWAYS = 0.95  # share of the scrapes that saw requests wait: saturated
GAIN = 0.03  # by which a doubling must raise the throughput, to go on
AROUND = 0.1  # of the limit, on both sides: where open loops are tried
INCREMENT = 0.05  # of the limit: nearer levels cannot be distinguished
SAME = 0.01  # levels within that are the same
MOST_LEVELS, MOST_SLO_LEVELS = 4, {"letter": 8, "short": 4}
LONGER = 3  # times the duration, of a level that was undecided
SLO_SHARES = (0.8, 0.5, 0.2, 0.1)  # of the limit: levels tried until one meets the objectives
NARROW = 0.03  # of the load at the objective: half its interval, that ends the search
APART = 0.03  # levels at an objective: a step nearer to another one says little that is new
STEADY = 0.97  # of the limit: of higher loads, how many requests are late depends on how long they last
DEFAULT_S = 60.0
Z95 = 1.96


class Capacity(Struct, frozen=True, kw_only=True):
    """What a saturated system serves; `run` is the step that showed it best, empty where it was stated.

    `limit` is what bound it, and `reason` the evidence for that. `filled`: the server was seen to be saturated.
    """

    per_s: float
    ci95: Interval | None = None
    run: str = ""
    tokens_per_s: float | None = None
    tokens_ci95: Interval | None = None
    limit: Limit | None = None
    reason: str = ""
    filled: bool = True


def capacity(asked: Asked, finished: Sequence[Finished]) -> Capacity | Step | Done:
    """Return the capacity that was stated, else what a saturated closed loop served, else the step that will tell.

    Concurrency doubles until requests wait in 95 % of the scrapes, or a doubling gains under 3 %. No later step moves
    it, so that levels that are shares of it stay.
    """
    if asked.parameters.capacity:
        return Capacity(per_s=asked.parameters.capacity, tokens_per_s=asked.parameters.capacity_tokens)
    steps = of_kind(finished, SATURATE)
    if (decided := saturation(asked, steps, confirm=False)) is not None:
        return decided
    known = measured_capacity(steps)
    if known is None or not known.filled:
        most = max(each.step.level for each in steps)
        return Done(
            reason=f"the server was never full, not even by {most:g} requests in flight: its capacity is not known; "
            "state it (--capacity), or allow more in flight (--concurrency)",
            complete=False,
        )
    return known


def saturation(asked: Asked, finished: Sequence[Finished], *, confirm: bool) -> Step | Done | None:
    """Return the next closed loop on the way to the saturated system, None where it is reached or out of reach.

    confirm  a step that saturates is not enough: a doubling must have gained nothing
    """
    steps = sorted(of_kind(finished, SATURATE), key=lambda each: each.step.level)
    most = asked.parameters.concurrency or MOST_CONCURRENCY
    if not steps:
        return _closed(asked, finished, min(FIRST_CONCURRENCY, most))
    last = steps[-1].outcome
    if not last.completed_per_s:
        length = f"{last.window.duration_s:.0f} s" if last.window else "nothing"
        return Done(
            reason=f"no request ended ok in the {length} that count of {steps[-1].step.label}: a step must be longer "
            "than a request takes (--duration), and requests must succeed",
            complete=False,
        )
    if _is_full(last) and not confirm:
        return None
    if len(steps) > 1 and _served(steps[-1]) < (1 + GAIN) * max(_served(each) for each in steps[:-1]):
        return None
    level = min(2 * round(steps[-1].step.level), most)
    return _closed(asked, finished, level) if level > steps[-1].step.level else None


def _served(each: Finished) -> float:
    """Return what a step served a second: output tokens, which vary least by chance, else requests."""
    return each.outcome.output_tokens_per_s or each.outcome.completed_per_s or 0.0


def _is_full(outcome: Outcome) -> bool:
    return outcome.queued_ratio is not None and outcome.queued_ratio >= ALWAYS


def _closed(asked: Asked, finished: Sequence[Finished], level: int) -> Step:
    duration_s = asked.parameters.duration or DEFAULT_S
    return fresh(asked, finished, f"closed-{level}", "closed", level, kind=SATURATE, duration=duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    """What a full system serves, as stated or as measured, and the step that shows it, to be repeated with others."""

    per_s: float
    step: Step


def saturated(asked: Asked, finished: Sequence[Finished]) -> Saturated | Step | Done:
    """Return what the first configuration serves when it is full, or the step that will tell.

    Its throughput is what others are compared with: it is measured where the capacity is stated, too.
    """
    ended = of_kind(finished, SATURATE)
    limit = capacity(replace(asked, parameters=replace(asked.parameters, capacity=None)), ended)
    best = fullest(ended)
    if isinstance(limit, Step | Done):
        return limit
    if best is None:
        return Done(reason="no saturated step has been run", complete=False)
    return Saturated(per_s=asked.parameters.capacity or limit.per_s, step=replace(best.step, repeat=0))


def fullest(finished: Sequence[Finished]) -> Finished | None:
    """Return the saturated step of the first configuration that served most."""
    ended = of_kind(finished, SATURATE)
    return max(ended, key=lambda each: each.outcome.output_tokens_per_s or 0.0, default=None)


def measured_capacity(finished: Sequence[Finished]) -> Capacity | None:
    """Return what saturated steps served, pooled: closed loops, and open ones that grew; None where no step served.

    Where the throughput falls with the number in flight, as by preemptions, what is within 3 % of the largest counts.
    """
    closed = [each for each in of_kind(finished, SATURATE) if each.outcome.completed_per_s]
    if not closed:
        return None
    best = max(closed, key=_served)
    limit, reason, filled = _binding(closed, best)
    pooled = [best]
    if filled:
        near = [each for each in closed if _served(each) >= (1 - GAIN) * _served(best) and _is_full(each.outcome)]
        grown = [each for each in finished if each.step.load == "open" and each.outcome.verdict == "growing"]
        pooled += [each for each in near if each is not best]
        pooled += [each for each in grown if _is_full(each.outcome) and each.outcome.completed_per_s]
    tokens, tokens_ci95 = _pooled(pooled, "output_tokens_per_s", "output_tokens_ci95")
    per_s, ci95 = _by_tokens(finished, tokens, tokens_ci95) or _pooled(pooled, "completed_per_s", "throughput_ci95")
    return Capacity(
        per_s=per_s,
        ci95=ci95,
        run=best.run,
        tokens_per_s=tokens,
        tokens_ci95=tokens_ci95,
        limit=limit,
        reason=reason,
        filled=filled,
    )


def _binding(closed: Sequence[Finished], best: Finished) -> tuple[Limit | None, str, bool]:
    """Return what bound the saturated steps, the evidence, and whether the server was full."""
    by_level = sorted(closed, key=lambda each: each.step.level)
    last = by_level[-1].outcome
    if _is_full(best.outcome) or _is_full(last):
        of = best.outcome if _is_full(best.outcome) else last
        return of.limit, of.limit_reason, True
    if len(by_level) > 1 and _served(by_level[-1]) < (1 + GAIN) * _served(by_level[-2]):
        before = by_level[-2]
        levels = f"from {before.step.level:g} to {by_level[-1].step.level:g} requests in flight"
        gain = 100 * (_served(by_level[-1]) / _served(before) - 1)
        ran, then = before.outcome.running_mean, last.running_mean
        if ran and then and then > 1.3 * ran:
            said = f"{levels} the engine ran {ran:.0f}, then {then:.0f} at once, and served {gain:+.1f} %"
            return "steps", said, True
        return "unknown", f"{levels} the throughput moved by {gain:+.1f} %; {last.limit_reason}", True
    return last.limit, last.limit_reason, False


def _by_tokens(
    finished: Sequence[Finished], tokens_per_s: float, ci95: Interval | None
) -> tuple[float, Interval | None] | None:
    """Return how many requests a second so many tokens a second are, by the mean of all requests of the study.

    Those of one step are longer or shorter by chance, and it serves fewer or more of them in its time.
    """
    steps = [each.outcome for each in finished if each.outcome.output_tokens]
    count, tokens = sum(each.ok for each in steps), sum(each.output_tokens for each in steps)
    if not (tokens_per_s and tokens):
        return None
    per_s = tokens_per_s * count / tokens
    if ci95 is None:
        return per_s, None
    square = sum(each.ok * (each.output_tokens_std or 0.0) ** 2 for each in steps) / count
    chance = Z95 * math.sqrt(square / count) * count / tokens
    half = per_s * math.hypot((ci95[1] - ci95[0]) / 2 / tokens_per_s, chance)
    return per_s, (per_s - half, per_s + half)


def _pooled(steps: Sequence[Finished], name: str, interval: str) -> tuple[float, Interval | None]:
    """Return the rate over the windows of several steps together, and its interval from theirs."""
    lengths = np.array([each.outcome.window.duration_s if each.outcome.window else 0.0 for each in steps])
    rates = np.array([getattr(each.outcome, name) or 0.0 for each in steps])
    shares = lengths / lengths.sum()
    per_s = float(shares @ rates)
    ends = [getattr(each.outcome, interval) for each in steps]
    if not all(ends):
        return per_s, None
    halves = np.array([(high - low) / 2 for low, high in ends])
    half = math.sqrt(float(((shares * halves) ** 2).sum()))
    return per_s, (per_s - half, per_s + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """What open loops showed: the highest level that was stable below all that grew, and the lowest that grew.

    contradictions  pairs of a stable level and a lower one that grew
    undecided       levels that were not decided even in a longer step
    """

    stable: Finished | None
    growing: Finished | None
    contradictions: int
    undecided: tuple[Finished, ...]


def load_of(each: Finished, capacity: Capacity) -> float:
    """Return the load that a step realised, requests/s: by the output tokens that were asked for, where these are known
    (a step of long requests is a higher load), else by the requests.
    """
    outcome = each.outcome
    if outcome.realised_tokens_per_s and capacity.tokens_per_s:
        return outcome.realised_tokens_per_s / capacity.tokens_per_s * capacity.per_s
    return outcome.realised_per_s or each.step.level


def bracket(levels: Sequence[Finished], limit: Capacity) -> Bracket:
    """Return what open-loop levels [n] say of where load ceases to be sustained; verdicts go by the realised load."""
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


def next_step(asked: Asked, finished: Sequence[Finished]) -> Step | Done:
    """Return the next step of the search for the maximum throughput: (a) closed loops until the server is full, (b)
    open loops around what it then serves, (c) open loops where the objectives are reached.
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


def _next_level(asked: Asked, levels: Sequence[Finished], limit: Capacity) -> tuple[float, int] | None:
    """Return the next rate of the open-loop search, and how many times as long its step is; None: it has ended."""
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


def _open(asked: Asked, finished: Sequence[Finished], kind: str, rate: float, times: int) -> Step:
    label = f"open-{rate:.3g}" + ("-longer" if times > 1 else "")
    options = {"slo": asked.parameters.slo} if asked.parameters.slo else {}
    duration_s = times * (asked.parameters.duration or DEFAULT_S)
    return fresh(asked, finished, label, "open", rate, kind=kind, duration=duration_s, options=options)


def _next_at_slo(asked: Asked, finished: Sequence[Finished], limit: Capacity) -> float | Done:
    """Return the next rate of the search for the load at which the objectives are reached."""
    judged = _judged(finished)
    met, failed = (
        [load_of(each, limit) for each in judged if each.outcome.slo_met is is_met] for is_met in (True, False)
    )
    if not failed:
        return Done(reason="the objectives hold up to the highest load that is sustained")
    is_last = sum(each.step.kind == AT_SLO for each in judged) >= MOST_SLO_LEVELS[asked.scale]
    if not met:
        floor = asked.parameters.min or 0.0
        rates = [rate for share in SLO_SHARES if (rate := max(share * limit.per_s, floor)) < 0.95 * min(failed)]
        if not rates or is_last:
            return Done(reason="the objectives fail even at the lowest load that was tried")
        return rates[0]
    reached = crossing_of(finished, limit)
    if is_last or _is_narrow(reached):
        return Done(reason="the load at which the objectives are reached is known")
    at = reached.at if reached is not None and reached.at is not None else (max(met) + min(failed)) / 2
    # A step tells most at the load that is sought, and little where another has been.
    places = (at * (1 + APART * offset) for offset in (0, 1, -1, 2, -2, 3, -3, 4, -4))
    return next((place for place in places if all(abs(place / load - 1) > APART / 2 for load in (*met, *failed))), at)


def _judged(finished: Sequence[Finished]) -> list[Finished]:
    """Return the open loops that were judged by objectives."""
    return [each for each in finished if each.step.load == "open" and each.outcome.slo is not None]


def _is_narrow(reached: Crossing | None) -> bool:
    if reached is None or reached.at is None or None in reached.ci95:
        return False
    low, high = reached.ci95
    return ((high or 0) - (low or 0)) / 2 < NARROW * reached.at


def crossing_of(finished: Sequence[Finished], limit: Capacity) -> Crossing | None:
    """Return the load at which the first of the objectives of percentiles is reached, by the open loops.

    None without two that had a steady state, and where it lies outside all levels. The steps have one tau: by its
    own, a step would count the less the more it has beyond the bound.
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
        if reached.at is not None and min(loads) <= reached.at <= max(loads):
            crossings.append(reached)
    return min(crossings, key=lambda each: each.at or 0, default=None)
