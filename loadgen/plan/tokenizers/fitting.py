"""Fitting of a text to a given number of tokens, for any token counter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sidelight.rundir.printable.errors import CodedError

_CORRECTIONS = 4
_HALF_CHARACTER = "\ufffd"
_FILLER = " a"
# Around the place that a bisection ends at: counts are not quite monotone in the length of a text.
_NEIGHBOURS = 4
_MOST_GUESSES = 4


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A text with its verified number of tokens. The tokenizer has counted it; it is not the requested number."""

    text: str
    tokens: int


class TokenizerError(CodedError):
    """A tokenizer's failure: not available, or other answers than when it was probed."""


class FittingTokenizer(Protocol):
    """A declared tokenizer, with the facts that the report must state.

    option    the draft's: "A, native" or "B, reference"
    """

    name: str
    version: str
    vocab_size: int | None
    source: str
    option: str

    @property
    def template(self) -> bool:
        """Return whether `count_chat` counts a chat template."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text alone, without special tokens; text that looks like one is ordinary text."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD, so this loses something for random ids."""
        ...

    async def count_chat(self, system: str, user: str) -> int:
        """Count the tokens of a chat request after the chat template. The header that opens the reply is included."""
        ...


async def count_text(tokenizer: FittingTokenizer, text: str) -> int:
    """Count the tokens of a text, without special tokens. Raises TokenizerError."""
    return len(await tokenizer.encode(text)) if text else 0


async def fit(tokenizer: FittingTokenizer, text: str, tokens: int) -> FittedPrompt:
    """Fit a text to a number of tokens, cutting or repeating it. After four corrections the nearest count is taken.

    The text of n ids need not encode to n ids, so count again and correct.

    Too long: cut again, and drop the half character that a cut leaves. Too short: go on with the text, and if that does
    not do, with a plain word. The nearest count is kept, the shorter of two equally near. Empty text stays empty.
    """
    source = await tokenizer.encode(text)
    if not source:
        return FittedPrompt("", 0)
    while len(source) < 2 * tokens:
        source = source + source
    candidate = await tokenizer.decode(source[:tokens])
    best: FittedPrompt | None = None
    for correction in range(1 + _CORRECTIONS):
        counted = await tokenizer.encode(candidate) if candidate else []
        fitted = FittedPrompt(candidate, len(counted))
        if best is None or _distance(fitted, tokens) < _distance(best, tokens):
            best = fitted
        missing = tokens - len(counted)
        if missing == 0 or correction == _CORRECTIONS:
            break
        if missing < 0:
            candidate = (await tokenizer.decode(counted[:tokens])).rstrip(_HALF_CHARACTER)
        elif correction == 0:
            candidate += await tokenizer.decode(source[tokens : tokens + missing])
        else:
            candidate = candidate.rstrip(_HALF_CHARACTER) + _FILLER * missing
    return best if best is not None else FittedPrompt("", 0)


async def fit_counted(
    text: str, tokens: int, count: Callable[[str], Awaitable[int]], *, guess: int | None = None
) -> FittedPrompt:
    """Fit a text's beginning to a token count, by bisection over its length.

    The result is the piece for which `count` says `tokens`.

    `count` takes the piece to the number of tokens of the whole request, so a chat template is in it: exo-bench's
    method (prompt construction). `text` must be long enough: repeat it before. `guess` is a length in characters to
    begin with, and saves most of the counting when it is near.

    Guarantee: the returned count is what `count` said of the returned text. Where no length gives the number wanted,
    which happens below what the template alone takes, it is the nearest that was met, the shorter of two.
    """
    met: dict[int, int] = {}

    async def counted(length: int) -> int:
        if length not in met:
            met[length] = await count(text[:length])
        return met[length]

    low, high = 0, len(text)
    at = high // 2 if guess is None else min(max(guess, 0), high)
    for step in range(_MOST_GUESSES if guess is not None else 0):
        fitted_tokens = await counted(at)
        if fitted_tokens == tokens:
            return FittedPrompt(text[:at], fitted_tokens)
        low, high = (max(low, at), high) if fitted_tokens < tokens else (low, min(high, at))
        # As many characters on as the difference should take, and a little more each time, so that both sides close in.
        stride = (tokens - fitted_tokens) * max(1, at) // max(1, fitted_tokens)
        at = min(max(at + stride + (step if stride > 0 else -step), low), high)
    while high - low > 1:
        middle = (low + high) // 2
        fitted_tokens = await counted(middle)
        if fitted_tokens == tokens:
            return FittedPrompt(text[:middle], fitted_tokens)
        low, high = (middle, high) if fitted_tokens < tokens else (low, middle)
    for length in range(max(0, low - _NEIGHBOURS), min(len(text), high + _NEIGHBOURS) + 1):
        if await counted(length) == tokens:
            break
    best = min(met, key=lambda length: (abs(met[length] - tokens), met[length], length))
    return FittedPrompt(text[:best], met[best])


def _distance(fitted: FittedPrompt, tokens: int) -> tuple[int, int]:
    return abs(fitted.tokens - tokens), fitted.tokens
