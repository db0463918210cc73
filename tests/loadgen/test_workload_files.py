from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from codes import raises

from sidelight.loadgen.plan.tokenizers import reference
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads import code_completion
from sidelight.loadgen.plan.workloads.fields import WorkloadError
from sidelight.loadgen.protocols.table import PROTOCOLS

COUNT = 1000


def conversation(*messages: str, first: str = "human") -> dict[str, Any]:
    speakers = itertools.cycle(["human", "gpt"] if first == "human" else ["gpt", "human"])
    turns = [{"from": speaker, "value": text} for speaker, text in zip(speakers, messages, strict=False)]
    return {"id": "x", "conversations": turns}


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    """Three that count: with two exchanges, with one behind a gpt message, with an emoji; and four that do not."""
    path = tmp_path / "sharegpt.json"
    data = [
        conversation("How are you?", "Fine, thank you.", "And now?", "Still fine.", "unanswered"),
        conversation("greeting", "What is a token?", "A piece of text that a model reads.", first="gpt"),
        conversation("\U0001f600?", "Yes"),
        conversation("no reply"),
        conversation("  ", "to nothing"),
        conversation(),
        {"id": "y"},
    ]
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def drawn(workload: workloads.ReadyWorkload, count: int = COUNT) -> list[workloads.WorkloadRequest]:
    return list(itertools.islice(workload.requests, count))


def test_conversations_come_from_the_file_as_they_are(sharegpt: Path):
    """The first user message that has a reply, and the reply's length; each as often as the others."""
    workload = workloads.build("conversation", seed=1, dataset=sharegpt)
    requests = drawn(workload, 300)
    count = reference().count
    expected = {
        "How are you?": count("Fine, thank you."),
        "What is a token?": count("A piece of text that a model reads."),
        "\U0001f600?": count("Yes"),
    }
    assert expected == {request.text: request.max_tokens for request in requests}
    assert {100} == set(Counter(request.text for request in requests).values())
    assert all(not request.turns for request in requests)


def test_half_of_the_conversations_share_a_system_prompt(sharegpt: Path):
    """One of 200 tokens."""
    systems = [
        request.system for request in drawn(workloads.build("conversation", seed=1, dataset=sharegpt)) if request.system
    ]
    assert abs(len(systems) / COUNT - 0.5) <= 4.5 * math.sqrt(0.25 / COUNT)
    assert {200} == {system.tokens for system in systems}
    assert len(set(systems)) == 1


def test_the_file_is_stated_with_version_subset_and_preprocessing(sharegpt: Path):
    """SHA-256, name, how many conversations were there and how many are used; not synthetic."""
    workload = workloads.build("conversation", seed=1, dataset=sharegpt)
    data = workload.about["data"]
    assert hashlib.sha256(sharegpt.read_bytes()).hexdigest() == data["sha256"]
    assert ("sharegpt.json", 7) == (data["file"], data["conversations_in_file"])
    assert "3 conversations" in data["subset"]
    assert data["preprocessing"]
    assert ("conversation", False) == (workload.label, workload.about["stand_in"])
    json.dumps(workload.about)


@pytest.mark.parametrize("sessions", [False, True])
def test_what_of_a_file_is_not_sent_is_counted(sharegpt: Path, sessions: bool):
    """Conversations without a reply; and later turns, but of sessions."""
    without = "4 of 7 conversations are not sent: no user's message with a reply is in them"
    later = "later turns (1) of 3 conversations not sent, only the first of each: --sessions sends them"
    notes = (without,) if sessions else (without, later)
    given = workloads.given(sharegpt, seed=1, protocol=PROTOCOLS["chat"], sessions=sessions)
    assert notes == workloads.build("conversation", seed=1, dataset=sharegpt, sessions=sessions).notes == given.notes


def test_half_a_surrogate_pair_spoils_no_file(tmp_path: Path):
    """It becomes U+FFFD; a whole pair and an escaped backslash stay; a file written anew is read anew."""
    path = tmp_path / "sharegpt.json"
    for text, expected in (
        (r"\ud83d \ud83d\ude00 \\ud83d", "\ufffd \U0001f600 \\ud83d"),
        (r"\ude00 again", "\ufffd again"),
    ):
        messages = f'{{"from": "human", "value": "{text}"}}, {{"from": "gpt", "value": "yes"}}'
        path.write_text(f'[{{"conversations": [{messages}]}}]', encoding="utf-8")
        workload = workloads.build("conversation", seed=1, dataset=path)
        assert expected == next(workload.requests).text


def test_a_conversation_can_be_a_session(sharegpt: Path):
    """Later exchanges are later turns; a message without a reply is left out."""
    workload = workloads.build("conversation", seed=1, dataset=sharegpt, sessions=True, think_s=2.5)
    turns = {request.text: [(turn.text, turn.think_s) for turn in request.turns] for request in drawn(workload, 30)}
    assert {"How are you?": [("And now?", 2.5)], "What is a token?": [], "\U0001f600?": []} == turns


PYTHON = '''import os

def first(a,
          b):
    """Says something."""
    if a:

        return b
    return a


class Thing:
    async def method(self):
        x = 1
        return x

def short(): return 1
'''
SCRIPT = """const a = 1;
export default async function load(url) {
  if (url) { return { a }; }
  return null;
}
function tiny() { return 1; }
"""


