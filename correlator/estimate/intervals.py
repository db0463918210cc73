"""Engine counters between two scrapes: the intervals that per-request times are estimated from.

An interval lies between two consecutive usable scrapes of one endpoint. It has the number of requests that ended in it
(or had their first token) and the sums of their times and tokens. Identifying our requests among them is left to
`assignment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices, Ints
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.exposition import HistogramColumns, histograms
from sidelight.scraper.series.resets import Restarts, RisingHistogram, restarts_of, rising, rising_histogram
from sidelight.scraper.series.table import EndpointSeries

Sources = Mapping[str, CanonicalSource | Missing]

LARGEST = 2.0**53  # requests or seconds: whole numbers beyond are not exact, and no run has as many


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalBuckets:
    """How many observations fell into each bucket: bounds[B] (the last +inf), counts[C, B], not cumulative over B."""

    bounds: Floats
    counts: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeIntervals:
    """C intervals in time order: stamps int64 ns Unix, sums [C] by name in seconds or tokens.

    The interval c lies between the scrapes at start_ns[c] and end_ns[c]. `lost[c]`: the engine restarted in it, so that
    what it counted is not known. Sums and buckets that the engine does not show are not there.
    """

    start_ns: Ints
    end_ns: Ints
    lost: Bools
    count: Ints
    sums: Mapping[str, Floats]
    buckets: Mapping[str, IntervalBuckets]

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One endpoint: the intervals of ends (`queue`, `prefill`, tokens) and of first tokens (`ttft`), where it has them.

    `never_waiting`: the gauge of waiting requests is on the page and was 0 in every scrape. `stamp_error_s` is half of
    a scrape's usual round trip.
    """

    ends: ScrapeIntervals
    firsts: ScrapeIntervals | None
    never_waiting: bool
    stamp_error_s: float


def observe(endpoint: EndpointSeries) -> Observed | Missing:
    """Read the intervals off an endpoint's scrapes; a scrape that failed makes one longer interval.

    A page on which the histograms of the end disagree in count was read half written: it counts as not scraped.
    Missing: fewer than two usable scrapes, no known engine, no queue or prefill histogram, one without count or sum,
    one whose sum cannot be, or one that is observed at another moment than the end of a request: its sums then speak of
    other requests than those that ended.
    """
    if not len(endpoint.at_ns):
        return Missing("no scrape succeeded")
    engine = engines.detect(endpoint.series)
    if engine is None:
        return Missing("the page shows no engine that is known")
    sources = engines.canonical(endpoint.series, engine.name)
    restarts = restarts_of(endpoint)
    ends = _ends(endpoint, engine.name, sources, restarts)
    if isinstance(ends, Missing):
        return ends
    return Observed(
        ends=ends,
        firsts=_firsts(endpoint, sources, restarts),
        never_waiting=_never_waiting(endpoint, sources),
        stamp_error_s=float(np.median(endpoint.response_ns - endpoint.request_ns)) / 2e9,
    )


def merge(intervals: ScrapeIntervals, groups: Indices) -> ScrapeIntervals:
    """Join neighbouring intervals that have the same number in groups[C]; these ascend by steps of 1 from 0."""
    first = np.searchsorted(groups, np.arange(groups[-1] + 1))
    last = np.append(first[1:], len(groups)) - 1
    whole = _folded([intervals], lambda column: np.add.reduceat(column[0], first))
    lost = np.asarray(np.logical_or.reduceat(intervals.lost, first))
    return replace(whole, start_ns=intervals.start_ns[first], end_ns=intervals.end_ns[last], lost=lost)


def pick(intervals: ScrapeIntervals, rows: Indices) -> ScrapeIntervals:
    """Return some of the intervals."""
    return _folded([intervals], lambda column: column[0][rows])


def joined(parts: Sequence[ScrapeIntervals]) -> ScrapeIntervals:
    """Put intervals of several endpoints one behind the other; sums and buckets that some part lacks are left out."""
    return _folded(parts, np.concatenate)


