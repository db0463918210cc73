"""A user's own prompts: what is read of a file, what is said of a bad one, and what is sent."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from codes import raises

from sidelight.loadgen.plan import prompts
from sidelight.loadgen.plan.fitting import PlanOrder, plan
from sidelight.loadgen.plan.tokenizers import ReferenceTokenizer
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads.catalogue import ReadyWorkload
from sidelight.loadgen.plan.workloads.prompts import OUTPUT_TOKENS
from sidelight.loadgen.plan.workloads.request import WorkloadRequest
from sidelight.loadgen.protocols.request import RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest

HI = {"role": "user", "content": "Hi"}
TALK = [{"role": "system", "content": "Be brief."}, HI]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(content: str | bytes | list[Any], name: str = "p.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(json.dumps(line) for line in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def given(path: Path, endpoint: str = "chat", **options: Any) -> ReadyWorkload:
    return workloads.given(path, seed=1, protocol=PROTOCOLS[endpoint], **options)


def first(workload: ReadyWorkload, count: int) -> list[WorkloadRequest]:
    return list(itertools.islice(workload.requests, count))


async def planned(
    path: Path, count: int, *, endpoint: str = "chat", max_model_len: int | None = None, **options: Any
) -> list[PlannedRequest]:
    target = RequestTarget(model="m", endpoint=endpoint)
    order = PlanOrder(phase="measure", count=count, max_model_len=max_model_len)
    requests = given(path, endpoint, **options).requests
    return [
        fitted.request async for fitted in plan(requests, target=target, tokenizer=ReferenceTokenizer(), order=order)
    ]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "Hi", "max_tokens": 7},
        {"text": "Hi", "output_length": 7},  # AIPerf, single_turn
        {"text_input": "Hi", "output_length": 7},  # AIPerf, a trace with texts
        {"prompt": "Hi", "output_tokens": 7},  # vllm bench, custom
        {"prompt": "Hi", "output_tokens_count": 7},  # GuideLLM
        {"prompt": "Hi", "max_completion_tokens": 7, "session": None},
    ],
)
def test_the_names_of_other_tools_are_read(write: Any, line: dict[str, Any]):
    """One prompt with its length, whichever tool the file was written for."""
    (request,) = first(given(write([line])), 1)
    assert ("Hi", 7, ()) == (request.text, request.max_tokens, request.turns)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n"b"\r\n', ["a", "b"]),
        ("p.json", '[{"prompt": "a"},\n "b"]', ["a", "b"]),
        ("p.txt", "a \r\n\n{b\n", ["a ", "{b"]),
        ("p.jsonl", '{"prompt": "a"}', ["a"]),
    ],
    ids=["BOM and CRLF", "list", "text", "no newline"],
)
def test_the_forms_of_a_file(write: Any, name: str, content: str | bytes, expected: list[str]):
    """JSON lines, a JSON list, plain lines; texts as they are, in the file's order, from the top again."""
    workload = given(write(content, name))
    assert len(expected) == workload.held
    assert (expected * 3)[:3] == [request.text for request in first(workload, 3)]
    assert {OUTPUT_TOKENS} == {request.max_tokens for request in first(workload, 3)}


def test_sharegpt_is_known_by_its_look(write: Any):
    """Each conversation's first message, as long as its reply; its later ones with --sessions."""
    said = [("human", "Hi"), ("gpt", "Hello there"), ("human", "Bye"), ("gpt", "Bye")]
    file = write(json.dumps([{"id": "1", "conversations": [{"from": who, "value": text} for who, text in said]}]))
    (request,) = first(given(file), 1)
    assert ("Hi", 2, ()) == (request.text, request.max_tokens, request.turns)
    (session,) = first(given(file, sessions=True, think_s=2.0), 1)
    assert [("Bye", 2, 2.0)] == [(turn.text, turn.max_tokens, turn.think_s) for turn in session.turns]


