"""Snapshots of a run that goes on: what the tests of the live page and of the dashboard show."""

from __future__ import annotations

import math

import numpy as np
from logs import request_log

from sidelight.exporter.prometheus.snapshot import (
    LATENCY_BOUNDS_S,
    LATENESS_BOUNDS_S,
    TOKEN_BOUNDS_S,
    ClientCounts,
    Cumulative,
    EngineCounts,
    GeneratorCounts,
    PartCounts,
    Snapshot,
    WatchCounts,
    bucketize,
)
from sidelight.exporter.prometheus.table import ENGINE_COUNTERS, ENGINE_HISTOGRAMS
from sidelight.exporter.summary.verdict import RunVerdict
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.slo.results import SloResult, SloTally
from sidelight.scraper.spans.log import ReceiverCounts
from sidelight.sidecar.live.tally import RATES

PARTS_S = {"network": 0.01, "gateway": 0.004, "queue": 0.12, "prefill": 0.05, "other": 0.05}
ENDPOINT = "http://127.0.0.1:8000/metrics"


def observed(step: int, centre_s: float, bounds_s: tuple[float, ...]) -> Cumulative:
    """Return a histogram of 5 values a step around a centre; grows with the step as a run's does."""
    spread = np.tile([0.5, 0.8, 1.0, 1.2, 3.0], step)
    return bucketize(centre_s * spread, bounds_s)


def slo(step: int) -> SloResult:
    """Return how two objectives stand: of one in six requests failed, the percentile is infinite."""
    tally = SloTally(parse_slo("ttft_p99<500ms,error_rate<10%"))
    log = request_log(*[{"status": "ok"}] * 5 * step, *[{"status": "failed"}] * step)
    tally.add(log, request_metrics(log))
    return tally.result({})


def engine(step: int) -> EngineCounts:
    """Return the page of an engine, `step` seconds into the run."""
    return EngineCounts(
        endpoint=ENDPOINT,
        engine="vllm",
        version="0.32.0",
        histograms={
            name: observed(step, 0.1, (0.05, 0.1, 0.5, 2.5)) for name in (*ENGINE_HISTOGRAMS, "kv_transfer_time")
        },
        quantiles={
            ("ttft", "0.99", bound): value_s for bound, value_s in (("estimate", 0.2), ("low", 0.1), ("high", 0.3))
        },
        gauges={"requests_running": 4.0, "requests_waiting": 2.0, "kv_cache_usage": 0.4, "kv_fetch_in_progress": 1.0},
        highest={"requests_running": 8.0, "requests_waiting": 58.0, "kv_cache_usage": 0.5},
        counters=dict.fromkeys((*ENGINE_COUNTERS, "drafts"), 100.0 * step),
        scrapes={"ok": 4 * step, "failed": 0},
        last_scrape_duration_s=0.003,
        last_answer_s=1.7e9 + step,
    )


VERDICT = RunVerdict(
    state="healthy", cause="prefill", headline="Healthy.", figures=[], parts=[], why="No wait.", do="Nothing."
)


def snapshot(step: int) -> Snapshot:
    """Return a snapshot in which everything is known, `step` seconds into a run of 5 requests a second."""
    return Snapshot(
        version="0.1.0",
        run_id="run-1",
        phase="measure",
        about={"model": "sim-llama", "workload": "synthetic-uniform", "engine": "vllm", "version": "0.32.0"},
        verdicts={"load": True, "generator": True},
        verdict=VERDICT,
        client=ClientCounts(
            requests={"ok": 5 * step, "failed": step, "refused": 0, "cancelled": 0},
            scheduled=7 * step,
            submitted=6 * step,
            in_flight=3,
            input_tokens=500 * step,
            output_tokens=200 * step,
            ttft=observed(step, 0.2, LATENCY_BOUNDS_S),
            inter_token=observed(step, 0.02, TOKEN_BOUNDS_S),
            time_per_output_token=observed(step, 0.02, TOKEN_BOUNDS_S),
            e2e=observed(step, 2.0, LATENCY_BOUNDS_S),
            quantiles={("ttft", "0.5"): 0.2, ("ttft", "0.99"): 0.2},
            good=4 * step,
            slo=slo(step),
            rates=dict.fromkeys(RATES, 5.0),
            class_requests={"short": 4 * step, "long": step},
            class_quantiles={(name, "ttft", "0.99"): 0.2 for name in ("short", "long")},
        ),
        generator=GeneratorCounts(
            schedule_lateness=observed(step, 0.0003, LATENESS_BOUNDS_S),
            lateness_quantiles_s={"0.5": 0.0003, "0.99": 0.0009},
            cpu_seconds={"worker-0": 0.1 * step, "scraper": 0.05 * step},
            loop_delay_max_s=0.004,
            live_errors=0,
        ),
        engines=(engine(step),),
        parts=PartCounts(
            pending=1,
            engine_only={("queue", "trace"): observed(step, 0.1, LATENCY_BOUNDS_S)},
            ttft={(part, "trace"): observed(step, seconds, LATENCY_BOUNDS_S) for part, seconds in PARTS_S.items()},
            inner={
                (part, "trace"): observed(step, 0.02, LATENCY_BOUNDS_S)
                for part in ("engine_frontend", "scheduler_intake")
            },
            e2e={
                ("decode", "trace"): observed(step, 1.5, LATENCY_BOUNDS_S),
                ("other", "trace"): observed(step, 0.1, LATENCY_BOUNDS_S),
            },
            requests={"trace": 5 * step, "response": 0, "histogram": 0, "none": step},
            quality={"exact": 5 * step, "none": step},
            gateways={"attribute": 4 * step, "no_gateway": step},
            missing={"no spans came": step},
            largest={"queue": 0.5},
        ),
        watch=WatchCounts(
            receiver={**dict.fromkeys(ReceiverCounts.__struct_fields__, 0), "exports": step, "spans": 5 * step},
            forward_queue={"exports": step, "bytes": 400 * step, "limit_bytes": 1000},
            restarts=1,
            errors=0,
            cpu_s=0.02 * step,
            sizes={"requests": 20},
            repeated=0,
            evicted=0,
            whole_traces=step,
            read_to_s=math.inf,
            broken_traces={("gateway", "new_trace"): step},
            headroom={"estimate": 1.3, "low": 1.1, "high": 1.6},
            drift={("", "step", "estimate"): 1.09, ("", "step", "low"): 1.07, ("", "step", "high"): 1.11},
            drift_since_s={("", "step"): 1.7e9},
        ),
    )
