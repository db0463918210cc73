"""Outcome of a step: the numbers that later decisions of a study rest on, from the tables of its run.

Rates are those of the steady window: without the first tenth of the load and without the drain. Percentiles are of the
requests that were submitted in it, however long they took. What the server showed is read by `server_side`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sidelight.correlator.load import steady
from sidelight.correlator.load.steady import SteadyWindow, within
from sidelight.correlator.load.sustained import stability_of
from sidelight.correlator.statistics.intervals import QuantileInterval, autocorrelation_time, quantiles
from sidelight.correlator.statistics.percentiles import times_in_order
from sidelight.loadgen.requests.metrics import RequestMetrics, counts, input_tokens, request_metrics
from sidelight.loadgen.requests.self_check.check import SelfCheck
from sidelight.loadgen.requests.self_check.stated_error import ErrorBound
from sidelight.loadgen.requests.slo.objectives import Objective, parse_slo
from sidelight.loadgen.requests.slo.results import slo_result
from sidelight.loadgen.requests.table.log import NO_ERRORS, RequestLog
from sidelight.methodology.study.model import Beyond, Kind, Outcome, Step, StepData
from sidelight.methodology.study.server_side import ServerSide, binding, server_side
from sidelight.rundir.columns import Bools, Floats, take
from sidelight.rundir.stats import known

TTFT_BIN = 0.01  # of its logarithm
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
MOST_FOREIGN = 0.02
#: Times by what of the load generator they rest on.
KIND_OF: Mapping[str, Kind] = {"ttft": "ttft", "tpot": "gaps", "itl": "gaps"}
OF_REQUESTS = ("error_rate", "goodput_ratio")  # what an SLO may bound of a step, beside latencies
_OUT_OF_MEMORY = re.compile(r"out of memory|\boom\b|not enough memory", re.IGNORECASE)
NOTHING_SENT = "no request was sent"
MOST_IDLE = 0.05  # of a closed loop's time in flight, that a slot may wait for its next request


def outcome(step: Step, data: StepData, rests_on: Collection[Kind] = ()) -> Outcome:
    """Return the outcome of a step; a pure function of its tables. `slo` among its options says what is judged.

    rests_on  what the test's decisions rest on beside the load, and the objectives that the step states
    """
    log = data.requests
    failures, numbers = np.unique(
        np.array([error.split(":", 1)[0] or "unknown" for error in log.error[~np.isin(log.status, NO_ERRORS)]]),
        return_counts=True,
    )
    shared: dict[str, Any] = {
        "status": data.status,
        "sent": int((log.dispatch_ns >= 0).sum()),
        "ok": int((log.status == "ok").sum()),
        "failed": dict(zip(failures.tolist(), numbers.tolist(), strict=True)),
        "out_of_memory": sum(1 for error in log.error[log.status != "ok"] if _OUT_OF_MEMORY.search(error)),
        "blame": data.blame,
        "doubts": dict(data.doubts),
        **_tokens(log),
    }
    if data.end_ns <= data.start_ns or not shared["sent"]:
        return Outcome(**shared, void=_void(step, data, None, rests_on))
    ended_ns = log.end_ns[log.end_ns >= 0]
    window = steady.steady_window(data.start_ns, data.end_ns, ended_ns)
    server = server_side(log, data.endpoints, window, data.start_ns)
    limit, reason = binding(step, server, data)
    percentiles = _percentiles(data, window)
    return Outcome(
        **shared,
        void=_void(step, data, server, rests_on),
        window=window,
        **_rates(log, window, closed_loop=data.closed_loop),
        stability=stability_of(log, data.endpoints, closed_loop=data.closed_loop),
        percentiles=percentiles,
        ttft_counts=_ttft_counts(log, window),
        **_slo(step, log, window),
        **{name: value for name, value in asdict(server).items() if name in Outcome.__struct_fields__},
        little_residual=steady.little_residual(log.submit_ns, log.end_ns, window),
        limit=limit,
        limit_reason=reason,
        notes=_notes(step, percentiles),
    )


def _tokens(log: RequestLog) -> dict[str, Any]:
    ok = log.status == "ok"
    output = known(counts(log.output_tokens[ok]))
    return {
        "input_tokens": int(known(input_tokens(log)[ok]).sum()),
        "output_tokens": int(output.sum()),
        "output_tokens_std": float(output.std(ddof=1)) if len(output) > 1 else None,
    }


def _void(step: Step, data: StepData, server: ServerSide | None, rests_on: Collection[Kind]) -> str:
    """Return the reason if a step does not count, else an empty string."""
    if data.damage:
        return f"recorded data of its run are missing or damaged: {data.damage}"
    if not (data.requests.dispatch_ns >= 0).any():
        return NOTHING_SENT
    if data.status == "crashed":
        return "the load generator ended before its load did"
    if server is not None and server.restarted:
        return "the engine restarted during the step: its start time moved, or its counters began at zero"
    decisive = {"load", *rests_on, *(KIND_OF[each] for each in _bound(step) if each in KIND_OF)}
    for kind, reason in data.doubts.items():
        if kind in decisive:
            return f"the load generator cannot be trusted: {reason}"
    if server is not None and (server.foreign_ratio or 0) > MOST_FOREIGN:
        return (
            f"{100 * (server.foreign_ratio or 0):.1f} % of the requests that the engine finished were not ours "
            f"(at most {100 * MOST_FOREIGN:.0f} % may be): another client used it"
        )
    return ""


def _rates(log: RequestLog, window: SteadyWindow, *, closed_loop: bool) -> dict[str, Any]:
    """Return the requested and served rates in the window, per second."""
    ended_ns = log.end_ns[(log.status == "ok") & (log.end_ns >= 0)]
    completed, ci95 = steady.rate(ended_ns, 1, window)
    arrived_ns, arrived = steady.token_arrivals(log)
    tokens_per_s, tokens_ci95 = steady.rate(arrived_ns, arrived, window)
    dispatched = within(log.dispatch_ns, window)
    began = within(log.first_token_ns, window)
    prompt = input_tokens(log)[began]
    return {
        "offered_per_s": None if closed_loop else int(within(log.scheduled_ns, window).sum()) / window.duration_s,
        "realised_per_s": int(dispatched.sum()) / window.duration_s,
        "realised_tokens_per_s": steady.scaled_sum(counts(log.output_tokens[dispatched]), window),
        "completed_per_s": completed,
        "throughput_ci95": ci95,
        "output_tokens_per_s": tokens_per_s,
        "output_tokens_ci95": tokens_ci95,
        "input_tokens_per_s": steady.scaled_sum(prompt, window),
    }


def submitted_within(log: RequestLog, window: SteadyWindow) -> Bools:
    """Return a mask of the requests [n] submitted in the window, which count for latencies."""
    return within(np.where(log.submit_ns >= 0, log.submit_ns, log.dispatch_ns), window)


def trusted(name: str, values: Floats, doubts: Collection[Kind]) -> Floats:
    """Return values [n] of a time, as of tpot_ms; all NaN where such times cannot be trusted."""
    return np.full_like(values, np.nan) if KIND_OF.get(name.removesuffix("_ms")) in doubts else values


def _percentiles(data: StepData, window: SteadyWindow) -> dict[str, dict[str, QuantileInterval]]:
    rows = submitted_within(data.requests, window)
    return {
        name: dict(zip(QUANTILES, quantiles(values, list(QUANTILES.values())), strict=True))
        for name, values in times_in_order(take(data.requests, rows), take(data.parts, rows)).items()
        if KIND_OF.get(name.removesuffix("_ms")) not in data.doubts
    }


def _notes(step: Step, percentiles: Mapping[str, Mapping[str, QuantileInterval]]) -> tuple[str, ...]:
    """Return a note if a step was no longer than its requests."""
    median_ms = percentiles["e2e_ms"]["p50"].estimate if "e2e_ms" in percentiles else None
    if step.duration is None or median_ms is None or median_ms < 1e3 * step.duration:
        return ()
    lengths = f"half of the requests took {median_ms / 1e3:.1f} s or more, and the step lasted {step.duration:g} s"
    return (f"{lengths}: its throughput says little; give a longer --duration",)


def _ttft_counts(log: RequestLog, window: SteadyWindow) -> dict[int, int]:
    rows = take(log, submitted_within(log, window) & (log.status == "ok"))
    ttft_ms = request_metrics(rows).ttft_ms
    bins = np.floor(np.log(ttft_ms[np.isfinite(ttft_ms) & (ttft_ms > 0)]) / TTFT_BIN)
    numbers, counts = np.unique(bins.astype(np.int64), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _bound(step: Step) -> list[str]:
    """Return the metrics bounded by the objectives of a step."""
    text = step.options.get("slo")
    return [each.metric for each in parse_slo(str(text)).objectives] if text else []


def _slo(step: Step, log: RequestLog, window: SteadyWindow) -> dict[str, Any]:
    """Judge the objectives by the requests of the window; those of whole runs' rates are not a step's."""
    text = step.options.get("slo")
    if not text:
        return {}
    parsed = parse_slo(str(text))
    judged = tuple(each for each in parsed.objectives if each.of_latency or each.metric in OF_REQUESTS)
    rows = take(log, submitted_within(log, window))
    metrics = request_metrics(rows)
    beyond = {each.text: _beyond(each, rows, metrics) for each in judged if each.quantile is not None}
    return {
        "slo": slo_result(replace(parsed, objectives=judged), rows, metrics, {}),
        "beyond": {name: share for name, share in beyond.items() if share is not None},
    }


def _beyond(objective: Objective, log: RequestLog, metrics: RequestMetrics) -> Beyond | None:
    """Return the share beyond a percentile's bound, and its autocorrelation; None without any value.

    The values are in the order of submission.
    """
    ok = log.status == "ok"
    order = np.argsort(log.submit_ns, kind="stable")
    if objective.metric == "itl":
        times_ms = np.append(metrics.itl_ms, np.full(int((~ok).sum()), np.inf))
    else:
        times_ms = np.where(ok, getattr(metrics, f"{objective.metric}_ms"), np.inf)[order]
    times_ms = times_ms[~np.isnan(times_ms)]
    if not len(times_ms):
        return None
    late = times_ms > objective.bound if objective.inclusive else times_ms >= objective.bound
    return Beyond(
        share=float(late.mean()),
        allowed=round(1 - (objective.quantile or 0.0), 9),
        n=len(late),
        tau=autocorrelation_time(late),
    )


def doubts(check: SelfCheck, requests: RequestLog) -> dict[Kind, str]:
    """Return the reasons to doubt the load generator's measurements, by kind; empty without doubt.

    Times are doubtful from an error of a tenth of their median on (`ErrorBound.unusable`): less changes no decision.
    The load is doubtful where requests of an open loop left in bunches that were not asked for, and in a closed loop
    where workers were late, in the median, by over 5 % of what a request took: each left its place empty for so long.
    """
    because = f": {check.cause.text}. {check.cause.cure}" if check.cause else "."
    late_ms, e2e_ms = check.loop_delay_ms.p50 or 0.0, known(request_metrics(requests).e2e_ms)
    reasons: dict[Kind, str] = {}
    if check.arrivals is not None and check.arrivals.distorted:
        reasons["load"] = (check.arrivals.sentence or "").rstrip(".") + because
    elif check.arrivals is None and len(e2e_ms) and late_ms > MOST_IDLE * np.median(e2e_ms):
        reasons["load"] = f"Load workers were {late_ms:.0f} ms late (p50) in replacing requests{because}"
    said = zip(exceeded_errors(check), check.reasons, strict=True)
    return reasons | {kind: reason + because for (kind, bound), reason in said if bound.unusable}


def exceeded_errors(check: SelfCheck) -> list[tuple[Kind, ErrorBound]]:
    """Return the errors that are over their limits, in the order of the self-check's reasons."""
    bounds: dict[Kind, ErrorBound] = {"ttft": check.error_ms.ttft, "gaps": check.error_ms.itl}
    return [(kind, bound) for kind, bound in bounds.items() if bound.exceeded]
