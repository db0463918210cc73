"""Replies of the protocols beside OpenAI's chat and completions, as their servers write them."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.protocols import kserve
from sidelight.loadgen.protocols.reading.reply import Reads, Reply
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.turns import reply_text

SSE = "text/event-stream"
LINES = "application/x-ndjson"


def _sse(*payloads: object, named: bool = False) -> list[bytes]:
    heads = [f"event: {payload['type']}\n" if named else "" for payload in payloads]
    return [f"{head}data: {json.dumps(payload)}\n\n".encode() for head, payload in zip(heads, payloads, strict=True)]


def _lines(*payloads: object) -> list[bytes]:
    return [json.dumps(payload).encode() + b"\n" for payload in payloads]


def _texts(*payloads: object) -> list[bytes]:
    return [json.dumps(payload).encode() for payload in payloads]


def _responses(kind: str, **fields: object) -> dict[str, object]:
    return {"type": f"response.{kind}", **fields}


def _delta(kind: str, text: str) -> dict[str, object]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": f"{kind}_delta", kind: text}}


def _sglang(text: str, tokens: int, finish: object = None, **meta: object) -> dict[str, object]:
    counts = {"id": "r1", "prompt_tokens": 9, "completion_tokens": tokens, "finish_reason": finish}
    return {"text": text, "meta_info": counts | meta}


def _tgi(text: str, *, special: bool = False, **last: object) -> dict[str, object]:
    token = {"id": 5, "text": text, "logprob": -0.5, "special": special}
    return {"index": 1, "token": token, "generated_text": None, "details": None} | last


def _ollama(text: str, *, done: bool = False, **fields: object) -> dict[str, object]:
    return {"model": "m", "message": {"role": "assistant", "content": text}, "done": done, **fields}


def _kserve(text: str | None, *, final: bool = False, **counts: int) -> bytes:
    message = kserve._messages()["ModelStreamInferResponse"]()
    response = message.infer_response
    response.id = "r1"
    response.parameters["triton_final_response"].bool_param = final
    if text is not None:
        response.outputs.add(name="text_output", datatype="BYTES")
        response.raw_output_contents.append(len(text.encode()).to_bytes(4, "little") + text.encode())
    for name, count in counts.items():
        response.outputs.add(name=name, datatype="INT32")
        response.raw_output_contents.append(count.to_bytes(4, "little"))
    return bytes(message.SerializeToString())


USAGE = {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}
ENDED = {"id": "r1", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": USAGE}
STARTED = {"input_tokens": 9, "output_tokens": 0}
# As vLLM's: input tokens are without those of the cache.
MESSAGE_USAGE = {"input_tokens": 1, "output_tokens": 3, "cache_read_input_tokens": 8}
DETAILS = {"finish_reason": "length", "generated_tokens": 3, "input_length": 9}
COUNTS = {"prompt_tokens": 9, "completion_tokens": 3}
# The same reply of three tokens, " hé", " " and "llo", in each protocol: content type, pieces.
STREAMS: dict[str, tuple[str, list[bytes]]] = {
    "chat": (
        SSE,
        [
            *_sse(
                {"id": "r1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
                *({"choices": [{"index": 0, "delta": {"content": text}}]} for text in (" hé", " ", "llo")),
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
                {"choices": [], "usage": COUNTS},
            ),
            b"data: [DONE]\n\n",
        ],
    ),
    "responses": (
        SSE,
        _sse(
            _responses("created", response={"id": "r1", "status": "in_progress", "error": None}),
            _responses("output_item.added", item={"type": "message"}),
            *(_responses("output_text.delta", delta=text) for text in (" hé", " ", "llo")),
            _responses("output_text.done", text=" hé llo"),
            _responses("incomplete", response=ENDED),
            named=True,
        ),
    ),
    "messages": (
        SSE,
        _sse(
            {"type": "message_start", "message": {"id": "r1", "content": [], "usage": STARTED}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            *(_delta("text", text) for text in (" hé", " ", "llo")),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": MESSAGE_USAGE},
            {"type": "message_stop"},
            named=True,
        ),
    ),
    "sglang": (
        SSE,
        [
            *_sse(
                _sglang(" hé", 1), _sglang(" hé ", 2), _sglang(" hé llo", 3, {"type": "length", "length": 3})
            ),
            b"data: [DONE]\n\n",
        ],
    ),
    "tgi": (
        SSE,
        _sse(_tgi(" hé"), _tgi(" "), _tgi("llo", generated_text=" hé llo", details=DETAILS)),
    ),
    "ollama": (
        LINES,
        _lines(
            *map(_ollama, (" hé", " ", "llo")),
            _ollama("", done=True, done_reason="length", prompt_eval_count=9, eval_count=3),
        ),
    ),
    "websocket": (
        "",
        _texts(
            *({"type": "delta", "text": text} for text in (" hé", " ", "llo")),
            {"type": "done", "response_id": "r1", "finish_reason": "length", "usage": COUNTS},
        ),
    ),
    "grpc": (
        "",
        [
            _kserve(" hé", num_output_tokens=1, num_input_tokens=9),
            _kserve(" ", num_output_tokens=1),
            _kserve("llo", num_output_tokens=1),
            _kserve(None, final=True),
        ],
    ),
}  # fmt: skip
# A read of these is a message, and none is ever split.
MESSAGES = {"websocket", "grpc"}


def _head(kind: str, *more: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Type: {kind}", *more, "", ""]).encode()


def _read(protocol: str, *pieces: bytes, status: int = 200, head: bytes | None = None) -> Reply:
    """A reply whose pieces were read at 1, 2, 3, ... ns."""
    ends = np.array(list(accumulate(map(len, pieces))), np.int64)
    head = _head(STREAMS[protocol][0]) if head is None else head
    return PROTOCOLS[protocol].read_reply(status, head, b"".join(pieces), np.arange(1, len(pieces) + 1), ends)


def _text(protocol: str, head: bytes, *pieces: bytes) -> str | None:
    return asyncio.run(reply_text(PROTOCOLS[protocol], head, b"".join(pieces), accumulate(map(len, pieces))))


def _summary(reply: Reply) -> list[object]:
    """All that does not depend on when the reads came."""
    return [
        reply.output_tokens, reply.input_tokens, reply.finish_reason, reply.error, reply.complete, reply.done,
        reply.response_id, reply.first_kind, reply.chunk_chars.tolist(), reply.blank_before_first,
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", STREAMS)
def test_one_reply_in_every_protocol(protocol: str):
    """Three tokens of content, a blank one among them, are the same reply whatever brings them."""
    pieces = STREAMS[protocol][1]
    reply = _read(protocol, *pieces)
    ids = "" if protocol in {"tgi", "ollama"} else "r1"
    reason = "" if protocol == "grpc" else "length"
    assert [3, 9, reason, "", True, True, ids, "content", [3, 1, 3], 0] == _summary(reply)
    before = {"chat": 1, "responses": 2, "messages": 2}.get(protocol, 0)
    assert [before + 1, before + 2, before + 3] == reply.chunk_ns.tolist()
    assert (before + 1, before + 3) == (reply.first_token_ns, reply.last_token_ns)
    text = _text(protocol, _head(STREAMS[protocol][0]), *pieces)
    assert text == " hé llo"


@given(st.data(), st.sampled_from(sorted(STREAMS.keys() - MESSAGES)))
def test_how_the_bytes_fall_into_reads_changes_only_the_stamps(data: st.DataObject, protocol: str):
    """In the middle of characters, lines and frames too; each chunk has the stamp of the read that completed it."""
    kind, pieces = STREAMS[protocol]
    whole = b"".join(pieces)
    wire, wire_at = bytearray(), []
    for piece in _cut(data, whole):
        wire += b"%x\r\n" % len(piece)
        wire_at += range(len(wire), len(wire) + len(piece))
        wire += piece + b"\r\n"
    wire += b"0\r\n\r\n"
    reads = _cut(data, bytes(wire))
    reply = _read(protocol, *reads, head=_head(kind, "Transfer-Encoding: chunked"))
    expected = _read(protocol, *pieces)
    assert _summary(expected) == _summary(reply)
    ends = list(accumulate(map(len, reads)))
    starts = [0, *accumulate(map(len, pieces))]
    # A data line is complete before the blank line that ends its event.
    lines_end = [starts[at] - (1 if kind == SSE else 0) for at in expected.chunk_ns.tolist()]
    assert [1 + sum(wire_at[at - 1] + 1 > end for end in ends) for at in lines_end] == reply.chunk_ns.tolist()


@given(st.data(), st.sampled_from(sorted(STREAMS)))
def test_a_torn_stream_keeps_what_had_come(data: st.DataObject, protocol: str):
    """Cut anywhere before its last token was whole, it is not complete; its chunks are the first ones."""
    kind, pieces = STREAMS[protocol]
    whole = _read(protocol, *pieces)
    cut = data.draw(st.integers(0, sum(map(len, pieces[: int(whole.last_token_ns) - 1]))))
    starts = [0, *accumulate(map(len, pieces))]
    left = [piece[: max(0, cut - at)] for piece, at in zip(pieces, starts, strict=False)]
    if protocol in MESSAGES:
        left = [piece for piece, given in zip(pieces, left, strict=True) if piece == given]
    torn = _read(protocol, *left)
    assert whole.chunk_ns[: len(torn.chunk_ns)].tolist() == torn.chunk_ns.tolist()
    assert ("", False, False) == (torn.error, torn.complete, torn.done)
    assert _text(protocol, _head(kind), *left) is None


@given(st.data(), st.sampled_from(sorted(STREAMS)), st.sampled_from([200, 500]))
def test_no_bytes_make_reading_raise(data: st.DataObject, protocol: str, status: int):
    """Any bytes in place of any others, as a stream and as JSON: what comes out is a reply whose counts fit the log."""
    kind, pieces = STREAMS[protocol]
    said = b"".join(pieces)
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said)
    for first, body in (
        (_head(kind), said), (_head(kind, "Transfer-Encoding: chunked"), framed), (_head("application/json"), said),
        (b"HTTP/1.1 200 OK\r\n\r\n", said),
    ):  # fmt: skip
        whole = bytearray(first + body)
        spots = st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=3) | st.just(b"9" * 30))
        for at, piece in data.draw(st.lists(spots, min_size=1, max_size=6)):
            whole[at : at + 1] = piece
        cut = whole.find(b"\r\n\r\n") + 4
        head, rest = bytes(whole[:cut]), bytes(whole[cut:])
        reply = _read(protocol, rest, status=status, head=head)
        assert -1 <= min(reply.input_tokens, reply.output_tokens)
        assert max(reply.input_tokens, reply.output_tokens) <= 2**53
        _text(protocol, head, rest)


def _cut(data: st.DataObject, whole: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=8)))
    return [piece for piece in (whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)) if piece]


MIDWAY = {
    "messages": _sse({"type": "error", "error": {"type": "overloaded_error", "message": "no"}}, named=True),
    "responses": _sse(_responses("failed", response={"id": "r1", "status": "failed", "error": {"message": "no"}})),
    "sglang": _sse({"error": {"message": "no"}}),
    "tgi": _sse({"error": "no", "error_type": "generation"}),
    "ollama": _lines({"error": "no"}),
    "websocket": _texts({"type": "error", "code": 500, "message": "no"}),
    "grpc": [bytes(kserve._messages()["ModelStreamInferResponse"](error_message="no").SerializeToString())],
}


@pytest.mark.parametrize("protocol", MIDWAY)
def test_an_error_in_the_middle_is_an_error(protocol: str):
    """In the server's words; what came before it stays."""
    pieces = STREAMS[protocol][1][:-2]
    reply = _read(protocol, *pieces, *MIDWAY[protocol])
    assert ("server: no", False) == (reply.error, reply.complete)
    assert reply.first_token_ns > 0


