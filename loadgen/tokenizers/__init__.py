"""Counting tokens, and making text of an exact token count: the draft's reference, a local file, or the server's own.

Lengths are of the text alone, unless a chat template is asked for: what it or a BOS token adds is the server's, and
shows in its `usage`.
"""

from __future__ import annotations

from typing import Any, Protocol

from loadgen.tokenizers.fitting import FittedPrompt, TokenizerError
from loadgen.tokenizers.local import LocalTokenizer
from loadgen.tokenizers.reference import REFERENCE, ReferenceTokenizer, reference
from loadgen.tokenizers.server import ServerTokenizer, probe_server

__all__ = [
    "REFERENCE",
    "FittedPrompt",
    "LocalTokenizer",
    "ReferenceTokenizer",
    "ServerTokenizer",
    "Tokenizer",
    "TokenizerError",
    "about",
    "probe_server",
    "reference",
    "special_tokens",
]


class Tokenizer(Protocol):
    """A declared tokenizer: what the report must state of it, and texts of a given length.

    option    the draft's: "A, native" or "B, reference"
    template  whether `count_chat` counts a chat template
    """

    name: str
    version: str
    vocab_size: int | None
    source: str
    option: str
    template: bool

    async def fit(self, text: str, tokens: int) -> FittedPrompt:
        """`text`, cut or repeated until it counts `tokens`."""
        ...

    async def count_text(self, text: str) -> int:
        """Tokens of a text alone."""
        ...

    async def count_chat(self, system: str, user: str) -> int:
        """Tokens of a chat request after the chat template."""
        ...


def about(tokenizer: Tokenizer, *, exact: bool = False) -> dict[str, Any]:
    """What a report states of a declared tokenizer, plain JSON values; `exact` as in special_tokens."""
    return {
        "name": tokenizer.name,
        "version": tokenizer.version,
        "vocab_size": tokenizer.vocab_size,
        "source": tokenizer.source,
        "option": tokenizer.option,
        "special_tokens": special_tokens(exact=exact),
    }


def special_tokens(*, exact: bool) -> dict[str, str]:
    """What a report states of BOS and EOS, system prompt and tool tokens (draft, special token handling).

    exact  input lengths were verified after the chat template
    """
    inputs = "included in the declared input length, which was verified after the chat template"
    plain = "excluded from the declared input length; included in the server's usage where it counts them"
    return {
        "bos_eos_input": inputs if exact else plain,
        "eos_output": "as the server's usage counts it; a tokenizer's count of the text excludes it",
        "system_prompt": "included in the input length, not counted separately",
        "chat_template": inputs if exact else plain,
        "tools": "no tools are declared in requests; a reply's tool calls count as the server's usage has them",
    }
