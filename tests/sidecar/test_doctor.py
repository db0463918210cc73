"""`sidelight doctor`: what it says of real servers on the loopback that show recorded and written pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sidelight.rundir.clock import anchor
from sidelight.scraper.exposition import parse
from sidelight.scraper.targets.scrape import Scrape
from sidelight.sidecar.doctor import examination as doctor
from sidelight.sidecar.doctor.delivery import LEAST_HELD_S
from sidelight.sidecar.doctor.page import PageSamples, describe
from sidelight.sidecar.options.load import DoctorOptions
from sidelight.simulator.server import running
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings

TEXT = "text/plain; version=0.0.4; charset=utf-8"
REPLY = 'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
LLAMACPP = (
    "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 2\n"
    "# TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred 5\n"
    "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 400\n"
    "# TYPE llamacpp:tokens_predicted_seconds_total counter\nllamacpp:tokens_predicted_seconds_total 8\n"
)

Page = tuple[int, str, str]  # status, content type, body
Examine = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    """Serve a model and the given pages by path, examine it, and return the exit code and what was printed."""

    async def run(
        pages: dict[str, Page], *, metrics: tuple[str, ...] = (), models: Page | None = None
    ) -> tuple[int, str]:
        app = web.Application()
        app.router.add_get("/v1/models", _answer(models) if models else _models)
        app.router.add_post("/v1/chat/completions", _chat)
        for path, page in pages.items():
            app.router.add_get(path, _answer(page))
        async with TestServer(app) as server:
            url = f"http://127.0.0.1:{server.port}"
            code = await doctor.examine(DoctorOptions(url=(url,), metrics=tuple(url + path for path in metrics)))
        return code, capsys.readouterr().out.replace(url, "URL")

    return run


def _listing(*names: str, owner: str) -> Page:
    models = [{"id": name, "owned_by": owner} for name in names]
    return 200, "application/json", json.dumps({"object": "list", "data": models})


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 2048}]})


async def _chat(_request: web.Request) -> web.Response:
    return web.Response(text=REPLY, content_type="text/event-stream")


def _answer(page: Page) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        status, content_type, body = page
        return web.Response(status=status, body=body.encode(), headers={"Content-Type": content_type})

    return answer


async def test_a_page_with_everything(examine: Examine, shared: Path):
    """Each quantity with its present value, its moment and its metric, under each other; nothing is missing."""
    page = (shared / "fixtures/vllm/recorded/pages/mid_overload.prom").read_text()
    code, said = await examine({"/metrics": (200, TEXT, page)})
    assert 0 == code
    lines = said.splitlines()
    assert ["ok    URL serves m (up to 2048 tokens)", "ok    chat streams"] == lines[:2]
    assert "ok    URL/metrics: 445 series in " in said
    assert "KiB of text 0.0.4" in said
    assert "ok    engine vllm (vLLM, by metric vllm:num_requests_running)" in lines
    assert "returned the same page" in said
    quantities = {line.split()[1]: line for line in lines if " at " in line and "vllm:" in line}
    assert "306 observed, mean 0.3047 seconds" in quantities["queue_time"]
    assert "29 requests" in quantities["requests_waiting"]
    assert "306 requests (5 label sets)" in quantities["requests_finished"]
    moments = {line.index(" at ") for name, line in quantities.items() if name in ("queue_time", "requests_waiting")}
    assert 1 == len(moments)
    assert "--otlp-traces-endpoint" in said
    assert "fail" not in said


async def test_what_is_missing_has_its_reason_and_switch(examine: Examine, shared: Path):
    """Old TensorRT-LLM: prefill by a formula, gauges after a switch; the moment and the formula are shown."""
    page = (shared / "fixtures/trtllm/prometheus_metrics.prom").read_text()
    code, said = await examine({"/prometheus/metrics": (200, TEXT, page)})
    assert 0 == code
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert (
        "ok prefill_time 2 observed, mean 0.02807 seconds at finish "
        "trtllm_time_to_first_token_seconds - trtllm_request_queue_time_seconds"
    ) in lines
    assert (
        "warn requests_waiting the page shows no gauge trtllm_num_requests_waiting; "
        "enable_iter_perf_stats: true switches it on"
    ) in lines


async def test_means_and_several_pages(examine: Examine):
    """Every page that was named is described; a mean of two counters is one of its count."""
    pages = {"/a/metrics": (200, TEXT, LLAMACPP), "/b/metrics": (404, "text/plain", "no")}
    code, said = await examine(pages, metrics=("/a/metrics", "/b/metrics"))
    assert 0 == code
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "ok engine llamacpp (llama.cpp, by metric llamacpp:requests_processing)" in lines
    latency = "llamacpp:tokens_predicted_seconds_total / llamacpp:tokens_predicted_total"
    assert f"ok inter_token_latency 400 observed, mean 0.02 seconds at finish {latency}" in lines
    assert "warn queue_time not exposed; requests_waiting tells whether requests wait" in lines
    assert "warn no server metrics: URL/b/metrics: HTTP 404" in lines


async def test_a_gateways_page_is_described_with_what_is_not_a_ttft(examine: Examine):
    """What it shows of its own time and queue, and which of its times to leave alone."""
    page = (
        "# TYPE smg_http_inflight_request_age_count gauge\nsmg_http_inflight_request_age_count 4\n"
        "# TYPE smg_http_request_duration_seconds histogram\n"
        'smg_http_request_duration_seconds_bucket{le="+Inf"} 2\n'
        "smg_http_request_duration_seconds_sum 0.01\nsmg_http_request_duration_seconds_count 2\n"
    )
    code, said = await examine({"/metrics": (200, TEXT, page)})
    assert 0 == code
    lines = [" ".join(line.split()) for line in said.splitlines()]
    title = "sglang-router (SGLang Model Gateway)"
    assert f"ok gateway sglang_router ({title}, by metric smg_http_inflight_request_age_count)" in lines
    assert "ok requests_in_flight 4 requests smg_http_inflight_request_age_count" in lines
    assert any(line.startswith("smg_http_request_duration_seconds is not a TTFT: it ends at") for line in lines)
    assert "no known engine" not in said


NO_PAGE, EMPTY = (404, "text/plain", "not found"), (200, TEXT, "# TYPE python_info gauge\npython_info 1\n")
SWITCHES = {
    "vllm": "vLLM: on by default; --disable-log-stats",
    "sglang": "SGLang: --enable-metrics",
    "trtllm": "TensorRT-LLM: return_perf_metrics: true",
    "llamacpp": "llama.cpp: --metrics",
}


@pytest.mark.parametrize(
    ("page", "owner", "engine"),
    [
        ((200, "application/json", '[{"iter": 1}]'), "", "trtllm"),
        ((501, "application/json", '{"error": "not supported"}'), "", "llamacpp"),
        (NO_PAGE, "sglang", "sglang"),
        (NO_PAGE, "llamacpp", "llamacpp"),
        (NO_PAGE, "tensorrt_llm", "trtllm"),
        (NO_PAGE, "vllm", "vllm"),
        (NO_PAGE, "a-company", None),
        (EMPTY, "vllm", "vllm"),
        (EMPTY, "", None),
        ((401, "text/plain", "no key"), "vllm", "vllm"),
    ],
)
async def test_the_switch_of_a_page_that_is_not_there(examine: Examine, page: Page, owner: str, engine: str | None):
    """Only of the engine that the answer or the list of models shows: a run without server metrics is possible."""
    code, said = await examine({"/metrics": page}, models=_listing("m", owner=owner))
    assert 0 == code
    assert "fail" not in said
    assert [engine] * bool(engine) == [name for name, switch in SWITCHES.items() if switch in said]


async def test_a_page_that_asks_for_credentials_is_asked_for_once(examine: Examine):
    """No other path is tried, and the line says which variables to set."""
    code, said = await examine({"/metrics": (401, "text/plain", "no key")})
    assert 0 == code
    assert "warn  no server metrics: URL/metrics: HTTP 401\n" in said
    assert "set SIDELIGHT_METRICS_TOKEN or SIDELIGHT_METRICS_USER" in said
    assert "--metrics URL" not in said


async def test_a_key_that_is_refused_is_one_line(examine: Examine):
    """With the variable to set; the page beside it, which needs no key, is examined all the same."""
    code, said = await examine({"/metrics": EMPTY}, models=(401, "application/json", "{}"))
    assert 3 == code
    first, *others = said.splitlines()
    assert first.startswith("fail  URL/v1/models: HTTP 401; ")
    assert first.endswith(" [target.unauthorized]")
    assert not any(line.startswith("fail") for line in others)


async def test_of_several_models_the_first_is_examined(examine: Examine):
    """And it is said that a run has to name one."""
    code, said = await examine({"/metrics": EMPTY}, models=_listing("a", "b", "c", owner="vllm"))
    assert 0 == code
    assert ["ok    URL serves a", "warn  3 models are served (a, b, c), and a is examined; a run needs --model",
            "ok    chat streams"] == said.splitlines()[:3]  # fmt: skip
    assert 3 == (await examine({}, models=_listing(owner="vllm")))[0]


async def test_what_goes_with_every_request_of_a_run_goes_with_these(capsys: pytest.CaptureFixture[str]):
    """Headers and further fields, to each of several URLs."""
    asked: list[tuple[str, str | None, bool]] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked.append((request.path, request.headers.get("X-Team"), b'"top_k":1' in body))
        return await (_models(request) if request.path.endswith("models") else _chat(request))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    async with TestServer(app) as server:
        root = f"http://127.0.0.1:{server.port}"
        options = DoctorOptions(url=(f"{root}/a", f"{root}/b"), header=("X-Team: blue",), extra_body='{"top_k": 1}')
        assert 0 == await doctor.examine(options)
    for base in ("/a", "/b"):
        assert (f"{base}/v1/models", "blue", False) in asked
        assert (f"{base}/v1/chat/completions", "blue", True) in asked
    assert not any("health" in path for path, *_ in asked)  # SGLang generates a token for it
    assert 2 == capsys.readouterr().out.count("ok    chat streams")


@pytest.mark.parametrize("pieces", [16, 4])
async def test_a_reply_that_came_in_one_packet_is_said(capsys: pytest.CaptureFixture[str], pieces: int):
    """As through nginx with its own settings; unless there is too little of it to tell."""
    chunk = 'data: {"choices":[{"delta":{"content":"a "},"finish_reason":null}]}\n\n'
    reply = chunk * (pieces - 1) + REPLY

    async def hold(_request: web.Request) -> web.Response:
        held = asyncio.Event()  # a reply that is whole before any of it is sent: what this is about
        asyncio.get_running_loop().call_later(LEAST_HELD_S, held.set)
        await held.wait()
        return web.Response(text=reply, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", hold)
    async with TestServer(app) as server:
        assert 0 == await doctor.examine(DoctorOptions(url=(f"http://127.0.0.1:{server.port}",)))
    assert (pieces == 16) == ("proxy_buffering off" in capsys.readouterr().out)


async def test_a_malformed_page(examine: Examine):
    """It is named with what is wrong; the examination goes on."""
    code, said = await examine({"/metrics": (200, TEXT, "a 1\nb ")}, metrics=("/metrics",))
    assert 0 == code
    assert "warn  no server metrics: URL/metrics: speaks something else" in said


async def test_no_server_but_metrics(capsys: pytest.CaptureFixture[str]):
    """Where only metrics were asked for and nothing serves a model, what can be said is said, and the code is 3."""
    code = await doctor.examine(DoctorOptions(url=("http://127.0.0.1:9",), metrics=("http://127.0.0.1:9/metrics",)))
    said = capsys.readouterr().out
    assert 3 == code
    assert said.startswith("fail  cannot connect to 127.0.0.1:9")
    assert "warn  no server metrics: http://127.0.0.1:9/metrics: connect: Connection refused" in said


async def test_a_page_that_each_reading_empties_is_read_once(capsys: pytest.CaptureFixture[str]):
    """TensorRT-LLM is known by its model list, so that nothing is read in advance; what the page held is described."""
    settings = SimulatorSettings(engine="trtllm", engine_settings=EngineSettings(speed=PROFILES["fast"]))
    async with running(settings) as url:
        code = await doctor.examine(DoctorOptions(url=(url,), metrics=(f"{url}/metrics",)))
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert 0 == code
    engine = "ok engine trtllm (TensorRT-LLM, by metric trtllm_iteration_num_active_requests (iteration JSON))"
    assert engine in lines
    assert "warn each reading empties this page: it was read once, and other readers do not get what it held" in lines


@pytest.mark.parametrize("records_kept", [0, 10])
async def test_records_of_requests_are_looked_at_where_they_are_named(
    capsys: pytest.CaptureFixture[str], records_kept: int
):
    """How many there were, that they are gone, and how well the clock is known; the usual page is found beside them."""
    engine = EngineSettings(speed=PROFILES["fast"])
    settings = SimulatorSettings(engine="trtllm", perf_metrics_max_requests=records_kept, engine_settings=engine)
    async with running(settings) as url:
        code = await doctor.examine(DoctorOptions(url=(url,), metrics=(f"{url}/perf_metrics",)))
        said = capsys.readouterr().out.replace(url, "URL")
    assert 0 == code
    assert "ok    engine trtllm" in said
    records = 2 if records_kept else 0  # of doctor's own requests
    assert f"ok    URL/perf_metrics: {records} request records; a record that was read is gone for others" in said
    assert (records_kept == 0) == ("or records are off: return_perf_metrics: true" in said)
    assert "ok    the clock of its timestamps is known to " in said


async def test_the_rust_frontend_of_vllm_has_no_switch_for_spans(examine: Examine, shared: Path):
    """It does not start with that of the other one; each request's times are in its replies."""
    page = (shared / "fixtures/vllm/recorded/pages/mid_overload.prom").read_text()
    version = {"version": "0.33.0", "rust_frontend_version": "0.3.1"}
    pages = {"/metrics": (200, TEXT, page), "/version": (200, "application/json", json.dumps(version))}
    _, said = await examine(pages)
    assert "server version 0.33.0 (Rust frontend 0.3.1)" in said
    assert "--enable-per-request-metrics" in said
    assert "--otlp-traces-endpoint" not in said
    openmetrics = (200, "application/openmetrics-text; version=1.0.0; charset=utf-8", f"{page}# EOF\n")
    _, said = await examine({"/metrics": openmetrics})
    assert "--enable-per-request-metrics" in said
    assert "--otlp-traces-endpoint" not in said
    _, said = await examine(pages | {"/version": (200, "application/json", '{"version": "0.33.0"}')})
    assert "--otlp-traces-endpoint" in said