EMPTY = {
    "messages": _sse({"type": "message_stop"}),
    "responses": [b"data: [DONE]\n\n"],
    "sglang": [b"data: [DONE]\n\n"],
    "tgi": _sse({"token": None, "generated_text": "", "details": DETAILS | {"generated_tokens": 0}}),
    "ollama": _lines({"done": True, "done_reason": "load"}),
    "websocket": _texts({"type": "done"}),
    "grpc": [_kserve(None, final=True)],
}
ABORTED = {
    "responses": _sse(_responses("completed", response={"id": "r1", "status": "cancelled"})),
    "ollama": _lines(_ollama("", done=True, done_reason="abort", eval_count=2)),
    "websocket": _texts({"type": "done", "finish_reason": "error"}),
    "sglang": _sse(_sglang(" hé", 1, "abort")),
    "tgi": _sse(_tgi("", generated_text="", details=DETAILS | {"finish_reason": "error"})),
}
BLANK = {
    "messages": _sse({"type": "ping"}, _delta("signature", "s"), _delta("partial_json", "")),
    "responses": _sse(_responses("function_call_arguments.delta", delta=""), _responses("x.delta", delta={})),
    "ollama": _lines({"message": {"content": "", "tool_calls": [{"function": {"name": ""}}]}, "done": False}),
    "websocket": _texts({"type": "delta", "tool_call": {}}, {"type": "delta", "tool_call": {"id": "c1"}}),
    "sglang": _sse(_sglang("", 0)),
    "tgi": _sse(_tgi("")),
    "grpc": [_kserve("")],
}


