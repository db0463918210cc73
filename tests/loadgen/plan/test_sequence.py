from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.plan import fitting as fitter
from sidelight.loadgen.plan import tokenizers
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.protocols.request import RequestTarget

if TYPE_CHECKING:
    from conftest import Tokenizing, TokenServer

TARGET = RequestTarget(model="m")
REFERENCE = tokenizers.ReferenceTokenizer()


async def _planned(
    tokenizer: tokenizers.FittingTokenizer = REFERENCE, *, seed: int = 1, **order: object
) -> list[fitter.Planned]:
    plan = fitter.plan(
        workloads.build("synthetic-uniform", seed=seed).requests,
        target=TARGET,
        tokenizer=tokenizer,
        order=fitter.PlanOrder(**({"phase": "measure"} | order)),
    )
    return [fitted async for fitted in plan]


def _text(fitted: fitter.Planned) -> str:
    return str(json.loads(fitted.request.body)["messages"][0]["content"])


@pytest.fixture
async def tiny(tokenizing: Tokenizing) -> tuple[TokenServer, tokenizers.ServerTokenizer]:
    """A token a pair of bytes: concatenation and cutting change the counts around them."""

    def encode(text: str) -> list[int]:
        raw = text.encode()
        return [int.from_bytes(raw[i : i + 2], "big") + 65_536 * (i + 2 > len(raw)) for i in range(0, len(raw), 2)]

    def decode(tokens: list[int]) -> str:
        pieces = [(t % 65_536).to_bytes(1 if t >= 65_536 else 2, "big") for t in tokens]
        return b"".join(pieces).decode(errors="replace")

    return await tokenizing(encode, decode)


async def test_the_same_seed_gives_the_same_bytes():
    """One hash over all bodies: equal for one seed, different for another."""

    async def digest(seed: int) -> str:
        bodies = [fitted.request.body for fitted in await _planned(seed=seed, count=100)]
        return hashlib.sha256(b"".join(bodies)).hexdigest()

    assert await digest(42) == await digest(42)
    assert await digest(42) != await digest(43)


async def test_the_reference_tokenizer_sends_the_drawn_ids():
    """Text is that of the ids; the declared length is how many were drawn, as the appendix has it."""
    drawn = itertools.islice(workloads.build("synthetic-uniform", seed=1).requests, 20)
    for fitted, request in zip(await _planned(count=20), drawn, strict=True):
        assert REFERENCE.text(request.token_ids) == _text(fitted)
        assert (request.input_tokens, request.max_tokens) == (fitted.request.input_tokens, fitted.request.max_tokens)
        assert (False, False) == (fitted.clipped_input, fitted.clipped_output)


async def test_indices_offsets_and_phase_are_as_ordered():
    """Numbering begins where it is ordered; the offsets decide how many; a closed loop has none."""
    plan = await _planned(first_index=100, phase="warmup", offsets_ns=np.array([5, 6, 7]))
    assert [(100, "warmup", 5), (101, "warmup", 6), (102, "warmup", 7)] == [
        (fitted.request.index, fitted.request.phase, fitted.request.offset_ns) for fitted in plan
    ]
    assert [-1, -1] == [fitted.request.offset_ns for fitted in await _planned(count=2)]
    assert len(await _planned(count=2, offsets_ns=np.array([5, 6, 7]))) == 2


async def test_nothing_is_drawn_beyond_the_order():
    """Another phase goes on with the next request of the same workload."""
    shared = workloads.build("synthetic-uniform", seed=1).requests
    for first_index in (0, 3):
        order = fitter.PlanOrder(phase="p", first_index=first_index, count=3)
        rest = [fitted async for fitted in fitter.plan(shared, target=TARGET, tokenizer=REFERENCE, order=order)]
    whole = await _planned(count=6)
    assert [fitted.request.body for fitted in whole[3:]] == [fitted.request.body for fitted in rest]


