"""Conditioning on what is known exactly: each request's wait, and the sums of queue and prefill time over its cell.

Every member has a normal prior of (queue, prefill, rest) with independent parts. Given that the three add up to the
wait, its posterior has rank two; given the sums over its cell, all members of the cell are linked by a matrix of two by
two. Both steps are closed forms, so that the whole costs no more than a pass over the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rundir.columns import Floats, Indices

ROUNDS = 25
LEAST_VARIANCE = 1e-14  # s^2; below it a part is known
SLACK_S = 1e-9
HALF = 0.6  # standard deviation of half a normal, of that of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """m members of C cells, seconds. Columns are queue, prefill and rest.

    mean, variance, low, high [m, 3]   the prior and the box
    wait, wait_variance [m]            what the three add up to, and how well that is known
    cell [m]                           0..C-1
    sums [C, 2], noise [C, 2]          of queue and prefill time over the members, and the variance of these
    """

    mean: Floats
    variance: Floats
    low: Floats
    high: Floats
    wait: Floats
    wait_variance: Floats
    cell: Indices
    sums: Floats
    noise: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Estimates and standard deviations [m, 3]."""

    value: Floats
    sd: Floats


def solve(problem: Problem) -> Solution:
    """Condition, and while parts lie outside the box fix the worst of each cell at its edge and condition again.

    The sums come out exactly where the box allows it and their noise is 0. The standard deviation of a part that was
    fixed is that of the half of its normal which the box leaves; of what hangs on it, in its cell, it is no less.
    """
    fixed = np.zeros(problem.mean.shape, dtype=np.bool_)
    mean = problem.mean
    value, sd = _posterior(problem, mean, problem.variance)
    first_sd = sd
    for _ in range(ROUNDS):
        nearest = np.clip(value, problem.low, problem.high)
        excess = np.where(fixed, 0.0, np.abs(value - nearest))
        worst = np.zeros(len(problem.sums))
        np.maximum.at(worst, problem.cell, excess.max(axis=1))
        chosen = (excess > SLACK_S) & (excess >= 0.5 * worst[problem.cell][:, None])
        if not chosen.any():
            break
        fixed |= chosen
        mean = np.where(chosen, nearest, mean)
        value, sd = _posterior(problem, mean, np.where(fixed, 0.0, problem.variance))
    value = _balanced(replace(problem, mean=np.clip(value, problem.low, problem.high)))
    least_sd = HALF * first_sd
    hangs = np.bincount(problem.cell, fixed.any(axis=1), minlength=len(problem.sums))[problem.cell] > 0
    sd = np.where(hangs[:, None], np.maximum(sd, least_sd), sd)
    return Solution(value=value, sd=np.where(fixed, least_sd, sd))


def _posterior(problem: Problem, mean: Floats, variance: Floats) -> tuple[Floats, Floats]:
    variance = np.maximum(variance, LEAST_VARIANCE)
    total = variance.sum(axis=1) + problem.wait_variance
    value = mean + variance * ((problem.wait - mean.sum(axis=1)) / total)[:, None]
    # Covariance of each part with queue and with prefill, given the wait: [m, 3, 2].
    linked = -variance[:, :, None] * variance[:, None, :2] / total[:, None, None]
    linked[:, 0, 0] += variance[:, 0]
    linked[:, 1, 1] += variance[:, 1]
    cells = len(problem.sums)
    joint = np.zeros((cells, 2, 2))
    np.add.at(joint, problem.cell, linked[:, :2, :])
    joint[:, [0, 1], [0, 1]] += problem.noise + LEAST_VARIANCE
    missing = problem.sums.copy()
    np.subtract.at(missing, problem.cell, value[:, :2])
    inverse = np.linalg.inv(joint)
    push = np.einsum("cab,cb->ca", inverse, missing)
    value = value + np.einsum("mab,mb->ma", linked, push[problem.cell])
    own = variance - variance**2 / total[:, None]
    learned = np.einsum("mab,mbc,mac->ma", linked, inverse[problem.cell], linked)
    return value, np.sqrt(np.maximum(own - learned, 0.0))


def _balanced(problem: Problem) -> Floats:
    """Give what is left of a cell's sums to the members that have room for it."""
    value = problem.mean.copy()
    for part in (0, 1):
        known = problem.noise[:, part] == 0
        left = problem.sums[:, part] - np.bincount(problem.cell, value[:, part], minlength=len(problem.sums))
        left = np.where(known, left, 0.0)[problem.cell]
        room = np.where(left > 0, problem.high[:, part] - value[:, part], value[:, part] - problem.low[:, part])
        rooms = np.bincount(problem.cell, room, minlength=len(problem.sums))[problem.cell]
        share = np.divide(room, rooms, out=np.zeros(len(room)), where=rooms > 0)
        value[:, part] = np.clip(value[:, part] + left * share, problem.low[:, part], problem.high[:, part])
    return value
