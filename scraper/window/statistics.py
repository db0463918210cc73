"""One canonical quantity over endpoints, as JSON: statistics, timeslices, and for each missing number the reason.

A histogram's percentiles are estimates (`quantiles`), each with the interval that holds the truth nine times in ten and
the bracket that holds it for certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rundir.columns import Floats, Ints
from rundir.stats import Missing
from scraper.quantiles import Fit, fit, read, read_rows
from scraper.window import aggregate
from scraper.window.aggregate import TOO_LARGE, Part
from scraper.window.increase import CounterIncrease, GaugeSamples, HistogramIncrease
from scraper.window.window import ScrapeSelection, slice_of

PERCENTILES = {
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.10,
    "p25": 0.25,
    "p50": 0.50,
    "p75": 0.75,
    "p90": 0.90,
    "p95": 0.95,
    "p99": 0.99,
    "p99_9": 0.999,
}
SLICE_PERCENTILES = {name: PERCENTILES[name] for name in ("p50", "p90", "p99")}
_QS = np.array(list(PERCENTILES.values()))
_SLICE_QS = np.array(list(SLICE_PERCENTILES.values()))
_BY_VALUE = "a histogram keeps no single values"
_NO_SCRAPE = "no scrape fell into the slice"

Json = dict[str, Any]
Found = CounterIncrease | HistogramIncrease | GaugeSamples


def measure(parts: Sequence[Part]) -> Found | Missing:
    """Return what the endpoints show of a quantity in the window, label sets and endpoints combined."""
    kind = parts[0].source.quantity.kind
    if kind == "histogram":
        return aggregate.histograms(parts)
    return aggregate.counters(parts) if kind == "counter" else aggregate.gauges(parts)


@np.errstate(over="ignore", invalid="ignore")
def describe(parts: Sequence[Part], found: Found | Missing) -> Json:
    """Describe what `measure` found: {metric, type, unit, stats, timeslices, ...}."""
    quantity = parts[0].source.quantity
    result: Json = {
        "metric": parts[0].source.metric,
        "type": quantity.kind,
        "unit": quantity.unit,
        "observed": quantity.observed,
    }
    selection = next((part.selection for part in parts if part.selection.early_s), parts[0].selection)
    if quantity.kind == "gauge":
        result["across"] = quantity.across
    if isinstance(found, HistogramIncrease):
        result |= _histogram(found, selection)
    elif isinstance(found, CounterIncrease):
        result |= _counter(found, parts, selection)
    elif isinstance(found, GaugeSamples):
        result |= _gauge(found, selection)
    else:
        result |= _nothing(found)
    if not aggregate.share_slices(parts):
        result["timeslices"] = []
        reason = "slices are shorter than an update interval: see each endpoint's own"
        result.setdefault("missing", {})["timeslices"] = reason
    notes = [note for part in parts for note in _notes(part)]
    return result | ({"notes": notes} if notes else {})


def _notes(part: Part) -> Iterator[str]:
    url, selection = part.endpoint.url, part.selection
    if not part.source.columns and not part.source.histograms:
        yield f"{url}: not on the page, on which it appears with its first count"
    if selection.late:
        yield f"{url}: no scrape before the window opened, counted from the first one"
    if selection.early_s:
        ended = f"{url}: scrapes ended {selection.early_s:.1f} s before the window did"
        counts = part.source.quantity.kind == "counter"
        yield f"{ended}; rates are over the {selection.rate_s:.1f} s they cover" if counts else ended


def gauge_stats(values: Floats) -> tuple[Json, dict[str, str]]:
    """Describe a gauge's samples (float64[n], n > 0), and say what cannot be.

    Mean and percentiles (numpy's default) are over scrapes, not weighted by time; `std` has ddof 1.
    """
    low, high = float(values.min()), float(values.max())
    constant = low == high  # then exactly that, without what adding up rounds off
    mean = low if constant else float(values.mean())
    if not math.isfinite(mean):
        return {}, {"stats": TOO_LARGE}
    taken = np.quantile(values, _QS)
    stats: Json = {"count": len(values), "mean": mean}
    missing = {}
    if len(values) > 1:
        stats["std"] = 0.0 if constant else float(values.std(ddof=1))
    else:
        missing["std"] = "one sample has no spread"
    stats |= {"min": low, "max": high}
    stats |= {name: float(value) for name, value in zip(PERCENTILES, taken, strict=True)}
    missing |= {name: TOO_LARGE for name, value in stats.items() if not math.isfinite(value)}
    return {name: value for name, value in stats.items() if name not in missing}, missing


def _counter(found: CounterIncrease, parts: Sequence[Part], selection: ScrapeSelection) -> Json:
    rate_per_s, rates = aggregate.counter_rates(parts, found)
    slices = []
    for entry, total, rate in zip(_frames(selection), found.slices.tolist(), rates.tolist(), strict=False):
        slices.append(entry | _or_missing({"total": total, "rate_per_s": rate}))
    stats = {"total": found.total, "rate_per_s": rate_per_s}
    result: Json = {"stats": stats, "resets": found.resets, "timeslices": slices}
    finite = all(math.isfinite(value) for value in stats.values())
    return result if finite else result | {"stats": {}, "missing": {"stats": TOO_LARGE}}


def _gauge(found: GaugeSamples, selection: ScrapeSelection) -> Json:
    stats, missing = gauge_stats(found.values)
    where = slice_of(found.at_ns, selection.edges_ns)
    slices = []
    for index, entry in enumerate(_frames(selection)):
        values = found.values[where == index]
        if len(values):
            taken = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
            slices.append(entry | _or_missing(taken))
        else:
            slices.append(entry | {"missing": _NO_SCRAPE})
    result: Json = {"stats": stats, "timeslices": slices}
    return result | ({"missing": missing} if missing else {})


def _histogram(found: HistogramIncrease, selection: ScrapeSelection) -> Json:
    if not math.isfinite(found.count):
        return _nothing(Missing(TOO_LARGE)) | {"resets": found.resets}
    # Of a page without a sum no interval is known.
    why_no_sum = TOO_LARGE if np.isfinite(found.sums).any() else "the page shows no sum"
    stats, missing = _moments(found.count, found.sum, why_no_sum)
    missing = dict.fromkeys(("std", "min", "max"), _BY_VALUE) | missing
    fits = fits_of(found)
    percentiles, unread = _percentiles(found, fits)
    slices = []
    for index, entry in enumerate(_frames(selection)[: len(found.slice_counts)]):
        count, total = float(found.slice_counts[index]), float(found.slice_sums[index])
        described = _histogram_slice(count, total, missing.get("sum", TOO_LARGE))
        slices.append(entry | described | _slice_percentiles(found, fits, index))
    return {
        "stats": stats | percentiles.pop("stats"),
        **percentiles,
        "resets": found.resets,
        "missing": missing | unread,
        "timeslices": slices,
    }


def fits_of(found: HistogramIncrease) -> tuple[Fit, ...]:
    """Fit each part of a histogram's scrape intervals, for `quantiles.read`."""
    return tuple(fit(part.bounds, part.counts, part.sums, part.total) for part in found.intervals)


def _moments(count: float, total: float, why_no_sum: str) -> tuple[Json, dict[str, str]]:
    """Return count, sum and mean, and why some are missing."""
    stats: Json = {"count": _whole(count)}
    missing = {}
    if math.isfinite(total):
        stats["sum"] = total
    else:
        missing["sum"] = why_no_sum
    if count > 0 and math.isfinite(total / count):
        stats["mean"] = total / count
    else:
        missing["mean"] = missing.get("sum", TOO_LARGE if count > 0 else "no observation")
    return stats, missing


def _histogram_slice(count: float, total: float, why_no_sum: str) -> Json:
    if not math.isfinite(count):
        return {"missing": _NO_SCRAPE if math.isnan(count) else TOO_LARGE}
    entry, missing = _moments(count, total, why_no_sum)
    return entry | ({"missing": next(iter(missing.values()))} if missing else {})


def _slice_percentiles(found: HistogramIncrease, fits: tuple[Fit, ...], index: int) -> Json:
    rows = [np.flatnonzero(part.slices == index) for part in found.intervals]
    if not any(len(one) for one in rows):
        return {}
    values = read_rows(fits, rows, _SLICE_QS).tolist()
    named = zip(SLICE_PERCENTILES, values, strict=True)
    return {name: value for name, value in named if math.isfinite(value)}


def _percentiles(found: HistogramIncrease, fits: tuple[Fit, ...]) -> tuple[Json, dict[str, str]]:
    """Return percentiles with interval and bracket, and why some are missing.

    `unresolved` names those whose interval is wider than the value: buckets and sums do not tell them.
    """
    result: Json = {"stats": {}, "intervals": {}, "brackets": {}, "unresolved": []}
    missing: dict[str, str] = {}
    taken = read(fits, _QS)
    for index, name in enumerate(PERCENTILES):
        value = float(taken.values[index])
        if not math.isfinite(value):
            missing[name] = _why_no_percentile(found, value)
            continue
        result["stats"][name] = value
        low, high = float(taken.low[index]), float(taken.high[index])
        result["intervals"][name] = _edges(low, high)
        result["brackets"][name] = _edges(float(taken.lowest[index]), float(taken.highest[index]))
        if taken.wide[index]:
            result["unresolved"].append(name)
    return result, missing


def _why_no_percentile(found: HistogramIncrease, value: float) -> str:
    if math.isinf(value):
        return TOO_LARGE
    if not found.count > 0:
        return "no observation"
    if isinstance(found.buckets, Missing):
        return found.buckets.reason
    if not found.buckets.totals[:-1].any() and not any(np.isfinite(part.sums).any() for part in found.intervals):
        return "nothing that was observed is below a finite bound, and no sum is known"
    return "the buckets contradict each other"


def _edges(low: float, high: float) -> Json:
    return {key: edge for key, edge in (("low", low), ("high", high)) if math.isfinite(edge)}


def _frames(selection: ScrapeSelection) -> list[Json]:
    return frames(selection.edges_ns, selection.complete.tolist())


def frames(edges_ns: Ints, complete: Sequence[bool]) -> list[Json]:
    """Return the frame of each timeslice: start_ns, end_ns, and `is_complete` only where it is false."""
    edges = edges_ns.tolist()
    return [
        {"start_ns": start, "end_ns": end} | ({} if whole else {"is_complete": False})
        for start, end, whole in zip(edges[:-1], edges[1:], complete, strict=True)
    ]


def _or_missing(numbers: dict[str, float]) -> Json:
    if any(math.isnan(value) for value in numbers.values()):
        return {"missing": _NO_SCRAPE}
    if any(math.isinf(value) for value in numbers.values()):
        return {"missing": TOO_LARGE}
    return dict(numbers)


def _nothing(reason: Missing) -> Json:
    return {"stats": {}, "missing": {"stats": reason.reason}, "timeslices": []}


def _whole(value: float) -> int | float:
    """Return a count as an integer where it is one: some exporters scale their counts."""
    return int(value) if value.is_integer() else value
