"""Plans for load workers, from options: the requests, their order and their times."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sidelight.loadgen.plan import saved
from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.loadgen.plan.fitting import Planned, PlanOrder, plan
from sidelight.loadgen.plan.saved import SavedRequestsError
from sidelight.loadgen.plan.tokenizers import FittingTokenizer, TokenizerError
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads import mix
from sidelight.loadgen.plan.workloads.catalogue import ReadyWorkload
from sidelight.loadgen.plan.workloads.distributions import Fixed
from sidelight.loadgen.protocols.request import RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import append_record, hidden_request, plan_end
from sidelight.recorded.directory import RAW, read_manifest
from sidelight.recorded.errors import ConfigurationError, TargetIncompatible, TargetUnreachable
from sidelight.rundir.frames import FrameLog
from sidelight.rundir.printable.errors import code_of
from sidelight.rundir.printable.masking import MASK
from sidelight.sidecar.options.checks import arrival_of, lengths_of, named, read_arrivals, shown_rate
from sidelight.sidecar.options.load import DRAFT, RunOptions
from sidelight.sidecar.progress.reporter import Progress

PER_SLOT_PER_S = 2.0
LEAST_PER_SLOT = 10
MOST_PREPARED = 20_000
SAY_EVERY = 200
# Where the measured requests begin to be numbered when it is not known beforehand how many come before them.
DRAFT_ROOM = 100_000

PROBE = mix.RequestClass(name="probe", input_tokens=Fixed(256), output_tokens=Fixed(16), content="words")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """The load of a run: the measured workload or the saved requests in its place, and their schedule.

    about   what the manifest states of it
    notes   what the reader must know, once
    held    how many requests the file holds that ends the load; None where a duration or a number ends it
    """

    workload: ReadyWorkload | None
    arrival: Arrival | None
    about: dict[str, Any]
    notes: tuple[str, ...]
    held: int | None = None

    @property
    def header_sets(self) -> tuple[Mapping[str, str], ...]:
        """Return the headers that single requests bear, by their position."""
        return () if self.workload is None else self.workload.headers


def read_load(options: RunOptions) -> PlannedLoad:
    """Read the files that a load is made of, if any. Raises ConfigurationError naming file, field, value and cure."""
    trace = read_arrivals(options.trace)
    arrival = arrival_of(options, trace)
    notes = trace.notes if trace is not None and options.workload != "trace" else ()
    try:
        if options.replay_requests is not None:
            return _replayed(options, options.replay_requests, arrival, notes)
        workload = _workload(options, options.seed)
    except ValueError as error:
        raise ConfigurationError(code_of(error, "option.value"), named(*_source(options), str(error))) from error
    held = workload.held if options.requests is None and options.duration is None else None
    if arrival is not None:
        _offsets_ns(options, arrival, held)  # a schedule without a request is an error before any target is asked
    about = {"label": workload.label, **workload.about}
    return PlannedLoad(workload=workload, arrival=arrival, about=about, notes=(*workload.notes, *notes), held=held)


def _source(options: RunOptions) -> tuple[str, str]:
    """Return the option that selects the requests, and its value."""
    if options.replay_requests is not None:
        return "--replay-requests", str(options.replay_requests)
    if options.prompts is not None:
        return "--prompts", str(options.prompts)
    return "--workload", options.workload


def _replayed(options: RunOptions, path: Path, arrival: Arrival | None, notes: tuple[str, ...]) -> PlannedLoad:
    """Return a load of a recorded run's requests. Without other options, they are due at their recorded times.

    Raises SavedRequestsError.
    """
    try:
        manifest = read_manifest(path)
    except ConfigurationError as error:
        raise SavedRequestsError(error.code, str(error)) from error
    parts = (manifest.get(name) for name in ("config", "workload"))  # of a directory that another may have written
    config, workload = (part if isinstance(part, dict) else {} for part in parts)
    if config.get("redact_bodies"):
        raise SavedRequestsError(
            "replay.empty", f"{path}: --redact-bodies left no request in it; give a run without it"
        )
    if options.extra_body is None and f'"{MASK}"' in str(config.get("extra_body")):
        raise SavedRequestsError(
            "replay.secret", f"{path}: its --extra-body had a secret, which is not recorded; give it again"
        )
    plan = saved.look(_plan_of(path))
    if options.rate is None and options.arrival == "poisson" and plan.is_timed:
        arrival = None
    about = {**workload, "replayed_from": str(path), "replayed_sha256": plan.sha256}
    return PlannedLoad(workload=None, arrival=arrival, about=about, notes=notes, held=plan.count)


def _plan_of(path: Path) -> Path:
    """Return the log of a run's measured requests."""
    return path / RAW / "plan-measure.log"


def preliminary_plan(
    options: RunOptions, target: RequestTarget, tokenizer: FittingTokenizer, order: PlanOrder
) -> AsyncGenerator[Planned, None]:
    """Return requests of a warm-up or of probes. Their seeds are others, so that nothing measured is cached.

    A warm-up is of the measured workload; before a user's own prompts it is as long as these. Probes are all of one
    length: only what the engine does differs then. Rounds, which differ in their first index, have seeds of their own.
    """
    key = (1, order.first_index) if order.first_index else (1,)
    seed = int(np.random.SeedSequence(options.seed, spawn_key=key).generate_state(1)[0])
    if order.phase == "probe":
        requests = mix.requests([PROBE], seed=seed)
    elif options.prompts is not None:
        requests = workloads.likenesses(
            options.prompts,
            seed=seed,
            protocol=PROTOCOLS[options.endpoint],
            output_tokens=_output_tokens(options),
        )
    else:
        requests = _workload(options, seed).requests
    return plan(requests, target=target, tokenizer=tokenizer, order=order)


