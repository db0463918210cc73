"""The correlation of a run: the times of each request, by client and server together, and where the wait went."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET

from sidelight.correlator.estimate.intervals import Observed, pick
from sidelight.correlator.load.reuse import RequestReuse, RunReuse, prefix_reuse
from sidelight.correlator.opening import WatchRun
from sidelight.correlator.requests import first_output_ns
from sidelight.correlator.statistics.association import associations, rank_correlation
from sidelight.correlator.statistics.queueing import kv_loads, while_waiting
from sidelight.correlator.statistics.server_load import met_at_submission
from sidelight.correlator.statistics.server_times import (
    ServerMeans,
    ServerPercentiles,
    drained_means,
    server_means,
    server_percentiles,
)
from sidelight.correlator.statistics.tail import tail_shares
from sidelight.exporter.evaluation.measured import MeasuredRun
from sidelight.exporter.evaluation.times import Correlated
from sidelight.exporter.summary.correlation import (
    PERCENTILES,
    Correlation,
    Evidence,
    Findings,
    ReceivedSpans,
    correlation,
)
from sidelight.exporter.summary.slowest import slowest, work_while_waiting
from sidelight.exporter.summary.timeline import timeline
from sidelight.loadgen.requests.metrics import input_tokens, span_s, ttft_ns
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.rundir.stats import Missing
from sidelight.scraper.spans.requests import PROBE
from sidelight.scraper.window.window import Window, slice_edges

ONLY_GREW = Missing(
    "the queue only grew while the load lasted, so that its length says no more than how long that had been"
)


def correlation_of(measured_run: MeasuredRun, reuse: RunReuse, *, steady: bool = True) -> Correlation:
    """Return the `correlation` section of a summary.

    Where the queue only grew, its length stands for the time since the load began, and no threshold is sought in it.
    """
    run, times, window = measured_run.run, measured_run.times, measured_run.window
    measured, parts, rows = measured_run.requests, measured_run.parts, measured_run.rows
    edges = slice_edges(window, measured_run.slice_ns)[0].tolist() if window.end_ns > window.start_ns else []
    met = met_at_submission(measured, run.endpoints)
    waiting = met["requests_waiting"]
    means = _means(measured_run)
    # A decode engine's queue is `kv_loads`' matter.
    waited_for = [page for page, role in zip(run.endpoints, times.roles, strict=True) if role != "decode"]
    reused = RequestReuse._make(column[rows] for column in reuse.requests)
    beside = {name: met[name] for name in ("requests_waiting", "requests_running")} | reused.tokens()
    slow = slowest(measured, parts, beside, window.start_ns, reused.engines())
    ok = measured.status == "ok"
    # A reply of nothing but blanks has no TTFT, and the engine ended its request all the same.
    timed_ratio = float((ok & np.isfinite(parts.ttft_s)).sum()) / max(1, int(ok.sum()))
    findings = Findings(
        parts=parts,
        refusal=times.refusal[rows],
        attribution=take(times.attribution, rows),
        clocks=times.clocks,
        means=means,
        ok=ok,
        submit_ns=measured.submit_ns,
        workload_class=measured.workload_class,
        endpoint_url=measured.endpoint_url,
        model=measured.model,
        edges_ns=edges,
        percentiles=_percentiles(run, times, window),
        spans=_spans(run),
        records=times.records,
        associations=associations(measured, {"ttft_ms": parts.ttft_s}, run.endpoints),
        tail=tail_shares(parts, measured.submit_ns, waiting if steady else ONLY_GREW),
        timeline=timeline(measured.submit_ns, parts.ttft_s, run.endpoints, window) if edges else UNSET,
        slowest=slow,
        work=work_while_waiting(run.requests, times.joined, run.spans, slow, means.ratio and means.ratio * timed_ratio),
        evidence=Evidence(
            while_waiting=while_waiting(waited_for, window),
            prefill_input_tokens_rho=rank_correlation(parts.prefill_s, input_tokens(measured)),
            kv_loads=kv_loads(run.endpoints, window, int(ok.sum())),
            reuse=prefix_reuse(reuse, rows),
        ),
    )
    return correlation(findings)


def _percentiles(
    run: Run, times: Correlated, window: Window
) -> dict[Literal["queue_ms", "prefill_ms"], ServerPercentiles | Missing]:
    """Return percentiles of the server's queue and prefill times in the window. Exact times are used where there are
    any.

    Those of a request that ended well count, whether or not it could be estimated.
    """
    exact = np.isin(times.parts.source, ("trace", "response"))
    ended = exact & (times.attribution.quality == "none") & (run.requests.status == "ok")
    best = {"interval": np.where(ended, 0, times.attribution.interval)}
    for part in ("queue", "prefill"):
        best[f"{part}_s"] = getattr(times.parts, f"{part}_s")
        best[f"{part}_sd_s"] = np.where(exact, 0.0, getattr(times.attribution, f"{part}_sd_s"))
    table = take(replace(times.attribution, **best), run.requests.phase == "measure")
    observed = [_since(engine, window.start_ns) for engine in times.observed if isinstance(engine, Observed)]
    wanted = list(PERCENTILES.values())
    return {
        "queue_ms": server_percentiles(table, observed, "queue", wanted),
        "prefill_ms": server_percentiles(table, observed, "prefill", wanted),
    }


def _since(engine: Observed, start_ns: int) -> Observed:
    """Leave out the intervals that ended at or before a moment."""
    return replace(engine, ends=pick(engine.ends, np.flatnonzero(engine.ends.end_ns > start_ns)))


def _spans(run: Run) -> ReceivedSpans | None:
    """Return the counts of the span receivers, None without a receiver."""
    if run.span_counts is None:
        return None
    counts = msgspec.structs.asdict(run.span_counts)
    counts["turned_away"] += counts.pop("no_memory")
    del counts["unwritten"]  # part of those turned away
    for name in ("cut_connections", "unauthorized", "incomplete"):  # nothing was read of these
        del counts[name]
    return ReceivedSpans(
        **counts,
        request_spans=run.watched.engine_spans if isinstance(run, WatchRun) else int((run.spans.fault == "").sum()),
        health_probes=run.watched.probes if isinstance(run, WatchRun) else run.spans.refused.get(PROBE, 0),
        receiver_deaths=run.receiver_deaths,
    )


def _means(measured_run: MeasuredRun) -> ServerMeans:
    """Return the mean times of the whole run, by the sums of the histograms."""
    run, times, window, measured = measured_run.run, measured_run.times, measured_run.window, measured_run.requests
    # The server observes requests that finished; one that failed or was cancelled is in none of its sums.
    ok = take(measured, measured.status == "ok")
    means = server_means(
        ok.end_ns,
        ttft_ns(ok.submit_ns, ok.first_token_ns) / 1e9,
        times.observed,
        window,
        no_server=run.manifest.get("server_missing") or "",
        decoding=times.decoding,
    )
    if isinstance(run, WatchRun) or any(isinstance(engine, Observed) for engine in times.observed):
        return means
    wait_s = float(np.mean(span_s(ok.submit_ns, first_output_ns(ok)))) if len(ok) else np.nan
    return drained_means(means, run.endpoints, window, sent=len(measured), wait_s=wait_s)
