from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from codes import raises
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.loadgen.plan.fitting import PlanOrder, plan
from sidelight.loadgen.plan.tokenizers import ReferenceTokenizer
from sidelight.loadgen.plan.traces import ArrivalTrace, TraceError, read_trace
from sidelight.loadgen.plan.workloads import replayed
from sidelight.loadgen.protocols.request import RequestTarget

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05,110,27
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""


@pytest.fixture
def azure(shared: Path) -> Path:
    """Azure's recordings of 2023."""
    return shared / "fixtures/traces"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.mark.parametrize(
    ("text", "name", "offsets_ns", "inputs", "outputs"),
    [
        (AZURE, "azure", [0, 52_000_000, 1_020_040_000], [4808, 3180, 110], [10, 8, 27]),
        (AZURE.replace("\n", "\r\n"), "azure", [0, 52_000_000, 1_020_040_000], [4808, 3180, 110], [10, 8, 27]),
        ("\ufeff" + AZURE, "azure", [0, 52_000_000, 1_020_040_000], [4808, 3180, 110], [10, 8, 27]),
        (AZURE_2024, "azure", [0, 7_405_000], [2162, 2399], [5, 6]),
        (BURSTGPT, "burstgpt", [0, 40 * 10**9, 113 * 10**9], [472, 1087, 417], [18, 230, 276]),
        (MOONCAKE, "mooncake", [0, 3_053_000_000], [6955, 6472], [52, 26]),
    ],
)
def test_a_public_trace_is_known_by_its_fields(
    file: Path, text: str, name: str, offsets_ns: list[int], inputs: list[int], outputs: list[int]
):
    """Its first request is at 0, to the 100 ns that Azure states; lengths stand as recorded."""
    file.write_bytes(text.encode())
    trace = read_trace(file)
    read = trace.name, trace.offsets_ns.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()
    assert (name, offsets_ns, inputs, outputs) == read
    assert () == trace.notes


def test_mooncake_states_which_prefixes_are_shared(file: Path):
    """Blocks of 512 tokens by number; the other formats have none."""
    file.write_text(MOONCAKE)
    trace = read_trace(file)
    assert (((46, 47, 2353), (46, 47, 2366)), 512) == (trace.hash_ids, trace.block_tokens)
    file.write_text(BURSTGPT)
    assert (None, 0) == (read_trace(file).hash_ids, read_trace(file).block_tokens)


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, MOONCAKE])
def test_a_gzipped_trace_is_the_trace(file: Path, text: str):
    """As Azure publishes that of 2025."""
    file.write_bytes(gzip.compress(text.encode()))
    packed = read_trace(file)
    file.write_text(text)
    assert read_trace(file).offsets_ns.tolist() == packed.offsets_ns.tolist()


def test_json_lines_and_csv_hold_the_same_fields(file: Path):
    """A trace that somebody turned from one into the other reads the same, blank lines between or not."""
    rows = [{"Timestamp": 5, "Request tokens": 472, "Response tokens": 18}]
    file.write_text("\n" + "\n\n".join(json.dumps(row) for row in rows))
    assert "burstgpt" == read_trace(file).name
    file.write_text('timestamp,input_length,output_length,hash_ids\n0,512,3,"[1]"\n\n500,512,3,\n')
    trace = read_trace(file)
    assert ("mooncake", [0, 500_000_000], ((1,), ())) == (trace.name, trace.offsets_ns.tolist(), trace.hash_ids)


def test_what_a_column_of_others_holds_is_not_read(file: Path):
    """A text that begins with a bracket, as a name of a model may, need not be a list."""
    file.write_text('Timestamp,Model,Request tokens,Response tokens\n5,"[draft] GPT-4",472,18\n')
    assert [472] == read_trace(file).input_tokens.tolist()


