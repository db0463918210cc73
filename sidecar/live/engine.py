"""Scraped endpoints while a run or a watch goes: their last pages in canonical quantities, of engines and gateways."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sidelight.exporter.prometheus.snapshot import Cumulative, EngineCounts, GatewayCounts, add
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.columns import Floats, Indices
from sidelight.rundir.stats import Missing, finite
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import EngineLimits
from sidelight.scraper.engines.catalogue import catalogue as engine_catalogue
from sidelight.scraper.engines.recognition import RecognisedEngine
from sidelight.scraper.exposition import Series
from sidelight.scraper.gateways import catalogue as gateways
from sidelight.scraper.gateways.catalogue import Recognised
from sidelight.scraper.series.log import FailureRecord, ScrapeRow
from sidelight.scraper.series.table import EndpointSeries, SeriesTable, union_columns
from sidelight.scraper.window.aggregate import gauge_values
from sidelight.sidecar.live.lately import Peaks
from sidelight.sidecar.progress.panel import BAR

if TYPE_CHECKING:
    from sidelight.sidecar.live.quantiles import QuantileView


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Meaning of a layout's pages: the columns of their series, the engine and its sources. `places` has the column of
    each series, of `columns` in all; `sources` the columns from which the engine's canonical quantities are read; no
    engine, no sources. So too of a gateway.
    """

    layout: tuple[Series, ...] = ()
    columns: int = 0
    places: Indices = field(default_factory=lambda: np.empty(0, np.intp))
    engine: RecognisedEngine | None = None
    sources: Mapping[str, CanonicalSource | Missing] = field(default_factory=dict)
    gateway: Recognised | None = None
    gateway_sources: Mapping[str, CanonicalSource | Missing] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class EngineView:
    """Live state of one page. `counts` is its part of the live page; `known` is of the last page's layout: pages of one
    layout share the tuple of their series. `answered_ns` is when the last page came (before the first: when it was
    asked for), `failure` why the scrape after it had none. `highest` is the maximum of each gauge.
    """

    counts: EngineCounts
    outcomes: dict[str, int] = field(default_factory=lambda: {"ok": 0, "failed": 0})
    known: Known = field(default_factory=Known)
    answered_ns: int | None = None
    failed_ns: int = 0
    failure: str = ""
    first: GatewayCounts | None = None  # of a gateway's first page, or the first after it began anew
    highest: dict[str, float] = field(default_factory=dict)
    handled: float = 0.0  # requests that its last page has

    def take(self, record: ScrapeRow | FailureRecord) -> None:
        if isinstance(record, ScrapeRow):
            self.outcomes["ok"] += 1
            self.answered_ns, self.failure = record.response_ns, ""
            self._take_page(record)
        else:
            self.outcomes["failed"] += 1
            if self.answered_ns is None:
                self.answered_ns = record.request_ns
            self.failed_ns, self.failure = record.response_ns, record.error
        duration_s = (record.response_ns - record.request_ns) / 1e9
        self.counts = replace(
            self.counts,
            scrapes=dict(self.outcomes),
            last_scrape_duration_s=duration_s,
            last_answer_s=self.answered_ns / 1e9 if self.outcomes["ok"] else None,
        )

    def silence(self, stale_s: float, now_ns: int | None = None) -> str:
        """Return the start and reason of a page's silence, if longer than `stale_s`. It is measured by now or else by
        the last scrape; empty while there are pages.
        """
        if self.answered_ns is None or not self.failure:
            return ""
        until_ns = self.failed_ns if now_ns is None else now_ns
        is_silent = until_ns - self.answered_ns > stale_s * 1e9
        return f"since {iso_ms(self.answered_ns)[11:19]} UTC: {self.failure}" if is_silent else ""

    def _take_page(self, record: ScrapeRow) -> None:
        if record.series is not self.known.layout:
            self.known = known_of(record.series)
        row = np.full(self.known.columns, np.nan)
        # From the back, so that the first of two equal series is written last and stands.
        row[self.known.places[::-1]] = record.values[::-1]
        self.show(row)

    def show(self, row: Floats) -> None:
        """Show a page of the layout in `known`: the values of its series, NaN if absent."""
        quantities = _quantities(self.known.sources, row)
        for name, value in quantities["gauges"].items():
            self.highest[name] = max(value, self.highest.get(name, value))
        self.counts = EngineCounts(
            endpoint=self.counts.endpoint,
            engine=self.known.engine.name if self.known.engine else "",
            version=(self.known.engine.version or "") if self.known.engine else "",
            gateway=self._gateway(row),
            highest=dict(self.highest),
            **quantities,
        )

    def _gateway(self, row: Floats) -> GatewayCounts | None:
        if self.known.gateway is None:
            return None
        counts = GatewayCounts(gateway=self.known.gateway.name, **_quantities(self.known.gateway_sources, row))
        handled = _handled(counts)
        if self.first is None or handled < self.handled:
            self.first = counts
        self.handled = handled
        return replace(counts, own_s=_own_s(counts, self.first))


