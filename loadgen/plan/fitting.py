"""Conversion of a workload to the requests to send. Prompts are fitted to the tokenizer and clipped to the model.

Runs in the conductor, before the load or ahead of it; a worker only reads the result.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec
import numpy as np
import numpy.typing as npt

from sidelight.loadgen.plan.leaving import Leaving
from sidelight.loadgen.plan.tokenizers import (
    FittedPrompt,
    FittingTokenizer,
    ReferenceTokenizer,
    TokenizerError,
    count_text,
    fit,
    reference,
)
from sidelight.loadgen.plan.tokenizers.fitting import fit_counted
from sidelight.loadgen.plan.workloads.request import Messages, WorkloadRequest
from sidelight.loadgen.protocols.request import Prompt, RequestTarget, joined, text_of, with_number
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest

# What a chat template and special tokens may add to a prompt.
TEMPLATE_TOKENS = 64
_FITTED_AT_ONCE = 8
# What a body asks for a number of output tokens by, or in.
_OUTPUT_FIELDS = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "sampling_params", "parameters",
    "options",
)  # fmt: skip
_NOTHING = FittedPrompt("", 0)
# A text is repeated to this multiple of its estimated length, so that a bisection has room on both sides.
_ROOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One record of a plan, and its differences from the workload's request.

    clipped_input, clipped_output  the model's length made it shorter
    missed_tokens  declared input length minus the wanted one, after clipping; 0 where it was met
    dropped_turns  turns of a session that would not fit the model
    """

    request: PlannedRequest
    clipped_input: bool = False
    clipped_output: bool = False
    missed_tokens: int = 0
    dropped_turns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """The selection of a workload's requests to plan, and the options for them.

    first_index    index of the first request; the others follow it
    offsets_ns     int64[n] of an open loop, one a request or session; None: closed loop
    count          how many requests or sessions; None: as many as there are offsets, or without end
    max_model_len  the model's limit on input and output tokens together; None: not known
    ignore_eos     ask the engine to generate to max_tokens
    urls           how many URLs the requests go to, one after the other; a session stays at its own
    sessions       plan later turns too; false for a warm-up, whose indices must not depend on the workload
    leaving        the clients that leave before their replies end, None for none
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
    leaving: Leaving | None = None
    exact: bool = False


def clip(input_tokens: int, max_tokens: int, max_model_len: int | None) -> tuple[int, int]:
    """Return input and output lengths that fit the model. 64 tokens are reserved for the template.

    The input gives way first, down to one token; then the output, down to one.
    """
    if max_model_len is None:
        return input_tokens, max_tokens
    room = max_model_len - TEMPLATE_TOKENS
    fitted_input = max(1, min(input_tokens, room - max_tokens))
    return fitted_input, max(1, min(max_tokens, room - fitted_input))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The texts around a request's own text, and their token counts."""

    system: FittedPrompt
    prefix: FittedPrompt
    suffix: FittedPrompt

    @property
    def tokens(self) -> int:
        return self.system.tokens + self.prefix.tokens + self.suffix.tokens