def test_functions_are_cut_out():
    """By indentation in Python, by braces in JavaScript; those of fewer than three lines are left out."""
    first, method = code_completion.python_functions(PYTHON)
    assert (first.splitlines()[0], first.splitlines()[-1]) == ("def first(a,", "    return a")
    assert method == "    async def method(self):\n        x = 1\n        return x\n"
    (load,) = code_completion.braced_functions(SCRIPT)
    assert load.startswith("export default async function load(url) {")
    assert load.endswith("return null;\n}")


def rows() -> list[dict[str, str]]:
    return [
        {"content": PYTHON.replace("first", f"first_{n}"), "lang": "Python", "max_stars_repo_name": f"r{n % 12}"}
        for n in range(36)
    ] + [
        {"content": SCRIPT, "lang": "TypeScript", "max_stars_repo_name": "ts"},
        {"content": "package main", "lang": "Go", "max_stars_repo_name": "go"},
    ]


def written(path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows()), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows()), encoding="utf-8")
    return path


@pytest.fixture(params=["parquet", "jsonl"])
def stack(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return written(tmp_path / f"stack.{request.param}")


def test_rows_without_a_function_are_counted(stack: Path):
    (note,) = workloads.build("code-completion", seed=1, dataset=stack).notes
    assert note.startswith("1 of 38 rows is not sent: no function of 3 to 400 lines")


def test_code_comes_from_the_file(stack: Path):
    """A prompt is the beginning of one of its functions; four of five begin with one of ten contexts of the file."""
    workload = workloads.build("code-completion", seed=1, dataset=stack)
    requests = drawn(workload)
    corpus, _ = code_completion.read(stack)
    assert len(corpus.functions) == 36 * 2 + 1
    assert all(
        any(function.startswith(request.text or "?") for function in corpus.functions) for request in requests[:50]
    )
    prefixes = {request.prefix for request in requests if request.prefix}
    assert len(prefixes) == 10
    for prefix in prefixes:
        assert 512 <= prefix.tokens <= 1024
        assert abs(reference().count(prefix.text) - prefix.tokens) <= 2
    assert abs(sum(request.prefix is not None for request in requests) / COUNT - 0.8) <= 4.5 * math.sqrt(0.16 / COUNT)
    assert "73 functions of 37 files" in workload.about["data"]["subset"]
    assert (False, "code-completion") == (workload.about["stand_in"], workload.label)
    json.dumps(workload.about)


def test_both_formats_give_the_same_requests(tmp_path: Path):
    """Parquet and JSON lines of the same rows."""
    files = [written(tmp_path / name) for name in ("a.parquet", "a.jsonl")]
    plans = [drawn(workloads.build("code-completion", seed=9, dataset=path), 20) for path in files]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("workload", "name", "content", "says"),
    [
        ("conversation", "a.json", "{}", r"a\.json: no ShareGPT JSON: Expected `array`.*it must be a list of"),
        ("conversation", "a.json", "[", "no ShareGPT JSON: Input data was truncated"),
        ("conversation", "a.json", '[{"id":' + "[" * 200_000, "no ShareGPT JSON: "),
        ("conversation", "a.json", "[{}]", "none of 1 conversations has a human message with a gpt reply"),
        ("code-completion", "a.jsonl", '{"content": "x"}\n{', r"a\.jsonl, line 2: no JSON object"),
        (
            "code-completion",
            "a.jsonl",
            '{"content": "x"}',
            "no function of 3 lines or more in 1 rows; each needs `content`",
        ),
        ("code-completion", "a.parquet", "x", r"a\.parquet: no Parquet: .*give a Parquet or JSON lines file"),
    ],
)
def test_a_wrong_file_is_refused(workload: str, name: str, content: str, says: str, tmp_path: Path):
    """With its name, what is wrong, and what it should be."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(WorkloadError, match=says):
        workloads.build(workload, seed=1, dataset=path)


def test_a_file_that_is_missing_or_of_no_use_is_refused(tmp_path: Path):
    """Not there; or given to a workload that reads none."""
    with raises("file.unreadable"):
        workloads.build("conversation", seed=1, dataset=tmp_path / "none.json")
    with raises("dataset.not-read"):
        workloads.check("long-context", dataset=tmp_path / "x")
    with raises("option.missing"):
        workloads.check("trace")


def test_a_trace_gives_its_lengths(tmp_path: Path):
    """In its order, once, as English words."""
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,20,9\n",
        encoding="utf-8",
    )
    workload = workloads.build("trace", seed=1, trace=path)
    requests = list(workload.requests)
    assert [(374, 44), (20, 9)] == [(request.input_tokens, request.max_tokens) for request in requests]
    assert [374, 20] == [reference().count(reference().text(request.token_ids)) for request in requests]
    assert "trace azure" == workload.label
    assert hashlib.sha256(path.read_bytes()).hexdigest() == workload.about["data"]["sha256"]


def test_equal_hash_ids_are_equal_blocks(tmp_path: Path):
    """Two requests share the blocks that the trace says they shared, and nothing beyond them."""
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 5, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 9, "input_length": 600, "output_length": 5, "hash_ids": [1]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    first, second, third = (request.token_ids for request in workloads.build("trace", seed=1, trace=path).requests)
    assert (1100, 1030, 600) == (len(first), len(second), len(third))
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]
