"""Replies of the simulated model: short words, drawn from the seed.

Token `index` of a reply is a pure function of the seed, the prompt's tokens and `index`. It does not depend on when
a request ran or beside which others, so a run over real sockets repeats its texts and lengths exactly.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from sidelight.simulator.engine.tokenizer import END_OF_SEQUENCE, encode

#: Three letters and a space in front are four bytes: each word is exactly one token, also when a client sends a reply
#: back as part of a conversation. A power of two of them, so that a draw is a mask.
WORDS = tuple(f" {first}{vowel}{last}" for first in "bdlm" for vowel in "aeio" for last in "gnrt")
TOKEN_IDS = tuple(encode(word)[0] for word in WORDS)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Draws of drafts are apart from those of tokens.
_DRAFTS, _MOST_DRAFT_TOKENS = 0xD6E8FEB86659FD93, 1 << 10


def reply_key(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """Return the 64-bit number from which all tokens of a reply follow."""
    digest = blake2b(array("Q", prompt_token_ids).tobytes(), digest_size=8, salt=(seed & _MASK).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def reply_token(key: int, index: int, *, eos_chance: float) -> int:
    """Return the token at `index` (from 0) of a reply; with probability `eos_chance` it is END_OF_SEQUENCE.

    The first token never is, so that no reply is empty.
    """
    mixed = _draw(key, index)
    if index and mixed >> 11 < eos_chance * (1 << 53):
        return END_OF_SEQUENCE
    return TOKEN_IDS[mixed & (len(TOKEN_IDS) - 1)]


def accepted_drafts(key: int, index: int, tokens: int, ratio: float) -> int:
    """Return the number of a draft's tokens that are accepted.

    Its first is the reply's token `index`. Each is accepted with probability `ratio`, up to the first that is not.
    """
    draws = (_draw(key ^ _DRAFTS, index * _MOST_DRAFT_TOKENS + place) >> 11 for place in range(tokens))
    return next((place for place, draw in enumerate(draws) if draw >= ratio * (1 << 53)), tokens)


def _draw(key: int, index: int) -> int:
    """Return 64 bits by SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    mixed = (key + (index + 1) * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
