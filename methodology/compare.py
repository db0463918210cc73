"""Comparison of two systems over several runs of each.

It is by the logarithm of each run's statistic. Requests of one run queue together, so that a test on pooled requests
finds differences between equals; runs are independent. Pairs of runs that send the same requests at the same moments
share what makes runs differ, and their ratio varies far less than either. Student's t over pairs, Welch's over unpaired
runs; equivalence by two one-sided tests (Schuirmann 1987); several metrics by Holm (1979, "A simple sequentially
rejective multiple test procedure").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Count, Reason

Verdict = Literal["better", "worse", "equivalent", "inconclusive"]

LEAST_RUNS = 3  # of each side
POWER = 0.8  # with which that many more pairs would show a difference as large as the margin
MOST_PAIRS = 10_000
_NO_SPREAD = 1e-12  # of logarithms: what rounding leaves of equal ratios


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How a metric of B compares with that of A."""

    ratio: float | None = None  # B over A, the geometric mean over pairs
    ci95: tuple[float, float] | None = None  # or that of another level; None below three runs
    p: float | None = None  # how likely so large a ratio is between equals; after `of_family` by Holm's method
    # equivalent: surely within the margin, also where surely different; better, worse: B surely differs; inconclusive:
    # neither is shown; None: there is nothing to compare.
    verdict: Verdict | None = None
    reason: Reason
    # About how many more pairs, or runs of each, would show a difference as large as the margin in 80 %; 0 where the
    # verdict is certain, None where that is not known.
    more_pairs: int | None = None
    pairs: Count = 0  # that have both numbers; of unpaired runs the smaller side


def paired(
    a: npt.ArrayLike, b: npt.ArrayLike, margin: float = 0.05, level: float = 0.95, *, lower_is_better: bool = True
) -> Comparison:
    """Compare a statistic of B's runs [R] with that of paired runs of A [R].

    Paired runs have the same requests.

    margin  a ratio from 1 / (1 + margin) to 1 + margin is equivalent

    - A pair in which either is not positive and finite is left out.
    - Fewer than three pairs: inconclusive. One side without any number: no verdict. All ratios equal: as they say.

    Raises ValueError for sides of unequal size, a negative margin, and a level not from 0.5 to 1.
    """
    first, second = _positive(a), _positive(b)
    if len(first) != len(second):
        raise ValueError(f"A has {len(first)} runs and B {len(second)}: compare runs that are not paired by `unpaired`")
    _require(margin, level)
    whole = np.isfinite(first) & np.isfinite(second)
    if (empty := _without_numbers(first, second)) is not None:
        return empty
    logs = (second - first)[whole]
    spread = _no_rounding(float(logs.std(ddof=1))) if len(logs) > 1 else 0.0
    facts = _Facts(
        mean=float(logs.mean()) if len(logs) else math.nan,
        error=spread / math.sqrt(max(len(logs), 1)),
        freedom=float(len(logs) - 1),
        spread=spread,
        runs=len(logs),
        of="pairs",
    )
    return _compared(facts, margin, level, lower_is_better=lower_is_better)


def unpaired(
    a: npt.ArrayLike, b: npt.ArrayLike, margin: float = 0.05, level: float = 0.95, *, lower_is_better: bool = True
) -> Comparison:
    """Compare a statistic of B's runs [S] with A's runs [R] by Welch's test.

    The runs send different requests. It needs many more runs than pairs would; special cases are those of `paired`, but
    for sides of unequal size.
    """
    _require(margin, level)
    first, second = _positive(a), _positive(b)
    if (empty := _without_numbers(first, second)) is not None:
        return empty
    sides = [side[np.isfinite(side)] for side in (first, second)]
    fewest = min(map(len, sides))
    variances = np.array([side.var(ddof=1) / len(side) if len(side) > 1 else 0.0 for side in sides])
    weights = np.array([variance**2 / max(len(side) - 1, 1) for variance, side in zip(variances, sides, strict=True)])
    facts = _Facts(
        mean=float(sides[1].mean() - sides[0].mean()),
        error=_no_rounding(math.sqrt(variances.sum())),
        freedom=float(variances.sum() ** 2 / weights.sum()) if weights.sum() > 0 else 2.0 * fewest - 2,
        spread=math.sqrt(fewest * variances.sum()),
        runs=fewest,
        of="runs of each",
    )
    return _compared(facts, margin, level, lower_is_better=lower_is_better)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values [m] adjusted by Holm's method. Any below 5 % is a false alarm in at most 5 % of all families."""
    order = np.argsort(p_values, kind="stable")
    raised = np.maximum.accumulate(np.asarray(p_values, np.float64)[order] * np.arange(len(order), 0, -1))
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(raised, 1.0)
    return [float(p) for p in adjusted]


