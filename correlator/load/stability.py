"""Was a load sustained, or did requests pile up for as long as it lasted?

A system that is offered more than it serves has no steady state: its queue, and with it every latency, depends on how
long the load lasted (Baccelli and Foss 1995, "On the saturation rule for the stability of queues"). A client sees that
by when requests arrived and ended; the engine's own queue, where a page shows it, makes the verdict surer. How often
it is right, measured over loads of 50 to 150 % of the capacity, stands in docs/reference/metrics/methodology.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sidelight.correlator.load.trend import Interval, Trend, trend, walk_interval
from sidelight.loadgen.requests.rates import EARLY_REQUESTS, LEAST_SHARE, RAMP_RESIDENCES, ramp
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Count, Ratio, doc

Verdict = Literal["stable", "growing", "undecided"]

LEAST_REQUESTS = 20
LEAST_SCRAPES = 10
INTERVALS = 40  # of the judged time
# Shares of the arrivals: less left over is not called growing, less left over at most is called stable.
LEAST_GROWTH, TOLERATED_GROWTH = 0.02, 0.05
UNSEEN_GROWTH = 0.1  # less, of requests of which none waited in the engine, is not called growing
# Kendall's tau: of what grows at least the first, of what is stable below the second.
RISING, STEADY = 0.6, 0.5
# By which share of the time in which a request arrives each further one in flight must make requests longer, where less
# than RARELY of the scrapes saw any wait. Beyond the capacity it is 1 and more; in a burst of arrivals it is little.
CROWDED, RARELY = 0.5, 0.2
LONGER = 0.1  # by how much of the first requests' time in flight the later ones' must grow
ALWAYS, SELDOM, NEVER = 0.95, 0.5, 0.05  # share of the scrapes that saw requests wait
# Of a load hardly longer than its requests: the later half against the first ones; the same where times in flight rise
# that steeply; how many of the arrivals wait. A load shorter than that share of a request is one burst.
TIMES_LONGER, TIMES_STEEP, STEEP, MOST, BURST = 3.0, 2.0, 1.0, 0.5, 0.25


class Stability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests piled up for as long as a load lasted, and the evidence."""

    verdict: Annotated[
        Verdict | None,
        doc(
            "`growing`: overloaded, requests piled up; `stable`: they did not; `undecided`: this run cannot say; null: "
            "not judged"
        ),
    ]
    reason: Annotated[str, msgspec.Meta(min_length=1), doc("why that is the verdict")]
    growth: Annotated[
        float | None,
        doc(
            "slope of the requests in flight over the rate of arrivals: the share of the arrivals left over; "
            "null for a load hardly longer than its requests",
            "ratio",
        ),
    ] = None
    ci95: Annotated[
        Interval | None,
        doc("95 % interval of `growth`, as of a random walk", "ratio"),
    ] = None
    blocks: Annotated[Count, doc("blocks of completions behind `ci95`; below 10 it is a guess", "blocks")] = 0
    capacity_per_s: Annotated[
        float | None,
        doc(
            "completions a second in the judged time; null unless `growing`",
            "requests/s",
        ),
    ] = None
    arrivals: Annotated[Count, doc("requests that arrived in the judged time", "requests")] = 0
    completions: Annotated[Count, doc("requests that ended in the judged time", "requests")] = 0
    open_at_end: Annotated[Count, doc("requests in flight at the last arrival, that one included", "requests")] = 0
    from_s: Annotated[float | None, doc("begin of the judged time after the first arrival, behind the ramp", "s")] = (
        None
    )
    until_s: Annotated[float | None, doc("its end, the last arrival", "s")] = None
    in_flight: Annotated[
        Trend | None, doc("of the requests in flight; null for a load hardly longer than its requests")
    ] = None
    residence: Annotated[
        Trend | None, doc("of the time in flight, in s, by when a request arrived; null below 20 that ended")
    ] = None
    waiting: Annotated[Trend | None, doc("of the requests waiting in the engine; null below ten scrapes")] = None
    queued_ratio: Annotated[
        Ratio | None, doc("share of the scrapes in the second half of the load that saw requests wait", "ratio")
    ] = None


