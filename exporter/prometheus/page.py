"""A run or a watch in progress as Prometheus metrics: one frozen `Snapshot` in, one page of families out.

Nothing is counted or estimated here: the conductor replaces the snapshot about once a second, and a scrape renders
whichever is the latest. Serving it over HTTP is left to `server`. What a snapshot does not know is not on the page: no
family and no zero stands in for it. Labels are from small sets: what is behind a request (a model, a user, a trace)
never becomes one, and of services no more than twenty.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from time import monotonic
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, samples
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exporter.prometheus.events import EventStream
from exporter.prometheus.snapshot import (
    OTHER_SIGNALS,
    REFUSED,
    ClientCounts,
    Cumulative,
    EngineCounts,
    Exemplar,
    GatewayCounts,
    GeneratorCounts,
    PartCounts,
    Snapshot,
    WatchCounts,
    mean_parts,
)
from rundir.printable import escaped

Numbers = TypeVar("Numbers", CounterMetricFamily, GaugeMetricFamily)

# What is said of each canonical quantity. Counters get their _total from the client library.
ENGINE_HISTOGRAMS = {
    "queue_time": "Time waiting to be scheduled, by the engine's clock.",
    "prefill_time": "Time from scheduling to the first token.",
    "decode_time": "Time from the first token to the last.",
    "ttft": "Time to first token, by the engine's clock.",
    "inter_token_latency": "Time between tokens, by the engine.",
    "e2e_latency": "Arrival to last token, by the engine's clock.",
}
ENGINE_GAUGES = {
    "requests_running": ("requests_running", "Requests in the engine's running batch."),
    "requests_waiting": ("requests_waiting", "Requests waiting to be scheduled."),
    "kv_cache_usage": ("kv_cache_usage_ratio", "Share of the KV cache in use, 0 to 1."),
}
ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
    "preemptions": "Requests thrown out of the batch for want of KV cache.",
    "prefix_cache_queries": "Prefix cache: tokens looked up.",
    "prefix_cache_hits": "Prefix cache: tokens found.",
    "requests_finished": "Requests the engine finished.",
}


# Of gateways' pages.
GATEWAY_HISTOGRAMS = {
    "request_time": ("request", "How long the gateway had requests, by its page; to the first output of Dynamo's."),
    "upstream_time": ("upstream", "How long the gateway's calls of the next server took; what is left is its own."),
    "queue_time": ("queue", "Wait in the gateway before its call of the next server."),
}
GATEWAY_GAUGES = {
    "recent_queue_time": (
        "recent_queue_seconds",
        "Mean wait in the gateway over its last requests, as its page has it: HAProxy's begins at zero.",
    ),
    "requests_waiting": ("requests_waiting", "Requests that wait in the gateway."),
    "requests_in_flight": ("requests_in_flight", "Requests that the gateway has."),
}
GATEWAY_COUNTERS = {
    "retries": "Calls of the next server that the gateway made again.",
    "upstream_errors": "Calls of the next server that failed.",
}

GATEWAYS_HELP = (
    "Requests with a breakdown, by how the first output of the outermost gateway is known. unknown: some of its time "
    "is in part network; no_gateway: no span of one came."
)
NETWORK_HELP = (
    "Part network is all time outside the engine and the gateways that are known by their spans: proxies are in it."
)


SCRAPES_KEPT = 4


class LivePage(Collector):
    """The page of one run: owns a registry of its own and the latest snapshot.

    Before the first `update` the page is empty. A scrape sees one snapshot as a whole, never parts of two. `scraped_s`
    are when the last scrapes came, by the monotonic clock, and `latest` is what they see. Who serves the page sets
    `scraped` when an answer was taken. Browsers are sent `stream`.
    """

    def __init__(self) -> None:
        self.latest: Snapshot | None = None
        self.stream = EventStream()
        self.scraped_s: deque[float] = deque(maxlen=SCRAPES_KEPT)
        self.scraped = asyncio.Event()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, snapshot: Snapshot) -> None:
        self.latest = snapshot

    def collect(self) -> Iterable[Metric]:
        """Yield the families of the latest snapshot; called by the registry at each scrape."""
        if self.latest is None:
            return ()
        self.scraped_s.append(monotonic())
        return families(self.latest)

    def render(self) -> bytes:
        """Return the page as Prometheus text 0.0.4."""
        return generate_latest(self.registry)


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metric families of a snapshot. Pure; a family without samples is not yielded."""
    parts = (
        _about(snapshot),
        _client(snapshot.client),
        _slo(snapshot.client),
        _generator(snapshot.generator),
        _engines(snapshot.engines),
        _gateways({engine.endpoint: engine.gateway for engine in snapshot.engines if engine.gateway is not None}),
        _scrapes(snapshot.engines),
        _parts(snapshot.parts),
        _watch(snapshot.watch),
    )
    for family in (family for part in parts for family in part if family.samples):
        family.samples = [
            sample._replace(labels={name: escaped(text) for name, text in {**snapshot.labels, **sample.labels}.items()})
            for sample in family.samples
        ]
        yield family


