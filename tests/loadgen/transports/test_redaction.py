"""What is left of replies and requests whose texts are left out."""

from __future__ import annotations

import hashlib
import json

import pytest

from loadgen.records import PlannedRequest
from loadgen.transports.redaction import hidden_reply, hidden_request


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
        ('data: {"text":"hu\r\n1f\r\nsh","n":"1"}', 'data: {"text":"xx\r\n1f\r\nxx","n":"1"}'),
        ('{"text" : "cut off', '{"text" : "xxxxxxx'),
        ('{"usage":{"completion_tokens":5},"tokens":5}', '{"usage":{"completion_tokens":5},"tokens":5}'),
        ('{"error":{"message":"too long"}}', '{"error":{"message":"too long"}}'),
    ],
)
def test_a_reply_keeps_its_form_and_no_text(body: str, hidden: str):
    """Each byte's place, the number of characters, the framing of chunks; also of a reply that was cut off."""
    assert hidden == hidden_reply(body.encode()).decode()
    assert len(body.encode()) == len(hidden.encode())
    assert len(body) == len(hidden)


def test_a_planned_request_keeps_its_length_and_its_hash():
    """Those of its later turns too."""
    turn = PlannedRequest(index=2, body=b"hush again")
    planned = hidden_request(PlannedRequest(index=1, body=b"hush", turns=(turn,), input_tokens=3))
    assert (1, 3) == (planned.index, planned.input_tokens)
    for hidden, body in ((planned, b"hush"), (planned.turns[0], b"hush again")):
        assert {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)} == json.loads(hidden.body)
