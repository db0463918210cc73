"""Data of the page's charts: every request, and the engines' gauges at every scrape, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.load.reuse import REUSED, RequestReuse, reused_label
from sidelight.correlator.parts import DECODE, INNER_PARTS, TTFT_PARTS, Part
from sidelight.correlator.statistics.server_load import engine_samples, met_at_submission
from sidelight.exporter.html.columns import (
    TIME_UNIT_MS,
    PackedColumn,
    ascending_column,
    number_column,
    pack,
    text_column,
)
from sidelight.exporter.summary.breakdown import Breakdown, json_name, label_of
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.records import request_id, trace_id
from sidelight.loadgen.requests.metrics import counts, input_tokens, request_metrics, schedule_lateness_ms
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Ints, take
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.resets import restarts_of
from sidelight.scraper.series.table import EndpointSeries

GAUGES = {"requests_waiting": "waiting", "requests_running": "running", "kv_cache_usage": "KV cache in use"}
QUANTILES = 1000  # of the gaps between chunks, of which there may be millions
MOST_MARKS = 1000
RATIO_UNIT = 1e-4
_MOST_S = 1e9  # a histogram's bounds are what a page says


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInputs:
    """Inputs of a page beside the summary: the requests of a run, their parts and reuse, engines' pages, the phases.

    `phases` are (name, start, end), int64 ns Unix, no end of one that was cut short.
    """

    requests: RequestLog
    parts: Parts
    reuse: RequestReuse
    endpoints: Sequence[EndpointSeries]
    phases: Sequence[tuple[str, int, int | None]]


def page_data(summary: Summary, recorded: PageInputs, *, trace_url: str = "") -> dict[str, Any]:
    """Return everything that the script reads, as an object of JSON; times are ms since the start of the window."""
    log = recorded.requests
    gaps = pack({"itl": number_column(_quantiles(request_metrics(_measured(log)).itl_ms), 1e-3)})
    sent_ns = sent_ns_of(log)
    rows = np.argsort(sent_ns, kind="stable")
    log, parts, sent_ns = take(log, rows), take(recorded.parts, rows), sent_ns[rows]
    start_ns, are_derived = summary.window.start_ns, _has_derived_ids(summary.run_id, log)
    engines = list(_engines(recorded.endpoints, start_ns))
    return {
        "run": summary.run_id,
        "duration": summary.window.duration_s * 1e3,
        "startsAt": summary.window.start,
        "traceUrl": trace_url,
        "parts": [_described(part, summary.correlation.breakdown) for part in TTFT_PARTS],
        "inner": [_described(part, summary.correlation.breakdown) for part in (*INNER_PARTS, DECODE)],
        "phases": [[name, _since(begin, start_ns), None if end is None else _since(end, start_ns)]
                   for name, begin, end in recorded.phases],
        "marks": list(_marks(recorded.endpoints, start_ns)),
        "gauges": [{"name": name, "label": label, "address": url} for url, name, label, _, _ in engines],
        "percentiles": dict(_percentiles(summary)),
        "engine": _engine_percentiles(summary),
        "threshold": _threshold(summary),
        "requests": pack({
            **request_columns(log, sent_ns, start_ns, with_ids=not are_derived),
            **_load_columns(log, recorded.endpoints),
            **part_columns(parts),
            **_reuse_columns(RequestReuse._make(column[rows] for column in recorded.reuse)),
        }),
        "gaugesAt": pack({f"{kind}{at}": column for at, (*_, times, values) in enumerate(engines)
                          for kind, column in (("time", times), ("value", values))}),
        "gaps": gaps,
    }  # fmt: skip


def sent_ns_of(log: RequestLog) -> Ints:
    """Return the send times of requests, ns, -1 if not sent."""
    return np.where(log.submit_ns >= 0, log.submit_ns, log.dispatch_ns)


def gauge_unit(name: str) -> float:
    """Return the unit that the values of a gauge are rounded to."""
    return RATIO_UNIT if name == "kv_cache_usage" else 1.0


def request_columns(log: RequestLog, sent_ns: Ints, start_ns: int, *, with_ids: bool) -> dict[str, PackedColumn]:
    """Return the client's columns of requests, in the order of their sending; with their ids if `with_ids`."""
    metrics = request_metrics(log)
    times = {"ttft": metrics.ttft_ms, "e2e": metrics.e2e_ms, "tpot": metrics.tpot_ms, "late": schedule_lateness_ms(log)}
    ended_ms = np.where(log.end_ns >= 0, (log.end_ns - sent_ns) / 1e6, np.nan)
    times["ended"] = np.where(np.isnan(metrics.e2e_ms), ended_ms, np.nan)
    texts = {
        "phase": log.phase, "class": log.workload_class, "address": log.endpoint_url, "status": log.status,
        "message": log.error, "finish": log.finish_reason,
        **({"request_id": log.request_id, "trace_id": log.trace_id} if with_ids else {}),
    }  # fmt: skip
    return {
        "sent": ascending_column((sent_ns - start_ns) / 1e6, TIME_UNIT_MS),
        **_time_columns(times),
        "index": number_column(counts(log.index)),
        "input": number_column(input_tokens(log)),
        "output": number_column(counts(log.output_tokens)),
        "cached": number_column(counts(log.cached_tokens)),
        **{name: text_column(values) for name, values in texts.items()},
    }