async def test_records_without_a_clock(examine: Examine):
    """Nothing joins them: that is missing."""
    pages = {"/perf_metrics": (200, "application/json", "[{}]"), "/metrics": (200, TEXT, "a 1\n")}
    code, said = await examine(pages, metrics=("/perf_metrics",))
    assert 0 == code
    assert "warn  URL/perf_metrics: its clock is not known (/steady_clock_offset): HTTP 404" in said
    code, said = await examine({"/metrics": (200, TEXT, "a 1\n")}, metrics=("/perf_metrics",))
    assert "warn  URL/perf_metrics: HTTP 404" in said


def test_a_counter_that_is_not_created_yet_is_zero_so_far():
    """SGLang shows retractions from the first one on."""
    text = (
        '# TYPE sglang:prefill_effective_tokens_total counter\nsglang:prefill_effective_tokens_total{mode="input"} 9\n'
    )
    page = parse(text)
    scrape = Scrape(
        url="u", tick_ns=0, request_ns=0, response_ns=0, status=200, content_type=TEXT, body=text.encode(), error=""
    )
    samples = PageSamples(url="http://u/metrics", scrapes=(scrape,) * 5, pages=(page,) * 5)
    said = [" ".join(line.split()) for _, line in describe(samples, anchor())]
    none_yet = "preemptions 0 preemptions (not exposed before the first) at step sglang:num_retracted_requests_total"
    assert none_yet in said
    assert "for health probes use /model_info: those of its usual path are served like requests" in said