MINUTE_NS = 60_000_000_000
LEAST_FLOW_S = 10.0  # of scrapes, before a change of theirs is a rate
WAITED = ("requests_waiting", "requests_running", "kv_cache_usage")
MEANS = {"ttft": "TTFT", "queue_time": "queue", "prefill_time": "prefill"}


class Engines:
    """Owner of the scraped endpoints of a view, by URL: their last pages, their quantiles, and how many waited lately.

    Quantiles are of `tables`, or of those that it keeps itself, of the last `keep_s`; peaks are of `waiting_s`. An
    endpoint without a page for `stale_s` seconds is silent, and its gauges do not count.
    """

    def __init__(
        self, tables: Mapping[str, SeriesTable] | None = None, *, keep_s: float = 0.0, waiting_s: float = 60.0
    ) -> None:
        self.views: dict[str, EngineView] = {}
        self._recent: dict[str, SeriesTable] = {}
        self._tables, self._keep_ns = self._recent if tables is None else tables, round(keep_s * 1e9)
        self._quantiles: QuantileView | None = None
        self._waiting = Peaks(columns=BAR, column_s=waiting_s / BAR)
        # Gauges, counters, and counts and sums of histograms, of the last minute.
        self._samples: deque[tuple[int, str, Mapping[str, float], Mapping[str, float], Floats]] = deque()

    def take(self, record: ScrapeRow | FailureRecord) -> EngineView:
        """Add a scrape, and return the view of its endpoint."""
        view = self.views.setdefault(record.url, EngineView(counts=EngineCounts(endpoint=record.url)))
        view.take(record)
        if isinstance(record, ScrapeRow):
            counts = view.counts
            totals = _totals(counts.histograms)
            self._samples.append((record.response_ns, record.url, counts.gauges, counts.counters, totals))
            while self._samples[0][0] < record.response_ns - MINUTE_NS:
                self._samples.popleft()
        if self._keep_ns:
            self._recent.setdefault(record.url, SeriesTable(record.url, keep_ns=self._keep_ns)).append(record)
        return view

    def keep(self, urls: Collection[str]) -> None:
        """Forget all other endpoints."""
        for gone in self.views.keys() - urls:
            del self.views[gone]
            self._recent.pop(gone, None)

    def estimate_quantiles(self, start_ns: int, end_ns: int) -> None:
        """Estimate the quantiles of a window up to now, if that is due."""
        from sidelight.scraper.window.window import Window  # noqa: PLC0415  a run's first request would wait for these imports
        from sidelight.sidecar.live.quantiles import QuantileView  # noqa: PLC0415

        self._quantiles = self._quantiles or QuantileView()
        self._quantiles.refresh(self._tables, Window(start_ns=start_ns, end_ns=end_ns))

    def silent(self, stale_s: float, now_ns: int | None = None) -> dict[str, str]:
        """Return the silent endpoints, each with the start and reason."""
        return {url: why for url, view in self.views.items() if (why := view.silence(stale_s, now_ns))}

    def gauge(self, quantity: str, stale_s: float, now_ns: int | None = None) -> float | None:
        """Return a gauge of all endpoints that answer: their sum, of a usage the maximum; None where missing."""
        answering = [view.counts.gauges for view in self.views.values() if not view.silence(stale_s, now_ns)]
        values = [gauges[quantity] for gauges in answering if quantity in gauges]
        return finite(max(values) if quantity == "kv_cache_usage" else sum(values)) if values else None

    def observed(self) -> dict[str, Any]:
        """Return the last minute's evidence on waiting: gauges while requests waited, limits, and preemptions."""
        from sidelight.correlator.statistics.queueing import while_waiting_of  # noqa: PLC0415  as `estimate_quantiles` says

        columns, preempted = defaultdict[str, list[list[float]]](list), dict[str, list[float]]()
        for _, url, gauges, counters, _ in self._samples:
            columns[url].append([gauges.get(name, math.nan) for name in WAITED])
            preempted.setdefault(url, []).append(counters.get("preemptions", 0.0))
        leading = _leading(list(self.views.values()))
        return {
            "waited": while_waiting_of(tuple(np.array(rows).T) for rows in columns.values()),
            "limits": EngineLimits() if leading is None else engine_catalogue(leading.name).limits,
            "preemptions": sum(max(0.0, counts[-1] - counts[0]) for counts in preempted.values()),
        }

    def flow_per_s(self) -> tuple[float | None, float | None]:
        """Return the rates of the last minute: of finished requests, and of the growth of those that wait.

        None where no page says it.
        """
        first, last = dict[str, Floats](), dict[str, Floats]()
        for at_ns, url, gauges, counters, _ in self._samples:
            waiting, finished = gauges.get("requests_waiting", math.nan), counters.get("requests_finished", math.nan)
            last[url] = np.array([at_ns / 1e9, finished, waiting])
            first.setdefault(url, last[url])
        changes = [last[url] - first[url] for url in last]
        rates = [change[1:] / change[0] for change in changes if change[0] >= LEAST_FLOW_S]
        columns = [column[np.isfinite(column)] for column in np.array(rates).reshape(-1, 2).T]
        finished_per_s, more_per_s = (float(column.sum()) if len(column) else None for column in columns)
        return None if finished_per_s is None else max(0.0, finished_per_s), more_per_s

    def means_ms(self) -> dict[str, float]:
        """Return the last minute's means by pages: of TTFT, queue and prefill, where stated."""
        first, last = dict[str, Floats](), dict[str, Floats]()
        for _, url, _, _, totals in self._samples:
            last[url] = totals
            first.setdefault(url, totals)
        grown = np.array([last[url] - first[url] for url in last]).reshape(-1, len(MEANS), 2)
        grown[~(grown >= 0.0).all(axis=2)] = 0.0  # not stated, or begun anew
        summed = grown.sum(axis=0)
        return {
            label: float(1e3 * s / count) for label, (count, s) in zip(MEANS.values(), summed, strict=True) if count
        }

    def series(self) -> list[EndpointSeries]:
        """Return the scrapes that are kept of all endpoints."""
        return [table.view() for table in self._tables.values()]

    def waiting_lately(self, waiting: float | None, now_ns: int) -> list[float | None]:
        """Add the number of waiting requests; return the most in each of the last columns."""
        return self._waiting.take(now_ns / 1e9, waiting)

    def counts(self, version: str = "") -> tuple[EngineCounts, ...]:
        """Return the counts of all endpoints with quantiles and roles; `version` is that of the leading engine."""
        engines = stated(list(self.views.values()), version)
        if (known := self._quantiles) is None:
            return engines
        return tuple(
            replace(engine, quantiles=known.latest.get(engine.endpoint, {}), role=known.roles.get(engine.endpoint, ""))
            for engine in engines
        )


