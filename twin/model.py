"""The twin of a recorded run: its requests, its engine's fit and test, and its traffic."""

from __future__ import annotations

import numpy as np

from sidelight.correlator.opening import WatchRun
from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.rundir.stats import Missing
from sidelight.twin.check import engine_of, misfit, refusal
from sidelight.twin.engine.fit import LEAST_REQUESTS, EngineRequests, fit
from sidelight.twin.engine.spans import MOST_SPANNED, spanned_requests
from sidelight.twin.engine.steps import StreamedRequests, streamed_requests
from sidelight.twin.scenario import Twin

#: Of the requests that were sent: others took steps that the fit cannot see.
LEAST_WHOLE, MOST_OTHERS = 0.95, 1.05
_PROCESSES = ("poisson", "uniform", "gamma", "burst")


def twin_of(
    run: Run, finished: float, *, seats: int | None = None, budget: int | None = None, kv_blocks: int | None = None
) -> Twin | Missing:
    """Return the twin of a run, or the reason against predictions.

    `finished` are the requests that engines' pages counted in the measured window, 0 where none does. Known limits of
    the engine are taken as they are.
    """
    requests = _requests(run)
    if reason := _unfit(run, requests, finished):
        return Missing(reason)
    requests = _requests(run, most=MOST_SPANNED)
    fitted = fit(requests, budget=budget, seats=seats)
    if isinstance(fitted, Missing):
        return fitted
    if seats is not None and seats < fitted.seen.sequences:
        return Missing(f"max-num-seqs={seats} is stated, and the run had {fitted.seen.sequences} sequences in a step")
    engine = engine_of(fitted, kv_blocks=kv_blocks)
    missed = misfit(requests, fitted, engine)
    if isinstance(missed, Missing):
        return missed
    if reason := refusal(requests, fitted, missed):
        return Missing(reason)
    config = run.manifest["config"]
    measured = requests
    if isinstance(requests, StreamedRequests):
        measured = streamed_requests(take(run.requests, run.requests.phase == "measure"))
    if len(measured) < LEAST_REQUESTS:
        return Missing(f"{len(measured)} requests were measured, and a prediction needs {LEAST_REQUESTS}")
    return Twin(
        requests=measured,
        fitted=fitted,
        engine=engine,
        missed=missed,
        arrival=_arrival(config),
        concurrency=config.get("concurrency") if config.get("rate") is None else None,
        duration_s=float(measured.submit_s[-1]) * len(measured) / (len(measured) - 1),
    )


def _requests(run: Run, most: int | None = None) -> EngineRequests:
    """Return the requests of a run by their tokens; those of a watch by their spans, and the last of them."""
    if isinstance(run, WatchRun):
        return spanned_requests(run.requests, run.watched.parts.decode_s, most=most)
    return streamed_requests(run.requests)


def _unfit(run: Run, requests: EngineRequests, finished: float) -> str:
    """Return the reason against a fit to a run's requests, or "" without one."""
    log = run.requests
    sent = int(np.sum(log.submit_ns >= 0))
    if not sent:
        return "nothing was sent in it"
    if len(requests) < LEAST_WHOLE * sent:
        return (
            f"of {sent} requests {len(requests)} have a prompt, an output and token stamps that are known, and all "
            "others took steps that are not seen"
        )
    if len({*log.endpoint_url.tolist()}) > 1:
        return "it sent to several engines"
    if (log.turn > 0).any():
        return "its requests are turns of sessions, each of which waits for the reply before"
    ok = int(np.sum((log.phase == "measure") & (log.status == "ok")))
    if finished > MOST_OTHERS * ok:
        return f"the engine finished {finished:.0f} requests and this run {ok}: the others took steps that are not seen"
    return ""


def _arrival(config: dict[str, object]) -> Arrival | None:
    kind = config.get("arrival")
    if config.get("rate") is None or config.get("trace") is not None or kind not in _PROCESSES:
        return None
    burstiness = config.get("burstiness")
    return Arrival(
        kind=kind,  # type: ignore[arg-type]
        rate_per_s=1.0,
        burstiness=float(burstiness) if isinstance(burstiness, int | float) else 1.0,
    )
