"""The simulated server over real sockets, read by a real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from simulated_load import client_of

from sidelight.simulator.engine.replies import WORDS
from sidelight.simulator.server import running
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings

ENGINE = EngineSettings(speed=PROFILES["fast"], max_model_len=512, seed=5)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
HELLO_TOKENS = 2 + 4 + 3  # of the text, of the message around it, of the header that opens the reply


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """Where the simulator of a test writes the truth."""
    return tmp_path / "truth.jsonl"


@pytest.fixture
async def client(truth: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a simulator that runs for one test."""
    async with client_of(SimulatorSettings(truth=truth, engine_settings=ENGINE)) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> tuple[int, str]:
    """Return status and text of a reply."""
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, await response.text()


def events_of(stream: str) -> list[Any]:
    """Return the JSON of every event of a stream, which must end in [DONE]."""
    events = stream.split("\n\n")
    assert ["data: [DONE]", ""] == events[-2:]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def lines_of(truth: Path) -> list[dict[str, Any]]:
    """Return the records of a truth file."""
    return [json.loads(line) for line in truth.read_text().splitlines()]


async def samples_of(client: aiohttp.ClientSession) -> dict[str, float]:
    """Return the samples of /metrics that are no buckets; finish reasons as name:reason."""
    async with client.get("/metrics") as response:
        assert "text/plain; version=0.0.4; charset=utf-8" == response.headers["Content-Type"]
        page = await response.text()
    return {
        ":".join([sample.name, *sample.labels.get("finished_reason", "").split()]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "le" not in sample.labels
    }


async def test_a_chat_stream_to_the_letter(client: aiohttp.ClientSession):
    """Role chunk, a chunk a token, finish reason on the last one, usage, [DONE]: these very bytes."""
    body = {**HELLO, "model": "sim-llama", "max_tokens": 2, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    status, stream = await post(client, "/v1/chat/completions", body, **{"X-Request-Id": 'a"b'})
    created = events_of(stream)[0]["created"]
    words = [event["choices"][0]["delta"]["content"] for event in events_of(stream)[1:3]]
    fields = {"id": 'chatcmpl-a"b', "object": "chat.completion.chunk", "created": created, "model": "sim-llama"}
    head = "data: " + json.dumps(fields, separators=(",", ":"))[:-1] + ',"choices":['
    total = HELLO_TOKENS + 2
    expected = (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"{words[0]}"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"{words[1]}"}},"logprobs":null,"finish_reason":"length",'
        f'"stop_reason":null}}]}}\n\n'
        f'{head}],"usage":{{"prompt_tokens":{HELLO_TOKENS},"total_tokens":{total},"completion_tokens":2}}}}\n\n'
        "data: [DONE]\n\n"
    )
    assert (200, expected) == (status, stream)
    assert set(words) <= set(WORDS)


async def test_a_completions_stream_to_the_letter(client: aiohttp.ClientSession):
    """No role chunk; without include_usage no usage."""
    body = {"prompt": "hello", "max_tokens": 1, "ignore_eos": True, "stream": True}
    status, stream = await post(client, "/v1/completions", body, **{"X-Request-Id": "r1"})
    event = events_of(stream)[0]
    expected = (
        f'data: {{"id":"cmpl-r1","object":"text_completion","created":{event["created"]},"model":"sim-llama",'
        f'"choices":[{{"index":0,"text":"{event["choices"][0]["text"]}","logprobs":null,"finish_reason":"length",'
        f'"stop_reason":null}}]}}\n\ndata: [DONE]\n\n'
    )
    assert (200, expected) == (status, stream)


