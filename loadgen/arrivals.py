"""When to send: arrival processes as pure functions of a seed, without a clock.

A schedule does not depend on how many workers share it, nor on where it is cut: a longer one begins with the shorter.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["poisson", "uniform"]
KINDS: tuple[Kind, ...] = ("poisson", "uniform")

# Its place among the streams that may be spawned from a run's seed.
_SPAWN_KEY = (0,)
_BLOCK = 4096


def offsets_ns(
    kind: str, rate_per_s: float, *, seed: int, count: int | None = None, duration_s: float | None = None
) -> npt.NDArray[np.int64]:
    """Offsets int64[n] in nanoseconds from the phase's start, not descending.

    poisson  independent exponential gaps of mean 1/rate; the first arrival is one gap after the start
    uniform  equal gaps of 1/rate; the first arrival is at 0

    With `count`, that many; with `duration_s`, those strictly before it; with both, whichever is reached first.

    Raises ValueError for an unknown kind, a rate that is not positive and finite, a negative limit, or no limit.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown arrival process {kind!r}; known: {', '.join(KINDS)}")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ValueError(f"a rate of {rate_per_s} requests/s; it must be positive")
    if count is None and duration_s is None:
        raise ValueError("an open loop needs a number of requests or a duration")
    if (count is not None and count < 0) or (duration_s is not None and not 0 <= duration_s < math.inf):
        raise ValueError("the number of requests and the duration must not be negative")
    arrive = _poisson_s if kind == "poisson" else _uniform_s
    n = count if count is not None else math.ceil(rate_per_s * (duration_s or 0)) + _BLOCK
    times_s = arrive(n, rate_per_s, seed)
    if duration_s is not None:
        # The block above is a guess; go on until the duration is covered.
        while count is None and times_s[-1] < duration_s:
            n *= 2
            times_s = arrive(n, rate_per_s, seed)
        times_s = times_s[times_s < duration_s]
    return np.rint(times_s * 1e9).astype(np.int64)


def _poisson_s(n: int, rate_per_s: float, seed: int) -> npt.NDArray[np.float64]:
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_SPAWN_KEY))
    gaps = generator.exponential(1.0, n)
    return np.cumsum(gaps) / rate_per_s


def _uniform_s(n: int, rate_per_s: float, _seed: int) -> npt.NDArray[np.float64]:
    return np.arange(n, dtype=np.float64) / rate_per_s
