"""How loaded the engines were at any moment, read off their scrapes: what clients' waits are set beside.

Gauges are taken as they stand; of counters, what they moved by over the last seconds. Each engine's own names for these
quantities are the business of `scraper.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sidelight.correlator.requests import route
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Indices, Ints
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.recognition import canonical, detect, leading_engine
from sidelight.scraper.series.resets import Restarts, restarts_of, rising, together
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.aggregate import gauge_values

Sources = Mapping[str, CanonicalSource | Missing]

QUANTITIES = ("requests_waiting", "requests_running", "kv_cache_usage", "preemptions", "prefix_cache_hit_rate")
WINDOW_S = 5.0
STALE_SCRAPES = 5.0
MOST = 2.0**53  # a gauge beyond is a slip of the server's, whose squares are no numbers
NOTHING_SCRAPED = "no server that was scraped shows the metrics of a known engine"
NO_SCRAPE = "no scrape succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSamples:
    """A quantity of one engine [t], NaN where unknown: `amount`, divided by `over` where there is one.

    A sample counts until the next one, but no longer than `fresh_ns`, and not beyond the last: what comes after is
    unknown, not unchanged.
    """

    at_ns: Ints
    amount: Floats
    over: Floats | None
    fresh_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A quantity as n requests met it: by group of requests (rows), the engines that they may have gone to.

    `combined`: "one" engine; "own", each request beside the engine that it was sent to; else what is made of the values
    of all engines, their "sum", their "max", or the "ratio" of two sums.
    """

    combined: Literal["one", "own", "sum", "max", "ratio"]
    size: int
    groups: tuple[tuple[Indices, tuple[EngineSamples, ...]], ...]

    def at(self, stamps_ns: Ints) -> Floats:
        """Return the quantity [n] at each request's moment, NaN where unknown for some engine."""
        quantity = np.full(self.size, np.nan)
        for rows, members in self.groups:
            seen = [_held(sample, stamps_ns[rows]) for sample in members]
            fold = np.maximum if self.combined == "max" else np.add
            amount = fold.reduce([sample[0] for sample in seen])
            whole = np.add.reduce([sample[1] for sample in seen])
            if members[0].over is None:
                quantity[rows] = amount
            else:
                quantity[rows] = np.divide(amount, whole, out=np.full(len(rows), np.nan), where=whole > 0)
        return quantity


def server_loads(requests: RequestLog, endpoints: Sequence[EndpointSeries]) -> dict[str, ServerLoad | Missing]:
    """Return each of `QUANTITIES` for n requests, or why it is not known.

    - Where the addresses that requests were sent to are those of engines, a request meets its own engine. Where they do
      not tell (a gateway), engines are taken together: waiting, running and preemptions add up, of the KV cache the
      fullest counts, the hit rate is that of all look-ups. One that does not tell then leaves the whole unknown.
    - requests_waiting, requests_running, kv_cache_usage: gauges. preemptions: 1/s, over the last 5 s. The hit
      rate: hits over look-ups of the last 5 s, unknown where there was none.
    - Engines are those of the leading kind: a Dynamo frontend and its workers see the same requests.
    """
    shown = engine_samples(endpoints)
    if not shown:
        unseen = bool(endpoints) and not any(len(endpoint.at_ns) for endpoint in endpoints)
        return dict.fromkeys(QUANTITIES, Missing(NO_SCRAPE if unseen else NOTHING_SCRAPED))
    groups = route(requests.endpoint_url, [url for url, _ in shown])
    loads: dict[str, ServerLoad | Missing] = {}
    for name in QUANTITIES:
        samples = [quantities[name] for _, quantities in shown]
        reasons = dict.fromkeys(absent.reason for absent in samples if isinstance(absent, Missing))
        complete = []
        for rows, members in groups:
            known = tuple(sample for at in members if not isinstance(sample := samples[at], Missing))
            if len(known) == len(members):
                complete.append((rows, known))
        if len(reasons) and not complete:
            loads[name] = Missing("; ".join(reasons))
        else:
            loads[name] = ServerLoad(combined=_how(name, groups), size=len(requests.submit_ns), groups=tuple(complete))
    return loads


