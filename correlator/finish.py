"""What a server says about finished requests, read off its scrapes: cumulative count, queue and prefill sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from correlator.decompose import FinishSums
from scraper import engines
from scraper.engines import CanonicalSource
from scraper.missing import Missing
from scraper.normalise import rising_sum
from scraper.resets import falls, restarted, unrolled
from scraper.series import EndpointSeries

Floats = npt.NDArray[np.float64]


def finish_sums(endpoint: EndpointSeries) -> FinishSums | Missing:
    """Return an endpoint's cumulative finish-time sums [T], label sets added up and restarts counted up.

    Missing: no scrape, no known engine, an engine that shows no queue or prefill histogram, or one without count or
    sum, or one that observes them at another moment than the end of a request (its sums then speak of other requests
    than the client's that ended).
    """
    if not len(endpoint.at_ns):
        return Missing("no scrape succeeded")
    engine = engines.detect(endpoint.series)
    if engine is None:
        return Missing("the page shows no engine that is known")
    return sums_of(endpoint, engines.canonical(endpoint.series, engine.name))


@np.errstate(over="ignore", invalid="ignore")  # sums beyond the largest number are missing
def sums_of(endpoint: EndpointSeries, sources: Mapping[str, CanonicalSource | Missing]) -> FinishSums | Missing:
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
        if _lacks(source):
            return Missing(f"{source.metric} has no {_lacks(source)}")
    count, queue_s = _rising(endpoint, queue, "count"), _rising(endpoint, queue, "sum")
    prefill_s = _rising(endpoint, prefill, "sum")
    if not np.isfinite([count, queue_s, prefill_s]).all():
        return Missing("the server's sums are too large to add up")
    return FinishSums(at_ns=endpoint.at_ns, count=count, queue_s=queue_s, prefill_s=prefill_s)


def _lacks(source: CanonicalSource) -> str:
    """Say which of count and sum some label set of a histogram is without; empty if none is."""
    if any(columns.count < 0 for columns in source.histograms):
        return "_count"
    return "_sum" if any(columns.sum < 0 for columns in source.histograms) else ""


def _rising(endpoint: EndpointSeries, source: CanonicalSource, part: Literal["count", "sum"]) -> Floats:
    """Return one column [T] of a histogram over all its label sets, never falling."""
    total = np.zeros(len(endpoint.at_ns))
    for columns in source.histograms:
        counts = endpoint.values[:, [columns.count]]
        fell = falls(counts, restarted(endpoint))
        total += unrolled(counts, fell)[0][:, 0] if part == "count" else rising_sum(endpoint, columns, fell)
    return total