async def test_a_conversation_is_sent_unchanged(write: Any):
    """Roles and parts unchanged, in chat and in responses; what is asked of the output keeps to the model's length."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": "u"}]}]
    file = write([{"messages": TALK, "max_tokens": 900}, {"messages": parts, "max_tokens": 9}])
    first, two = await planned(file, 2, max_model_len=200)
    assert TALK == json.loads(first.body)["messages"]
    assert (4, 132) == (first.input_tokens, json.loads(first.body)["max_tokens"])
    assert parts == json.loads(two.body)["messages"]
    assert TALK == json.loads((await planned(file, 1, endpoint="responses"))[0].body)["input"]


async def test_a_session_is_sent_in_order(write: Any):
    """Its lines are turns, wherever they stand; texts continue the conversation, whole messages replace it."""
    lines = [
        {"prompt": "a", "session": "s"},
        {"prompt": "alone"},
        {"text": "b", "session_id": "s", "delay": 1500},
        {"messages": TALK, "session": "s"},
        {"session_id": 4, "turns": [{"text": "x", "output_length": 3}, "y"], "headers": {"X-T": "1"}},
        {"turns": [{"text": "x", "output_length": 3}, "y"], "max_tokens": 9, "delay": 20, "temperature": 0.5},
    ]
    session, alone, turns, beside = await planned(write(lines), 4, think_s=0.25)
    assert [(1, False, 1_500_000_000), (2, True, 250_000_000)] == [
        (turn.turn, turn.whole, turn.think_ns) for turn in session.turns
    ]
    assert TALK == json.loads(session.turns[1].body)["messages"]
    assert ((), -1) == (alone.turns, alone.session)
    assert [0, 0] == [turns.headers, turns.turns[0].headers]
    assert (3, OUTPUT_TOKENS) == (turns.max_tokens, turns.turns[0].max_tokens)
    assert (3, 9, 20_000_000) == (beside.max_tokens, beside.turns[0].max_tokens, beside.turns[0].think_ns)
    assert 0.5 == json.loads(beside.body)["temperature"]


async def test_headers_are_named_by_position(write: Any):
    """A plan, which stands in the run directory, has no header; equal sets are one."""
    lines = [{"prompt": "a", "headers": {"Authorization": "Bearer x"}}, {"prompt": "b"}, {"prompt": "c", "headers": {}}]
    file = write([*lines, lines[0]])
    assert [0, -1, -1, 0] == [request.headers for request in await planned(file, 4)]
    workload = given(file)
    assert ({"Authorization": "Bearer x"},) == workload.headers
    assert ["Authorization"] == workload.about["header_names"]
    assert "Bearer" not in json.dumps(workload.about)


def test_a_warm_up_is_as_long_but_sends_other_words(write: Any):
    """Nothing that is measured is in the engine's cache."""
    file = write([{"prompt": "Tell me about the sea.", "max_tokens": 3}, {"messages": TALK, "headers": {"A": "b"}}])
    first, two = itertools.islice(workloads.likenesses(file, seed=1, protocol=PROTOCOLS["chat"]), 2)
    assert (6, 3, -1) == (first.input_tokens, first.max_tokens, first.headers)
    assert (4, 0) == (two.input_tokens, two.headers)
    assert (None, ()) == (first.text, two.messages)


def test_what_is_not_used_and_what_is_not_stated_is_said_once(write: Any):
    """Fields of another purpose are ignored, with the first line of each; so are lengths that are missing."""
    file = write([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2, "category": "x", "max_tokens": 3}])
    assert (
        "--prompts: fields that Sidelight does not use are ignored: 'id' (line 1), 'category' (line 2)",
        "1 of 2 prompts states no max_tokens: 256 output tokens are requested for each of them",
    ) == given(file).notes
    assert () == given(write([{"prompt": "a", "max_tokens": 3}])).notes


EXAMPLE = '{"prompt": "...", "max_tokens": 128}'