def pooled(parts: Sequence[ScrapeIntervals]) -> ScrapeIntervals:
    """Add up endpoints with equally many intervals, scraped at about the same times; stamps are the means."""
    start_ns, end_ns = (
        np.mean([getattr(part, name) for part in parts], axis=0).astype(np.int64) for name in ("start_ns", "end_ns")
    )
    whole = _folded(parts, partial(np.sum, axis=0))
    return replace(whole, start_ns=start_ns, end_ns=end_ns, lost=np.any([part.lost for part in parts], axis=0))


def _folded(parts: Sequence[ScrapeIntervals], fold: Callable[[list[Any]], Any]) -> ScrapeIntervals:
    """Make one of several, column by column; sums and buckets that some part lacks are left out."""
    columns = {name: fold([getattr(part, name) for part in parts]) for name in ("start_ns", "end_ns", "lost", "count")}
    first = parts[0]
    return ScrapeIntervals(
        **columns,
        sums={
            name: fold([part.sums[name] for part in parts])
            for name in first.sums
            if all(name in part.sums for part in parts)
        },
        buckets={
            name: IntervalBuckets(bounds=buckets.bounds, counts=fold([part.buckets[name].counts for part in parts]))
            for name, buckets in first.buckets.items()
            if all(name in part.buckets and np.array_equal(part.buckets[name].bounds, buckets.bounds) for part in parts)
        },
    )


@np.errstate(over="ignore", invalid="ignore")  # sums beyond the largest number are missing
def _ends(endpoint: EndpointSeries, engine: str, sources: Sources, restarts: Restarts) -> ScrapeIntervals | Missing:
    queue, prefill = sources["queue_time"], sources["prefill_time"]
    if isinstance(queue, Missing):
        return queue
    if isinstance(prefill, Missing):
        return prefill
    if unusable := _why_unusable(queue) or _why_unusable(prefill):
        return Missing(unusable)
    times = {"queue": queue.histograms, "prefill": prefill.histograms}
    rising_of = {
        name: [rising_histogram(endpoint, columns, restarts) for columns in groups]
        for name, groups in (times | _end_tokens(endpoint, engine)).items()
    }
    faults = {name: fault for name, label_sets in rising_of.items() if (fault := _sum_fault(label_sets))}
    for name, source in (("queue", queue), ("prefill", prefill)):
        if name in faults:
            return Missing(f"the sum of {source.metric} cannot be: it {faults[name]}")
    rising_of = {name: label_sets for name, label_sets in rising_of.items() if name not in faults}
    counts = [_count(label_sets) for label_sets in rising_of.values()]
    sums = {name: _sum(label_sets) for name, label_sets in rising_of.items()}
    stated = np.all([_stated(rising_of[name]) for name in times], axis=0)
    if not (np.abs([counts[0], counts[1], sums["queue"], sums["prefill"]])[:, stated] < LARGEST).all():
        return Missing("the server's sums are too large to add up")
    rows = np.flatnonzero(stated & np.all([np.abs(count - counts[0]) < 0.5 for count in counts], axis=0))
    if len(rows) < 2:
        return Missing("fewer than two scrapes are usable")
    resets = _resets([histogram for label_sets in rising_of.values() for histogram in label_sets])
    buckets = {name: _buckets(groups, rising_of[name], rows) for name, groups in times.items()}
    return ScrapeIntervals(
        start_ns=endpoint.at_ns[rows[:-1]],
        end_ns=endpoint.at_ns[rows[1:]],
        lost=np.diff(np.cumsum(resets)[rows]) > 0,
        count=np.rint(np.diff(counts[0][rows])).astype(np.int64),
        sums={name: np.diff(values[rows]) for name, values in sums.items()},
        buckets={name: counted for name, counted in buckets.items() if counted is not None},
    )


def _why_unusable(source: CanonicalSource) -> str:
    """Return a reason if a histogram's sums are unusable, else ''.

    Usable sums are those of the requests that ended between two scrapes.
    """
    if source.quantity.observed != "finish":
        moment = source.quantity.observed.replace("_", " ")
        return (
            f"{source.metric} is observed not when a request ends, but at its {moment}: over a window it speaks of "
            "other requests than those that ended"
        )
    absent = [part for part in ("count", "sum") if any(getattr(columns, part) < 0 for columns in source.histograms)]
    return f"{source.metric} has no _{absent[0]}" if absent else ""


