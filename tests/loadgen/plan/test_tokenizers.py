from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from codes import raises
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.plan import tokenizers
from sidelight.loadgen.plan.tokenizers.fitting import fit_counted

if TYPE_CHECKING:
    from conftest import Tokenizing

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_special_tokens_are_stated():
    """BOS and EOS, system prompt and tools, each with a sentence; exact prompts include the template."""
    sampled, exact = (
        tokenizers.about(tokenizers.reference(), exact=exact)["special_tokens"] for exact in (False, True)
    )
    assert {"bos_eos_input", "eos_output", "system_prompt", "chat_template", "tools"} == set(sampled) == set(exact)
    assert sampled != exact


@given(
    words=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=40),
    template=st.integers(0, 30),
    tokens=st.integers(1, 120),
    guess=st.none() | st.integers(0, 400),
)
def test_a_bisection_declares_what_was_counted(words: list[str], template: int, tokens: int, guess: int | None):
    """The count is that of the text returned; it is exact wherever counts go up one by one."""
    text = " a".join(words) + " a" * 150

    async def count(piece: str) -> int:
        return template + tokenizers.reference().count(piece)

    fitted = asyncio.run(fit_counted(text, tokens, count, guess=guess))
    assert text.startswith(fitted.text)
    assert template + tokenizers.reference().count(fitted.text) == fitted.tokens
    plain = asyncio.run(fit_counted(" a" * 150, tokens, count, guess=guess))
    assert max(tokens, template) == plain.tokens


def test_a_good_guess_costs_one_count():
    """And a bisection without one about as many as the text's length has bits."""
    asked: list[str] = []

    async def count(piece: str) -> int:
        asked.append(piece)
        return 10 + len(piece) // 2

    assert asyncio.run(fit_counted(" a" * 1000, 110, count, guess=200)).tokens == 110
    assert len(asked) == 1
    assert asyncio.run(fit_counted(" a" * 1000, 110, count)).tokens == 110
    assert len(asked) <= 1 + 12


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a small byte-level BPE, trained here, and a chat template."""
    pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", "a rose is a rose"] * 20, trainer)
    tokenizer.enable_truncation(8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


async def test_a_local_tokenizer_counts_and_fits(model: Path):
    """From its file or its directory; a file's own truncation does not falsify counts."""
    local = tokenizers.LocalTokenizer(model)
    assert (local.name, local.option) == (model.name, "A, native")
    assert local.version.startswith("sha256 ")
    assert (local.vocab_size or 0) > 256
    text = "the quick brown fox " * 20
    assert await tokenizers.count_text(local, text) > 8
    assert text == await local.decode(await local.encode(text))
    for wanted in (1, 17, 200):
        fitted = await tokenizers.fit(local, text, wanted)
        assert (wanted, wanted) == (fitted.tokens, await tokenizers.count_text(local, fitted.text))
    assert tokenizers.LocalTokenizer(model / "tokenizer.json").version == local.version


async def test_a_local_chat_template_is_counted(model: Path):
    """Special tokens of the template are one token each; a template of its own file comes first."""
    pytest.importorskip("jinja2", reason="the extra tokenizers is not installed")
    local = tokenizers.LocalTokenizer(model)
    assert local.template
    expected = await tokenizers.count_text(local, "<s><system>be kind</s><user>hello</s><assistant>")
    assert expected == await local.count_chat("be kind", "hello")
    assert await tokenizers.count_text(local, "<s>") == 1
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert await tokenizers.count_text(local, "hello") == await tokenizers.LocalTokenizer(model).count_chat("", "hello")


async def test_a_template_that_refuses_is_an_error(model: Path):
    """As some do with a system prompt; an invalid one leaves plain counting."""
    pytest.importorskip("jinja2", reason="the extra tokenizers is not installed")
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system') }}", encoding="utf-8")
    with raises("tokenizer.chat-template"):
        await tokenizers.LocalTokenizer(model).count_chat("s", "u")
    (model / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    broken = tokenizers.LocalTokenizer(model)
    assert (False, True) == (broken.template, "the chat template" in broken.why_no_template)
    with raises("tokenizer.no-chat-template"):
        await broken.count_chat("", "u")


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path):
    """With its name; so is one that is not there."""
    pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
    with raises("tokenizer.unreadable"):
        tokenizers.LocalTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with raises("tokenizer.unreadable"):
        tokenizers.LocalTokenizer(tmp_path)


@pytest.mark.parametrize("template", [8, None])
async def test_whether_a_server_counts_messages_is_found_out(tokenizing: Tokenizing, template: int | None):
    """One that refuses messages still counts plain texts."""
    _, tokenizer = await tokenizing(template=template)
    assert (template is not None) == tokenizer.template
    assert await tokenizers.count_text(tokenizer, "abc") == 3
    if template is not None:
        assert await tokenizer.count_chat("s", "user") == template + 5


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other.jinja' %}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ raise_exception('no system') }}",
    ],
    ids=["recursion", "include", "division", "types", "refusal"],
)
async def test_an_error_of_a_chat_template_is_named_as_such(model: Path, template: str):
    """It is a program that comes with a model."""
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    pytest.importorskip("jinja2", reason="the extra tokenizers is not installed")
    with raises("tokenizer.chat-template"):
        await tokenizers.LocalTokenizer(model).count_chat("system", "user")


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "2 s of the processor"),
        # Quick for the short text, not for a long one.
        ("{% for i in messages[0].content %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "2 s of the proc"),
        ("{% set x = messages[0].content * 100000000 %}{{ x * 9 }}", "512 MiB of memory"),
    ],
    ids=["loop", "long", "bomb"],
)
async def test_a_chat_template_takes_so_much_time_and_memory_and_no_more(model: Path, template: str, limit: str):
    """In a process of its own, so that ours goes on; where it shows only in the text, too."""
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    pytest.importorskip("jinja2", reason="the extra tokenizers is not installed")
    local = tokenizers.LocalTokenizer(model)
    with pytest.raises(tokenizers.TokenizerError, match=rf"{limit}.*chat_template\.jinja\)"):
        await local.count_chat("", "long " * 1000)


async def test_the_limit_of_time_that_is_said_is_the_one_that_was_reached(model: Path):
    """Texts before have raised it from 2 s."""
    pytest.importorskip("jinja2", reason="the extra tokenizers is not installed")
    loop = "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    (model / "chat_template.jinja").write_text(loop + "{% endfor %}{% endfor %}{% endif %}", encoding="utf-8")
    local = tokenizers.LocalTokenizer(model)
    await local.count_chat("", "a" * 600_000)
    with raises("tokenizer.chat-template", says="3 s"):
        await local.count_chat("", "slow")


async def test_an_honest_chat_template_renders_long_and_many_texts(model: Path):
    """Also texts of no encoding, each on a line of its own whatever it holds."""
    pytest.importorskip("jinja2", reason="the extra tokenizers is not installed")
    local = tokenizers.LocalTokenizer(model)
    fixed = await local.count_chat("", "")
    for text in ("a\nb\r\u2028c", "a " * 50_000, *(f"the {n}" for n in range(300))):
        assert await local.count_chat("", text) == fixed + await tokenizers.count_text(local, text)
