"""TTFT, ITL, TPOT, E2E, throughput and goodput, by the draft's definitions, from a `RequestLog`; all pure.

- ttft   first_token - submit
- e2e    last_token - submit; where a reply has no token times (not streamed), end - submit
- tpot   (last_token - first_token) / (output_tokens - 1); none below two tokens
- itl    gaps between consecutive content chunks of one request, from its first token on; a true inter-token latency
         only where chunks hold one token each, else "time between chunks" (itl-chunked, itl-sse-measurement)
- request_output_tps  output_tokens / e2e
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.log import STATUSES, RequestLog, select

Float64s = npt.NDArray[np.float64]

QUANTILES = {
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.10,
    "p25": 0.25,
    "p50": 0.50,
    "p75": 0.75,
    "p90": 0.90,
    "p95": 0.95,
    "p99": 0.99,
    "p99_9": 0.999,
}
# Above this share of requests with as many chunks as tokens, chunk gaps are inter-token latencies.
SINGLE_TOKEN_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A number that is not there, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of count values; quantiles by linear interpolation, std of the sample (NaN for one value)."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    p1: float
    p5: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    p99_9: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Columns float64[n], a row a request of the log, NaN where missing; itl_ms float64[m] of all requests in a row."""

    ttft_ms: Float64s
    tpot_ms: Float64s
    e2e_ms: Float64s
    request_output_tps: Float64s
    itl_ms: Float64s


# Which requests (bool[n]) met the service level objectives.
Slo = Callable[[RequestLog, RequestMetrics], npt.NDArray[np.bool_]]


