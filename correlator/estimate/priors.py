"""Prior expectations of each request's network, queue, prefill and remaining time.

They hold before the sums of its own interval are used. The network (with gateway and client) is what clients' waits
exceed the engine's own TTFT by, over intervals of first tokens that are ours alone. The other three are learned on the
sums of the intervals that can be trusted, so that no request needs to be known by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sidelight.correlator.estimate.assignment import Members
from sidelight.correlator.estimate.intervals import ScrapeIntervals
from sidelight.correlator.estimate.regression import FittedModel, TimePrior, TrainingSums, learn
from sidelight.correlator.estimate.waits import Waits, nearest_step, prefill_features, rest_features
from sidelight.rundir.columns import Bools, Floats, Indices

LEAST_INTERVALS = 5
LEAST_S, LEAST_SHARE = 3e-4, 0.12  # standard deviation of a model's mean, in s and as a share of it
LEAST_QUEUE_S = 1e-5
FLAT_S = 0.010
QUEUE_BEFORE_REST_S = 0.002
TWICE = 2
DELAYS_S = (0.0, 0.002, 0.004, 0.008, 0.012)  # from submission to where the engine takes a request in
# The network's part, where the engine's own TTFT does not tell; and what it takes to measure it.
ASSUMED_S, ASSUMED_SD_S = 0.002, 0.003
LEAST_NETWORK_INTERVALS = 3
LEAST_NETWORK_SD_S = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network time [m] and its variance, s and s^2. `rest_s` is the mean of what the engine's own TTFT
    holds beside queue and prefill time. `measured`: not merely assumed.
    """

    value_s: Floats
    variance: Floats
    rest_s: float
    measured: bool


def assume_network(waits: Waits, rest_s: float) -> Network:
    """Take 2 ms, more or less, for want of the engine's own TTFT."""
    value_s = np.minimum(np.full(len(waits.wait_s), ASSUMED_S), waits.wait_s)
    variance = np.full(len(value_s), ASSUMED_SD_S**2)
    return Network(value_s=value_s, variance=variance, rest_s=rest_s, measured=False)