def met_at_submission(requests: RequestLog, endpoints: Sequence[EndpointSeries]) -> dict[str, Floats | Missing]:
    """Return each of `QUANTITIES` [n] as of each request's submission, NaN where unknown."""
    submitted = requests.submit_ns >= 0
    return {
        name: load if isinstance(load, Missing) else np.where(submitted, load.at(requests.submit_ns), np.nan)
        for name, load in server_loads(requests, endpoints).items()
    }


def gauge_samples(
    endpoints: Sequence[EndpointSeries], name: str, *, together: Literal["sum", "max"] = "sum"
) -> EngineSamples:
    """Return a gauge over all engines together, at the scrapes of the first [t].

    NaN where it is unknown for one engine, or larger than any count; empty where an engine does not show it.
    """
    gauges = [quantities[name] for _, quantities in engine_samples(endpoints)]
    known = [gauge for gauge in gauges if not isinstance(gauge, Missing)]
    if not known or len(known) < len(gauges):
        return EngineSamples(at_ns=np.empty(0, np.int64), amount=np.empty(0), over=None, fresh_ns=0.0)
    held = np.array([_held(gauge, known[0].at_ns)[0] for gauge in known])
    counted = np.where(np.abs(held) < MOST, held, np.nan)
    return replace(known[0], amount=counted.max(axis=0) if together == "max" else counted.sum(axis=0))


def without_loads(waiting: EngineSamples, endpoints: Sequence[EndpointSeries]) -> EngineSamples:
    """Return the waiting requests without those with a KV cache on its way."""
    amount = waiting.amount
    for endpoint, sources in leading_endpoints(endpoints) if len(amount) else ():
        source = sources.get("kv_fetch_in_progress")
        if isinstance(source, CanonicalSource):
            loading, _ = _held(_sampled(endpoint, gauge_amounts(endpoint, source)), waiting.at_ns)
            amount = np.maximum(amount - np.nan_to_num(loading), 0.0)
    return replace(waiting, amount=amount)


def most_within(samples: EngineSamples, edges_ns: Ints) -> Floats:
    """Return the largest amount [n] between consecutive edges [n + 1], NaN where unknown."""
    begins_ns = edges_ns[:-1]
    most = np.where(np.isfinite(held := _held(samples, begins_ns)[0]), held, -np.inf)
    column = np.searchsorted(edges_ns, samples.at_ns, side="right") - 1
    inside = np.isfinite(samples.amount) & (column >= 0) & (column < len(begins_ns))
    np.maximum.at(most, column[inside], samples.amount[inside])
    return np.where(np.isfinite(most), most, np.nan)


def engine_samples(endpoints: Sequence[EndpointSeries]) -> list[tuple[str, dict[str, EngineSamples | Missing]]]:
    """Return the engines of the leading kind, by address."""
    return [(endpoint.url, _samples(endpoint, sources)) for endpoint, sources in leading_endpoints(endpoints)]


def leading_endpoints(endpoints: Sequence[EndpointSeries]) -> list[tuple[EndpointSeries, Sources]]:
    """Return the pages of the leading kind of engines, with their sources of canonical quantities."""
    recognised = [
        (endpoint, engine, canonical(endpoint.series, engine.name))
        for endpoint in endpoints
        if (engine := detect(endpoint.series)) is not None
    ]
    leading = leading_engine((engine, sources) for _, engine, sources in recognised)
    return [
        (endpoint, sources)
        for endpoint, engine, sources in recognised
        if leading is not None and engine.name == leading.name
    ]