@pytest.mark.parametrize(
    ("content", "place", "code"),
    [
        (b"", ": ", "prompt.empty"),
        (b"\n \n", ": ", "prompt.empty"),
        (b'{"prompt": "a"}\n\x80\x81', ", line 2: ", "prompt.not-utf8"),
        ("a\n".encode("utf-16"), ", line 1: ", "prompt.not-utf8"),
        (b"\0" * 99, ", line 1, column 1: ", "prompt.not-json"),
        (b'{"prompt": "a"', ", line 1, column 15: ", "prompt.not-json"),
        (b'\n{"prompt": "a", "prompt": "b"}', ", line 2: 'prompt': ", "prompt.duplicate-key"),
        (b'{"prompt": "a", "max_tokens": NaN}', ", line 1: ", "prompt.value"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", ", line 1: ", "prompt.value"),
        (b'{"prompt": ' + b"[" * 100_000, ", line 1: ", "prompt.too-large"),
        (b'{"prompt": "\\ud83d"}', ", line 1: ", "prompt.not-utf8"),
        (b"7", ", line 1: ", "prompt.value"),
        (b'{"id": 1}', ", line 1: ", "prompt.missing"),
        (b'{"prompt": null}', ", line 1: ", "prompt.missing"),
        (b'{"prompt": ""}', ", line 1: prompt: ", "prompt.missing"),
        (b'{"prompt": ["a"]}', ", line 1: prompt: ", "prompt.value"),
        (b'{"prompt": "a", "text": "b"}', ", line 1: ", "prompt.exclusive"),
        (b'{"prompt": "a", "messages": [{"role": "user"}]}', ", line 1: ", "prompt.exclusive"),
        (b'{"prompt": "a", "max_token": 3}', ", line 1: 'max_token': ", "prompt.unknown-field"),
        (b'{"prompt": "a", "max_tokens": 0}', ", line 1: max_tokens: ", "prompt.value"),
        (b'{"prompt": "a", "output_tokens": true}', ", line 1: output_tokens: ", "prompt.value"),
        (b'{"prompt": "a", "delay": 1e99}', ", line 1: delay: ", "prompt.value"),
        (b'{"messages": [{"role": "user", "content": "a", "x": 1e999}]}', ", line 1: ", "prompt.value"),
        (b'{"prompt": "a", "session": {}}', ", line 1: session: ", "prompt.value"),
        (b'{"messages": []}', ", line 1: messages: ", "prompt.value"),
        (b'{"messages": [{"content": "a"}]}', ", line 1: messages[0]: ", "prompt.value"),
        (b'{"messages": [{"role": "user", "content": 3}]}', ", line 1: messages[0].content: ", "prompt.value"),
        (b'{"turns": []}', ", line 1: turns: ", "prompt.value"),
        (b'{"turns": ["a", 3]}', ", line 1, turn 2: ", "prompt.value"),
        (b'{"turns": ["a", {"prompt": "b", "session": "s"}]}', ", line 1, turn 2: session: ", "prompt.exclusive"),
        (b'{"turns": [{"prompt": "a", "turns": ["b"]}]}', ", line 1, turn 1: turns: ", "prompt.exclusive"),
        (b'{"prompt": "a", "turns": ["b"]}', ", line 1: ", "prompt.exclusive"),
        (b'{"prompt": "a", "headers": {"X Y": "geheim"}}', ", line 1: headers: ", "prompt.header"),
        (b'{"prompt": "a", "headers": {"X": "geheim\\r\\nY: z"}}', ", line 1: headers.X: ", "prompt.header"),
        (b'{"prompt": "a", "headers": {"Host": "geheim"}}', ", line 1: headers.Host: ", "prompt.header"),
        (b'{"prompt": "a", "headers": ["geheim"]}', ", line 1: headers: ", "prompt.header"),
        (b'{"prompt": "a", "tools": {"name": "f"}}', ", line 1: tools: ", "prompt.value"),
        (b'{"prompt": "a", "tool_choice": 3}', ", line 1: tool_choice: ", "prompt.value"),
        (b'{"conversations": []}', ", line 1: conversations: ", "prompt.not-json"),
        (b'[{"prompt": "a"}, {"prompt": 3}]', ", item 2: prompt: ", "prompt.value"),
        (b'[{"prompt": "a"},\n{', ", line 2: ", "prompt.not-json"),
        (b"[" * 100_000, ": ", "prompt.too-large"),
    ])  # fmt: skip
def test_a_bad_file_is_one_line_that_names_where_and_the_cure(write: Any, content: bytes, place: str, code: str):
    """The file, the line and the field; never a header's value."""
    file = write(content)
    with raises(code) as caught:
        given(file)
    text = str(caught.value)
    assert text.startswith(f"{file}{place}")
    assert "\n" not in text
    assert len(text) < 400
    assert "geheim" not in text


def test_a_line_without_end_is_not_read_whole(write: Any, monkeypatch: pytest.MonkeyPatch):
    """What is read of a line is bounded."""
    monkeypatch.setattr(prompts, "MOST_LINE_BYTES", 1 << 20)
    with raises("prompt.too-large", says="line 1: "):
        given(write(b'{"prompt": "' + b"a" * (1 << 20)))


def test_a_list_is_read_whole_only_where_it_is_not_huge(write: Any, monkeypatch: pytest.MonkeyPatch):
    """JSON lines have no such bound."""
    monkeypatch.setattr(prompts, "MOST_LIST_BYTES", 1 << 20)
    with raises("prompt.too-large"):
        given(write(b'["' + b"a" * (1 << 20) + b'"]'))


async def test_tools_are_sent_as_they_are(write: Any):
    """With their prompt; those of a session's first line with each turn that has none of its own."""
    tools, others = [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": "g"}}]
    file = write(
        [
            {"prompt": "a", "tools": tools, "tool_choice": "required"},
            {"prompt": "b"},
            {"turns": ["c", {"prompt": "d", "tools": others}], "tools": tools},
            {"session": 1, "prompt": "e", "tools": tools},
            {"session": 1, "prompt": "f"},
        ]
    )
    requests = await planned(file, 4)
    bodies = [json.loads(turn.body) for request in requests for turn in (request, *request.turns)]
    assert [tools, None, tools, others, tools, tools] == [body.get("tools") for body in bodies]
    assert ["required", *[None] * 5] == [body.get("tool_choice") for body in bodies]


def test_a_protocol_without_roles_tools_or_headers_says_so(write: Any):
    """Before anything is sent."""
    talk, headed = write([{"messages": TALK}], "m"), write([{"prompt": "a", "headers": {"A": "b"}}], "h")
    for file in (talk, write([{"prompt": "a", "tools": [{}]}], "t")):
        with raises("prompt.endpoint", says="line 1: "):
            given(file, "completions")
    with raises("prompt.endpoint", says="line 1: "):
        given(headed, "grpc")
