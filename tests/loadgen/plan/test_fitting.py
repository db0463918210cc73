"""Prompts that are put together of parts, sessions, and lengths that are exact after the chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from codes import raises

from sidelight.loadgen.plan import fitting as fitter
from sidelight.loadgen.plan import tokenizers
from sidelight.loadgen.plan.workloads.request import Shared, Turn, WorkloadRequest
from sidelight.loadgen.protocols.request import RequestTarget

if TYPE_CHECKING:
    from conftest import Tokenizing

IDS = tuple(tokenizers.reference().ids(" the people of this city know the way home" * 40))
TEMPLATE = 7


@pytest.fixture
async def server(tokenizing: Tokenizing) -> tokenizers.ServerTokenizer:
    """A server's tokenizer with a token a character."""
    return (await tokenizing(template=TEMPLATE))[1]


def request(input_tokens: int, **more: Any) -> WorkloadRequest:
    fields = {"workload_class": "c", "token_ids": IDS, "max_tokens": 20, "temperature": 0.0} | more
    return WorkloadRequest(input_tokens=input_tokens, **fields)


SYSTEM = Shared(name="s", token_ids=IDS[:30], tokens=30)
PREFIX = Shared(name="p", token_ids=IDS[:50], tokens=50)


async def planned(
    requests: list[WorkloadRequest],
    tokenizer: tokenizers.FittingTokenizer,
    *,
    endpoint: Any = "chat",
    models: tuple[str, ...] = (),
    **order: Any,
) -> list[fitter.Planned]:
    target = RequestTarget(model="m", models=models, endpoint=endpoint)
    plan = fitter.plan(
        requests, target=target, tokenizer=tokenizer, order=fitter.PlanOrder(**({"phase": "measure"} | order))
    )
    return [planned_request async for planned_request in plan]


def messages(plan: fitter.Planned) -> dict[str, str]:
    return {message["role"]: message["content"] for message in json.loads(plan.request.body)["messages"]}


@pytest.mark.parametrize("reference", [True, False])
async def test_parts_are_put_together_to_the_wanted_length(server: tokenizers.ServerTokenizer, reference: bool):
    """The system prompt is a message of its own; prefix and question stand around the text; what is shared is equal."""
    tokenizer: tokenizers.FittingTokenizer = tokenizers.reference() if reference else server
    count = tokenizers.reference().count if reference else len
    wanted = [
        request(200 + n, token_ids=IDS[: 100 + n], system=SYSTEM, prefix=PREFIX, suffix=" Why?") for n in range(5)
    ]
    plan = await planned(wanted, tokenizer)
    whole = [messages(fitted) for fitted in plan]
    assert len({message["system"] for message in whole}) == 1
    assert count(whole[0]["system"]) == 30
    assert all(message["user"].endswith(" Why?") for message in whole)
    assert len({message["user"][:40] for message in whole}) == 1
    for number, (fitted, text) in enumerate(zip(plan, whole, strict=True)):
        assert 200 + number == fitted.request.input_tokens
        if not reference:
            assert fitted.request.input_tokens == count(text["system"]) + count(text["user"])
        assert (False, 0) == (fitted.clipped_input, fitted.missed_tokens)


async def test_a_protocol_without_roles_gets_one_text(server: tokenizers.ServerTokenizer):
    """The system prompt, a blank line, the prompt."""
    (fitted,) = await planned([request(100, system=SYSTEM)], server, endpoint="completions")
    prompt = json.loads(fitted.request.body)["prompt"]
    assert tokenizers.reference().text(IDS)[:30] + "\n\n" == prompt[:32]


async def test_a_files_text_is_sent_unchanged(server: tokenizers.ServerTokenizer):
    """What the tokenizer counts is declared; it is cut only for the model's length."""
    text = "What is a token? " * 10
    for tokenizer, tokens in ((server, len(text)), (tokenizers.reference(), tokenizers.reference().count(text))):
        (fitted,) = await planned([request(-1, token_ids=(), text=text)], tokenizer)
        assert (text, tokens, False) == (messages(fitted)["user"], fitted.request.input_tokens, fitted.clipped_input)
        (cut,) = await planned([request(-1, token_ids=(), text=text)], tokenizer, max_model_len=100)
        assert cut.clipped_input
        assert text.startswith(messages(cut)["user"])
        assert cut.request.input_tokens == 100 - 64 - 20