@pytest.mark.parametrize("protocol", EMPTY)
def test_a_stream_that_only_ends_is_a_failure(protocol: str):
    """Its last event came and no output, whatever the protocol calls the end."""
    reply = _read(protocol, *EMPTY[protocol])
    assert ("empty: the stream ended without any output", False) == (reply.error, reply.complete)


@pytest.mark.parametrize("protocol", ABORTED)
def test_a_reply_that_the_server_gave_up_is_a_failure(protocol: str):
    """By the reason why it ended, after content or before."""
    for before in ((), STREAMS[protocol][1][:-2]):
        reply = _read(protocol, *before, *ABORTED[protocol])
        assert (True, False) == (reply.error.startswith("aborted: "), reply.complete)


@pytest.mark.parametrize("protocol", BLANK)
def test_what_says_nothing_is_no_content(protocol: str):
    """Empty text and empty calls of tools are neither first tokens nor chunks."""
    reply = _read(protocol, *BLANK[protocol], *STREAMS[protocol][1])
    assert ("content", [3, 1, 3]) == (reply.first_kind, reply.chunk_chars.tolist())


def test_errors_of_the_responses_endpoint():
    """An event of the type error in either of its shapes, an aborted one, and a reply that is not streamed."""
    for error in ({"type": "error", "message": "no"}, {"type": "error", "error": {"message": "no"}}):
        assert _read("responses", *_sse(error)).error == "server: no"
    whole = json.dumps({"id": "r1", "status": "failed", "error": {"message": "no"}}).encode()
    assert _read("responses", whole, head=_head("application/json")).error == "server: no"
    filtered = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    assert _read("responses", *_sse(_responses("incomplete", response=filtered))).finish_reason == "content_filter"
    completed = _read("responses", *_sse(_responses("completed", response={"status": "completed"})))
    assert ("stop", True) == (completed.finish_reason, completed.complete)


