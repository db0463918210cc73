"""Looks at a percentile of the TTFT until its interval is narrow: at most five, over the requests of all steps so far.

Each has a level of its own, so that 95 % hold after any of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.statistics.intervals import QuantileInterval, of_sorted
from sidelight.methodology.study.model import Finished
from sidelight.methodology.study.outcome import QUANTILES, TTFT_BIN

LOOKS = 5
LOOK_LEVEL = 1 - 0.05 / LOOKS
_UNTIL = re.compile(r"ttft_(p50|p90|p95|p99|p99_9)\s*(?:±|\+-|\+/-)\s*(\d+(?:\.\d+)?)\s*%")


def parse_until(text: str) -> tuple[str, float]:
    """Return the percentile and the relative width that `--until` asks for. Raises ValueError, one line."""
    match = _UNTIL.fullmatch(text.strip())
    if match is None or not 0 < float(match[2]) <= 100:
        raise ValueError(f"--until {text}: must be a percentile of the TTFT and a width, as in ttft_p99±10%")
    return match[1], float(match[2]) / 100


def pooled(levels: Sequence[Finished], name: str) -> QuantileInterval:
    """Return a percentile over all steps' requests, at the level of one look of five.

    It is of counts in bins of 1 %, whose outer edges count: those of the values themselves are never wider.
    """
    bins = sorted({at for each in levels for at in each.outcome.ttft_counts})
    counts = [sum(each.outcome.ttft_counts.get(at, 0) for each in levels) for at in bins]
    tau = tau_of(levels, name)
    first, last = (
        of_sorted(np.repeat(np.exp(TTFT_BIN * (np.asarray(bins) + edge)), counts), QUANTILES[name], tau, LOOK_LEVEL)
        for edge in (0, 1)
    )
    return replace(first, high=last.high)


def tau_of(levels: Sequence[Finished], name: str) -> float:
    """Return the autocorrelation time of all steps' requests: those of different steps are independent."""
    sizes = [sum(each.outcome.ttft_counts.values()) for each in levels]
    taus = [each.outcome.percentiles["ttft_ms"][name].tau for each in levels if each.outcome.ttft_counts]
    effective = sum(size / tau for size, tau in zip(filter(None, sizes), taus, strict=True))
    return sum(sizes) / effective if effective else 1.0


def width_of(levels: Sequence[Finished], name: str) -> float | None:
    """Return the relative distance of the farther end of a percentile's interval; None: not known."""
    if not any(each.outcome.ttft_counts for each in levels):
        return None
    interval = pooled(levels, name)
    if interval.low is None or interval.high is None or not interval.estimate:
        return None
    return max(interval.high - interval.estimate, interval.estimate - interval.low) / interval.estimate
