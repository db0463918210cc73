"""From a workload to the requests as they will be sent: prompts fitted to the tokenizer, clipped to the model.

Runs in the conductor, before the load or ahead of it; a worker only reads the result.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.protocols.openai import Target, encode_request
from loadgen.records import PlannedRequest
from loadgen.tokenizers import ReferenceTokenizer, Tokenizer
from loadgen.workloads.request import WorkloadRequest

# What a chat template and special tokens may add to a prompt.
TEMPLATE_TOKENS = 64
_FITTED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """What of a workload is planned, and as what.

    first_index    index of the first request; the others follow it
    offsets_ns     int64[n] of an open loop, one a request; None: closed loop
    count          how many requests; None: as many as there are offsets, or without end
    max_model_len  the model's limit on input and output tokens together; None: not known
    ignore_eos     ask the engine to generate to max_tokens
    """

    phase: str
    first_index: int = 0
    offsets_ns: npt.NDArray[np.int64] | None = None
    count: int | None = None
    max_model_len: int | None = None
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request of a plan, and whether the model's length made it shorter than the workload wanted."""

    request: PlannedRequest
    clipped_input: bool
    clipped_output: bool


def clip(input_tokens: int, max_tokens: int, max_model_len: int | None) -> tuple[int, int]:
    """Input and output lengths that fit the model together with 64 tokens for the template.

    The input gives way first, down to one token; then the output, down to one.
    """
    if max_model_len is None:
        return input_tokens, max_tokens
    room = max_model_len - TEMPLATE_TOKENS
    fitted_input = max(1, min(input_tokens, room - max_tokens))
    return fitted_input, max(1, min(max_tokens, room - fitted_input))


async def plan(
    workload: Iterable[WorkloadRequest], *, target: Target, tokenizer: Tokenizer, order: PlanOrder
) -> AsyncGenerator[Planned, None]:
    """The workload's requests, in order, fitted eight at a time.

    With the reference tokenizer a prompt is the text of the drawn ids, and the declared length is how many were drawn,
    as the draft's appendix has it; turning random ids into text loses something, so a server's usage may differ. With
    a server's tokenizer the same text is fitted to the drawn length in that server's tokens, and the count that the
    server verified is declared.

    Raises TokenizerError.
    """
    reference = tokenizer if isinstance(tokenizer, ReferenceTokenizer) else ReferenceTokenizer()
    pending: deque[asyncio.Task[Planned]] = deque()
    numbered = _numbered(workload, order)
    fitter = _Fitter(target=target, tokenizer=tokenizer, reference=reference, order=order)
    try:
        while True:
            for index, offset_ns, request in itertools.islice(numbered, _FITTED_AT_ONCE - len(pending)):
                pending.append(asyncio.create_task(_fitted(fitter, request, index, offset_ns)))
            if not pending:
                return
            yield await pending[0]
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitter:
    target: Target
    tokenizer: Tokenizer
    reference: ReferenceTokenizer
    order: PlanOrder


def _numbered(workload: Iterable[WorkloadRequest], order: PlanOrder) -> Iterator[tuple[int, int, WorkloadRequest]]:
    """Requests with their index and offset, as many as the order asks for."""
    offsets = itertools.repeat(-1) if order.offsets_ns is None else iter(order.offsets_ns.tolist())
    # The offsets come first: where they end, nothing more is drawn from a workload that another phase may go on with.
    for index, (offset_ns, request) in enumerate(zip(itertools.islice(offsets, order.count), workload, strict=False)):
        yield order.first_index + index, offset_ns, request


async def _fitted(fitter: _Fitter, request: WorkloadRequest, index: int, offset_ns: int) -> Planned:
    input_tokens, max_tokens = clip(request.input_tokens, request.max_tokens, fitter.order.max_model_len)
    if fitter.tokenizer is fitter.reference:
        text, declared = fitter.reference.decode(request.token_ids[:input_tokens]), input_tokens
    else:
        prompt = await fitter.tokenizer.fit(fitter.reference.decode(request.token_ids), input_tokens)
        text, declared = prompt.text, prompt.tokens
    path, body = encode_request(
        fitter.target, text, max_tokens, request.temperature, ignore_eos=fitter.order.ignore_eos
    )
    return Planned(
        request=PlannedRequest(
            index=index,
            phase=fitter.order.phase,
            workload_class=request.workload_class,
            path=path,
            body=body,
            input_tokens=declared,
            max_tokens=max_tokens,
            offset_ns=offset_ns,
        ),
        clipped_input=input_tokens < request.input_tokens,
        clipped_output=max_tokens < request.max_tokens,
    )
