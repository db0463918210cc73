"""M1 to M8 of asiai's Benchmark Metrics Specification 0.4.0, with its invariants and stability classes.

Its table knows two sources a metric: Ollama's own durations, and the client's clock for OpenAI-compatible servers,
which starts before the request is made. A workload class stands for its prompt type. Where it writes a speed of 0.0,
for a generation below 10 ms, there is none here, and the number of such replies is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import to_builtins

from loadgen.requests.metrics import counts, span_ms
from loadgen.requests.table import RequestLog
from rundir.columns import Floats
from rundir.stats import Missing, describe, finite, known

SHORTEST_GENERATION_MS = 10.0
STABLE_CV_PERCENT, VARIABLE_CV_PERCENT = 5.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AsiaiColumns:
    """M1 to M5 of each request, float64[n], NaN where missing; by_server and estimated are bool[n]."""

    tok_per_sec: Floats
    ttft_ms: Floats
    total_duration_ms: Floats
    tokens_generated: Floats
    generation_duration_ms: Floats
    by_server: npt.NDArray[np.bool_]
    estimated: npt.NDArray[np.bool_]


def asiai_columns(log: RequestLog) -> AsiaiColumns:
    """M1 to M5 of each request.

    M4 is the server's count, else the log's estimate from the text's characters, never the number of chunks.
    """
    asked_ns = np.where(log.dispatch_ns >= 0, log.dispatch_ns, log.submit_ns)
    by_server = (log.timings_source == "ollama") & ~np.isnan(
        log.server_prefill_ms + log.server_decode_ms + log.server_e2e_ms
    )
    total_ms = np.where(by_server, log.server_e2e_ms, span_ms(asked_ns, log.end_ns))
    ttft_ms = np.where(by_server, log.server_prefill_ms, span_ms(asked_ns, log.first_output_ns))
    generation_ms = np.where(by_server, log.server_decode_ms, np.maximum(total_ms - ttft_ms, 0.0))
    tokens = counts(log.output_tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(generation_ms >= SHORTEST_GENERATION_MS, tokens / (generation_ms / 1e3), np.nan)
    return AsiaiColumns(
        tok_per_sec=speed,
        ttft_ms=ttft_ms,
        total_duration_ms=total_ms,
        tokens_generated=tokens,
        generation_duration_ms=generation_ms,
        by_server=by_server,
        estimated=log.output_tokens_source == "estimate",
    )


def pooled_std(values: Floats, groups: npt.NDArray[np.object_]) -> float | Missing:
    """M8: the root of the mean, over groups of two values or more, of each group's population variance."""
    told = ~np.isnan(values)
    variances = [
        float(own.var())
        for group in sorted(set(groups[told].tolist()))
        if len(own := values[told & (groups == group)]) > 1
    ]
    if not variances:
        return Missing(reason="no workload class has two requests with a speed")
    return float(np.sqrt(np.mean(variances)))


def stability(cv_percent: float) -> str:
    """Its classes: below 5 % stable, below 10 % variable, else unstable."""
    if cv_percent < STABLE_CV_PERCENT:
        return "stable"
    return "variable" if cv_percent < VARIABLE_CV_PERCENT else "unstable"


def asiai(ok: RequestLog, *, power_watts: float | Missing) -> dict[str, Any]:
    """M1 to M8 over the requests that ended ok, for summary.json.

    power_watts   mean power of the GPUs during the run
    tok_per_sec   its primary figure is the median, p50
    """
    columns = asiai_columns(ok)
    short = columns.generation_duration_ms < SHORTEST_GENERATION_MS
    why_slow = "no reply generated for 10 ms or more and told its tokens"
    return {
        "tok_per_sec": to_builtins(describe(columns.tok_per_sec, why_slow)),
        "ttft_ms": to_builtins(describe(columns.ttft_ms, "no reply told when its first token came")),
        "total_duration_ms": to_builtins(describe(columns.total_duration_ms, "no request succeeded")),
        "tokens_generated": to_builtins(describe(columns.tokens_generated, "no reply told its tokens")),
        "generation_duration_ms": to_builtins(describe(columns.generation_duration_ms, "no reply came in chunks")),
        **_spread_and_power(columns, ok, power_watts),
        "below_10_ms": int(short.sum()),
        "sources": {
            "server_durations": int(columns.by_server.sum()),
            "client_clock": int((~columns.by_server).sum()),
            "tokens_by_server": int(((ok.output_tokens >= 0) & ~columns.estimated).sum()),
            "tokens_estimated": int(columns.estimated.sum()),
        },
        "invariants": invariants(columns),
    }


def invariants(columns: AsiaiColumns) -> dict[str, Any]:
    """total >= ttft, always, and total = ttft + generation, of each request that has all three.

    The second holds exactly by the client's clock; Ollama's total has its load time and other work besides, which
    `greatest_residual_ms` shows.
    """
    residual_ms = known(columns.total_duration_ms - columns.ttft_ms - columns.generation_duration_ms)
    margin_ms = known(columns.total_duration_ms - columns.ttft_ms)
    return {
        "total_at_least_ttft": {"checked": len(margin_ms), "violated": int((margin_ms < 0).sum())},
        "total_is_ttft_plus_generation": {
            "checked": len(residual_ms),
            "greatest_residual_ms": float(np.abs(residual_ms).max()) if len(residual_ms) else None,
        },
    }


def _spread_and_power(columns: AsiaiColumns, ok: RequestLog, power_watts: float | Missing) -> dict[str, Any]:
    missing: dict[str, str] = {}
    speeds = known(columns.tok_per_sec)
    mean = float(speeds.mean()) if len(speeds) else float("nan")
    spread = pooled_std(columns.tok_per_sec, ok.workload_class)
    cv_percent = float("nan") if isinstance(spread, Missing) else 100 * spread / mean
    if isinstance(spread, Missing):
        missing |= dict.fromkeys(("std_dev_tok_s", "cv_percent", "stability"), spread.reason)
    watts = float("nan") if isinstance(power_watts, Missing) else power_watts
    if isinstance(power_watts, Missing):
        missing |= dict.fromkeys(("power_watts", "tok_per_sec_per_watt"), power_watts.reason)
    elif not len(speeds):
        missing["tok_per_sec_per_watt"] = "no reply had a speed"
    return {
        "power_watts": finite(watts),
        "tok_per_sec_per_watt": finite(mean / watts) if watts > 0 else None,
        "std_dev_tok_s": None if isinstance(spread, Missing) else spread,
        "cv_percent": finite(cv_percent),
        "stability": stability(cv_percent) if np.isfinite(cv_percent) else None,
        **({"missing": missing} if missing else {}),
    }
