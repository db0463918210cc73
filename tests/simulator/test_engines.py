"""The simulated server as each of the engines, and as one that is restarted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from simulated_load import samples_of

from sidelight.loadgen.plan.tokenizers import ServerTokenizer, probe_server
from sidelight.scraper.targets.fetch import ACCEPT
from sidelight.simulator.server import running
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings

ENGINE = EngineSettings(speed=PROFILES["fast"], max_model_len=512, seed=5)
PAGES = {"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics"}
NONE: frozenset[tuple[str, str]] = frozenset()
FINISHED = {
    "vllm": "vllm:e2e_request_latency_seconds_count",
    "sglang": "sglang:e2e_request_latency_seconds_count",
    "trtllm": "trtllm_e2e_request_latency_seconds_count",
}


async def total(client: aiohttp.ClientSession, url: str, engine: str) -> float:
    """Return how many requests the page counts as finished; 0 while it has no such series."""
    async with client.get(url + PAGES[engine]) as response:
        page = await response.text()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == FINISHED[engine])


async def ask(client: aiohttp.ClientSession, url: str, name: str) -> None:
    """Have one request answered."""
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    async with client.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
        assert 200 == response.status
        await response.read()


@pytest.mark.parametrize(
    ("engine", "path", "version"),
    [
        ("vllm", "/version", "0.32.0+simulator"),
        ("sglang", "/server_info", "0.5.23+simulator"),
        ("sglang", "/get_server_info", "0.5.23+simulator"),
        ("trtllm", "/version", "1.3.0+simulator"),
    ],
)
async def test_where_the_version_stands(engine: str, path: str, version: str):
    """Each engine says its version in its own place; SGLang has no /version."""
    settings = SimulatorSettings(engine=engine, engine_settings=ENGINE)
    async with running(settings) as url, aiohttp.ClientSession() as client:
        async with client.get(url + path) as response:
            assert version == (await response.json())["version"]
        async with client.get(f"{url}/version") as response:
            assert (404 if engine == "sglang" else 200) == response.status


@pytest.mark.parametrize(("engine", "name"), [("vllm", "prompt"), ("sglang", "text")])
async def test_each_engine_names_the_text_of_tokens_as_it_does(engine: str, name: str):
    """And its tokenizer is found by either name."""
    settings = SimulatorSettings(engine=engine, engine_settings=ENGINE)
    async with running(settings) as url, aiohttp.ClientSession() as client:
        tokenizer = await probe_server(url, settings.model, {})
        assert isinstance(tokenizer, ServerTokenizer)
        async with tokenizer:
            ids = await tokenizer.encode("hello")
            assert "hello" == await tokenizer.decode(ids)
        async with client.post(f"{url}/detokenize", json={"tokens": ids}) as response:
            assert {name: "hello"} == await response.json()


async def test_sglangs_health_costs_a_token(tmp_path: Path):
    """A probe queues and is prefilled as others are, and is not counted as a request; /model_info costs nothing."""
    settings = SimulatorSettings(engine="sglang", engine_settings=ENGINE, truth=tmp_path / "truth")
    async with running(settings) as url, aiohttp.ClientSession() as client:
        for path in ("/model_info", "/health"):
            async with client.get(url + path) as response:
                assert 200 == response.status
        async with client.get(f"{url}/metrics") as response:
            page = samples_of(await response.read())
    forward = frozenset({("stage", "prefill_forward")})
    assert (1, 1, 0) == (
        page["sglang:queue_time_seconds_count", NONE],
        page["sglang:per_stage_req_latency_seconds_count", forward],
        sum(value for (name, _), value in page.items() if name in {FINISHED["sglang"], "sglang:num_requests_total"}),
    )
    (line,) = (json.loads(line) for line in (tmp_path / "truth").read_text().splitlines())
    assert ("probe", True, 1) == (line["role"], line["response_id"].startswith("HEALTH_CHECK_"), line["tokens"])


async def test_sglang_answers_to_any_model_name_with_an_id_of_its_own(tmp_path: Path):
    """The client's X-Request-Id stands in the truth alone, and the head of the reply comes with its first token."""
    settings = SimulatorSettings(
        engine="sglang", engine_settings=replace(ENGINE, speed=PROFILES["demo"]), truth=tmp_path / "truth"
    )
    body = {"model": "nobody", "prompt": "hello" * 200, "max_tokens": 2, "stream": True}
    async with (
        running(settings) as url,
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response,
    ):
        head_ns = time.time_ns()
        assert (200, b'data: {"id":"') == (response.status, (await response.read())[:13])
    (line,) = (json.loads(line) for line in (tmp_path / "truth").read_text().splitlines())
    assert ("mine", 32) == (line["request_id"], len(line["response_id"]))
    assert line["first_token_ns"] - head_ns < 1e6  # the clocks' resolution