async def test_continuous_usage_counts_tokens_on_every_chunk(client: aiohttp.ClientSession):
    """The role chunk says 0, then one more a chunk, then all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**HELLO, "max_tokens": 3, "ignore_eos": True, "stream": True, "stream_options": options}
    _, stream = await post(client, "/v1/chat/completions", body)
    assert [0, 1, 2, 3, 3] == [event["usage"]["completion_tokens"] for event in events_of(stream)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streamed_and_whole_replies_say_the_same(client: aiohttp.ClientSession, path: str):
    """The same prompt gives the same text, reason and usage either way, and again on a later request."""
    body = {**HELLO, "prompt": "hello", "max_tokens": 7, "ignore_eos": True}
    _, whole = await post(client, path, body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, stream = await post(client, path, body | options)
    reply = json.loads(whole)
    choice = reply["choices"][0]
    events = events_of(stream)
    streamed = [event["choices"][0] for event in events[:-1]]
    text = "".join(part["delta"]["content"] if "delta" in part else part["text"] for part in streamed)
    assert choice.get("text", choice.get("message", {}).get("content")) == text
    assert (choice["finish_reason"], reply["usage"]) == (streamed[-1]["finish_reason"], events[-1]["usage"])


async def test_a_reply_may_stop_before_its_limit(client: aiohttp.ClientSession):
    """Without ignore_eos replies end by themselves, at the same length each time."""
    body = {"prompt": "hello", "max_tokens": 500}
    replies = [json.loads((await post(client, "/v1/completions", body))[1]) for _ in range(2)]
    assert ["stop", "stop"] == [reply["choices"][0]["finish_reason"] for reply in replies]
    assert replies[0]["usage"] == replies[1]["usage"]
    assert replies[0]["usage"]["completion_tokens"] < 500


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            "/v1/completions",
            {"prompt": "x" * 4 * 512},
            400,
            "maximum context length is 512 tokens. However, your prompt",
        ),
        ("/v1/completions", {"prompt": "x" * 4 * 500, "max_tokens": 13}, 400, "for a total of 513 tokens"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "The model `other` does not exist."),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "$.max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "n must be 1"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": ["x", "y"]}, 400, "one text or one list of token ids"),
        ("/v1/completions", {"prompt": [2]}, 400, "2 is not a token id"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt must not be empty"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages must not be empty"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400, "$.messages[0].content"),
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/detokenize", {"tokens": [0]}, 400, "0 is not a token id"),
    ],
)
async def test_what_cannot_be_answered_is_refused(
    client: aiohttp.ClientSession, truth: Path, path: str, body: Any, status: int, message: str
):
    """The error reply has vLLM's shape, and nothing reached the engine."""
    actual, text = await post(client, path, body)
    error = json.loads(text)["error"]
    assert (status, status) == (actual, error["code"])
    assert message in error["message"]
    assert {"message", "type", "param", "code"} == set(error)
    assert [] == lines_of(truth)


async def test_malformed_json_is_refused(client: aiohttp.ClientSession):
    """400 with an error reply."""
    async with client.post("/v1/chat/completions", data=b'{"messages": [') as response:
        assert (400, "BadRequestError") == (response.status, (await response.json())["error"]["type"])


async def test_models_health_and_unknown_paths(client: aiohttp.ClientSession):
    """The small endpoints answer as vLLM's do."""
    async with client.get("/v1/models") as response:
        model = (await response.json())["data"][0]
        assert ("sim-llama", 512) == (model["id"], model["max_model_len"])
    async with client.get("/health") as response:
        assert (200, "") == (response.status, await response.text())
    async with client.get("/nothing") as response:
        assert (404, {"detail": "Not Found"}) == (response.status, await response.json())


async def test_tokenize_counts_what_usage_counts(client: aiohttp.ClientSession):
    """The count of messages is the prompt_tokens of the same chat, and detokenize undoes tokenize."""
    tokenized = json.loads((await post(client, "/tokenize", HELLO))[1])
    assert (HELLO_TOKENS, 512) == (tokenized["count"], tokenized["max_model_len"])
    _, reply = await post(client, "/v1/chat/completions", {**HELLO, "max_tokens": 1})
    assert tokenized["count"] == json.loads(reply)["usage"]["prompt_tokens"]
    bare = json.loads((await post(client, "/tokenize", {"prompt": "hello world"}))[1])
    assert {"prompt": "hello world"} == json.loads((await post(client, "/detokenize", {"tokens": bare["tokens"]}))[1])


