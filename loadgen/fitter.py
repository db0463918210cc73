"""One request of a workload made ready to send: its prompt of the wanted length, within the model's, as a body."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from loadgen.protocols import PROTOCOLS
from loadgen.protocols.prompt import Prompt, Target, joined
from loadgen.records import PlannedRequest
from loadgen.tokenizers import FittedPrompt, ReferenceTokenizer, Tokenizer, TokenizerError, reference
from loadgen.tokenizers.fitting import fit_counted
from loadgen.workloads.request import Shared, Turn, WorkloadRequest

# What a chat template and special tokens may add to a prompt.
TEMPLATE_TOKENS = 64
_NOTHING = FittedPrompt("", 0)
# A text is repeated to so many times its estimated length, so that a bisection has room on both sides.
_ROOM = 2
# Protocols that send messages, which the server puts under its chat template.
_TEMPLATED = ("chat", "responses", "websocket", "ollama", "exo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One record of a plan, and in what it differs from what the workload wanted.

    clipped_input, clipped_output  the model's length made it shorter
    missed_tokens  declared input length minus the wanted one, after clipping; 0 where it was met
    dropped_turns  turns of a session that would not fit the model, or that the protocol cannot carry
    """

    request: PlannedRequest
    clipped_input: bool = False
    clipped_output: bool = False
    missed_tokens: int = 0
    dropped_turns: int = 0


def clip(input_tokens: int, max_tokens: int, max_model_len: int | None) -> tuple[int, int]:
    """Input and output lengths that fit the model together with 64 tokens for the template.

    The input gives way first, down to one token; then the output, down to one.
    """
    if max_model_len is None:
        return input_tokens, max_tokens
    room = max_model_len - TEMPLATE_TOKENS
    fitted_input = max(1, min(input_tokens, room - max_tokens))
    return fitted_input, max(1, min(max_tokens, room - fitted_input))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What stands around a request's own text, and what it takes of the length."""

    system: FittedPrompt
    prefix: FittedPrompt
    suffix: str
    suffix_tokens: int

    @property
    def tokens(self) -> int:
        return self.system.tokens + self.prefix.tokens + self.suffix_tokens


