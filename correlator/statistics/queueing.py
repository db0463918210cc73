"""Engines' load while requests waited for them: the number of running requests and the KV cache usage.

That is the evidence for why they waited: every place taken, the cache full, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Struct, UnsetType

from sidelight.correlator.statistics.server_load import (
    EngineSamples,
    engine_samples,
    gauge_amounts,
    leading_endpoints,
)
from sidelight.rundir import fields
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Ratio, doc
from sidelight.rundir.stats import Missing, finite, known
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

# How much of the most that an engine ran counts as every place taken. SGLang's gauge is one short as it begins a
# prefill, whose request is not yet in the batch that it counts: at few places a whole one is allowed for.
NEAR_MOST, LEAST_NEAR = 0.9, 0.75
_LOADING = "kv_fetch_in_progress"
_STAGES = ("kv_fetch_waiting_to_start", _LOADING, "kv_fetch_completed_waiting")
_NORMAL_90 = 1.645
LEAST_SCRAPES = 5
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


class KvLoads(Struct, frozen=True, kw_only=True):
    """Loads of KV caches from elsewhere, within a queue: means a request.

    They are by gauges of how many requests wait for theirs, load, and have loaded.
    """

    before_ms: Annotated[Amount, doc("Wait until its load began.", "ms")]
    load_ms: Annotated[Amount, doc("Its load.", "ms")]
    error_ms: Annotated[
        Amount, doc("Half of the 90 % interval of load_ms: a gauge is read only once a scrape interval.", "ms")
    ]
    after_ms: Annotated[Amount, doc("Wait for a place in the engine after its load.", "ms")]

    def are_most_of(self, queue_ms: float) -> bool:
        """Return whether loads take most of a queue, by more than their error."""
        return self.load_ms - self.error_ms >= queue_ms / 2

    @property
    def are_unseen(self) -> bool:
        """Return whether no scrape showed one: there are none within the queue, or they were short."""
        return not self.before_ms + self.load_ms + self.after_ms


def kv_loads(endpoints: Sequence[EndpointSeries], window: Window, requests: int) -> KvLoads | UnsetType:
    """Return the mean loads of some requests, UNSET without a gauge of them.

    The mean is the area below the gauge over the requests (Little's law). Those that load at once are seen at the same
    moments: of n requests and c loads at a time, n / c are independent, each known to a scrape interval (uniform, so
    that its variance is at most a quarter of the square).
    """
    pages = [(endpoint, sources) for endpoint, sources in leading_endpoints(endpoints) if _STAGES[0] in sources]
    areas_s, at_once, interval_s = np.zeros(len(_STAGES)), 1.0, 0.0
    for endpoint, sources in pages:
        inside = (endpoint.at_ns >= window.start_ns) & (endpoint.at_ns <= window.end_ns)
        if inside.sum() < LEAST_SCRAPES:
            continue
        apart_s = np.gradient(endpoint.at_ns[inside] / 1e9)
        # Behind a scrape that failed a reading does not hold for all that time.
        lasting_s = np.minimum(apart_s, 2 * np.median(apart_s))
        lasting_s *= apart_s.sum() / lasting_s.sum()
        for place, name in enumerate(_STAGES):
            source = sources.get(name)
            if isinstance(source, CanonicalSource):
                loading = gauge_amounts(endpoint, source)[inside]
                if (read := np.isfinite(loading)).any():
                    area_s = float((loading * lasting_s)[read].sum())
                    areas_s[place] += area_s * lasting_s.sum() / lasting_s[read].sum()
                if name == _LOADING and (loading > 0).any():
                    at_once = max(at_once, float(loading[loading > 0].mean()))
        interval_s = max(interval_s, float(np.median(lasting_s)))
    if not requests or not interval_s:
        return UNSET
    before_ms, load_ms, after_ms = (1e3 * areas_s / requests).tolist()
    error_ms = 1e3 * _NORMAL_90 * interval_s / 2 / np.sqrt(requests / at_once)
    return KvLoads(before_ms=before_ms, load_ms=load_ms, error_ms=float(error_ms), after_ms=after_ms)


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
