"""The run while it goes, as Prometheus metrics: one frozen `Snapshot` in, one page of families out.

Nothing is counted or estimated here: the conductor replaces the snapshot about once a second, and a scrape renders
whichever is the latest. Serving it over HTTP is left to `metrics_server`. What a snapshot does not know is not on the
page: no family and no zero stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exporter.breakdown_page import part_families, watch_families
from exporter.snapshot import ClientCounts, Cumulative, EngineCounts, GeneratorCounts, Snapshot

# Canonical quantity -> (name on the page, help). Counters get their _total from the client library.
ENGINE_HISTOGRAMS = MappingProxyType(
    {
        "queue_time": ("sidelight_engine_queue_time_seconds", "Time waiting to be scheduled, by the engine's clock."),
        "prefill_time": ("sidelight_engine_prefill_time_seconds", "Time from scheduling to the first token."),
        "decode_time": ("sidelight_engine_decode_time_seconds", "Time from the first token to the last."),
        "ttft": ("sidelight_engine_ttft_seconds", "Time to first token, by the engine's clock."),
        "inter_token_latency": ("sidelight_engine_inter_token_latency_seconds", "Time between tokens, by the engine."),
        "e2e_latency": ("sidelight_engine_e2e_latency_seconds", "Arrival to last token, by the engine's clock."),
    }
)
ENGINE_GAUGES = MappingProxyType(
    {
        "requests_running": ("sidelight_engine_requests_running", "Requests in the engine's running batch."),
        "requests_waiting": ("sidelight_engine_requests_waiting", "Requests waiting to be scheduled."),
        "kv_cache_usage": ("sidelight_engine_kv_cache_usage_ratio", "Share of the KV cache in use, 0 to 1."),
    }
)
ENGINE_COUNTERS = MappingProxyType(
    {
        "prompt_tokens": ("sidelight_engine_prompt_tokens", "Prompt tokens processed."),
        "generation_tokens": ("sidelight_engine_generation_tokens", "Tokens generated."),
        "preemptions": ("sidelight_engine_preemptions", "Requests thrown out of the batch for want of KV cache."),
        "prefix_cache_queries": ("sidelight_engine_prefix_cache_queries", "Prefix cache: tokens looked up."),
        "prefix_cache_hits": ("sidelight_engine_prefix_cache_hits", "Prefix cache: tokens found."),
        "requests_finished": ("sidelight_engine_requests_finished", "Requests the engine finished."),
    }
)


class LivePage(Collector):
    """The page of one run: owns a registry of its own and the latest snapshot.

    Before the first `update` the page is empty. A scrape sees one snapshot as a whole, never parts of two.
    """

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, snapshot: Snapshot) -> None:
        """Show this snapshot from now on."""
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Yield the families of the latest snapshot; called by the registry at each scrape."""
        return () if self._snapshot is None else families(self._snapshot)

    def render(self) -> bytes:
        """Return the page as Prometheus text 0.0.4."""
        return generate_latest(self.registry)


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield what the snapshot knows as metric families. Pure; a family without samples is not yielded."""
    parts = (
        _about(snapshot),
        _client(snapshot.client),
        _generator(snapshot.generator),
        _engines(snapshot.engines),
        _scrapes(snapshot.engines),
        part_families(snapshot.parts),
        watch_families(snapshot.watch),
    )
    return (family for part in parts for family in part if family.samples)


def _about(snapshot: Snapshot) -> Iterator[Metric]:
    yield InfoMetricFamily("sidelight_build", "The sidecar that serves this page.", {"version": snapshot.version})
    yield InfoMetricFamily(
        "sidelight_run",
        "The run this page is about, and its phase.",
        {"run_id": snapshot.run_id, "phase": snapshot.phase},
    )


def _client(client: ClientCounts | None) -> Iterator[Metric]:
    if client is None:
        return
    requests = CounterMetricFamily("sidelight_client_requests", "Requests that ended, by status.", labels=["status"])
    for status, count in client.requests.items():
        requests.add_metric([status], count)
    yield requests
    in_flight = "Requests submitted and not yet ended."
    yield GaugeMetricFamily("sidelight_client_requests_in_flight", in_flight, value=client.in_flight)
    yield CounterMetricFamily(
        "sidelight_client_input_tokens", "Prompt tokens of the requests that ended.", value=client.input_tokens
    )
    yield CounterMetricFamily("sidelight_client_output_tokens", "Tokens received.", value=client.output_tokens)
    for name, what, histogram in (
        ("ttft", "Last byte of the request to first content that is not blank.", client.ttft),
        ("inter_token_latency", "Time between content chunks of one response.", client.inter_token),
        ("time_per_output_token", "First token to last, over tokens less one.", client.time_per_output_token),
        ("e2e_latency", "Last byte of the request to last token.", client.e2e),
    ):
        yield _histogram(f"sidelight_client_{name}_seconds", what, [(None, histogram)])


def _generator(generator: GeneratorCounts | None) -> Iterator[Metric]:
    if generator is None:
        return
    yield _histogram(
        "sidelight_generator_schedule_lateness_seconds",
        "How much later than scheduled a request was dispatched: the generator's own error.",
        [(None, generator.schedule_lateness)],
    )
    cpu = CounterMetricFamily("sidelight_generator_cpu_seconds", "CPU time of our processes.", labels=["process"])
    for process, seconds in generator.cpu_seconds.items():
        cpu.add_metric([process], seconds)
    yield cpu
    yield GaugeMetricFamily(
        "sidelight_generator_loop_delay_max_seconds",
        "The latest that a timer of a load worker came, since the start of the run.",
        value=generator.loop_delay_max_s,
    )


def _engines(engines: tuple[EngineCounts, ...]) -> Iterator[Metric]:
    info = InfoMetricFamily("sidelight_engine", "The engine found at an endpoint.", labels=["endpoint"])
    for engine in engines:
        info.add_metric([engine.endpoint], {"engine": engine.engine, "version": engine.version})
    yield info
    for quantity, (name, what) in ENGINE_HISTOGRAMS.items():
        yield _histogram(name, what, [(engine.endpoint, engine.histograms.get(quantity)) for engine in engines])
    for quantity, (name, what) in ENGINE_GAUGES.items():
        gauge = GaugeMetricFamily(name, what, labels=["endpoint"])
        yield _numbers(gauge, ((engine.endpoint, engine.gauges.get(quantity)) for engine in engines))
    for quantity, (name, what) in ENGINE_COUNTERS.items():
        counter = CounterMetricFamily(name, what, labels=["endpoint"])
        yield _numbers(counter, ((engine.endpoint, engine.counters.get(quantity)) for engine in engines))


def _scrapes(engines: tuple[EngineCounts, ...]) -> Iterator[Metric]:
    scrapes = CounterMetricFamily(
        "sidelight_scrapes", "Scrapes of the engine, by how they ended.", labels=["endpoint", "outcome"]
    )
    for engine in engines:
        for outcome, count in engine.scrapes.items():
            scrapes.add_metric([engine.endpoint, outcome], count)
    yield scrapes
    duration = GaugeMetricFamily(
        "sidelight_scrape_duration_seconds", "How long the last scrape took.", labels=["endpoint"]
    )
    yield _numbers(duration, ((engine.endpoint, engine.last_scrape_duration_s) for engine in engines))


def _numbers(
    family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[tuple[str, float | None]]
) -> GaugeMetricFamily | CounterMetricFamily:
    """Add one sample a row; a row without a finite number is left out."""
    for label, value in rows:
        if value is not None and math.isfinite(value):
            family.add_metric([label], value)
    return family


def _histogram(name: str, what: str, rows: Iterable[tuple[str | None, Cumulative | None]]) -> HistogramMetricFamily:
    """Add one histogram a row of (endpoint, or None for a histogram without labels; what was observed)."""
    rows = tuple(rows)
    labelled = any(endpoint is not None for endpoint, _ in rows)
    family = HistogramMetricFamily(name, what, labels=["endpoint"] if labelled else [])
    for endpoint, histogram in rows:
        if histogram is None or not math.isfinite(histogram.sum_s + sum(histogram.counts)):
            continue
        upper = (*(str(bound) for bound in histogram.bounds_s), "+Inf")
        buckets = list(zip(upper, accumulate(histogram.counts), strict=True))
        family.add_metric([] if endpoint is None else [endpoint], buckets, histogram.sum_s)
    return family
