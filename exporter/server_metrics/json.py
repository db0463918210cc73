"""Server metrics as JSON in AIPerf's format (schema version 1.0): statistics of every series over the window.

Windows, resets and percentiles are this project's own (`scraper.window.increase`). Families that only say when
something was created are left out, and so are summaries, info and state sets: the format has none; JSONL and Parquet
hold them.
Beyond the format stand `generator`, and `exposed_name` where a metric is called something else on the page.
Fields are present by the format's table: of a counter all rates, of a gauge all percentiles, of a histogram without
observations `count` and `buckets` alone; `labels`, `unit` and a statistic that cannot be known are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from json import dumps
from typing import IO, Any

import numpy as np

from sidelight.exporter.server_metrics.source import SCHEMA_VERSION, Metric, MetricsSource, key, named
from sidelight.rundir.printable.text import printable_json
from sidelight.rundir.stats import Missing, statistics_of
from sidelight.scraper.exposition import HistogramColumns, histograms
from sidelight.scraper.quantiles import read_rows
from sidelight.scraper.series.table import EndpointSeries, Float64
from sidelight.scraper.window.increase import BucketCounts, GaugeSamples, HistogramIncrease, counter, gauge, histogram
from sidelight.scraper.window.statistics import finite_only, fits_of, frames, whole
from sidelight.scraper.window.window import ScrapeSelection, scrape_intervals, select_scrapes, slice_of

TYPES = ("gauge", "counter", "histogram", "unknown")
PERCENTILES = {f"p{percent}": percent / 100 for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
_QS = np.array(list(PERCENTILES.values()))

Json = dict[str, Any]
_Entry = tuple[tuple[str, str], Json]  # the metric's key in `named`, and one series of it


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is left out
def document(source: MetricsSource) -> Json:
    """Return the whole export, JSON-ready and strict (no NaN, no infinity).

    A series of which the window shows nothing is left out, and so is a number too large for one: the format knows no
    reasons, and a zero would be a claim.
    """
    entries: list[_Entry] = []
    for endpoint in source.endpoints:
        selection = select_scrapes(endpoint, source.window, source.slice_ns)
        if isinstance(selection, ScrapeSelection):
            entries += _entries(endpoint, selection)
    return {
        "schema_version": SCHEMA_VERSION,
        "aiperf_version": None,
        "generator": {"name": "sidelight", "version": source.tool_version},
        "benchmark_id": source.benchmark_id,
        "summary": _summary(source),
        "metrics": _metrics(entries, named(source.endpoints)),
        "input_config": dict(source.input_config),
    }


def write(statistics: Json, file: IO[bytes]) -> None:
    """Write the export as strict JSON."""
    text = dumps(statistics, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    file.write(printable_json(text).encode())


def _summary(source: MetricsSource) -> Json:
    answered = [endpoint for endpoint in source.endpoints if len(endpoint.response_ns)]
    return {
        "endpoints_configured": source.urls,
        "endpoints_successful": [endpoint.url for endpoint in answered],
        "start_time": _iso(source.window.start_ns),
        "end_time": _iso(source.window.end_ns),
        "endpoint_info": {endpoint.url: _endpoint_info(endpoint) for endpoint in answered},
    }


def _endpoint_info(endpoint: EndpointSeries) -> Json:
    updates = endpoint.response_ns[endpoint.changed]
    intervals_ms = np.diff(updates) / 1e6
    latencies_ms = (endpoint.response_ns - endpoint.request_ns) / 1e6
    return {
        "total_fetches": len(endpoint.response_ns) + len(endpoint.failures),
        "first_fetch_ns": int(endpoint.response_ns[0]),
        "last_fetch_ns": int(endpoint.response_ns[-1]),
        "avg_fetch_latency_ms": float(latencies_ms.mean()),
        "unique_updates": len(updates),
        "first_update_ns": int(updates[0]),
        "last_update_ns": int(updates[-1]),
        "duration_seconds": int(updates[-1] - updates[0]) / 1e9,
        "avg_update_interval_ms": float(intervals_ms.mean()) if len(intervals_ms) else None,
        "median_update_interval_ms": float(np.median(intervals_ms)) if len(intervals_ms) > 1 else None,
    }


def _iso(at_ns: int) -> str:
    """Write a stamp as the format does: UTC, microseconds, no zone."""
    seconds, rest = divmod(at_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, tz=UTC).replace(microsecond=rest // 1000, tzinfo=None)
    return moment.isoformat(timespec="microseconds")


def _metrics(entries: Sequence[_Entry], metrics: Mapping[tuple[str, str], Metric]) -> Json:
    """Group series by metric name over all endpoints, sorted by name."""
    grouped: Json = {}
    for known_by, entry in entries:
        metric = metrics[known_by]
        if metric.name not in grouped:
            grouped[metric.name] = _about(metric) | {"series": []}
        grouped[metric.name]["series"].append(entry)
    return dict(sorted(grouped.items()))


def _about(metric: Metric) -> Json:
    return {
        "type": metric.type,
        "description": metric.description,
        **({"unit": metric.unit} if metric.unit else {}),
        **({"exposed_name": metric.exposed} if metric.exposed != metric.name else {}),
    }


def _entries(endpoint: EndpointSeries, selection: ScrapeSelection) -> Iterator[_Entry]:
    steps = selection if selection.complete.sum() > 1 else _by_interval(endpoint, selection)
    for column, series in enumerate(endpoint.series):
        body: Json | Missing = Missing("no such type in the format")
        if series.name.endswith("_created"):
            continue
        if series.type == "counter":
            body = _counter(endpoint, column, selection, steps)
        elif series.type in ("gauge", "unknown"):
            body = _gauge(gauge(endpoint, column, selection), selection)
        if not isinstance(body, Missing):
            yield key(series), _common(endpoint, series.labels) | body
    for columns in histograms(endpoint.series):
        increase = histogram(endpoint, columns, selection)
        if isinstance(increase, HistogramIncrease) and math.isfinite(increase.count):
            entry = _common(endpoint, columns.labels) | _histogram(increase, columns, selection)
            yield (columns.family, "histogram"), entry


def _common(endpoint: EndpointSeries, labels: tuple[tuple[str, str], ...]) -> Json:
    return {"endpoint_url": endpoint.url} | ({"labels": dict(labels)} if labels else {})


def _by_interval(endpoint: EndpointSeries, selection: ScrapeSelection) -> ScrapeSelection:
    """Return the cut with a slice for each scrape interval that touches the window."""
    stamps = endpoint.response_ns
    rows = scrape_intervals(stamps, selection.window, selection.reference)
    slice_s = np.diff(stamps[rows]) / 1e9
    return replace(selection, rows=rows, edges_ns=stamps[rows], slice_s=slice_s, complete=slice_s > 0)


def _counter(
    endpoint: EndpointSeries, column: int, selection: ScrapeSelection, steps: ScrapeSelection
) -> Json | Missing:
    increase = counter(endpoint, column, selection)
    if isinstance(increase, Missing):
        return increase
    if not math.isfinite(increase.total):
        return Missing("the values are too large to add up")
    rates = increase.slices / selection.slice_s
    stepped = increase if steps is selection else counter(endpoint, column, steps)
    stats: Json = {"total": increase.total, "rate": increase.total / selection.rate_s}
    if not isinstance(stepped, Missing):
        stats |= _rates(stepped.slices, steps)
    slices = [
        frame | {"total": float(total), "rate": float(rate)}
        for frame, total, rate in zip(frames(selection), increase.slices, rates, strict=True)
        if math.isfinite(total) and math.isfinite(rate)
    ]
    return {"stats": finite_only(stats), "timeslices": slices}


def _rates(increases: Float64, steps: ScrapeSelection) -> Json:
    """Return statistics of the rates of complete slices. Scrape intervals are used where fewer than two slices are
    complete.
    """
    usable = steps.complete & np.isfinite(increases)
    seconds = steps.slice_s[usable]
    rates = increases[usable] / seconds
    if not len(rates):
        return {}
    mean = float(np.average(rates, weights=seconds))
    stats = {"rate_avg": mean, "rate_min": float(rates.min()), "rate_max": float(rates.max())}
    return stats | ({"rate_std": float(rates.std(ddof=1))} if len(rates) > 1 else {})


def _gauge(samples: GaugeSamples | Missing, selection: ScrapeSelection) -> Json | Missing:
    if isinstance(samples, Missing):
        return samples
    values = samples.values
    numbers = statistics_of(values, PERCENTILES)
    stats = {"avg": numbers["mean"], **{name: numbers[name] for name in ("min", "max", "std", *PERCENTILES)}}
    if len(values) == 1:
        stats["std"] = 0.0  # the format's way to say that it never varied
    where = slice_of(samples.at_ns, selection.edges_ns)
    slices = []
    for index, frame in enumerate(frames(selection)):
        part = values[where == index]
        if len(part):
            read = {"avg": float(part.mean()), "min": float(part.min()), "max": float(part.max())}
            slices.append(frame | finite_only(read))
    return {"stats": finite_only(stats), "timeslices": slices}


def _histogram(increase: HistogramIncrease, columns: HistogramColumns, selection: ScrapeSelection) -> Json:
    if not increase.count > 0:
        return {"stats": {"count": 0}, "buckets": dict.fromkeys(columns.le, 0)}
    duration_s = selection.rate_s
    stats: Json = {"count": whole(increase.count)}
    if math.isfinite(increase.sum):
        stats |= {"sum": increase.sum, "avg": increase.sum / increase.count}
    stats["count_rate"] = increase.count / duration_s
    if math.isfinite(increase.sum):
        stats["sum_rate"] = increase.sum / duration_s
    stats |= _percentile_estimates(increase)
    result: Json = {"stats": finite_only(stats), "buckets": None}
    if isinstance(increase.buckets, BucketCounts):
        result["buckets"] = _cumulative(increase.buckets.le, increase.buckets.totals)
    slices = []
    for index, frame in enumerate(frames(selection)):
        if math.isfinite(increase.slice_counts[index]):
            slices.append(frame | _histogram_slice(increase, index))
    return result | {"timeslices": slices}


def _percentile_estimates(increase: HistogramIncrease) -> Json:
    """Return `p*_estimate` of a histogram, also where its bounds changed during the run; none without buckets."""
    fits = fits_of(increase)
    values = read_rows(fits, [slice(None)] * len(fits), _QS).tolist()
    pairs = zip(PERCENTILES, values, strict=True)
    return {f"{name}_estimate": value for name, value in pairs if math.isfinite(value)}


def _histogram_slice(increase: HistogramIncrease, index: int) -> Json:
    count, total = float(increase.slice_counts[index]), float(increase.slice_sums[index])
    entry: Json = {"count": whole(count)}
    if math.isfinite(total):
        entry["sum"] = total
        if count > 0:
            entry["avg"] = total / count
    buckets = increase.buckets
    shown = _cumulative(buckets.le, buckets.slices[index]) if isinstance(buckets, BucketCounts) else None
    return finite_only(entry) | {"buckets": shown}


def _cumulative(le: tuple[str, ...], totals: Float64) -> Json | None:
    cumulative = np.cumsum(totals)
    if not np.isfinite(cumulative).all():
        return None
    return {edge: whole(value) for edge, value in zip(le, cumulative.tolist(), strict=True)}