def test_an_error_of_grpc_is_read_from_the_message():
    """As Triton does it, under the status OK."""
    message = kserve._messages()["ModelStreamInferResponse"](error_message="unexpected\n input")
    reply = _read("grpc", message.SerializeToString(), b"")
    assert ("server: unexpected input", False) == (reply.error, reply.complete)


@pytest.mark.parametrize(("name", "datatype"), [("text_output", "INT32"), ("num_output_tokens", "BYTES")])
def test_a_tensor_of_another_type_is_that_events_error(name: str, datatype: str):
    """Text that is numbers, a count that is text."""
    message = kserve._messages()["ModelStreamInferResponse"]()
    message.infer_response.outputs.add(name=name, datatype=datatype)
    message.infer_response.raw_output_contents.append(b"\1\0\0\0x")
    reply = _read("grpc", message.SerializeToString(), b"")
    assert reply.error.startswith("protocol: event 0 is not a completion chunk: Expected ")


def test_an_aborted_sglang_request_is_an_error():
    """Its finish reason says so, with a message or without."""
    aborted = _sglang(" a", 1, {"type": "abort", "message": "out of memory", "status_code": 500})
    assert _read("sglang", *_sse(aborted)).error == "server: out of memory"
    assert _read("sglang", *_sse(_sglang("", 0, {"type": "abort"}))).error == "server: the request was aborted"


