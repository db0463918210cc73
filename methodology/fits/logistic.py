"""Logistic fit of the load at which too many requests exceed an objective's bound.

The curve goes through the steps' shares of requests beyond the bound. A percentile of a short step is mostly too low,
since the few long waits that make it come seldom and together. The share of the requests beyond a bound is right on the
mean, however short a step is and however much requests resemble their neighbours; its logit rises about evenly with the
load.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sidelight.methodology.fits.monotone import Crossing
from sidelight.rundir.columns import Floats

_Z95 = 1.96
# Of the slope over the highest load: wide, it only keeps the curve finite where no step is between none and all.
_SLOPE_SD = 40.0
_MOST_ITERATIONS = 100


def share_crossing(
    loads: npt.ArrayLike, shares: npt.ArrayLike, effective: npt.ArrayLike, allowed: float
) -> Crossing | None:
    """Return the load with a share of `allowed` beyond the bound, and its interval.

    The interval is at 95 %.

    shares, effective [n]  of the requests of each step, and how many independent requests it says as much as

    The interval is of where a line with uncertain coefficients reaches a height (Fieller 1954, "Some problems in
    interval estimation"), and has no end where the slope may be 0. A curve that falls reaches nothing: None.
    """
    at, share, weight = (np.asarray(each, np.float64) for each in (loads, shares, effective))
    scale = float(at.max())
    height, slope, covariance, middle = _fitted(at / scale, share, weight)
    rise = math.log(allowed / (1 - allowed)) - height
    if slope <= 0:
        return None
    a = slope**2 - _Z95**2 * covariance[1, 1]
    b = -2 * (slope * rise + _Z95**2 * covariance[0, 1])
    c = rise**2 - _Z95**2 * covariance[0, 0]
    roots = np.sort(np.roots([a, b, c]).real) + middle if a > 0 else ()
    low, high = (scale * float(root) if root > 0 else None for root in roots) if len(roots) == 2 else (None, None)
    return scale * (rise / slope + middle), low, high


def _fitted(x: Floats, share: Floats, weight: Floats) -> tuple[float, float, Floats, float]:
    """Return the logit's height and slope about the mean x, their covariance, and that mean.

    They are found by Newton's method.
    """
    middle = float(np.average(x, weights=weight))
    design = np.column_stack([np.ones_like(x), x - middle])
    ridge = np.diag([1e-9, _SLOPE_SD**-2])
    usual = float(np.clip(np.average(share, weights=weight), 1e-4, 1 - 1e-4))
    line = np.array([math.log(usual / (1 - usual)), 0.0])
    for _ in range(_MOST_ITERATIONS):
        fitted = 1 / (1 + np.exp(-np.clip(design @ line, -30, 30)))
        curvature = design.T @ ((weight * fitted * (1 - fitted))[:, None] * design) + ridge
        step = np.linalg.solve(curvature, design.T @ (weight * (share - fitted)) - ridge @ line)
        line += np.clip(step, (-2, -10), (2, 10))
        if np.abs(step).max() < 1e-9:
            break
    return float(line[0]), float(line[1]), np.linalg.inv(curvature), middle
