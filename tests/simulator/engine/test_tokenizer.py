"""Laws of the simulator's tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.simulator.engine.replies import TOKEN_IDS, WORDS, reply_key, reply_token
from sidelight.simulator.engine.tokenizer import END_OF_SEQUENCE, UnknownTokenError, decode, encode, encode_chat

TEXTS = st.text()
CONVERSATIONS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "rôle éloigné"]), TEXTS))


@given(TEXTS.filter(lambda text: text.isprintable()))
def test_decoding_is_the_inverse_of_encoding(text: str):
    """Every text comes back from its tokens."""
    assert text == decode(encode(text))


@given(TEXTS, st.integers(0, 50))
def test_ascii_cut_at_any_token_recounts_to_the_cut(text: str, cut: int):
    """A client that cuts token ids gets a text of exactly that many tokens."""
    token_ids = encode(ascii(text))[:cut]
    assert token_ids == encode(decode(token_ids))


def test_a_token_is_four_bytes():
    """Five bytes are two tokens, of which the second keeps its length."""
    assert [0x1_61_62_63_64, 0x1_65] == encode("abcde")


def test_a_character_cut_in_two_becomes_a_replacement_character():
    """Half of a two-byte character is shown as U+FFFD."""
    assert "abc�" == decode(encode("abcé")[:1])


def test_an_unpaired_surrogate_is_a_question_mark():
    """What JSON can say and UTF-8 cannot does not break the tokenizer."""
    assert "a?" == decode(encode("a\ud800"))


@pytest.mark.parametrize("token_id", [-1, 0, 2, 0x200, 1 << 40, 0x2_61_62_63_64])
def test_a_number_that_is_no_token_is_refused(token_id: int):
    """Only numbers that encode could have made are decoded."""
    with pytest.raises(UnknownTokenError, match=str(token_id)):
        decode([token_id])


@given(CONVERSATIONS)
def test_the_chat_template_adds_a_fixed_number_of_tokens(messages: list[tuple[str, str]]):
    """Four tokens a message and three to open the reply."""
    contents = sum(len(encode(content)) for _, content in messages)
    expected = contents + 4 * len(messages) + 3
    assert expected == len(encode_chat(messages))


@given(CONVERSATIONS, TEXTS)
def test_a_longer_conversation_starts_with_the_tokens_of_the_shorter(messages: list[tuple[str, str]], text: str):
    """Prompt and reply of one turn are the prefix of the next turn's prompt."""
    reply = "".join(WORDS[:3])
    first_turn = encode_chat(messages) + encode(reply)
    assert first_turn == encode_chat([*messages, ("assistant", reply), ("user", text)])[: len(first_turn)]


def test_every_word_is_one_token_and_no_two_are_alike():
    """A reply has as many tokens when it is sent back as it had when it was made."""
    assert (64, [1] * 64) == (len(set(TOKEN_IDS)), [len(encode(word)) for word in WORDS])


def test_replies_depend_on_seed_and_prompt_alone():
    """The same seed and prompt give the same words; another seed or prompt gives others."""
    replies = [
        [reply_token(reply_key(seed, prompt), index, eos_chance=0.0) for index in range(20)]
        for seed, prompt in ((1, [256, 257]), (1, [256, 257]), (2, [256, 257]), (1, [256, 258]))
    ]
    assert replies[0] == replies[1]
    assert len({tuple(reply) for reply in replies}) == 3


def test_the_end_of_a_reply_comes_with_the_stated_chance():
    """Of 20000 draws at 1 in 10, the share that ends is within 1 in 100 of it; the first never ends."""
    ends = sum(reply_token(7, index, eos_chance=0.1) == END_OF_SEQUENCE for index in range(20_000))
    assert abs(ends / 20_000 - 0.1) < 0.01
    assert reply_token(7, 0, eos_chance=1.0) != END_OF_SEQUENCE
