"""What is expected of each request before its own cell's sums are looked at: queue, prefill and rest.

All three are learned on the sums of the cells that can be trusted, so that no request needs to be known by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from correlator.estimate.assignment import Members
from correlator.estimate.intervals import Cells
from correlator.estimate.network import Network
from correlator.estimate.step_clock import nearest_step, prefill_features, rest_features
from correlator.estimate.wait_models import Model, Prior, Sums, learn
from correlator.estimate.waits import Waits
from rundir.columns import Bools, Floats, Indices

LEAST_CELLS = 5
LEAST_S, LEAST_SHARE = 3e-4, 0.12  # standard deviation of a model's mean, in s and as a share of it
LEAST_QUEUE_S = 1e-5
FLAT_S = 0.010
QUEUE_BEFORE_REST_S = 0.002
TWICE = 2
DELAYS_S = (0.0, 0.002, 0.004, 0.008, 0.012)  # from submission to where the engine takes a request in


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What is learned from: requests, their cells (`cell`, -1 for none), and the cells that teach (`taught`)."""

    waits: Waits
    cells: Cells
    members: Members
    cell: Indices
    taught: Indices


def _sums_on(ground: Ground, rows: Indices, features: Floats, sums: Floats) -> Sums:
    """Return what a model learns from on the cells `rows`."""
    cells, cell, members = ground.cells, ground.cell, ground.members
    place = np.full(len(cells) + 1, -1, dtype=np.intp)
    place[rows] = np.arange(len(rows))
    mine = place[cell]
    return Sums(
        cell=mine[mine >= 0],
        features=features[mine >= 0],
        sums=sums[rows],
        strangers=members.strangers[rows].astype(np.float64),
    )


def prefill_prior(ground: Ground) -> Prior:
    """Learn the prefill from uncached tokens and the step clock; of who has no token count, from that clock alone."""
    waits, cells, cell = ground.waits, ground.cells, ground.cell
    share = _uncached_share(cells)
    own_share = np.where(cell >= 0, share[cell], share[-1])
    prompt, counted = _prompt_tokens(waits)
    told = counted & (waits.cached_tokens >= 0)
    uncached = np.where(told, prompt - waits.cached_tokens, prompt * own_share)
    features = prefill_features(waits.first_s, waits.wait_s, waits.chunk_s, uncached)
    # A guess by tokens alone tells which of the last steps the prefill began with; that step's end is the better clock.
    model = _learn_prefill(ground, features[:, :3])
    for _ in range(TWICE):
        step_s = nearest_step(waits.first_s, waits.wait_s, waits.chunk_s, model.prior.mean)
        model = _learn_prefill(ground, np.column_stack((features, step_s)))
    # Which of a cell's requests had the cached tokens is not known; in the sums this cancels, and so does not show.
    hidden = np.where(told, 0.0, (model.weights[1:3].sum() * prompt) ** 2 * own_share * (1.0 - own_share))
    prior = replace(model.prior, variance=model.prior.variance + hidden)
    if counted.all() or not counted.any():
        return prior
    # How far token counts vary is in the errors of a model that does not know them, and not in those of one that does.
    blind = _learn_prefill(ground, features[:, [0, 3, 4]]).prior
    return Prior(
        mean=np.where(counted, prior.mean, blind.mean), variance=np.where(counted, prior.variance, blind.variance)
    )


def _learn_prefill(ground: Ground, features: Floats) -> Model:
    data = _sums_on(ground, ground.taught, features, ground.cells.sums["prefill"])
    return learn(data, features, floor_share=LEAST_SHARE, least_s=LEAST_S)


def _prompt_tokens(waits: Waits) -> tuple[Floats, Bools]:
    """Return the tokens of each prompt [n], and whose are known.

    Of a request cancelled before its usage came they are what it was meant to have, and what a chat template or another
    tokenizer makes more of others; where that is unknown too, the mean of the others.
    """
    counted, declared = waits.prompt_tokens >= 0, waits.declared_tokens >= 0
    usual = waits.prompt_tokens[counted].mean() if counted.any() else 0.0
    tokens = np.where(counted, waits.prompt_tokens, usual)
    if (counted & declared).any():
        more = (waits.prompt_tokens - waits.declared_tokens)[counted & declared].mean()
        tokens = np.where(~counted & declared, waits.declared_tokens + more, tokens)
        counted = counted | declared
    return tokens, counted


def _uncached_share(cells: Cells) -> Floats:
    """Return the share of prompt tokens that were computed, by cell and, last, in all; 1 where it is not shown."""
    if "computed_tokens" not in cells.sums or "prompt_tokens" not in cells.sums:
        return np.ones(len(cells) + 1)
    computed = np.append(cells.sums["computed_tokens"], cells.sums["computed_tokens"][~cells.lost].sum())
    prompt = np.append(cells.sums["prompt_tokens"], cells.sums["prompt_tokens"][~cells.lost].sum())
    share: Floats = np.divide(computed, prompt, out=np.ones(len(prompt)), where=prompt > 0)
    return np.clip(share, 0.0, 1.0)


def rest_prior(ground: Ground, server_s: Floats, network: Network) -> Prior:
    """Learn the rest on cells that are ours alone; else take it from the server's totals."""
    waits, cells, cell = ground.waits, ground.cells, ground.cell
    tokens, _ = _prompt_tokens(waits)
    alone = ground.taught[ground.members.strangers[ground.taught] == 0]
    if len(alone) < LEAST_CELLS:
        mean_s = network.rest_s
        return Prior(mean=np.full(len(tokens), mean_s), variance=np.full(len(tokens), mean_s**2 + FLAT_S**2))
    whole = np.bincount(cell[cell >= 0], server_s[cell >= 0], minlength=len(cells))
    left = np.maximum(whole - cells.sums["queue"] - cells.sums["prefill"], 0.0)
    models = []
    for delay_s in DELAYS_S:
        features = rest_features(waits.submit_s, waits.first_s, waits.chunk_s, waits.flights_s, tokens, delay_s)
        data = _sums_on(ground, alone, features, left)
        models.append(learn(data, features, floor_share=LEAST_SHARE, least_s=LEAST_S))
    return min(models, key=lambda model: model.error_s).prior


def queue_prior(ground: Ground, left_s: Floats, *, never_waiting: bool) -> Prior:
    """Return a flat prior: whatever the wait leaves; or, where nothing ever waited, the mean of the sums."""
    if never_waiting:
        ones = np.ones((len(left_s), 1))
        data = _sums_on(ground, ground.taught, ones, ground.cells.sums["queue"])
        return learn(data, ones, floor_share=LEAST_SHARE, least_s=LEAST_QUEUE_S).prior
    mean = np.maximum(left_s - QUEUE_BEFORE_REST_S, 0.0)
    return Prior(mean=mean, variance=(np.maximum(left_s, 0.0) + FLAT_S) ** 2)
