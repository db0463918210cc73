"""Percentiles of queue and prefill time, through the client's eyes where buckets alone cannot tell.

A first bucket of 0.3 s says almost nothing of a prefill of 50 ms; the estimates of single requests do. They speak of
our requests, so that they stand for the server's percentiles only where next to nobody else was served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from correlator.estimate.intervals import Cells, Observed, observe
from correlator.estimate.table import Attribution
from rundir.columns import Floats
from rundir.stats import Missing
from scraper import quantiles
from scraper.quantiles import Estimates
from scraper.series.table import EndpointSeries

LEAST_COVERED = 0.95
NORMAL_95 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPercentiles:
    """Quantiles [Q] in s with a 90 % interval, and what they were read from.

    `source` is "client spans" (the estimates of our requests, inside what the buckets allow) or "buckets and sums".
    `covered_ratio`: how many of the requests that the server counted are ours.
    """

    values_s: Floats
    low_s: Floats
    high_s: Floats
    source: Literal["client spans", "buckets and sums"]
    covered_ratio: float


def server_percentiles(
    table: Attribution, scrapes: Sequence[EndpointSeries], part: Literal["queue", "prefill"], qs: ArrayLike
) -> ServerPercentiles | Missing:
    """Estimate quantiles (0 to 1) of a time over all requests that ended between the first scrape and the last.

    `table` is what `attribute` made of the same scrapes. Missing: no server whose histograms are observed at the end of
    a request, or nothing was observed. A histogram without buckets leaves the client's spans, whatever they cover.
    """
    engines = [one for one in map(observe, scrapes) if isinstance(one, Observed)]
    counted = sum(int(one.ends.count[~one.ends.lost].sum()) for one in engines)
    if not counted:
        return Missing("no server observed the end of a request, and the times of it, between two scrapes")
    wanted = np.atleast_1d(np.asarray(qs, dtype=np.float64))
    values_s, sd_s = (getattr(table, f"{part}{name}") for name in ("_s", "_sd_s"))
    seen = (table.interval >= 0) & np.isfinite(values_s)
    covered = float(seen.sum()) / counted
    buckets = _read_buckets([one.ends for one in engines], part, wanted)
    if buckets is not None and covered < LEAST_COVERED:
        told = {"values_s": buckets.values, "low_s": buckets.low, "high_s": buckets.high}
        return ServerPercentiles(**told, source="buckets and sums", covered_ratio=covered)
    if not seen.any():
        return Missing("no request of ours ended between two scrapes, and the histogram has no buckets")
    own, error = values_s[seen], NORMAL_95 * sd_s[seen]
    found = np.stack([np.quantile(np.maximum(own + shift * error, 0.0), wanted) for shift in (0, -1, 1)])
    if buckets is not None and covered <= 1:
        found = np.clip(found, buckets.lowest, buckets.highest)
    told = dict(zip(("values_s", "low_s", "high_s"), found, strict=True))
    return ServerPercentiles(**told, source="client spans", covered_ratio=covered)


def _read_buckets(parts: Sequence[Cells], part: str, qs: Floats) -> Estimates | None:
    """Read the quantiles off the histograms alone, None where some engine shows no buckets."""
    if any(part not in one.buckets for one in parts):
        return None
    kept = [(one.buckets[part], one.sums[part], ~one.lost) for one in parts]
    return quantiles.read([quantiles.fit(held.bounds, held.counts[own], sums[own]) for held, sums, own in kept], qs)
