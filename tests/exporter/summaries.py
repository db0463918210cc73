"""Summaries for the tests of the report: the shape of a real run's, small and of round numbers."""

from __future__ import annotations

from typing import Any

from correlator.associate import Association
from correlator.decompose import Breakdown, OtherParts
from exporter.breakdown import correlation

BLOCK = {"count": 100, "mean": 200.0, "p50": 180.0, "p90": 350.5, "p95": 400.0, "p99": 1234.5, "max": 2000.25}
ASSOCIATION = Association(
    client="ttft_ms", server="requests_waiting", lag_s=0.25, rho=0.88, ci95=(0.62, 0.97), rho_lag0=0.84, pairs=100
)
OTHER = OtherParts(outside_engine_ms=5.0, engine_front_end_ms=13.0, blank_output_ms=2.0)


def correlated(*, server_requests: int = 100, ok: int = 100, other: OtherParts | None = OTHER) -> dict[str, Any]:
    """100 requests of 200 ms to the first token: 150 queue, 30 prefill, 20 other."""
    whole = Breakdown(
        start_ns=0,
        end_ns=10**10,
        client_requests=100,
        server_requests=server_requests,
        coverage=server_requests / 100,
        ttft_ms=200.0,
        queue_ms=150.0,
        prefill_ms=30.0,
        other_ms=20.0,
        missing=None,
        other=other,
    )
    return correlation(whole, [], [ASSOCIATION], ok=ok)


def uncorrelated(reason: str) -> dict[str, Any]:
    """The client's TTFT is known, nothing of the server's part in it."""
    whole = Breakdown(
        start_ns=0,
        end_ns=10**10,
        client_requests=100,
        server_requests=0,
        coverage=None,
        ttft_ms=200.0,
        queue_ms=None,
        prefill_ms=None,
        other_ms=None,
        missing=reason,
    )
    return correlation(whole, [], [("ttft_ms", "requests_waiting", "the gauge never changed")], ok=100)


def histogram(
    mean_s: float, p50_s: float | None, low_s: float = 0.0, high_s: float | None = None, *, resolved: bool = True
) -> dict[str, Any]:
    if p50_s is None:
        stats: dict[str, float] = {}
    else:
        stats = {"p50": p50_s, "p99": p50_s}
    interval = {"low": low_s} | ({"high": high_s} if high_s is not None else {})
    return {
        "stats": {"count": 100, "sum": 100 * mean_s, "mean": mean_s, **stats},
        "intervals": {"p50": interval, "p99": interval},
        "unresolved": [] if resolved else ["p50", "p99"],
    }


def server() -> dict[str, Any]:
    """One quantity of each kind, and one of each width of bucket."""
    return {
        "engine": {"name": "vllm", "version": "0.32.0", "detected_by": "metric vllm:num_requests_running"},
        "queue_time": histogram(0.15, 0.16, 0.1, 0.5),
        "prefill_time": histogram(0.03, 0.15, 0.0, 0.3, resolved=False),
        "ttft": histogram(0.18, 0.2, 0.19, 0.2),
        "e2e_latency": histogram(3000.0, None),
        "requests_waiting": {"stats": {"count": 40, "mean": 7.8, "p50": 8.0, "p99": 21.45, "max": 22.0}},
        "requests_running": {"stats": {}, "missing": {"stats": "no value inside the window"}},
        "preemptions": {"stats": {"total": 0.0, "rate_per_s": 0.0}},
        "prompt_tokens": {"stats": {"total": 38752.0, "rate_per_s": 3875.2}},
        "missing": {},
    }


def summary(correlated_as: dict[str, Any], server_as: dict[str, Any] | None = None) -> dict[str, Any]:
    """A finished run at 10 requests/s."""
    return {
        "run_id": "20261121-101012-d968f0",
        "tool": {"name": "sidelight", "version": "0.1.0"},
        "status": "complete",
        "window": {"start": "2026-11-21T10:10:19.150Z", "end": "2026-11-21T10:10:29.150Z", "duration_s": 10.0},
        "warnings": ["the load generator was slow, and its own delays may show in the results: submissions were late"],
        "config": {
            "url": "http://127.0.0.1:8000",
            "model": "tiny-llama",
            "rate": 10.0,
            "arrival": "poisson",
            "concurrency": None,
            "requests": None,
            "duration": 10.0,
            "warmup": 10,
            "metrics": [],
        },
        "workload": {
            "name": "synthetic-uniform",
            "seed": 1,
            "tokenizer": {"name": "tiny-llama (the server's)"},
            "warmup_requests": 10,
        },
        "client": {
            "requests": {"sent": 100, "ok": 100, "failed": 0, "refused": 0, "cancelled": 0, "in_flight": 0},
            "ttft_ms": BLOCK,
            "tpot_ms": {"count": 0, "mean": None, "missing": "no reply had two tokens"},
            "throughput": {"requests_per_s": 10.0, "input_tokens_per_s": 3333.3, "output_tokens_per_s": None},
        },
        "server": server_as if server_as is not None else server(),
        "correlation": correlated_as,
        "self_check": {
            "verdict": "kept up",
            "trusted": True,
            "reasons": [],
            "schedule_lateness_ms": {"count": 100, "p50": 0.1, "p99": 0.5, "max": 1.0},
            "cpu_ratio": {"by_worker": [0.02], "max": 0.02},
        },
        "methodology": {"draft": "draft-gaikwad-00", "tests": {}, "missing": "none of the draft's tests"},
    }