class Histograms(HistogramMetricFamily):
    """Histograms of one name; `histograms` has them as they came, by the places of their sums among the samples."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        super().__init__(name, documentation, labels=labels)
        self.histograms: dict[int, Cumulative] = {}


def dated(
    history: Iterable[tuple[int, Snapshot]], shown: dict[Hashable, samples.Exemplar]
) -> Iterator[tuple[int, Metric]]:
    """Yield the families of snapshots, each with its moment; an exemplar once, where it is new.

    `shown` holds the last exemplar of each series, and is kept up to date.
    """
    for at_ns, snapshot in history:
        for family in families(snapshot):
            for place, sample in enumerate(family.samples):
                if sample.exemplar is not None:
                    series = (sample.name, *sorted(sample.labels.items()))
                    if shown.get(series) == sample.exemplar:
                        family.samples[place] = sample._replace(exemplar=None)
                    else:
                        shown[series] = sample.exemplar
            yield at_ns, family


def _about(snapshot: Snapshot) -> Iterator[Metric]:
    yield InfoMetricFamily("sidelight_build", "The sidecar that serves this page.", {"version": snapshot.version})
    yield InfoMetricFamily(
        "sidelight_run",
        "The run this page is about, and its phase.",
        {**snapshot.about, "run_id": snapshot.run_id, "phase": snapshot.phase},
    )
    what = "Of a run that has ended: whether its load was sustained, and its generator can be trusted; 1 or 0."
    yield _series(GaugeMetricFamily, "sidelight_run_verdict", what, ("of",), snapshot.verdicts)


def _client(client: ClientCounts | None) -> Iterator[Metric]:
    if client is None:
        return
    what = "Requests that ended, by status."
    yield _series(CounterMetricFamily, "sidelight_client_requests", what, ("status",), client.requests)
    for name, what, count in (
        ("scheduled", "Requests whose time to be sent has come, of an open loop.", client.scheduled),
        ("submitted", "Requests that were sent.", client.submitted),
    ):
        if count is not None:
            yield CounterMetricFamily(f"sidelight_client_requests_{name}", what, value=count)
    in_flight = "Requests submitted and not yet ended."
    yield GaugeMetricFamily("sidelight_client_requests_in_flight", in_flight, value=client.in_flight)
    yield CounterMetricFamily(
        "sidelight_client_input_tokens", "Prompt tokens of the requests that ended.", value=client.input_tokens
    )
    yield CounterMetricFamily(
        "sidelight_client_output_tokens",
        "Tokens received: by usage, of replies that go on by their chunks.",
        value=client.output_tokens,
    )
    for name, what, histogram in (
        ("ttft", "Last byte of the request to first content that is not blank.", client.ttft),
        ("inter_token_latency", "Time between content chunks of one response.", client.inter_token),
        ("time_per_output_token", "First token to last, over tokens less one.", client.time_per_output_token),
        ("e2e_latency", "Last byte of the request to last token.", client.e2e),
    ):
        yield _histograms(f"sidelight_client_{name}_seconds", what, (), [((), histogram)])

    what = (
        "Exact quantiles so far, not from buckets. A TTFT counts once its first token has come, the others at the end."
    )
    quantiles = Metric("sidelight_client_quantile_seconds", what, "summary")
    for (of, quantile), value_s in client.quantiles.items():
        quantiles.add_sample(quantiles.name, {"of": of, "quantile": quantile}, value_s)
    yield quantiles
    what = "Per second of the measured phase so far; at the end as the report has it: the drain counts for what ended."
    yield _series(GaugeMetricFamily, "sidelight_client_rate_per_second", what, ("of",), client.rates)
    what = "Requests that ended ok, by the class that the workload gave them, where it has several."
    yield _series(CounterMetricFamily, "sidelight_class_requests", what, ("class",), client.class_requests)
    what = "Exact quantiles of those requests, by their class."
    by_class = Metric("sidelight_class_quantile_seconds", what, "summary")
    for (name, of, quantile), value_s in client.class_quantiles.items():
        by_class.add_sample(by_class.name, {"class": name, "of": of, "quantile": quantile}, value_s)
    yield by_class


def _slo(client: ClientCounts | None) -> Iterator[Metric]:
    """Yield the objectives of --slo in base units; what is not known of one has no sample."""
    if client is None or client.slo is None:
        return
    what = "Requests that met every objective of a latency."
    yield _series(CounterMetricFamily, "sidelight_client_requests_good", what, (), {(): client.good})
    objectives = {each.name: each for each in client.slo.objectives}
    units = {name: 1e-3 if each.unit == "ms" else 1.0 for name, each in objectives.items()}
    limits = {name: each.bound * units[name] for name, each in objectives.items()}
    values = {name: each.value * units[name] for name, each in objectives.items() if each.value is not None}
    met = {name: each.met for name, each in objectives.items()}
    for name, what, numbers in (
        ("limit", "The bound of an objective: seconds, a ratio, or a number per second.", limits),
        ("value", "What the run has of it so far, in the unit of the bound.", values),
        ("met", "Whether the run keeps the bound so far: 1 or 0.", met),
    ):
        yield _series(GaugeMetricFamily, f"sidelight_slo_{name}", what, ("objective",), numbers)


def _generator(generator: GeneratorCounts | None) -> Iterator[Metric]:
    if generator is None:
        return
    yield _histograms(
        "sidelight_generator_schedule_lateness_seconds",
        "How much later than scheduled a request was dispatched: the generator's own error.",
        (),
        [((), generator.schedule_lateness)],
    )
    what = "Exact quantiles of the same lateness in the measured phase."
    lateness = Metric("sidelight_generator_schedule_lateness_quantile_seconds", what, "summary")
    for quantile, value_s in generator.lateness_quantiles_s.items():
        lateness.add_sample(lateness.name, {"quantile": quantile}, value_s)
    yield lateness
    what = "CPU time of our processes."
    yield _series(CounterMetricFamily, "sidelight_generator_cpu_seconds", what, ("process",), generator.cpu_seconds)
    yield GaugeMetricFamily(
        "sidelight_generator_loop_delay_max_seconds",
        "The latest that a timer of a load worker came, since the start of the run.",
        value=generator.loop_delay_max_s,
    )
    what = "Errors of the live view: with each, something of the run is not on this page; the report is not affected."
    yield CounterMetricFamily("sidelight_live_errors", what, value=generator.live_errors)


def _engines(engines: tuple[EngineCounts, ...]) -> Iterator[Metric]:
    info = InfoMetricFamily("sidelight_engine", "The engine found at an endpoint.", labels=["endpoint"])
    for engine in engines:
        if engine.gateway is not None and not engine.engine:
            continue
        info.add_metric([engine.endpoint], {"engine": engine.engine, "version": engine.version})
    yield info
    for quantity, what in ENGINE_HISTOGRAMS.items():
        histograms = (((engine.endpoint,), engine.histograms.get(quantity)) for engine in engines)
        yield _histograms(f"sidelight_engine_{quantity}_seconds", what, ("endpoint",), histograms)
    what = "Quantiles of what the engine observed, estimated from its histograms (bound: estimate, and low and high, "
    what += "which hold 9 in 10 truths): of a run's measured phase so far, of a watch's last 5 minutes."
    quantiles = Metric("sidelight_engine_quantile_seconds", what, "summary")
    for engine in engines:
        for (of, quantile, bound), value_s in engine.quantiles.items():
            labels = {"endpoint": engine.endpoint, "of": of, "quantile": quantile, "bound": bound}
            quantiles.add_sample(quantiles.name, labels, value_s)
    yield quantiles
    for quantity, (name, what) in ENGINE_GAUGES.items():
        gauges = {engine.endpoint: engine.gauges.get(quantity) for engine in engines}
        yield _series(GaugeMetricFamily, f"sidelight_engine_{name}", what, ("endpoint",), gauges)
    what = "Highest value of each gauge that scrapes saw: of a run's measured phase, of a watch since its start."
    highest = {(engine.endpoint, of): value for engine in engines for of, value in engine.highest.items()}
    yield _series(GaugeMetricFamily, "sidelight_engine_highest", what, ("endpoint", "of"), highest)
    for quantity, what in ENGINE_COUNTERS.items():
        counters = {engine.endpoint: engine.counters.get(quantity) for engine in engines}
        yield _series(CounterMetricFamily, f"sidelight_engine_{quantity}", what, ("endpoint",), counters)


def _gateways(gateways: Mapping[str, GatewayCounts]) -> Iterator[Metric]:
    """Yield the metric families of gateways' pages, by their URLs."""
    info = InfoMetricFamily("sidelight_gateway", "The gateway that a page is of.", labels=["endpoint"])
    for url, gateway in gateways.items():
        info.add_metric([url], {"gateway": gateway.gateway})
    yield info
    for quantity, (name, what) in GATEWAY_HISTOGRAMS.items():
        histograms = (((url,), gateway.histograms.get(quantity)) for url, gateway in gateways.items())
        yield _histograms(f"sidelight_gateway_{name}_seconds", what, ("endpoint",), histograms)
    means_s = {url: gateway.own_s for url, gateway in gateways.items()}
    what = "Mean time that the gateway took of a request itself since the first scrape, by its page."
    yield _series(GaugeMetricFamily, "sidelight_gateway_own_seconds", what, ("endpoint",), means_s)
    for quantity, (name, what) in GATEWAY_GAUGES.items():
        gauges = {url: gateway.gauges.get(quantity) for url, gateway in gateways.items()}
        yield _series(GaugeMetricFamily, f"sidelight_gateway_{name}", what, ("endpoint",), gauges)
    for quantity, what in GATEWAY_COUNTERS.items():
        counters = {url: gateway.counters.get(quantity) for url, gateway in gateways.items()}
        yield _series(CounterMetricFamily, f"sidelight_gateway_{quantity}", what, ("endpoint",), counters)


