"""Fit of an engine's speed and limits to a run.

A step lasts `step_s + prefill_token_s x prompt tokens computed + sequence_s x sequences + kv_token_s x tokens held`.
The coefficients are found by least squares of relative residuals without negative values, with Huber's weights, and
their error by drawing blocks of steps. What a first token takes beyond the steps it waits for is the front end.
Where spans alone are known, rows are requests' decodes in the place of steps, among steps that are laid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from sidelight.correlator.estimate.regression import nonnegative_least_squares
from sidelight.rundir.columns import Floats, Ints, take
from sidelight.rundir.stats import Missing
from sidelight.simulator.settings import SpeedProfile
from sidelight.twin.engine.play import StepFactors
from sidelight.twin.engine.spans import SpannedRequests, laid_steps
from sidelight.twin.engine.steps import EngineSteps, Prefills, StepWindows, StreamedRequests, prefills_of, steps_of

EngineRequests = StreamedRequests | SpannedRequests
#: Token budgets of a step that engines are given, the least first; behind them a run has not met its budget.
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LEAST_REQUESTS, LEAST_STEPS = 20, 200
DRAWS = 20
_BLOCKS = 40
_ROUNDS = 6
_LAYINGS = 5  # of steps between spans, each at the speed fitted to those before
_HUBER = 2.0  # standard deviations
_ALIKE, _ALIKE_BY_SPANS = 1.005, 1.03  # of the mean residual
_COEFFICIENTS = ("step_s", "prefill_token_s", "sequence_s", "kv_token_s")
_LEAST_DIFFERENT, _WORSE = 4, 1.5  # rows that tell budgets apart, and how much larger their residuals are
_OUTLIER = 0.5  # of a residual: more counts as much
_SURE_SEATS = 0.7  # of the steps beside a waiting request that have as many sequences
_LEAST_WAITING = 10  # steps
_LEAST_IDLE = 8  # requests that came to an idle engine
_LEAST_ROOMY = 0.2  # of the requests
_LEAST_OF_SIZE, _STRAIGHT = 40, 0.1  # steps of a size, and the largest bias of one that a line may have
_LEAST_FACTORS = 20  # of a kind of steps
_MOST_ROWS, _SHORTEST_S = 20_000, 1e-9
_WAITED = 2  # steps: less is an error of the front end


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """Speed and limits of an engine, as a run shows them.

    steps           number of steps that it rests on, with `most_sequences` in one
    draws           the speed fitted to drawn blocks of steps: its error
    seats           the most sequences at a time, None where no request ever waited for a seat
    budget          tokens of a step; where no step was full, the least that the run would not have met
    budgets         the least and the most of BUDGETS that would do as well
    frontend_s      what a first token takes beyond its steps: values of requests, of which one is drawn
    by_size         factors on all but the prefill of steps, by their sequences [most_sequences + 1], as of graphs for
                    some sizes; None: a line through all steps is right within a tenth
    residuals       logarithms of observed over fitted duration of steps, or by spans of decodes' mean steps [m], in
                    the order of time
    factors         those of single steps; None where only means of several are known
    """

    speed: SpeedProfile
    steps: int
    most_sequences: int
    draws: tuple[SpeedProfile, ...]
    seats: int | None
    budget: int
    budgets: tuple[int, int]
    frontend_s: Floats
    by_size: Floats | None
    residuals: Floats
    factors: StepFactors | None
    coherence: float


class _Rows(NamedTuple):
    """Windows of steps: their contents a step [m, 4], fitted: see `_solve`."""

    windows: StepWindows
    table: Floats
    coefficients: Floats
    residuals: Floats


class _BudgetFit(NamedTuple):
    """The fit of steps under a budget, and its mean residual."""

    budget: int
    prefills: Prefills
    rows: _Rows
    loss: float


def fit(
    requests: EngineRequests, *, budget: int | None = None, seats: int | None = None, until_s: float = np.inf
) -> EngineFit | Missing:
    """Return the fit of an engine to steps, or why there is none.

    Steps that ended after `until_s` are left out. Known limits are taken as they are.
    """
    if len(requests) < LEAST_REQUESTS:
        return Missing(f"{len(requests)} requests were answered whole, and a fit needs {LEAST_REQUESTS}")
    if (requests.output_tokens > 1).sum() < LEAST_REQUESTS:
        return Missing("replies of one token show no step")
    chosen, limit, frontend_s = budget or BUDGETS[-1], seats, 0.0
    before: tuple[EngineSteps, Prefills, SpeedProfile] | None = None
    # The front end says when a prompt came, and the prefills say the front end; so do laid steps and their speed.
    for _ in range(2 if isinstance(requests, StreamedRequests) else _LAYINGS):
        steps = _steps(requests, chosen, before)
        windows = take(steps.windows, steps.end_s[steps.windows.until] < until_s)
        if (known := int(windows.steps.sum())) < LEAST_STEPS:
            return Missing(f"tokens of replies show {known} of the engine's steps, and a fit needs {LEAST_STEPS}")
        budgets = (budget,) if budget else BUDGETS
        (chosen, prefills, rows, _), alike = _by_budget(requests, steps, windows, frontend_s, limit, budgets)
        speed = _speed(rows)
        by_size = _by_size(rows)
        of_alone = replace(speed, step_s=speed.step_s * (1.0 if by_size is None else float(by_size[1])))
        frontends_s = _frontends(requests, steps, prefills, of_alone, chosen)
        frontend_s = float(np.median(frontends_s))
        limit = seats or _seats(requests, steps, prefills, frontend_s, chosen)
        before = steps, prefills, speed
    if by_size is not None and isinstance(requests, SpannedRequests):
        return Missing("steps depend on the size of the batch, as with graphs, and spans show means of many alone")
    residuals = np.log(windows.duration_s / _fitted_s(rows.table, speed, by_size))
    return EngineFit(
        speed=speed,
        steps=int(steps.is_whole.sum()),
        most_sequences=int((steps.decodes + prefills.prompts)[steps.is_whole].max()),
        draws=tuple(_draws(rows)),
        seats=limit,
        budget=chosen,
        budgets=alike,
        frontend_s=frontends_s,
        by_size=by_size,
        residuals=residuals,
        factors=_factors(rows.table, residuals) if isinstance(requests, StreamedRequests) else None,
        coherence=steps.coherence,
    )


def _steps(
    requests: EngineRequests, budget: int, before: tuple[EngineSteps, Prefills, SpeedProfile] | None
) -> EngineSteps:
    if isinstance(requests, SpannedRequests):
        return laid_steps(requests, budget, before)
    return before[0] if before else steps_of(requests)


def _by_budget(
    requests: EngineRequests,
    steps: EngineSteps,
    windows: StepWindows,
    frontend_s: float,
    seats: int | None,
    budgets: Sequence[int],
) -> tuple[_BudgetFit, tuple[int, int]]:
    """Return the fit under the largest of the best budgets, and the range of these."""
    tried: list[_BudgetFit] = []
    is_met = True
    for budget in budgets:
        prefills = prefills_of(requests, steps, budget=budget, seats=seats, frontend_s=frontend_s)
        table = _table(windows, steps, prefills)
        rows = _Rows(windows, table, *_solve(table, windows.duration_s))
        tried.append(_BudgetFit(budget, prefills, rows, float(np.mean(np.minimum(np.abs(rows.residuals), _OUTLIER)))))
        is_met = bool(prefills.tokens.max() + steps.decodes.max() >= budget)
        if not is_met:
            break  # larger ones make no difference
    share = _ALIKE_BY_SPANS if isinstance(requests, SpannedRequests) else _ALIKE
    most = share * min(each.loss for each in tried)
    alike = [each for each in reversed(tried) if each.loss <= most]
    best = reduce(lambda best, other: best if _as_good(best.rows, other.rows) else other, alike)
    had = (best.prefills.tokens + steps.decodes)[steps.is_whole]  # of spans, steps are laid, not seen
    least = np.sort(had)[-_LEAST_DIFFERENT] if isinstance(requests, StreamedRequests) else 0
    also = [best.budget, *(each.budget for each in tried if each.budget >= least and _as_good(each.rows, best.rows))]
    largest = budgets[-1] if not is_met and max(also) == tried[-1].budget else max(also)
    return best, (min(also), largest)


def _as_good(rows: _Rows, best: _Rows) -> bool:
    """Return whether rows have residuals as small as the best, where their prompt tokens differ."""
    differ = np.abs(rows.table[:, 1] - best.table[:, 1]) > 1
    if differ.sum() < _LEAST_DIFFERENT:
        return True
    loss, least = (np.minimum(np.abs(each.residuals[differ]), _OUTLIER).mean() for each in (rows, best))
    return bool(loss < _WORSE * least)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogs:
    """Steps, or by spans decodes, against a fit [m]: when they ended, the logarithm of observed over fitted duration,
    and the share of the fitted one that is prefill.
    """

    end_s: Floats
    logs: Floats
    prefill: Floats


def against(fitted: EngineFit, requests: EngineRequests) -> StepLogs:
    """Return the steps of other requests of the same engine against its fit."""
    speed, before, frontend_s = fitted.speed, None, float(np.median(fitted.frontend_s))
    for _ in range(1 if isinstance(requests, StreamedRequests) else 3):
        steps = _steps(requests, fitted.budget, before)
        prefills = prefills_of(requests, steps, budget=fitted.budget, seats=fitted.seats, frontend_s=frontend_s)
        before = steps, prefills, speed
    windows = steps.windows
    table = _table(windows, steps, prefills)
    fitted_s = _fitted_s(table, speed, fitted.by_size)
    return StepLogs(
        end_s=steps.end_s[windows.until],
        logs=np.log(windows.duration_s / fitted_s),
        prefill=speed.prefill_token_s * table[:, 1] / fitted_s,
    )


def _table(windows: StepWindows, steps: EngineSteps, prefills: Prefills) -> Floats:
    """Return the contents of windows a step [m, 4]: 1, prompt tokens, sequences, and tokens held."""
    sums = np.cumsum(
        [prefills.tokens, steps.decodes + prefills.prompts, steps.kv_tokens + prefills.held], axis=1, dtype=np.float64
    )
    within = sums[:, windows.until] - sums[:, windows.since]
    within[0] /= windows.steps
    within[1:] /= windows.until - windows.since
    return np.column_stack([np.ones(len(windows.until)), *within])


def _sizes(table: Floats) -> Ints:
    return np.asarray(np.rint(table[:, 2]), np.int64)


def _fitted_s(table: Floats, speed: SpeedProfile, by_size: Floats | None) -> Floats:
    """Return the duration of steps of some contents [m]."""
    factor = 1.0 if by_size is None else by_size[np.minimum(_sizes(table), len(by_size) - 1)]
    rest_s = table[:, [0, 2, 3]] @ [speed.step_s, speed.sequence_s, speed.kv_token_s]
    return np.asarray(np.maximum(factor * rest_s + speed.prefill_token_s * table[:, 1], _SHORTEST_S))


def _factors(table: Floats, residuals: Floats) -> StepFactors:
    prefills = table[:, 1] > 0
    several = min(prefills.sum(), (~prefills).sum()) >= _LEAST_FACTORS
    kinds = (~prefills, prefills) if several else (slice(None), slice(None))
    return StepFactors(*(np.exp(residuals[kind]) for kind in kinds))


def _by_size(rows: _Rows) -> Floats | None:
    """Return factors on steps by their sequences, None where a line fits.

    Longer steps say little of it: most of their time is prefill.
    """
    sequences = _sizes(rows.table)
    short = 2 * rows.coefficients[1] * rows.table[:, 1] <= rows.table @ rows.coefficients
    sizes = np.flatnonzero(np.bincount(sequences[short]) >= _LEAST_OF_SIZE)
    biases = np.array([np.median(rows.residuals[short & (sequences == size)]) for size in sizes])
    if np.abs(biases).max(initial=0.0) <= _STRAIGHT:
        return None
    return np.asarray(np.exp(np.interp(np.arange(sequences.max() + 1), sizes, biases)))


def _solve(table: Floats, duration_s: Floats) -> tuple[Floats, Floats]:
    """Return the coefficients [4] and the residuals, logarithms of duration over its fit [m].

    Of many rows, some at equal distances say as much.
    """
    some = slice(None, None, 1 + len(table) // _MOST_ROWS)
    rows, lasts_s = table[some], duration_s[some]
    scale = np.maximum(np.abs(rows).max(axis=0, initial=0.0), 1.0)
    coefficients, weight = np.zeros(rows.shape[1]), 1 / lasts_s
    for _ in range(_ROUNDS):
        coefficients = nonnegative_least_squares(rows / scale * weight[:, None], lasts_s * weight) / scale
        fitted_s = np.maximum(rows @ coefficients, _SHORTEST_S)
        weight = _weight(np.log(lasts_s / fitted_s)) / fitted_s
    return coefficients, np.log(duration_s / np.maximum(table @ coefficients, _SHORTEST_S))


def _weight(residuals: Floats) -> Floats:
    """Return Huber's weights of rows [m], to be multiplied into both sides."""
    apart = np.maximum(np.abs(residuals - np.median(residuals)), 1e-12)
    return np.asarray(np.sqrt(np.minimum(1.0, _HUBER * spread(residuals) / apart)))