async def test_an_endless_plan_may_be_left():
    """No task stays behind."""
    plan = fitter.plan(
        workloads.build("synthetic-uniform", seed=1).requests, target=TARGET, tokenizer=REFERENCE,
        order=fitter.PlanOrder(phase="p"),
    )  # fmt: skip
    assert [0, 1, 2] == [(await anext(plan)).request.index for _ in range(3)]
    await plan.aclose()
    assert len(asyncio.all_tasks()) == 1


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(66, 5000))
def test_clipping_fits_the_model(input_tokens: int, max_tokens: int, limit: int):
    """Together with the template it fits; nothing grows; the output is touched only when the input is down to one."""
    fitted_input, fitted_output = fitter.clip(input_tokens, max_tokens, limit)
    assert fitted_input + fitted_output + fitter.TEMPLATE_TOKENS <= limit
    assert 1 <= fitted_input <= input_tokens
    assert 1 <= fitted_output <= max_tokens
    assert fitted_output == max_tokens or fitted_input == 1
    assert (input_tokens, max_tokens) == fitter.clip(input_tokens, max_tokens, None)


async def test_what_was_clipped_is_flagged():
    """A model of 400 tokens takes no input of 512."""
    plan = await _planned(count=50, max_model_len=400)
    whole = await _planned(count=50)
    for fitted, before in zip(plan, whole, strict=True):
        assert fitted.clipped_input == (fitted.request.input_tokens < before.request.input_tokens)
        assert fitted.request.input_tokens + fitted.request.max_tokens + 64 <= 400
        assert REFERENCE.count(_text(before)) == REFERENCE.count(_text(fitted)) or fitted.clipped_input
    assert any(fitted.clipped_input for fitted in plan)
    assert all(fitted.clipped_output for fitted in await _planned(count=5, max_model_len=100))


async def test_a_servers_tokens_are_what_is_declared(tiny: tuple[TokenServer, tokenizers.ServerTokenizer]):
    """Each prompt counts at the server what the plan declares: the drawn length; eight are fitted at once, in order."""
    vocabulary, server = tiny
    plan = await _planned(server, count=40)
    assert [fitted.request.index for fitted in plan] == list(range(40))
    assert [fitted.request.input_tokens for fitted in plan] == [
        len(await server.encode(_text(fitted))) for fitted in plan
    ]
    drawn = [
        request.input_tokens for request in itertools.islice(workloads.build("synthetic-uniform", seed=1).requests, 40)
    ]
    assert drawn == [fitted.request.input_tokens for fitted in plan]
    assert 1 < vocabulary.most <= 8
    assert [fitted.request.body for fitted in await _planned(server, count=40)] == [
        fitted.request.body for fitted in plan
    ]


async def test_a_short_text_is_repeated_to_length(tiny: tuple[TokenServer, tokenizers.ServerTokenizer]):
    """From a word to a hundred tokens; nothing comes of nothing."""
    _, server = tiny
    for tokenizer in (server, REFERENCE):
        fitted = await tokenizers.fit(tokenizer, "hello", 100)
        assert fitted.tokens == 100
        assert fitted.text.startswith("hello")
        assert await tokenizers.fit(tokenizer, "", 100) == tokenizers.FittedPrompt("", 0)