class Fitter:
    """Fits requests for one target and tokenizer; keeps what they share.

    With the reference tokenizer a prompt is the text of the drawn ids, and the declared length is how many were drawn,
    as the draft's appendix has it; turning random ids into text loses something, so a server's usage may differ. With
    any other tokenizer the same text is fitted to the drawn length in its tokens, and the count that it verified is
    declared. A file's text goes out as it is, and what the tokenizer counts in it is declared. With `exact` the count
    after the chat template is what is fitted, verified and declared.

    What is too long for the model loses of its own text first, then its prefix, then its system prompt.
    A later turn declares what it adds; turns that would lead beyond the model's length are dropped.
    """

    def __init__(
        self,
        *,
        target: Target,
        tokenizer: Tokenizer,
        max_model_len: int | None,
        ignore_eos: bool,
        sessions: bool,
        exact: bool,
    ) -> None:
        """Raises TokenizerError where exact lengths are wanted and the tokenizer has no chat template."""
        templated = target.endpoint in _TEMPLATED
        if exact and templated and not tokenizer.template:
            raise TokenizerError(
                f"{tokenizer.name} ({tokenizer.source}) has no chat template to count exact prompts with"
            )
        self._target = target
        self._protocol = PROTOCOLS[target.endpoint]
        self._tokenizer = tokenizer
        self._reference = tokenizer if isinstance(tokenizer, ReferenceTokenizer) else reference()
        self._max_model_len = max_model_len
        self._ignore_eos = ignore_eos
        self._sessions = sessions
        self._exact = exact
        self._templated = templated
        self._shared: dict[str, FittedPrompt] = {}
        self._suffix_tokens: dict[str, int] = {}

    async def prepare(self, request: WorkloadRequest) -> None:
        """Fit what the request shares with others, unless that was done. Raises TokenizerError."""
        for piece in (request.system, request.prefix):
            if piece is not None and piece.name not in self._shared:
                self._shared[piece.name] = await self._piece(piece)
        if request.suffix not in self._suffix_tokens:
            self._suffix_tokens[request.suffix] = await self._tokenizer.count_text(request.suffix)

    async def fit(self, request: WorkloadRequest) -> Planned:
        """One request as it is sent, not numbered yet; `prepare` was called with it. Raises TokenizerError."""
        parts = _Parts(
            system=self._shared[request.system.name] if request.system else _NOTHING,
            prefix=self._shared[request.prefix.name] if request.prefix else _NOTHING,
            suffix=request.suffix,
            suffix_tokens=self._suffix_tokens[request.suffix],
        )
        wanted = request.input_tokens
        if request.text is not None:
            wanted = parts.tokens + await self._tokenizer.count_text(request.text)
        input_tokens, max_tokens = clip(wanted, request.max_tokens, self._max_model_len)
        parts = _within(parts, input_tokens)
        own = await self._own(request, max(1, input_tokens - parts.tokens), whole=input_tokens == wanted)
        if self._exact:
            own, declared = await self._exactly(own, parts, input_tokens)
        else:
            declared = await self._declared(request, own, parts, input_tokens)
        prompt = Prompt(text=parts.prefix.text + own.text + parts.suffix, system=parts.system.text)
        turns = await self._turns(request, declared + max_tokens)
        return Planned(
            request=msgspec.structs.replace(self._encoded(request, prompt, declared, max_tokens), turns=turns),
            clipped_input=input_tokens < wanted,
            clipped_output=max_tokens < request.max_tokens,
            missed_tokens=declared - input_tokens,
            dropped_turns=len(request.turns) - len(turns) if self._sessions else 0,
        )

    async def _piece(self, piece: Shared) -> FittedPrompt:
        if piece.text:
            return FittedPrompt(piece.text, await self._tokenizer.count_text(piece.text))
        text = self._reference.decode(piece.token_ids)
        if self._tokenizer is self._reference:
            return FittedPrompt(text, piece.tokens)
        return await self._tokenizer.fit(text, piece.tokens)

    async def _own(self, request: WorkloadRequest, tokens: int, *, whole: bool) -> FittedPrompt:
        if request.text is not None:
            # A text that is sent whole was counted already; its count is what is left of the input.
            return FittedPrompt(request.text, tokens) if whole else await self._tokenizer.fit(request.text, tokens)
        if self._tokenizer is self._reference:
            return FittedPrompt(self._reference.decode(request.token_ids[:tokens]), tokens)
        return await self._tokenizer.fit(self._reference.decode(request.token_ids), tokens)

    async def _declared(self, request: WorkloadRequest, own: FittedPrompt, parts: _Parts, input_tokens: int) -> int:
        """What is stated as the input's length: as drawn with the reference tokenizer, else as counted."""
        if request.text is None and self._tokenizer is self._reference:
            return input_tokens
        if not parts.prefix.text and not parts.suffix:
            return parts.system.tokens + own.tokens
        # Tokens may merge where two pieces meet.
        user = parts.prefix.text + own.text + parts.suffix
        return parts.system.tokens + await self._tokenizer.count_text(user)

    async def _exactly(self, own: FittedPrompt, parts: _Parts, tokens: int) -> tuple[FittedPrompt, int]:
        async def count(piece: str) -> int:
            prompt = Prompt(text=parts.prefix.text + piece + parts.suffix, system=parts.system.text)
            if self._templated:
                return await self._tokenizer.count_chat(prompt.system, prompt.text)
            return await self._tokenizer.count_text(joined(prompt))

        if not own.text:
            return own, await count("")
        repeats = _ROOM * max(1, -(-tokens // max(1, own.tokens)))
        found = await fit_counted(own.text * repeats, tokens, count, guess=len(own.text))
        return found, found.tokens

    async def _turns(self, request: WorkloadRequest, context_tokens: int) -> tuple[PlannedRequest, ...]:
        if not self._sessions or self._protocol.carry is None:
            return ()
        made = []
        for turn in request.turns:
            own = await self._turn_text(turn)
            context_tokens += TEMPLATE_TOKENS + own.tokens + turn.max_tokens
            if self._max_model_len is not None and context_tokens + TEMPLATE_TOKENS > self._max_model_len:
                break
            encoded = self._encoded(request, Prompt(text=own.text), own.tokens, turn.max_tokens)
            made.append(msgspec.structs.replace(encoded, think_ns=round(turn.think_s * 1e9)))
        return tuple(made)

    async def _turn_text(self, turn: Turn) -> FittedPrompt:
        if turn.text is not None:
            return FittedPrompt(turn.text, await self._tokenizer.count_text(turn.text))
        text = self._reference.decode(turn.token_ids)
        if self._tokenizer is self._reference:
            return FittedPrompt(text, turn.input_tokens)
        return await self._tokenizer.fit(text, turn.input_tokens)

    def _encoded(self, request: WorkloadRequest, prompt: Prompt, input_tokens: int, max_tokens: int) -> PlannedRequest:
        path, body = self._protocol.encode(
            self._target, prompt, max_tokens, request.temperature, ignore_eos=self._ignore_eos
        )
        return PlannedRequest(
            index=-1,
            phase="",
            workload_class=request.workload_class,
            path=path,
            body=body,
            input_tokens=input_tokens,
            max_tokens=max_tokens,
            offset_ns=-1,
        )


def _within(parts: _Parts, input_tokens: int) -> _Parts:
    """The parts that leave at least one token of `input_tokens` to the request's own text."""
    if parts.tokens >= input_tokens:
        parts = replace(parts, prefix=_NOTHING)
    if parts.tokens >= input_tokens:
        parts = replace(parts, system=_NOTHING)
    if parts.tokens >= input_tokens:
        parts = replace(parts, suffix="", suffix_tokens=0)
    return parts
