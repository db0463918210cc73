"""A load from its first preparation to the last scrape after it: plans, warm-up, measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from loadgen.plan.fitting import PlanOrder
from sidecar.directory import RAW
from sidecar.options.load import RunOptions
from sidecar.processes import START_TIMEOUT_S
from sidecar.run.phases import (
    Session,
    record,
    run_phase,
    settle,
    unless_stopped,
    unless_stopped_for,
    warn_and_record,
    watching,
)
from sidecar.run.planning import first_measured, measure_plan, planned_requests, save_requests, write_plan
from sidecar.run.prepare import Prepared
from sidecar.run.warm_up import prepare_warm_up, warm_up

SETTLE_LEAST_S = 0.5


async def load(session: Session, options: RunOptions, prepared: Prepared, *, begun_s: float) -> None:
    """Warm a target up and measure it. All measured requests are made before the first is sent.

    The run began at `begun_s`, in the loop's time: its deadline counts from there. Raises SidelightError when one of
    our processes, or /tokenize, fails.
    """
    settle_s = max(2 * options.scrape_interval, SETTLE_LEAST_S)
    async with _deadline(session, options.deadline, begun_s):
        session.progress.stage("preparing requests")
        await unless_stopped(session.stop, prepare_warm_up(session, options, prepared))
        await unless_stopped(session.stop, _prepare(session, options, prepared))
        children = session.workers if session.scraper is None else (*session.workers, session.scraper)
        await asyncio.gather(*(child.expect("ready", timeout_s=START_TIMEOUT_S) for child in children))
        async with watching(session):
            if await warm_up(session, options, prepared):
                # The reference scrape lies between the end of the warm-up and the first measured request.
                await unless_stopped_for(session.stop, settle_s)
            started_ns = session.clock.now_ns()
            await run_phase(
                session,
                session.path / RAW / "plan-measure.log",
                concurrency=options.concurrency,
                barrier=options.barrier,
                until_s=options.duration,
            )
            _note_if_used_up(session, options, elapsed_s=(session.clock.now_ns() - started_ns) / 1e9)
            await settle(session, settle_s, listening=None if session.stop.is_set() else session.listening)


async def _prepare(session: Session, options: RunOptions, prepared: Prepared) -> None:
    """Write the measured plan, and the file of its requests where one was asked for."""
    plan = session.path / RAW / "plan-measure.log"
    order = PlanOrder(
        phase="measure",
        first_index=first_measured(options),
        max_model_len=prepared.max_model_len,
        ignore_eos=options.ignore_eos,
        urls=len(prepared.served),
        exact=options.exact_tokens,
    )
    requests = measure_plan(options, prepared.load, prepared.target, prepared.tokenizer, order)
    about = await write_plan(requests, plan, progress=session.progress)
    if options.save_requests is not None:
        about["saved_sha256"] = save_requests(options.save_requests, plan, prepared.load)
    record(session, "planned", **about)


@asynccontextmanager
async def _deadline(session: Session, seconds: float | None, begun_s: float) -> AsyncIterator[None]:
    """Stop the session as the user would after so many seconds, and say that it was that."""
    if seconds is None:
        yield
        return

    async def stop() -> None:
        await asyncio.sleep(begun_s + seconds - asyncio.get_running_loop().time())
        warn_and_record(session, f"the deadline of {seconds:g} s was reached; requests in flight are cancelled")
        session.stop.set()

    waiting = asyncio.ensure_future(stop())
    try:
        yield
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


def _note_if_used_up(session: Session, options: RunOptions, *, elapsed_s: float) -> None:
    """Say when a closed loop ended because all that was prepared for its duration was sent."""
    if options.requests is not None or options.concurrency is None or options.duration is None:
        return
    if elapsed_s < options.duration and not session.stop.is_set():
        prepared, of_all = planned_requests(options), f"{elapsed_s:.1f} of {options.duration:g} s"
        what = "saved requests" if prepared is None else f"{prepared} prepared requests"
        warn_and_record(session, f"all {what} were used up after {of_all}; set --requests")
