"""Replies of the simulator that begin with reasoning, as the load generator reads them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulated_load import client_of

from sidelight.loadgen.protocols.request import Prompt, RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.simulator.settings import PROFILES, EngineSettings, SettingsError, SimulatorSettings

THOUGHT, TOKENS = 3, 7
ENGINE = EngineSettings(speed=PROFILES["fast"], max_model_len=512, seed=5, eos_chance=0.0)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize("tokens", [TOKENS, THOUGHT])
@pytest.mark.parametrize("endpoint", ["chat", "messages", "completions"])
async def test_the_first_tokens_are_reasoning(endpoint: str, tokens: int):
    """Of a chat and a message, not of a completion; the first visible token is the fourth, where there is one."""
    target = RequestTarget(model="sim-llama", endpoint=endpoint)
    path, body = PROTOCOLS[endpoint].encode(target, Prompt(text="hello"), tokens, 0.0)
    settings = SimulatorSettings(engine_settings=ENGINE, reasoning_tokens=THOUGHT)
    async with client_of(settings) as client, client.post(path, data=body) as response:
        stream = await response.read()
    events = [event + b"\n\n" for event in stream.split(b"\n\n") if event]
    reply = PROTOCOLS[endpoint].read_reply(
        200, HEAD, stream, np.arange(1, len(events) + 1), np.cumsum([len(event) for event in events])
    )
    thought = 0 if endpoint == "completions" else THOUGHT
    expected = reply.chunk_ns[thought] if thought < tokens else -1
    assert ("reasoning" if thought else "content", expected) == (reply.first_kind, reply.first_visible_ns)
    assert (tokens, tokens, "") == (len(reply.chunk_ns), reply.output_tokens, reply.error)
    assert reply.reasoning_tokens == (THOUGHT if endpoint == "chat" else -1)


async def test_a_whole_reply_has_its_reasoning_apart():
    """In the fields in which vLLM has it."""
    said = {"model": "sim-llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
    settings = SimulatorSettings(engine_settings=ENGINE, reasoning_tokens=THOUGHT)
    async with client_of(settings) as client:
        replies = []
        for path in ("/v1/chat/completions", "/v1/messages"):
            async with client.post(path, json=said) as response:
                replies.append(json.loads(await response.read()))
    message, blocks = replies[0]["choices"][0]["message"], replies[1]["content"]
    assert [4 * THOUGHT, 4 * (TOKENS - THOUGHT)] == [len(message["reasoning"]), len(message["content"])]
    assert [message["reasoning"], message["content"]] == [blocks[0]["thinking"], blocks[1]["text"]]


def test_a_reply_cannot_begin_with_less_than_no_reasoning():
    with pytest.raises(SettingsError):
        SimulatorSettings(reasoning_tokens=-1)
