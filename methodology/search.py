"""How much a system can serve: the capacity that levels of load are shares of, and the search for it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from methodology.study.model import Asked, Done, Finished, Step
from methodology.study.planning import content_seed

SATURATE = "saturate"
FIRST_CONCURRENCY = 64


class Capacity(Struct, frozen=True, kw_only=True):
    """What a saturated system serves; `run` is the step that showed it, empty where it was stated."""

    per_s: float
    ci95: tuple[float, float] | None = None
    run: str = ""


def capacity(asked: Asked, finished: Sequence[Finished]) -> Capacity | Step | Done:
    """Return the capacity that was stated, else what a saturated closed loop served, else the step that will tell.

    By the saturation rule the stability limit of an open loop is the throughput of the saturated system (Baccelli and
    Foss 1995).
    """
    if asked.parameters.capacity:
        return Capacity(per_s=asked.parameters.capacity)
    saturated = [each for each in finished if each.step.kind == SATURATE]
    if saturated and (served := saturated[-1].outcome.completed_per_s):
        return Capacity(per_s=served, ci95=saturated[-1].outcome.throughput_ci95, run=saturated[-1].run)
    if saturated:
        return Done(reason="the saturated step completed no request", complete=False)
    return Step(
        kind=SATURATE,
        label=f"closed-{FIRST_CONCURRENCY}",
        load="closed",
        level=FIRST_CONCURRENCY,
        duration=asked.parameters.duration or 60.0,
        seed=content_seed(asked, len(finished) + 1),
    )