def test_requests_out_of_order_are_sorted_and_counted(file: Path):
    """Whole requests move, those of one moment keep their order, and a note counts the steps back."""
    lines = [f'{{"timestamp": {at}, "input_length": {length}, "output_length": 1}}' for at, length in
             ((10, 1), (30, 2), (20, 3), (20, 4), (5, 5))]  # fmt: skip
    file.write_text("\n".join(lines))
    trace = read_trace(file)
    assert [5, 1, 3, 4, 2] == trace.input_tokens.tolist()
    assert [0, 5, 15, 15, 25] == (trace.offsets_ns // 10**6).tolist()
    assert ("time stepped back 2 times from one line to the next: put into order",) == trace.notes


def test_requests_that_cannot_be_sent_are_left_out_and_counted(file: Path):
    """BurstGPT's failures have no response tokens; the first that is left is at 0."""
    file.write_text(BURSTGPT.replace("5,ChatGPT,472,18", "5,ChatGPT,472,0"))
    trace = read_trace(file)
    assert [0, 73 * 10**9] == trace.offsets_ns.tolist()
    assert ("1 of 3 requests has no input or no output tokens: left out",) == trace.notes


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 10**5), st.integers(1, 10**5)), min_size=1))
def test_what_was_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]):
    """Any number of requests of any lengths at any millisecond."""
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    keys = ("timestamp", "input_length", "output_length")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    trace = read_trace(path)
    ordered = sorted(rows, key=lambda row: row[0])
    read = zip(trace.offsets_ns.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    assert [((at - ordered[0][0]) * 10**6, inputs, outputs) for at, inputs, outputs in ordered] == list(read)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request with input and output tokens in 0 lines"),
        (AZURE[:40], "no request"),
        ("a,b\n1,2\n", r"line 1: its fields are a, b; a trace has TIMESTAMP, .*\(azure\); .*\(mooncake\)"),
        (AZURE.replace("110", "many"), "line 4: ContextTokens: 'many': Expected `int`"),
        (AZURE.replace(",110,27", ",110"), "line 4: .*missing required field `GeneratedTokens`"),
        (AZURE.replace("2023-11-16 18:17:05", "tomorrow"), "line 4: TIMESTAMP: 'tomorrow': no date and time"),
        (AZURE.replace("2023-11-16 18:17:05", "0023-11-16 18:17:05"), "line 4: a date that is not of our time"),
        ('{"timestamp": 0, "hash_ids": ' + "[" * 100_000, "line 1: "),
        ("timestamp,input_length,output_length,hash_ids\n0,1,1," + "[" * 100_000, "line 2: "),
        (BURSTGPT.replace("45,", "later,"), "line 3: Timestamp: 'later': Expected `float`"),
        (BURSTGPT.replace("45,", "nan,"), "line 3: Timestamp: 'nan': Expected `float` >= 0"),
        (BURSTGPT.replace("45,", "-45,"), "line 3: Timestamp: '-45': Expected `float` >= 0"),
        (BURSTGPT.replace(",230,", ",-230,"), "line 3: Response tokens: '-230': Expected `int` >= 0"),
        (
            BURSTGPT.replace(",230,", ",99999999999999999999,"),
            "line 3: Response tokens: .*: Expected `int` <= 2147483648",
        ),
        (MOONCAKE.replace("6472", "null"), "line 2: input_length: None: Expected `int`"),
        (MOONCAKE.replace("6472", "1.5"), "line 2: input_length: 1.5: Expected `int`"),
        (MOONCAKE.replace("30535", "true"), "line 2: timestamp: True: Expected `float`"),
        (MOONCAKE.replace('"timestamp": 30535, ', ""), "line 2: .*missing required field `timestamp`"),
        (MOONCAKE.replace("[46, 47, 2366]", '"4"'), "line 2: hash_ids: '4': Expected `array"),
        (MOONCAKE.replace("[46, 47, 2366]", '"!"'), "line 2: hash_ids: '!': Expected `array"),
        (MOONCAKE.replace("2366]}", "2366]"), "line 2: .*30535"),
        (MOONCAKE + "[1]\n", r"line 3: .*\[1\]"),
    ],
)
def test_an_error_names_file_line_field_and_value(file: Path, text: str, says: str):
    """One line that says where to look."""
    file.write_text(text)
    with pytest.raises(TraceError, match=f"{file}(, |: ){says}") as caught:
        read_trace(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"\x1f\x8b\x08nothing of the kind", gzip.compress(b"x" * 99, mtime=0)[:20]]
)
def test_a_binary_file_is_refused(file: Path, content: bytes):
    """Other encodings, and archives that are damaged or torn."""
    file.write_bytes(content)
    with raises("trace.unreadable"):
        read_trace(file)


def test_azures_recordings_read_whole(azure: Path):
    """Nearly an hour of conversations and of code completions, every line of both files."""
    code, conversation = (read_trace(azure / f"azure_{name}.csv") for name in ("code", "conv"))
    assert (8819, 19366) == (len(code.offsets_ns), len(conversation.offsets_ns))
    assert (0, 3_435_948_056_000) == (code.offsets_ns[0], code.offsets_ns[-1])
    assert ((), ()) == (code.notes, conversation.notes)


