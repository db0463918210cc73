"""Small linear models of a time per request, learned from sums over intervals alone: no request is labelled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidelight.rundir.columns import Floats, Indices

HUBER = 1.345
ROUNDS = 12
WINSOR = 4.0
FEW = 15.0  # calibrated on simulated engines that chunk prefills (tests/simulated_cases.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePrior:
    """Prior mean and variance [n] of each request's time, in s and s^2.

    They hold before the sums of its interval are used.
    """

    mean: Floats
    variance: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """Fitted model: the prior, weights[F], and the median error of a sum, in s over the root of its requests."""

    prior: TimePrior
    weights: Floats
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSums:
    """Training data: interval[m] (0..C-1) and features[m, F] of each member, and sums[C] of each interval.

    `unmatched`[C] are requests in the sums without features; they count with the mean features.
    """

    interval: Indices
    features: Floats
    sums: Floats
    unmatched: Floats


def around(at_s: Floats, values: Floats, centre_s: Floats, reach_s: float) -> TimePrior:
    """Return mean and variance of values (at at_s[n]) within reach of each centre [C]; of all where there are none."""
    order = np.argsort(at_s, kind="stable")
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(np.column_stack((values, values**2))[order], axis=0)])
    low = np.searchsorted(at_s[order], centre_s - reach_s)
    high = np.searchsorted(at_s[order], centre_s + reach_s, side="right")
    few = high - low < 2
    low, high = np.where(few, 0, low), np.where(few, len(at_s), high)
    moments = (sums[high] - sums[low]) / np.maximum(high - low, 1)[:, None]
    return TimePrior(mean=moments[:, 0], variance=np.maximum(moments[:, 1] - moments[:, 0] ** 2, 0.0))


def learn(data: TrainingSums, features: Floats, *, floor_share: float, least_s: float) -> FittedModel:
    """Fit non-negative weights to the sums, and predict the times of features[n, F].

    Weighted by 1 / (requests x mean^2), an unmatched request three times; Huber's weights against outliers. The
    variance a + b mean^2 is fitted to the squared residuals of the sums, winsorised, and widened where intervals are
    few beside the weights, whose fit makes residuals small; it is at least least_s^2 + (floor_share mean)^2.
    """
    intervals = len(data.sums)
    matched = np.bincount(data.interval, minlength=intervals).astype(np.float64)
    total = np.zeros((intervals, data.features.shape[1]))
    np.add.at(total, data.interval, data.features)
    total += data.unmatched[:, None] * data.features.mean(axis=0)
    weight = 1.0 / np.maximum(matched + 3.0 * data.unmatched, 1.0)
    theta = _robust(total, data.sums, weight)
    expected = data.features @ theta
    squares = data.unmatched * np.mean(expected**2)
    np.add.at(squares, data.interval, expected**2)
    a, b = _variance(data.sums - total @ theta, matched + data.unmatched, squares)
    widened = 1.0 + FEW / max(intervals - data.features.shape[1], 1)
    mean = features @ theta
    variance = np.maximum(widened * (a + b * mean**2), least_s**2 + (floor_share * mean) ** 2)
    error = float(np.median(np.abs(data.sums - total @ theta) * np.sqrt(weight)))
    return FittedModel(prior=TimePrior(mean=mean, variance=variance), weights=theta, error_s=error)


def _robust(total: Floats, sums: Floats, weight: Floats) -> Floats:
    """Solve weighted non-negative least squares with Huber's weights."""
    scale = np.sqrt((total**2).mean(axis=0))
    scale = np.where(scale > 0, scale, 1.0)
    huber = np.ones(len(sums))
    theta = np.zeros(total.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weight * huber)
        before = theta
        theta = nonnegative_least_squares(total / scale * root[:, None], sums * root) / scale
        error = np.abs(sums - total @ theta) * np.sqrt(weight)
        limit = HUBER * 1.4826 * max(float(np.median(error)), 1e-9)
        huber = np.minimum(1.0, limit / np.maximum(error, 1e-12))
        if np.allclose(theta, before, rtol=1e-4, atol=1e-12):
            break
    return theta


def _variance(residual: Floats, count: Floats, squares: Floats) -> tuple[float, float]:
    """Fit residual^2 = a count + b squares, a and b not negative."""
    per_request = residual**2 / np.maximum(count, 1)
    limit = (WINSOR * 1.4826 * np.sqrt(np.median(per_request))) ** 2
    clipped = np.minimum(per_request, max(float(limit), 1e-12))
    design = np.column_stack((count, squares)) / np.maximum(count, 1)[:, None]
    root = 1.0 / np.maximum(design @ [1e-6, 0.04], 1e-12)
    a, b = nonnegative_least_squares(design * root[:, None], clipped * root)
    return float(a), float(b)


def nonnegative_least_squares(design: Floats, target: Floats) -> Floats:
    """Return x[F], none of it negative, with the least |design[m, F] x - target[m]|.

    Lawson and Hanson 1974, "Solving Least Squares Problems", chapter 23, on the triangle of a QR decomposition. SciPy's
    nnls finds the same, but importing scipy.optimize takes a fifth of a second of each report.
    """
    size = design.shape[1]
    triangle: Floats = np.linalg.qr(np.column_stack((design, target))).R
    columns, rest = triangle[:, :size], triangle[:, size]
    tolerance = 10 * np.finfo(np.float64).eps * max(triangle.shape) * np.linalg.norm(columns) * np.linalg.norm(rest)
    x = np.zeros(size)
    free = np.zeros(size, np.bool_)
    for _ in range(3 * size):
        descent = np.where(free, -np.inf, columns.T @ (rest - columns @ x))
        if descent.max(initial=-np.inf) <= tolerance:
            break
        free[descent.argmax()] = True
        while free.any():
            best = np.zeros(size)
            best[free] = np.linalg.lstsq(columns[:, free], rest)[0]
            blocked = free & (best <= 0)
            if not blocked.any():
                x = best
                break
            # As far as the first bound, which is then kept to.
            steps = np.divide(x, x - best, out=np.zeros(size), where=blocked & (x > 0))
            step = steps[blocked].min()
            x = x + step * (best - x)
            free &= ~(blocked & (steps <= step))
            x[~free] = 0.0
    return x
