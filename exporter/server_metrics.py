"""Server metrics in AIPerf's JSON format (schema version 1.0): every series of every endpoint over the measured window.

Counter names lose their `_total`, as that format has them; windows, resets and percentiles are this project's own
(`scraper.normalise`). Families that only say when something was created are left out, and so are summaries, info and
state sets: the format has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from exporter.units import infer_unit
from scraper.exposition import Series
from scraper.missing import Missing
from scraper.normalise import (
    Buckets,
    Cut,
    GaugeSamples,
    HistogramIncrease,
    Window,
    counter,
    cut,
    gauge,
    histogram,
    slice_of,
)
from scraper.quantiles import estimate
from scraper.series import EndpointSeries, Float64, HistogramColumns, histograms
from scraper.server_summary import PERCENTILES, frames

SCHEMA_VERSION = "1.0"
_PERCENTILES = {name: q for name, q in PERCENTILES.items() if name != "p99_9"}
_QS = np.array(list(_PERCENTILES.values()))

Json = dict[str, Any]
_Entry = tuple[Series, Json]


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is left out
def server_metrics_export(
    endpoints: Sequence[EndpointSeries],
    *,
    window: Window,
    slice_ns: int,
    benchmark_id: str | None,
    input_config: Mapping[str, Any],
    tool_version: str,
) -> Json:
    """Return the whole export, JSON-ready and strict (no NaN, no infinity).

    A series of which the window shows nothing is left out, and so is a number too large for one: the format knows no
    reasons, and a zero would be a claim.
    """
    entries: list[_Entry] = []
    for endpoint in endpoints:
        chosen = cut(endpoint, window, slice_ns)
        if isinstance(chosen, Cut):
            entries += _entries(endpoint, chosen)
    return {
        "schema_version": SCHEMA_VERSION,
        "aiperf_version": None,
        "generator": {"name": "sidelight", "version": tool_version},
        "benchmark_id": benchmark_id,
        "summary": _summary(endpoints, window),
        "metrics": _metrics(entries),
        "input_config": dict(input_config),
    }


def _summary(endpoints: Sequence[EndpointSeries], window: Window) -> Json:
    answered = [endpoint for endpoint in endpoints if len(endpoint.response_ns)]
    return {
        "endpoints_configured": [endpoint.url for endpoint in endpoints],
        "endpoints_successful": [endpoint.url for endpoint in answered],
        "start_time": _iso(window.start_ns),
        "end_time": _iso(window.end_ns),
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


def _metrics(entries: Sequence[_Entry]) -> Json:
    """Group series by metric name over all endpoints, sorted by name."""
    plain = {one.family for one, _ in entries if one.type != "counter"}
    metrics: Json = {}
    for one, entry in entries:
        key = _key(one, plain)
        if key in metrics and metrics[key]["type"] != one.type:
            key = f"{key}:{one.type}"  # two endpoints disagree about the type: both are kept
        if key not in metrics:
            unit = infer_unit(one.family, one.help)
            metrics[key] = {"type": one.type, "description": one.help} | ({"unit": unit} if unit else {})
            metrics[key]["series"] = []
        metrics[key]["series"].append(entry)
    return dict(sorted(metrics.items()))


def _key(one: Series, plain: set[str]) -> str:
    """Name a metric as the format does; a counter whose short name a gauge already has keeps its long one."""
    if one.type != "counter":
        return one.family
    short = one.family.removesuffix("_total")
    return one.family if short in plain else short


def _entries(endpoint: EndpointSeries, chosen: Cut) -> list[_Entry]:
    found: list[_Entry] = []
    for column, one in enumerate(endpoint.series):
        body: Json | Missing = Missing("no such type in the format")
        if one.type == "counter":
            body = _counter(endpoint.values[:, column], chosen)
        elif one.type in ("gauge", "unknown") and not one.name.endswith("_created"):
            body = _gauge(gauge(endpoint, column, chosen), chosen)
        if not isinstance(body, Missing):
            found.append((one, _common(endpoint, one.labels) | body))
    for columns in histograms(endpoint.series):
        increase = histogram(endpoint.values, columns, chosen)
        if isinstance(increase, HistogramIncrease) and math.isfinite(increase.count):
            entry = _common(endpoint, columns.labels) | _histogram(increase, columns, chosen)
            found.append((_family(columns), entry))
    return found


def _family(columns: HistogramColumns) -> Series:
    return Series(
        name=columns.family, labels=columns.labels, family=columns.family, type="histogram", help=columns.help
    )


def _common(endpoint: EndpointSeries, labels: tuple[tuple[str, str], ...]) -> Json:
    return {"endpoint_url": endpoint.url} | ({"labels": dict(labels)} if labels else {})


def _counter(values: Float64, chosen: Cut) -> Json | Missing:
    found = counter(values, chosen)
    if isinstance(found, Missing):
        return found
    if not math.isfinite(found.total):
        return Missing("the values are too large to add up")
    rates = found.slices / chosen.slice_s
    stats: Json = {"total": found.total, "rate": found.total / chosen.rate_s}
    whole = rates[chosen.complete & np.isfinite(rates)]
    if len(whole):
        stats |= {"rate_avg": float(whole.mean()), "rate_min": float(whole.min()), "rate_max": float(whole.max())}
    if len(whole) > 1:
        stats["rate_std"] = float(whole.std(ddof=1))
    slices = [
        frame | {"total": float(total), "rate": float(rate)}
        for frame, total, rate in zip(_frames(chosen), found.slices, rates, strict=True)
        if math.isfinite(total) and math.isfinite(rate)
    ]
    return {"stats": _finite(stats), "timeslices": slices}


def _gauge(found: GaugeSamples | Missing, chosen: Cut) -> Json | Missing:
    if isinstance(found, Missing):
        return found
    values = found.values
    stats = {
        "avg": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,  # the format's word for "never varied"
    }
    stats |= dict(zip(_PERCENTILES, np.quantile(values, _QS).tolist(), strict=True))
    where = slice_of(found.at_ns, chosen.edges_ns)
    slices = []
    for index, frame in enumerate(_frames(chosen)):
        part = values[where == index]
        if len(part):
            read = {"avg": float(part.mean()), "min": float(part.min()), "max": float(part.max())}
            slices.append(frame | _finite(read))
    return {"stats": _finite(stats), "timeslices": slices}


def _histogram(found: HistogramIncrease, columns: HistogramColumns, chosen: Cut) -> Json:
    if not found.count > 0:
        return {"stats": {"count": 0}, "buckets": dict.fromkeys(columns.le, 0)}
    duration_s = chosen.rate_s
    stats: Json = {"count": _count(found.count)}
    if math.isfinite(found.sum):
        stats |= {"sum": found.sum, "avg": found.sum / found.count}
    stats["count_rate"] = found.count / duration_s
    if math.isfinite(found.sum):
        stats["sum_rate"] = found.sum / duration_s
    if isinstance(found.buckets, Buckets):
        estimates = estimate(found.buckets.bounds, found.buckets.intervals, found.sums, _QS).tolist()
        named = zip(_PERCENTILES, estimates, strict=True)
        stats |= {f"{name}_estimate": value for name, value in named if math.isfinite(value)}
    result: Json = {"stats": _finite(stats), "buckets": None}
    if isinstance(found.buckets, Buckets):
        result["buckets"] = _cumulative(found.buckets.le, found.buckets.totals)
    slices = []
    for index, frame in enumerate(_frames(chosen)):
        if math.isfinite(found.slice_counts[index]):
            slices.append(frame | _histogram_slice(found, index))
    return result | {"timeslices": slices}


def _histogram_slice(found: HistogramIncrease, index: int) -> Json:
    count, total = float(found.slice_counts[index]), float(found.slice_sums[index])
    entry: Json = {"count": _count(count)}
    if math.isfinite(total):
        entry["sum"] = total
        if count > 0:
            entry["avg"] = total / count
    entry = _finite(entry)
    buckets = found.buckets
    entry["buckets"] = _cumulative(buckets.le, buckets.slices[index]) if isinstance(buckets, Buckets) else None
    return entry


def _cumulative(le: tuple[str, ...], totals: Float64) -> Json | None:
    cumulative = np.cumsum(totals)
    if not np.isfinite(cumulative).all():
        return None
    return {edge: _count(value) for edge, value in zip(le, cumulative.tolist(), strict=True)}


def _finite(stats: Json) -> Json:
    """Leave out what no number can hold: a sum beyond the largest, or what was made of one."""
    return {name: value for name, value in stats.items() if math.isfinite(value)}


def _count(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def _frames(chosen: Cut) -> list[Json]:
    return frames(chosen.edges_ns, chosen.complete.tolist())
