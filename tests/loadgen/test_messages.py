"""Replies of Anthropic's Messages API: how they end, tools, and tokens of the prefix cache."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.table import PROTOCOLS

ARGUMENTS = {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}


def _read(*events: dict[str, object], status: int = 200, kind: str = "text/event-stream") -> Reply:
    body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    body = body if kind == "text/event-stream" else json.dumps(events[0])
    head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\n\r\n"
    return PROTOCOLS["messages"].read_reply(
        status, head.encode(), body.encode(), np.array([1]), np.array([len(body.encode())])
    )


@pytest.mark.parametrize(
    ("word", "reason"), [("refusal", "content_filter"), ("tool_use", "tool_calls"), ("end_turn", "stop"), ("x", "x")]
)
def test_reasons_have_the_names_of_the_other_protocols(word: str, reason: str):
    """And a reply that calls a tool is content of a tool."""
    reply = _read(ARGUMENTS, {"type": "message_delta", "delta": {"stop_reason": word}, "usage": {"output_tokens": 2}})
    assert ("tool", reason, 2, -1) == (reply.first_kind, reply.finish_reason, reply.output_tokens, reply.input_tokens)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"input_tokens": 9, "output_tokens": 0}, {"input_tokens": 1, "cache_read_input_tokens": 8}),  # vLLM
        ({"input_tokens": 1, "cache_read_input_tokens": 8}, {}),  # SGLang
        ({"input_tokens": 0, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 1}, {}),  # Anthropic
    ],
)
def test_the_tokens_of_the_cache_are_of_the_prompt(first: dict[str, int], last: dict[str, int]):
    """Whichever event states them: the prompt has 9 tokens, and they do not change between the two."""
    reply = _read(
        {"type": "message_start", "message": {"id": "r", "usage": first}},
        {"type": "ping"},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": last | {"output_tokens": 2}},
    )
    counted = (reply.input_tokens, reply.cached_tokens, reply.output_tokens, reply.doubts)
    assert (9, 8, 2, {}) == counted


def test_a_refusal_is_in_the_servers_words():
    """Its error is an object of its own type."""
    error = {"type": "error", "error": {"type": "not_found_error", "message": "no"}}
    assert _read(error, status=404, kind="application/json").error == "http_404: no"