@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=8))
def test_sglangs_texts_are_whole_or_new(texts: list[str]):
    """With --incremental-streaming-output an event has only what is new; both give the same characters."""
    whole = list(accumulate(texts))
    cumulative = _read("sglang", *_sse(*(_sglang(text, n) for n, text in enumerate(whole, 1))))
    assert [len(text) for text in texts] == cumulative.chunk_chars.tolist()
    if not all(later.startswith(earlier) for earlier, later in pairwise(texts)):
        new = _read("sglang", *_sse(*(_sglang(text, n) for n, text in enumerate(texts, 1))))
        assert cumulative.chunk_chars.tolist() == new.chunk_chars.tolist()


REASONING: dict[str, list[bytes]] = {
    "messages": _sse(_delta("thinking", "hm")),
    "chat": _sse({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}),
    "responses": _sse(_responses("reasoning_text.delta", delta="hm")),
    "ollama": _lines({"message": {"content": "", "thinking": "hm"}, "done": False}),
    "websocket": _texts({"type": "delta", "reasoning": "hm"}),
}
TOOLS: dict[str, list[bytes]] = {
    "messages": _sse({"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f", "input": {}}}),
    "chat": _sse({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}),
    "responses": _sse(_responses("function_call_arguments.delta", delta="{")),
    "ollama": _lines({"message": {"content": "", "tool_calls": [{"function": {"name": "f"}}]}, "done": False}),
    "websocket": _texts({"type": "delta", "tool_call": {"name": "f"}}),
}


@pytest.mark.parametrize("protocol", REASONING)
def test_reasoning_and_tool_calls_are_content_of_their_kind(protocol: str):
    """They are first tokens and chunks, and tools visible; a session does not carry them on."""
    said = STREAMS[protocol][1]
    for kind, first in (("reasoning", REASONING[protocol]), ("tool", TOOLS[protocol])):
        reply = _read(protocol, *first, *said)
        assert (kind, 1) == (reply.first_kind, reply.first_token_ns)
        assert reply.first_visible_ns == (1 if kind == "tool" else reply.chunk_ns[1])
        assert [2 if kind == "reasoning" else 0, 3, 1, 3] == reply.chunk_chars.tolist()
        text = _text(protocol, _head(STREAMS[protocol][0]), *first, *said)
        assert text == " hé llo"


@pytest.mark.parametrize(
    ("kind", "said"), [("reasoning", {"thinking": "hm"}), ("tool", {"tool_calls": [{"function": {"name": "f"}}]})]
)
def test_what_the_last_line_of_ollama_says_is_content(kind: str, said: dict[str, object]):
    """Of any kind: else a reply of one line has no first token."""
    reply = _read("ollama", *_lines(_ollama("", done=True, done_reason="stop", message={"content": "", **said})))
    assert (kind, 1, 1, True) == (reply.first_kind, reply.first_token_ns, len(reply.chunk_ns), reply.complete)


def test_a_special_token_of_tgi_is_no_content():
    """Its text is not part of what was generated for the reader, its count is."""
    last = _tgi("</s>", special=True, generated_text=" hé", details=DETAILS | {"finish_reason": "eos_token"})
    reply = _read("tgi", *_sse(_tgi(" hé"), last))
    assert ([1], 3, "stop", True) == (reply.chunk_ns.tolist(), reply.output_tokens, reply.finish_reason, reply.complete)


WHOLE = {
    "messages": {
        "id": "r1",
        "type": "message",
        "stop_reason": "max_tokens",
        "usage": MESSAGE_USAGE,
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hé"}],
    },
    "responses": {
        **ENDED,
        "output": [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "hé"}]}],
    },
    "sglang": _sglang("hé", 3, {"type": "length", "length": 3}),
    "tgi": {"generated_text": "hé", "details": DETAILS},
    "ollama": _ollama("hé", done=True, done_reason="length", prompt_eval_count=9, eval_count=3),
    "chat": {"id": "r1", "choices": [{"message": {"content": "hé"}, "finish_reason": "length"}], "usage": COUNTS},
}


