"""Trend of a quantity during a load: a line through values that resemble their neighbours, with its interval."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from msgspec import Struct

from sidelight.correlator.statistics.bootstrap import block_count, block_length, interval95, resampled_sums
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Count, doc

Interval = tuple[float, float]

PARTS = 10
# A line through a random walk of variance v a second, over T seconds, has a slope of variance 1.2 v / T.
WALK = math.sqrt(1.2)
UNIT = "unit of the quantity/s"


class Trend(Struct, frozen=True, kw_only=True):
    """How a quantity moved while a load lasted."""

    slope: Annotated[float, doc("slope of the line through it, by least squares", UNIT)]
    ci95: Annotated[
        Interval | None, doc("95 % interval of the slope, if it varies about the line; null below two blocks", UNIT)
    ]
    rising: Annotated[
        float,
        doc("Kendall's tau of its means over ten parts; 1: each is above all before", "ratio"),
    ]
    blocks: Annotated[Count, doc("blocks behind the interval; below 10 it is a guess", "blocks")]

    @property
    def low(self) -> float:
        """Return the lower end of the interval, minus infinity where there is none."""
        return -math.inf if self.ci95 is None else self.ci95[0]

    @property
    def high(self) -> float:
        """Return the upper end of the interval, infinity where there is none."""
        return math.inf if self.ci95 is None else self.ci95[1]


def trend(at_s: Floats, values: Floats) -> Trend:
    """Return the line through values [n >= 10] at ascending moments; blocks of its residuals are resampled."""
    moments = at_s - at_s.mean()
    spread = float(moments @ moments) or 1.0
    slope = float(moments @ values) / spread
    residuals = values - values.mean() - slope * moments
    block = block_length(residuals)
    blocks = block_count(len(values), block)
    resampled = slope + resampled_sums((moments * residuals)[:, None], block)[:, 0] / spread
    means = np.array([part.mean() for part in np.array_split(values, PARTS)])
    rising = np.sign(means[None, :] - means[:, None])[np.triu_indices(PARTS, 1)].mean()
    return Trend(slope=slope, ci95=interval95(slope, resampled, blocks), rising=float(rising), blocks=blocks)


def walk_interval(growth: float, completions: Floats, arrivals: int) -> tuple[Interval | None, int]:
    """Return a 95 % interval of a random walk's growth, and its number of blocks.

    The walk is what is left over of `arrivals` as they were, while completions [n] of equal intervals vary.
    """
    block = block_length(completions)
    blocks = block_count(len(completions), block)
    drawn = block * math.ceil(len(completions) / block)
    sums = resampled_sums(completions[:, None], block)[:, 0] * len(completions) / drawn
    return interval95(growth, growth + WALK * (sums - completions.sum()) / arrivals, blocks), blocks