def _scrapes(engines: tuple[EngineCounts, ...]) -> Iterator[Metric]:
    scrapes = {(engine.endpoint, how): count for engine in engines for how, count in engine.scrapes.items()}
    what = "Scrapes of the engine, by how they ended."
    yield _series(CounterMetricFamily, "sidelight_scrapes", what, ("endpoint", "outcome"), scrapes)
    durations_s = {engine.endpoint: engine.last_scrape_duration_s for engine in engines}
    what = "How long the last scrape took."
    yield _series(GaugeMetricFamily, "sidelight_scrape_duration_seconds", what, ("endpoint",), durations_s)
    answers_s = {engine.endpoint: engine.last_answer_s for engine in engines}
    what = "When the last page came, Unix time: the engine is down or unreachable since then, where none comes."
    yield _series(GaugeMetricFamily, "sidelight_engine_last_answer_timestamp_seconds", what, ("endpoint",), answers_s)


def _parts(counts: PartCounts | None) -> Iterator[Metric]:
    """Yield the breakdown as metric families; none of a breakdown that is not made."""
    if counts is None:
        return
    for name, what, histograms in (
        ("ttft", f"TTFT of each request by part; of one source, all parts add up to it. {NETWORK_HELP}", counts.ttft),
        ("e2e", f"End-to-end time of each request by part, likewise. {NETWORK_HELP}", counts.e2e),
    ):
        yield _histograms(f"sidelight_{name}_part_seconds", what, ("part", "source"), _seen(histograms).items())
    what = (
        "Mean of each part of the TTFT over the requests that are broken down; of a run that ended, as in its report."
    )
    means_s = mean_parts(counts.ttft) if counts.ttft_means_s is None else counts.ttft_means_s
    yield _series(GaugeMetricFamily, "sidelight_ttft_part_mean_seconds", what, ("part",), means_s)
    what = "The largest part of the mean TTFT of the latest requests, and its share of it; none where it is uncertain."
    yield _series(GaugeMetricFamily, "sidelight_ttft_largest_part_ratio", what, ("part",), counts.largest)
    if counts.pending is not None:
        what = "Requests that ended and are not counted yet: they wait for their spans, or for an estimate."
        yield GaugeMetricFamily("sidelight_breakdown_pending", what, value=counts.pending)
    what = "What parts of each request's time consist of, where it is known: engine_frontend and scheduler_intake of "
    what += "other, gateway_request of gateway, before it called the next server."
    inner = {key: histogram for key, histogram in counts.inner.items() if any(histogram.counts)}
    yield _histograms("sidelight_inner_part_seconds", what, ("part", "source"), inner.items())
    for name, what, label, numbers in (
        ("sidelight_requests", "Requests by where their breakdown is from.", "source", counts.requests),
        ("sidelight_breakdown_quality", "Requests by how good their breakdown is.", "quality", counts.quality),
        ("sidelight_gateway_requests", GATEWAYS_HELP, "first_output", counts.gateways),
        ("sidelight_breakdown_missing", "Requests whose TTFT is not broken down, by why.", "reason", counts.missing),
    ):
        yield _series(CounterMetricFamily, name, what, (label,), numbers)


