"""Warming a target up before it is measured: by a number of requests, or by the draft until probes agree."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from loadgen.plan.fitting import PlanOrder
from loadgen.requests.metrics import request_metrics
from loadgen.requests.table import RequestLog
from loadgen.requests.warmup import PROBES, more_requests, parse_warmup, stable, statement
from rundir.columns import take
from sidecar.directory import RAW
from sidecar.options.load import RunOptions
from sidecar.run.phases import Session, record, run_phase, unless_stopped, warn_and_record
from sidecar.run.planning import DRAFT_ROOM, preliminary_plan, write_plan
from sidecar.run.prepare import Prepared

CONCURRENCY = 4
# Probes are sent until they agree, but not for ever; nor is a target warmed up for ever.
MOST_PROBE_ROUNDS = 5
MOST_REQUESTS = DRAFT_ROOM // 2


async def prepare_warm_up(session: Session, options: RunOptions, prepared: Prepared) -> None:
    """Write the plan of a warm-up whose length is known."""
    if isinstance(options.warmup, int) and options.warmup:
        await _plan(session, options, prepared, "warmup", first_index=0, count=options.warmup)


async def warm_up(session: Session, options: RunOptions, prepared: Prepared) -> bool:
    """Warm up as the options say, and record what the report states of it. Returns whether anything was sent."""
    policy = parse_warmup(str(options.warmup))
    before_ms: list[float] = []
    after_ms: list[float] = []
    drained = True
    if policy.kind == "count":
        await run_phase(session, _path(session, "warmup"), concurrency=_width(options, policy.requests))
    elif policy.kind == "draft":
        before_ms = await _probe(session, options, prepared, 0)
        drained = await _by_the_draft(session, options, prepared)
        for number in range(1, 1 + MOST_PROBE_ROUNDS):
            after_ms += await _probe(session, options, prepared, number)
            if session.stop.is_set() or stable(after_ms):
                break
    outcome = statement(policy, _log(session, "warmup"), drained=drained, before_ms=before_ms, after_ms=after_ms)
    record(session, "warmup", **msgspec.to_builtins(outcome))
    return policy.kind != "none"


async def _by_the_draft(session: Session, options: RunOptions, prepared: Prepared) -> bool:
    """Send rounds until the draft's measure is full. Returns whether each round was drained to its end."""
    policy = parse_warmup(str(options.warmup))
    sent = rounds = 0
    while not session.stop.is_set() and sent < MOST_REQUESTS:
        log = _log(session, "warmup")
        count = min(more_requests(policy, log), MOST_REQUESTS - sent)
        if not count:
            break
        rounds += 1
        name = "warmup" if rounds == 1 else f"warmup-{rounds}"
        await unless_stopped(
            session.stop, _plan(session, options, prepared, "warmup", name=name, first_index=sent, count=count)
        )
        await run_phase(session, _path(session, name), concurrency=_width(options, count))
        sent += count
        if (_log(session, "warmup").status == "ok").sum() == (log.status == "ok").sum():
            warn_and_record(session, "the warm-up was stopped: a round brought no complete response")
            break
    return not (_log(session, "warmup").status == "cancelled").any()


async def _probe(session: Session, options: RunOptions, prepared: Prepared, number: int) -> list[float]:
    """Send a round of probes, one after the other; return their TTFT in ms, NaN for one that failed."""
    if session.stop.is_set():
        return []
    name = "probe" if number == 0 else f"probe-{number + 1}"
    first = MOST_REQUESTS + number * PROBES
    await unless_stopped(
        session.stop, _plan(session, options, prepared, "probe", name=name, first_index=first, count=PROBES)
    )
    await run_phase(session, _path(session, name), concurrency=1)
    log = _log(session, "probe")
    round_ = take(log, (log.index >= first) & (log.index < first + PROBES))
    ttft_ms = request_metrics(round_).ttft_ms
    return [float(value) for value in np.where(round_.status == "ok", ttft_ms, np.nan)]


async def _plan(
    session: Session,
    options: RunOptions,
    prepared: Prepared,
    phase: str,
    *,
    name: str = "warmup",
    first_index: int,
    count: int,
) -> None:
    order = PlanOrder(
        phase=phase,
        first_index=first_index,
        count=count,
        max_model_len=prepared.max_model_len,
        ignore_eos=options.ignore_eos,
        urls=len(prepared.served),
        sessions=False,
        exact=options.exact_tokens,
    )
    requests = preliminary_plan(options, prepared.target, prepared.tokenizer, order, round_=first_index)
    about = await write_plan(requests, _path(session, name), progress=session.progress)
    record(session, "planned", **about)


def _width(options: RunOptions, count: int) -> int:
    return min(options.concurrency or CONCURRENCY, count)


def _path(session: Session, name: str) -> Path:
    return session.path / RAW / f"plan-{name}.log"


def _log(session: Session, phase: str) -> RequestLog:
    """Return the requests of a phase that were sent so far."""
    session.live.poll()
    requests = session.live.logs.requests.table()
    return take(requests, requests.phase == phase)
