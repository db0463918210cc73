"""Capacity of a saturated system, and the steps that show it.

Levels of load are shares of the capacity. By the saturation rule the stability limit of an open loop is the throughput
of the saturated system (Baccelli and Foss 1995): a closed loop that always leaves requests waiting shows it in one
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sidelight.methodology.study.model import Done, Finished, Limit, Outcome, Step, StudySettings
from sidelight.methodology.study.planning import SENTINEL, counting, fresh, level_label, of_kind, valid
from sidelight.rundir.columns import Floats
from sidelight.rundir.printable.numbers import count_of

SATURATE = "saturate"
Interval = tuple[float, float]

FIRST_CONCURRENCY, MOST_CONCURRENCY = 64, 1024
ALWAYS = 0.95  # share of the scrapes that saw requests wait: saturated
GAIN = 0.03  # by which a doubling must raise the throughput, to go on
DEFAULT_S = 60.0
Z95 = 1.96


class Capacity(Struct, frozen=True, kw_only=True):
    """Capacity of a saturated system, as stated or as measured.

    `run` is the step that showed it best, empty where it was stated, and `runs` are all with pooled rates. `limit` is
    what bound it, and `reason` the evidence for that. `filled`: the server was seen to be saturated. `varied`: the
    steps differ by more than chance.
    """

    per_s: float
    ci95: Interval | None = None
    run: str = ""
    runs: tuple[str, ...] = ()
    tokens_per_s: float | None = None
    tokens_ci95: Interval | None = None
    limit: Limit | None = None
    reason: str = ""
    filled: bool = True
    varied: bool = False


def load_of(each: Finished, capacity: Capacity) -> float:
    """Return the load realised by a step, requests/s.

    It is counted in the output tokens that were asked for, where these are known (a step of long requests is a higher
    load), else in requests.
    """
    outcome = each.outcome
    if outcome.realised_tokens_per_s and capacity.tokens_per_s:
        return outcome.realised_tokens_per_s / capacity.tokens_per_s * capacity.per_s
    return outcome.realised_per_s or each.step.level


def capacity(asked: StudySettings, finished: Sequence[Finished]) -> Capacity | Step | Done:
    """Return the stated capacity, else that of a saturated closed loop, else the next step.

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
            reason=f"the server was never full, not even by {count_of(most, 'request')} in flight: its capacity is "
            "not known; state it (--capacity), or allow more in flight (--concurrency)",
            complete=False,
        )
    return known


def capacity_shown(asked: StudySettings, finished: Sequence[Finished]) -> Capacity | None:
    """Return the capacity that a study shows in the end, as its result has it; None where it shows none.

    Its levels are shares of what its first steps showed; later ones that were saturated, too, are in this.
    """
    known = capacity(asked, counting(finished))
    if not isinstance(known, Capacity):
        return None
    return known if asked.parameters.capacity else measured_capacity(valid(finished))


