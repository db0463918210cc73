"""From a workload to the requests as they will be sent: prompts fitted to the tokenizer, clipped to the model.

Runs in the conductor, before the load or ahead of it; a worker only reads the result.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.fitter import Fitter, Planned
from loadgen.protocols.prompt import Target
from loadgen.records import PlannedRequest
from loadgen.tokenizers import Tokenizer
from loadgen.workloads.request import WorkloadRequest

_FITTED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """What of a workload is planned, and as what.

    first_index    index of the first request; the others follow it
    offsets_ns     int64[n] of an open loop, one a request or session; None: closed loop
    count          how many requests or sessions; None: as many as there are offsets, or without end
    max_model_len  the model's limit on input and output tokens together; None: not known
    ignore_eos     ask the engine to generate to max_tokens
    urls           how many URLs the requests go to, one after the other; a session stays at its own
    sessions       plan later turns too; false for a warm-up, whose indices must not depend on the workload
    exact          verify input lengths after the chat template, and correct them by bisection
    """

    phase: str
    first_index: int = 0
    offsets_ns: npt.NDArray[np.int64] | None = None
    count: int | None = None
    max_model_len: int | None = None
    ignore_eos: bool = True
    urls: int = 1
    sessions: bool = True
    exact: bool = False


async def plan(
    workload: Iterable[WorkloadRequest], *, target: Target, tokenizer: Tokenizer, order: PlanOrder
) -> AsyncGenerator[Planned, None]:
    """The workload's requests, in order, fitted eight at a time; see Fitter for what is fitted and declared.

    Each turn of a session has an index of its own, the later ones right behind the first's.

    Raises TokenizerError.
    """
    fitter = Fitter(
        target=target,
        tokenizer=tokenizer,
        max_model_len=order.max_model_len,
        ignore_eos=order.ignore_eos,
        sessions=order.sessions,
        exact=order.exact,
    )
    pending: deque[tuple[int, asyncio.Task[Planned]]] = deque()
    wanted = _wanted(workload, order)
    index = order.first_index
    try:
        for ordinal in itertools.count():
            for offset_ns, request in itertools.islice(wanted, _FITTED_AT_ONCE - len(pending)):
                # What several requests share is fitted once, before the first of them.
                await fitter.prepare(request)
                pending.append((offset_ns, asyncio.create_task(fitter.fit(request))))
            if not pending:
                return
            offset_ns, task = pending[0]
            fitted = await task
            pending.popleft()
            one = numbered(fitted.request, order, index=index, offset_ns=offset_ns, ordinal=ordinal)
            index += 1 + len(one.turns)
            yield replace(fitted, request=one)
    finally:
        for _, task in pending:
            task.cancel()
        await asyncio.gather(*(task for _, task in pending), return_exceptions=True)


def _wanted(workload: Iterable[WorkloadRequest], order: PlanOrder) -> Iterator[tuple[int, WorkloadRequest]]:
    """Requests with their offset, as many as the order asks for."""
    offsets = itertools.repeat(-1) if order.offsets_ns is None else iter(order.offsets_ns.tolist())
    # The offsets come first: where they end, nothing more is drawn from a workload that another phase may go on with.
    return zip(itertools.islice(offsets, order.count), workload, strict=False)


def numbered(request: PlannedRequest, order: PlanOrder, *, index: int, offset_ns: int, ordinal: int) -> PlannedRequest:
    """A request and its later turns as the order's `ordinal`-th.

    A session's own number is its ordinal: by its index, sessions of two turns would all be the even workers'.
    """
    replaced, phase, url = msgspec.structs.replace, order.phase, ordinal % order.urls
    turns = tuple(
        replaced(turn, index=index + number, phase=phase, url=url, session=ordinal, turn=number)
        for number, turn in enumerate(request.turns, 1)
    )
    session = ordinal if turns else -1
    return replaced(request, index=index, phase=phase, offset_ns=offset_ns, url=url, session=session, turns=turns)
