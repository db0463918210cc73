"""The pages of TensorRT-LLM's `trtllm-serve` (2026 main): `/prometheus/metrics`, and the JSON of `/metrics`.

Moments: everything about a request when it finishes, all together. Records of iterations wait in a queue: a
collector sleeps until a request finishes, then takes record after record, and sleeps again once none came for 0.5 s.
So gauges are as old as that, and an idle engine keeps its last values. `/metrics` hands the collected records out
as JSON and forgets them. Nothing is shown of aborted requests, nor of what has not happened yet.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sidelight.simulator.engine.history import RequestRecord, StepOutcome
from sidelight.simulator.settings import EngineSettings
from sidelight.simulator.telemetry.pages.multiprocess import negotiated
from sidelight.simulator.telemetry.pages.vllm import FIRST_TOKEN_S, REQUEST_S, TOKEN_GAP_S

VERSION = "1.3.0"
COLLECTOR_PATIENCE_NS = 500_000_000
KEPT_ITERATIONS = 1000

_PREFILL_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_CACHED_TOKENS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "e2e_request_latency_seconds": ("Histogram of end to end request latency in seconds.", REQUEST_S),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", FIRST_TOKEN_S),
    "time_per_output_token_seconds": ("Histogram of time per output token in seconds.", TOKEN_GAP_S),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", REQUEST_S),
    "request_prefill_time_seconds": ("Histogram of prefill (context) phase duration in seconds.", _PREFILL_S),
    "request_decode_time_seconds": ("Histogram of decode (generation) phase duration in seconds.", REQUEST_S),
    "request_inference_time_seconds": ("Histogram of total inference duration in seconds.", REQUEST_S),
    "prompt_cached_tokens_per_request": ("Histogram of cached prompt tokens per request.", _CACHED_TOKENS),
    "prefill_batch_tokens": ("Histogram of total context tokens per iteration.", _PREFILL_TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Cumulative number of prompt (input) tokens processed.",
    "generation_tokens": "Cumulative number of generation (output) tokens produced.",
    "prompt_cached_tokens": "Process-lifetime total prompt tokens served from KV cache.",
    "num_requests_completed": "Total number of completed requests across iterations",
    "kv_cache_reused_blocks": "Cumulative number of KV cache blocks reused (cache hits)",
    "kv_cache_missed_blocks": "Cumulative number of KV cache blocks missed (cache misses)",
}
#: Short name: (documentation, where an iteration's record has the value).
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_requests_running": ("Number of active requests", ("numActiveRequests",)),
    "num_requests_waiting": ("Number of queued requests", ("numQueuedRequests",)),
    "max_num_active_requests": ("Maximum number of active requests", ("maxNumActiveRequests",)),
    "max_batch_size_static": ("Static maximum batch size", ("maxBatchSizeStatic",)),
    "max_batch_size_runtime": ("Runtime maximum batch size", ("maxBatchSizeRuntime",)),
    "max_num_tokens_runtime": ("Runtime maximum number of tokens", ("maxNumTokensRuntime",)),
    "kv_cache_hit_rate": ("KV cache hit rate", ("kvCacheStats", "cacheHitRate")),
    "kv_cache_max_blocks": ("Maximum number of KV cache blocks", ("kvCacheStats", "maxNumBlocks")),
    "kv_cache_free_blocks": ("Number of free KV cache blocks", ("kvCacheStats", "freeNumBlocks")),
    "kv_cache_used_blocks": ("Number of used KV cache blocks", ("kvCacheStats", "usedNumBlocks")),
    "kv_cache_tokens_per_block": ("Number of tokens per KV cache block", ("kvCacheStats", "tokensPerBlock")),
    "num_context_requests": (
        "Number of context (prefill) requests",
        ("inflightBatchingStats", "numContextRequests"),
    ),
    "num_generation_requests": (
        "Number of generation (decode) requests",
        ("inflightBatchingStats", "numGenRequests"),
    ),
    "num_paused_requests": ("Number of paused requests", ("inflightBatchingStats", "numPausedRequests")),
    "num_scheduled_requests": ("Number of scheduled requests", ("inflightBatchingStats", "numScheduledRequests")),
    "total_context_tokens": ("Total number of context tokens", ("inflightBatchingStats", "numCtxTokens")),
}
_RATIOS = {
    "kv_cache_utilization": "KV cache utilization",
    "iteration_latency_seconds": "Iteration latency in seconds",
    "prefill_batch_occupancy": "Fraction of max active slots occupied by context requests.",
}
_LABELS = ("model_name", "engine_type")


class TrtllmPage:
    """Metrics of one TensorRT-LLM engine, and the iteration records not yet fetched."""

    def __init__(self, model: str, settings: EngineSettings) -> None:
        """Begin with the metrics of a server before its first request."""
        self.registry = CollectorRegistry()
        self._settings = settings
        self._labels = {"model_name": model, "engine_type": "trtllm"}
        # In multiprocess mode a gauge has a series per process, distinguished by the label pid.
        self._gauge_labels = self._labels | {"pid": str(os.getpid())}
        self._counters = {
            name: Counter(f"trtllm_{name}", text, _LABELS, registry=self.registry) for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"trtllm_{name}", text, _LABELS, buckets=bounds, registry=self.registry)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        texts = {name: text for name, (text, _) in _GAUGES.items()} | _RATIOS
        self._gauges = {
            name: Gauge(f"trtllm_{name}", text, (*_LABELS, "pid"), registry=self.registry)
            for name, text in texts.items()
        }
        self._success = Counter(
            "trtllm_request_success",
            "Count of successfully processed requests.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._batch_size = Gauge(
            "trtllm_scheduled_batch_size",
            "Number of requests in the latest scheduled batch of a rank.",
            (*_LABELS, "rank", "pid"),
            registry=self.registry,
        ).labels(**self._gauge_labels, rank="0")
        # The one series of a request's families that is made at the start.
        self._counters["prompt_cached_tokens"].labels(**self._labels)
        self._show_configuration(settings)
        self._queue: deque[dict[str, Any]] = deque(maxlen=KEPT_ITERATIONS)
        self._collected: deque[dict[str, Any]] = deque(maxlen=KEPT_ITERATIONS)
        self._iterations = self._reused_blocks = self._missed_blocks = 0
        self._counted: dict[str, int] = {}
        self._awake = False
        self._last_ns = 0

    def page(self, accept: str = "") -> tuple[bytes, str]:
        return negotiated(self.registry, accept)

    def take_iterations(self) -> list[dict[str, Any]]:
        """Return the collected iteration records, oldest first, and forget them."""
        records = list(self._collected)
        self._collected.clear()
        return records

    def observe(self, outcome: StepOutcome) -> None:
        for record in outcome.finished:
            self._observe_finish(record)
        scheduled = outcome.prefill.requests + outcome.decode_requests
        self._batch_size.set(scheduled if outcome.running + outcome.waiting else 0)
        self._queue.append(self._iteration(outcome))
        if outcome.at_ns - self._last_ns > COLLECTOR_PATIENCE_NS:
            self._awake = False
        self._last_ns = outcome.at_ns
        self._awake = self._awake or bool(outcome.finished)
        while self._awake and self._queue:
            self._collect(self._queue.popleft())

    def abort(self, record: RequestRecord) -> None:
        """Ignore an aborted request: nothing of it is shown."""

    def _observe_finish(self, record: RequestRecord) -> None:
        self._success.labels(**self._labels, finished_reason=record.finish_reason).inc()
        spans_s = {
            "e2e_request_latency_seconds": record.e2e_s,
            "time_to_first_token_seconds": record.ttft_s,
            "request_prefill_time_seconds": record.prefill_s,
            "request_decode_time_seconds": record.decode_s,
            "request_inference_time_seconds": record.inference_s,
            "time_per_output_token_seconds": record.decode_s / max(1, record.output_tokens - 1),
        }
        # Of the spans only the queue time is shown when it is 0.
        for name, span_s in spans_s.items():
            if span_s > 0:
                self._histogram(name, span_s)
        self._histogram("request_queue_time_seconds", record.wait_s)
        self._histogram("prompt_cached_tokens_per_request", record.cached_tokens)
        self._count("prompt_tokens", record.prompt_tokens)
        self._count("generation_tokens", record.output_tokens)
        self._count("prompt_cached_tokens", record.cached_tokens)

    def _iteration(self, outcome: StepOutcome) -> dict[str, Any]:
        """Return an iteration's record; the KV cache's reused and missed blocks are totals since the start."""
        settings, prefill = self._settings, outcome.prefill
        for admission in outcome.admissions:
            reused = admission.cached_tokens // settings.block_size
            self._reused_blocks += reused
            self._missed_blocks += -(-admission.prompt_tokens // settings.block_size) - reused
        self._iterations += 1
        looked_up = self._reused_blocks + self._missed_blocks
        return {
            "iter": self._iterations,
            "iterLatencyMS": (outcome.at_ns - outcome.begin_ns) / 1e6,
            "numActiveRequests": outcome.running,
            "numQueuedRequests": outcome.waiting,
            "numCompletedRequests": len(outcome.finished),
            "maxNumActiveRequests": settings.max_num_seqs,
            "maxBatchSizeStatic": settings.max_num_seqs,
            "maxBatchSizeRuntime": settings.max_num_seqs,
            "maxNumTokensRuntime": settings.max_num_batched_tokens,
            "kvCacheStats": {
                "maxNumBlocks": settings.kv_blocks,
                "freeNumBlocks": settings.kv_blocks - outcome.used_blocks,
                "usedNumBlocks": outcome.used_blocks,
                "tokensPerBlock": settings.block_size,
                "cacheHitRate": self._reused_blocks / looked_up if looked_up else 0.0,
                "reusedBlocks": self._reused_blocks,
                "missedBlocks": self._missed_blocks,
            },
            "inflightBatchingStats": {
                "numContextRequests": prefill.requests,
                "numGenRequests": outcome.decode_requests,
                "numPausedRequests": 0,
                "numScheduledRequests": prefill.requests + outcome.decode_requests,
                "numCtxTokens": prefill.computed_tokens,
            },
        }

    def _collect(self, record: dict[str, Any]) -> None:
        self._collected.append(record)
        for name, (_, path) in _GAUGES.items():
            value = record
            for key in path:
                value = value[key]
            self._set(name, value)
        cache, batch = record["kvCacheStats"], record["inflightBatchingStats"]
        self._set("kv_cache_utilization", cache["usedNumBlocks"] / cache["maxNumBlocks"])
        self._set("iteration_latency_seconds", record["iterLatencyMS"] / 1e3)
        self._set("prefill_batch_occupancy", batch["numContextRequests"] / record["maxNumActiveRequests"])
        if batch["numCtxTokens"]:
            self._histogram("prefill_batch_tokens", batch["numCtxTokens"])
        self._count("num_requests_completed", record["numCompletedRequests"])
        self._count_up_to("kv_cache_reused_blocks", cache["reusedBlocks"])
        self._count_up_to("kv_cache_missed_blocks", cache["missedBlocks"])

    def _set(self, name: str, value: Any) -> None:
        self._gauges[name].labels(**self._gauge_labels).set(value)

    def _histogram(self, name: str, value: float) -> None:
        self._histograms[name].labels(**self._labels).observe(value)

    def _count(self, name: str, amount: float) -> None:
        if amount > 0:
            self._counters[name].labels(**self._labels).inc(amount)

    def _count_up_to(self, name: str, total: int) -> None:
        self._count(name, total - self._counted.get(name, 0))
        self._counted[name] = total

    def _show_configuration(self, settings: EngineSettings) -> None:
        configurations = {
            "model": {"model": self._labels["model_name"]},
            "parallel": {"tp_size": "1", "pp_size": "1"},
            "kv_cache": {"page_size": str(settings.block_size), "enable_block_reuse": "True"},
        }
        for name, values in configurations.items():
            labels = self._gauge_labels | values
            info = Gauge(f"trtllm_{name}_config_info", "Configuration info", tuple(labels), registry=self.registry)
            info.labels(**labels).set(1)
