"""A load from its first preparation to the last scrape after it: plans, warm-up, measurement.

A target is warmed up by a number of requests, or by the draft until probes agree.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sidelight.loadgen.plan.fitting import PlanOrder
from sidelight.loadgen.plan.leaving import leaving_of
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.requests.warmup import PROBES, more_requests, parse_warmup, stable, statement
from sidelight.recorded.directory import RAW
from sidelight.rundir.columns import take
from sidelight.rundir.printable.numbers import count_of
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.run.phases import (
    WATCH_EVERY_S,
    Session,
    record,
    run_phase,
    settle,
    unless_stopped,
    unless_stopped_for,
    warn_and_record,
    watching,
)
from sidelight.sidecar.run.preparation.planning import (
    DRAFT_ROOM,
    first_measured,
    measure_plan,
    planned_requests,
    preliminary_plan,
    write_plan,
)
from sidelight.sidecar.run.preparation.prepare import Prepared
from sidelight.sidecar.run.processes.child import START_TIMEOUT_S

SETTLE_LEAST_S = 0.5
WARM_UP_CONCURRENCY = 4
# Probes are sent until they agree, but not for ever; nor is a target warmed up for ever.
MOST_PROBE_ROUNDS = 5
MOST_WARM_UP_REQUESTS = DRAFT_ROOM // 2
MOST_LOG_BYTES = 10 * 10**9


async def load(session: Session, options: RunOptions, prepared: Prepared, *, begun_s: float) -> None:
    """Warm a target up and measure it. All measured requests are made before the first is sent.

    The run began at `begun_s`, in the loop's time: its deadline counts from there. Raises SidelightError when one of
    our processes, or /tokenize, fails.
    """
    settle_s = max(2 * options.scrape_interval, SETTLE_LEAST_S)
    async with _deadline(session, options.deadline, begun_s), _log_limit(session):
        session.progress.stage("preparing requests")
        if isinstance(options.warmup, int) and options.warmup:
            planning = _plan_preliminary(session, options, prepared, "warmup", first_index=0, count=options.warmup)
            await unless_stopped(session.stop, planning)
        await unless_stopped(session.stop, _plan_measured(session, options, prepared))
        ready = [worker.expect("ready", timeout_s=START_TIMEOUT_S) for worker in session.workers]
        await asyncio.gather(*ready, *(each.ready() for each in session.supervised))
        async with watching(session):
            if await _warm_up(session, options, prepared):
                # The reference scrape lies between the end of the warm-up and the first measured request.
                await unless_stopped_for(session.stop, settle_s)
            started_ns = session.clock.now_ns()
            await run_phase(
                session,
                session.plan("measure"),
                concurrency=options.concurrency if options.closed_loop else None,
                cap=options.cap,
                until_s=options.duration,
            )
            _note_if_used_up(session, options, elapsed_s=(session.clock.now_ns() - started_ns) / 1e9)
            await settle(session, settle_s, listening=None if session.stop.is_set() else session.listening)


async def _plan_measured(session: Session, options: RunOptions, prepared: Prepared) -> None:
    """Write the measured plan."""
    plan = session.plan("measure")
    leaving = leaving_of(options.leave, options.seed)
    order = _order(options, prepared, phase="measure", first_index=first_measured(options), leaving=leaving)
    requests = measure_plan(options, prepared.load, prepared.target, prepared.tokenizer, order)
    about = await write_plan(
        requests, plan, progress=session.progress, exact=options.exact_tokens, shown=_shown(session, plan)
    )
    if clipped := about["clipped_inputs"] + about["clipped_outputs"]:
        session.progress.stage(
            f"{count_of(clipped, 'length')} of {count_of(about['count'], 'request')} clipped to the model's "
            f"{prepared.max_model_len} tokens"
        )
    record(session, "planned", **about)


async def _warm_up(session: Session, options: RunOptions, prepared: Prepared) -> bool:
    """Warm up according to the options, and record the outcome for the report. Returns whether anything was sent."""
    policy = parse_warmup(str(options.warmup))
    before_ms: list[float] = []
    after_ms: list[float] = []
    drained = True
    if policy.kind == "count":
        await run_phase(session, session.plan("warmup"), concurrency=_width(options, policy.requests))
    elif policy.kind == "draft":
        before_ms = await _probe(session, options, prepared, 0)
        drained = await _by_the_draft(session, options, prepared)
        for number in range(1, 1 + MOST_PROBE_ROUNDS):
            after_ms += await _probe(session, options, prepared, number)
            if session.stop.is_set() or stable(after_ms):
                break
    outcome = statement(policy, _log(session, "warmup"), drained=drained, before_ms=before_ms, after_ms=after_ms)
    record(session, "warmup", **msgspec.to_builtins(outcome))
    return policy.kind in ("draft", "count")


async def _by_the_draft(session: Session, options: RunOptions, prepared: Prepared) -> bool:
    """Send rounds until the draft's measure is full. Returns whether each round was drained to its end."""
    policy = parse_warmup(str(options.warmup))
    sent = rounds = 0
    while not session.stop.is_set() and sent < MOST_WARM_UP_REQUESTS:
        log = _log(session, "warmup")
        count = min(more_requests(policy, log), MOST_WARM_UP_REQUESTS - sent)
        if not count:
            break
        rounds += 1
        name = "warmup" if rounds == 1 else f"warmup-{rounds}"
        await unless_stopped(
            session.stop,
            _plan_preliminary(session, options, prepared, "warmup", name=name, first_index=sent, count=count),
        )
        await run_phase(session, session.plan(name), concurrency=_width(options, count))
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
    first = MOST_WARM_UP_REQUESTS + number * PROBES
    await unless_stopped(
        session.stop, _plan_preliminary(session, options, prepared, "probe", name=name, first_index=first, count=PROBES)
    )
    await run_phase(session, session.plan(name), concurrency=1)
    log = _log(session, "probe")
    round_ = take(log, (log.index >= first) & (log.index < first + PROBES))
    ttft_ms = request_metrics(round_).ttft_ms
    return [float(value) for value in np.where(round_.status == "ok", ttft_ms, np.nan)]


