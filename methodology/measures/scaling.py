"""How a time grows with the length of the input: its exponent, and the simplest model that describes it.

Requests of one length differ by chance, and by how much they do is known from their repetition: it weights the lengths,
and gives the exponent its interval. Models are compared by Akaike's criterion for small samples (Hurvich and Tsai 1989,
"Regression and time series model selection in small samples"). Their residuals are relative to the mean of a length,
and no coefficient is negative, for no part of a time is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidelight.correlator.statistics.intervals import Ends
from sidelight.rundir.columns import Floats
from sidelight.rundir.stats import Missing

LEAST_LENGTHS = 3  # with two lengths any model of two numbers fits
# The criterion alone takes a superfluous number in in 16 % of the cases; so much better it must be for each, in 1 %.
NEARLY = 4.0
_POWERS: dict[str, tuple[int, ...]] = {"linear": (1,), "affine": (0, 1), "quadratic": (0, 1, 2)}
_MOST_POWER = 4.0
# Of a coefficient in ms, by the power of the tokens that it goes with.
_UNITS: dict[float, tuple[float, str]] = {
    0: (1.0, "ms"),
    1: (1e3, "microseconds per input token"),
    2: (1e6, "ns per input token squared"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingModel:
    """A model of times, ms, by tokens n: the sum of `coefficients` times n to `powers`."""

    name: str
    coefficients: tuple[float, ...]
    powers: tuple[float, ...]
    r2: float  # share of the variance of all times that it explains
    aicc: float  # Akaike's criterion; only differences mean something

    def at(self, tokens: npt.ArrayLike) -> Floats:
        """Return the modelled times, ms, for numbers of tokens [n]."""
        lengths = np.asarray(tokens, np.float64)
        return np.asarray(
            sum(each * lengths**power for each, power in zip(self.coefficients, self.powers, strict=True))
        )

    @property
    def formula(self) -> str:
        """Return it in words: `68 microseconds per input token`."""
        if self.name == "power":
            return f"{self.coefficients[0]:.3g} ms x tokens^{self.powers[0]:.3f}"
        scaled = zip(self.powers, self.coefficients, strict=True)
        terms = (f"{scale * value:.3g} {unit}" for power, value in scaled if value for scale, unit in [_UNITS[power]])
        return " + ".join(terms)

    @property
    def words(self) -> str:
        """Return the fit in the draft's words: `Linear (R^2 = 0.9987), 68 microseconds per input token`."""
        return f"{self.name.capitalize()} (R^2 = {self.r2:.5g}), {self.formula}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLength:
    """Measurements at one length: input tokens [n] of its requests, and their times [n], ms, all above 0."""

    tokens: Floats
    times_ms: Floats


def exponent(measured: Sequence[AtLength]) -> Ends | Missing:
    """Return the exponent k of times that grow as length^k, with its interval.

    It is the slope of the mean logarithms over these lengths, every length alike. The 95 % interval, by Student's t, is
    of repetition alone: where no power describes the times, k is that of these lengths, and of no others.
    """
    if len(measured) < 2:
        return Missing("one length has no exponent")
    lengths = np.array([np.log(each.tokens).mean() for each in measured])
    weights = (lengths - lengths.mean()) / ((lengths - lengths.mean()) ** 2).sum()
    slope = float(weights @ [np.log(each.times_ms).mean() for each in measured])
    sizes = np.array([len(each.times_ms) for each in measured])
    if sizes.min() < 2:
        return slope, None, None
    variances = np.array([np.log(each.times_ms).var(ddof=1) for each in measured])
    parts = weights**2 * variances / sizes
    if not parts.sum() > 0:
        return slope, slope, slope
    from scipy.special import stdtrit  # noqa: PLC0415  150 ms, and a run without requests needs none of SciPy

    degrees = float(parts.sum() ** 2 / (parts**2 / (sizes - 1)).sum())
    half = float(stdtrit(degrees, 0.975)) * math.sqrt(parts.sum())
    return slope, slope - half, slope + half


def models(measured: Sequence[AtLength]) -> list[ScalingModel] | Missing:
    """Return the models with the best first: the simplest whose criterion is within 4 of the lowest.

    - A model has fewer numbers than there are lengths. Missing: below three lengths.
    """
    if len(measured) < LEAST_LENGTHS:
        return Missing(f"at least {LEAST_LENGTHS} lengths tell one model from another, and {len(measured)} ended")
    tokens = np.concatenate([each.tokens for each in measured])
    times_ms = np.concatenate([each.times_ms for each in measured])
    scale = np.concatenate([np.full(len(each.times_ms), spread) for each, spread in _spreads(measured)])
    fitted = [
        _fit(name, powers, tokens, times_ms, scale) for name, powers in _POWERS.items() if len(powers) < len(measured)
    ]
    fitted.append(_power(tokens, times_ms, scale))
    fitted.sort(key=lambda model: model.aicc)
    near = [model for model in fitted if model.aicc <= fitted[0].aicc + NEARLY]
    best = min(near, key=lambda model: (len(model.coefficients) + (model.name == "power"), model.aicc))
    return [best, *(model for model in fitted if model is not best)]


def _spreads(measured: Sequence[AtLength]) -> list[tuple[AtLength, float]]:
    """Return by how much requests of each length differ, ms; the spread of all is worth that of one request more."""
    means = [float(each.times_ms.mean()) for each in measured]
    squares = [float(((each.times_ms / mean - 1) ** 2).sum()) for each, mean in zip(measured, means, strict=True)]
    degrees = sum(len(each.times_ms) - 1 for each in measured)
    pooled = sum(squares) / degrees if degrees and sum(squares) > 0 else 1.0
    return [
        (each, mean * math.sqrt((square + pooled) / len(each.times_ms)))
        for each, mean, square in zip(measured, means, squares, strict=True)
    ]


def _fit(name: str, powers: Sequence[float], tokens: Floats, times_ms: Floats, scale: Floats) -> ScalingModel:
    from scipy.optimize import nnls  # noqa: PLC0415  150 ms, and a run without requests needs none of SciPy

    columns = np.column_stack([(tokens / tokens.max()) ** power for power in powers])
    scaled, residual = nnls(columns / scale[:, None], times_ms / scale)
    coefficients = scaled / float(tokens.max()) ** np.asarray(powers)
    size, numbers = len(times_ms), len(powers) + (name == "power") + 1
    mean_square = max(residual**2 / size, 1e-24)
    left = max(size - numbers - 1, 1)
    deviations = float(((times_ms - times_ms.mean()) ** 2).sum())
    return ScalingModel(
        name=name,
        coefficients=tuple(coefficients.tolist()),
        powers=tuple(powers),
        r2=1 - float(((times_ms - columns @ scaled) ** 2).sum()) / deviations if deviations else math.nan,
        aicc=size * math.log(mean_square) + 2 * numbers + 2 * numbers * (numbers + 1) / left,
    )


def _power(tokens: Floats, times_ms: Floats, scale: Floats) -> ScalingModel:
    from scipy.optimize import minimize_scalar  # noqa: PLC0415  as above

    def criterion(power: float) -> float:
        return _fit("power", (power,), tokens, times_ms, scale).aicc

    power = float(minimize_scalar(criterion, bounds=(0.0, _MOST_POWER), method="bounded").x)
    return _fit("power", (power,), tokens, times_ms, scale)