def part_columns(parts: Parts) -> dict[str, PackedColumn]:
    """Return the parts of requests' TTFT and how they are known."""
    times = {part.name: 1e3 * parts.seconds(part) for part in (*TTFT_PARTS[:-1], *INNER_PARTS, DECODE)}
    texts = {"source": parts.source, "quality": parts.quality, "merged": parts.merged, "reason": parts.reason}
    return _time_columns(times | {"error": 1e3 * parts.error_s}) | {
        name: text_column(values) for name, values in texts.items()
    }


def _reuse_columns(reuse: RequestReuse) -> dict[str, PackedColumn]:
    """Return the known columns; the name of one of tokens is its label."""
    served = {} if (engines := reuse.engines()) is None else {"engine": text_column(engines)}
    tokens = {name: number_column(column) for name, column in reuse.tokens().items() if name in REUSED}
    return served | {f"· {reused_label(name)}": column for name, column in tokens.items()}


def _time_columns(times_ms: Mapping[str, Floats]) -> dict[str, PackedColumn]:
    """Return columns of times; none of one that is known of no request."""
    return {name: number_column(values, TIME_UNIT_MS) for name, values in times_ms.items() if np.isfinite(values).any()}


def _load_columns(log: RequestLog, endpoints: Sequence[EndpointSeries]) -> dict[str, PackedColumn]:
    """Return the engines' gauges as each request met them."""
    return {
        GAUGES[name]: number_column(load, gauge_unit(name))
        for name, load in met_at_submission(log, endpoints).items()
        if name in GAUGES and not isinstance(load, Missing)
    }


def _has_derived_ids(run_id: str, log: RequestLog) -> bool:
    """Return whether the script can derive the requests' ids, as it can for generated ones."""
    rows = range(0, len(log), max(1, len(log) // 20))
    return all(
        log.trace_id[row] == trace_id(run_id, int(log.index[row]))
        and log.request_id[row] == request_id(run_id, int(log.index[row]))
        for row in rows
    )


def _engines(
    endpoints: Sequence[EndpointSeries], start_ns: int
) -> Iterator[tuple[str, str, str, PackedColumn, PackedColumn]]:
    """Yield each gauge of each engine: its address, name and label, the times of its scrapes and its values."""
    for url, samples in engine_samples(endpoints):
        for name, label in GAUGES.items():
            sample = samples[name]
            if isinstance(sample, Missing) or not np.isfinite(sample.amount).any():
                continue
            at_ms = ascending_column((sample.at_ns - start_ns) / 1e6, TIME_UNIT_MS)
            yield url, name, label, at_ms, number_column(sample.amount, gauge_unit(name))


def _marks(endpoints: Sequence[EndpointSeries], start_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the engines: restarts, and scrapes that failed."""
    for endpoint in endpoints:
        for at_ns in endpoint.at_ns[restarts_of(endpoint).process][:MOST_MARKS].tolist():
            yield {"at": _since(at_ns, start_ns), "kind": "restart", "text": f"{endpoint.url} restarted"}
        for at_ns, reason in endpoint.failures[:MOST_MARKS]:
            yield {"at": _since(at_ns, start_ns), "kind": "scrape", "text": f"{endpoint.url}: {reason}"}


def _described(part: Part, breakdown: Breakdown) -> dict[str, str]:
    return {"name": part.name, "label": label_of(part, breakdown), "within": part.within}


def _since(at_ns: int, start_ns: int) -> float:
    return (at_ns - start_ns) / 1e6


def _measured(log: RequestLog) -> RequestLog:
    return take(log, (log.phase == "measure") & (log.status == "ok"))


def _quantiles(values_ms: Floats) -> Floats:
    return np.quantile(values_ms, np.linspace(0, 1, QUANTILES + 1)) if len(values_ms) else values_ms


def _percentiles(summary: Summary) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield p50, p90 and p99 of each distribution: the value, its 95 % interval, and the number of requests needed for
    that. `count` is the number of values; it is missing for gaps, of which a sample is drawn.
    """
    client, breakdown = summary.client, summary.correlation.breakdown
    known = {"ttft_ms": client.ttft_ms, "tpot_ms": client.tpot_ms, "e2e_ms": client.e2e_ms}
    known |= {json_name(part): getattr(breakdown, json_name(part)) for part in TTFT_PARTS}
    for name, intervals in summary.methodology.percentiles.items():
        marks: dict[str, Any] = {"count": known[name].count} if name in known else {}
        for label in ("p50", "p90", "p99"):
            interval = getattr(intervals, label)
            marks[label] = [interval.estimate, interval.low, interval.high, interval.needed_n]
        yield name.removesuffix("_ms"), marks


def _engine_percentiles(summary: Summary) -> dict[str, dict[str, list[float | None]]]:
    """Return percentiles of the engine's histograms by metric. Each has its 90 % interval; all are in ms."""
    shown = {"ttft": "ttft", "queue_time": "queue", "prefill_time": "prefill", "e2e_latency": "e2e"}
    percentiles: dict[str, dict[str, list[float | None]]] = {}
    for name, metric in shown.items():
        histogram = getattr(summary.server, name)
        if not histogram or not histogram.intervals:
            continue
        for label in ("p50", "p90", "p99"):
            value, interval = getattr(histogram.stats, label), histogram.intervals.get(label)
            is_shown = isinstance(value, float) and abs(value) < _MOST_S
            if is_shown and interval and label not in (histogram.unresolved or ()):
                numbers = (value, interval.low, interval.high)
                percentiles.setdefault(metric, {})[label] = [
                    1e3 * number if isinstance(number, float) and abs(number) < _MOST_S else None for number in numbers
                ]
    return percentiles


def _threshold(summary: Summary) -> float | None:
    threshold = summary.correlation.tail_attribution.threshold
    return threshold.waiting if threshold else None
