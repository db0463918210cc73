"""Table of the live page's metrics: name, type, unit, labels and the reader of a snapshot's values, a row each.

Every way out is a writer of what `points` reads: the page, the OpenMetrics file, remote write and OTLP. Nothing is
counted or estimated here. What a snapshot does not know has no point: no zero stands in for it. Labels are from small
sets: what is behind a request (a model, a user, a trace) never becomes one, and of services no more than twenty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal, NamedTuple

from sidelight.exporter.prometheus.snapshot import (
    OTHER_SIGNALS,
    REFUSED,
    ClientCounts,
    Cumulative,
    Exemplar,
    PartCounts,
    Snapshot,
    WatchCounts,
    mean_parts,
)
from sidelight.rundir.printable.text import escaped
from sidelight.scraper.engines.catalogue import FEATURES

Value = float | Cumulative
Kind = Literal["counter", "gauge", "histogram", "info", "summary"]
_SUFFIXES = {"": "", "s": "_seconds", "1": "_ratio"}


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Metric of the table, without the suffix of its unit in its name.

    `read` takes the values from the part of a snapshot that the row is of, or names the field that has them: a mapping
    by the values of the labels, a value alone where there are no labels, or the label sets of an info. None is not
    known.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    what: str
    read: str | Callable[[Any], Any]

    @property
    def page_name(self) -> str:
        """Return the name on the page, without the suffix of its type."""
        return f"sidelight_{self.name}{_SUFFIXES[self.unit]}"


class Point(NamedTuple):
    """Value of a metric with its labels."""

    labels: dict[str, str]
    value: Value


def points(snapshot: Snapshot) -> Iterator[tuple[MetricRow, list[Point]]]:
    """Yield the metrics of a snapshot that have points, in the order of the table."""
    engines = {engine.endpoint: engine for engine in snapshot.engines}
    parts: tuple[tuple[Any, tuple[MetricRow, ...]], ...] = (
        (snapshot, _ABOUT),
        (snapshot.client, _CLIENT),
        (snapshot.generator, _GENERATOR),
        (engines, _ENGINES),
        ({url: engine.gateway for url, engine in engines.items() if engine.gateway is not None}, _GATEWAYS),
        (engines, _SCRAPES),
        (snapshot.parts, _PARTS),
        (snapshot.watch, _WATCH),
    )
    common = _shown(snapshot.labels)
    roles = {url: {"role": engine.role} for url, engine in engines.items() if engine.role}
    for part, rows in parts:
        by_url = roles if rows is _ENGINES else {}
        for row in rows if part is not None else ():
            if values := [
                Point({**common, **_shown({**labels, **by_url.get(labels.get("endpoint", ""), {})})}, value)
                for labels, value in _read(row, part)
            ]:
                yield row, values


def dated(
    history: Iterable[tuple[int, Snapshot]], shown: dict[Hashable, Exemplar]
) -> Iterator[tuple[int, MetricRow, list[Point]]]:
    """Yield the metrics of snapshots, each with its moment; an exemplar once, where it is new.

    `shown` holds the last exemplar of each bucket, and is kept up to date.
    """
    for at_ns, snapshot in history:
        for row, values in points(snapshot):
            new = (
                Point(each.labels, news(row.name, each.labels, each.value, shown))
                if isinstance(each.value, Cumulative)
                else each
                for each in values
            )
            yield at_ns, row, list(new)


def news(name: str, labels: Mapping[str, Any], histogram: Cumulative, shown: dict[Hashable, Exemplar]) -> Cumulative:
    """Return a histogram with those exemplars alone that were not shown yet."""
    series = (name, *sorted(labels.items(), key=str))
    new = {place: each for place, each in histogram.exemplars.items() if shown.get((series, place)) != each}
    shown |= {(series, place): each for place, each in new.items()}
    return replace(histogram, exemplars=new)


def _read(row: MetricRow, part: object) -> Iterator[tuple[Mapping[str, str], Value]]:
    values = getattr(part, row.read) if isinstance(row.read, str) else row.read(part)
    if row.kind == "info":
        yield from ((labels, 1.0) for labels in values)
        return
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        if value is not None and math.isfinite(_size(value)):
            yield dict(zip(row.labels, (key,) if isinstance(key, str) else key, strict=True)), value


def _size(value: Value) -> float:
    return value.sum_s + sum(value.counts) if isinstance(value, Cumulative) else value


def _shown(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: escaped(text) for name, text in labels.items()}


def _objectives(field: str) -> Callable[[ClientCounts], dict[str, float | None]]:
    """Return a reader of the objectives of --slo, in base units."""

    def read(client: ClientCounts) -> dict[str, float | None]:
        objectives = () if client.slo is None else client.slo.objectives
        fields = {each.name: (getattr(each, field), each.unit == "ms" and field != "met") for each in objectives}
        return {name: value * 1e-3 if is_ms and value is not None else value for name, (value, is_ms) in fields.items()}

    return read


def _each(read: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], dict[Any, Any]]:
    """Return a reader of each page, by its endpoint; of several values each, by their own labels too."""

    def read_each(pages: Mapping[str, Any]) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for url, page in pages.items():
            value = read(page)
            several = value.items() if isinstance(value, Mapping) else [((), value)]
            values |= {(url, *((key,) if isinstance(key, str) else key)): each for key, each in several}
        return values

    return read_each


def _quantity(about: str, kind: Kind, quantity: str, what: str, *, name: str = "", unit: str = "") -> MetricRow:
    """Return the row of a canonical quantity of pages."""
    read = _each(lambda page: getattr(page, f"{kind}s").get(quantity))
    return MetricRow(f"{about}_{name or quantity}", kind, unit, ("endpoint",), what, read)


def _features(field: str) -> Callable[[Mapping[str, Any]], dict[Any, Any]]:
    """Return a reader of the `FEATURES` of each engine."""
    return _each(lambda page: {name: value for name, value in getattr(page, field).items() if name in FEATURES})


def _seen(field: str) -> Callable[[PartCounts], dict[tuple[str, str], Cumulative]]:
    """Return a reader of histograms by part; once there are requests, without unknown parts."""

    def read(counts: PartCounts) -> dict[tuple[str, str], Cumulative]:
        histograms: Mapping[tuple[str, str], Cumulative] = getattr(counts, field)
        parts = {part for (part, _), histogram in histograms.items() if any(histogram.counts)}
        return {key: histogram for key, histogram in histograms.items() if key[0] in parts or not parts}

    return read


def _received(name: str) -> Callable[[WatchCounts], int | None]:
    """Return a reader of a receiver's count."""
    return lambda watch: watch.receiver.get(name)


