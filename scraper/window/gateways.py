"""What the pages of gateways showed of the measured window: their own time, their queue, retries and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rundir.stats import Missing
from scraper import engines
from scraper.gateways import UNITS_S, Recognised, canonical, detect
from scraper.gateways import gateway as gateway_of
from scraper.series.table import EndpointSeries
from scraper.window.aggregate import Part, gauge_values
from scraper.window.quantities import GatewayPage, Histogram
from scraper.window.statistics import Described, described_parts
from scraper.window.window import Window, select_scrapes

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
    own_s, error_s = _own_s(described, gateway_of(gateway.name).rounded)
    queue_s = _queue_s(described)
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
        **{name: quantity for name, (_, quantity) in described.items()},
        missing=missing,
    )


def _own_s(described: Mapping[str, Described], rounded: float) -> tuple[float | Missing, float]:
    """Return what a request took in the gateway in the mean, its calls of the next server apart, and the error of that
    where each time is rounded, evenly, by up to so much of itself.
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


def _queue_s(described: Mapping[str, Described]) -> float | Missing:
    """Return the mean wait in the gateway's queue, by a histogram, else as the last page states it."""
    if "queue_time" in described:
        histogram: Histogram = described["queue_time"][1]
        if isinstance(histogram.stats.mean, float):
            return histogram.stats.mean * UNITS_S[histogram.unit]
        return Missing("queue_time has no observation in the window")
    if "recent_queue_time" in described:
        return _last_s(described["recent_queue_time"][0])
    return Missing("the page shows no queue_time")


def _last_s(part: Part) -> float | Missing:
    """Return what the last scrape of the window states of a gauge, the largest of its label sets."""
    values = np.fmax.reduce(gauge_values(part.endpoint.values[: part.selection.last + 1], part.source), axis=1)
    known = values[np.isfinite(values)]
    last = float(known[-1]) if len(known) else math.nan
    return last * UNITS_S[part.source.quantity.unit] if last >= 0 else Missing("recent_queue_time has no value")
