"""The server's own tokenizer, over its /tokenize and /detokenize."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from sidelight.loadgen.plan.tokenizers.fitting import TokenizerError
from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.protocols.request import Prompt, messages_of
from sidelight.rundir.access import root_url

if TYPE_CHECKING:
    import aiohttp

_TIMEOUT_S = 30.0
_ATTEMPTS = 3
_JSON = {"Content-Type": "application/json"}
_SAMPLE = "The quick brown fox"

_Answer = TypeVar("_Answer", "_Tokenized", "_Detokenized")


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Detokenized(msgspec.Struct):
    """The text, by its name in vLLM, SGLang or llama.cpp."""

    prompt: str | None = None
    text: str | None = None
    content: str | None = None


class ServerTokenizer:
    """The server's own tokenizer (native, option A) through POST /tokenize and /detokenize; owns an HTTP session.

    text_field  the name of a text in what /tokenize is asked: llama.cpp's is `content`, and it passes over others
    template    whether the server counts messages under its chat template as well
    """

    option = "A, native"
    vocab_size: int | None = None

    def __init__(self, session: aiohttp.ClientSession, root: str, model: str) -> None:
        self._session = session
        self._root = root
        self._model = model
        self.name = f"{model} (the server's)"
        self.version = "as served"
        self.source = f"{root}/tokenize"
        self.text_field = "prompt"
        self.template = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP session."""
        await self._session.close()

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens. Raises TokenizerError."""
        body = {"model": self._model, self.text_field: text, "add_special_tokens": False}
        return (await self._ask("/tokenize", body, _Tokenized)).tokens

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises TokenizerError."""
        answer = await self._ask("/detokenize", {"model": self._model, "tokens": list(ids)}, _Detokenized)
        text = next((text for text in (answer.prompt, answer.text, answer.content) if text is not None), None)
        if text is None:
            raise TokenizerError(
                "tokenizer.server", f"{self._root}/detokenize: none of prompt, text and content in the answer"
            )
        return text

    async def count_chat(self, system: str, user: str) -> int:
        """Return tokens of a chat request after the chat template. Raises TokenizerError."""
        messages = messages_of(Prompt(text=user, system=system))
        body = {"model": self._model, "messages": messages, "add_generation_prompt": True}
        return len((await self._ask("/tokenize", body, _Tokenized)).tokens)

    async def _ask(self, path: str, body: Mapping[str, object], kind: type[_Answer]) -> _Answer:
        import aiohttp  # noqa: PLC0415  # as in probe_server

        url = self._root + path
        try:
            status, raw = await self._post(url, msgspec.json.encode(body))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TokenizerError("tokenizer.server", f"{url}: {error or type(error).__name__}") from error
        if status != 200:
            raise TokenizerError("tokenizer.server", f"{url}: HTTP {status}")
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise TokenizerError("tokenizer.server", f"{url}: {error}") from error

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer.

        A connection that ends before an answer may have been kept for too long: llama.cpp closes each after a hundred
        requests. What is asked changes nothing there, so it is asked again, up to _ATTEMPTS times. Raises ClientError.
        """
        import aiohttp  # noqa: PLC0415  # as in probe_server

        attempts = 0
        while True:
            try:
                async with self._session.post(url, data=body, headers=_JSON) as response:
                    return response.status, await response.read()
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise


async def probe_server(
    base_url: str, model: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None = None
) -> ServerTokenizer | str:
    """Return the server's tokenizer, or the reason for its absence. The caller closes the tokenizer.

    `base_url` may end in /v1. Both directions are tried, since a text is cut by its ids; whether messages are counted
    under a chat template is found out with them, and only exact prompts need it.
    """
    import aiohttp  # noqa: PLC0415  # a load worker must not pay for it

    from sidelight.rundir.redirects import on_same_host  # noqa: PLC0415  as above

    session = aiohttp.ClientSession(
        headers=dict(headers),
        trace_configs=[on_same_host()],
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
    )
    tokenizer = ServerTokenizer(session, root_url(base_url), model)
    reason = "the probe was interrupted"
    try:
        ids = await tokenizer.encode(_SAMPLE)
        if not ids:
            tokenizer.text_field = "content"
            ids = await tokenizer.encode(_SAMPLE)
        both_ways = bool(ids) and bool(await tokenizer.decode(ids))
        if both_ways:
            tokenizer.template = await _counts_messages(tokenizer, len(ids))
        reason = "" if both_ways else f"{tokenizer.source}: no tokens in a plain sentence"
    except TokenizerError as error:
        reason = str(error)
    finally:
        if reason:
            await session.close()
    return reason or tokenizer


async def _counts_messages(tokenizer: ServerTokenizer, plain: int) -> bool:
    """Return whether /tokenize takes messages.

    A server that ignores them counts fewer tokens than the text alone has.
    """
    try:
        return await tokenizer.count_chat("", _SAMPLE) >= plain
    except TokenizerError:
        return False