def _seen(histograms: Mapping[tuple[str, str], Cumulative]) -> dict[tuple[str, str], Cumulative]:
    """Return the histograms without parts that no request has, once there are requests."""
    parts = {part for (part, _), histogram in histograms.items() if any(histogram.counts)}
    return {key: histogram for key, histogram in histograms.items() if key[0] in parts or not parts}


def _watch(counts: WatchCounts | None) -> Iterator[Metric]:
    if counts is None:
        return
    received = counts.receiver
    for name, what, count in (
        ("receiver_exports", "Exports of spans taken in.", received.get("exports")),
        ("receiver_spans", "Spans taken in.", received.get("spans")),
        ("receiver_forwarded", "Exports passed on to the next collector.", received.get("forwarded")),
        ("receiver_forward_dropped", "Exports that did not reach the next collector.", received.get("forward_dropped")),
        (
            "receiver_forward_unknown",
            "Exports that waited for the next collector, or had just come, as a receiver died.",
            received.get("forward_unknown"),
        ),
        (
            "receiver_cut_connections",
            "Connections to the receiver that sent no request in time, or made room for others.",
            received.get("cut_connections"),
        ),
        ("receiver_restarts", "Receivers that ended on their own and were started again.", counts.restarts),
        ("scraper_restarts", "Scrapers that ended on their own and were started again.", counts.scraper_restarts),
        ("scrapes_unwritten", "Scrapes that are lost: they could not be written, as on a full disk.", counts.unwritten),
        ("watch_errors", "Defects of the sidecar; what had just come is lost with each.", counts.errors),
        ("watch_cpu_seconds", "CPU time of the process that serves this page.", counts.cpu_s),
        ("window_repeated_spans", "Spans that came again, and count once.", counts.repeated),
        ("window_evicted_spans", "Spans that had to make room for newer ones.", counts.evicted),
        ("health_probes", "Health probes that engines served like requests: their spans are left out.", counts.probes),
        ("whole_traces", "Requests with the spans of their client and their engine in one trace.", counts.whole_traces),
    ):
        yield CounterMetricFamily(f"sidelight_{name}", what, value=count)
    what = (
        "Requests with the spans of their client in one trace and those of their engine in another, by the service at "
    )
    what += "which it breaks: new_trace, it begins another; not_passed_on, it is the last of the client's, or none is."
    yield _series(CounterMetricFamily, "sidelight_broken_traces", what, ("service", "how"), counts.broken_traces)
    refused = {kind: received[kind] for kind in REFUSED if kind in received}
    what = "Exports (bad_spans, off_clock: spans) not used, by why."
    yield _series(CounterMetricFamily, "sidelight_receiver_refused", what, ("kind",), refused)
    others = {name: received[name] for name in OTHER_SIGNALS if name in received}
    what = "Exports of other signals than spans that came; they are passed on, and not read."
    yield _series(CounterMetricFamily, "sidelight_receiver_other_exports", what, ("signal",), others)
    others = {name: received[f"{name}_dropped"] for name in others}
    what = "Of these, the ones that were not passed on: nothing to forward to, or it did not take them."
    yield _series(CounterMetricFamily, "sidelight_receiver_other_dropped", what, ("signal",), others)
    what = "What waits for the next collector of spans: exports, their bytes, and how many bytes may wait."
    yield _series(GaugeMetricFamily, "sidelight_receiver_forward_queue", what, ("what",), counts.forward_queue)
    if counts.read_to_s is not None:
        what = "For how long what the receiver logged has not been read: a little, unless more comes than can be read."
        yield GaugeMetricFamily("sidelight_watch_lag_seconds", what, value=max(0.0, monotonic() - counts.read_to_s))
    what = "How much is kept for requests that go on."
    yield _series(GaugeMetricFamily, "sidelight_window_size", what, ("what",), counts.sizes)


