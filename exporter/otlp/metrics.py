"""A run as OTLP metrics: OpenTelemetry's GenAI metrics of its requests, and its live page, at each step of its history.

Counts are cumulative since the start of the run and bear its time stamps; those of an engine's page are since a start
that it does not say. Attributes: docs/reference/otlp.md; bounds: the page on metrics of
https://github.com/open-telemetry/semantic-conventions-genai.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import numpy as np
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.parts import ENGINE_FRONTEND, STATED_PARTS
from sidelight.exporter.otlp.spans import SpanSource, Value, counted_output, error_type, known, operation_of
from sidelight.exporter.prometheus import snapshot as shown
from sidelight.exporter.prometheus.snapshot import Cumulative, EngineCounts, Snapshot, add, bucketize, traced
from sidelight.exporter.prometheus.table import MetricRow, Point, news, points
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Indices, Ints, Texts, take

STEPS_AT_ONCE = 10  # some 0.5 MB; receivers take 4
_DURATION_BOUNDS_S = tuple(0.01 * 2**step for step in range(14))
_TOKEN_BOUNDS = tuple(float(4**step) for step in range(14))
_TPOT_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# Of the page, what is counted since a start that is not the run's.
_OTHERS = ("engine_", "gateway_")


@dataclass(frozen=True, slots=True)
class _Instrument:
    name: str
    what: str
    bounds: tuple[float, ...] = ()
    unit: str = "s"


_CLIENT, _SERVER = "gen_ai.client.operation.", "gen_ai.server."
_DURATION = _Instrument(f"{_CLIENT}duration", "Dispatch to the end of the reply.", _DURATION_BOUNDS_S)
_FIRST_CHUNK = _Instrument(
    f"{_CLIENT}time_to_first_chunk", "Last byte of the request to first output.", _DURATION_BOUNDS_S
)
_PER_CHUNK = _Instrument(
    f"{_CLIENT}time_per_output_chunk", "Time between content chunks of one response.", _DURATION_BOUNDS_S
)
_TOKENS = _Instrument("gen_ai.client.token.usage", "Tokens by the server's count.", _TOKEN_BOUNDS, "{token}")
# What semantic-conventions-genai has in its place (#374); not released, so both are sent.
_INPUT_TOKENS, _OUTPUT_TOKENS = (
    _Instrument(
        f"gen_ai.client.inference.operation.{kind}_tokens",
        f"The server's count of {kind} tokens.",
        _TOKEN_BOUNDS,
        "{token}",
    )
    for kind in ("input", "output")
)
_SERVER_DURATION = _Instrument(
    f"{_SERVER}request.duration", "Arrival to last token, by the engine.", _DURATION_BOUNDS_S
)
_SERVER_FIRST = _Instrument(f"{_SERVER}time_to_first_token", "Arrival to first token, by the engine.", _TTFT_BOUNDS_S)
_SERVER_PER_TOKEN = _Instrument(
    f"{_SERVER}time_per_output_token", "First token to last, over tokens less one.", _TPOT_BOUNDS_S
)
# Where no request's own times are known: which histograms of an engine's page stand for them.
_OF_PAGE = {"e2e_latency": _SERVER_DURATION, "ttft": _SERVER_FIRST, "inter_token_latency": _SERVER_PER_TOKEN}


@dataclass(slots=True, kw_only=True)
class _Observed:
    """Values of one instrument with the same attributes, in the order of time; `total` are the first `counted`."""

    instrument: _Instrument
    attributes: dict[str, Value]
    values: Floats
    at_ns: Ints
    trace_ids: Texts
    total: Cumulative
    counted: int = 0

    def until(self, at_ns: int) -> Cumulative:
        """Return the histogram of the values observed up to a moment. Moments must not go back."""
        now = int(np.searchsorted(self.at_ns, at_ns, side="right"))
        if now > self.counted:
            new = slice(self.counted, now)
            more = traced(self.values[new], self.instrument.bounds, self.trace_ids[new], self.at_ns[new])
            self.total, self.counted = add(self.total, more), now
        return self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class _InstrumentValues:
    """Values [m] of an instrument, NaN where there is none: when each was observed, and of which request."""

    instrument: _Instrument
    values: Floats
    at_ns: Ints
    rows: Indices | Ints
    attributes: dict[str, Value] = field(default_factory=dict)


def metric_exports(
    source: SpanSource, history: Iterable[tuple[int, Snapshot]], *, start_ns: int
) -> Iterator[MetricsData]:
    """Yield a run's metrics at each moment of its `history`. They are of the requests of its measured phase."""
    measured = source.requests.phase == "measure"
    log, parts = take(source.requests, measured), take(source.parts, measured)
    samples = list(_samples(log, parts, streams=PROTOCOLS[source.protocol].streams))
    observed = [each for sample in samples for each in _by_server(source, log, sample)]
    has_times = any(each.instrument is _SERVER_FIRST for each in observed)
    metrics, steps = _PointCollector(start_ns), iter(history)
    while group := list(islice(steps, STEPS_AT_ONCE)):
        for at_ns, snapshot in group:
            for each in observed:
                attributes = {**snapshot.labels, **each.attributes}
                metrics.histogram(each.instrument, attributes, each.until(at_ns), at_ns, start_ns)
            for page in () if has_times else snapshot.engines:
                metrics.page(page, {**snapshot.labels, **operation_of(source, page.endpoint)}, at_ns)
            for row, values in points(snapshot):
                metrics.add(row, values, at_ns)
        of_scope = ScopeMetrics(scope=source.scope, metrics=metrics.take(), schema_url="")
        resource = ResourceMetrics(resource=source.resource, scope_metrics=[of_scope], schema_url="")
        yield MetricsData(resource_metrics=[resource])