async def test_what_is_too_long_loses_its_own_text_before_its_parts(server: tokenizers.ServerTokenizer):
    """Then the prefix, then the system prompt; it always fits."""
    wanted = request(400, system=SYSTEM, prefix=PREFIX, suffix="Why?")
    for limit, system, prefix in ((84 + 200, True, True), (84 + 60, True, False), (84 + 20, False, False)):
        (fitted,) = await planned([wanted], server, max_model_len=limit)
        text = messages(fitted)
        assert fitted.clipped_input
        assert fitted.request.input_tokens == sum(map(len, text.values())) <= limit - 64 - 20
        assert system == ("system" in text)
        assert prefix == (len(text["user"]) > 50)
        assert text["user"].endswith("Why?")


@pytest.mark.parametrize("system", [None, SYSTEM])
async def test_exact_prompts_count_the_chat_template(server: tokenizers.ServerTokenizer, system: Shared | None):
    """What is declared was counted with the messages under the template, and is the wanted length."""
    wanted = [request(n, system=system) for n in (60, 61, 300, 900)]
    for fitted in await planned(wanted, server, exact=True):
        text = messages(fitted)
        assert fitted.request.input_tokens == TEMPLATE + sum(map(len, text.values()))
        assert fitted.missed_tokens == 0
    assert [60, 61, 300, 900] == [fitted.request.input_tokens for fitted in await planned(wanted, server, exact=True)]


async def test_a_prompt_shorter_than_the_template_is_counted_as_missed(server: tokenizers.ServerTokenizer):
    """The count that was verified is declared, and how far it is off."""
    (fitted,) = await planned([request(3)], server, exact=True)
    assert (TEMPLATE, TEMPLATE - 3) == (fitted.request.input_tokens, fitted.missed_tokens)


async def test_exact_prompts_need_a_template():
    """cl100k_base has none; a protocol without a template needs none."""
    with raises("tokenizer.no-chat-template"):
        await planned([request(50)], tokenizers.reference(), exact=True)
    (fitted,) = await planned([request(50)], tokenizers.reference(), exact=True, endpoint="completions")
    assert tokenizers.reference().count(json.loads(fitted.request.body)["prompt"]) == 50 == fitted.request.input_tokens


def talk(turns: int) -> WorkloadRequest:
    later = tuple(
        Turn(token_ids=IDS[: 10 + n], input_tokens=10 + n, max_tokens=5, think_s=0.5 * n) for n in range(turns - 1)
    )
    return request(50, token_ids=IDS[:50], turns=later)


async def test_a_session_is_one_record_with_its_turns():
    """Each turn has an index of its own, what it adds as its body, and its pause; a single request has no session."""
    plan = await planned([talk(3), talk(1), talk(2)], tokenizers.reference(), first_index=10)
    assert [(10, 0, 0), (13, -1, 0), (14, 2, 0)] == [
        (fitted.request.index, fitted.request.session, fitted.request.turn) for fitted in plan
    ]
    turns = plan[0].request.turns
    assert [(11, 0, 1, 0), (12, 0, 2, 500_000_000)] == [
        (turn.index, turn.session, turn.turn, turn.think_ns) for turn in turns
    ]
    assert [-1, -1] == [turn.offset_ns for turn in turns]
    added = [json.loads(turn.body)["messages"] for turn in turns]
    assert [[{"role": "user", "content": tokenizers.reference().text(IDS[:n])}] for n in (10, 11)] == added
    assert [10, 11] == [turn.input_tokens for turn in turns]


async def test_offsets_and_counts_are_of_sessions():
    """One offset a session; count says how many."""
    plan = await planned([talk(2)] * 5, tokenizers.reference(), offsets_ns=np.array([3, 4, 5]), count=2)
    assert [(0, 3), (2, 4)] == [(fitted.request.index, fitted.request.offset_ns) for fitted in plan]


