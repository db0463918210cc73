"""The twin of requests: its engine's fit and test, and its traffic; and that of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sidelight.correlator.opening import WatchRun
from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.recorded.run import Run
from sidelight.rundir.columns import Floats, take
from sidelight.rundir.stats import Missing
from sidelight.twin.check import engine_of, misfit, refusal
from sidelight.twin.engine.fit import LEAST_REQUESTS, EngineRequests, fit
from sidelight.twin.engine.play import BLOCKS, BUDGET, SEATS
from sidelight.twin.engine.spans import MOST_SPANNED, spanned_requests
from sidelight.twin.engine.steps import StreamedRequests, streamed_requests
from sidelight.twin.scenario import Twin, span_s

#: Of the requests that were sent: others took steps that the fit cannot see.
LEAST_WHOLE, MOST_OTHERS = 0.95, 1.05
BLUR = 1.1  # of seats: stamps that jitter let more sequences seem to be in a step
NO_CLIENTS = (
    "no client or gateway before the engine sent spans. Let one send them, with the time of the first token; from the "
    "engine's spans alone `watch --slo` says the headroom"
)
FIRST_TOKENS = "clients' spans need the time of the first token, and they or the engine's the counts of tokens"
STREAMED = "run with streaming, known counts of tokens, and a load at which requests succeed"
OF_WATCH = "15 minutes or more of traffic that one engine serves alone; or `sidelight capture`, and a run of its trace"
OF_RUN = (
    "a run of a minute or more at an open rate (run --rate 4 --duration 60s) against one engine that does nothing "
    "else, on a machine of its own"
)
_PROCESSES = ("poisson", "uniform", "gamma", "burst")


def twin_of(run: Run, finished: float, known: Mapping[str, int]) -> Twin | Missing:
    """Return the twin of a run, or the reason against predictions.

    `finished` are the requests that engines' pages counted in the measured window, 0 where none does; `known` are
    settings of the engine.
    """
    requests = _requests(run)
    if reason := _unfit(run, requests, finished):
        return Missing(reason)
    twin = tested_twin(_requests(run, most=MOST_SPANNED), known)
    if isinstance(twin, Missing):
        return Missing(f"{twin.reason}. What helps: {OF_WATCH if isinstance(run, WatchRun) else OF_RUN}")
    config, measured = run.manifest["config"], twin.requests
    if isinstance(measured, StreamedRequests):
        measured = streamed_requests(take(run.requests, run.requests.phase == "measure"))
    if len(measured) < LEAST_REQUESTS:
        return Missing(f"{len(measured)} requests were measured, and a prediction needs {LEAST_REQUESTS}")
    return replace(
        twin,
        requests=measured,
        traffic=measured,
        duration_s=span_s(measured),
        arrival=_arrival(config, measured.submit_s),
        concurrency=config.get("concurrency") if config.get("rate") is None else None,
        longest=(run.manifest.get("target") or {}).get("max_model_len"),
    )


def tested_twin(requests: EngineRequests, known: Mapping[str, int]) -> Twin | Missing:
    """Return the twin of requests as they came, or the reason against predictions.

    `known` settings of the engine are taken as they are.
    """
    seats = known.get(SEATS)
    fitted = fit(requests, budget=known.get(BUDGET), seats=seats)
    if isinstance(fitted, Missing):
        return fitted
    if seats is not None and fitted.most_sequences > BLUR * seats + 1:
        return Missing(
            f"max-num-seqs={seats} is stated, and {fitted.most_sequences} sequences were in a step: state the engine's"
        )
    engine = engine_of(fitted, kv_blocks=known.get(BLOCKS))
    missed = misfit(requests, fitted, engine)
    reason = missed.reason if isinstance(missed, Missing) else refusal(requests, fitted, missed)
    if isinstance(missed, Missing) or reason:
        return Missing((seats and _fewer_seats(requests, seats)) or reason)
    return Twin(
        requests=requests,
        fitted=fitted,
        engine=engine,
        missed=missed,
        traffic=requests,
        duration_s=span_s(requests),
    )


def _fewer_seats(requests: EngineRequests, stated: int) -> str:
    """Return a reason where requests waited for fewer seats than are stated, else ""."""
    shown = fit(requests)
    if isinstance(shown, Missing) or shown.seats is None or shown.seats >= stated:
        return ""
    return f"requests waited while {shown.seats} ran, and max-num-seqs={stated} is stated: state the engine's"


def _requests(run: Run, most: int | None = None) -> EngineRequests:
    """Return the requests of a run by their tokens; those of a watch by their spans, and the last of them."""
    if isinstance(run, WatchRun):
        return spanned_requests(run.requests, run.watched.parts.decode_s, most=most)
    return streamed_requests(run.requests)


def _unfit(run: Run, requests: EngineRequests, finished: float) -> str:
    """Return the reason against a fit to a run's requests, or "" without one."""
    log = run.requests
    sent = int(np.sum(log.submit_ns >= 0))
    is_watch = isinstance(run, WatchRun)
    if not sent:
        return NO_CLIENTS if is_watch else "nothing was sent in it: give a run with a load"
    if len(requests) < LEAST_WHOLE * sent:
        return (
            f"of {sent} requests {len(requests)} succeeded with a prompt, an output and token times that are known, "
            f"and all others took steps that are not seen: {FIRST_TOKENS if is_watch else STREAMED}"
        )
    if len({*log.endpoint_url.tolist()}) > 1:
        return "it sent to several engines: run against one, and ask for several with --replicas"
    if (log.turn > 0).any():
        return (
            "its requests are turns of sessions, each of which waits for the reply before: `sidelight capture` makes a "
            "trace of it without sessions; a run of that can be predicted"
        )
    ok = int(np.sum((log.phase == "measure") & (log.status == "ok")))
    if finished > MOST_OTHERS * ok:
        whose = "spans of these clients show" if is_watch else "this run sent"
        return (
            f"the engine finished {finished:.0f} requests, and {whose} {ok}: the others took steps that are not seen. "
            f"{'Let all clients send spans' if is_watch else 'Run while nobody else uses the engine'}"
        )
    return ""


def _arrival(config: dict[str, object], submit_s: Floats) -> Arrival | None:
    kind = config.get("arrival")
    if kind == "replay":
        return Arrival(kind=kind, trace_ns=np.rint(1e9 * submit_s).astype(np.int64))
    if config.get("rate") is None or config.get("trace") is not None or kind not in _PROCESSES:
        return None
    burstiness = config.get("burstiness")
    burstiness = float(burstiness) if isinstance(burstiness, int | float) else 1.0
    return Arrival(kind=kind, rate_per_s=1.0, burstiness=burstiness)  # type: ignore[arg-type]
