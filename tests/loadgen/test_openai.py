from __future__ import annotations

import json
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.protocols.reading import events as sse
from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.table import PROTOCOLS

PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"
CHUNKED_HEAD = PLAIN_HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
CHAT = PROTOCOLS["chat"]


def _delta(finish: str | None = None, **delta: object) -> str:
    return json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _usage(prompt: int, completion: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def _read(*pieces: bytes, status: int = 200, head: bytes = PLAIN_HEAD) -> Reply:
    """A reply whose pieces were read at 1, 2, 3, ... ns."""
    ends = np.array(list(accumulate(map(len, pieces))), np.int64)
    return CHAT.read_reply(status, head, b"".join(pieces), np.arange(1, len(pieces) + 1), ends)


def _stream(*payloads: str, **options: object) -> Reply:
    return _read(*(f"data: {payload}\n\n".encode() for payload in payloads), **options)


def test_the_time_of_a_choice_begins_with_its_first_output_not_with_its_role():
    """vLLM names the roles of all choices when the first has a token; others may still wait in its queue then."""

    def of(index: int, **delta: object) -> str:
        return json.dumps({"id": "x", "choices": [{"index": index, "delta": delta}]})

    roles = [of(index, role="assistant", content="") for index in range(2)]  # read at 1 and 2 ns
    reply = _stream(*roles, of(0, content="a"), of(0, content="b"), of(1, content="c"), of(1, content="d"))
    assert (2, 0, 2) == (reply.choices, reply.silent_events, reply.output_span_ns)


def test_no_time_of_choices_is_known_where_one_came_in_one_read():
    """Its tokens would count with no time at all."""

    def of(index: int) -> bytes:
        return f'data: {{"id": "x", "choices": [{{"index": {index}, "delta": {{"content": "a"}}}}]}}\n\n'.encode()

    assert 2 == _read(of(0), of(0) + of(1) * 3, of(1)).output_span_ns
    assert -1 == _read(of(0), of(1) * 4, of(0)).output_span_ns


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [("", b"a", 8)]),
        (b"\xef\xbb\xbfid: 7\nretry: 5\ndata: a\n\n:\n\n", [("", b"a", 26)]),
        (b"data:a\ndata: b\n\n", [("", b"a\nb", 15)]),
        (b"data:  two spaces\n\n", [("", b" two spaces", 18)]),
        (b"data\n\n", [("", b"", 5)]),
        (b": comment\n\nevent: error\ndata: x\n\ndata: y\n\n", [("error", b"x", 32), ("", b"y", 41)]),
        (b"event: only\n\ndata: y\n\n", [("", b"y", 21)]),
        (b"data: whole\ndata: to", [("", b"whole", 12)]),
        (b"data: torn", []),
        (b"datax: a\nfoo\n\n", []),
        (b"data: a\r\rdata: b\r\n\r\n", [("", b"a", 8), ("", b"b", 18)]),
    ],
)
def test_events_by_the_standard(stream: bytes, expected: list[tuple[str, bytes, int]]):
    """Fields, comments, joined data lines, and the one departure: a whole data line at the end counts."""
    assert expected == [(event.name, event.data, event.end) for event in sse.events(stream)]


@given(st.lists(st.sampled_from([b"data: a", b"data:b", b"data: ", b"data", b"event: x", b": c", b"", b"", b""])))
def test_events_are_the_same_whichever_line_end(lines: list[bytes]):
    """LF and CR mean the same: names, data and ends of all events are equal."""
    replies = [
        [(event.name, event.data, event.end) for event in sse.events(end.join([*lines, b""]))] for end in (b"\r", b"\n")
    ]
    assert replies[0] == replies[1]


def test_role_and_usage_are_no_tokens():
    """The first token is the first content; the count is the server's usage, not the number of events."""
    reply = _stream(
        _delta(role="assistant", content=""), _delta(content="a"), _delta(content="bc"), _delta("length"), _usage(7, 3),
        "[DONE]",
    )  # fmt: skip
    assert (2, 3, [2, 3]) == (reply.first_token_ns, reply.last_token_ns, reply.chunk_ns.tolist())
    assert (7, 3, "length") == (reply.input_tokens, reply.output_tokens, reply.finish_reason)
    assert (True, True, True, 0) == (reply.complete, reply.done, reply.role_only_first, reply.blank_before_first)


def test_blank_content_is_no_first_token():
    """Whitespace before the first token is noted; whitespace after it is content like any other."""
    reply = _stream(_delta(content=" \n"), _delta(content=""), _delta(content="a"), _delta(content=" "), "[DONE]")
    assert (3, 4, [1, 3, 4]) == (reply.first_token_ns, reply.last_token_ns, reply.chunk_ns.tolist())
    assert reply.blank_before_first == 1
    nothing = _stream(_delta(content="  "), "[DONE]")
    assert (-1, -1, 1) == (nothing.first_token_ns, nothing.last_token_ns, nothing.blank_before_first)


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"role": "assistant", "content": "a"},
    ],
)
def test_what_else_is_content(delta: dict[str, object]):
    """Reasoning, refusals and tool calls were generated and waited for."""
    assert _stream(_delta(**delta)).first_token_ns == 1


