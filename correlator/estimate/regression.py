"""Queue and prefill time of each request of one engine, from its cells.

What is known exactly of a request is its wait; of a cell, the sums over its members. Models learned on those sums say
how a wait is likely to divide (`wait_models`), and `condition` makes both hold. Strangers in a cell widen its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from correlator.estimate.assignment import Members
from correlator.estimate.conditioning import Problem, Solution, solve
from correlator.estimate.intervals import Buckets, Cells
from correlator.estimate.network import Network
from correlator.estimate.priors import LEAST_CELLS, LEAST_S, Ground, prefill_prior, queue_prior, rest_prior
from correlator.estimate.wait_models import around
from correlator.estimate.waits import Waits
from rundir.columns import Floats, Indices
from rundir.stats import Missing

LOCAL_S = 5.0  # a stranger is taken for one of our requests that ended so near
UNLINKED = 1e9  # s^2: a sum that says nothing
SURPRISING = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """For m requests, seconds: parts and standard deviations [m, 3] of queue, prefill and rest; bounds [m, 2] of
    queue and prefill, which hold if the request ended in `cell` (-1: in none).
    """

    value: Floats
    sd: Floats
    low: Floats
    high: Floats
    cell: Indices


def estimate(
    waits: Waits, cells: Cells, members: Members, network: Network, *, origin_ns: int, never_waiting: bool
) -> Estimate | Missing:
    """Estimate all requests that had a first token; `waits`, `network` and `members.cell` are of these.

    Missing: fewer than LEAST_CELLS cells to learn from.
    """
    usable = ~cells.lost & (cells.count > 0) & np.isfinite([cells.sums["queue"], cells.sums["prefill"]]).all(axis=0)
    cell = np.where((members.cell >= 0) & usable[members.cell], members.cell, -1)
    taught = np.flatnonzero(np.bincount(cell[cell >= 0], minlength=len(cells)) * ~members.contradicts)
    if len(taught) < LEAST_CELLS:
        return Missing(f"requests of ours ended in {len(taught)} usable scrape intervals; {LEAST_CELLS} are needed")
    ground = Ground(waits=waits, cells=cells, members=members, cell=cell, taught=taught)
    server_s = np.maximum(waits.wait_s - network.value_s, 0.0)
    prefill = prefill_prior(ground)
    rest = rest_prior(ground, server_s, network)
    queue = queue_prior(ground, server_s - prefill.mean, never_waiting=never_waiting)
    mean = np.column_stack((queue.mean, prefill.mean, rest.mean))
    variance = np.column_stack((queue.variance, prefill.variance, rest.variance))
    if never_waiting:
        spread = np.sqrt(variance.sum(axis=1) + network.variance)
        surprise = np.abs(server_s - mean.sum(axis=1)) / (SURPRISING * spread)
        variance *= np.maximum(surprise, 1.0)[:, None] ** 2
    centre_s = ((cells.start_ns + cells.end_ns) // 2 - origin_ns) / 1e9
    return _conditioned(ground, network, mean, variance, centre_s)


def doubted(waits: Waits, cells: Cells, members: Members) -> Members:
    """Note cells of ours alone whose queue and prefill times exceed what their members waited: some member is not."""
    inside = members.cell >= 0
    waited = np.bincount(members.cell[inside], waits.wait_s[inside], minlength=len(cells))
    own = np.bincount(members.cell[inside], minlength=len(cells))
    served = cells.sums["queue"] + cells.sums["prefill"]
    impossible = (members.strangers == 0) & (own > 0) & (served > waited + own * members.jitter_s)
    return replace(members, contradicts=members.contradicts | impossible, verified=members.verified & ~impossible)


def _conditioned(ground: Ground, network: Network, mean: Floats, variance: Floats, centre_s: Floats) -> Estimate:
    waits, cells, cell, members = ground.waits, ground.cells, ground.cell, ground.members
    sums = np.column_stack((cells.sums["queue"], cells.sums["prefill"]))
    strangers = members.strangers.astype(np.float64)
    noise = np.zeros(sums.shape)
    for part in (0, 1):
        local = around(waits.end_s, mean[:, part], centre_s, LOCAL_S)
        spread = local.variance + variance[:, part].mean() * (part == 1)
        sums[:, part] = np.maximum(sums[:, part] - strangers * local.mean, 0.0)
        # In a cell that contradicts some member is another's: one too many, one missing.
        noise[:, part] = (strangers + 2.0 * members.contradicts) * (spread + LEAST_S**2)
    low, high = _box(waits, cells, cell, members)
    # Who is in no cell has one of its own, of which nothing is known.
    single = np.flatnonzero(cell < 0)
    place = cell.copy()
    place[single] = len(cells) + np.arange(len(single))
    problem = Problem(
        mean=mean,
        variance=variance,
        low=np.column_stack((low, np.zeros(len(low)))),
        high=np.column_stack((high, waits.wait_s)),
        wait=np.maximum(waits.wait_s - network.value_s, 0.0),
        wait_variance=network.variance,
        cell=place,
        sums=np.vstack((sums, np.zeros((len(single), 2)))),
        noise=np.vstack((noise, np.full((len(single), 2), UNLINKED))),
    )
    solution = solve(problem)
    ranked = _ranked_box(problem, solution, cells, members, cell)
    if (ranked.low > solution.value + 1e-9).any() or (ranked.high < solution.value - 1e-9).any():
        solution = solve(ranked)
    hard = _hard_bounds(problem, cells, members, cell)
    value = solution.value.copy()
    value[:, :2] = np.clip(value[:, :2], hard[0], hard[1])
    return Estimate(value=value, sd=solution.sd, low=hard[0], high=hard[1], cell=cell)


def _box(waits: Waits, cells: Cells, cell: Indices, members: Members) -> tuple[Floats, Floats]:
    """Return bounds [m, 2] of queue and prefill: not below 0, not above the wait, nor above the cell's sum."""
    trusted = (cell >= 0) & ~members.contradicts[cell]
    low = np.zeros((len(cell), 2))
    high = np.repeat(waits.wait_s[:, None], 2, axis=1)
    for part, name in enumerate(("queue", "prefill")):
        high[:, part] = np.where(trusted, np.minimum(high[:, part], cells.sums[name][cell]), high[:, part])
        if name in cells.buckets:
            edges = _outermost(cells.buckets[name])
            low[:, part] = np.where(trusted, np.minimum(edges[cell, 0], high[:, part]), 0.0)
            high[:, part] = np.where(trusted, np.minimum(edges[cell, 1], high[:, part]), high[:, part])
    return low, np.maximum(high, 0.0)