async def test_tokenize_can_be_left_out():
    """Some engines offer none."""
    async with client_of(SimulatorSettings(tokenize=False, engine_settings=ENGINE)) as client:
        assert [404, 404] == [(await post(client, path, HELLO))[0] for path in ("/tokenize", "/detokenize")]


async def test_the_page_agrees_with_the_truth_file(client: aiohttp.ClientSession, truth: Path):
    """Over concurrent requests, counts are equal and the sums agree to 1e-9."""
    bodies = [
        {"prompt": f"{index} " + "word" * 20 * index, "max_tokens": 3 + index, "ignore_eos": True, "stream": True}
        for index in range(20)
    ]
    async with asyncio.TaskGroup() as group:
        for index, body in enumerate(bodies):
            group.create_task(post(client, "/v1/completions", body, **{"X-Request-Id": f"r{index}"}))
    records = lines_of(truth)
    samples = await samples_of(client)
    assert {f"r{index}" for index in range(20)} == {record["request_id"] for record in records}
    assert all(record["response_id"] == f"cmpl-{record['request_id']}" for record in records)
    assert 20 == samples["vllm:request_success_total:length"]
    assert samples["vllm:generation_tokens_total"] == sum(record["tokens"] for record in records)
    assert samples["vllm:prompt_tokens_total"] == sum(record["prompt_tokens"] for record in records)
    for name, start, end in (
        ("request_queue_time_seconds", "queued_ns", "scheduled_ns"),
        ("e2e_request_latency_seconds", "arrival_ns", "finished_ns"),
    ):
        total_s = sum(record[end] - record[start] for record in records) / 1e9
        assert total_s == pytest.approx(samples[f"vllm:{name}_sum"], abs=1e-9)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_its_request(truth: Path, stream: bool):
    """The engine is free for the next request; the aborted one is in the truth, not in what is observed at finish."""
    one_at_a_time = SimulatorSettings(truth=truth, engine_settings=replace(ENGINE, max_num_seqs=1, max_model_len=8192))
    endless = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    async with client_of(one_at_a_time) as client:
        leaving = asyncio.create_task(post(client, "/v1/completions", endless, **{"X-Request-Id": "gone"}))
        while not (await samples_of(client))["vllm:generation_tokens_total"]:
            pass
        leaving.cancel()
        await asyncio.wait([leaving])
        await post(client, "/v1/completions", {"prompt": "next", "max_tokens": 1}, **{"X-Request-Id": "next"})
        samples = await samples_of(client)
    gone, following = lines_of(truth)
    assert (("gone", "abort"), ("next", "length")) == (
        (gone["request_id"], gone["finish_reason"]),
        (following["request_id"], following["finish_reason"]),
    )
    assert 1 <= gone["tokens"] < 8000
    assert (1, 0, 1, 2) == (
        samples["vllm:request_success_total:length"],
        samples["vllm:request_success_total:abort"],
        samples["vllm:e2e_request_latency_seconds_count"],
        samples["vllm:time_to_first_token_seconds_count"],
    )


async def test_a_stream_in_flight_at_the_end_gets_an_error_event(truth: Path):
    """Closing the simulator ends the stream as vLLM's does when its engine dies, and records the abort."""
    settings = SimulatorSettings(truth=truth, engine_settings=replace(ENGINE, max_model_len=8192))
    async with aiohttp.ClientSession() as client:
        async with running(settings) as url:
            body = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
            response = await client.post(f"{url}/v1/completions", json=body)
            await response.content.readline()
        last = events_of((await response.text()).lstrip())[-1]
    assert {"message": "the engine has stopped", "type": "InternalServerError", "param": None, "code": 500} == last[
        "error"
    ]
    assert ["abort"] == [record["finish_reason"] for record in lines_of(truth)]