def _samples(log: RequestLog, parts: Parts, *, streams: bool) -> Iterator[_InstrumentValues]:
    """Yield the samples of requests: the client's, and the engine's where it stated times of each request."""
    rows, end_ns = np.arange(len(log)), log.end_ns
    errors = [error_type(log, row) for row in range(len(log))]
    duration_s = np.where(end_ns >= 0, (end_ns - log.dispatch_ns) / 1e9, np.nan)
    counts = [counted_output(log, row) for row in range(len(log))]
    output = np.array([np.nan if count is None else count for count in counts], dtype=np.float64)
    inputs = np.where(log.input_tokens >= 0, log.input_tokens, np.nan)
    for error in sorted(set(errors), key=str):
        of_error = np.array([each == error for each in errors], dtype=np.bool_)
        for instrument, values in ((_DURATION, duration_s), (_INPUT_TOKENS, inputs), (_OUTPUT_TOKENS, output)):
            yield _InstrumentValues(
                instrument=instrument,
                values=np.where(of_error, values, np.nan),
                at_ns=end_ns,
                rows=rows,
                attributes={"error.type": error},
            )
    for kind, tokens in (("input", inputs), ("output", output)):
        attributes: dict[str, Value] = {"gen_ai.token.type": kind}
        yield _InstrumentValues(instrument=_TOKENS, values=tokens, at_ns=end_ns, rows=rows, attributes=attributes)
    if streams:
        output_ns, metrics = log.first_output_ns, request_metrics(log)
        first_s = np.where(output_ns >= 0, (output_ns - log.submit_ns) / 1e9, np.nan)
        yield _InstrumentValues(instrument=_FIRST_CHUNK, values=first_s, at_ns=output_ns, rows=rows)
        gaps_s, gap_ns = metrics.itl_ms / 1e3, metrics.itl_end_ns
        of_gaps = np.repeat(rows, metrics.gap_count)
        yield _InstrumentValues(instrument=_PER_CHUNK, values=gaps_s, at_ns=gap_ns, rows=of_gaps)
    stated = np.isin(parts.source, ["trace", "response"])
    inside_s = sum(np.nan_to_num(parts.seconds(part)) for part in (ENGINE_FRONTEND, *STATED_PARTS))
    first_s = np.where(stated, parts.queue_s + parts.prefill_s + inside_s, np.nan)
    decode_s = np.where(np.isin(parts.decode_source, ["trace", "response"]), parts.decode_s, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_token_s = np.where(output >= 2, decode_s / (output - 1), np.nan)
    yield _InstrumentValues(instrument=_SERVER_FIRST, values=first_s, at_ns=end_ns, rows=rows)
    yield _InstrumentValues(instrument=_SERVER_DURATION, values=first_s + decode_s, at_ns=end_ns, rows=rows)
    yield _InstrumentValues(instrument=_SERVER_PER_TOKEN, values=per_token_s, at_ns=end_ns, rows=rows)


def _by_server(source: SpanSource, log: RequestLog, sample: _InstrumentValues) -> Iterator[_Observed]:
    """Divide a sample by the servers that were asked, in the order of time."""
    urls = log.endpoint_url[sample.rows]
    for url in sorted(set(urls.tolist())):
        chosen = np.flatnonzero((urls == url) & np.isfinite(sample.values) & (sample.at_ns >= 0))
        chosen = chosen[np.argsort(sample.at_ns[chosen], kind="stable")]
        if len(chosen):
            yield _Observed(
                instrument=sample.instrument,
                attributes={**operation_of(source, url), **sample.attributes},
                values=sample.values[chosen],
                at_ns=sample.at_ns[chosen],
                trace_ids=log.trace_id[sample.rows[chosen]],
                total=bucketize([], sample.instrument.bounds),
            )


class _PointCollector:
    """Collects points by metric until they are taken."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._metrics: dict[str, Metric] = {}
        self._shown: dict[Hashable, shown.Exemplar] = {}

    def take(self) -> list[Metric]:
        metrics, self._metrics = list(self._metrics.values()), {}
        return metrics

    def histogram(
        self, instrument: _Instrument, attributes: Mapping[str, Value], histogram: Cumulative, at_ns: int, start_ns: int
    ) -> None:
        """Add the point of a histogram; an exemplar with the first that has it."""
        new = news(instrument.name, attributes, histogram, self._shown)
        exemplars = [
            # The exporters leave out a trace without a span.
            Exemplar({}, each.value_s, round(each.at_s * 1e9), span_id=0, trace_id=int(each.trace_id, 16))
            for each in new.exemplars.values()
        ]
        unknown: Any = None  # which the exporters leave out
        point = HistogramDataPoint(
            attributes=known(attributes),
            start_time_unix_nano=start_ns,
            time_unix_nano=at_ns,
            count=round(sum(histogram.counts)),
            sum=histogram.sum_s,
            bucket_counts=[round(count) for count in histogram.counts],
            explicit_bounds=histogram.bounds_s,
            min=unknown,
            max=unknown,
            exemplars=exemplars,
        )
        self._points(instrument.name, "histogram", instrument.unit, instrument.what).append(point)

    def page(self, page: EngineCounts, attributes: Mapping[str, Value], at_ns: int) -> None:
        """Add the histograms of an engine's page, in its own buckets. They count since its own start."""
        for quantity, instrument in _OF_PAGE.items():
            if quantity in page.histograms:
                of_engine = {**attributes, "gen_ai.provider.name": page.engine}
                self.histogram(instrument, of_engine, page.histograms[quantity], at_ns, 0)

    def add(self, row: MetricRow, values: Iterable[Point], at_ns: int) -> None:
        """Add the points of a metric of the live page: `sidelight_ttft_part_seconds` is `sidelight.ttft_part` in s."""
        name = f"sidelight.{row.name}{'_info' if row.kind == 'info' else ''}"
        start_ns = 0 if row.name.startswith(_OTHERS) else self._start_ns
        instrument = _Instrument(name, row.what, unit=row.unit)
        for labels, value in values:
            if isinstance(value, Cumulative):
                self.histogram(instrument, labels, value, at_ns, start_ns)
            else:
                point = NumberDataPoint(known(labels), start_ns, at_ns, float(value))
                self._points(name, row.kind, row.unit, row.what).append(point)

    def _points(self, name: str, kind: str, unit: str, what: str) -> list[Any]:
        if name not in self._metrics:
            data: Histogram | Sum | Gauge = Gauge([])
            if kind == "histogram":
                data = Histogram([], AggregationTemporality.CUMULATIVE)
            elif kind == "counter":
                data = Sum([], AggregationTemporality.CUMULATIVE, is_monotonic=True)
            self._metrics[name] = Metric(name=name, unit=unit, description=what, data=data)
        return cast("list[Any]", self._metrics[name].data.data_points)