def test_completions_carry_text():
    """The text of a completions event is its content."""
    payload = '{"choices":[{"text":"a","finish_reason":null}]}'
    assert _stream(payload, '{"choices":[{"text":"","finish_reason":"stop"}]}').chunk_ns.tolist() == [1]


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ('{"error":{"message":"EngineCore  died\\nsee above","code":500}}', "server: EngineCore died see above"),
        ('{"error":"out of memory"}', "server: out of memory"),
        ('{"object":"error","message":"too long"}', "server: too long"),
        ('{"detail":"CUDA out of memory","status":500}', "server: CUDA out of memory"),
        ('{"type":"error","code":"internal"}', 'server: {"type":"error","code":"internal"}'),
        ('{"errors":[{"message":"overloaded"}]}', 'server: [{"message":"overloaded"}]'),
        ('{"message":"no worker is left","type":"Internal Server Error","code":500}', "server: no worker is left"),
        ('{"error":{}}', 'server: {"error":{}}'),
        ('{"error":{"message":"gone"},"choices":[{"delta":{"content":""},"finish_reason":"error"}]}', "server: gone"),
        ("{not json", "protocol: event 1 is not a completion chunk"),
        ('{"choices":[{"delta":{"content":7}}]}', "protocol: event 1 is not a completion chunk"),
    ],
)
def test_an_error_event_under_200_is_an_error(payload: str, error: str):
    """What came before it stays; [DONE] after it does not make the reply complete."""
    reply = _stream(_delta(content="a"), payload, "[DONE]")
    assert reply.error.startswith(error)
    assert (False, 1) == (reply.complete, reply.first_token_ns)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'error: {"code":400,"message":"too long","type":"invalid_request_error"}\n\n', "server: too long"),
        (b"event: error\n: no image\n: at all\n\n", "server: no image at all"),
        (b"event: error\n\n", "server: no message"),
        (b"event: error\ndata: out of memory\n\n", "server: out of memory"),
    ],
    ids=["llama.cpp", "Dynamo", "bare", "plain text"],
)
def test_an_error_that_no_data_line_holds_is_an_error(event: bytes, error: str):
    """By a field of its own, by a comment, by a name alone; and by data that are no JSON."""
    reply = _read(f"data: {_delta(content='a')}\n\n".encode(), b": keep-alive\n\n", event, b"data: [DONE]\n\n")
    assert (error, False, 1) == (reply.error, reply.complete, reply.first_token_ns)


@pytest.mark.parametrize("extra", [{"error": None}, {"error": ""}, {"errors": []}, {"detail": "d"}, {"message": "m"}])
def test_a_chunk_with_content_and_an_error_field_without_one_is_no_error(extra: dict[str, object]):
    """Servers that fill every field each time; a whole run of such chunks reads like one of them."""
    chunks = [json.dumps(json.loads(_delta(content=text)) | extra) for text in "abc"]
    reply = _stream(*chunks, _delta("stop"), "[DONE]")
    assert ("", True, [1, 2, 3]) == (reply.error, reply.complete, reply.chunk_ns.tolist())


