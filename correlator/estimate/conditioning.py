"""Queue and prefill time of each request of one engine, from its intervals: conditioned on what is known exactly.

What is known exactly of a request is its wait; of an interval, the sums of queue and prefill time over its members.
Every member has a normal prior of (queue, prefill, rest) with independent parts, learned on those sums (`priors`).
Given that the three add up to the wait, its posterior has rank two; given the sums over its interval, all members of
the interval are linked by a matrix of two by two. Both steps are closed forms, so that the whole costs no more than a
pass over the requests. Unmatched requests in an interval widen its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sidelight.correlator.estimate.assignment import Members
from sidelight.correlator.estimate.intervals import IntervalBuckets, ScrapeIntervals
from sidelight.correlator.estimate.priors import (
    LEAST_INTERVALS,
    LEAST_S,
    Network,
    TrainingData,
    prefill_prior,
    queue_prior,
    rest_prior,
)
from sidelight.correlator.estimate.regression import around
from sidelight.correlator.estimate.waits import Waits
from sidelight.rundir.columns import Floats, Indices
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.stats import Missing

ROUNDS = 25
LEAST_VARIANCE = 1e-14  # s^2; below it a part is known
SLACK_S = 1e-9
HALF = 0.6  # standard deviation of half a normal, of that of the whole
LOCAL_S = 5.0  # an unmatched request is taken for one of our requests that ended so near
UNLINKED = 1e9  # s^2: a sum that says nothing
SURPRISING = 2.5
SCALE_COUNT = 6.0  # degrees of freedom of the scale of an interval's variances; calibrated as `regression.FEW`


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """For m requests: queue, prefill and rest and their standard deviations [m, 3], s; the interval of each, or -1."""

    value: Floats
    sd: Floats
    interval: Indices


def estimate_parts(
    waits: Waits, intervals: ScrapeIntervals, members: Members, network: Network, *, origin_ns: int, never_waiting: bool
) -> Estimate | Missing:
    """Estimate all requests that had a first token; `waits`, `network` and `members.interval` are of these.

    Missing: fewer than LEAST_INTERVALS intervals to learn from.
    """
    known = np.isfinite([intervals.sums["queue"], intervals.sums["prefill"]]).all(axis=0)
    counted = ~intervals.lost & (intervals.count > 0) & known
    interval = np.where((members.interval >= 0) & counted[members.interval], members.interval, -1)
    usable = np.flatnonzero(np.bincount(interval[interval >= 0], minlength=len(intervals)) * ~members.inconsistent)
    if len(usable) < LEAST_INTERVALS:
        return Missing(
            f"our requests ended in {count_of(len(usable), 'usable scrape interval')}; {LEAST_INTERVALS} are needed"
        )
    data = TrainingData(waits=waits, intervals=intervals, members=members, interval=interval, usable_intervals=usable)
    server_s = np.maximum(waits.wait_s - network.value_s, 0.0)
    prefill = prefill_prior(data)
    rest = rest_prior(data, server_s, network)
    queue = queue_prior(data, server_s - prefill.mean, never_waiting=never_waiting)
    mean = np.column_stack((queue.mean, prefill.mean, rest.mean))
    variance = np.column_stack((queue.variance, prefill.variance, rest.variance))
    if never_waiting:
        spread = np.sqrt(variance.sum(axis=1) + network.variance)
        surprise = np.abs(server_s - mean.sum(axis=1)) / (SURPRISING * spread)
        variance *= np.maximum(surprise, 1.0)[:, None] ** 2
    centre_s = ((intervals.start_ns + intervals.end_ns) // 2 - origin_ns) / 1e9
    return _conditioned(data, network, mean, variance, centre_s)


def mark_impossible(waits: Waits, intervals: ScrapeIntervals, members: Members) -> Members:
    """Mark intervals as inconsistent if their queue and prefill exceed the wait of their members.

    Only intervals without other traffic can be.
    """
    inside = members.interval >= 0
    waited = np.bincount(members.interval[inside], waits.wait_s[inside], minlength=len(intervals))
    count = np.bincount(members.interval[inside], minlength=len(intervals))
    served = intervals.sums["queue"] + intervals.sums["prefill"]
    impossible = (members.unmatched == 0) & (count > 0) & (served > waited + count * members.jitter_s)
    return replace(members, inconsistent=members.inconsistent | impossible, verified=members.verified & ~impossible)


def _conditioned(data: TrainingData, network: Network, mean: Floats, variance: Floats, centre_s: Floats) -> Estimate:
    waits, intervals, interval, members = data.waits, data.intervals, data.interval, data.members
    sums = np.column_stack((intervals.sums["queue"], intervals.sums["prefill"]))
    unmatched = members.unmatched.astype(np.float64)
    noise = np.zeros(sums.shape)
    for part in (0, 1):
        local = around(waits.end_s, mean[:, part], centre_s, LOCAL_S)
        spread = local.variance + variance[:, part].mean() * (part == 1)
        sums[:, part] = np.maximum(sums[:, part] - unmatched * local.mean, 0.0)
        # An inconsistent interval has a member of another interval: one too many, and one missing.
        noise[:, part] = (unmatched + 2.0 * members.inconsistent) * (spread + LEAST_S**2)
    low, high = _box(data)
    # A request in no interval gets one of its own, of which nothing is known.
    single = np.flatnonzero(interval < 0)
    place = interval.copy()
    place[single] = len(intervals) + np.arange(len(single))
    problem = Problem(
        mean=mean,
        variance=variance,
        low=np.column_stack((low, np.zeros(len(low)))),
        high=np.column_stack((high, waits.wait_s)),
        wait=np.maximum(waits.wait_s - network.value_s, 0.0),
        wait_variance=network.variance,
        interval=place,
        sums=np.vstack((sums, np.zeros((len(single), 2)))),
        noise=np.vstack((noise, np.full((len(single), 2), UNLINKED))),
    )
    solution = solve(problem)
    ranked = _ranked_box(problem, solution, data)
    if (ranked.low > solution.value + 1e-9).any() or (ranked.high < solution.value - 1e-9).any():
        solution = solve(ranked)
    return Estimate(value=solution.value, sd=solution.sd, interval=interval)


def _box(data: TrainingData) -> tuple[Floats, Floats]:
    """Return bounds [m, 2] of queue and prefill: not below 0, not above the wait, nor above the interval's sum."""
    waits, intervals, interval, members = data.waits, data.intervals, data.interval, data.members
    trusted = (interval >= 0) & ~members.inconsistent[interval]
    low = np.zeros((len(interval), 2))
    high = np.repeat(waits.wait_s[:, None], 2, axis=1)
    for part, name in enumerate(("queue", "prefill")):
        high[:, part] = np.where(trusted, np.minimum(high[:, part], intervals.sums[name][interval]), high[:, part])
        if name in intervals.buckets:
            edges = _outermost(intervals.buckets[name])
            low[:, part] = np.where(trusted, np.minimum(edges[interval, 0], high[:, part]), 0.0)
            high[:, part] = np.where(trusted, np.minimum(edges[interval, 1], high[:, part]), high[:, part])
    return low, np.maximum(high, 0.0)


