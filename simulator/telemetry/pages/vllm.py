"""The engine's `/metrics` page, as in vLLM 0.32.

It has the names, labels, buckets and moments of observation of that version.

Moments: time to first token and prompt tokens when a prefill completes; inter-token latency and generation tokens at
every output; queue, prefill, decode, inference and end-to-end time, sizes and reasons when a request finishes; gauges
after every step, so an idle engine keeps its last values. Aborted requests never reach what is observed at finish.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.utils import floatToGoString

from sidelight.simulator.engine.history import PrefillCompleted, RequestRecord, StepOutcome
from sidelight.simulator.settings import EngineSettings

VERSION = "0.32.0"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
TOKEN_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COPIES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

#: Short name: (documentation, bounds); no bounds stand for the 1-2-5 series up to max_model_len.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", ()),
    "request_generation_tokens": ("Number of generation tokens processed.", ()),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _STEP_TOKENS),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", ()),
    "request_params_n": ("Histogram of the n request parameter.", _COPIES),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", ()),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", TOKEN_GAP_S),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        TOKEN_GAP_S,
    ),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", REQUEST_S),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", REQUEST_S),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", REQUEST_S),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", REQUEST_S),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", REQUEST_S),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", _PREEMPTIONS),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        (),
    ),
}
_COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}
_GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_HOST_GAUGES = {"kv_offload_cpu_cache_usage_perc": "Used share of the CPU's KV cache. 1 means 100 percent usage."}
#: Short name: (documentation, label, its values).
_SPLIT_COUNTERS = {
    "prompt_tokens_by_source": (
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "request_success": (
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
}
# What an engine with a role shows besides, and of these the one that loads KV caches; the counter also one with host
# memory behind its KV cache.
_PAIR_HISTOGRAMS = {
    "nixl_xfer_time_seconds": (
        "Histogram of transfer duration for NIXL KV Cache transfers.",
        (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5),
    )
}
_PAIR_COUNTERS = {
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    )
}
_DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "Number of spec decoding drafts.",
    "spec_decode_num_draft_tokens": "Number of draft tokens.",
    "spec_decode_num_accepted_tokens": "Number of accepted tokens.",
}
_KV_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
_LABELS = ("model_name", "engine")


def one_two_five_bounds(limit: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 and so on, up to `limit`."""
    bounds = (float(mantissa * 10**exponent) for exponent in range(len(str(limit))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= limit)


class VllmPage:
    """Metrics of one vLLM engine, in a registry of their own."""

    def __init__(self, model: str, settings: EngineSettings, *, start_s: float | None = None) -> None:
        """Register every family at zero, as vLLM shows them before the first request.

        With `start_s` the engine is in no process, and of one only such a start is shown.
        """
        self.registry, self._process = CollectorRegistry(), CollectorRegistry()
        if start_s is None:
            GCCollector(registry=self._process)
            PlatformCollector(registry=self._process)
            ProcessCollector(registry=self._process)
        else:
            started = "Start time of the process since unix epoch in seconds."
            Gauge("process_start_time_seconds", started, registry=self._process).set(start_s)
        self._heads: list[str] = []  # what stands before each number of the page
        self._state: StepOutcome | None = None
        self._settings = settings
        labels = (model, "0")
        self._gauges = {
            name: Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*labels)
            for name, text in (_GAUGES | (_HOST_GAUGES if settings.kv_host_blocks else {})).items()
        }
        reasons = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason: capacity (no room) or deferred (transient constraints).",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
        self._by_reason = [reasons.labels(*labels, reason) for reason in ("capacity", "deferred")]
        self._by_stage: list[Gauge] = []
        if settings.kv_role == "decode":
            text = "Number of waiting requests by async KV load stage."
            stages = Gauge("vllm:num_requests_kv_fetch_by_stage", text, (*_LABELS, "stage"), registry=self.registry)
            self._by_stage = [stages.labels(*labels, stage) for stage in _KV_STAGES]
        self._counters = {
            name: Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*labels)
            for name, text in (_COUNTERS | (_DRAFT_COUNTERS if settings.draft_tokens else {})).items()
        }
        # The series of each family, in the order of the page.
        self._families: list[list[Any]] = [*([gauge] for gauge in self._gauges.values()), self._by_reason]
        self._families.append(self._by_stage)
        self._families += [[counter] for counter in self._counters.values()]
        for name, (text, label, values) in _split_counters(settings).items():
            family = Counter(f"vllm:{name}", text, (*_LABELS, label), registry=self.registry)
            series = {f"{name}:{value}": family.labels(*labels, value) for value in values}
            self._counters |= series
            self._families.append(list(series.values()))
        sizes = one_two_five_bounds(settings.max_model_len)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=bounds or sizes, registry=self.registry).labels(
                *labels
            )
            for name, (text, bounds) in (_HISTOGRAMS | (_PAIR_HISTOGRAMS if settings.kv_role else {})).items()
        }
        self._families += [[histogram] for histogram in self._histograms.values()]
        self._families.append([_show_cache_config(settings, self.registry)])
        if start_s is not None:
            for metric in (*self._counters.values(), *self._histograms.values()):
                vars(metric)["_created"] = start_s

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type: the text format 0.0.4, whatever is accepted.

        All series are there from the start, so that a page differs from the first one by its numbers alone.
        """
        del accept
        if not self._heads:
            text = generate_latest(self.registry).decode()
            self._heads = re.findall(r"((?:#.*\n)*[^#\n].* )\S+\n", text)
        if (state := self._state) is not None:
            self._gauges["num_requests_running"].set(state.running)
            self._gauges["num_requests_waiting"].set(state.waiting)
            self._gauges["kv_cache_usage_perc"].set(state.used_blocks / self._settings.kv_blocks)
            if self._settings.kv_host_blocks:
                used = state.host_blocks / self._settings.kv_host_blocks
                self._gauges["kv_offload_cpu_cache_usage_perc"].set(used)
            deferred = state.put_off + state.kv_fetch.in_progress + state.kv_fetch.completed_waiting
            self._by_reason[0].set(state.waiting - deferred)
            self._by_reason[1].set(deferred)
            for stage, requests in zip(self._by_stage, state.kv_fetch[:3], strict=False):
                stage.set(requests)
        texts = map(_number_text, chain.from_iterable(map(_numbers, self._families)))
        lines = [f"{head}{text}\n" for head, text in zip(self._heads, texts, strict=True)]
        return generate_latest(self._process) + "".join(lines).encode(), CONTENT_TYPE

    def observe(self, outcome: StepOutcome) -> None:
        self._state = outcome
        for admitted in outcome.admissions:
            self._counters["prefix_cache_queries"].inc(admitted.prompt_tokens * self._settings.prefix_caching)
            self._counters["prefix_cache_hits"].inc(admitted.cached_tokens - admitted.host_tokens)
        if outcome.retractions:
            self._counters["num_preemptions"].inc(len(outcome.retractions))
        # vLLM makes no iteration statistics for a step without output (a chunk in the middle of a prefill).
        if outcome.tokens:
            computed = sum(
                first.prompt_tokens - first.cached_tokens - first.loaded_tokens for first in outcome.first_tokens
            )
            self._histograms["iteration_tokens_total"].observe(computed + len(outcome.tokens))
            self._counters["generation_tokens"].inc(len(outcome.tokens))
        for drafted, accepted in outcome.drafts:
            self._counters["spec_decode_num_drafts"].inc()
            self._counters["spec_decode_num_draft_tokens"].inc(drafted)
            self._counters["spec_decode_num_accepted_tokens"].inc(accepted)
            for place in range(accepted):
                self._counters[f"spec_decode_num_accepted_tokens_per_pos:{place}"].inc()
        self._observe_first_tokens(outcome.first_tokens)
        # Those that had a token in the step before, too, have the same interval.
        buckets, total = _buckets_of(self._histograms["inter_token_latency_seconds"])
        intervals = Counted(token.interval_ns for token in outcome.tokens if token.interval_ns is not None)
        for interval_ns, count in intervals.items():
            buckets[bisect_left(TOKEN_GAP_S, interval_ns / 1e9)].inc(count)
            total.inc(count * interval_ns / 1e9)
        for load_s in outcome.kv_fetch.load_s:
            self._histograms["nixl_xfer_time_seconds"].observe(load_s)
        for record in outcome.finished:
            self._observe_finish(record)

    def abort(self, record: RequestRecord) -> None:
        """Ignore an aborted request: nothing of it is shown beyond its earlier observations."""

    def _observe_first_tokens(self, first_tokens: Sequence[PrefillCompleted]) -> None:
        for first in first_tokens:
            self._histograms["time_to_first_token_seconds"].observe(first.ttft_ns / 1e9)
            self._counters["prompt_tokens"].inc(first.prompt_tokens)
            cached_tokens = first.cached_tokens + first.loaded_tokens
            self._counters["prompt_tokens_cached"].inc(cached_tokens)
            self._counters["prompt_tokens_by_source:local_compute"].inc(first.prompt_tokens - cached_tokens)
            device_tokens = first.cached_tokens - first.host_tokens
            self._counters["prompt_tokens_by_source:local_cache_hit"].inc(device_tokens)
            self._counters["prompt_tokens_by_source:external_kv_transfer"].inc(first.loaded_tokens + first.host_tokens)
            if self._settings.kv_role or self._settings.kv_host_blocks:
                connector = "p2p" if self._settings.kv_async else "external_unspecified"
                self._counters["prompt_tokens_cached_by_source:device"].inc(device_tokens)
                self._counters["prompt_tokens_cached_by_source:host"].inc(first.host_tokens)
                self._counters[f"prompt_tokens_cached_by_source:{connector}"].inc(first.loaded_tokens)

    def _observe_finish(self, record: RequestRecord) -> None:
        self._counters[f"request_success:{record.finish_reason}"].inc()
        observations = {
            "request_queue_time_seconds": record.queue_s,
            "request_prefill_time_seconds": record.prefill_s,
            "request_decode_time_seconds": record.decode_s,
            "request_inference_time_seconds": record.inference_s,
            "e2e_request_latency_seconds": record.e2e_s,
            "request_time_per_output_token_seconds": record.decode_s / max(1, record.output_tokens - 1),
            "request_prompt_tokens": record.prompt_tokens,
            "request_generation_tokens": record.output_tokens,
            "request_max_num_generation_tokens": record.output_tokens,
            "request_prefill_kv_computed_tokens": record.prompt_tokens - record.cached_tokens - record.loaded_tokens,
            "request_num_preemptions": record.preemptions,
            "request_params_n": 1,
            "request_params_max_tokens": record.max_tokens,
        }
        for name, value in observations.items():
            self._histograms[name].observe(value)


def _split_counters(settings: EngineSettings) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Return the counters with a label of their own that the engine shows."""
    places = tuple(map(str, range(settings.draft_tokens)))
    drafts = {"spec_decode_num_accepted_tokens_per_pos": ("Accepted tokens per draft position.", "position", places)}
    return (
        _SPLIT_COUNTERS
        | (_PAIR_COUNTERS if settings.kv_role or settings.kv_host_blocks else {})
        | (drafts if places else {})
    )