def saturation(asked: StudySettings, finished: Sequence[Finished], *, confirm: bool) -> Step | Done | None:
    """Return the next closed loop towards saturation, None if it is reached or unreachable.

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
    """Return the throughput of a step per second: output tokens, the least random, else requests."""
    return each.outcome.output_tokens_per_s or each.outcome.completed_per_s or 0.0


def _is_full(outcome: Outcome) -> bool:
    return outcome.queued_ratio is not None and outcome.queued_ratio >= ALWAYS


def _closed(asked: StudySettings, finished: Sequence[Finished], level: int) -> Step:
    duration_s = asked.parameters.duration or DEFAULT_S
    return fresh(asked, finished, f"closed-{level_label(level)}", "closed", level, kind=SATURATE, duration=duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    """Throughput of a full system, stated or measured, and the step that shows it.

    The step is to be repeated with others.
    """

    per_s: float
    step: Step


def saturated(asked: StudySettings, finished: Sequence[Finished]) -> Saturated | Step | Done:
    """Return the first configuration's throughput when it is full, or the next step.

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
    """Return the pooled throughput of saturated steps: closed loops, and open ones that grew; None where no step
    served.

    Where the throughput falls with the number in flight, as by preemptions, what is within 3 % of the largest counts,
    and what chance can explain. A closed loop that was repeated at the end counts in any case. Where the steps differ
    by more than chance, the speed of the system varied, and the interval holds that.
    """
    closed = [each for each in of_kind(finished, SATURATE) if each.outcome.completed_per_s]
    if not closed:
        return None
    best = max(closed, key=_served)
    limit, reason, filled = _binding(closed, best)
    pooled = [best]
    if filled:
        near = [each for each in closed if _is_full(each.outcome) and not _falls(each, best)]
        near += [each for each in of_kind(finished, SENTINEL) if each.step.load == "closed" and _served(each)]
        grown = [each for each in finished if each.step.load == "open" and each.outcome.verdict == "growing"]
        pooled += [each for each in near if each is not best]
        pooled += [each for each in grown if _is_full(each.outcome) and each.outcome.completed_per_s]
    tokens, tokens_ci95, varied = _pooled(pooled, "output_tokens_per_s", "output_tokens_ci95")
    per_s, ci95 = _by_tokens(finished, tokens, tokens_ci95) or _pooled(pooled, "completed_per_s", "throughput_ci95")[:2]
    return Capacity(
        per_s=per_s,
        ci95=ci95,
        run=best.run,
        runs=tuple(each.run for each in pooled),
        tokens_per_s=tokens,
        tokens_ci95=tokens_ci95,
        limit=limit,
        reason=reason,
        filled=filled,
        varied=varied,
    )


def _binding(closed: Sequence[Finished], best: Finished) -> tuple[Limit | None, str, bool]:
    """Return the limit of the saturated steps, the evidence, and whether the server was full."""
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
    """Return the requests/s at `tokens_per_s`, by the mean of all requests of the study.

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


def _falls(each: Finished, best: Finished) -> bool:
    """Return whether a step served less than the best one: by 3 % and by more than the chance of both."""
    ends = [step.outcome.output_tokens_ci95 for step in (each, best)]
    chance = math.hypot(*((end[1] - end[0]) / 2 for end in ends if end))
    return _served(each) < _served(best) - max(GAIN * _served(best), chance)


def _pooled(steps: Sequence[Finished], name: str, interval: str) -> tuple[float, Interval | None, bool]:
    """Return the pooled rate of several steps, its interval, and whether they vary.

    The rate is over their windows together, its interval from theirs. Where the rates differ by more than their
    intervals explain, that variance between steps (DerSimonian and Laird 1986, "Meta-analysis in clinical trials")
    widens it as a whole, not as that of a mean: at another time the system is as fast as in any of the steps.
    """
    lengths = np.array([each.outcome.window.duration_s if each.outcome.window else 0.0 for each in steps])
    rates = np.array([getattr(each.outcome, name) or 0.0 for each in steps])
    shares = lengths / lengths.sum()
    per_s = float(shares @ rates)
    ends = [getattr(each.outcome, interval) for each in steps]
    if not all(ends):
        return per_s, None, False
    halves = np.array([(high - low) / 2 for low, high in ends])
    between, is_chance = _between(rates, halves / Z95)
    half = math.sqrt(float(((shares * halves) ** 2).sum()) + Z95**2 * between)
    return per_s, (max(0.0, per_s - half), per_s + half), not is_chance


def _between(rates: Floats, errors: Floats) -> tuple[float, bool]:
    """Return the excess variance of rates [n], and whether chance explains it.

    It is beyond that of their standard errors [n]. By moments, and by Cochran's Q at 5 %.
    """
    if len(rates) < 2 or not errors.all():
        return 0.0, True
    from scipy.special import chdtri  # noqa: PLC0415  150 ms, and a run without requests needs none of SciPy

    weights = 1 / errors**2
    mean = float(weights @ rates / weights.sum())
    q, expected = float(weights @ (rates - mean) ** 2), len(rates) - 1
    between = (q - expected) / float(weights.sum() - (weights**2).sum() / weights.sum())
    return max(0.0, between), bool(q <= chdtri(expected, 0.05))