@pytest.mark.parametrize("protocol", WHOLE)
def test_a_reply_that_is_not_streamed(protocol: str):
    """Counts, finish reason and text, and no token times."""
    body, head = json.dumps(WHOLE[protocol]).encode(), _head("application/json")
    reply = _read(protocol, body, head=head)
    assert ("", True, "length", 3, 9) == (
        reply.error, reply.complete, reply.finish_reason, reply.output_tokens, reply.input_tokens,
    )  # fmt: skip
    assert (-1, -1, 1) == (reply.first_token_ns, reply.first_output_ns, reply.done_ns)
    assert _text(protocol, head, body) == "hé"


@pytest.mark.parametrize("protocol", ["chat", "ollama"])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_generated_behind_the_last_event_counts(protocol: str, parts: int):
    """Else the time of two tokens would be shared by the three of the usage; also where it comes in a part of its own.

    What cannot be read there, and another last event, spoil nothing.
    """
    pieces = STREAMS[protocol][1]
    order = [*pieces[:-4], *pieces[-3:], pieces[-4]] if protocol == "chat" else [*pieces[:2], pieces[3], pieces[2]]
    last = len(order)
    order += [b"data: ?\n\n" if protocol == "chat" else b"?\n", order[-2]]
    cut = [order] if parts == 1 else [order[: last - 1], order[last - 1 :]]
    reads, at = [], 1
    for some in cut:
        ends = np.array(list(accumulate(map(len, some))), np.int64)
        reads.append(Reads(stamps_ns=np.arange(at, at + len(some)), ends=ends, body=b"".join(some)))
        at += len(some)
    reply = PROTOCOLS[protocol].read_parts(200, _head(STREAMS[protocol][0]), reads)
    assert (3, last, last - 1) == (len(reply.chunk_ns), reply.last_token_ns, reply.done_ns)
    assert ("", True, 3) == (reply.error, reply.complete, reply.output_tokens)


@pytest.mark.parametrize("stated", [{"eval_duration": -5}, {"total_duration": "2s"}, {"load_duration": 10**30}])
def test_a_time_of_ollama_that_cannot_be_spoils_no_reply(stated: dict[str, object]):
    """What cannot be read is left out, and a time below 0 is for the breakdown to refuse; all else counts."""
    reply = _read("ollama", *STREAMS["ollama"][1][:3], *_lines(_ollama("", done=True, eval_count=3, **stated)))
    assert ("", True, 3, 3) == (reply.error, reply.complete, reply.output_tokens, len(reply.chunk_ns))
    assert reply.timings is not None
    assert not reply.timings.decode_ms > 0


@pytest.mark.parametrize("field", ["eval_count", "prompt_eval_count"])
@pytest.mark.parametrize("stated", ["20", -1, 2.5, {}])
def test_a_count_of_ollama_that_is_none_is_doubted(field: str, stated: object):
    """It is not used, and the reply says which it was."""
    counts = {"eval_count": 3, "prompt_eval_count": 9, field: stated}
    reply = _read("ollama", *STREAMS["ollama"][1][:3], *_lines(_ollama("", done=True, eval_duration=9, **counts)))
    assert ("", True) == (reply.error, reply.complete)
    assert [{"eval_count": "output_tokens"}.get(field, "input_tokens")] == list(reply.doubts)
    assert [-1] == [tokens for tokens in (reply.output_tokens, reply.input_tokens) if tokens not in (3, 9)]


def test_a_last_line_of_ollama_that_repeats_the_reply_is_no_content():
    """It may come long after the last token."""
    ending = _ollama(" hé llo", done=True, done_reason="length", eval_count=3)
    pieces = [*STREAMS["ollama"][1][:3], *_lines(ending)]
    reply = _read("ollama", *pieces)
    assert ([1, 2, 3], 3, 3) == (reply.chunk_ns.tolist(), reply.last_output_ns, reply.output_tokens)
    assert _text("ollama", _head(LINES), *pieces) == " hé llo"