def _series(
    kind: type[Numbers], name: str, what: str, labels: Sequence[str], numbers: Mapping[Any, float | None]
) -> Numbers:
    """Return a family with a sample for each finite number, by its labels. A number that is None is left out."""
    family = kind(name, what, labels=labels)
    for key, number in numbers.items():
        if number is not None and math.isfinite(number):
            family.add_metric([key] if isinstance(key, str) else key, number)
    return family


def _histograms(
    name: str, what: str, labels: Sequence[str], histograms: Iterable[tuple[Sequence[str], Cumulative | None]]
) -> Histograms:
    """Return a family of the finite histograms, by their labels. A histogram that is None is left out."""
    family = Histograms(name, what, labels=labels)
    for values, histogram in histograms:
        if histogram is not None and math.isfinite(histogram.sum_s + sum(histogram.counts)):
            upper = (*(str(bound) for bound in histogram.bounds_s), "+Inf")
            buckets = [
                (bound, count, *_exemplar(histogram.exemplars.get(place)))
                for place, (bound, count) in enumerate(zip(upper, accumulate(histogram.counts), strict=True))
            ]
            family.add_metric(values, buckets, histogram.sum_s)
            family.histograms[len(family.samples) - 1] = histogram
    return family


def _exemplar(request: Exemplar | None) -> tuple[()] | tuple[samples.Exemplar]:
    """Return the exemplar of a bucket, if any, as OpenMetrics has it; the older text format leaves it out."""
    if request is None:
        return ()
    return (samples.Exemplar({"trace_id": request.trace_id}, request.value_s, request.at_s),)