# fmt: off
_ABOUT = (
    MetricRow("build", "info", "", ("version",), "The sidecar that serves this page.",
        lambda snapshot: [{"version": snapshot.version}]),
    MetricRow("run", "info", "", ("run_id", "phase"), "The run this page is about, and its phase.",
        lambda snapshot: [{**snapshot.about, "run_id": snapshot.run_id, "phase": snapshot.phase}]),
    MetricRow("run_verdict", "gauge", "", ("of",),
        "Of a run that has ended: whether its load was sustained, and its generator can be trusted; 1 or 0.",
        "verdicts"),
    MetricRow("verdict", "gauge", "", ("state", "cause"),
        "The verdict now, of the last minutes; of a run that has ended, its report's: 1. docs/reference/metrics/run.md",
        lambda snapshot: {(each.state, each.cause): 1.0 for each in [snapshot.verdict] if each}),
    MetricRow("advice", "info", "", ("headline", "why", "do"),
        "The sentences of that verdict, with their figures: one series, renewed with state or cause, else each 30 s.",
        lambda snapshot: [{"headline": each.headline, "why": each.why, "do": each.do}
                          for each in [snapshot.verdict] if each]),
)
_CLIENT = (
    MetricRow("client_requests", "counter", "", ("status",), "Requests that ended, by status.", "requests"),
    MetricRow("client_requests_scheduled", "counter", "", (),
        "Requests whose time to be sent has come, of an open loop.", "scheduled"),
    MetricRow("client_requests_submitted", "counter", "", (), "Requests that were sent.", "submitted"),
    MetricRow("client_requests_in_flight", "gauge", "", (), "Requests submitted and not yet ended.", "in_flight"),
    MetricRow("client_input_tokens", "counter", "", (), "Prompt tokens of the requests that ended.", "input_tokens"),
    MetricRow("client_output_tokens", "counter", "", (),
        "Tokens received: by usage, of replies that go on by their chunks.", "output_tokens"),
    MetricRow("client_ttft", "histogram", "s", (), "Last byte of the request to first content that is not blank.",
        "ttft"),
    MetricRow("client_inter_token_latency", "histogram", "s", (), "Time between content chunks of one response.",
        "inter_token"),
    MetricRow("client_time_per_output_token", "histogram", "s", (), "First token to last, over tokens less one.",
        "time_per_output_token"),
    MetricRow("client_e2e_latency", "histogram", "s", (), "Last byte of the request to last token.", "e2e"),
    MetricRow("client_quantile", "summary", "s", ("of", "quantile"),
        "Exact quantiles so far, not from buckets. A TTFT counts once its first token has come, the others at the end.",
        "quantiles"),
    MetricRow("client_rate_per_second", "gauge", "", ("of",),
        "Per second of the measured phase so far; at the end as the report has it: the drain counts for what ended.",
        "rates"),
    MetricRow("class_requests", "counter", "", ("class",),
        "Requests that ended ok, by the class that the workload gave them, where it has several.", "class_requests"),
    MetricRow("class_quantile", "summary", "s", ("class", "of", "quantile"),
        "Exact quantiles of those requests, by their class.", "class_quantiles"),
    MetricRow("client_requests_good", "counter", "", (), "Requests that met every objective of a latency.",
        lambda client: None if client.slo is None else client.good),
    MetricRow("slo_limit", "gauge", "", ("objective",),
        "The bound of an objective: seconds, a ratio, or a number per second.", _objectives("bound")),
    MetricRow("slo_value", "gauge", "", ("objective",),
        "What the run so far, or a watch's last minute, has of it, in that unit.", _objectives("value")),
    MetricRow("slo_met", "gauge", "", ("objective",),
        "Whether the run so far, or a watch's last minute, keeps the bound: 1 or 0.", _objectives("met")),
)
_GENERATOR = (
    MetricRow("generator_schedule_lateness", "histogram", "s", (),
        "How much later than scheduled a request was dispatched: the generator's own error.", "schedule_lateness"),
    MetricRow("generator_schedule_lateness_quantile", "summary", "s", ("quantile",),
        "Exact quantiles of the same lateness in the measured phase.", "lateness_quantiles_s"),
    MetricRow("generator_cpu", "counter", "s", ("process",), "CPU time of our processes.", "cpu_seconds"),
    MetricRow("generator_loop_delay_max", "gauge", "s", (),
        "The latest that a timer of a load worker came, since the start of the run.", "loop_delay_max_s"),
    MetricRow("live_errors", "counter", "", (),
        "Errors of the live view: with each, something of the run is not on this page; the report is not affected.",
        "live_errors"),
)
ENGINE_HISTOGRAMS = {
    "queue_time": "Time waiting to be scheduled, by the engine's clock.",
    "prefill_time": "Time from scheduling to the first token.",
    "decode_time": "Time from the first token to the last.",
    "ttft": "Time to first token, by the engine's clock.",
    "inter_token_latency": "Time between tokens, by the engine.",
    "e2e_latency": "Arrival to last token, by the engine's clock.",
}
ENGINE_GAUGES = {
    "requests_running": "Requests in the engine's running batch.",
    "requests_waiting": "Requests waiting to be scheduled.",
    "kv_cache_usage": "Share of the KV cache in use, 0 to 1.",
}
ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
    "preemptions": "Requests thrown out of the batch for want of KV cache.",
    "prefix_cache_queries": "Prefix cache: tokens looked up.",
    "prefix_cache_hits": "Prefix cache: tokens found.",
    "requests_finished": "Requests the engine finished.",
}
_FEATURES = ", by its name in docs/reference/metrics/server.md."
_ENGINES = (
    MetricRow("engine", "info", "", ("endpoint", "engine", "version"), "The engine found at an endpoint.",
        lambda engines: [{"endpoint": url, "engine": engine.engine, "version": engine.version}
                         for url, engine in engines.items() if engine.engine or engine.gateway is None]),
    *(_quantity("engine", "histogram", name, what, unit="s") for name, what in ENGINE_HISTOGRAMS.items()),
    MetricRow("engine_quantile", "summary", "s", ("endpoint", "of", "quantile", "bound"),
        "Quantiles of what the engine observed, estimated from its histograms (bound: estimate, and low and high, "
        "which hold 9 in 10 truths): of a run's measured phase so far, of a watch's last 5 minutes.",
        _each(lambda engine: engine.quantiles)),
    *(_quantity("engine", "gauge", name, what, unit="1" if name == "kv_cache_usage" else "")
      for name, what in ENGINE_GAUGES.items()),
    MetricRow("engine_highest", "gauge", "", ("endpoint", "of"),
        "Highest value of each gauge that scrapes saw: of a run's measured phase, of a watch since its start.",
        _each(lambda engine: engine.highest)),
    *(_quantity("engine", "counter", name, what) for name, what in ENGINE_COUNTERS.items()),
    MetricRow("engine_feature", "gauge", "", ("endpoint", "of"),
        f"Requests, a share, tokens or seconds of an engine with certain features{_FEATURES}", _features("gauges")),
    MetricRow("engine_feature_counted", "counter", "", ("endpoint", "of"),
        f"Counts of such an engine, in tokens, requests and the like, or seconds{_FEATURES}", _features("counters")),
    MetricRow("engine_feature_time", "histogram", "s", ("endpoint", "of"),
        f"Times of such an engine{_FEATURES}", _features("histograms")),
)
_GATEWAYS = (
    MetricRow("gateway", "info", "", ("endpoint", "gateway"), "The gateway that a page is of.",
        lambda gateways: [{"endpoint": url, "gateway": gateway.gateway} for url, gateway in gateways.items()]),
    _quantity("gateway", "histogram", "request_time", name="request", unit="s",
        what="How long the gateway had requests, by its page; to the first output of Dynamo's."),
    _quantity("gateway", "histogram", "upstream_time", name="upstream", unit="s",
        what="How long the gateway's calls of the next server took; what is left is its own."),
    _quantity("gateway", "histogram", "queue_time", name="queue", unit="s",
        what="Wait in the gateway before its call of the next server."),
    MetricRow("gateway_own", "gauge", "s", ("endpoint",),
        "Mean time that the gateway took of a request itself since the first scrape, by its page.",
        _each(lambda gateway: gateway.own_s)),
    _quantity("gateway", "gauge", "recent_queue_time", name="recent_queue", unit="s",
        what="Mean wait in the gateway over its last requests, as its page has it: HAProxy's begins at zero."),
    _quantity("gateway", "gauge", "requests_waiting", "Requests that wait in the gateway."),
    _quantity("gateway", "gauge", "requests_in_flight", "Requests that the gateway has."),
    _quantity("gateway", "counter", "retries", "Calls of the next server that the gateway made again."),
    _quantity("gateway", "counter", "upstream_errors", "Calls of the next server that failed."),
)
_SCRAPES = (
    MetricRow("scrapes", "counter", "", ("endpoint", "outcome"), "Scrapes of the engine, by how they ended.",
        _each(lambda engine: engine.scrapes)),
    MetricRow("scrape_duration", "gauge", "s", ("endpoint",), "How long the last scrape took.",
        _each(lambda engine: engine.last_scrape_duration_s)),
    MetricRow("engine_last_answer_timestamp", "gauge", "s", ("endpoint",),
        "When the last page came, Unix time: the engine is down or unreachable since then, where none comes.",
        _each(lambda engine: engine.last_answer_s)),
)
_NETWORK = (
    "Part network is all time outside the engine and the gateways that are known by their spans: proxies are in it."
)
_PARTS = (
    MetricRow("ttft_part", "histogram", "s", ("part", "source"),
        f"TTFT of each request by part; of one source, all parts add up to it. {_NETWORK}", _seen("ttft")),
    MetricRow("e2e_part", "histogram", "s", ("part", "source"),
        f"End-to-end time of each request by part. {_NETWORK}", _seen("e2e")),
    MetricRow("ttft_part_mean", "gauge", "s", ("part",),
        "Mean of each part of the TTFT over the requests that are broken down; of a run that ended, as in its report.",
        lambda counts: mean_parts(counts.ttft) if counts.ttft_means_s is None else counts.ttft_means_s),
    MetricRow("ttft_largest_part", "gauge", "1", ("part",),
        "The largest part of the mean TTFT of the latest requests, and its share of it; none where it is uncertain or "
        "requests only fail.",
        "largest"),
    MetricRow("breakdown_pending", "gauge", "", (),
        "Requests that ended and are not counted yet: they wait for their spans, or for an estimate.", "pending"),
    MetricRow("inner_part", "histogram", "s", ("part", "source"),
        "What parts of each request's time consist of, where it is known, such as engine_frontend and "
        "scheduler_intake of other, and gateway_request of gateway, before it called the next server.",
        lambda counts: {key: histogram for key, histogram in counts.inner.items() if any(histogram.counts)}),
    MetricRow("no_client_part", "histogram", "s", ("part",),
        "Queue and prefill of requests without a client's span, as their engines' spans state them.",
        lambda counts: {part: histogram for (part, _), histogram in counts.engine_only.items()}),
    MetricRow("requests", "counter", "", ("source",),
        "Requests by where their breakdown is from. In the sum over shards, one that is in two traces may count twice.",
        "requests"),
    MetricRow("breakdown_quality", "counter", "", ("quality",), "Requests by how good their breakdown is.", "quality"),
    MetricRow("gateway_requests", "counter", "", ("first_output",),
        "Requests with a breakdown, by how the first output of the outermost gateway is known. unknown: some of its "
        "time is in part network; no_gateway: no span of one came.", "gateways"),
    MetricRow("breakdown_missing", "counter", "", ("reason",), "Requests whose TTFT is not broken down, by why.",
        "missing"),
)
_WATCH = (
    *(MetricRow(f"receiver_{name}", "counter", "", (), what, _received(name))
      for name, what in {
          "exports": "Exports of spans taken in.",
          "spans": "Spans taken in.",
          "forwarded": "Exports passed on to the next collector.",
          "forward_dropped": "Exports that did not reach the next collector.",
          "forward_unknown": "Exports that waited for the next collector, or had just come, as a receiver died.",
          "cut_connections": "Connections to the receiver that made room for others.",
      }.items()),
    MetricRow("receiver_restarts", "counter", "", (), "Receivers that ended on their own and were started again.",
        "restarts"),
    MetricRow("scraper_restarts", "counter", "", (), "Scrapers that ended on their own and were started again.",
        "scraper_restarts"),
    MetricRow("scrapes_unwritten", "counter", "", (),
        "Scrapes that are lost: they could not be written, as on a full disk.", "unwritten"),
    MetricRow("watch_errors", "counter", "", (), "Defects of the sidecar; what had just come is lost with each.",
        "errors"),
    MetricRow("watch_cpu", "counter", "s", (), "CPU time of the process that serves this page.", "cpu_s"),
    MetricRow("window_repeated_spans", "counter", "", (), "Spans that came again, and count once.", "repeated"),
    MetricRow("window_evicted_spans", "counter", "", (), "Spans that had to make room for newer ones.", "evicted"),
    MetricRow("health_probes", "counter", "", (),
        "Health probes that engines served like requests: their spans are left out.", "probes"),
    MetricRow("whole_traces", "counter", "", (),
        "Requests with the spans of their client and their engine in one trace.",
        "whole_traces"),
    MetricRow("broken_traces", "counter", "", ("service", "how"),
        "Requests with the spans of their client in one trace and those of their engine in another, by the service at "
        "which it breaks: new_trace, it begins another; not_passed_on, it is the last of the client's, or none is.",
        "broken_traces"),
    MetricRow("receiver_refused", "counter", "", ("kind",), "Exports (bad_spans, off_clock: spans) not used, by why.",
        lambda watch: {kind: watch.receiver.get(kind) for kind in REFUSED}),
    MetricRow("receiver_other_exports", "counter", "", ("signal",),
        "Exports of other signals than spans that came; they are passed on, and not read.",
        lambda watch: {name: watch.receiver.get(name) for name in OTHER_SIGNALS}),
    MetricRow("receiver_other_dropped", "counter", "", ("signal",),
        "Of these, the ones that were not passed on: nothing to forward to, or it did not take them.",
        lambda watch: {name: watch.receiver.get(f"{name}_dropped") for name in OTHER_SIGNALS}),
    MetricRow("receiver_forward_queue", "gauge", "", ("what",),
        "What waits for the next collector of spans: exports, their bytes, and how many bytes may wait.",
        "forward_queue"),
    MetricRow("watch_lag", "gauge", "s", (),
        "For how long what the receiver logged has not been read: a little, unless more comes than can be read.",
        lambda watch: None if watch.read_to_s is None else max(0.0, monotonic() - watch.read_to_s)),
    MetricRow("headroom", "gauge", "1", ("bound",),
        "How many times the traffic of late would meet the objectives of --slo, by a prediction (bound: estimate, and "
        "low and high, which hold 9 in 10 truths); none where nothing can be predicted.",
        "headroom"),
    MetricRow("drift", "gauge", "1", ("process", "part", "bound"),
        "Time of the engine's steps and of its prefill at equal batch and length, and lengths of prompts and outputs: "
        "the last quarter of an hour over the baseline (--baseline, else the first hour), with a 90 % interval. "
        "process: of several engines, by their spans.",
        "drift"),
    MetricRow("drift_since", "gauge", "s", ("process", "part"),
        "When a change that lasts began, s Unix; absent without one.", "drift_since_s"),
    MetricRow("window_size", "gauge", "", ("what",), "How much is kept for requests that go on.", "sizes"),
)
# fmt: on
