"""The `server` part of summary.json: what the endpoints said of each canonical quantity in the measured window.

Whatever cannot be computed is left out, and a `missing` beside it says why. The result holds JSON's own types only, no
NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scraper import aggregate
from scraper.aggregate import TOO_LARGE, Part
from scraper.engines import QUANTITIES, Engine, canonical, detect
from scraper.missing import Missing
from scraper.normalise import (
    Buckets,
    CounterIncrease,
    Cut,
    GaugeSamples,
    HistogramIncrease,
    Window,
    cut,
    slice_of,
)
from scraper.quantiles import bracket, estimate
from scraper.series import EndpointSeries, Float64, Int64

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
_QS = np.array(list(PERCENTILES.values()))
_BY_VALUE = "a histogram keeps no single values"

Json = dict[str, Any]


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is left out, with a reason
def server_summary(
    endpoints: Sequence[EndpointSeries], window: Window, slice_ns: int, *, engine_version: str | None = None
) -> Json:
    """Summarise the endpoints over a window, aggregated and one by one: JSON-ready, per `interfaces.md` "server".

    The first endpoint that shows an engine says which one it is; endpoints that show another, or none, are listed but
    not added. `engine_version` is what the caller learnt elsewhere (`/version`): vLLM's page does not say.
    """
    engines = [detect(one.series) for one in endpoints]
    engine = next((one for one in engines if one is not None), None)
    parts: dict[str, list[Part]] = {name: [] for name in QUANTITIES}
    missing: dict[str, str] = {}
    listed: list[Json] = []
    for one, found in zip(endpoints, engines, strict=True):
        chosen = cut(one, window, slice_ns)
        entry = _endpoint(one, chosen, found)
        if found is not None:
            own, absent = _parts(one, chosen, found)
            entry |= {name: describe([part]) for name, part in own.items()}
            entry["missing"] = absent
            if engine is not None and found.name == engine.name:
                for name, part in own.items():
                    parts[name].append(part)
                missing |= {name: reason for name, reason in absent.items() if name not in missing}
        listed.append(entry)
    summary: Json = {"engine": _engine(engine, engine_version)}
    if engine is None:
        reason = _why_no_engine(endpoints)
        summary["reason"] = reason
        missing = dict.fromkeys(QUANTITIES, reason)
    summary |= {name: describe(given) for name, given in parts.items() if given}
    summary["missing"] = {name: missing[name] for name in QUANTITIES if name in missing and not parts[name]}
    summary["endpoints"] = listed
    return summary


@np.errstate(over="ignore", invalid="ignore")
def describe(parts: Sequence[Part]) -> Json:
    """Describe one canonical quantity over endpoints of one engine: {metric, type, unit, stats, timeslices, ...}."""
    quantity = parts[0].source.quantity
    result: Json = {
        "metric": parts[0].source.metric,
        "type": quantity.kind,
        "unit": quantity.unit,
        "observed": quantity.observed,
    }
    chosen = next((part.chosen for part in parts if part.chosen.early_s), parts[0].chosen)
    if quantity.kind == "histogram":
        result |= _histogram(aggregate.histograms(parts), chosen)
    elif quantity.kind == "counter":
        result |= _counter(aggregate.counters(parts), parts, chosen)
    else:
        result["across"] = quantity.across
        result |= _gauge(aggregate.gauges(parts), chosen)
    if not aggregate.share_slices(parts):
        result["timeslices"] = []
        reason = "slices are shorter than an update interval: see each endpoint's own"
        result.setdefault("missing", {})["timeslices"] = reason
    notes = [note for part in parts for note in _notes(part)]
    return result | ({"notes": notes} if notes else {})


def _notes(part: Part) -> Iterator[str]:
    url, chosen = part.endpoint.url, part.chosen
    if chosen.late:
        yield f"{url}: no scrape before the window opened, counted from the first one"
    if chosen.early_s:
        ended = f"{url}: scrapes ended {chosen.early_s:.1f} s before the window did"
        counts = part.source.quantity.kind == "counter"
        yield f"{ended}; rates are over the {chosen.rate_s:.1f} s they cover" if counts else ended


def gauge_stats(values: Float64) -> tuple[Json, dict[str, str]]:
    """Describe a gauge's samples (float64[n], n > 0), and say what cannot be.

    Mean and percentiles (numpy's default) are over scrapes, not weighted by time; `std` has ddof 1.
    """
    mean = float(values.mean())
    if not math.isfinite(mean):
        return {}, {"stats": TOO_LARGE}
    read = np.quantile(values, _QS)
    stats: Json = {"count": len(values), "mean": mean}
    missing = {}
    if len(values) > 1:
        stats["std"] = float(values.std(ddof=1))
    else:
        missing["std"] = "one sample has no spread"
    stats |= {"min": float(values.min()), "max": float(values.max())}
    stats |= {name: float(value) for name, value in zip(PERCENTILES, read, strict=True)}
    missing |= {name: TOO_LARGE for name, value in stats.items() if not math.isfinite(value)}
    return {name: value for name, value in stats.items() if name not in missing}, missing


def _parts(endpoint: EndpointSeries, chosen: Cut | Missing, engine: Engine) -> tuple[dict[str, Part], dict[str, str]]:
    own: dict[str, Part] = {}
    absent: dict[str, str] = {}
    for name, source in canonical(endpoint.series, engine.name).items():
        if isinstance(source, Missing):
            absent[name] = source.reason
        elif isinstance(chosen, Missing):
            absent[name] = chosen.reason
        else:
            part = Part(endpoint=endpoint, chosen=chosen, source=source)
            reason = _unseen(part)
            if reason:
                absent[name] = reason
            else:
                own[name] = part
    return own, absent


def _unseen(part: Part) -> str:
    found: CounterIncrease | HistogramIncrease | GaugeSamples | Missing
    kind = part.source.quantity.kind
    if kind == "histogram":
        found = aggregate.histograms([part])
    elif kind == "counter":
        found = aggregate.counters([part])
    else:
        found = aggregate.gauges([part])
    return found.reason if isinstance(found, Missing) else ""


def _endpoint(endpoint: EndpointSeries, chosen: Cut | Missing, engine: Engine | None) -> Json:
    entry: Json = {
        "url": endpoint.url,
        "engine": engine.name if engine else None,
        "scrapes": {
            "ok": len(endpoint.response_ns),
            "failed": len(endpoint.failures),
            "failures": dict(Counter(reason for _, reason in endpoint.failures)),
        },
    }
    if isinstance(chosen, Missing):
        entry["reason"] = chosen.reason
        return entry
    entry["reference"] = {
        "at_ns": int(endpoint.response_ns[chosen.reference]),
        "before_window": not chosen.late,
    }
    entry["last"] = {"at_ns": int(endpoint.response_ns[chosen.last])}
    entry["per_interval_slices"] = chosen.per_interval
    return entry


def _engine(engine: Engine | None, version: str | None) -> Json | None:
    if engine is None:
        return None
    return {"name": engine.name, "version": version or engine.version, "detected_by": engine.detected_by}


def _why_no_engine(endpoints: Sequence[EndpointSeries]) -> str:
    if not endpoints:
        return "no metrics endpoint was scraped"
    if not any(len(one.response_ns) for one in endpoints):
        reasons = [one.failures[-1][1] for one in endpoints if one.failures]
        return f"no scrape succeeded: {reasons[0]}" if reasons else "no scrape succeeded"
    return "no known engine's metrics are on the page"


def _counter(found: CounterIncrease | Missing, parts: Sequence[Part], chosen: Cut) -> Json:
    if isinstance(found, Missing):
        return _nothing(found)
    rate_per_s, rates = aggregate.counter_rates(parts, found)
    slices = []
    for entry, total, rate in zip(_frames(chosen), found.slices.tolist(), rates.tolist(), strict=False):
        slices.append(entry | _or_missing({"total": total, "rate_per_s": rate}))
    stats = {"total": found.total, "rate_per_s": rate_per_s}
    result: Json = {"stats": stats, "resets": found.resets, "timeslices": slices}
    finite = all(math.isfinite(value) for value in stats.values())
    return result if finite else result | {"stats": {}, "missing": {"stats": TOO_LARGE}}


def _gauge(found: GaugeSamples | Missing, chosen: Cut) -> Json:
    if isinstance(found, Missing):
        return _nothing(found)
    stats, missing = gauge_stats(found.values)
    where = slice_of(found.at_ns, chosen.edges_ns)
    slices = []
    for index, entry in enumerate(_frames(chosen)):
        values = found.values[where == index]
        if len(values):
            read = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
            slices.append(entry | _or_missing(read))
        else:
            slices.append(entry | {"missing": "no scrape fell into the slice"})
    result: Json = {"stats": stats, "timeslices": slices}
    return result | ({"missing": missing} if missing else {})


def _histogram(found: HistogramIncrease | Missing, chosen: Cut) -> Json:
    if isinstance(found, Missing):
        return _nothing(found)
    if not math.isfinite(found.count):
        return _nothing(Missing(TOO_LARGE)) | {"resets": found.resets}
    missing = dict.fromkeys(("std", "min", "max"), _BY_VALUE)
    stats: Json = {"count": _whole(found.count)}
    if math.isfinite(found.sum):
        stats["sum"] = found.sum
    else:
        missing["sum"] = _why_no_sum(found)
    if found.count > 0 and math.isfinite(found.sum / found.count):
        stats["mean"] = found.sum / found.count
    else:
        missing["mean"] = missing.get("sum", TOO_LARGE if found.count > 0 else "no observation")
    read, brackets, unread = _percentiles(found)
    slices = []
    for entry, count, total in zip(_frames(chosen), found.slice_counts, found.slice_sums, strict=False):
        slices.append(entry | _histogram_slice(float(count), float(total), missing.get("sum", TOO_LARGE)))
    return {
        "stats": stats | read,
        "brackets": brackets,
        "resets": found.resets,
        "missing": missing | unread,
        "timeslices": slices,
    }


def _histogram_slice(count: float, total: float, why_no_sum: str) -> Json:
    if not math.isfinite(count):
        return {"missing": "no scrape fell into the slice" if math.isnan(count) else TOO_LARGE}
    entry: Json = {"count": _whole(count)}
    if math.isfinite(total):
        entry["sum"] = total
    else:
        entry["missing"] = why_no_sum
    if count > 0 and math.isfinite(total / count):
        entry["mean"] = total / count
    else:
        entry.setdefault("missing", TOO_LARGE if count > 0 else "no observation")
    return entry


def _why_no_sum(found: HistogramIncrease) -> str:
    """Tell a page without a sum, of which no interval is known, from sums that no number can hold."""
    return TOO_LARGE if np.isfinite(found.sums).any() else "the page shows no sum"


def _percentiles(found: HistogramIncrease) -> tuple[Json, Json, dict[str, str]]:
    """Estimate percentiles, with the bucket edges that cannot be wrong; none is given beyond the last bound."""
    buckets = found.buckets
    if isinstance(buckets, Missing):
        return {}, {}, dict.fromkeys(PERCENTILES, buckets.reason)
    read: Json = {}
    brackets: Json = {}
    missing: dict[str, str] = {}
    estimates = estimate(buckets.bounds, buckets.intervals, found.sums, _QS)
    edges = bracket(buckets.bounds, buckets.intervals, _QS)
    for name, value, (low, high) in zip(PERCENTILES, estimates.tolist(), edges.tolist(), strict=True):
        if math.isnan(low):
            missing[name] = "the buckets contradict each other" if found.count > 0 else "no observation"
            continue
        brackets[name] = {key: edge for key, edge in (("low", low), ("high", high)) if math.isfinite(edge)}
        if math.isfinite(high) and math.isfinite(value):
            read[name] = value
        else:
            beyond = f"above the last bucket bound {_last_finite(buckets):g}"
            missing[name] = TOO_LARGE if math.isfinite(high) else beyond
            brackets[name]["missing"] = missing[name]
    return read, brackets, missing


def _last_finite(buckets: Buckets) -> float:
    finite = buckets.bounds[np.isfinite(buckets.bounds)]
    return float(finite[-1]) if len(finite) else -math.inf


def _frames(chosen: Cut) -> list[Json]:
    return frames(chosen.edges_ns, chosen.complete.tolist())


def frames(edges_ns: Int64, complete: Sequence[bool]) -> list[Json]:
    """Return the frame of each timeslice: start_ns, end_ns, and `is_complete` only where it is false."""
    edges = edges_ns.tolist()
    return [
        {"start_ns": start, "end_ns": end} | ({} if whole else {"is_complete": False})
        for start, end, whole in zip(edges[:-1], edges[1:], complete, strict=True)
    ]


def _or_missing(numbers: dict[str, float]) -> Json:
    if any(math.isnan(value) for value in numbers.values()):
        return {"missing": "no scrape fell into the slice"}
    if any(math.isinf(value) for value in numbers.values()):
        return {"missing": TOO_LARGE}
    return dict(numbers)


def _nothing(reason: Missing) -> Json:
    return {"stats": {}, "missing": {"stats": reason.reason}, "timeslices": []}


def _whole(value: float) -> int | float:
    """Return a count as an integer where it is one: some exporters scale their counts."""
    return int(value) if value.is_integer() else value