def spread(residuals: Floats) -> float:
    """Return a standard deviation that outliers do not move."""
    return max(1e-9, 1.4826 * float(np.median(np.abs(residuals - np.median(residuals)))))


def _speed(rows: _Rows) -> SpeedProfile:
    jitter_ratio = spread(rows.residuals * np.sqrt(rows.windows.steps))  # a mean of steps differs less than a step
    return SpeedProfile(jitter_ratio=jitter_ratio, **dict(zip(_COEFFICIENTS, rows.coefficients.tolist(), strict=True)))


def _draws(rows: _Rows) -> list[SpeedProfile]:
    """Return the speed fitted to blocks of steps that are drawn with replacement.

    A step has its weight in all. The triangle of a block says of its least squares what its rows do.
    """
    random = np.random.default_rng(0)
    scale = np.maximum(np.abs(rows.table).max(axis=0, initial=0.0), 1.0)
    weight = _weight(rows.residuals) * np.exp(rows.residuals) / rows.windows.duration_s
    weighted = np.column_stack([rows.table / scale, rows.windows.duration_s]) * weight[:, None]
    triangles = [np.linalg.qr(block).R for block in np.array_split(weighted, _BLOCKS)]
    drawn = [np.concatenate([triangles[at] for at in random.integers(0, _BLOCKS, _BLOCKS)]) for _ in range(DRAWS)]
    least = [nonnegative_least_squares(each[:, :-1], each[:, -1]) / scale for each in drawn]
    return [_speed(rows._replace(coefficients=coefficients)) for coefficients in least]


