"""What a summary tells of the client beyond the whole: by class, by input length, how tokens were delivered, whether
objectives were met, and the same run in the terms of other benchmarks. All pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import to_builtins

from loadgen.requests.delivery import delivery
from loadgen.requests.metrics import RequestMetrics, request_metrics
from loadgen.requests.other_benchmarks.asiai import asiai
from loadgen.requests.other_benchmarks.exo import exo
from loadgen.requests.other_benchmarks.siclait import siclait
from loadgen.requests.slo import Slo, slo_json
from loadgen.requests.summary import client_summary, window_of
from loadgen.requests.table import RequestLog
from rundir.columns import Floats, take
from rundir.stats import Missing, describe, finite, known

# The draft's recommended ranges of input tokens (ttft-conditional), by their lower ends.
INPUT_TOKEN_EDGES = (0, 256, 512, 1024, 2048, 4096)
NO_POWER = Missing(reason="the power of the engine's GPUs was not measured")


def client_details(
    log: RequestLog,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    slo: Slo | None = None,
    power_watts: float | Missing = NO_POWER,
    concurrency: int | None = None,
    barrier: bool = False,
) -> dict[str, Any]:
    """What joins `client_summary` in the "client" object of summary.json, for the same log and window; strict JSON.

    power_watts            mean power of the engine's GPUs over the window, or why it is not known
    concurrency, barrier   the closed loop's N (None in an open loop), and whether N were released at one instant
    """
    ok = take(log, log.status == "ok")
    metrics = request_metrics(ok)
    window = window_of(log, start_ns, end_ns)
    tailed = {"ttft_ms": metrics.ttft_ms, "e2e_ms": metrics.e2e_ms, "itl_ms": metrics.itl_ms}
    return {
        "jitter_ms": to_builtins(describe(metrics.jitter_ms, "no reply came in three chunks or more")),
        "max_pause_ms": to_builtins(describe(metrics.max_pause_ms, "no reply came in two chunks or more")),
        "tail_p99_over_p50": {name: _tail(values) for name, values in tailed.items()},
        "delivery": delivery(ok, metrics),
        "by_input_tokens": by_input_tokens(ok, metrics),
        "classes": by_class(log, *window, slo),
        "slo": None if slo is None else slo_json(slo, ok, metrics),
        "peers": {
            "siclait": siclait(ok),
            "asiai": asiai(ok, power_watts=power_watts),
            "exo": exo(log, concurrency=concurrency, barrier=barrier),
        },
    }


def by_class(log: RequestLog, start_ns: int | None, end_ns: int | None, slo: Slo | None) -> dict[str, Any]:
    """Counts, latencies and throughput of each workload class, by its name; together they are the whole log."""
    told = ("requests", "ttft_ms", "tpot_ms", "e2e_ms", "input_tokens", "output_tokens", "throughput")
    result = {}
    for name in sorted(set(log.workload_class.tolist())):
        own = client_summary(take(log, log.workload_class == name), start_ns=start_ns, end_ns=end_ns, slo=slo)
        result[name] = {key: own[key] for key in told}
    return result


def by_input_tokens(ok: RequestLog, metrics: RequestMetrics) -> dict[str, Any]:
    """TTFT by input length, in the draft's ranges (ttft-conditional); `below` is null for the last.

    A length is the server's usage, else the declared tokenizer's; a request without either is in no range.
    """
    tokens = np.where(ok.input_tokens >= 0, ok.input_tokens, ok.declared_input_tokens)
    place = np.searchsorted(INPUT_TOKEN_EDGES, tokens, side="right") - 1
    ranges = zip(INPUT_TOKEN_EDGES, (*INPUT_TOKEN_EDGES[1:], None), strict=True)
    bins = [
        {
            "from_tokens": first,
            "below_tokens": below,
            "requests": int((place == at).sum()),
            "ttft_ms": to_builtins(describe(metrics.ttft_ms[place == at], "no request of this length")),
        }
        for at, (first, below) in enumerate(ranges)
    ]
    return {
        "by_usage": int((ok.input_tokens >= 0).sum()),
        "by_declared": int(((ok.input_tokens < 0) & (tokens >= 0)).sum()),
        "unknown": int((tokens < 0).sum()),
        "bins": bins,
    }


def _tail(values: Floats) -> float | None:
    """p99 over p50: how heavy the tail is (itl-measurements); null for no values, or a median of 0."""
    flat = known(values)
    if not len(flat):
        return None
    p50, p99 = np.quantile(flat, [0.5, 0.99])
    return finite(p99 / p50) if p50 > 0 else None
