"""Runs of events that are read at once say what the same events say one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import asdict

from sidelight.loadgen.protocols.openai import FORM
from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.reply import Reply, read_reply
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState
from sidelight.loadgen.protocols.table import PROTOCOLS

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
ONE_BY_ONE = replace(FORM, run=None)
COUNTS = {"prompt_tokens": 9, "completion_tokens": 3}


def _read(form: Form, pieces: list[bytes]) -> Reply:
    ends = np.array(list(accumulate(map(len, pieces))), np.int64)
    return read_reply(form, 200, HEAD, b"".join(pieces), np.arange(1, len(pieces) + 1), ends)


def _facts(reply: Reply) -> dict[str, str]:
    """Return a reply as texts, in which a missing number equals another."""
    plain = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in asdict(reply).items()}
    return {name: repr(value) for name, value in plain.items()}


def _chunk(delta: dict[str, object] | None = None, **more: object) -> dict[str, object]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
    return {"id": "r1", "object": "chat.completion.chunk", "choices": [choice]}


TEXTS = st.text(max_size=4) | st.sampled_from([" a", "b", "\n", '"', "\\", "hé", "\u2028", "🙂", '"},"x":"', "data: "])
CONTENT = TEXTS.map(lambda text: _chunk({"content": text}))
ODD = st.one_of(
    TEXTS.map(lambda text: _chunk({"role": "assistant", "content": text})),
    TEXTS.map(lambda text: _chunk({"reasoning_content": text})),
    TEXTS.map(lambda text: _chunk({"reasoning": text, "content": None})),
    TEXTS.map(lambda text: _chunk({"reasoning_content": text, "reasoning": "r"})),
    TEXTS.map(lambda text: _chunk({"content": text, "refusal": "no"})),
    TEXTS.map(lambda text: _chunk({"content": text, "tool_calls": [{"index": 0}]})),
    TEXTS.map(lambda text: _chunk({"content": text}, index=1)),
    TEXTS.map(lambda text: _chunk({"content": text}, finish_reason="length")),
    TEXTS.map(lambda text: _chunk(None, text=text)),
    TEXTS.map(lambda text: _chunk({"content": text}) | {"usage": COUNTS}),
    TEXTS.map(lambda text: _chunk({"content": text}) | {"error": {"message": text}}),
    TEXTS.map(lambda text: _chunk({"content": text}) | {"object": "error"}),
    TEXTS.map(lambda text: _chunk({"content": text}) | {"timings": {"predicted_n": 3}}),
    TEXTS.map(lambda text: _chunk({"content": text}) | {"id": "r2"}),
    st.just({"id": "r1", "choices": [], "usage": COUNTS}),
    st.just(_chunk({"content": "a"}) | {"choices": [{"text": "a"}, {"text": "b"}]}),
)
EXO = b': generation_stats {"prompt_tps": 5.0}\n\n'
PLAIN = b'data: {"id": "r1", "choices": [{"delta": {"content": "c"}}]}\n\n'
# What stands in the stream as it is.
RAW = st.sampled_from(
    [
        b": keep-alive\n\n", b"data: [DONE]\n\n", b"event: message\n", b"id: 5\n", b"\n", b"data:\n\n", b"data: {\n\n",
        b"\r\n",
        EXO,
        b'data: {"id": "r1", "choices": [{"delta": {"content": "\\ud83d"}}]}\n\n',
        b'data: {"id": "r1", "choices": [{"delta": {"content": "\xff"}}]}\n\n',
        b'data: {"id": "r1", "choices": [{"delta": {"content": "a\tb"}}]}\n\n',
        b'data: {"id": "r1", "choices": [{"delta": {"content": "a", "content": "b"}}]}\n\n',
        b'data: {"id": "r1", "choices": [{"delta": {"content": "a\\"}}]}\n\n',
        b'data: {"id": "r1", "choices": [{"delta": {"content": "a\n\n',
        PLAIN,
    ]
)  # fmt: skip


@st.composite
def _streams(draw: st.DrawFn) -> list[bytes]:
    """Events in one style of JSON and line ends each, most of them plain content, some anything."""
    pieces: list[bytes] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["content", "content", "odd", "raw"]))
        if kind == "raw":
            pieces += draw(st.lists(RAW, max_size=3)) * draw(st.integers(1, 3))
            continue
        separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        end = draw(st.sampled_from([b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n"]))
        for payload in draw(st.lists(CONTENT if kind == "content" else ODD, max_size=5)) * draw(st.integers(1, 2)):
            data = json.dumps(payload, ensure_ascii=draw(st.booleans()), separators=separators)
            pieces.append(b"data: " + data.encode(errors="replace") + end)
    return pieces


@given(st.data(), _streams())
def test_a_run_says_what_its_events_say_one_by_one(data: st.DataObject, pieces: list[bytes]):
    """Whatever stands between the events and in them, wherever the stream is torn, and however it falls into reads."""
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=4)))
    reads = pieces if not cuts else [whole[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    assert _facts(_read(ONE_BY_ONE, reads)) == _facts(_read(FORM, reads))


@given(st.lists(RAW, max_size=12))
@example([PLAIN] * 3)
@example([EXO, PLAIN, PLAIN, EXO, b"data:\n\n"])
def test_broken_events_are_read_as_ever(pieces: list[bytes]):
    """What no JSON encoder writes, in any order."""
    assert _facts(_read(ONE_BY_ONE, pieces)) == _facts(_read(FORM, pieces))


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content", "text"])
def test_a_plain_stream_is_read_at_once(field: str):
    """Of a hundred events with text, only one in 26 and those that differ are decoded one by one."""
    taken: list[SseEvent] = []

    def take(seen: ReplyState, event: SseEvent) -> None:
        taken.append(event)
        FORM.take(seen, event)

    texts = [f" {number}é\n" for number in range(100)]
    events = [_chunk({"role": "assistant", "content": ""})]
    events += [_chunk(None, text=text) if field == "text" else _chunk({field: text}) for text in texts]
    events += [_chunk({}, finish_reason="length"), {"choices": [], "usage": COUNTS}]
    pieces = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    reply = _read(replace(FORM, take=take), pieces)
    # One of 26 is what tells the frame of the 25 behind it.
    assert 3 + 4 == len(taken)
    assert (100, True, "length") == (len(reply.chunk_ns), reply.complete, reply.finish_reason)
    assert _facts(_read(ONE_BY_ONE, pieces)) == _facts(reply)
    assert list(range(2, 102)) == reply.chunk_ns.tolist()
    assert PROTOCOLS["chat"].form is FORM