def measure_plan(
    options: RunOptions, load: PlannedLoad, target: RequestTarget, tokenizer: FittingTokenizer, order: PlanOrder
) -> AsyncGenerator[Planned, None]:
    """Return the measured requests, in order. The `order` is complete but for their send times and number.

    Raises ConfigurationError when the schedule has none.
    """
    offsets_ns = None if load.arrival is None else _offsets_ns(options, load.arrival, load.held)
    count = planned_requests(options)
    timed = replace(order, offsets_ns=offsets_ns, count=load.held if count is None else count)
    if load.workload is not None:
        return plan(load.workload.requests, target=target, tokenizer=tokenizer, order=timed)
    recorded = _plan_of(cast("Path", options.replay_requests))
    return saved.replay(recorded, order=timed, model=target.model, extra=target.extra)


def first_measured(options: RunOptions) -> int:
    """Return the index of the first measured request: behind the warm-up's."""
    if isinstance(options.warmup, int):
        return options.warmup
    return DRAFT_ROOM if options.warmup == DRAFT else 0


def planned_requests(options: RunOptions) -> int | None:
    """Return the number of requests to prepare. None: as many as the open loop's schedule, or the saved file, has.

    A closed loop that only a duration ends gets what its slots could use up at two requests a second each. They are all
    made before the load, so that nothing but the load reaches the engine while it is measured.
    """
    if options.requests is not None or not options.closed_loop or options.duration is None:
        return options.requests
    if options.replay_requests is not None:
        return None
    per_slot = max(LEAST_PER_SLOT, math.ceil(PER_SLOT_PER_S * options.duration))
    return min(MOST_PREPARED, (options.concurrency or 0) * per_slot)


async def write_plan(
    requests: AsyncGenerator[Planned, None],
    path: Path,
    *,
    progress: Progress,
    exact: bool = False,
    shown: Path | None = None,
) -> dict[str, Any]:
    """Write requests to a plan, and without their texts to the one that is `shown`. Returns what to record of them.

    `exact`: their lengths are counted after the chat template, which the reference tokenizer cannot do.

    Raises TargetUnreachable when the server no longer answers that makes the prompts, TargetIncompatible when its
    tokenizer fails, ConfigurationError for a bad saved request.
    """
    digest = hashlib.sha256()
    counts = dict.fromkeys(
        ("count", "turns", "clipped_inputs", "clipped_outputs", "missed_lengths", "dropped_turns"), 0
    )
    phase = path.stem.removeprefix("plan-")
    log, hidden = FrameLog(path), None if shown is None else FrameLog(shown)
    try:
        async with aclosing(requests):
            async for planned in requests:
                if hidden is not None:  # first: a request that was sent is planned
                    append_record(hidden, hidden_request(planned.request))
                append_record(log, planned.request)
                for turn in (planned.request, *planned.request.turns):
                    digest.update(turn.body)
                counts["count"] += 1
                counts["turns"] += len(planned.request.turns)
                counts["clipped_inputs"] += planned.clipped_input
                counts["clipped_outputs"] += planned.clipped_output
                counts["missed_lengths"] += planned.missed_tokens != 0
                counts["dropped_turns"] += planned.dropped_turns
                if counts["count"] % SAY_EVERY == 0:
                    progress.stage(f"prepared {counts['count']} requests")
        for each in filter(None, (hidden, log)):
            append_record(each, plan_end(phase))
    except TokenizerError as error:
        if _is_gone(error):
            raise TargetUnreachable("engine.gone", f"the engine is gone: {error}; its own log may say why") from error
        cure = (
            "take the model's own chat template, or leave out --exact-tokens"
            if exact
            else "try --tokenizer cl100k_base"
        )
        raise TargetIncompatible(error.code, f"the tokenizer: {error}; {cure}") from error
    except SavedRequestsError as error:
        raise ConfigurationError(error.code, f"--replay-requests {error}") from error
    finally:
        for each in filter(None, (hidden, log)):
            each.close()
    return {"phase": phase, **counts, "sha256": digest.hexdigest()}


def _is_gone(error: TokenizerError) -> bool:
    from aiohttp import ClientConnectionError  # noqa: PLC0415  it is imported where a server makes the prompts

    return isinstance(error.__cause__, ClientConnectionError)


def _workload(options: RunOptions, seed: int) -> ReadyWorkload:
    if options.prompts is not None:
        return workloads.given(
            options.prompts,
            seed=seed,
            protocol=PROTOCOLS[options.endpoint],
            sessions=options.sessions,
            think_s=options.think_time,
            output_tokens=_output_tokens(options),
        )
    return workloads.build(
        options.workload,
        seed=seed,
        dataset=options.dataset,
        trace=options.trace,
        sessions=options.sessions,
        think_s=options.think_time,
        lengths=lengths_of(options),
    )


def _output_tokens(options: RunOptions) -> int | None:
    """Return the output length of prompts that state none, of checked options; None: the usual."""
    return None if options.output_tokens is None else int(options.output_tokens)


def _offsets_ns(options: RunOptions, arrival: Arrival, held: int | None) -> npt.NDArray[np.int64]:
    # A file ends by itself: its requests are all there is to send.
    count = options.requests if options.requests is not None else held
    try:
        offsets_ns = schedule(arrival, seed=options.seed, count=count, duration_s=options.duration)
    except ValueError as error:
        raise ConfigurationError("option.value", f"--arrival {options.arrival}: {error}") from error
    if not len(offsets_ns):
        rate = f"--rate {shown_rate(options.rate)}" if options.rate is not None else f"--arrival {options.arrival}"
        limit = f"--duration {options.duration:g}" if options.duration is not None else f"--requests {options.requests}"
        raise ConfigurationError("load.empty", f"{rate} {limit}: no request would be sent; raise one of them")
    return offsets_ns