def _frontends(
    requests: EngineRequests, steps: EngineSteps, prefills: Prefills, speed: SpeedProfile, budget: int
) -> Floats:
    """Return the time of first tokens beyond their steps [at least 1], seconds.

    Of a request that came to an idle engine that is its TTFT less the steps of its prefill. Where there are few, it is
    the value that most of the others allow: each was taken in by the step that began its prefill, and not before.
    """
    ended_s = np.maximum.accumulate(requests.last_s)
    is_alone = requests.submit_s > np.concatenate([[-np.inf], ended_s[:-1]])
    joined = np.append(requests.submit_s[1:], np.inf) < requests.first_s
    uncached = requests.prompt_tokens - requests.cached_tokens
    chunks = np.ceil(uncached / budget)
    held = requests.cached_tokens * chunks + np.minimum(uncached, budget) * chunks * (chunks + 1) / 2
    steps_s = chunks * (speed.step_s + speed.sequence_s) + speed.prefill_token_s * uncached + speed.kv_token_s * held
    exact = (requests.first_s - requests.submit_s - steps_s)[is_alone & ~joined]
    if len(exact) >= _LEAST_IDLE:
        return np.asarray(np.maximum(exact, 0.0))
    begun = np.maximum(prefills.begin - 1, 0)
    at_most = steps.end_s[begun] - requests.submit_s
    single = (prefills.begin == steps.first) & (begun > 1) & steps.is_whole[steps.first]
    # A step that was not full would have taken it in.
    roomy = steps.decodes + prefills.prompts < np.quantile(steps.decodes, 0.99)
    roomy &= steps.decodes + prefills.tokens < budget
    at_least = np.where(roomy[begun], steps.end_s[np.maximum(begun - 1, 0)] - requests.submit_s, 0.0)
    high, low = np.concatenate([at_most[single], exact + 1e-3]), np.concatenate([at_least[single], exact - 1e-3])
    if len(low) and np.mean(low > 0) >= _LEAST_ROOMY:
        return np.array([max(0.0, _most_allowed(low, high))])
    # Nearly all waited for a seat or for the budget: it is between nothing and what the quickest shows.
    most_s = float(high.min(initial=np.inf))
    return np.array([most_s / 2 if 0 < most_s < np.median(steps.duration_s[steps.is_whole]) else 0.0])


