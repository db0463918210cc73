"""Engines' load while requests waited for them: the number of running requests and the KV cache usage.

That is the evidence for why they waited: every place taken, the cache full, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Struct

from sidelight.correlator.statistics.server_load import EngineSamples, engine_samples
from sidelight.rundir import fields
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Ratio, doc
from sidelight.rundir.stats import Missing, finite, known
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

# How much of the most that an engine ran counts as every place taken. SGLang's gauge is one short as it begins a
# prefill, whose request is not yet in the batch that it counts: at few places a whole one is allowed for.
NEAR_MOST, LEAST_NEAR = 0.9, 0.75
NEVER_WAITED = "no scrape in the window shows a waiting request"


class WhileWaiting(Struct, frozen=True, kw_only=True):
    """Scrapes within the window that show at least one waiting request, of all engines together."""

    scrapes: Annotated[Count, doc("Those scrapes.", "scrapes")] = 0
    running_p50: Annotated[Amount | None, doc("Median of the requests running in an engine then.", "requests")] = None
    running_most: Annotated[Amount | None, doc("The most that an engine was seen to run.", "requests")] = None
    at_most_ratio: Annotated[
        Ratio | None,
        doc("Share of those scrapes in which an engine ran at least 90 % of its most (of 4 to 9, all but 1).", NO_UNIT),
    ] = None
    kv_cache_p50: Annotated[Amount | None, doc("Median of the KV cache usage then.", NO_UNIT)] = None
    kv_cache_max: Annotated[Amount | None, doc("Its maximum then.", NO_UNIT)] = None
    missing: fields.Missing = UNSET


def while_waiting(endpoints: Sequence[EndpointSeries], window: Window) -> WhileWaiting:
    """Return the load of the leading kind of engines while requests waited; only `missing` where none did."""
    return while_waiting_of(_samples(endpoints, window))


def _samples(endpoints: Sequence[EndpointSeries], window: Window) -> Iterator[tuple[Floats, Floats, Floats]]:
    for _, quantities in engine_samples(endpoints):
        waiting = quantities["requests_waiting"]
        if isinstance(waiting, Missing):
            continue
        inside = (waiting.at_ns >= window.start_ns) & (waiting.at_ns <= window.end_ns)
        others = (_amounts(quantities[name], len(inside)) for name in ("requests_running", "kv_cache_usage"))
        ran, cached = (amounts[inside] for amounts in others)
        yield waiting.amount[inside], ran, cached


def while_waiting_of(samples: Iterable[tuple[Floats, Floats, Floats]]) -> WhileWaiting:
    """Return the same of samples: of each engine the waiting and running requests and the KV cache usage [n]."""
    running, near_most, kv_cache, most = [], [], [], []
    for waiting, ran, cached in samples:
        rows = np.nan_to_num(waiting) > 0
        known_running = known(ran)
        most.append(known_running)
        running.append(ran[rows])
        is_near = ran >= _near(known_running.max(initial=0.0))
        near_most.append(is_near[rows & np.isfinite(ran)].astype(np.float64))
        kv_cache.append(cached[rows])
    if not sum(map(len, running)):
        return WhileWaiting(missing=NEVER_WAITED)
    return WhileWaiting(
        scrapes=sum(map(len, running)),
        running_p50=_statistic(np.median, running),
        running_most=_statistic(np.max, most),
        at_most_ratio=_statistic(np.mean, near_most),
        kv_cache_p50=_statistic(np.median, kv_cache),
        kv_cache_max=_statistic(np.max, kv_cache),
    )


def _near(most: float) -> float:
    """Return from how many running requests on every place of an engine counts as taken."""
    return max(LEAST_NEAR * most, min(NEAR_MOST * most, most - 1.0))


def _amounts(samples: EngineSamples | Missing, size: int) -> Floats:
    return np.full(size, np.nan) if isinstance(samples, Missing) else samples.amount


def _statistic(statistic: Callable[[Floats], Any], columns: Sequence[Floats]) -> float | None:
    """Return a statistic of the known values in several columns.

    None where no value is known, or where the statistic is too large.
    """
    values = known(np.concatenate(columns))
    with np.errstate(over="ignore"):
        return finite(float(statistic(values))) if len(values) else None
