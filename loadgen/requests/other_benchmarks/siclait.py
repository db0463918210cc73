"""The eight metrics of P. Siclait's "LLM Inference Performance Benchmarking from Scratch", by its script.

The clock of a request starts before its connection is opened, the first response is the first content that is not
empty (blanks count), and deviations are those of a population. Its script tokenizes prompts and outputs itself; here
the input's length is the declared tokenizer's, which it was made with, and the output's the server's usage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.requests.metrics import counts, span_ms
from loadgen.requests.table import RequestLog
from rundir.columns import Floats
from rundir.stats import known

PERCENTILES = {"p75": 0.75, "p90": 0.90, "p99": 0.99}


def siclait(ok: RequestLog) -> dict[str, Any]:
    """The eight metrics over the requests that ended ok, for summary.json."""
    asked_ns = np.where(ok.dispatch_ns >= 0, ok.dispatch_ns, ok.submit_ns)
    inputs = np.where(ok.declared_input_tokens >= 0, counts(ok.declared_input_tokens), counts(ok.input_tokens))
    tokens = counts(ok.output_tokens)
    ttft_ms, latency_ms = span_ms(asked_ns, ok.first_output_ns), span_ms(asked_ns, ok.last_token_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        itl_ms = np.where(tokens >= 2, (latency_ms - ttft_ms) / (tokens - 1), np.nan)
        tps = np.where(latency_ms > 0, tokens / (latency_ms / 1e3), np.nan)
    answered = (asked_ns >= 0) & (ok.last_token_ns >= 0)
    duration_s = (
        float(np.ptp([asked_ns[answered].min(), ok.last_token_ns[answered].max()]) / 1e9) if answered.any() else 0.0
    )
    return {
        "ttft_ms": _statistics(ttft_ms, "no reply came in chunks"),
        "request_latency_ms": _statistics(latency_ms, "no reply came in chunks"),
        "itl_ms": _statistics(itl_ms, "no reply in chunks told two tokens or more"),
        "request_output_tps": _statistics(tps, "no reply in chunks told its usage"),
        "input_tokens": _statistics(inputs, "neither the plan nor a reply told it"),
        "output_tokens": _statistics(tokens, "no reply told its usage"),
        "duration_s": duration_s or None,
        **_rates(tokens[answered], duration_s),
    }


def _rates(tokens: Floats, duration_s: float) -> dict[str, Any]:
    rates: dict[str, Any] = {"output_tps": None, "requests_per_s": None}
    if not duration_s:
        return {**rates, "missing": dict.fromkeys(rates, "no reply came in chunks")}
    rates["requests_per_s"] = len(tokens) / duration_s
    silent = int(np.isnan(tokens).sum())
    if silent:
        return {**rates, "missing": {"output_tps": f"{silent} of {len(tokens)} replies told no usage"}}
    return {**rates, "output_tps": float(tokens.sum()) / duration_s}


def _statistics(values: Floats, why_empty: str) -> dict[str, Any]:
    flat = known(values)
    if not len(flat):
        return {"count": 0, **dict.fromkeys(["mean", "std", "min", "max", *PERCENTILES]), "missing": why_empty}
    quantiles = np.quantile(flat, list(PERCENTILES.values())).tolist()
    return {
        "count": len(flat),
        "mean": float(flat.mean()),
        "std": float(flat.std()),
        "min": float(flat.min()),
        "max": float(flat.max()),
        **dict(zip(PERCENTILES, quantiles, strict=True)),
    }
