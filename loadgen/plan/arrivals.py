"""Arrival processes as pure functions of a seed, without a clock.

Every random process is one of unit rate whose time is changed: with S(k) the k-th arrival at one a second and L(t) the
number expected by t, the k-th arrival is at the t with L(t) = S(k). A rate, a ramp and a burst are each only an L.

A schedule does not depend on how many workers share it, nor on where it is cut: a longer one begins with the shorter
(but for a ramp whose length follows from the number of requests).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sidelight.rundir.columns import Floats, Ints

Kind = Literal["poisson", "uniform", "gamma", "burst", "replay"]

# Its place among the streams spawned from a run's seed; 1 is the warm-up's, 2 the workloads'.
_ARRIVALS_KEY = (0,)
_BLOCK = 4096
BURST_S = 1.0  # the length of a burst, and of the pause behind it
# A thousand requests at one instant, then a long pause; far below, every gap would be rounded to none.
_LEAST_BURSTINESS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """An arrival process.

    poisson  independent exponential gaps; the first arrival is one gap after the start
    uniform  equal gaps; the first arrival is at 0
    gamma    independent gamma gaps of shape `burstiness`, as in `vllm bench serve --burstiness`: 1 is Poisson, less is
             burstier, more is more even; the gaps' coefficient of variation is 1/sqrt(burstiness). vLLM then stretches
             the whole so that the last arrival is due at n/rate; here the sampling error stays. As the first gap counts
             from the start, (1/burstiness - 1)/2 more than rate x time are expected in the long run
    burst    on for BURST_S, off for as long, and so on from the start; while on, gaps as gamma's (Poisson by default)
    replay   the offsets of a trace

    rate_per_s     requests/s. With `burst` the mean over whole cycles, so that a rate offers the same load whatever the
                   process; while on it is twice that. With a ramp the rate at the start, which may be 0. With `replay`
                   the mean rate that the trace is sped up or slowed down to; 0 leaves `speed`
    ramp_to_per_s  of poisson, uniform and gamma: the rate goes there evenly, within the schedule's duration, or, with a
                   number of requests alone, the time in which that many are expected; None: it stays
    trace_ns       int64[n] of replay: offsets from the trace's start, ascending
    speed          of replay: 2 halves every gap

    A field that the kind knows nothing of must be left alone. Raises ValueError for what is out of range.
    """

    kind: Kind
    rate_per_s: float = 0.0
    burstiness: float = 1.0
    ramp_to_per_s: float | None = None
    trace_ns: Ints | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        for problem in _out_of_range(self):
            raise ValueError(problem)


def _out_of_range(arrival: Arrival) -> Iterator[str]:
    may_be_zero = arrival.kind == "replay" or arrival.ramp_to_per_s is not None
    if not (0 < arrival.rate_per_s < math.inf or (may_be_zero and arrival.rate_per_s == 0)):
        yield f"a rate of {arrival.rate_per_s} requests/s; it must be positive"
    if not _LEAST_BURSTINESS <= arrival.burstiness < math.inf:
        yield f"a burstiness of {arrival.burstiness}; it must be finite and at least {_LEAST_BURSTINESS}"
    if arrival.ramp_to_per_s is not None:
        if arrival.kind not in {"poisson", "uniform", "gamma"}:
            yield f"{arrival.kind} arrivals cannot ramp; poisson, uniform and gamma can"
        if not 0 < arrival.ramp_to_per_s < math.inf:
            yield f"a ramp to {arrival.ramp_to_per_s} requests/s; it must be positive"
    if not 0 < arrival.speed < math.inf:
        yield f"a speed of {arrival.speed}; it must be positive"
    if arrival.trace_ns is not None and arrival.rate_per_s and not np.ptp(arrival.trace_ns):
        yield "a trace within one instant has no rate that could be changed"


def schedule(
    arrival: Arrival, *, seed: int, count: int | None = None, duration_s: float | None = None
) -> npt.NDArray[np.int64]:
    """Return offsets int64[n] in nanoseconds from the phase's start, not descending; a pure function of its arguments.

    With `count`, that many; with `duration_s`, those strictly before it; with both, whichever is reached first. A
    replayed trace needs neither, and gives no more than it has.

    Raises ValueError for a negative limit, or for no limit where one is needed.
    """
    if count is None and duration_s is None and arrival.kind != "replay":
        raise ValueError("an open loop needs a number of requests or a duration")
    if (count is not None and count < 0) or (duration_s is not None and not 0 <= duration_s < math.inf):
        raise ValueError("the number of requests and the duration must not be negative")
    if arrival.trace_ns is not None:
        times_s = arrival.trace_ns[:count] / (1e9 * _speed(arrival, arrival.trace_ns))
    else:
        times_s = _random_s(arrival, seed, count, duration_s)
    if duration_s is not None:
        times_s = times_s[times_s < duration_s]
    return np.rint(times_s * 1e9).astype(np.int64)


def expected(arrival: Arrival, at_s: float, *, count: int | None = None, duration_s: float | None = None) -> float:
    """Return the expected number of arrivals within the first `at_s` seconds.

    It is the integral of the intensity; not for replay.

    `count` and `duration_s` are those of the schedule, which a ramp's length may follow from.
    """
    rate = arrival.rate_per_s
    if arrival.kind == "burst":
        cycles, into_s = divmod(at_s, 2 * BURST_S)
        return (cycles + min(1.0, into_s / BURST_S)) * rate * 2 * BURST_S
    if arrival.ramp_to_per_s is None:
        return rate * at_s
    length_s = _ramp_length_s(arrival, count, duration_s)
    ramping_s, there_s = min(at_s, length_s), max(0.0, at_s - length_s)
    ramped = rate * ramping_s + (arrival.ramp_to_per_s - rate) / length_s * ramping_s**2 / 2
    return ramped + arrival.ramp_to_per_s * there_s


def _speed(arrival: Arrival, trace_ns: Ints) -> float:
    if not arrival.rate_per_s:
        return arrival.speed
    span_s = (trace_ns[-1] - trace_ns[0]) / 1e9
    return float(arrival.rate_per_s * span_s / (len(trace_ns) - 1))


def _random_s(arrival: Arrival, seed: int, count: int | None, duration_s: float | None) -> Floats:
    """Return arrival times in seconds: `count` of them, or as many as cover the duration, and some more."""
    ramp_s = _ramp_length_s(arrival, count, duration_s)
    if count is not None:
        return _at_s(arrival, _unit_rate(arrival, count, seed), ramp_s)
    n = math.ceil(expected(arrival, duration_s or 0.0, duration_s=duration_s)) + _BLOCK
    while True:
        times_s = _at_s(arrival, _unit_rate(arrival, n, seed), ramp_s)
        # The first n is a guess; go on until the duration is covered.
        if times_s[-1] >= (duration_s or 0.0):
            return times_s
        n *= 2


def _unit_rate(arrival: Arrival, n: int, seed: int) -> Floats:
    """Return the first n arrivals at a mean of one a second."""
    if arrival.kind == "uniform":
        return np.arange(n, dtype=np.float64)
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_ARRIVALS_KEY))
    # A gamma of shape 1 is an exponential, and numpy draws it as one.
    return np.cumsum(generator.standard_gamma(arrival.burstiness, n)) / arrival.burstiness


def _at_s(arrival: Arrival, unit: Floats, ramp_s: float) -> Floats:
    """Change the time of a unit-rate process: the exact inverse of the number expected by a moment."""
    rate, rate_to = arrival.rate_per_s, arrival.ramp_to_per_s
    if arrival.kind == "burst":
        cycle_s = 2 * BURST_S
        cycles, into = np.divmod(unit, rate * cycle_s)
        return cycles * cycle_s + into / (rate * cycle_s) * BURST_S
    if rate_to is None:
        return unit / rate
    ramped = expected(arrival, ramp_s, duration_s=ramp_s)
    inside = np.minimum(unit, ramped)
    root = np.sqrt(np.maximum(0.0, rate**2 + 2 * (rate_to - rate) / ramp_s * inside))
    # The form of the quadratic's solution that loses no digits, for a level ramp neither; 0 is at 0.
    times_s: Floats = np.divide(2 * inside, rate + root, out=np.zeros_like(inside), where=inside > 0)
    return np.minimum(times_s, ramp_s) + (unit - inside) / rate_to


def _ramp_length_s(arrival: Arrival, count: int | None, duration_s: float | None) -> float:
    if arrival.ramp_to_per_s is None:
        return 0.0
    if duration_s is not None:
        # Nothing is before the end of a duration of 0, however it ramps.
        return duration_s or 1.0
    return 2 * max(1, count or 0) / (arrival.rate_per_s + arrival.ramp_to_per_s)
