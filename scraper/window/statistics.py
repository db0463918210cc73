"""One canonical quantity over endpoints: statistics, timeslices, and for each missing number the reason.

A histogram's percentiles are estimates (`quantiles`), each with the interval that holds the truth nine times in ten and
the bracket that holds it for certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import UNSET
from sidelight.rundir.stats import Missing, statistics_of
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.quantiles import fit, read, read_rows
from sidelight.scraper.quantiles.fit import Fit
from sidelight.scraper.series.sums import OVERFLOWS
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window import aggregate
from sidelight.scraper.window.aggregate import TOO_LARGE, EndpointShare
from sidelight.scraper.window.increase import CounterIncrease, GaugeSamples, HistogramIncrease
from sidelight.scraper.window.quantities import (
    PERCENTILES,
    SLICE_PERCENTILES,
    Counter,
    CounterSlice,
    CounterStatistics,
    Gauge,
    GaugeSlice,
    Histogram,
    HistogramSlice,
    Range,
    SampleStatistics,
)
from sidelight.scraper.window.window import ScrapeSelection, slice_of

_QS = np.array(list(PERCENTILES.values()))
_SLICE_QS = np.array(list(SLICE_PERCENTILES.values()))
_BY_VALUE = "a histogram keeps no single values"
_NO_SCRAPE = "no scrape fell into the slice"

Measurement = CounterIncrease | HistogramIncrease | GaugeSamples
Described = tuple[EndpointShare, Any]  # one endpoint's part of a quantity, and the description of that part alone


def measure(parts: Sequence[EndpointShare]) -> Measurement | Missing:
    """Return the measurement of a quantity in the window, label sets and endpoints combined."""
    kind = parts[0].source.quantity.kind
    if kind == "histogram":
        return aggregate.histograms(parts)
    return aggregate.counters(parts) if kind == "counter" else aggregate.gauges(parts)


@np.errstate(over="ignore", invalid="ignore")
def describe(parts: Sequence[EndpointShare], measured: Measurement | Missing) -> Histogram | Gauge | Counter:
    """Return the description of a measurement: its source, statistics and timeslices."""
    source = parts[0].source
    quantity = source.quantity
    about = {"metric": source.metric, "type": quantity.kind, "unit": quantity.unit, "observed": quantity.observed}
    if quantity.kind == "gauge":
        about["across"] = quantity.across
    selection = next((part.selection for part in parts if part.selection.early_s), parts[0].selection)
    described: Histogram | Gauge | Counter
    if isinstance(measured, HistogramIncrease):
        described = _histogram(about, measured, selection)
    elif isinstance(measured, CounterIncrease):
        described = _counter(about, measured, parts, selection)
    elif isinstance(measured, GaugeSamples):
        described = _gauge(about, measured, selection)
    else:
        described = _unknown(about, measured)
    if not aggregate.share_slices(parts):
        reason = "slices are shorter than an update interval: see each endpoint's own"
        missing = {**(described.missing or {}), "timeslices": reason}
        described = structs.replace(described, timeslices=[], missing=missing)
    notes = [note for part in parts for note in _notes(part)]
    return structs.replace(described, notes=notes) if notes else described


def described_parts(
    endpoint: EndpointSeries, selection: ScrapeSelection | Missing, sources: Mapping[str, CanonicalSource | Missing]
) -> tuple[dict[str, Described], dict[str, str]]:
    """Describe the quantities of one endpoint alone, and say why others are absent."""
    described: dict[str, Described] = {}
    absent: dict[str, str] = {}
    for name, source in sources.items():
        if isinstance(source, Missing):
            absent[name] = source.reason
        elif isinstance(selection, Missing):
            absent[name] = selection.reason
        else:
            part = EndpointShare(endpoint=endpoint, selection=selection, source=source)
            measured = measure([part])
            if isinstance(measured, Missing):
                absent[name] = measured.reason
            else:
                described[name] = part, describe([part], measured)
    return described, absent


def _unknown(about: dict[str, Any], reason: Missing) -> Histogram | Gauge | Counter:
    missing = {"stats": reason.reason}
    if about["type"] == "counter":
        return Counter(**about, stats=CounterStatistics(), timeslices=[], missing=missing)
    kind = Gauge if about["type"] == "gauge" else Histogram
    return kind(**about, stats=SampleStatistics(), timeslices=[], missing=missing)


def _notes(part: EndpointShare) -> Iterator[str]:
    url, selection = part.endpoint.url, part.selection
    if not part.source.columns and not part.source.histograms:
        yield f"{url}: not on the page, on which it appears with its first count"
    if selection.late:
        yield f"{url}: no scrape before the window opened, counted from the first one"
    if selection.early_s:
        ended = f"{url}: scrapes ended {selection.early_s:.1f} s before the window did"
        counts = part.source.quantity.kind == "counter"
        yield f"{ended}; rates are over the {selection.rate_s:.1f} s they cover" if counts else ended


def gauge_stats(values: Floats) -> tuple[SampleStatistics, dict[str, str]]:
    """Return statistics of a gauge's samples (float64[n], n > 0), and reasons for missing ones.

    Mean and percentiles (numpy's default) are over scrapes, not weighted by time; `std` has ddof 1.
    """
    numbers = statistics_of(values, PERCENTILES)
    if not math.isfinite(numbers["mean"]):
        return SampleStatistics(), {"stats": TOO_LARGE}
    missing = {name: TOO_LARGE for name, value in numbers.items() if not math.isfinite(value)}
    if len(values) == 1:
        missing["std"] = "one sample has no spread"
    return SampleStatistics(count=len(values), **finite_only(numbers)), missing


def _counter(
    about: dict[str, Any], increase: CounterIncrease, parts: Sequence[EndpointShare], selection: ScrapeSelection
) -> Counter:
    rate_per_s, rates = aggregate.counter_rates(parts, increase)
    slices = []
    absent = _why_unknown(increase, selection)
    for frame, why, total, rate in zip(
        frames(selection), absent, increase.slices.tolist(), rates.tolist(), strict=False
    ):
        reason = _why_absent(total, rate, unknown=why)
        numbers = {"missing": reason} if reason else {"total": total, "rate_per_s": rate}
        slices.append(CounterSlice(**frame, **numbers))
    known = math.isfinite(increase.total) and math.isfinite(rate_per_s)
    return Counter(
        **about,
        stats=CounterStatistics(total=increase.total, rate_per_s=rate_per_s) if known else CounterStatistics(),
        resets=increase.resets,
        timeslices=slices,
        missing=UNSET if known else {"stats": increase.fault or TOO_LARGE},
    )


def _gauge(about: dict[str, Any], samples: GaugeSamples, selection: ScrapeSelection) -> Gauge:
    stats, missing = gauge_stats(samples.values)
    where = slice_of(samples.at_ns, selection.edges_ns)
    slices = []
    for index, frame in enumerate(frames(selection)):
        values = samples.values[where == index]
        mean, low, high = (float(f(values)) if len(values) else math.nan for f in (np.mean, np.min, np.max))
        reason = _why_absent(mean, low, high)
        numbers = {"missing": reason} if reason else {"mean": mean, "min": low, "max": high}
        slices.append(GaugeSlice(**frame, **numbers))
    return Gauge(**about, stats=stats, timeslices=slices, missing=missing or UNSET)


def _histogram(about: dict[str, Any], increase: HistogramIncrease, selection: ScrapeSelection) -> Histogram:
    if not (math.isfinite(increase.count) or increase.fault):
        stats, reasons = SampleStatistics(), {"stats": TOO_LARGE}
        return Histogram(**about, stats=stats, resets=increase.resets, missing=reasons, timeslices=[])
    # Of a page without a sum no interval is known.
    absent = f"its sum {increase.sum_fault}" if increase.sum_fault else "the page shows no sum"
    added = np.isfinite(increase.sums).any() and not increase.sum_fault
    why_no_sum = TOO_LARGE if added or increase.sum_fault == OVERFLOWS else absent
    moments, missing = _moments(increase.count, increase.sum, why_no_sum)
    missing = dict.fromkeys(("std", "min", "max"), _BY_VALUE) | missing
    fits = fits_of(increase)
    slices = []
    unknown = _why_unknown(increase, selection)
    for index, frame in enumerate(frames(selection)[: len(increase.slice_counts)]):
        count, total = float(increase.slice_counts[index]), float(increase.slice_sums[index])
        if reason := _why_absent(count, unknown=unknown[index]):
            slices.append(HistogramSlice(**frame, missing=reason))
        else:
            described = _histogram_slice(count, total, missing.get("sum", TOO_LARGE))
            slices.append(HistogramSlice(**frame, **described | _slice_percentiles(increase, fits, index)))
    if increase.fault:
        reasons = {"stats": increase.fault}
        return Histogram(**about, stats=SampleStatistics(), resets=increase.resets, missing=reasons, timeslices=slices)
    estimates = read(fits, _QS)
    place = {name: at for at, name in enumerate(PERCENTILES) if math.isfinite(estimates.values[at])}
    missing |= {
        name: _why_no_percentile(increase, float(estimates.values[at]))
        for at, name in enumerate(PERCENTILES)
        if name not in place
    }
    return Histogram(
        **about,
        stats=SampleStatistics(**moments, **{name: float(estimates.values[at]) for name, at in place.items()}),
        intervals={name: _range(estimates.low[at], estimates.high[at]) for name, at in place.items()},
        brackets={name: _range(estimates.lowest[at], estimates.highest[at]) for name, at in place.items()},
        unresolved=[name for name, at in place.items() if estimates.wide[at]],
        resets=increase.resets,
        missing=missing,
        timeslices=slices,
    )


def fits_of(increase: HistogramIncrease) -> tuple[Fit, ...]:
    """Fit each part of a histogram's scrape intervals, for `quantiles.read`."""
    return tuple(fit(part.bounds, part.counts, part.sums, part.total) for part in increase.intervals)


def _moments(count: float, total: float, why_no_sum: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return count, sum and mean, and why some are missing."""
    moments: dict[str, float] = {"count": whole(count)}
    missing = {}
    if math.isfinite(total):
        moments["sum"] = total
    else:
        missing["sum"] = why_no_sum
    if count > 0 and math.isfinite(total / count):
        moments["mean"] = total / count
    else:
        missing["mean"] = missing.get("sum", TOO_LARGE if count > 0 else "no observation")
    return moments, missing


def _histogram_slice(count: float, total: float, why_no_sum: str) -> dict[str, Any]:
    moments, missing = _moments(count, total, why_no_sum)
    return moments | ({"missing": next(iter(missing.values()))} if missing else {})


def _slice_percentiles(increase: HistogramIncrease, fits: tuple[Fit, ...], index: int) -> dict[str, float]:
    rows = [np.flatnonzero(part.slices == index) for part in increase.intervals]
    if not any(len(part) for part in rows):
        return {}
    return finite_only(dict(zip(SLICE_PERCENTILES, read_rows(fits, rows, _SLICE_QS).tolist(), strict=True)))


def _why_no_percentile(increase: HistogramIncrease, value: float) -> str:
    if math.isinf(value):
        return TOO_LARGE
    if not increase.count > 0:
        return "no observation"
    if isinstance(increase.buckets, Missing):
        return increase.buckets.reason
    if not increase.buckets.totals[:-1].any() and not any(np.isfinite(part.sums).any() for part in increase.intervals):
        return "nothing that was observed is below a finite bound, and no sum is known"
    return "the buckets contradict each other"


def _range(low: float, high: float) -> Range:
    return Range(**finite_only({"low": float(low), "high": float(high)}))


def finite_only(numbers: dict[str, float]) -> dict[str, float]:
    """Return the finite numbers. Left out are a sum beyond the largest number, and what was computed from one."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def frames(selection: ScrapeSelection) -> list[dict[str, Any]]:
    """Return the frame of each timeslice: start_ns, end_ns, and `is_complete` only where it is false."""
    edges = selection.edges_ns.tolist()
    return [
        {"start_ns": start, "end_ns": end} | ({} if complete else {"is_complete": False})
        for start, end, complete in zip(edges[:-1], edges[1:], selection.complete.tolist(), strict=True)
    ]


def _why_unknown(increase: CounterIncrease | HistogramIncrease, selection: ScrapeSelection) -> list[str]:
    """Return a reason for each slice, should its increase not be known."""
    return [increase.fault or _NO_SCRAPE if scraped else _NO_SCRAPE for scraped in np.diff(selection.rows)]


def _why_absent(*numbers: float, unknown: str = _NO_SCRAPE) -> str:
    """Return the reason for a slice without numbers, or ''."""
    if any(map(math.isnan, numbers)):
        return unknown
    return "" if all(map(math.isfinite, numbers)) else TOO_LARGE


def whole(value: float) -> int | float:
    """Return a count as an integer where it is one: some exporters scale their counts."""
    return int(value) if value.is_integer() else value