async def _plan_preliminary(
    session: Session,
    options: RunOptions,
    prepared: Prepared,
    phase: str,
    *,
    name: str = "warmup",
    first_index: int,
    count: int,
) -> None:
    order = _order(options, prepared, phase=phase, first_index=first_index, count=count, sessions=False)
    requests = preliminary_plan(options, prepared.target, prepared.tokenizer, order)
    plan = session.plan(name)
    about = await write_plan(
        requests, plan, progress=session.progress, exact=options.exact_tokens, shown=_shown(session, plan)
    )
    record(session, "planned", **about)


def _order(options: RunOptions, prepared: Prepared, **which: Any) -> PlanOrder:
    """Return the order of a plan of `which` requests, from the options and the target."""
    return PlanOrder(
        max_model_len=prepared.max_model_len,
        ignore_eos=options.ignore_eos,
        urls=len(prepared.served),
        exact=options.exact_tokens,
        **which,
    )


def _width(options: RunOptions, count: int) -> int:
    if options.closed_loop and options.concurrency is not None:
        return min(options.concurrency, count)
    return min(options.cap or WARM_UP_CONCURRENCY, WARM_UP_CONCURRENCY, count)


def _shown(session: Session, plan: Path) -> Path | None:
    """Return the path of a plan without texts beside the sent one, or None. None where the run keeps the one that is
    sent.
    """
    return None if session.plans is None else session.path / RAW / plan.name


def _log(session: Session, phase: str) -> RequestLog:
    """Return the requests of a phase that were sent so far."""
    session.live.poll()
    requests = session.live.logs.requests.table()
    return take(requests, requests.phase == phase)


@asynccontextmanager
async def _deadline(session: Session, seconds: float | None, begun_s: float) -> AsyncIterator[None]:
    """Stop the session at the deadline, and state it as the reason. The load stops as if the user had stopped it."""
    if seconds is None:
        yield
        return

    async def stop() -> None:
        await asyncio.sleep(begun_s + seconds - asyncio.get_running_loop().time())
        _stop(session, f"the deadline of {seconds:g} s was reached")

    async with _beside(stop()):
        yield


@asynccontextmanager
async def _log_limit(session: Session) -> AsyncIterator[None]:
    """Stop the session when its logs are as large as they may be."""

    async def stop() -> None:
        raw = session.path / RAW
        while sum(entry.stat().st_size for entry in os.scandir(raw)) < MOST_LOG_BYTES:  # noqa: ASYNC110  files have no event
            await asyncio.sleep(WATCH_EVERY_S)
        _stop(session, f"the logs of the run have reached {MOST_LOG_BYTES / 1e9:g} GB")

    async with _beside(stop()):
        yield


def _stop(session: Session, why: str) -> None:
    with suppress(OSError):  # a full disk; the run stops all the same
        warn_and_record(session, f"{why}; requests in flight are cancelled")
    session.stop.set()


@asynccontextmanager
async def _beside(waiting: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a task while the context is open."""
    task = asyncio.ensure_future(waiting)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _note_if_used_up(session: Session, options: RunOptions, *, elapsed_s: float) -> None:
    """Warn if a closed loop sent all its prepared requests before its duration ended."""
    if options.requests is not None or not options.closed_loop or options.duration is None:
        return
    if elapsed_s < options.duration and not session.stop.is_set():
        prepared, of_all = planned_requests(options), f"{elapsed_s:.1f} of {options.duration:g} s"
        what = "saved requests" if prepared is None else f"{prepared} prepared requests"
        warn_and_record(session, f"all {what} were used up after {of_all}; set --requests")
