"""Prediction of a run's times with twice as many requests running at a time."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from sidelight.recorded.run import Run
from sidelight.rundir.fields import Amount, Count, Reason, doc
from sidelight.rundir.stats import Missing
from sidelight.twin.check import PLACES, quantiles_of
from sidelight.twin.engine.play import SEATS
from sidelight.twin.model import twin_of
from sidelight.twin.scenario import Prediction, Scenario, predict

MOST_REQUESTS = 1000  # of more, a report would take long
_PLAYS = 8


class PredictedTime(Struct, frozen=True, kw_only=True):
    """A predicted percentile: the median of plays, and the ends of its 90 % interval."""

    estimate: Annotated[Amount, doc("median of the plays", "ms")]
    low: Annotated[Amount, doc("lower end of the 90 % interval", "ms")]
    high: Annotated[Amount, doc("upper end of the 90 % interval", "ms")]


def predicted_time(prediction: Prediction, at: tuple[int, int]) -> PredictedTime:
    """Return the time at a place of PLACES."""
    estimate, low, high = (float(each[at]) for each in (prediction.median, prediction.low, prediction.high))
    return PredictedTime(estimate=estimate, low=low, high=high)


class PredictedChange(PredictedTime, frozen=True, kw_only=True):
    """A predicted percentile beside the run's."""

    now: Annotated[Amount, doc("in this run", "ms")]


class MoreSeats(Struct, frozen=True, kw_only=True):
    """This run with a higher limit on running requests, as predicted."""

    now: Annotated[Count | UnsetType, doc("the limit, as the run shows it; absent where it does not", "requests")] = (
        UNSET
    )
    then: Annotated[Count | UnsetType, doc("the limit that is predicted for", "requests")] = UNSET
    ttft_p99_ms: Annotated[PredictedChange | UnsetType, doc("of all requests, at the same arrivals")] = UNSET
    tpot_p50_ms: Annotated[PredictedChange | UnsetType, doc("likewise")] = UNSET
    notes: Annotated[list[str] | UnsetType, doc("what it rests on beyond what the run had shown")] = UNSET
    missing: Annotated[Reason | UnsetType, doc("why nothing is predicted")] = UNSET


def more_seats(run: Run, finished: float, *, pages: int = 1) -> MoreSeats:
    """Return the prediction for twice as many seats, or the reason against one.

    `finished` and `pages` are as in `twin_of`.
    """
    if (count := len(run.requests)) > MOST_REQUESTS:
        return MoreSeats(missing=f"of {count:,} requests a report would take long; `sidelight predict` takes the time")
    twin = twin_of(run, finished, {}, pages=pages)
    if isinstance(twin, Missing):
        return MoreSeats(missing=twin.reason)
    now = twin.fitted.seats
    if now is None or any(each.fitted.seats != now for each in twin.beside):
        return MoreSeats(missing="the requests do not show how many each engine runs at most")
    prediction = predict(twin, Scenario(label="", settings={SEATS: 2 * now}), plays=_PLAYS)
    if isinstance(prediction, Missing):
        return MoreSeats(now=now, missing=prediction.reason)
    observed = quantiles_of(twin.observed_ms)

    def change(metric: str, quantile: float) -> PredictedChange:
        at = PLACES[metric, quantile]
        return PredictedChange(now=float(observed[at]), **asdict(predicted_time(prediction, at)))

    return MoreSeats(
        now=now,
        then=2 * now,
        ttft_p99_ms=change("ttft", 0.99),
        tpot_p50_ms=change("tpot", 0.5),
        notes=list(prediction.notes) or UNSET,
    )
