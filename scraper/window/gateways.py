"""Gateways' pages over the measured window: own time, queue, retries and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.gateways.catalogue import UNITS_S, RecentMean, Recognised, canonical, detect
from sidelight.scraper.gateways.catalogue import gateway as gateway_of
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.aggregate import TOO_LARGE, EndpointShare
from sidelight.scraper.window.quantities import GatewayPage, Histogram
from sidelight.scraper.window.statistics import Described, described_parts
from sidelight.scraper.window.window import Window, select_scrapes

CONTRADICTION = "upstream_time is more than request_time: they are not of the same requests"


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is left out, with a reason
def gateway_pages(endpoints: Sequence[EndpointSeries], window: Window, slice_ns: int) -> list[GatewayPage]:
    """Summarise the pages that are of a gateway that is known, one by one; a page may be an engine's as well."""
    recognised = [
        (endpoint, detect(endpoint.series, beside_engine=engines.detect(endpoint.series) is not None))
        for endpoint in endpoints
    ]
    return [_page(endpoint, gateway, window, slice_ns) for endpoint, gateway in recognised if gateway is not None]


def _page(endpoint: EndpointSeries, gateway: Recognised, window: Window, slice_ns: int) -> GatewayPage:
    selection = select_scrapes(endpoint, window, slice_ns)
    described, missing = described_parts(endpoint, selection, canonical(endpoint.series, gateway.name))
    own_s, error_s = _in_range(*_own_s(described, gateway_of(gateway.name).rounded))
    queue_s, queue_error_s = _in_range(*_queue_s(described, gateway_of(gateway.name).recent))
    if isinstance(own_s, Missing):
        missing["own_ms"] = own_s.reason
    if isinstance(queue_s, Missing):
        missing["queue_ms"] = queue_s.reason
    until: Mapping[str, Literal["first_output", "end"]] = {"first_token": "first_output", "finish": "end"}
    return GatewayPage(
        url=endpoint.url,
        gateway=gateway.name,
        detected_by=gateway.detected_by,
        own_ms=None if isinstance(own_s, Missing) else 1e3 * own_s,
        own_error_ms=None if isinstance(own_s, Missing) else 1e3 * error_s,
        own_until=None if isinstance(own_s, Missing) else until[described["request_time"][1].observed],
        queue_ms=None if isinstance(queue_s, Missing) else 1e3 * queue_s,
        queue_error_ms=None if isinstance(queue_s, Missing) else 1e3 * queue_error_s,
        **{name: quantity for name, (_, quantity) in described.items()},
        missing=missing,
    )


def _in_range(mean_s: float | Missing, error_s: float) -> tuple[float | Missing, float]:
    """Return a mean and its error, or the reason for its absence if too large.

    Too large is one that in ms is more than a number holds.
    """
    if not isinstance(mean_s, Missing) and not math.isfinite(1e3 * (abs(mean_s) + error_s)):
        return Missing(TOO_LARGE), 0.0
    return mean_s, error_s


def _own_s(described: Mapping[str, Described], rounded: float) -> tuple[float | Missing, float]:
    """Return a request's mean time in the gateway itself, and its error.

    Its calls of the next server are not in it. The error is that where each time is rounded, evenly, by up to `rounded`
    of itself.
    """
    sums_s: list[float] = []
    for name in ("request_time", "upstream_time"):
        if name not in described:
            return Missing(f"the page shows no {name}"), 0.0
        histogram: Histogram = described[name][1]
        if not isinstance(histogram.stats.sum, float) or not histogram.stats.count:
            return Missing(f"{name} has no observation in the window"), 0.0
        sums_s.append(histogram.stats.sum * UNITS_S[histogram.unit])
    count = described["request_time"][1].stats.count
    own_s = (sums_s[0] - sums_s[1]) / count
    error_s = rounded * sums_s[0] / count * math.sqrt(2 / 3 / count)
    return (max(own_s, 0.0) if own_s >= -2 * error_s else Missing(CONTRADICTION)), error_s


def _queue_s(described: Mapping[str, Described], recent: RecentMean | None) -> tuple[float | Missing, float]:
    """Return the mean wait in the gateway's queue and the error of that."""
    if "queue_time" in described:
        histogram: Histogram = described["queue_time"][1]
        if isinstance(histogram.stats.mean, float):
            return max(histogram.stats.mean * UNITS_S[histogram.unit], 0.0), 0.0
        missing = histogram.missing or {}
        return Missing(f"queue_time: {missing.get('mean', 'no observation')}"), 0.0
    if recent is not None and "recent_queue_time" in described and "requests" in described:
        return _recent_s(described["recent_queue_time"][0], described["requests"][0], recent)
    return Missing("the page shows no queue_time"), 0.0


def _recent_s(means: EndpointShare, requests: EndpointShare, recent: RecentMean) -> tuple[float | Missing, float]:
    """Return the requests' mean wait and its error, from a page's exponential mean.

    It is taken before and after them; the error is that which its steps leave. Label sets count by their requests.
    """
    series, selection = means.endpoint.series, means.selection
    first, last = (means.endpoint.values[row] for row in (selection.reference, selection.last))
    weighted_s = weighted_error_s = total = 0.0
    for column in means.source.columns:
        labels = set(series[column].labels)
        counted = [place for place in requests.source.columns if labels <= set(series[place].labels)]
        count = float((last[counted] - first[counted]).sum())
        if not (1 <= count < math.inf and math.isfinite(first[column] + last[column])):
            continue
        left = (1 - 1 / recent.requests) ** count  # of what was there before
        before_s, after_s = (max(float(page[column]) - recent.step_s / 2, 0.0) for page in (first, last))
        weighted_s += count * (after_s - before_s * left) / (1 - left)
        weighted_error_s += count * recent.step_s * math.sqrt((1 + left**2) / 12) / (1 - left)
        total += count
    if not total:
        return Missing("no request was answered in the window"), 0.0
    return max(weighted_s / total, 0.0), weighted_error_s / total