def of_family(comparisons: Mapping[str, Comparison], level: float = 0.95) -> dict[str, Comparison]:
    """Return the comparisons of several metrics of the same runs, judged together by Holm's method.

    What is no longer surely different becomes inconclusive; what is equivalent stays so.
    """
    named = {name: each.p for name, each in comparisons.items() if each.p is not None}
    adjusted = dict(zip(named, holm(list(named.values())), strict=True))
    judged = dict(comparisons)
    for name, p in adjusted.items():
        each = comparisons[name]
        lost = each.verdict in {"better", "worse"} and p > 1 - level
        reason = f"{each.reason}; beside {len(named) - 1} other metrics that may be chance" if lost else each.reason
        verdict = "inconclusive" if lost else each.verdict
        more = 1 if lost and not each.more_pairs else each.more_pairs
        judged[name] = msgspec.structs.replace(each, p=p, verdict=verdict, reason=reason, more_pairs=more)
    return judged


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of the log ratio with its standard error, and a single pair's spread."""

    mean: float
    error: float
    freedom: float
    spread: float
    runs: int
    of: str


def _compared(facts: _Facts, margin: float, level: float, *, lower_is_better: bool) -> Comparison:
    if facts.runs < LEAST_RUNS:
        return Comparison(
            ratio=_exp(facts.mean) if facts.runs else None,
            verdict="inconclusive",
            reason=f"{facts.runs} {_counted(facts)}: a claim needs at least {LEAST_RUNS}",
            more_pairs=LEAST_RUNS - facts.runs,
            pairs=facts.runs,
        )
    from scipy.special import stdtr, stdtrit  # noqa: PLC0415  150 ms, and a run without requests needs none of SciPy

    limit, alpha, mean = math.log1p(margin), 1 - level, facts.mean
    if facts.error:
        p = 2 * float(stdtr(facts.freedom, -abs(mean) / facts.error))
    else:
        p = 0.0 if abs(mean) > _NO_SPREAD else 1.0
    half, inner = (float(stdtrit(facts.freedom, quantile)) * facts.error for quantile in (1 - alpha / 2, 1 - alpha))
    verdict: Verdict
    if abs(mean) + inner <= limit:
        verdict = "equivalent"
    elif p <= alpha:
        verdict = "better" if (mean < 0) == lower_is_better else "worse"
    else:
        verdict = "inconclusive"
    low, high = _exp(mean - half), _exp(mean + half)
    stated = f"B is {_change(_exp(mean))} A"
    if facts.error:
        stated += f" ({100 * level:g} % interval: {_change(low)} to {_change(high)} it)"
    else:
        stated += f" in all of {facts.runs} {facts.of}, without any spread: are these different runs?"
    shown = {
        "equivalent": f"{stated}, which is within {100 * margin:g} %",
        "inconclusive": f"{stated}: neither a difference is shown, nor that it is within {100 * margin:g} %",
    }
    return Comparison(
        ratio=_exp(mean),
        ci95=(low, high),
        p=p,
        verdict=verdict,
        reason=shown.get(verdict, stated),
        more_pairs=_more(facts, limit, alpha) if verdict == "inconclusive" else 0,
        pairs=facts.runs,
    )


def _counted(facts: _Facts) -> str:
    return facts.of.replace("s", "", 1) if facts.runs == 1 else facts.of


def _change(ratio: float) -> str:
    change = abs(100 * (ratio - 1))
    return f"{change:,.0f} % above" if change >= 100 else f"{change:.2g} % {'above' if ratio >= 1 else 'below'}"


def _no_rounding(spread: float) -> float:
    return spread if spread > _NO_SPREAD else 0.0


def _exp(logarithm: float) -> float:
    return math.exp(min(logarithm, 700.0))


def _more(facts: _Facts, limit: float, alpha: float) -> int | None:
    """Return the number of further pairs needed, at least 1; None where it is more than anybody would run."""
    from scipy.special import ndtri, stdtrit  # noqa: PLC0415  as above

    def needed(*quantiles: float) -> float:
        return (sum(quantiles) * facts.spread / limit) ** 2

    levels = 1 - alpha / 2, POWER
    if limit <= _NO_SPREAD or needed(*ndtri(levels)) >= MOST_PAIRS:
        return None
    # A normal distribution needs fewer than Student's t, by little; of unpaired runs, freedom grows as it does now.
    count = max(facts.runs + 1, math.ceil(needed(*ndtri(levels))))
    while needed(*stdtrit(facts.freedom / (facts.runs - 1) * (count - 1), levels)) > count:
        count += 1
    return count - facts.runs


def _positive(values: npt.ArrayLike) -> Floats:
    """Return logarithms of positive values, NaN of others."""
    numbers = np.asarray(values, np.float64).ravel()
    usable = np.isfinite(numbers) & (numbers > 0)
    return np.log(np.where(usable, numbers, 1.0)) + np.where(usable, 0.0, np.nan)


def _without_numbers(first: Floats, second: Floats) -> Comparison | None:
    """Return the comparison if one side has no number at all, else None."""
    empty = [name for name, side in (("A", first), ("B", second)) if not np.isfinite(side).any()]
    if not empty:
        return None
    which = " and none of ".join(empty)
    return Comparison(reason=f"no run of {which} has a number above 0: there is nothing to compare")


def _require(margin: float, level: float) -> None:
    if not (0 <= margin < math.inf and 0.5 < level < 1):
        raise ValueError(f"a margin of {margin:g} at level {level:g}: from 0 on, and between 0.5 and 1")
