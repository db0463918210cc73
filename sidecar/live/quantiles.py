"""The engines' quantiles for the live page while pages come: by the report's estimator, with its 90 % interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import thread_time

import numpy as np

from sidelight.exporter.prometheus.snapshot import EngineQuantiles
from sidelight.exporter.prometheus.table import ENGINE_HISTOGRAMS
from sidelight.rundir.columns import Bools, Indices
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.quantiles import read
from sidelight.scraper.series.table import EndpointSeries, SeriesTable
from sidelight.scraper.window.aggregate import EndpointShare, histograms
from sidelight.scraper.window.pools import Role, roles_of
from sidelight.scraper.window.statistics import fits_of
from sidelight.scraper.window.window import Window, select_scrapes
from sidelight.sidecar.live.tally import QUANTILES

EVERY_S = 5.0
MOST_SHARE = 0.006  # of a processor
MOST_SCRAPES = 1200  # of an endpoint while a run goes: an estimate takes 75 ms then


@dataclass(slots=True)
class QuantileView:
    """Quantiles of each endpoint's pages, estimated anew now and then. `latest` are those of the last estimate.

    `roles` are those of the endpoints, by all pages until then: a pause in the load takes none away.
    """

    latest: Mapping[str, EngineQuantiles] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    _due_ns: int = 0

    def refresh(self, pages: Mapping[str, SeriesTable], window: Window) -> None:
        """Estimate the quantiles of a window up to now. Each is estimated EVERY_S, more rarely where so many
        pages would take more than MOST_SHARE.
        """
        if window.end_ns < self._due_ns:
            return
        self._due_ns = window.end_ns + round(1e9 * EVERY_S)
        begun_s, is_usual = thread_time(), any(self.latest.values())  # the first ones wait for imports
        views = {url: page.view() for url, page in pages.items()}
        self.latest = {url: estimated(view, window, most_scrapes=MOST_SCRAPES) for url, view in views.items()}
        roles = zip(views, roles_of(list(views.values())), strict=True)
        self.roles = {url: role or self.roles.get(url, "") for url, role in roles}
        if is_usual:
            self._due_ns = window.end_ns + round(1e9 * max(EVERY_S, (thread_time() - begun_s) / MOST_SHARE))


@np.errstate(over="ignore", invalid="ignore")
def estimated(endpoint: EndpointSeries, window: Window, *, most_scrapes: int | None = None) -> EngineQuantiles:
    """Return the quantiles of an endpoint's pages in a window, as its report states them. Those that the report calls
    unresolved are left out; there are none where the page is of another program. Of more scrapes than `most_scrapes`,
    some are used.
    """
    engine, slice_ns = detect(endpoint.series), max(1, window.end_ns - window.start_ns)
    selection = select_scrapes(endpoint, window, slice_ns)
    if most_scrapes is not None and not isinstance(selection, Missing):
        step = 1 + (selection.last - selection.reference) // most_scrapes
        rows = np.append(selection.reference, np.arange(selection.last, selection.reference, -step)[::-1])
        endpoint = scrapes_of(endpoint, rows)
        selection = select_scrapes(endpoint, window, slice_ns)
    if engine is None or isinstance(selection, Missing):
        return {}
    sources = canonical(endpoint.series, engine.name)
    shown: dict[tuple[str, str, str], float] = {}
    for of in ENGINE_HISTOGRAMS:
        source = sources[of]
        if isinstance(source, Missing):
            continue
        increase = histograms([EndpointShare(endpoint=endpoint, selection=selection, source=source)])
        if not isinstance(increase, Missing) and math.isfinite(increase.count):
            estimates = read(fits_of(increase), list(map(float, QUANTILES)))
            for bound, values_s in (("estimate", estimates.values), ("low", estimates.low), ("high", estimates.high)):
                known = np.isfinite(values_s) & ~estimates.wide
                shown |= {(of, QUANTILES[at], bound): float(values_s[at]) for at in np.flatnonzero(known)}
    return shown


def scrapes_of(endpoint: EndpointSeries, rows: Indices | Bools) -> EndpointSeries:
    """Return some of an endpoint's scrapes."""
    columns = ("tick_ns", "request_ns", "response_ns", "at_ns", "values", "changed")
    return replace(endpoint, **{name: getattr(endpoint, name)[rows] for name in columns})