def request_metrics(log: RequestLog) -> RequestMetrics:
    """The metrics of each request, whatever its status; select the log first to look at some."""
    end_ns = np.where(log.last_token_ns >= 0, log.last_token_ns, log.end_ns)
    tokens = np.where(log.output_tokens >= 0, log.output_tokens, np.nan)
    e2e_ms = _span_ms(log.submit_ns, end_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_ms = np.where(tokens >= 2, _span_ms(log.first_token_ns, log.last_token_ns) / (tokens - 1), np.nan)
        tps = np.where((tokens > 0) & (e2e_ms > 0), tokens / (e2e_ms / 1e3), np.nan)
    return RequestMetrics(
        ttft_ms=_span_ms(log.submit_ns, log.first_token_ns),
        tpot_ms=tpot_ms,
        e2e_ms=e2e_ms,
        request_output_tps=tps,
        itl_ms=_gaps_ms(log),
    )


def schedule_lateness_ms(log: RequestLog) -> Float64s:
    """How late each request was dispatched, float64[n]: the generator's own error; 0 in a closed loop."""
    return _span_ms(log.scheduled_ns, log.dispatch_ns)


def single_token_ratio(log: RequestLog) -> float:
    """Share of the requests with known token counts that came in as many content chunks as tokens; NaN for none."""
    known = log.output_tokens > 0
    if not known.any():
        return float("nan")
    return float(np.mean(np.diff(log.chunk_start)[known] == log.output_tokens[known]))


def describe(values: npt.ArrayLike) -> Stats | Missing:
    """Statistics of the values that are not NaN; Missing when there is none."""
    flat = np.asarray(values, np.float64).ravel()
    flat = flat[~np.isnan(flat)]
    if not len(flat):
        return Missing(reason="no samples")
    return Stats(
        count=len(flat),
        mean=float(flat.mean()),
        std=float(flat.std(ddof=1)) if len(flat) > 1 else float("nan"),
        min=float(flat.min()),
        max=float(flat.max()),
        **dict(zip(QUANTILES, np.quantile(flat, list(QUANTILES.values())).tolist(), strict=True)),
    )


def stats_json(stats: Stats | Missing) -> dict[str, Any]:
    """Statistics for strict JSON: null where missing, and `missing` says why."""
    if isinstance(stats, Missing):
        names = ["mean", "std", "min", "max", *QUANTILES]
        return {"count": 0, **dict.fromkeys(names), "missing": stats.reason}
    block: dict[str, Any] = asdict(stats)
    if stats.count < 2:
        block |= {"std": None, "missing": "std: one value has no spread"}
    return block


def client_summary(
    log: RequestLog, *, start_ns: int | None = None, end_ns: int | None = None, slo: Slo | None = None
) -> dict[str, Any]:
    """The "client" object of summary.json, for the requests of `log`; strict JSON.

    Statistics are over requests with status ok. Throughput counts the ok requests that ended within the window, over
    its length; the window is from the first submission to the last response where it is not given.
    """
    ok = select(log, log.status == "ok")
    metrics = request_metrics(ok)
    ratio = single_token_ratio(ok)
    itl_name = "itl_ms" if ratio > SINGLE_TOKEN_RATIO else "time_between_chunks_ms"
    start_ns, end_ns = _window(log, start_ns, end_ns)
    blocks = {
        "ttft_ms": metrics.ttft_ms,
        "tpot_ms": metrics.tpot_ms,
        itl_name: metrics.itl_ms,
        "e2e_ms": metrics.e2e_ms,
        "request_output_tps": metrics.request_output_tps,
        "input_tokens": np.where(ok.input_tokens >= 0, ok.input_tokens, np.nan),
        "output_tokens": np.where(ok.output_tokens >= 0, ok.output_tokens, np.nan),
    }
    return {
        "window": {"start_ns": start_ns, "end_ns": end_ns},
        "requests": {"sent": len(log), **{name: int((log.status == name).sum()) for name in STATUSES}},
        "errors": _errors_by_kind(log),
        **{name: stats_json(_described(values, len(ok))) for name, values in blocks.items()},
        "chunks": {"single_token_ratio": _finite(ratio), **_preludes(ok)},
        "throughput": _throughput(ok, metrics, start_ns, end_ns, slo),
    }


def _described(values: Float64s, ok: int) -> Stats | Missing:
    stats = describe(values)
    if isinstance(stats, Missing):
        return replace(stats, reason="no request succeeded" if not ok else "no successful reply told it")
    return stats


def _preludes(ok: RequestLog) -> dict[str, int]:
    """Non-content events before the first token, which the draft wants noted."""
    return {
        "role_only_first": int(ok.role_only_first.sum()),
        "blank_before_first": int((ok.blank_before_first > 0).sum()),
    }


def _window(log: RequestLog, start_ns: int | None, end_ns: int | None) -> tuple[int | None, int | None]:
    starts, ends = log.submit_ns[log.submit_ns >= 0], log.end_ns[log.end_ns >= 0]
    if start_ns is None and len(starts):
        start_ns = int(starts.min())
    if end_ns is None and len(ends):
        end_ns = int(ends.max())
    return start_ns, end_ns


def _throughput(
    ok: RequestLog, metrics: RequestMetrics, start_ns: int | None, end_ns: int | None, slo: Slo | None
) -> dict[str, Any]:
    names = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "goodput_requests_per_s")
    result: dict[str, Any] = dict.fromkeys(names)
    if start_ns is None or end_ns is None or end_ns <= start_ns:
        reason = "nothing was sent and answered within the window"
        return {"duration_s": None, **result, "missing": dict.fromkeys(names, reason)}
    duration_s = (end_ns - start_ns) / 1e9
    within = (ok.end_ns >= start_ns) & (ok.end_ns <= end_ns)
    missing: dict[str, str] = {}
    for name, tokens in (("output_tokens_per_s", ok.output_tokens), ("input_tokens_per_s", ok.input_tokens)):
        silent = int((tokens[within] < 0).sum())
        if silent:
            missing[name] = f"{silent} of {int(within.sum())} replies told no usage"
        else:
            result[name] = int(tokens[within].sum()) / duration_s
    result["requests_per_s"] = int(within.sum()) / duration_s
    if slo is None:
        missing["goodput_requests_per_s"] = "no service level objective was given"
    else:
        result["goodput_requests_per_s"] = int((within & slo(ok, metrics)).sum()) / duration_s
    return {"duration_s": duration_s, **result, **({"missing": missing} if missing else {})}


def _errors_by_kind(log: RequestLog) -> dict[str, int]:
    """Requests that did not succeed, by the kind of error; most frequent first."""
    texts = log.error[(log.status != "ok") & (log.error != "")]
    kinds, counts = np.unique([str(text).partition(":")[0] for text in texts], return_counts=True)
    ranked = sorted(zip(kinds.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return dict(ranked)


def _gaps_ms(log: RequestLog) -> Float64s:
    if len(log.chunk_ns) < 2:
        return np.empty(0)
    row = np.repeat(np.arange(len(log)), np.diff(log.chunk_start))
    first_ns = log.first_token_ns[row]
    # Blank chunks before the first token, and whatever has no first token, are none of it.
    content = (first_ns >= 0) & (log.chunk_ns >= first_ns)
    same = (row[1:] == row[:-1]) & content[:-1] & content[1:]
    gaps_ms: Float64s = np.diff(log.chunk_ns)[same] / 1e6
    return gaps_ms


def _span_ms(start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64]) -> Float64s:
    return np.where((start_ns >= 0) & (end_ns >= 0), (end_ns - start_ns) / 1e6, np.nan)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