def _outermost(buckets: Buckets) -> Floats:
    """Return the lower edge of each cell's lowest occupied bucket and the upper one of its highest: [C, 2]."""
    held = buckets.counts > 0
    lower = np.concatenate([[0.0], np.maximum(buckets.bounds[:-1], 0.0)])
    first = held.argmax(axis=1)
    last = held.shape[1] - 1 - held[:, ::-1].argmax(axis=1)
    some = held.any(axis=1)
    return np.column_stack((np.where(some, lower[first], 0.0), np.where(some, buckets.bounds[last], np.inf)))


def _ranked_box(problem: Problem, solution: Solution, cells: Cells, members: Members, cell: Indices) -> Problem:
    """Narrow the box: the r-th smallest estimate of a cell lies in the bucket of its r-th smallest observation.

    Strangers may stand anywhere in the order, so that with f of them it lies between those of ranks r and r + f.
    """
    low, high = problem.low.copy(), problem.high.copy()
    for part, name in enumerate(("queue", "prefill")):
        held = cells.buckets.get(name)
        if held is None:
            continue
        lower = np.concatenate([[0.0], np.maximum(held.bounds[:-1], 0.0)])
        upto = np.cumsum(held.counts, axis=1)
        order = np.lexsort((solution.value[:, part], cell))
        order = order[cell[order] >= 0]
        mine = cell[order]
        rank = np.arange(len(mine)) - np.searchsorted(mine, mine)
        fits = ~members.contradicts[mine] & (rank + members.strangers[mine] < upto[mine, -1])
        order, mine, rank = order[fits], mine[fits], rank[fits]
        found = (upto[mine] <= rank[:, None]).sum(axis=1)
        limit = (upto[mine] <= (rank + members.strangers[mine])[:, None]).sum(axis=1)
        low[order, part] = np.minimum(np.maximum(low[order, part], lower[found]), high[order, part])
        high[order, part] = np.maximum(np.minimum(high[order, part], held.bounds[limit]), low[order, part])
    return replace(problem, low=low, high=high)


def _hard_bounds(problem: Problem, cells: Cells, members: Members, cell: Indices) -> tuple[Floats, Floats]:
    """Return [m, 2] what queue and prefill cannot lie outside of: the box, and what the others leave of the sum."""
    low, high = problem.low[:, :2], problem.high[:, :2]
    alone = (cell >= 0) & ~members.contradicts[cell] & (members.strangers[cell] == 0)
    trusted = (cell >= 0) & ~members.contradicts[cell]
    lows, highs = low.copy(), high.copy()
    for part, name in enumerate(("queue", "prefill")):
        inside = cell >= 0
        lowest = np.bincount(cell[inside], low[inside, part], minlength=len(cells))[cell] - low[:, part]
        highest = np.bincount(cell[inside], high[inside, part], minlength=len(cells))[cell] - high[:, part]
        total = cells.sums[name][cell]
        lows[:, part] = np.where(alone, np.maximum(low[:, part], total - highest), low[:, part])
        highs[:, part] = np.where(trusted, np.minimum(high[:, part], total - lowest), high[:, part])
    highs = np.maximum(highs, 0.0)
    return np.minimum(lows, highs), highs
