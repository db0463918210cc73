"""What is left of replies and requests whose texts are left out."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from itertools import accumulate, combinations

import msgspec
import pytest
from faults.cases import cpu_limit

from loadgen.http1 import dechunk
from loadgen.protocols import kserve
from loadgen.records import PlannedRequest
from loadgen.transports.redaction import hidden_reply, hidden_request

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "hidden"),
    [
        (
            'data: {"id":"c1","choices":[{"delta":{"content":"Hush!"}}]}',
            'data: {"id":"c1","choices":[{"delta":{"content":"xxxxx"}}]}',
        ),
        ('{"content":"é \\"\\n\\u00e9𝄞"}', '{"content":"ñx\\t\\t\\u0078🞄"}'),
        (
            '{"type":"response.output_text.delta","delta":"hush"}',
            '{"type":"response.output_text.delta","delta":"xxxx"}',
        ),
        (
            '{"delta":{"role":"assistant"},"content":null,"text":""}',
            '{"delta":{"role":"assistant"},"content":null,"text":""}',
        ),
        (
            '{"token":"hush","bytes":[104, 117],"tokens":["hu","sh"]}',
            '{"token":"xxxx","bytes":[111, 111],"tokens":["xx","xx"]}',
        ),
        ('{"top_logprobs":[{"hush":-1,"sh":-2}]}', '{"top_logprobs":[{"xxxx":-1,"xx":-2}]}'),
        ('{"text":"\\ud83d\\ude00\\ud834\\udd1e"}', '{"text":"\\ud83d\\udf84\\ud83d\\udf84"}'),
        ('{"text" : "cut off', '{"text" : "xxxxxxx'),
        ('{"usage":{"completion_tokens":5},"tokens":5}', '{"usage":{"completion_tokens":5},"tokens":5}'),
        ('{"error":{"message":"too long"}}', '{"error":{"message":"too long"}}'),
    ],
)
def test_a_reply_keeps_its_form_and_no_text(body: str, hidden: str):
    """Each byte's place, the number of characters, the framing of chunks; also of a reply that was cut off."""
    assert hidden == hidden_reply(b"", body.encode()).decode()
    assert len(body.encode()) == len(hidden.encode())
    assert len(body) == len(hidden)


@pytest.mark.parametrize("text", ["hush", "é𝄞", "\\u00e9\\n", "\\ud83d\\ude00"])
def test_a_reply_keeps_its_form_wherever_a_chunk_ends(text: str):
    """In the middle of a character, of an escape or of a field's name, where a proxy may have put the end."""
    body = f'data: {{"id":"c1","text":"{text}","n":"1"}}\n\n'.encode()
    expected = hidden_reply(b"", body)
    for first, second in combinations(range(1, len(body)), 2):
        pieces = body[:first], body[first:second], body[second:]
        wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        hidden = hidden_reply(CHUNKED, wire)
        assert (len(wire), expected) == (len(hidden), dechunk(hidden).data)


@pytest.mark.parametrize("broken", [b"zz\r\n", b"5\r\nhush!"])
def test_a_reply_with_broken_framing_has_no_text_and_is_broken_at_the_same_place(broken: bytes):
    before, behind = b'{"text":"hush"}\n', b'{"text":"hush"}\n0\r\n\r\n'
    hidden = hidden_reply(CHUNKED, b"%x\r\n%b\r\n" % (len(before), before) + broken + behind)
    assert hidden.startswith(b'10\r\n{"text":"xxxx"}\n\r\n' + broken)
    assert hidden.endswith(b'{"text":"xxxx"}\n0\r\n\r\n')


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\\q", b"\\ud800", b"\\u12x", b"\1"]
)
def test_a_text_that_cannot_be_read_still_cannot(text: bytes):
    body = b'{"text":"ab%bcd"}' % text
    hidden = hidden_reply(b"", body)
    assert len(body) == len(hidden)
    for each in (body, hidden):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            msgspec.json.decode(each)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text":"' + b"x" * 100_000,
        b'{"text":"' + "é".encode() * 50_000,
        b'{"text":"' + "aé".encode() * 30_000,
        b'{"text":[' + b'"a",' * 25_000,
        b'{"top_logprobs":' + b" " * 100_000,
    ],
    ids=["ascii", "two bytes", "mixed", "list", "blanks"],
)
def test_a_large_reply_takes_little_more_than_its_size(body: bytes):
    """A text of 1 MB took 280 MB, and blanks where tokens were expected held the worker for minutes."""
    tracemalloc.start()
    try:
        with cpu_limit(3):
            assert len(body) == len(hidden_reply(b"", body))
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


def tensors(*raw: bytes, **typed: bytes) -> bytes:
    """Return a message as Triton streams it, with tensors of each kind that may hold texts."""
    message = kserve._messages()["ModelStreamInferResponse"]()
    response = message.infer_response
    response.id = "r1"
    response.parameters["triton_final_response"].bool_param = True
    response.parameters["why"].string_param = typed["why"].decode()
    for name, content in zip(("text_output", "num_output_tokens", "output_ids", "finish_reason"), raw, strict=True):
        response.outputs.add(name=name, datatype="INT32" if len(content) == 4 else "BYTES")
        response.raw_output_contents.append(content)
    response.outputs.add(name="cum_text").contents.bytes_contents.append(typed["text"])
    return bytes(message.SerializeToString(deterministic=True))


def test_a_reply_over_grpc_keeps_its_counts_and_no_text():
    """Each message's length too; errors stay, and what cannot be read still cannot."""
    seven, stop = b"\7\0\0\0", b"\4\0\0\0stop"
    error = kserve._messages()["ModelStreamInferResponse"](error_message="too long").SerializeToString()
    messages = [
        tensors("\7\0\0\0hush é".encode(), seven, b"\x39\x30\0\0", stop, text="hé\r\nA\r\n".encode(), why=b"hush"),
        error,
        b"hush",
        b"",
    ]
    hidden = [
        tensors("\7\0\0\0xxxxxñ".encode(), seven, bytes(4), stop, text="xñxxxxx".encode(), why=b"xxxx"),
        error,
        b"\xff" * 4,
        b"",
    ]
    ends = list(accumulate(map(len, messages)))
    got, got_ends = kserve.hidden_messages(b"".join(messages) + b"NOT_FOUND", ends)
    assert (b"".join(hidden) + b"NOT_FOUND", ends) == (got, got_ends.tolist())


def test_a_reply_over_grpc_loses_fields_that_are_not_known():
    """They may hold anything; its messages end where they end then."""
    known = tensors(b"\1\0\0\0x", bytes(4), bytes(4), bytes(4), text=b"x", why=b"x")
    hidden, ends = kserve.hidden_messages(known + b"\x7a\4hush" + known, [len(known) + 6, 2 * len(known) + 6])
    assert (2 * known, [len(known), 2 * len(known)]) == (hidden, ends.tolist())


def test_a_planned_request_keeps_its_length_and_its_hash():
    """Those of its later turns too."""
    turn = PlannedRequest(index=2, body=b"hush again")
    planned = hidden_request(PlannedRequest(index=1, body=b"hush", turns=(turn,), input_tokens=3))
    assert (1, 3) == (planned.index, planned.input_tokens)
    for hidden, body in ((planned, b"hush"), (planned.turns[0], b"hush again")):
        assert {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)} == json.loads(hidden.body)
