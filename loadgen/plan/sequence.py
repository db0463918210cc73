"""From a workload to the requests as they will be sent: prompts fitted to the tokenizer, clipped to the model.

Runs in the conductor, before the load or ahead of it; a worker only reads the result.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace

import msgspec

from loadgen.plan.fitting import Fitter, Planned, PlanOrder
from loadgen.plan.tokenizers import Tokenizer
from loadgen.plan.workloads.request import WorkloadRequest
from loadgen.protocols.request import Target
from loadgen.records import PlannedRequest

_FITTED_AT_ONCE = 8


async def plan(
    workload: Iterable[WorkloadRequest], *, target: Target, tokenizer: Tokenizer, order: PlanOrder
) -> AsyncGenerator[Planned, None]:
    """The workload's requests, in order, fitted eight at a time; see Fitter for what is fitted and declared.

    Each turn of a session has an index of its own, the later ones right behind the first's.

    Raises TokenizerError.
    """
    fitter = Fitter(target=target, tokenizer=tokenizer, order=order)
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