def _firsts(endpoint: EndpointSeries, sources: Sources, restarts: Restarts) -> ScrapeIntervals | None:
    ttft, prompt = sources["ttft"], sources["prompt_tokens"]
    groups = _histograms(ttft)
    if isinstance(ttft, Missing) or ttft.quantity.observed != "first_token":
        return None
    if len(endpoint.at_ns) < 2 or any(columns.count < 0 or columns.sum < 0 for columns in groups):
        return None
    risen = [rising_histogram(endpoint, columns, restarts) for columns in groups]
    if _sum_fault(risen):
        return None
    sums = {"ttft": np.diff(_sum(risen))}
    if isinstance(prompt, CanonicalSource) and prompt.quantity.observed == "first_token" and prompt.columns:
        tokens = [rising(endpoint, column, restarts).values for column in prompt.columns]
        sums["prompt_tokens"] = np.diff(np.sum(tokens, axis=0))
    return ScrapeIntervals(
        start_ns=endpoint.at_ns[:-1],
        end_ns=endpoint.at_ns[1:],
        lost=_resets(risen)[1:],
        count=np.rint(np.diff(_count(risen))).astype(np.int64),
        sums=sums,
        buckets={},
    )


def _histograms(source: CanonicalSource | Missing) -> tuple[HistogramColumns, ...]:
    return () if isinstance(source, Missing) else source.histograms


def _count(label_sets: Sequence[RisingHistogram]) -> Floats:
    return np.asarray(np.sum([histogram.count for histogram in label_sets], axis=0))


def _sum(label_sets: Sequence[RisingHistogram]) -> Floats:
    return np.asarray(np.sum([histogram.sum for histogram in label_sets], axis=0))


def _sum_fault(label_sets: Sequence[RisingHistogram]) -> str:
    """Return the fault of a sum that is on no page, '' for none."""
    return next((shown.sum_fault for shown in label_sets if shown.sum_fault and np.isnan(shown.sum).all()), "")


def _stated(label_sets: Sequence[RisingHistogram]) -> Bools:
    """Return the pages (bool[T]) on which every sum is finite."""
    faulty = [np.isfinite(shown.sum) for shown in label_sets if shown.sum_fault]
    return np.logical_and.reduce(faulty) if faulty else np.ones(len(label_sets[0].sum), dtype=np.bool_)


def _resets(histograms: Sequence[RisingHistogram]) -> Bools:
    return np.asarray(np.logical_or.reduce([histogram.resets for histogram in histograms]))


def _end_tokens(endpoint: EndpointSeries, engine: str) -> dict[str, list[HistogramColumns]]:
    tokens: dict[str, list[HistogramColumns]] = {}
    known = catalogue(engine)
    for name, wanted in known.end_tokens.items():
        groups = [columns for columns in histograms(endpoint.series) if known.normalised(columns.family) == wanted]
        if groups and all(columns.sum >= 0 and columns.count >= 0 for columns in groups):
            tokens[name] = groups
    return tokens


def _buckets(
    groups: Sequence[HistogramColumns], label_sets: Sequence[RisingHistogram], rows: Indices
) -> IntervalBuckets | None:
    bounds = groups[0].bounds
    if not bounds or bounds[-1] != np.inf or any(columns.bounds != bounds for columns in groups):
        return None
    cumulative = np.sum([columns.buckets for columns in label_sets], axis=0)
    counts = np.diff(np.diff(cumulative[rows], axis=0), axis=1, prepend=0.0)
    # Bounds that changed during the run leave counts below zero.
    return None if (counts < -0.5).any() else IntervalBuckets(bounds=np.array(bounds), counts=np.rint(counts))


def _never_waiting(endpoint: EndpointSeries, sources: Sources) -> bool:
    waiting = sources["requests_waiting"]
    if isinstance(waiting, Missing) or not waiting.columns:
        return False
    values = endpoint.values[:, waiting.columns]
    return bool(np.isfinite(values).any() and not np.nan_to_num(values).any())