def verdict(at_s: npt.ArrayLike, waiting: npt.ArrayLike, arrived_s: npt.ArrayLike, ended_s: npt.ArrayLike) -> Stability:
    """Judge the stability of a load: whether requests piled up from the first arrival to the last; deterministic.

    at_s, waiting [t]  the engine's queue at some moments; may be empty, NaN is unknown
    arrived_s [n]      when requests arrived, in any order
    ended_s            when each ended [n], NaN of one that did not. Of another length, or where one would have ended
                       before it arrived: when any ended, so that how long each took is not known

    - A request that failed or was refused ended; one that was given up did not.
    - Fewer than 20 arrivals: undecided. A load of less than four times what its first requests took: never stable.
    - Loads that rise, or come in a few long bursts, have no steady state, and may be called growing.
    """
    flow = _flow(arrived_s, ended_s)
    if len(flow.arrived_s) < LEAST_REQUESTS:
        count = len(flow.arrived_s)
        sent = "1 request was" if count == 1 else f"{count} requests were"
        reason = f"{sent} sent, at least {LEAST_REQUESTS} are needed"
        return Stability(verdict="undecided", reason=reason, arrivals=count)
    evidence = _evidence(flow, *_queue(flow, at_s, waiting))
    in_flight = evidence.in_flight
    judged, reason = _judge(flow, evidence, in_flight) if in_flight else _judge_short(flow, evidence)
    capacity_per_s = _capacity_per_s(flow, evidence) if judged == "growing" else None
    return msgspec.structs.replace(evidence, verdict=judged, reason=reason, capacity_per_s=capacity_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """When requests arrived [n], ascending, and ended, inf of one that did not.

    `paired`: both are of the same request; else the k-th that ended stands beside the k-th that arrived.
    """

    arrived_s: Floats
    ended_s: Floats
    paired: bool

    @property
    def took_s(self) -> float:
        """Return the time, in s, that the first requests took, which found the system empty."""
        return ramp(self.arrived_s, self.ended_s) / RAMP_RESIDENCES

    @property
    def load_s(self) -> float:
        return float(self.arrived_s[-1] - self.arrived_s[0])


def _flow(arrived_s: npt.ArrayLike, ended_s: npt.ArrayLike) -> _Flow:
    arrived, ended = np.asarray(arrived_s, np.float64).ravel(), np.asarray(ended_s, np.float64).ravel()
    if len(arrived) == len(ended):
        order = np.argsort(arrived, kind="stable")[: int(np.isfinite(arrived).sum())]
        paired_s = np.where(np.isfinite(ended), ended, np.inf)[order]
        if (paired_s >= arrived[order]).all():
            return _Flow(arrived_s=arrived[order], ended_s=paired_s, paired=True)
    arrived = np.sort(arrived[np.isfinite(arrived)])
    ended = np.sort(ended[np.isfinite(ended)])[: len(arrived)]
    never = np.full(len(arrived) - len(ended), np.inf)
    return _Flow(arrived_s=arrived, ended_s=np.concatenate([ended, never]), paired=False)


def _queue(flow: _Flow, at_s: npt.ArrayLike, waiting: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return the samples of the engine's queue while the load lasted; none where they are too few."""
    moments, length = np.asarray(at_s, np.float64).ravel(), np.asarray(waiting, np.float64).ravel()
    known = np.isfinite(length) & (moments >= flow.arrived_s[0]) & (moments <= flow.arrived_s[-1])
    known &= known.sum() >= LEAST_SCRAPES
    return moments[known], length[known]


def _evidence(flow: _Flow, at_s: Floats, waiting: Floats) -> Stability:
    """Return all but the verdict."""
    first_s, last_s = float(flow.arrived_s[0]), float(flow.arrived_s[-1])
    ramp_s = ramp(flow.arrived_s, flow.ended_s)
    is_long = 0 < LEAST_SHARE * flow.load_s <= flow.load_s - ramp_s
    begin_s = first_s + ramp_s if is_long else first_s
    edges_s = np.linspace(begin_s, last_s, INTERVALS + 1)
    arrived = np.searchsorted(flow.arrived_s, edges_s, side="right")
    ended = np.searchsorted(np.sort(flow.ended_s), edges_s, side="right")
    arrivals, completions = int(arrived[-1] - arrived[0]), np.diff(ended).astype(np.float64)
    growth, ci95, blocks, in_flight, residence = None, None, 0, None, None
    if is_long and arrivals:
        number = (arrived - ended).astype(np.float64)
        in_flight = trend((edges_s[1:] + edges_s[:-1]) / 2, (number[1:] + number[:-1]) / 2)
        growth = in_flight.slope * (last_s - begin_s) / arrivals
        ci95, blocks = walk_interval(growth, completions, arrivals)
    finished = np.isfinite(flow.ended_s)
    if flow.paired and finished.sum() >= LEAST_REQUESTS:
        residence = trend(flow.arrived_s[finished], (flow.ended_s - flow.arrived_s)[finished])
    return Stability(
        verdict=None,
        reason="not judged",
        growth=growth,
        ci95=ci95,
        blocks=blocks,
        arrivals=arrivals,
        completions=int(completions.sum()),
        open_at_end=int((flow.ended_s > last_s).sum()),
        from_s=begin_s - first_s,
        until_s=last_s - first_s,
        in_flight=in_flight,
        residence=residence,
        waiting=trend(at_s, waiting) if len(at_s) else None,
        queued_ratio=float((waiting[len(waiting) // 2 :] > 0).mean()) if len(at_s) else None,
    )


def _judge(flow: _Flow, evidence: Stability, in_flight: Trend) -> tuple[Verdict, str]:
    """Judge a load that is long beside its requests."""
    residence, queued = evidence.residence, evidence.queued_ratio
    growth, judged_s, rising = evidence.growth or 0.0, _judged_s(evidence), in_flight.rising
    longer = residence is not None and residence.low > 0 and residence.slope * judged_s > LONGER * flow.took_s
    slope = f"by {in_flight.slope:.2g} a second ({100 * growth:.0f} % of the arrivals)"
    walked = evidence.ci95 is not None and evidence.ci95[0] > 0 and (residence is None or residence.rising > 0)
    together = longer and residence is not None and min(rising, residence.rising) >= RISING
    always = queued is not None and queued >= ALWAYS
    by_page = always and (longer or rising >= RISING)
    # A growing batch is not a queue: where none waited in the engine, it must have grown much, and times in flight with
    # it, as of an engine whose seats are not yet taken.
    may_queue = queued is None or queued >= NEVER
    walked, together = walked and may_queue, together and (may_queue or growth >= UNSEEN_GROWTH)
    slower = np.inf if residence is None else residence.slope * evidence.arrivals / judged_s
    crowded = slower >= CROWDED * in_flight.slope or (queued or 0.0) >= RARELY
    walked, together = walked and crowded, together and crowded
    if growth >= LEAST_GROWTH and (walked or (in_flight.low > 0 and (together or by_page))):
        return "growing", f"requests in flight rose {slope} for as long as the load lasted"
    if always:
        return "undecided", (
            "requests always waited in the engine, but those in flight did not surely rise: the load is about what the "
            "system can serve"
        )
    is_even = rising < STEADY or in_flight.low <= 0
    if queued is not None and not longer and is_even and queued < (SELDOM if rising < STEADY else NEVER):
        return "stable", f"requests waited in {100 * queued:.0f} % of the scrapes, and those in flight did not rise"
    if not longer and rising < STEADY and in_flight.high * judged_s < TOLERATED_GROWTH * evidence.arrivals:
        most = f"{100 * TOLERATED_GROWTH:.0f} % of the arrivals"
        return "stable", f"requests in flight did not rise, or by less than {most}"
    return "undecided", f"requests in flight moved {slope}, which may be chance; a longer run can tell"


def _judge_short(flow: _Flow, evidence: Stability) -> tuple[Verdict, str]:
    """Judge a load that is hardly longer than its requests: it shows only where the load is much too large."""
    known_s = max(flow.arrived_s[-1], flow.ended_s[np.isfinite(flow.ended_s)].max(initial=-np.inf))
    in_flight_s = np.minimum(flow.ended_s, known_s) - flow.arrived_s
    first_s = float(np.median(in_flight_s[:EARLY_REQUESTS]))
    later_s = float(np.median(in_flight_s[len(in_flight_s) // 2 :]))
    line, waiting = evidence.residence, evidence.waiting
    is_steep = line is not None and line.low > 0 and line.rising >= RISING and line.slope >= STEEP
    longer = later_s >= (TIMES_STEEP if is_steep else TIMES_LONGER) * first_s
    if flow.paired and longer and flow.load_s > BURST * first_s:
        return "growing", f"later requests took {later_s:.1f} s, the first {EARLY_REQUESTS} {first_s:.1f} s (medians)"
    always = (evidence.queued_ratio or 0.0) >= ALWAYS
    if waiting is not None and always and waiting.low > 0 and waiting.rising >= RISING:
        more = waiting.slope * flow.load_s
        if more >= MOST * evidence.arrivals:
            return "growing", f"requests waiting in the engine rose by {more:.0f}, of {evidence.arrivals} that arrived"
    return "undecided", (
        f"the load lasted {_seconds(flow.load_s)} and its first requests took {_seconds(flow.took_s)}; to tell, it "
        f"must last {RAMP_RESIDENCES / (1 - LEAST_SHARE):.0f} times what they took"
    )


def _seconds(value_s: float) -> str:
    return f"{value_s:,.{1 if value_s >= 10 else 2}f} s"


def _judged_s(evidence: Stability) -> float:
    return (evidence.until_s or 0.0) - (evidence.from_s or 0.0)


def _capacity_per_s(flow: _Flow, evidence: Stability) -> float | None:
    if evidence.completions and evidence.in_flight is not None:
        return evidence.completions / _judged_s(evidence)
    ended_s = flow.ended_s[np.isfinite(flow.ended_s)]
    return (len(ended_s) - 1) / float(np.ptp(ended_s)) if len(ended_s) > 1 and np.ptp(ended_s) > 0 else None