_number_text = lru_cache(maxsize=4096)(floatToGoString)
_number_of, _value_of = attrgetter("_value"), attrgetter("_value._value")
_buckets_of, _created_of = attrgetter("_buckets", "_sum"), attrgetter("_created")


def _numbers(family: Sequence[Any]) -> list[float]:
    """Return the numbers of a family, in the order of the page. Its `collect` would make an object of each number."""
    numbers: list[float] = []
    for series in family:
        if type(series) is Histogram:
            buckets, total = _buckets_of(series)
            counts = list(accumulate(map(_number_of, buckets)))
            numbers += [*counts, counts[-1], _number_of(total)]
        else:
            numbers.append(_value_of(series))
    return numbers + [_created_of(series) for series in family if type(series) is not Gauge]


def _show_cache_config(settings: EngineSettings, registry: CollectorRegistry) -> Gauge:
    """Register the cache's configuration as labels of a gauge that is always 1; vLLM puts no model_name there."""
    labels = {
        "block_size": settings.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": settings.prefix_caching,
        "engine": 0,
        "kv_cache_size_tokens": settings.kv_blocks * settings.block_size,
        "num_gpu_blocks": settings.kv_blocks,
    }
    info = Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels, registry=registry)
    shown = info.labels(**{name: str(value) for name, value in labels.items()})
    shown.set(1)
    return shown