def _totals(histograms: Mapping[str, Cumulative]) -> Floats:
    """Return the count and the sum of each histogram of MEANS; NaN where it is missing."""
    known = (histograms.get(name) for name in MEANS)
    return np.array([(math.nan, math.nan) if each is None else (sum(each.counts), each.sum_s) for each in known])


def stated(views: Sequence[EngineView], version: str) -> tuple[EngineCounts, ...]:
    """Return the counts of pages. The leading engine has the version that it stated elsewhere, as in the report."""
    leading = _leading(views) if version else None
    return tuple(
        replace(view.counts, version=version)
        if leading is not None and view.counts.engine == leading.name
        else view.counts
        for view in views
    )


def about_engine(views: Sequence[EngineView], version: str) -> dict[str, str]:
    """Return the name of the leading engine and its version, by label."""
    leading = _leading(views)
    return {} if leading is None else {"engine": leading.name, "version": version or leading.version or ""}


def _leading(views: Sequence[EngineView]) -> RecognisedEngine | None:
    return engines.leading_engine((view.known.engine, view.known.sources) for view in views if view.known.engine)


def known_of(layout: tuple[Series, ...]) -> Known:
    """Return the meaning of pages with these series."""
    series, places = union_columns([layout])
    engine = engines.detect(series)
    gateway = gateways.detect(series, beside_engine=engine is not None)
    return Known(
        layout=layout,
        columns=len(series),
        places=places[id(layout)],
        engine=engine,
        sources=engines.canonical(series, engine.name) if engine else {},
        gateway=gateway,
        gateway_sources=gateways.canonical(series, gateway.name) if gateway else {},
    )


