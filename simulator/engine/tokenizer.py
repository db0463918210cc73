"""A tokenizer without a vocabulary: every four bytes of UTF-8 are one token.

It is stateless and reversible, so that a client can cut token ids anywhere and get the text back. A token's id is
its bytes read as a big-endian number behind a leading byte 1, which keeps the length: "a" is 0x0161. Hence every id
is below 2**33 and survives JSON; the id 1 is the empty token, which stands for the end of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BYTES_PER_TOKEN = 4
END_OF_SEQUENCE = 1

_ONE = b"\x01"
_END_MARK = "<|/>"


class UnknownTokenError(ValueError):
    """A number is not a token id of this tokenizer."""


def encode(text: str) -> list[int]:
    """Return the token ids of a text; unpaired surrogates, which UTF-8 cannot hold, become question marks."""
    data = text.encode("utf-8", errors="replace")
    return [
        int.from_bytes(_ONE + data[at : at + BYTES_PER_TOKEN], "big") for at in range(0, len(data), BYTES_PER_TOKEN)
    ]


def decode(token_ids: Iterable[int]) -> str:
    """Return the text of token ids.

    Bytes that are no UTF-8 (a character cut in two) become U+FFFD. Raises UnknownTokenError.
    """
    return b"".join(map(_token_bytes, token_ids)).decode("utf-8", errors="replace")


def encode_chat(messages: Sequence[tuple[str, str]], *, open_reply: bool = True) -> list[int]:
    """Return the token ids of (role, content) messages under the chat template.

    Each message is tokenized by itself, so that a longer conversation starts with exactly the tokens of a shorter
    one and finds them in the prefix cache. `open_reply` appends the header of the assistant's turn.
    """
    token_ids: list[int] = []
    for role, content in messages:
        token_ids += encode(_header(role))
        token_ids += encode(content)
        token_ids += encode(_END_MARK)
    if open_reply:
        token_ids += encode(_header("assistant"))
    return token_ids


def _header(role: str) -> str:
    """Return 12 ASCII bytes, that is 3 tokens, whatever the role is."""
    name = role.encode("ascii", errors="replace").decode("ascii")
    return f"<|{name[:8]:<8}|>"


def _token_bytes(token_id: int) -> bytes:
    length = (token_id.bit_length() - 1) // 8 if token_id > 0 else -1
    if not 0 <= length <= BYTES_PER_TOKEN or token_id >> (8 * length) != 1:
        raise UnknownTokenError(f"{token_id} is not a token id of this tokenizer")
    return token_id.to_bytes(length + 1, "big")[1:]