def _outermost(buckets: IntervalBuckets) -> Floats:
    """Return the edges [C, 2] of each interval's occupied buckets.

    They are the lower edge of the lowest and the upper edge of the highest.
    """
    held = buckets.counts > 0
    lower = np.concatenate([[0.0], np.maximum(buckets.bounds[:-1], 0.0)])
    first = held.argmax(axis=1)
    last = held.shape[1] - 1 - held[:, ::-1].argmax(axis=1)
    some = held.any(axis=1)
    return np.column_stack((np.where(some, lower[first], 0.0), np.where(some, buckets.bounds[last], np.inf)))


def _ranked_box(problem: Problem, solution: Solution, data: TrainingData) -> Problem:
    """Narrow the box: the r-th smallest estimate of an interval lies in the bucket of its r-th smallest observation.

    Unmatched requests may have any rank, so that with f of them it lies between the buckets of ranks r and r + f.
    """
    interval, members = data.interval, data.members
    low, high = problem.low.copy(), problem.high.copy()
    for part, name in enumerate(("queue", "prefill")):
        buckets = data.intervals.buckets.get(name)
        if buckets is None:
            continue
        lower = np.concatenate([[0.0], np.maximum(buckets.bounds[:-1], 0.0)])
        upto = np.cumsum(buckets.counts, axis=1)
        order = np.lexsort((solution.value[:, part], interval))
        order = order[interval[order] >= 0]
        place = interval[order]
        rank = np.arange(len(place)) - np.searchsorted(place, place)
        fits = ~members.inconsistent[place] & (rank + members.unmatched[place] < upto[place, -1])
        order, place, rank = order[fits], place[fits], rank[fits]
        first = (upto[place] <= rank[:, None]).sum(axis=1)
        last = (upto[place] <= (rank + members.unmatched[place])[:, None]).sum(axis=1)
        low[order, part] = np.minimum(np.maximum(low[order, part], lower[first]), high[order, part])
        high[order, part] = np.maximum(np.minimum(high[order, part], buckets.bounds[last]), low[order, part])
    return replace(problem, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """m members of C intervals, seconds. Columns are queue, prefill and rest.

    mean, variance, low, high [m, 3]   the prior and the box
    wait, wait_variance [m]            what the three add up to, and how well that is known
    interval [m]                       0..C-1
    sums [C, 2], noise [C, 2]          of queue and prefill time over the members, and the variance of these
    """

    mean: Floats
    variance: Floats
    low: Floats
    high: Floats
    wait: Floats
    wait_variance: Floats
    interval: Indices
    sums: Floats
    noise: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Estimates and standard deviations [m, 3]."""

    value: Floats
    sd: Floats


def solve(problem: Problem) -> Solution:
    """Condition parts on the sums, and fix those outside the box at its edge.

    While parts lie outside the box, the worst of each interval is fixed at its edge and the rest is conditioned again.
    The sums come out exactly where the box allows it and their noise is 0. The standard deviation of a part that was
    fixed is that of the half of its normal which the box leaves; of what hangs on it, in its interval, it is no less.
    """
    fixed = np.zeros(problem.mean.shape, dtype=np.bool_)
    mean = problem.mean
    value, sd = _posterior(problem, mean, problem.variance)
    least_sd = HALF * sd
    for _ in range(ROUNDS):
        nearest = np.clip(value, problem.low, problem.high)
        excess = np.where(fixed, 0.0, np.abs(value - nearest))
        worst = np.zeros(len(problem.sums))
        np.maximum.at(worst, problem.interval, excess.max(axis=1))
        chosen = (excess > SLACK_S) & (excess >= 0.5 * worst[problem.interval][:, None])
        if not chosen.any():
            break
        fixed |= chosen
        mean = np.where(chosen, nearest, mean)
        value, sd = _posterior(problem, mean, np.where(fixed, 0.0, problem.variance))
    value = _balanced(replace(problem, mean=np.clip(value, problem.low, problem.high)))
    hangs = np.bincount(problem.interval, fixed.any(axis=1), minlength=len(problem.sums))[problem.interval] > 0
    sd = np.where(hangs[:, None], np.maximum(sd, least_sd), sd)
    return Solution(value=value, sd=np.where(fixed, least_sd, sd))


def _posterior(problem: Problem, mean: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Return means and standard deviations [m, 3] given waits and sums.

    All variances of an interval have an unknown scale, whose prior is inverse chi-square of mean near 1: sums far from
    what the prior expects make every member of their interval less sure (Gelman et al. 2013, section 3.2).
    """
    variance = np.maximum(variance, LEAST_VARIANCE)
    total = variance.sum(axis=1) + problem.wait_variance
    value = mean + variance * ((problem.wait - mean.sum(axis=1)) / total)[:, None]
    # Covariance of each part with queue and with prefill, given the wait: [m, 3, 2].
    linked = -variance[:, :, None] * variance[:, None, :2] / total[:, None, None]
    linked[:, 0, 0] += variance[:, 0]
    linked[:, 1, 1] += variance[:, 1]
    intervals = len(problem.sums)
    joint = np.zeros((intervals, 2, 2))
    np.add.at(joint, problem.interval, linked[:, :2, :])
    joint[:, [0, 1], [0, 1]] += problem.noise + LEAST_VARIANCE
    missing = problem.sums.copy()
    np.subtract.at(missing, problem.interval, value[:, :2])
    inverse = np.linalg.inv(joint)
    push = np.einsum("cab,cb->ca", inverse, missing)
    value = value + np.einsum("mab,mb->ma", linked, push[problem.interval])
    without_sums = variance - variance**2 / total[:, None]
    learned = np.einsum("mab,mbc,mac->ma", linked, inverse[problem.interval], linked)
    scale = (SCALE_COUNT + np.einsum("ca,ca->c", missing, push)) / (SCALE_COUNT + 2.0)
    return value, np.sqrt(np.maximum(without_sums - learned, 0.0) * scale[problem.interval, None])


def _balanced(problem: Problem) -> Floats:
    """Return values with the remainder of each interval's sums distributed to members with room."""
    value = problem.mean.copy()
    for part in (0, 1):
        known = problem.noise[:, part] == 0
        left = problem.sums[:, part] - np.bincount(problem.interval, value[:, part], minlength=len(problem.sums))
        left = np.where(known, left, 0.0)[problem.interval]
        room = np.where(left > 0, problem.high[:, part] - value[:, part], value[:, part] - problem.low[:, part])
        rooms = np.bincount(problem.interval, room, minlength=len(problem.sums))[problem.interval]
        share = np.divide(room, rooms, out=np.zeros(len(room)), where=rooms > 0)
        value[:, part] = np.clip(value[:, part] + left * share, problem.low[:, part], problem.high[:, part])
    return value