class Fitter:
    """Fitter of requests for one target and tokenizer; keeps their shared texts.

    With the reference tokenizer a prompt is the text of the drawn ids, and the declared length is how many were drawn,
    as the draft's appendix has it; turning random ids into text loses something, so a server's usage may differ. With
    any other tokenizer the same text is fitted to the drawn length in its tokens, and the count that it verified is
    declared. A file's text goes out as it is, and what the tokenizer counts in it is declared. With `exact` the count
    after the chat template is what is fitted, verified and declared.

    What is too long for the model loses of its own text first, then its prefix, then its system prompt.
    A later turn declares what it adds; turns that would lead beyond the model's length are dropped.
    """

    def __init__(self, *, target: RequestTarget, tokenizer: FittingTokenizer, order: PlanOrder) -> None:
        """Prepare the fitting. Raises TokenizerError where exact lengths lack a tokenizer with a chat template."""
        self._protocol = PROTOCOLS[target.endpoint]
        if order.exact and self._protocol.templated and not tokenizer.template:
            raise TokenizerError(
                "tokenizer.no-chat-template",
                f"{tokenizer.name} ({tokenizer.source}) has no chat template to count exact prompts with",
            )
        self._target = target
        self._tokenizer = tokenizer
        self._reference = tokenizer if isinstance(tokenizer, ReferenceTokenizer) else reference()
        self._order = order
        self._shared: dict[str, FittedPrompt] = {}
        self._suffixes: dict[str, FittedPrompt] = {}

    async def prepare(self, request: WorkloadRequest) -> None:
        """Fit the texts that the request shares with others, unless already fitted. Raises TokenizerError."""
        for piece in (request.system, request.prefix):
            if piece is not None and piece.name not in self._shared:
                self._shared[piece.name] = await self._fitted(piece.text, piece.token_ids, piece.tokens)
        if request.suffix not in self._suffixes:
            self._suffixes[request.suffix] = FittedPrompt(
                request.suffix, await count_text(self._tokenizer, request.suffix)
            )

    async def fit(self, request: WorkloadRequest, ordinal: int = 0) -> Planned:
        """Return one request as it is sent, the plan's `ordinal`-th, not numbered yet; `prepare` was called with it.

        Raises TokenizerError.
        """
        body = with_number({**self._target.extra, **request.body}, ordinal)
        request = replace(request, body=body, model=self._model_of(request, ordinal))
        if request.messages:
            return await self._as_given(request)
        parts = _Parts(
            system=self._shared[request.system.name] if request.system else _NOTHING,
            prefix=self._shared[request.prefix.name] if request.prefix else _NOTHING,
            suffix=self._suffixes[request.suffix],
        )
        wanted = request.input_tokens
        if request.text is not None:
            wanted = parts.tokens + await count_text(self._tokenizer, request.text)
        input_tokens, max_tokens = clip(wanted, request.max_tokens, self._order.max_model_len)
        parts = _within(parts, input_tokens)
        request_prompt = await self._fit_content(
            request, max(1, input_tokens - parts.tokens), whole=input_tokens == wanted
        )
        if self._order.exact:
            request_prompt, declared = await self._exactly(request_prompt, parts, input_tokens)
        else:
            declared = await self._declared(request, request_prompt, parts, input_tokens)
        prompt = Prompt(text=parts.prefix.text + request_prompt.text + parts.suffix.text, system=parts.system.text)
        turns = await self._turns(request, declared + max_tokens)
        return Planned(
            request=msgspec.structs.replace(self._encoded(request, prompt, declared, max_tokens), turns=turns),
            clipped_input=input_tokens < wanted,
            clipped_output=max_tokens < request.max_tokens,
            missed_tokens=declared - input_tokens,
            dropped_turns=len(request.turns) - len(turns) if self._order.sessions else 0,
        )

    def _model_of(self, request: WorkloadRequest, ordinal: int) -> str:
        """Return the model that a request asks: its own, else drawn evenly from the target's, by its number alone."""
        models = self._target.models
        return request.model or (Random(f"model {ordinal}").choice(models) if models else self._target.model)

    async def _as_given(self, request: WorkloadRequest) -> Planned:
        """Return a whole conversation as it is: only what is asked of the output gives way to the model's length."""
        declared = await self._count(request.messages)
        max_tokens, limit = request.max_tokens, self._order.max_model_len
        if limit is not None:
            max_tokens = max(1, min(max_tokens, limit - TEMPLATE_TOKENS - declared))
        turns = await self._turns(request, declared + max_tokens)
        encoded = self._encoded(request, Prompt(text="", messages=request.messages), declared, max_tokens)
        return Planned(
            request=msgspec.structs.replace(encoded, turns=turns),
            clipped_output=max_tokens < request.max_tokens,
            dropped_turns=len(request.turns) - len(turns) if self._order.sessions else 0,
        )

    async def _count(self, messages: Messages) -> int:
        return await count_text(self._tokenizer, text_of(messages))

    async def _fitted(self, text: str, token_ids: Sequence[int], tokens: int) -> FittedPrompt:
        """Return a file's text as it is, with its count; else the drawn ids as a text of that many tokens."""
        if text:
            return FittedPrompt(text, await count_text(self._tokenizer, text))
        drawn = self._reference.text(token_ids)
        if self._tokenizer is self._reference:
            return FittedPrompt(drawn, tokens)
        return await fit(self._tokenizer, drawn, tokens)

    async def _fit_content(self, request: WorkloadRequest, tokens: int, *, whole: bool) -> FittedPrompt:
        if request.text is None:
            ids = request.token_ids[:tokens] if self._tokenizer is self._reference else request.token_ids
            return await self._fitted("", ids, tokens)
        # A text that is sent whole was counted already; its count is what is left of the input.
        return FittedPrompt(request.text, tokens) if whole else await fit(self._tokenizer, request.text, tokens)

    async def _declared(
        self, request: WorkloadRequest, request_prompt: FittedPrompt, parts: _Parts, input_tokens: int
    ) -> int:
        """Return the declared input length. It is the drawn one with the reference tokenizer, else the counted one."""
        if request.text is None and self._tokenizer is self._reference:
            return input_tokens
        if not parts.prefix.text and not parts.suffix.text:
            return parts.system.tokens + request_prompt.tokens
        # Tokens may merge where two pieces meet.
        user = parts.prefix.text + request_prompt.text + parts.suffix.text
        return parts.system.tokens + await count_text(self._tokenizer, user)

    async def _exactly(self, request_prompt: FittedPrompt, parts: _Parts, tokens: int) -> tuple[FittedPrompt, int]:
        async def count(piece: str) -> int:
            prompt = Prompt(text=parts.prefix.text + piece + parts.suffix.text, system=parts.system.text)
            if self._protocol.templated:
                return await self._tokenizer.count_chat(prompt.system, prompt.text)
            return await count_text(self._tokenizer, joined(prompt))

        if not request_prompt.text:
            return request_prompt, await count("")
        repeats = _ROOM * max(1, -(-tokens // max(1, request_prompt.tokens)))
        fitted = await fit_counted(request_prompt.text * repeats, tokens, count, guess=len(request_prompt.text))
        return fitted, fitted.tokens

    async def _turns(self, request: WorkloadRequest, context_tokens: int) -> tuple[PlannedRequest, ...]:
        if not self._order.sessions:
            return ()
        later_turns = []
        for turn in request.turns:
            if turn.messages:
                turn_prompt = FittedPrompt("", await self._count(turn.messages))
                context_tokens = turn_prompt.tokens + turn.max_tokens
            else:
                turn_prompt = await self._fitted(turn.text or "", turn.token_ids, turn.input_tokens)
                before = 0 if turn.whole else context_tokens
                context_tokens = before + TEMPLATE_TOKENS + turn_prompt.tokens + turn.max_tokens
            if self._order.max_model_len is not None and context_tokens + TEMPLATE_TOKENS > self._order.max_model_len:
                break
            prompt = Prompt(text=turn_prompt.text, messages=turn.messages)
            of_turn = replace(request, body={**request.body, **turn.body})
            encoded = self._encoded(of_turn, prompt, turn_prompt.tokens, turn.max_tokens)
            later_turns.append(
                msgspec.structs.replace(
                    encoded,
                    think_ns=round(turn.think_s * 1e9),
                    headers=turn.headers,
                    whole=turn.whole or bool(turn.messages),
                )
            )
        return tuple(later_turns)

    def _encoded(self, request: WorkloadRequest, prompt: Prompt, input_tokens: int, max_tokens: int) -> PlannedRequest:
        path, body = self._protocol.encode(
            replace(self._target, model=request.model, extra=request.body),
            prompt,
            max_tokens,
            request.temperature,
            ignore_eos=self._order.ignore_eos,
        )
        return PlannedRequest(
            index=-1,
            workload_class=request.workload_class,
            model=f"{request.body.get('model') or request.model}",
            path=path,
            body=body,
            input_tokens=input_tokens,
            max_tokens=asked_output(request.body, max_tokens),
            headers=request.headers,
        )


def asked_output(extra: Mapping[str, object], max_tokens: int) -> int:
    """Return the output tokens that a body asks for with its extra fields; -1 where these say nothing of them."""
    replaced = [extra[name] for name in _OUTPUT_FIELDS if name in extra]
    return max((value for value in replaced if isinstance(value, int)), default=-1) if replaced else max_tokens


def _within(parts: _Parts, input_tokens: int) -> _Parts:
    """Return the parts that leave at least one input token for the request's own text.

    `input_tokens` is the limit: the prefix is dropped first, then the system prompt, then the suffix.
    """
    if parts.tokens >= input_tokens:
        parts = replace(parts, prefix=_NOTHING)
    if parts.tokens >= input_tokens:
        parts = replace(parts, system=_NOTHING)
    if parts.tokens >= input_tokens:
        parts = replace(parts, suffix=_NOTHING)
    return parts


async def plan(
    workload: Iterable[WorkloadRequest], *, target: RequestTarget, tokenizer: FittingTokenizer, order: PlanOrder
) -> AsyncGenerator[Planned, None]:
    """Yield the workload's requests, in order, fitted eight at a time.

    See Fitter for the fitted and the declared lengths.

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
                pending.append(
                    (offset_ns, asyncio.create_task(fitter.fit(request, order.first_index + ordinal + len(pending))))
                )
            if not pending:
                return
            offset_ns, task = pending[0]
            fitted = await task
            pending.popleft()
            numbered_request = numbered(fitted.request, order, index=index, offset_ns=offset_ns, ordinal=ordinal)
            index += 1 + len(numbered_request.turns)
            yield replace(fitted, request=numbered_request)
    finally:
        for _, task in pending:
            task.cancel()
        await asyncio.gather(*(task for _, task in pending), return_exceptions=True)


def _wanted(workload: Iterable[WorkloadRequest], order: PlanOrder) -> Iterator[tuple[int, WorkloadRequest]]:
    """Return an iterator of requests with their offsets, limited by the order's count."""
    offsets = itertools.repeat(-1) if order.offsets_ns is None else iter(order.offsets_ns.tolist())
    # The offsets come first: where they end, nothing more is drawn from a workload that another phase may go on with.
    return zip(itertools.islice(offsets, order.count), workload, strict=False)


def numbered(request: PlannedRequest, order: PlanOrder, *, index: int, offset_ns: int, ordinal: int) -> PlannedRequest:
    """Return a request and its later turns as the order's `ordinal`-th.

    A session's own number is its ordinal: by its index, sessions of two turns would all be the even workers'.
    """
    replaced, phase, url = msgspec.structs.replace, order.phase, ordinal % order.urls
    session = ordinal if request.turns else -1
    request, *turns = (
        replaced(
            turn, index=index + number, phase=phase, url=url, session=session, turn=number,
            leave_ns=-1 if order.leaving is None else order.leaving.after(index + number),
        )
        for number, turn in enumerate((request, *request.turns))
    )  # fmt: skip
    return replaced(request, offset_ns=offset_ns, turns=tuple(turns))
