"""The engines' quantiles for the live page while pages come: by the report's estimator, with its 90 % interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import thread_time

from exporter.prometheus.page import ENGINE_HISTOGRAMS
from exporter.prometheus.snapshot import EngineQuantiles
from scraper.engines import canonical, detect
from scraper.series.table import EndpointSeries, SeriesTable
from scraper.window.quantities import Histogram, Quantities
from scraper.window.statistics import described_parts
from scraper.window.window import Window, select_scrapes

LEVELS = {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99"}
EVERY_S = 5.0
MOST_SHARE = 0.004  # of a processor


@dataclass(slots=True)
class QuantileView:
    """`latest` are the quantiles of each endpoint as of when they were last estimated."""

    latest: Mapping[str, EngineQuantiles] = field(default_factory=dict)
    _due_ns: int = 0

    def refresh(self, pages: Mapping[str, SeriesTable], window: Window) -> None:
        """Estimate those of a window up to now: each EVERY_S, more rarely where pages are so many that it would take
        more than MOST_SHARE.
        """
        if window.end_ns < self._due_ns:
            return
        begun_s, is_usual = thread_time(), any(self.latest.values())  # the first ones wait for imports
        self.latest = {url: estimated(page.view(), window) for url, page in pages.items()}
        cost_s = thread_time() - begun_s if is_usual else 0.0
        self._due_ns = window.end_ns + round(1e9 * max(EVERY_S, cost_s / MOST_SHARE))

    def clock_moved(self) -> None:
        """Estimate at the next refresh, whatever the time is then."""
        self._due_ns = 0


def estimated(endpoint: EndpointSeries, window: Window) -> EngineQuantiles:
    """Return the quantiles that an endpoint's pages show of a window; none where the page is of another program."""
    engine = detect(endpoint.series)
    if engine is None:
        return {}
    sources = canonical(endpoint.series, engine.name)
    selection = select_scrapes(endpoint, window, max(1, window.end_ns - window.start_ns))
    described, _ = described_parts(endpoint, selection, {of: sources[of] for of in ENGINE_HISTOGRAMS})
    return stated({of: histogram for of, (_, histogram) in described.items()})


def histograms_of(page: Quantities) -> dict[str, Histogram]:
    """Return what a report has of a page's histograms."""
    known = {of: getattr(page, of) for of in ENGINE_HISTOGRAMS}
    return {of: histogram for of, histogram in known.items() if isinstance(histogram, Histogram)}


def stated(histograms: Mapping[str, Histogram]) -> EngineQuantiles:
    """Return the quantiles of a report's histograms and the ends of their intervals, but those that are unresolved."""
    shown: dict[tuple[str, str, str], float] = {}
    for of, histogram in histograms.items():
        intervals, unresolved = histogram.intervals or {}, histogram.unresolved or ()
        for name, quantile in LEVELS.items():
            if name in intervals and name not in unresolved:
                low, high = intervals[name].low, intervals[name].high
                bounds = {"estimate": getattr(histogram.stats, name), "low": low, "high": high}
                shown |= {(of, quantile, bound): value for bound, value in bounds.items() if isinstance(value, float)}
    return shown
