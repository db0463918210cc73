"""Objectives of a watch in its last minute: by clients' spans, else by estimates from the pages of engines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import NamedTuple

from msgspec import structs

from sidelight.exporter.report.verdict import FEW_REQUESTS
from sidelight.loadgen.requests.slo.objectives import EVERY, Objective, Slo, parse_slo
from sidelight.loadgen.requests.slo.results import ObjectiveResult, SloResult, all_met
from sidelight.loadgen.requests.table.log import RequestLog, unknown_requests
from sidelight.recorded.client_spans import ClientSpan, request_log
from sidelight.rundir.columns import concat
from sidelight.rundir.fields import UNSET
from sidelight.rundir.printable.numbers import count_of, spoken_together
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.quantiles import read
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.aggregate import EndpointShare, counter_rates, counters, histograms
from sidelight.scraper.window.statistics import fits_of
from sidelight.scraper.window.window import Window, select_scrapes
from sidelight.sidecar.live.lately import CLIENTS_S, MOST
from sidelight.sidecar.live.tally import SLO_EVERY_S, SLO_SHARE, Tally
from sidelight.twin.watched import WatchedEngines, watched_engines

# What engines' pages have of it: time in the engine alone, without network and gateway.
QUANTITIES: Mapping[str, str] = {
    "ttft": "ttft",
    "itl": "inter_token_latency",
    "e2e": "e2e_latency",
    "requests_per_s": "requests_finished",
    "output_tokens_per_s": "generation_tokens",
}


class PageEstimate(NamedTuple):
    """Number by the pages: `value`, and the ends of its 90 % interval. `values` is how many it is of."""

    value: float
    low: float
    high: float
    values: int


@dataclass(slots=True)
class WatchedObjectives:
    """Objectives over the last minute, judged anew now and then; `latest` is as of then, None without objectives.

    The last minute's clients' spans are kept, MOST at most. `is_by_pages`: one of the objectives is by engines' pages.
    """

    slo: Slo | None = None
    latest: SloResult | None = None
    is_by_pages: bool = False
    _clients: deque[tuple[int, RequestLog]] = field(default_factory=deque)
    _begun_ns: int | None = None
    _due_ns: int = 0

    @property
    def when(self) -> str:
        """Return the time that the objectives are about; by pages, the source too."""
        return f"in the last minute{', by pages of engines' if self.is_by_pages else ''}"

    def count(self, clients: Sequence[tuple[ClientSpan, str]], now_ns: int) -> None:
        """Add clients' spans that ended, each with its trace."""
        if self.slo is not None:
            spans, traces = [span for span, _ in clients], [bytes.fromhex(trace) for _, trace in clients]
            self._clients.append((now_ns, request_log(spans, traces)))

    def judge(self, pages: Callable[[], Sequence[EndpointSeries]], now_ns: int) -> Sequence[ObjectiveResult]:
        """Return the objectives, up to SLO_EVERY_S old, or older where a judgement takes long."""
        self._begun_ns = now_ns - 1 if self._begun_ns is None else self._begun_ns
        start_ns = max(now_ns - round(CLIENTS_S * 1e9), self._begun_ns)
        while self._clients and (self._clients[0][0] < start_ns or sum(len(log) for _, log in self._clients) > MOST):
            self._clients.popleft()
        if self.slo is not None and now_ns >= self._due_ns:
            begun_s, window = thread_time(), Window(start_ns=start_ns, end_ns=now_ns)
            clients = concat([log for _, log in self._clients]) if self._clients else unknown_requests(0)
            self.latest, self.is_by_pages = judged(self.slo, clients, pages(), window)
            self._due_ns = now_ns + round(1e9 * max(SLO_EVERY_S, (thread_time() - begun_s) / SLO_SHARE))
        return self.latest.objectives if self.latest else ()


def watched_objectives(text: str | None) -> WatchedObjectives:
    """Return the objectives of a checked --slo."""
    return WatchedObjectives(None if text is None else parse_slo(text))


def watched(slo: str | None, known: str, baseline: Path | None) -> tuple[WatchedObjectives, WatchedEngines]:
    """Return the objectives of a watch that begins, and its engine, by checked options.

    Raises ConfigurationError for settings and baselines that say nothing.
    """
    objectives = watched_objectives(slo)
    return objectives, watched_engines(objectives.slo.objectives if objectives.slo else (), known, baseline)