def measure_network(waits: Waits, intervals: ScrapeIntervals, members: Members, rest_s: float) -> Network:
    """Spread each interval's network time over its members, between 0 and their waits; others have the median.

    `members` are of the requests in `waits`. Assumed where fewer than 3 intervals are ours alone.
    """
    alone = (members.unmatched == 0) & ~members.inconsistent & (intervals.count > 0) & ~intervals.lost
    interval = np.where((members.interval >= 0) & alone[members.interval], members.interval, -1)
    inside = interval >= 0
    count = np.bincount(interval[inside], minlength=len(intervals))
    total = np.bincount(interval[inside], waits.wait_s[inside], minlength=len(intervals)) - intervals.sums["ttft"]
    rows = np.flatnonzero(count)
    if len(rows) < LEAST_NETWORK_INTERVALS:
        return assume_network(waits, rest_s)
    means = total[rows] / count[rows]
    middle = float(np.median(np.repeat(means, count[rows])))
    spread = 1.4826 * np.median(np.abs(means - middle) * np.sqrt(count[rows]))
    variance = max(float(spread) ** 2, LEAST_NETWORK_SD_S**2)
    interval_mean = np.divide(total, count, out=np.full(len(intervals), middle), where=count > 0)
    value_s = np.clip(np.where(inside, interval_mean[interval], max(middle, 0.0)), 0.0, waits.wait_s)
    left = np.where(inside, 1.0 - 1.0 / np.maximum(count[interval], 1), 1.0)
    return Network(value_s=value_s, variance=variance * left, rest_s=rest_s, measured=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Training data: requests, the interval of each (-1 for none), and the intervals that can be trusted."""

    waits: Waits
    intervals: ScrapeIntervals
    members: Members
    interval: Indices
    usable_intervals: Indices


def _sums_on(data: TrainingData, rows: Indices, features: Floats, sums: Floats) -> TrainingSums:
    """Return the training sums of a model on the intervals `rows`."""
    intervals, interval, members = data.intervals, data.interval, data.members
    place = np.full(len(intervals) + 1, -1, dtype=np.intp)
    place[rows] = np.arange(len(rows))
    row = place[interval]
    return TrainingSums(
        interval=row[row >= 0],
        features=features[row >= 0],
        sums=sums[rows],
        unmatched=members.unmatched[rows].astype(np.float64),
    )


def prefill_prior(data: TrainingData) -> TimePrior:
    """Learn the prefill from uncached tokens and the step clock; without a token count, from that clock alone."""
    waits, intervals, interval = data.waits, data.intervals, data.interval
    share = _uncached_share(intervals)
    own_share = np.where(interval >= 0, share[interval], share[-1])
    prompt, counted = _prompt_tokens(waits)
    stated = counted & (waits.cached_tokens >= 0)
    uncached = np.where(stated, prompt - waits.cached_tokens, prompt * own_share)
    features = prefill_features(waits.first_s, waits.wait_s, waits.chunk_s, uncached)
    # A model of tokens alone finds the step that the prefill began with; the end of that step is the better predictor.
    model = _learn_prefill(data, features[:, :3])
    for _ in range(TWICE):
        step_s = nearest_step(waits.first_s, waits.wait_s, waits.chunk_s, model.prior.mean)
        model = _learn_prefill(data, np.column_stack((features, step_s)))
    # Which of an interval's requests had the cached tokens is unknown; that cancels in the sums, which cannot show it.
    hidden = np.where(stated, 0.0, (model.weights[1:3].sum() * prompt) ** 2 * own_share * (1.0 - own_share))
    prior = replace(model.prior, variance=model.prior.variance + hidden)
    if counted.all() or not counted.any():
        return prior
    # A model without token counts has their variation in its errors; a model with them has not.
    blind = _learn_prefill(data, features[:, [0, 3, 4]]).prior
    return TimePrior(
        mean=np.where(counted, prior.mean, blind.mean), variance=np.where(counted, prior.variance, blind.variance)
    )


def _learn_prefill(data: TrainingData, features: Floats) -> FittedModel:
    sums = _sums_on(data, data.usable_intervals, features, data.intervals.sums["prefill"])
    return learn(sums, features, floor_share=LEAST_SHARE, least_s=LEAST_S)


def _prompt_tokens(waits: Waits) -> tuple[Floats, Bools]:
    """Return the tokens of each prompt [n], and a mask of those known.

    A request that was cancelled before its usage came has its declared tokens, plus what a chat template or another
    tokenizer adds to the other requests on average; where none are declared, the mean of the other requests.
    """
    counted, declared = waits.prompt_tokens >= 0, waits.declared_tokens >= 0
    usual = waits.prompt_tokens[counted].mean() if counted.any() else 0.0
    tokens = np.where(counted, waits.prompt_tokens, usual)
    if (counted & declared).any():
        more = (waits.prompt_tokens - waits.declared_tokens)[counted & declared].mean()
        tokens = np.where(~counted & declared, waits.declared_tokens + more, tokens)
        counted = counted | declared
    return tokens, counted


def _uncached_share(intervals: ScrapeIntervals) -> Floats:
    """Return the share of prompt tokens that were computed, by interval and, last, in all; 1 where it is not shown."""
    if "computed_tokens" not in intervals.sums or "prompt_tokens" not in intervals.sums:
        return np.ones(len(intervals) + 1)
    computed = np.append(intervals.sums["computed_tokens"], intervals.sums["computed_tokens"][~intervals.lost].sum())
    prompt = np.append(intervals.sums["prompt_tokens"], intervals.sums["prompt_tokens"][~intervals.lost].sum())
    share: Floats = np.divide(computed, prompt, out=np.ones(len(prompt)), where=prompt > 0)
    return np.clip(share, 0.0, 1.0)


def rest_prior(data: TrainingData, server_s: Floats, network: Network) -> TimePrior:
    """Learn the rest on intervals that are ours alone; else take it from the server's totals."""
    waits, intervals, interval = data.waits, data.intervals, data.interval
    tokens, _ = _prompt_tokens(waits)
    alone = data.usable_intervals[data.members.unmatched[data.usable_intervals] == 0]
    if len(alone) < LEAST_INTERVALS:
        mean_s = network.rest_s
        return TimePrior(mean=np.full(len(tokens), mean_s), variance=np.full(len(tokens), mean_s**2 + FLAT_S**2))
    whole = np.bincount(interval[interval >= 0], server_s[interval >= 0], minlength=len(intervals))
    left = np.maximum(whole - intervals.sums["queue"] - intervals.sums["prefill"], 0.0)
    models = []
    for delay_s in DELAYS_S:
        features = rest_features(waits.submit_s, waits.first_s, waits.chunk_s, waits.flights_s, tokens, delay_s)
        sums = _sums_on(data, alone, features, left)
        models.append(learn(sums, features, floor_share=LEAST_SHARE, least_s=LEAST_S))
    return min(models, key=lambda model: model.error_s).prior


def queue_prior(data: TrainingData, left_s: Floats, *, never_waiting: bool) -> TimePrior:
    """Return a flat prior: whatever the wait leaves; or, where nothing ever waited, the mean of the sums."""
    if never_waiting:
        ones = np.ones((len(left_s), 1))
        sums = _sums_on(data, data.usable_intervals, ones, data.intervals.sums["queue"])
        return learn(sums, ones, floor_share=LEAST_SHARE, least_s=LEAST_QUEUE_S).prior
    mean = np.maximum(left_s - QUEUE_BEFORE_REST_S, 0.0)
    return TimePrior(mean=mean, variance=(np.maximum(left_s, 0.0) + FLAT_S) ** 2)
