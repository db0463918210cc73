"""Tokens held at once by requests in flight: by the client's stamps, and by the engine's page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidelight.correlator.load.steady import SteadyWindow
from sidelight.correlator.statistics.server_load import gauge_samples
from sidelight.loadgen.requests.metrics import input_tokens, request_metrics
from sidelight.methodology.study.model import Finished, StepData


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTokens:
    """Tokens that a level held at once, and the TTFT P99 of the first wave.

    `tokens` are of the requests in flight, by stamps; `cached_tokens` are in the KV cache, by the page.
    """

    tokens: float | None
    cached_tokens: float | None
    first_wave_ms: float | None


def held_by(each: Finished, data: StepData) -> HeldTokens:
    log, window = data.requests, each.outcome.window
    first = np.argsort(log.submit_ns, kind="stable")[: round(each.step.level)]
    ttft_ms = request_metrics(log).ttft_ms[first]
    ttft_ms = ttft_ms[np.isfinite(ttft_ms)]
    return HeldTokens(
        tokens=_tokens_in_flight(data, window) if window else None,
        cached_tokens=_cached_tokens(data, window) if window else None,
        first_wave_ms=float(np.quantile(ttft_ms, 0.99)) if len(ttft_ms) else None,
    )


def _tokens_in_flight(data: StepData, window: SteadyWindow) -> float:
    """Return the mean tokens (input and output so far) of all requests in flight."""
    log = data.requests
    sent = log.submit_ns >= 0
    prompts = np.nan_to_num(input_tokens(log))
    ended_ns = np.where(log.end_ns >= 0, log.end_ns, window.end_ns)
    chunks = np.diff(log.chunk_start)
    since = np.concatenate([log.submit_ns[sent], log.chunk_ns])
    until = np.concatenate([ended_ns[sent], np.repeat(ended_ns, chunks)])
    each = np.maximum(log.output_tokens, 0) / np.maximum(chunks, 1)
    tokens = np.concatenate([prompts[sent], np.repeat(each, chunks)])
    overlap = np.minimum(until, window.end_ns) - np.maximum(since, window.start_ns)
    return float((tokens * np.maximum(overlap, 0)).sum()) / (window.end_ns - window.start_ns)


def _cached_tokens(data: StepData, window: SteadyWindow) -> float | None:
    """Return mean KV usage times the cache's size, where the page states its blocks; of one engine alone."""
    usage = gauge_samples(data.endpoints, "kv_cache_usage")
    inside = (usage.at_ns >= window.start_ns) & (usage.at_ns <= window.end_ns) & np.isfinite(usage.amount)
    sizes = [
        int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        for endpoint in data.endpoints
        for series in endpoint.series
        if series.name.endswith("cache_config_info")
        and (labels := dict(series.labels)).get("num_gpu_blocks", "").isdigit()
        and labels.get("block_size", "").isdigit()
    ]
    return float(usage.amount[inside].mean()) * sizes[0] if len(sizes) == 1 and inside.any() else None