def _most_allowed(low: Floats, high: Floats) -> float:
    """Return the middle of the range that lies within the most intervals."""
    ends = np.concatenate([low, high])
    order = np.argsort(ends, kind="stable")
    within = np.cumsum(np.concatenate([np.ones(len(low)), -np.ones(len(high))])[order])
    best = int(np.argmax(within))
    return 0.5 * float(ends[order[best]] + ends[order[min(best + 1, len(order) - 1)]])


def _seats(
    requests: EngineRequests, steps: EngineSteps, prefills: Prefills, frontend_s: float, budget: int
) -> int | None:
    """Return the number of sequences beside which others waited, though the budget had room."""
    count = len(steps.end_s)
    came = np.searchsorted(steps.end_s, requests.submit_s + frontend_s) + 1
    waits = came + _WAITED < prefills.begin
    change = np.zeros(count + 2)
    np.add.at(change, came[waits], 1)
    np.add.at(change, prefills.begin[waits], -1)
    waiting = np.cumsum(change)[:count] > 0
    sequences = steps.decodes + prefills.prompts
    full = waiting & steps.is_whole & (steps.decodes + prefills.tokens < budget)
    if full.sum() < _LEAST_WAITING:
        return None
    sizes = np.bincount(sequences[full])
    usual = int(np.argmax(sizes))
    return usual if sizes[usual] >= _SURE_SEATS * full.sum() else None