def _samples(endpoint: EndpointSeries, sources: Sources) -> dict[str, EngineSamples | Missing]:
    samples: dict[str, EngineSamples | Missing] = {}
    for name in QUANTITIES[:3]:
        source = sources[name]
        samples[name] = source if isinstance(source, Missing) else _sampled(endpoint, gauge_amounts(endpoint, source))
    restarts = restarts_of(endpoint)
    preemptions = sources["preemptions"]
    samples["preemptions"] = preemptions if isinstance(preemptions, Missing) else _rate(endpoint, preemptions, restarts)
    hits, queries = sources["prefix_cache_hits"], sources["prefix_cache_queries"]
    if isinstance(hits, Missing) or isinstance(queries, Missing):
        reasons = (absent.reason for absent in (hits, queries) if isinstance(absent, Missing))
        samples["prefix_cache_hit_rate"] = Missing("; ".join(dict.fromkeys(reasons)))
    else:
        since = _since(endpoint)
        increases = (_increase(endpoint, source, since, restarts) for source in (hits, queries))
        samples["prefix_cache_hit_rate"] = _sampled(endpoint, *increases)
    return samples


def gauge_amounts(endpoint: EndpointSeries, source: CanonicalSource) -> Floats:
    """Return a gauge of a page at each scrape [t], its label sets together; NaN where none is known."""
    values = gauge_values(endpoint.values, source)
    known = np.isfinite(values)
    if source.quantity.across == "max":
        amount = np.where(known, values, -np.inf).max(axis=1, initial=-np.inf)
    else:
        amount = np.where(known, values, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), amount, np.nan)


def _rate(endpoint: EndpointSeries, source: CanonicalSource, restarts: Restarts) -> EngineSamples:
    since = _since(endpoint)
    elapsed_s = (endpoint.at_ns - endpoint.at_ns[since]) / 1e9
    increase = _increase(endpoint, source, since, restarts)
    with np.errstate(over="ignore"):
        rate = np.divide(increase, elapsed_s, out=np.full(len(increase), np.nan), where=elapsed_s > 0)
    return _sampled(endpoint, np.where(np.isfinite(rate), rate, np.nan))


def _sampled(endpoint: EndpointSeries, amount: Floats, over: Floats | None = None) -> EngineSamples:
    interval_ns = float(np.median(np.diff(endpoint.at_ns))) if len(endpoint.at_ns) > 1 else 0.0
    return EngineSamples(at_ns=endpoint.at_ns, amount=amount, over=over, fresh_ns=STALE_SCRAPES * interval_ns)


def _since(endpoint: EndpointSeries) -> Indices:
    """Return the start of each scrape's window, as a scrape.

    It is the last one that is at least the window older, else the first, or the one before it.
    """
    older = np.searchsorted(endpoint.at_ns, endpoint.at_ns - int(WINDOW_S * 1e9), side="right") - 1
    return np.maximum(np.minimum(older, np.arange(len(older)) - 1), 0)


def _increase(endpoint: EndpointSeries, source: CanonicalSource, since: Indices, restarts: Restarts) -> Floats:
    """Return by how much a counter rose [t] since some scrapes, all label sets; 0 for one that is not created yet."""
    columns = [rising(endpoint, column, restarts).values for column in source.columns]
    total = together([np.zeros(len(endpoint.values)), *columns])
    return together([total, -total[since]])


def _how(name: str, groups: Sequence[tuple[Indices, list[int]]]) -> Literal["one", "own", "sum", "max", "ratio"]:
    if len(groups) > 1:
        return "own"
    if len(groups[0][1]) == 1:
        return "one"
    if name == "prefix_cache_hit_rate":
        return "ratio"
    return "max" if name == "kv_cache_usage" else "sum"


def _held(samples: EngineSamples, stamps_ns: Ints) -> tuple[Floats, Floats]:
    """Return amount and divisor (NaN where there is none) as they stood at some moments."""
    if not len(samples.at_ns):
        return np.full(len(stamps_ns), np.nan), np.full(len(stamps_ns), np.nan)
    last = np.searchsorted(samples.at_ns, stamps_ns, side="right") - 1
    row = np.maximum(last, 0)
    age_ns = stamps_ns - samples.at_ns[row]
    fresh = (last >= 0) & (stamps_ns <= samples.at_ns[-1]) & (age_ns <= samples.fresh_ns)
    over = np.full(len(stamps_ns), np.nan) if samples.over is None else np.where(fresh, samples.over[row], np.nan)
    return np.where(fresh, samples.amount[row], np.nan), over