async def test_sglang_notices_late_that_a_client_has_left(tmp_path: Path):
    """With a later output than the first: the request is in the truth and on the page as one that ended."""
    settings = SimulatorSettings(
        engine="sglang", engine_settings=replace(ENGINE, max_model_len=8192), truth=tmp_path / "truth"
    )
    body = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    async with running(settings) as url, aiohttp.ClientSession() as client:
        async with client.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readline()
        while not (tmp_path / "truth").read_text():
            await client.get(f"{url}/model_info")
        assert 1 == await total(client, url, "sglang")
    (line,) = (json.loads(line) for line in (tmp_path / "truth").read_text().splitlines())
    assert ("abort", True) == (line["finish_reason"], 2 <= line["tokens"] < 8000)


async def test_sglang_streams_several_samples(tmp_path: Path):
    """Each with an index and an id of its own, behind a prefill that counts as a request; elsewhere n is refused."""
    settings = SimulatorSettings(engine="sglang", engine_settings=ENGINE, truth=tmp_path / "truth")
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True, "n": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with running(settings) as url, aiohttp.ClientSession() as client:
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            events = [line for line in (await response.text()).splitlines() if line]
        async with client.post(f"{url}/v1/chat/completions", json=body | {"stream": False}) as response:
            assert 400 == response.status
        assert 3 == await total(client, url, "sglang")
    assert "data: [DONE]" == events.pop()
    *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    assert 6 == usage["usage"]["completion_tokens"]
    ids = {chunk["choices"][0]["index"]: chunk["id"] for chunk in chunks}
    lines = [json.loads(line) for line in (tmp_path / "truth").read_text().splitlines()]
    assert ["prefix", "request", "request"] == [line["role"] for line in lines]
    assert set(ids.values()) == {line["response_id"] for line in lines[1:]}
    assert 2 == len(ids)


async def test_trtllms_metrics_are_json_and_its_page_is_elsewhere():
    """Its iterations are handed out once; the Prometheus page is below /prometheus."""
    settings = SimulatorSettings(engine="trtllm", engine_settings=ENGINE)
    async with running(settings) as url, aiohttp.ClientSession() as client:
        await ask(client, url, "a")
        seen = []
        for _ in range(2):
            async with client.get(f"{url}/metrics") as response:
                assert "application/json" == response.content_type
                seen.append(len(json.loads(await response.text())))
        assert [3, 0] == seen
        assert 1 == await total(client, url, "trtllm")


@pytest.mark.parametrize(
    ("engine", "content_type"),
    [
        ("vllm", "text/plain; version=0.0.4; charset=utf-8"),
        ("sglang", "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("trtllm", "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"),
    ],
)
async def test_what_our_own_scraper_is_answered(engine: str, content_type: str):
    """To its Accept header the engines that negotiate answer in the text format 1.0.0."""
    settings = SimulatorSettings(engine=engine, engine_settings=ENGINE)
    async with (
        running(settings) as url,
        aiohttp.ClientSession() as client,
        client.get(url + PAGES[engine], headers={"Accept": ACCEPT}) as response,
    ):
        assert content_type == response.headers["Content-Type"]


@pytest.mark.parametrize("engine", list(PAGES))
async def test_an_engine_that_restarts_counts_from_zero_and_the_truth_goes_on(engine: str, tmp_path: Path):
    """On the same port, with the same settings: the page forgets, the truth file does not."""
    truth = tmp_path / "truth.jsonl"
    settings = SimulatorSettings(engine=engine, truth=truth, engine_settings=ENGINE)
    counted: list[float] = []
    async with aiohttp.ClientSession() as client:
        for life, names in enumerate(("ab", "cde", "f")):
            async with running(settings) as url:
                settings = replace(settings, port=urlsplit(url).port or 0)
                counted.append(await total(client, url, engine))
                for name in names:
                    await ask(client, url, f"{life}{name}")
                counted.append(await total(client, url, engine))
    assert [0, 2, 0, 3, 0, 1] == counted
    lines = [json.loads(line) for line in truth.read_text().splitlines()]
    assert ["0a", "0b", "1c", "1d", "1e", "2f"] == [line["request_id"] for line in lines]
