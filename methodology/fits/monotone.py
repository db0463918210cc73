"""A curve that never falls through noisy levels, and where it reaches a bound.

Latency does not fall as load rises, whatever the noise of single steps says: neighbours in the wrong order are pooled
(PAVA: Ayer and others 1955), and a monotone cubic goes through what is left (PCHIP: Fritsch and Carlson 1980).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sidelight.rundir.columns import Floats

# Where a curve reaches a bound, and the ends of its interval, None of one that is not known.
Crossing = tuple[float, float | None, float | None]

RESAMPLES = 200


def curve(x: npt.ArrayLike, y: npt.ArrayLike, sd: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return the knots of the monotone fit of y[n] over x[n]; both ascend. y is known to `sd`[n] > 0."""
    from scipy.optimize import isotonic_regression  # noqa: PLC0415  150 ms, and most commands need none of SciPy

    order = np.argsort(np.asarray(x, np.float64), kind="stable")
    at, level = np.asarray(x, np.float64)[order], np.asarray(y, np.float64)[order]
    weights = np.asarray(sd, np.float64)[order] ** -2.0
    fitted = isotonic_regression(level, weights=weights)
    starts = fitted.blocks[:-1]
    knots = np.add.reduceat(at * weights, starts) / np.add.reduceat(weights, starts)
    # Of the same level measured again, and of levels pooled at one place, one knot: rounding may let such ones descend.
    knots = np.maximum.accumulate(knots)
    distinct = np.concatenate([[True], np.diff(knots) > 0])
    return knots[distinct], fitted.x[starts][distinct]


def crossing(
    x: npt.ArrayLike, y: npt.ArrayLike, sd: npt.ArrayLike, bound: float, *, above_least: bool = False
) -> Crossing | None:
    """Return the crossing of the monotone fit and a bound, with a 95 % interval.

    The interval is from resampling y within its `sd`. With `above_least` the bound counts from the fit's lowest value.
    What lies beyond the levels is None.
    """
    levels, spread = np.asarray(y, np.float64), np.asarray(sd, np.float64)
    at = _root(*curve(x, levels, spread), bound, above_least)
    random = np.random.default_rng(np.random.SeedSequence(1))
    drawn = (_root(*curve(x, random.normal(levels, spread), spread), bound, above_least) for _ in range(RESAMPLES))
    places = sorted(drawn)
    ends = places[int(0.025 * RESAMPLES)], places[int(0.975 * RESAMPLES) - 1]
    low, high = (end if math.isfinite(end) else None for end in ends)
    return (at, low, high) if math.isfinite(at) else None


def _root(knots: Floats, heights: Floats, bound: float, above_least: bool) -> float:
    bound += float(heights[0]) if above_least else 0.0
    if bound < heights[0]:
        return -math.inf
    if bound > heights[-1]:
        return math.inf
    if len(knots) == 1:
        return float(knots[0])
    from scipy.interpolate import PchipInterpolator  # noqa: PLC0415  as above

    roots = PchipInterpolator(knots, heights).solve(bound, extrapolate=False)
    # At the height of the last knot rounding can put the root beyond it.
    return float(roots[0] if roots.size else knots[np.argmin(np.abs(heights - bound))])