def judged(slo: Slo, clients: RequestLog, pages: Sequence[EndpointSeries], window: Window) -> tuple[SloResult, bool]:
    """Return the state of the objectives in a window, by clients' spans, else by pages; and whether one is by pages.

    Of fewer than FEW_REQUESTS a percentile is mostly chance, and no objective is judged.
    """
    tally = Tally(slo=slo)
    tally.count(clients)
    by_clients = tally.slo_result(window.duration_s)
    if by_clients is None:
        raise AssertionError("a tally of objectives judges them")
    objectives, is_by_pages = [], False
    for objective, result in zip(slo.objectives, by_clients.objectives, strict=True):
        few = _too_few(len(clients), objective)
        is_seen = result.count or not objective.of_latency or not tally.statuses["ok"]
        if result.met is not None and is_seen and not few:
            objectives.append(result)
            continue
        estimate = _estimate(objective, result.name, pages, window)
        if isinstance(estimate, Missing):
            missing = f"{few or result.missing or 'no span states it'}, and {estimate.reason}"
            objectives.append(structs.replace(result, met=None, missing=missing))
        else:
            objectives.append(_by_pages(objective, result, estimate))
            is_by_pages = True
    return structs.replace(by_clients, met=all_met(objectives), objectives=objectives), is_by_pages


def _too_few(requests: int, objective: Objective) -> str:
    """Return a clause where too few clients' spans ended; a rate is what it is."""
    if not requests:
        return "no client's span came in the last minute"
    is_rate = not objective.of_latency and objective.unit != "ratio"
    return (
        "" if is_rate or requests >= FEW_REQUESTS else f"only {count_of(requests, 'request')} ended in the last minute"
    )


def _estimate(
    objective: Objective, name: str, pages: Sequence[EndpointSeries], window: Window
) -> PageEstimate | Missing:
    """Return the number that the pages have of an objective; else a clause that says why there is none."""
    shares = list(_shares(QUANTITIES.get(objective.metric, ""), pages, window))
    if not shares or objective.statistic in (EVERY, "max"):
        return Missing(f"no engine's page states {name}")
    if not objective.of_latency:
        total = counters(shares)
        rate_per_s = math.nan if isinstance(total, Missing) else counter_rates(shares, total)[0]
        known = PageEstimate(rate_per_s, rate_per_s, rate_per_s, FEW_REQUESTS)
        return known if math.isfinite(rate_per_s) else Missing(f"no engine's page counted {name}")
    measured = histograms(shares)
    if isinstance(measured, Missing) or not measured.count >= FEW_REQUESTS:
        counted = 0 if isinstance(measured, Missing) or math.isnan(measured.count) else int(measured.count)
        return Missing(f"engines' pages counted {counted}")
    if objective.quantile is None:
        value = low = high = measured.sum / measured.count
    else:
        estimates = read(fits_of(measured), [objective.quantile])
        value, low, high = (float(each[0]) for each in (estimates.values, estimates.low, estimates.high))
    known = PageEstimate(1e3 * value, 1e3 * low, 1e3 * high, int(measured.count))
    return known if math.isfinite(value) else Missing("the buckets of engines' pages do not tell")


def _shares(quantity: str, pages: Sequence[EndpointSeries], window: Window) -> Iterable[EndpointShare]:
    """Yield the pages with a quantity."""
    for endpoint in pages:
        engine = detect(endpoint.series)
        source = canonical(endpoint.series, engine.name).get(quantity) if engine is not None else None
        selection = select_scrapes(endpoint, window, window.end_ns - window.start_ns)
        if source is not None and not isinstance(source, Missing) and not isinstance(selection, Missing):
            yield EndpointShare(endpoint=endpoint, selection=selection, source=source)


def _by_pages(objective: Objective, result: ObjectiveResult, estimate: PageEstimate) -> ObjectiveResult:
    """Return an objective with the pages' number; not known where its interval holds the bound."""
    ends = [objective.holds(end) for end in (estimate.low, estimate.value, estimate.high)]
    is_known = all(ends) or not any(ends)
    within = " to ".join(spoken_together(estimate.low, estimate.high))
    return structs.replace(
        result,
        value=estimate.value,
        value_ms=estimate.value if objective.of_latency else None,
        count=estimate.values,
        requests=estimate.values,
        failed_requests=0,
        left_out_requests=0,
        met=ends[0] if is_known else None,
        missing=UNSET if is_known else f"it is {within} by engines' histograms",
    )
