"""Energy over a measured window, from power samples or energy counters, and per token.

Between two readings the energy is the counter's difference where the device has a counter, else the trapezoid under
the line between the two powers (the trapezoidal rule); at the window's edges the part of it that lies inside. Where
more than three usual intervals lie between two readings nothing is assumed: the gap is not covered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.records import DeviceSamples
from sidelight.scraper.window.window import Window

Method = Literal["counter", "trapezoid"]
GAP_INTERVALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of one device in the `covered_s` seconds of a window with readings.

    `peak_power_w`: the highest power read in the window; of a device with a counter alone, the highest mean between two
    of its readings. `gaps` and `gap_s`: pieces of the window between readings too far apart, and their length.
    """

    energy_j: float
    covered_s: float
    peak_power_w: float
    method: Method
    gaps: int
    gap_s: float

    @property
    def mean_power_w(self) -> float:
        """Return the mean over the covered seconds."""
        return self.energy_j / self.covered_s


def energy(samples: DeviceSamples, window: Window) -> Energy | Missing:
    """Return a device's energy in the window, by its moving counter, else by its power."""
    by_counter = counter_energy(
        samples.at_ns,
        samples.energy_j,
        window,
        interval_s=samples.interval_s,
        range_j=samples.energy_range_j,
    )
    if isinstance(by_counter, Missing):
        by_power = trapezoid_energy(samples.at_ns, samples.power_w, window, interval_s=samples.interval_s)
        no_power = isinstance(by_power, Missing) and not np.isfinite(samples.power_w).any()
        return by_counter if no_power and np.isfinite(samples.energy_j).any() else by_power
    peak_w = _highest(inside(samples, samples.power_w, window))
    return by_counter if math.isnan(peak_w) else replace(by_counter, peak_power_w=peak_w)


def trapezoid_energy(at_ns: Ints, power_w: Floats, window: Window, *, interval_s: float) -> Energy | Missing:
    """Return the energy over the window from power samples, by the trapezoidal rule.

    Power [T] is in W, read at int64[T] ns; NaN is not a reading.

    Exact where power changes linearly between readings; the energies of adjacent windows add up.
    """
    known = np.isfinite(power_w)
    pieces = _Pieces.of(at_ns[known], window, interval_s)
    if not known.any():
        return Missing("it reports no power")
    # Power in the middle of the piece inside the window: times its length, the trapezoid under the line there.
    power = power_w[known]
    middle_w = power[:-1] + np.diff(power) * pieces.middle
    within = window.holds(at_ns) & known
    peak_w = _highest(power_w[within]) if within.any() else _highest(middle_w[pieces.covered_s > 0])
    return pieces.energy(middle_w, peak_w, "trapezoid")


def counter_energy(
    at_ns: Ints, energy_j: Floats, window: Window, *, interval_s: float, range_j: float = math.nan
) -> Energy | Missing:
    """Take the difference of a cumulative counter [T] in J over the window; NaN is not a reading.

    A counter that falls has wrapped around at `range_j`; one without a range was reset, and what lies between is not
    covered. One that did not move at all is Missing: a device always uses energy, so the counter is dead.
    """
    known = np.isfinite(energy_j)
    if not known.any():
        return Missing("it has no energy counter")
    pieces = _Pieces.of(at_ns[known], window, interval_s)
    used_j = np.diff(energy_j[known])
    used_j = np.where(used_j < 0, used_j + range_j, used_j)  # NaN without a range
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_w = used_j / pieces.length_s
    energy = pieces.energy(mean_w, _highest(mean_w[pieces.covered_s > 0]), "counter")
    if isinstance(energy, Energy) and energy.energy_j == 0:
        return Missing("its energy counter did not move")
    return energy


def inside(samples: DeviceSamples, column: Floats, window: Window) -> Floats:
    """Return the readings in the window, without NaN."""
    return column[window.holds(samples.at_ns) & np.isfinite(column)]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The T-1 spans between readings, and how much of each lies in the window: float64[T-1].

    `middle` is where the middle of the part inside lies, 0 at the earlier reading and 1 at the later. `covered_s` is
    the length of the part inside, 0 where there is none or the span is a gap.
    """

    window: Window
    length_s: Floats
    middle: Floats
    covered_s: Floats
    gap_s: Floats

    @classmethod
    def of(cls, at_ns: Ints, window: Window, interval_s: float) -> _Pieces:
        length_ns = np.diff(at_ns)
        low_ns = np.maximum(at_ns[:-1], window.start_ns)
        high_ns = np.minimum(at_ns[1:], window.end_ns)
        inside_s = np.maximum(high_ns - low_ns, 0) / 1e9
        # Counted from the start of the span, half nanoseconds stay exact in float64.
        from_start_ns = (low_ns - at_ns[:-1]) + (high_ns - low_ns) / 2
        gap = length_ns / 1e9 > GAP_INTERVALS * interval_s
        return cls(
            window=window,
            length_s=length_ns / 1e9,
            middle=np.divide(from_start_ns, length_ns, out=np.zeros(len(length_ns)), where=length_ns > 0),
            covered_s=np.where(gap, 0.0, inside_s),
            gap_s=np.where(gap, inside_s, 0.0),
        )

    def energy(self, power_w: Floats, peak_w: float, method: Method) -> Energy | Missing:
        """Sum mean power [T-1] over the pieces inside; NaN power is not covered."""
        usable = (self.covered_s > 0) & np.isfinite(power_w)
        covered_s = float(self.covered_s[usable].sum())
        if not self.window.end_ns > self.window.start_ns:
            return Missing("no measured window")
        if not covered_s:
            return Missing("fewer than two readings in a row cover any of the window")
        return Energy(
            energy_j=float((power_w[usable] * self.covered_s[usable]).sum()),
            covered_s=covered_s,
            peak_power_w=peak_w,
            method=method,
            gaps=int((self.gap_s > 0).sum()),
            gap_s=float(self.gap_s.sum()),
        )


def _highest(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else math.nan