@pytest.mark.parametrize("reason", ["error", "abort", "cancelled", "timeout", "insufficient_system_resource", "ERROR"])
def test_a_finish_reason_that_gives_the_reply_up_is_a_failure(reason: str):
    """As vLLM, SGLang, TensorRT-LLM and DeepSeek say it, streamed or whole, of any choice, with [DONE] or without."""
    error = f"aborted: the server ended the reply with finish_reason {reason}"
    first, last = _delta(content="a"), _delta(reason, content="b")
    stopped = json.dumps({"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]})
    for reply in (_stream(first, last, "[DONE]"), _stream(first, last), _stream(first, last, stopped, "[DONE]")):
        assert (error, False, 1) == (reply.error, reply.complete, reply.first_token_ns)
    whole = json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": reason}]}).encode()
    assert error == _read(whole, head=JSON_HEAD).error
    refused = _stream(last, _delta("content_filter"), "[DONE]")
    assert ("content_filter", "") == (refused.finish_reason, refused.error)


@pytest.mark.parametrize(
    ("payloads", "is_empty"),
    [
        ([], True),
        ([_delta(role="assistant", content="")], True),
        ([_usage(7, 0)], True),
        ([_delta("stop"), _usage(7, 0)], True),
        ([_delta(role="assistant"), _delta("stop")], False),
        ([_delta("stop"), _usage(7, 1)], False),
        ([_delta(content=" ")], False),
        ([_delta(content="a"), _usage(7, 0)], False),
        ([_delta("content_filter"), _usage(7, 0)], False),
    ],
)
def test_a_stream_without_any_output_is_a_failure(payloads: list[str], is_empty: bool):
    """Nothing but [DONE], a role or zero tokens; a model that ends at once, and says so, is none."""
    reply = _stream(*payloads, "[DONE]")
    assert ("empty: the stream ended without any output" if is_empty else "", not is_empty) == (
        reply.error, reply.complete,
    )  # fmt: skip


INVISIBLE = ["\u200b", "\ufeff", "\x00", "\u2060", "\xad", "\u200e", "\u3164", "\u2800", "\ufe0f", "\x1b", " \u200d\n"]


@pytest.mark.parametrize("text", INVISIBLE)
@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_text_that_does_not_show_is_no_first_token(text: str, field: str):
    """Heartbeats of invisible characters, one alone or in a run; beside a character that shows they are content."""
    reply = _stream(_delta(**{field: text}), _delta(**{field: text}), _delta(**{field: text + "a"}), "[DONE]")
    chunks = [1, 2, 3] if any(map(str.isspace, text)) else [3]
    assert (3, 2, chunks) == (reply.first_token_ns, reply.blank_before_first, reply.chunk_ns.tolist())


@pytest.mark.parametrize(
    "calls",
    [
        [{}], [None], [{"index": 0}], [{"id": "c1", "type": "function", "index": 0}], [{"function": None}],
        [{"function": {"name": "", "arguments": ""}}], [{"function": {"name": None, "arguments": {}}}],
    ],
)  # fmt: skip
def test_a_call_of_a_tool_that_says_nothing_is_no_first_token(calls: list[object]):
    """Neither a name nor arguments: not even a chunk."""
    reply = _stream(_delta(tool_calls=calls), _delta(tool_calls=[{"function": {"arguments": "{"}}]), "[DONE]")
    assert (2, "tool", [2], "") == (reply.first_token_ns, reply.first_kind, reply.chunk_ns.tolist(), reply.error)


DEEP = b"[" * 100_000

BROKEN = [
    b'{"choices":[{"delta":{"content":"\xff"}}]}',
    b'{"error":' + DEEP,
]


@pytest.mark.parametrize("payload", BROKEN, ids=["no UTF-8", "deep"])
def test_what_cannot_be_read_is_that_events_error(payload: bytes):
    """Bytes that are no UTF-8, deep nesting; what the others said stays, in a JSON reply too."""
    reply = _read(*(b"data: %b\n\n" % data for data in (_delta(content="a").encode(), payload, b"[DONE]")))
    assert reply.error.startswith("protocol: event 1 is not a completion chunk: ")
    assert (1, -1, -1, False) == (reply.first_token_ns, reply.input_tokens, reply.output_tokens, reply.complete)
    assert _read(payload, head=JSON_HEAD).error.startswith("protocol: not a completion: ")
    assert _read(payload, status=500).error.startswith("http_500: ")


def test_an_error_message_that_is_not_utf_8_is_read_with_replacements():
    """With a replacement character in place of the byte."""
    assert _stream(_delta(content="a")).error == ""
    assert _read(b'data: {"error":{"message":"\xff"}}\n\n').error == 'server: {"message":"\ufffd"}'


def test_when_all_was_said():
    """The stamp of [DONE], whatever comes behind it; of a JSON reply its last byte; else none."""
    assert _stream(_delta(content="a"), "[DONE]", _delta(content="b")).done_ns == 2
    assert _stream(_delta(content="a"), _delta("stop")).done_ns == -1
    assert _read(b'{"choices":[{"finish_', b'reason":"stop"}]}', head=JSON_HEAD).done_ns == 2


def test_a_named_error_event_is_an_error():
    """`event: error` with any object; so is an error where a whole reply should be."""
    assert _read(b'event: error\ndata: {"message": "overloaded"}\n\n').error == "server: overloaded"
    assert _read(b'{"error":{"message":"no"}}', head=JSON_HEAD).error == "server: no"


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b'{"error":{"message":"no such model"}}', "http_404: no such model"),
        (400, b'{"object":"error","message":"too long"}', "http_400: too long"),
        (422, b'{"detail":[{"msg":"field required"}]}', 'http_422: [{"msg":"field required"}]'),
        (502, b"<html>\n bad gateway</html>", "http_502: <html> bad gateway</html>"),
        (500, b"", "http_500: no message"),
    ],
)
def test_http_errors_carry_the_servers_words(status: int, body: bytes, error: str):
    """In one line, with the status as its kind."""
    reply = _read(body, status=status, head=b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert (error, False) == (reply.error, reply.complete)


def test_the_retry_after_of_a_server_is_read():
    """Retry-After is part of the error; a failure is data, and nothing is tried again."""
    head = b"HTTP/1.1 429 X\r\nRetry-After: 3\r\n\r\n"
    assert _read(b'{"error":"busy"}', status=429, head=head).error == "http_429: busy (Retry-After: 3)"


def test_a_web_page_is_not_a_stream():
    """HTML under 200, said or not."""
    html = b"<html></html>"
    said = _read(html, head=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    assert said.error == "protocol: the reply is text/html, not an event stream"
    assert _read(html, head=b"HTTP/1.1 200 OK\r\n\r\n").error == "protocol: the reply is not an event stream"
    packed = _read(html, head=PLAIN_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n")
    assert packed.error.startswith("protocol: content-encoding")


def test_without_a_head_there_is_no_reply():
    """Nothing is known, and nothing is an error of the reply."""
    assert not _read(b"", head=b"", status=0).error
