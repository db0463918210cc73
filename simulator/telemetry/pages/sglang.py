"""The `/metrics` page of SGLang 0.5.23, with its names, labels, buckets and moments of observation.

Moments, as recorded: queue time with the step of the first forward pass; time to first token with the first output;
inter-token latency once a token; end-to-end time, token counters and sizes when a request finishes; real-time counters
with every step. Gauges are as old as the scheduler's last report: every step with a prefill, of which the running
requests are those before it; every 40th of the others; when the engine falls idle after a report of running requests,
and every 30 s of idleness. The cache hit rate stays what the last prefill said, the sum of lengths what the last report
of decodes said. The tokenizer's families do not have the scheduler's rank labels.

What the warm-up request makes a real server show is there from the start, at zero (the request itself is not
counted); what has not happened yet (a token after the first, a cache hit, a retraction, an abort) has no series. A
liveness probe is in the scheduler's counts, not in the tokenizer's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sidelight.simulator.engine.history import RequestRecord, StepOutcome
from sidelight.simulator.settings import EngineSettings
from sidelight.simulator.telemetry.pages.multiprocess import negotiated

VERSION = "0.5.23"
DECODE_LOG_INTERVAL = 40
IDLE_REPORT_NS = 30 * 1_000_000_000

_QUEUE_S = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    *(200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)
_STAGE_S = tuple(0.001 * 1.62**exponent for exponent in range(30))
_FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_REQUEST_S = (*_FIRST_TOKEN_S, 600, 1200, 1800, 2400)
_TOKEN_GAP_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1.0, 2.0, 4.0, 6.0, 8.0),
)
_SIZES = (
    *(100, 300, 500, 700, *range(1000, 2001, 500), *range(3000, 10001, 1000), *range(12500, 30001, 2500)),
    *(35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000, 1100000),
)

_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
_GAUGES = {
    "num_running_reqs": "The number of running requests.",
    "num_used_tokens": "The number of used tokens.",
    "token_usage": "The token usage.",
    "full_token_usage": "The token usage of full attention layers.",
    "gen_throughput": "The generation throughput (token/s).",
    "num_queue_reqs": "The number of requests in the waiting queue.",
    "num_grammar_queue_reqs": "The number of requests in the grammar waiting queue.",
    "cache_hit_rate": "The prefix cache hit rate.",
    "decode_sum_seq_lens": "The sum of sequence lengths in the decode batch.",
    "kv_available_tokens": "The number of free KV cache slots.",
    "kv_evictable_tokens": "The number of KV cache slots with reusable data.",
    "kv_used_tokens": "The number of KV cache slots in use.",
    "max_total_num_tokens": "Maximum total number of tokens in the KV cache pool.",
    "page_size": "The KV cache page size.",
    "num_pages": "The number of KV cache pages.",
    "context_len": "The maximum context length.",
    "fwd_occupancy": "Forward pass GPU occupancy percentage.",
}
#: With a host cache.
_HOST_GAUGES = {
    "hicache_host_used_tokens": "The number of tokens in the host KV cache.",
    "hicache_host_total_tokens": "The size of the host KV cache in tokens.",
}
#: Gauges that have a series per process in multiprocess mode, distinguished by the label pid.
_GAUGES_BY_PROCESS = {
    "num_retracted_reqs": "The number of retracted requests.",
    "num_paused_reqs": "The number of paused requests by async weight sync.",
}
#: Short name: (documentation, extra labels). A scheduler's.
_SCHEDULER_COUNTERS = {
    "realtime_tokens_total": ("Total number of tokens processed (updated on each log interval).", ("mode",)),
    "prefill_effective_tokens_total": ("Prefill tokens without those of retracted requests.", ("mode",)),
    "num_retracted_requests_total": ("Total number of retracted requests.", ()),
    "num_retracted_input_tokens_total": ("Total number of retracted input tokens.", ()),
    "num_retracted_output_tokens_total": ("Total number of retracted output tokens.", ()),
}
_SCHEDULER_HISTOGRAMS = {
    "queue_time_seconds": ("Histogram of queueing time in seconds.", (), _QUEUE_S),
    "per_stage_req_latency_seconds": ("The latency of each stage of requests.", ("stage",), _STAGE_S),
}
_TOKENIZER_COUNTERS = {
    "prompt_tokens_total": ("Number of prefill tokens processed.", ("is_streaming",)),
    "generation_tokens_total": ("Number of generation tokens processed.", ("is_streaming",)),
    "num_requests_total": ("Number of requests processed.", ("is_streaming",)),
    "cached_tokens_total": ("Number of cached prompt tokens by source (device/host/storage).", ("cache_source",)),
    "num_aborted_requests_total": ("Number of requests aborted.", ()),
}
_TOKENIZER_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", ("is_streaming",), _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", (), _TOKEN_GAP_S),
    "request_time_per_output_token_seconds": (
        "Histogram of time per output token of a request in seconds.",
        ("is_streaming",),
        _TOKEN_GAP_S,
    ),
    "e2e_request_latency_seconds": (
        "Histogram of End-to-end request latency in seconds",
        ("is_streaming",),
        _REQUEST_S,
    ),
    "prompt_tokens_histogram": ("Histogram of prompt token length.", (), _SIZES),
    "uncached_prompt_tokens_histogram": ("Histogram of uncached (compute) prompt token length.", (), _SIZES),
    "generation_tokens_histogram": ("Histogram of generation token length.", (), _SIZES),
}


class SglangPage:
    """Metrics of one SGLang engine, and the time of the scheduler's last report.

    They are in a registry of their own.
    """

    def __init__(self, model: str, settings: EngineSettings, clock: Callable[[], int]) -> None:
        """Begin with the metrics of a server after its warm-up. `clock` gives ns, as in the outcomes."""
        self.registry = CollectorRegistry()
        self._block_size = settings.block_size
        self._tokens = settings.kv_blocks * settings.block_size
        self._host_gauges = _HOST_GAUGES if settings.kv_host_blocks else {}
        self._clock = clock
        self._reported_ns = self._decode_reported_ns = clock()
        self._decode_steps = self._decode_tokens = 0
        self._reported_running = 0
        self._state: StepOutcome | None = None
        self._process = {"pid": str(os.getpid())}
        self._tokenizer = {"model_name": model, "engine_type": settings.kv_role or "unified"}
        self._prefill_stage = "fake_output" if settings.kv_role == "decode" else "prefill_forward"
        self._sends_tokens = settings.kv_role != "prefill"
        self._scheduler = self._tokenizer | dict.fromkeys(_RANKS, "0")
        self._gauges = self._registered_gauges()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._register(tuple(self._scheduler), _SCHEDULER_COUNTERS, _SCHEDULER_HISTOGRAMS)
        self._register(tuple(self._tokenizer), _TOKENIZER_COUNTERS, _TOKENIZER_HISTOGRAMS)
        self._show_start(settings)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        state = self._state
        idle = state is None or not state.running + state.waiting
        if idle and self._clock() >= self._reported_ns + IDLE_REPORT_NS:
            # Several may be due; they all say the same.
            self._report_idle(self._clock())
        return negotiated(self.registry, accept)

    def observe(self, outcome: StepOutcome) -> None:
        self._state = outcome
        self._observe_scheduling(outcome)
        if outcome.decode_requests:
            self._scheduled("realtime_tokens_total", outcome.decode_requests, mode="decode")
        self._decode_tokens += outcome.decode_requests
        if outcome.prefill.requests:
            self._report_prefill(outcome)
        else:
            self._decode_steps += 1
            if not self._decode_steps % DECODE_LOG_INTERVAL:
                self._report_decode(outcome)
        if self._reported_running and not outcome.running + outcome.waiting:
            self._report_idle(outcome.at_ns)
        for first in outcome.first_tokens:
            self._stage(self._prefill_stage, first.prefill_ns)
            if first.role != "probe" and self._sends_tokens:
                labels = self._tokenizer | _streaming(streamed=first.streamed)
                self._histograms["time_to_first_token_seconds"].labels(**labels).observe(first.ttft_ns / 1e9)
        for token in outcome.tokens:
            if token.interval_ns is not None:
                gaps = self._histograms["inter_token_latency_seconds"].labels(**self._tokenizer)
                gaps.observe(token.interval_ns / 1e9)
        for record in outcome.finished:
            if record.finish_reason == "abort":
                self._counters["num_aborted_requests_total"].labels(**self._tokenizer).inc()
            if record.role != "probe":
                self._observe_finish(record)

    def abort(self, record: RequestRecord) -> None:
        """Count an abort at the engine's end; a request in the queue does not count as finished."""
        self._counters["num_aborted_requests_total"].labels(**self._tokenizer).inc()
        if record.scheduled_ns >= 0:
            self._observe_finish(record)

    def _observe_scheduling(self, outcome: StepOutcome) -> None:
        for intake_ns in outcome.intake_ns:
            self._stage("request_process", intake_ns)
        queue_time = self._histograms["queue_time_seconds"].labels(**self._scheduler)
        for admission in outcome.admissions:
            queue_time.observe(admission.queue_ns / 1e9)
        for chunk_ns in outcome.chunk_ns:
            self._stage("chunked_prefill", chunk_ns)
        if outcome.retractions:
            self._scheduled("num_retracted_requests_total", len(outcome.retractions))
            for retraction in outcome.retractions:
                self._scheduled("num_retracted_input_tokens_total", retraction.prompt_tokens)
                self._scheduled("num_retracted_output_tokens_total", retraction.output_tokens)

    def _report_prefill(self, outcome: StepOutcome) -> None:
        work = outcome.prefill
        self._scheduled("realtime_tokens_total", work.computed_tokens, mode="prefill_compute")
        if work.cached_tokens:
            self._scheduled("realtime_tokens_total", work.cached_tokens, mode="prefill_cache")
        self._scheduled("prefill_effective_tokens_total", work.fresh_computed_tokens, mode="input")
        device_tokens = work.fresh_cached_tokens - work.fresh_host_tokens
        self._scheduled("prefill_effective_tokens_total", device_tokens, mode="device_hit")
        self._scheduled("prefill_effective_tokens_total", work.fresh_host_tokens, mode="host_hit")
        self._gauges["cache_hit_rate"].set(work.cached_tokens / (work.cached_tokens + work.computed_tokens))
        self._report(outcome, running=outcome.decode_requests)

    def _report_decode(self, outcome: StepOutcome) -> None:
        seconds = (outcome.at_ns - self._decode_reported_ns) / 1e9
        self._gauges["gen_throughput"].set(self._decode_tokens / seconds if seconds > 0 else 0)
        self._gauges["decode_sum_seq_lens"].set(outcome.kv_tokens)
        self._gauges["num_retracted_reqs"].set(len(outcome.retractions))
        self._decode_tokens = 0
        self._decode_reported_ns = outcome.at_ns
        self._report(outcome, running=outcome.running)

    def _report(self, outcome: StepOutcome, *, running: int) -> None:
        used, evictable = (self._block_size * n for n in (outcome.used_blocks, outcome.evictable_blocks))
        values = {
            "num_running_reqs": running,
            "num_queue_reqs": outcome.waiting,
            "num_used_tokens": used,
            "token_usage": round(used / self._tokens, 2),
            "full_token_usage": used / self._tokens,
            "kv_used_tokens": used,
            "kv_evictable_tokens": evictable,
            "kv_available_tokens": self._tokens - used - evictable,
        }
        if self._host_gauges:
            values["hicache_host_used_tokens"] = self._block_size * outcome.host_blocks
        for name, value in values.items():
            self._gauges[name].set(value)
        self._reported_ns, self._reported_running = outcome.at_ns, running

    def _report_idle(self, now_ns: int) -> None:
        if self._state is not None:
            self._report(self._state, running=0)
        self._gauges["gen_throughput"].set(0)
        self._reported_ns = now_ns

    def _observe_finish(self, record: RequestRecord) -> None:
        plain, streaming = self._tokenizer, self._tokenizer | _streaming(streamed=record.streamed)
        generated = 0 if record.role == "prefix" else record.output_tokens
        self._counters["num_requests_total"].labels(**streaming).inc()
        self._counters["prompt_tokens_total"].labels(**streaming).inc(record.prompt_tokens)
        self._counters["generation_tokens_total"].labels(**streaming).inc(generated)
        by_source = {"device": record.cached_tokens - record.host_tokens, "host": record.host_tokens}
        for source, cached in by_source.items():
            if cached:
                self._counters["cached_tokens_total"].labels(**plain, cache_source=source).inc(cached)
        self._histograms["e2e_request_latency_seconds"].labels(**streaming).observe(record.e2e_s)
        if record.finish_reason != "abort" and record.output_tokens > 1:
            gap_s = record.decode_s / (record.output_tokens - 1)
            self._histograms["request_time_per_output_token_seconds"].labels(**streaming).observe(gap_s)
        sizes = {
            "prompt_tokens_histogram": record.prompt_tokens,
            "uncached_prompt_tokens_histogram": record.prompt_tokens - record.cached_tokens,
            "generation_tokens_histogram": generated,
        }
        for name, tokens in sizes.items():
            self._histograms[name].labels(**plain).observe(tokens)

    def _stage(self, stage: str, duration_ns: int) -> None:
        labels = self._scheduler | {"stage": stage}
        self._histograms["per_stage_req_latency_seconds"].labels(**labels).observe(duration_ns / 1e9)

    def _scheduled(self, name: str, amount: int, **labels: str) -> None:
        self._counters[name].labels(**self._scheduler, **labels).inc(amount)

    def _registered_gauges(self) -> dict[str, Gauge]:
        gauges = {}
        for names, labels in (
            (_GAUGES | self._host_gauges, self._scheduler),
            (_GAUGES_BY_PROCESS, self._scheduler | self._process),
        ):
            for name, text in names.items():
                family = Gauge(f"sglang:{name}", text, tuple(labels), registry=self.registry)
                gauges[name] = family.labels(**labels)
        return gauges

    def _register(
        self,
        labels: tuple[str, ...],
        counters: dict[str, tuple[str, tuple[str, ...]]],
        histograms: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]],
    ) -> None:
        for name, (text, extra) in counters.items():
            self._counters[name] = Counter(f"sglang:{name}", text, (*labels, *extra), registry=self.registry)
        for name, (text, extra, bounds) in histograms.items():
            self._histograms[name] = Histogram(
                f"sglang:{name}", text, (*labels, *extra), buckets=bounds, registry=self.registry
            )

    def _show_start(self, settings: EngineSettings) -> None:
        """Set the constants, and make the series that a first request would make."""
        constants = {
            "max_total_num_tokens": self._tokens,
            "page_size": self._block_size,
            "num_pages": settings.kv_blocks,
            "context_len": settings.max_model_len,
            "kv_available_tokens": self._tokens,
            "fwd_occupancy": math.nan,
        }
        if self._host_gauges:
            constants["hicache_host_total_tokens"] = settings.kv_host_blocks * self._block_size
        for name, value in constants.items():
            self._gauges[name].set(value)
        for mode in ("prefill_compute", "decode"):
            self._scheduled("realtime_tokens_total", 0, mode=mode)
        for mode in ("input", "device_hit", "host_hit", "storage_hit"):
            self._scheduled("prefill_effective_tokens_total", 0, mode=mode)
        self._histograms["queue_time_seconds"].labels(**self._scheduler)
        for stage in ("request_process", self._prefill_stage):
            self._histograms["per_stage_req_latency_seconds"].labels(**self._scheduler, stage=stage)
        for name, (_, extra, _) in _TOKENIZER_HISTOGRAMS.items():
            if name != "inter_token_latency_seconds" and (self._sends_tokens or name != "time_to_first_token_seconds"):
                self._histograms[name].labels(**self._tokenizer, **(_streaming(streamed=False) if extra else {}))
        for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_total"):
            self._counters[name].labels(**self._tokenizer, **_streaming(streamed=False))


def _streaming(*, streamed: bool) -> dict[str, str]:
    return {"is_streaming": "true" if streamed else "false"}