def _quantities(sources: Mapping[str, CanonicalSource | Missing], row: Floats) -> dict[str, Any]:
    """Return the quantities of a page as `PageCounts` has them."""
    histograms: dict[str, Cumulative] = {}
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    for name, source in sources.items():
        if isinstance(source, Missing):
            continue
        unit = gateways.UNITS_S.get(source.quantity.unit, 1.0)
        if source.quantity.kind == "histogram":
            merged = _merged(source, row, unit)
            if merged is not None:
                histograms[name] = merged
            continue
        values = gauge_values(row[None, :], source)[0]
        values = values[np.isfinite(values)]
        total = math.inf if source.columns else 0.0
        if len(values):
            total = max(values.tolist()) if source.quantity.across == "max" else sum(values.tolist())
        if math.isfinite(total):
            (gauges if source.quantity.kind == "gauge" else counters)[name] = total * unit
    return {"histograms": histograms, "gauges": gauges, "counters": counters}


def _handled(counts: GatewayCounts) -> float:
    """Return the number of requests on a gateway's page, 0 where it is missing."""
    whole = counts.histograms.get("request_time")
    return sum(whole.counts) if whole else 0.0


def _own_s(counts: GatewayCounts, first: GatewayCounts) -> float | None:
    """Return a gateway's mean own time of a request between two pages, None if missing."""
    count, own_s = _handled(counts) - _handled(first), 0.0
    for name, sign in (("request_time", 1.0), ("upstream_time", -1.0)):
        if name not in counts.histograms or name not in first.histograms:
            return None
        own_s += sign * (counts.histograms[name].sum_s - first.histograms[name].sum_s)
    return own_s / count if count > 0 and own_s >= 0 else None


def _merged(source: CanonicalSource, row: Floats, unit: float) -> Cumulative | None:
    """Add the label sets of a histogram in units of `unit` s, or return None. None where one has no sum, no +Inf bucket
    or a value that is not finite, or where their bounds differ.
    """
    label_sets = []
    for columns in source.histograms:
        if columns.sum < 0 or not columns.bounds or columns.bounds[-1] != math.inf:
            return None
        buckets = row[list(columns.buckets)]
        if not np.isfinite(buckets).all():
            return None
        label_sets.append(
            Cumulative(
                bounds_s=tuple(unit * bound for bound in columns.bounds[:-1]),
                counts=tuple(np.diff(buckets, prepend=0.0).tolist()),
                sum_s=unit * float(row[columns.sum]),
            )
        )
    if len({histogram.bounds_s for histogram in label_sets}) != 1:
        return None
    merged = label_sets[0]
    for other in label_sets[1:]:
        merged = add(merged, other)
    return merged if all(map(math.isfinite, (*merged.counts, merged.sum_s))) else None
