"""What a server says about finished requests, read off its scrapes: cumulative count, queue and prefill sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from correlator.statistics.decompose import FinishSums
from rundir.columns import Floats
from rundir.stats import Missing
from scraper import engines
from scraper.engines import CanonicalSource
from scraper.series.resets import Restarts, restarts_of, rising_histogram
from scraper.series.table import EndpointSeries

Sources = Mapping[str, CanonicalSource | Missing]


def finish_sums(endpoint: EndpointSeries) -> FinishSums | Missing:
    """Return an endpoint's cumulative finish-time sums [T], label sets added up and restarts counted up.

    Missing: no scrape, no known engine, an engine that shows no queue or prefill histogram, or one without count or
    sum, or one that observes them at another moment than the end of a request (its sums then speak of other requests
    than the client's that ended).
    """
    told = told_by(endpoint)
    return told if isinstance(told, Missing) else sums_of(endpoint, told[1], restarts_of(endpoint))


def told_by(endpoint: EndpointSeries) -> tuple[str, Sources] | Missing:
    """Return which engine an endpoint is of, and where its pages have each quantity."""
    if not len(endpoint.at_ns):
        return Missing("no scrape succeeded")
    engine = engines.detect(endpoint.series)
    if engine is None:
        return Missing("the page shows no engine that is known")
    return engine.name, engines.canonical(endpoint.series, engine.name)


@np.errstate(over="ignore", invalid="ignore")  # sums beyond the largest number are missing
def sums_of(endpoint: EndpointSeries, sources: Sources, restarts: Restarts) -> FinishSums | Missing:
    """Return the sums of `finish_sums` for an endpoint with scrapes, whose canonical sources are known already."""
    queue, prefill = sources["queue_time"], sources["prefill_time"]
    if isinstance(queue, Missing):
        return queue
    if isinstance(prefill, Missing):
        return prefill
    for source in (queue, prefill):
        if source.quantity.observed != "finish":
            moment = source.quantity.observed.replace("_", " ")
            return Missing(
                f"{source.metric} is observed not when a request ends, but at its {moment}: over a window it "
                "speaks of other requests than those that ended"
            )
        for part in ("count", "sum"):
            if any(getattr(columns, part) < 0 for columns in source.histograms):
                return Missing(f"{source.metric} has no _{part}")
    (count, queue_s), (_, prefill_s) = _rising(endpoint, queue, restarts), _rising(endpoint, prefill, restarts)
    if not np.isfinite([count, queue_s, prefill_s]).all():
        return Missing("the server's sums are too large to add up")
    return FinishSums(at_ns=endpoint.at_ns, count=count, queue_s=queue_s, prefill_s=prefill_s)


def _rising(endpoint: EndpointSeries, source: CanonicalSource, restarts: Restarts) -> tuple[Floats, Floats]:
    """Return count and sum [T] of a histogram over all its label sets, across resets."""
    count, total = np.zeros((2, len(endpoint.at_ns)))
    for columns in source.histograms:
        histogram = rising_histogram(endpoint, columns, restarts)
        count += histogram.count
        total += histogram.sum
    return count, total