def test_a_trace_is_replayed_at_another_mean_rate(azure: Path):
    """Azure's conversations, 5.5/s as recorded, at 50/s: every gap is shortened alike."""
    trace = read_trace(azure / "azure_conv.csv")
    offsets_s = schedule(Arrival(kind="replay", trace_ns=trace.offsets_ns, rate_per_s=50), seed=1) / 1e9
    assert offsets_s[-1] == pytest.approx((len(offsets_s) - 1) / 50)
    assert np.diff(offsets_s) == pytest.approx(np.diff(trace.offsets_ns / 1e9) * offsets_s[-1] / 3501.721937, abs=1e-8)


def _agent(**more: object) -> dict[str, object]:
    """A session of WEKA's kv-cache-tester, as AIPerf's model of the format has it; a subagent forks after 2 blocks."""
    inner = {"t": 2.6, "type": "n", "model": "m", "in": 150, "out": 9, "hash_ids": [1, 2, 20], "think_time": 0.0}
    subagent = {
        "t": 2.5, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "duration_ms": 900,
        "status": "completed", "models": ["m"], "requests": [inner],
    }  # fmt: skip
    requests = [
        {"t": 0.0, "type": "s", "model": "m", "in": 200, "out": 12, "hash_ids": [1, 2, 3], "api_time": 1.0},
        {"t": 1.5, "type": "s", "model": "m", "in": 260, "out": 10, "hash_ids": [1, 2, 3, 4], "stop": "tool_use"},
        subagent,
        {"t": 900.0, "type": "s", "model": "m", "in": 300, "out": 8, "hash_ids": [1, 2, 3, 4], "think_time": 800.0},
    ]
    return {"id": "a", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests} | more


def _agents(file: Path, *sessions: dict[str, object]) -> ArrivalTrace:
    file.write_text("\n".join(map(json.dumps, sessions)))
    return read_trace(file)


def test_an_agents_session_forks_from_a_shared_prefix(file: Path):
    """Whole prompts in order, the subagent's in its place; blocks of equal numbers are equal within a session alone."""
    trace = _agents(file, _agent(), _agent())
    assert ("weka", 64, [0, 0], [200, 200]) == (
        trace.name, trace.block_tokens, trace.offsets_ns.tolist(), trace.input_tokens.tolist(),
    )  # fmt: skip
    assert trace.later is not None
    assert [(260, 10, 0.5), (150, 9, 0.0), (300, 8, 60.0)] == [
        (later.input_tokens, later.output_tokens, later.think_s) for later in trace.later[0]
    ]
    session, other = replayed.requests(trace, seed=1)
    prompts = [session.token_ids, *(turn.token_ids for turn in session.turns)]
    assert [200, 260, 150, 300] == [len(prompt) for prompt in prompts]
    assert prompts[0][:192] == prompts[1][:192]
    assert prompts[1][:256] == prompts[3][:256]
    assert prompts[0][:128] == prompts[2][:128]
    assert prompts[0][128:192] != prompts[2][128:]
    assert prompts[0][:64] != other.token_ids[:64]
    assert {"requests": 8, "sessions": 2}.items() <= replayed.about(trace).items()


async def test_each_turn_of_an_agents_session_is_sent_whole(file: Path):
    """As a conversation of its own; one that is too long for the model ends the session."""
    trace = _agents(file, _agent(hash_id_scope="global"))
    target, order = RequestTarget(model="m"), PlanOrder(phase="measure", count=1, max_model_len=64 + 64 + 270)
    workload = replayed.requests(trace, seed=1)
    (fitted,) = [
        planned async for planned in plan(workload, target=target, tokenizer=ReferenceTokenizer(), order=order)
    ]
    assert [(True, 1, 500_000_000), (True, 2, 0)] == [
        (turn.whole, turn.turn, turn.think_ns) for turn in fitted.request.turns
    ]
    assert fitted.dropped_turns == 1
    sent = [json.loads(turn.body)["messages"] for turn in (fitted.request, *fitted.request.turns)]
    assert [1, 1, 1] == [len(messages) for messages in sent]


def test_sessions_of_different_blocks_are_refused(file: Path):
    with raises("trace.line", says="block_size"):
        _agents(file, _agent(), _agent(block_size=16))


def test_a_packed_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    line = b'{"timestamp": 0, "input_length": 5, "output_length": 5' + b" " * (1 << 27) + b"}"
    path.write_bytes(gzip.compress(line, 1))
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert refused.value.code == "trace.line"