@given(st.text(min_size=1), st.integers(1, 60))
def test_the_reference_fit_declares_what_it_counts(text: str, tokens: int):
    """Whatever was reached is what is declared, and it is seldom far."""
    fitted = asyncio.run(tokenizers.fit(REFERENCE, text, tokens))
    assert REFERENCE.count(fitted.text) == fitted.tokens
    assert abs(fitted.tokens - tokens) <= max(3, tokens // 4)


def test_the_reference_is_what_the_draft_names():
    """Name, vocabulary with its special tokens, and where it comes from."""
    assert (REFERENCE.name, REFERENCE.vocab_size) == ("cl100k_base", 100_277)
    assert "tiktoken" in REFERENCE.version
    assert "tiktoken" in REFERENCE.source


ONE = b'{"tokens": [1]}'


@pytest.mark.parametrize(
    ("status", "tokenized", "detokenized", "says"),
    [
        (404, b"{}", b"", "/tokenize: HTTP 404"),
        (200, b"<html>", b"", "/tokenize: JSON is malformed"),
        (200, b'{"count": 3}', b"", "/tokenize: Object missing required field `tokens`"),
        (200, b'{"tokens": []}', b"", "/tokenize: no tokens in a plain sentence"),
        (200, ONE, b'{"prompt": "\xff"}', "/detokenize: "),
        (200, ONE, b'{"token": "x"}', "/detokenize: none of prompt, text and content"),
        (200, ONE, b'{"x": ' + b"[" * 100_000, "/detokenize: "),
    ],
    ids=["none", "a page", "no ids", "empty", "no UTF-8", "no text", "deep"],
)
async def test_a_server_without_a_tokenizer_says_why(status: int, tokenized: bytes, detokenized: bytes, says: str):
    """The reason names the address, whatever the answer is; the session is closed."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=tokenized if request.path == "/tokenize" else detokenized)

    app = web.Application()
    app.router.add_post("/{any}", answer)
    async with TestServer(app) as server:
        reason = await tokenizers.probe_server(str(server.make_url("/")), "m", {})
    assert isinstance(reason, str)
    assert says in reason


@pytest.mark.parametrize(("asked", "answered"), [("prompt", "prompt"), ("prompt", "text"), ("content", "content")])
async def test_the_tokenizers_of_vllm_sglang_and_llamacpp(asked: str, answered: str):
    """Each has its own names for a text; llama.cpp gives no tokens of another name, and no count of messages."""

    async def tokenize(request: web.Request) -> web.Response:
        # SGLang's max_model_len is its tokenizer's, not the context.
        return web.json_response({"tokens": list((await request.json()).get(asked, "").encode()), "max_model_len": 9})

    async def detokenize(request: web.Request) -> web.Response:
        return web.json_response({answered: bytes((await request.json())["tokens"]).decode()})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    async with TestServer(app) as server:
        tokenizer = await tokenizers.probe_server(str(server.make_url("/v1")), "m", {})
        assert isinstance(tokenizer, tokenizers.ServerTokenizer)
        async with tokenizer:
            assert list(b"two words") == await tokenizer.encode("two words")
            assert "two words" == await tokenizer.decode(list(b"two words"))
            assert not tokenizer.template


@pytest.mark.parametrize(("answers", "problem"), [(1, ""), (0, "Server disconnected")])
async def test_a_tokenizer_that_closes_its_kept_connections_is_asked_again(answers: int, problem: str):
    """llama.cpp closes each after a hundred requests, in the middle of the next; one that never answers is an error."""
    asked: Counter[object] = Counter()

    async def tokenize(request: web.Request) -> web.Response:
        assert request.transport is not None
        asked[request.transport] += 1
        if asked[request.transport] > answers:
            request.transport.abort()
        return web.json_response({"tokens": [7], "prompt": "a"})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", tokenize)
    async with TestServer(app) as server:
        tokenizer = await tokenizers.probe_server(str(server.make_url("/v1")), "m", {})
        assert isinstance(tokenizer, str) == bool(problem)
        if isinstance(tokenizer, str):
            assert problem in tokenizer
            return
        async with tokenizer:
            assert [[7]] * 4 == [await tokenizer.encode("a") for _ in range(4)]
        assert len(asked) > 4


@pytest.mark.parametrize("answers", range(3), ids=["tokenize", "detokenize", "count"])
async def test_a_probe_that_is_cancelled_leaves_no_session_open(answers: int):
    """As where the server refuses a completion meanwhile, whichever of the probe's questions is being answered."""
    asked = 0
    reached = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked > answers:
            reached.set()
            await asyncio.Event().wait()
        return web.json_response({"tokens": [7], "prompt": "a"})

    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    app = web.Application()
    app.router.add_post("/{any}", answer)
    async with TestServer(app) as server:
        probing = asyncio.create_task(tokenizers.probe_server(str(server.make_url("/v1")), "m", {}))
        await reached.wait()
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing
        del probing
        gc.collect()
    assert [] == complaints


async def test_nothing_at_the_tokenizers_address():
    """A refused connection is a reason too."""
    reason = await tokenizers.probe_server("http://127.0.0.1:1", "m", {})
    assert isinstance(reason, str)
    assert "127.0.0.1:1" in reason