async def test_turns_that_lead_beyond_the_model_are_dropped():
    """Counted with all that came before them; a warm-up drops all of them, and a protocol that carries none too."""
    (fitted,) = await planned([talk(5)], tokenizers.reference(), max_model_len=330)
    assert (2, 2) == (len(fitted.request.turns), fitted.dropped_turns)
    (fitted,) = await planned([talk(5)], tokenizers.reference(), sessions=False)
    assert ((), -1, 0) == (fitted.request.turns, fitted.request.session, fitted.dropped_turns)


async def test_urls_take_turns():
    """A session stays at its own."""
    plan = await planned([talk(2)] * 5, tokenizers.reference(), urls=2)
    assert [0, 1, 0, 1, 0] == [fitted.request.url for fitted in plan]
    assert [0, 1, 0, 1, 0] == [fitted.request.turns[0].url for fitted in plan]


async def test_shared_pieces_are_fitted_once(server: tokenizers.ServerTokenizer):
    """A thousand requests with the same prefix ask for it once."""
    asked: list[str] = []
    whole = server.encode

    async def counting(text: str) -> list[int]:
        asked.append(text)
        return await whole(text)

    server.encode = counting  # type: ignore[method-assign]
    await planned([request(300 + n, prefix=PREFIX) for n in range(30)], server)
    assert asked.count(tokenizers.reference().text(PREFIX.token_ids)) == 1


async def test_each_request_has_fields_and_a_number_of_its_own():
    """What a class adds to its bodies stands above what all requests have; {request} is the request's number."""
    extra = {"cache_salt": "a-{request}", "user": "all", "top_k": 3}
    order = fitter.PlanOrder(phase="measure", first_index=7)
    target = RequestTarget(model="m", extra=extra)
    wanted = [request(10), request(10, body={"user": "class", "priority": 1}), *(request(10) for _ in range(20))]
    plan = fitter.plan(wanted, target=target, tokenizer=tokenizers.reference(), order=order)
    bodies = [json.loads(each.request.body) async for each in plan]
    assert [body["cache_salt"] for body in bodies] == [f"a-{number}" for number in range(7, 29)]
    assert [body["user"] for body in bodies[:3]] == ["all", "class", "all"]
    assert [body.get("priority") for body in bodies[:3]] == [None, 1, None]
    assert bodies[0]["top_k"] == 3


@pytest.mark.parametrize(
    ("extra", "asked"),
    [
        ({}, 20),
        ({"top_k": 1}, 20),
        ({"max_tokens": 500}, 500),
        ({"max_tokens": None, "max_completion_tokens": 30}, 30),
        ({"max_tokens": None}, -1),
        ({"sampling_params": {"max_new_tokens": 9}}, -1),
    ],
)
async def test_the_output_that_a_body_asks_for_is_recorded(extra: dict[str, Any], asked: int):
    """Where its extra fields replace the workload's length, it is theirs, or not known."""
    (fitted,) = await planned([request(10, body=extra)], tokenizers.reference())
    assert fitted.request.max_tokens == asked


async def test_requests_are_spread_over_several_models():
    """Evenly, by their numbers alone; a session stays with one, and a class' own model counts."""
    plan = await planned([request(50)] * 400, tokenizers.reference(), models=("a", "b"))
    asked = [json.loads(fitted.request.body)["model"] for fitted in plan]
    assert [fitted.request.model for fitted in plan] == asked
    assert 160 < asked.count("a") < 240
    again = await planned([request(60)] * 400, tokenizers.reference(), models=("a", "b"))
    assert [fitted.request.model for fitted in again] == asked
    turn = Turn(token_ids=IDS[:10], input_tokens=10, max_tokens=5)
    for fitted in await planned([request(50, turns=(turn, turn))] * 20, tokenizers.reference(), models=("a", "b")):
        assert {fitted.request.model} == {json.loads(each.body)["model"] for each in fitted.request.turns}
    by_class = await planned([request(50, model="c"), request(50, body={"model": "d"})], tokenizers.reference())
    assert ["c", "d"] == [json.loads(fitted.request.body)["model"] for fitted in by_class]
    assert ["c", "d"] == [fitted.request.model for fitted in by_class]
