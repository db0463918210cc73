"""One endpoint over HTTP: discovery, stamps, and replies that are not expositions."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from aiohttp import web
from served import Handler, Serve, answer
from waiting import BOUND_S

from sidelight.rundir.access import Access
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.catalogue import metrics_paths
from sidelight.scraper.engines.recognition import canonical
from sidelight.scraper.series.log import ScrapeLog, rows
from sidelight.scraper.series.table import build
from sidelight.scraper.targets.fetch import FetchLimits, discover, open_session, scrape
from sidelight.scraper.targets.scrape import Scrape

PAGE = "# TYPE x gauge\nx 1\n"
JSON = "JSON; an engine that empties it at each read (trtllm-serve) has lost what was read, so it is not read again"
LIMITS = FetchLimits(timeout_s=BOUND_S, body_bytes=10_000)


def iterations(read: list[str]) -> Handler:
    """Serve TensorRT-LLM's iterations and note each read of them."""

    async def handler(request: web.Request) -> web.Response:
        read.append(request.path)
        return web.json_response([{"iter": 1}])

    return handler


async def once(url: str, limits: FetchLimits = LIMITS) -> Scrape:
    access = Access(headers={"X-Key": "k"})
    async with open_session(access) as session:
        return await scrape(session, url, tick_ns=7, clock_offset_ns=10**18, limits=limits, access=access)


async def test_scrape_keeps_the_page_and_its_stamps(serve: Serve):
    """A scrape is the page as sent, with the moments before its request and after its last byte."""
    asked: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(text=PAGE, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    base = await serve({"/metrics": handler})
    before = time.monotonic_ns() + 10**18
    record = await once(f"{base}/metrics")
    assert (7, 200, "", PAGE) == (record.tick_ns, record.status, record.error, record.body.decode())
    assert before <= record.request_ns <= record.response_ns <= time.monotonic_ns() + 10**18
    assert asked[0].headers["Accept"].startswith("text/plain;version=0.0.4")
    assert "k" == asked[0].headers["X-Key"]


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (answer("gone", status=404), "HTTP 404"),
        (answer("busy", status=503), "HTTP 503"),
        (answer("<!DOCTYPE html><p>hello", "text/plain"), "speaks something else: a web page (HTML)"),
        (answer("hello", "text/html; charset=utf-8"), "speaks something else: a web page (HTML)"),
        (answer("{}", "application/json"), f"speaks something else: {JSON}"),
        (answer('[{"iter": 1}]', "text/plain"), f"speaks something else: {JSON}"),
        (answer(b"\x00\x01\x02", "application/octet-stream"), "speaks something else: binary data"),
        (answer("x 1\n" * 5000), "too large: more than 10000 bytes"),
        (
            answer(status=307, Location="http://bob:hush@elsewhere.test/metrics"),
            "redirect: to another host (elsewhere.test)",
        ),
        (answer(status=307, Location="/metrics"), "redirect: more than 3 in a row"),
    ],
)
async def test_an_invalid_page_is_a_record_with_a_reason(serve: Serve, handler: Handler, error: str):
    """A reply that is not an exposition is data: a record with the reason, and no body."""
    base = await serve({"/metrics": handler})
    record = await once(f"{base}/metrics")
    assert (error, b"") == (record.error, record.body)


async def test_quoted_name_is_not_json(serve: Serve):
    """A page that begins with a quoted metric name (text 1.0.0) is not JSON."""
    base = await serve({"/metrics": answer('{"a.b"} 1\n')})
    assert "" == (await once(f"{base}/metrics")).error


async def test_redirect_on_the_same_host_is_followed(serve: Serve):
    """A redirect that stays on its host leads to the page."""
    base = await serve({"/metrics": answer(status=307, Location="/metrics/"), "/metrics/": answer(PAGE)})
    assert ("", 200) == ((record := await once(f"{base}/metrics")).error, record.status)


async def test_nothing_listens():
    """A refused connection is named as such."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert (await once(f"{url}/metrics")).error.startswith("connect: ")
        failure = await discover(f"{url}/v1", metrics_paths())
    assert "connect: " in failure.reason


@pytest.mark.parametrize(
    ("host", "error"),
    [
        ("no-such-host.invalid", "connect: no such host"),
        ("a..b", "protocol: not a host name"),
        ("a" * 64 + ".test", "protocol: not a host name"),
    ],
)
async def test_a_host_that_does_not_exist(host: str, error: str):
    """Also where an empty or an overlong label cannot be one: a reason, not an exception of the codec."""
    assert error == (await once(f"http://{host}/metrics")).error
    assert Missing(f"http://{host}/metrics: {error}") == await discover(f"http://{host}/metrics", metrics_paths())


@pytest.mark.parametrize(
    ("asked", "handlers", "expected"),
    [
        ("", {"/metrics": PAGE}, "/metrics"),
        ("/v1", {"/metrics": PAGE}, "/metrics"),
        ("/v1/", {"/metrics": "[]", "/prometheus/metrics": PAGE}, "/prometheus/metrics"),
        ("/model-a/v1", {"/model-a/metrics": PAGE, "/metrics": PAGE}, "/model-a/metrics"),
        ("/model-a/v1", {"/metrics": PAGE}, "/metrics"),
        ("/my/metrics?x=1", {"/my/metrics": PAGE}, "/my/metrics?x=1"),
        ("/actuator/prometheus", {"/actuator/prometheus": PAGE, "/metrics": PAGE}, "/actuator/prometheus"),
        ("/model-a", {"/model-a": "<html>", "/model-a/metrics": PAGE, "/metrics": PAGE}, "/model-a/metrics"),
    ],
)
async def test_discovery(serve: Serve, asked: str, handlers: dict[str, str], expected: str):
    """The metrics are beside the API, at the root, where TensorRT-LLM has them, or where the user says."""
    base = await serve({path: answer(text) for path, text in handlers.items()})
    assert base + expected == await discover(base + asked, metrics_paths())


async def test_what_clears_on_read_is_not_read_in_passing(serve: Serve):
    """An engine whose /metrics is emptied by each reader keeps it, where its Prometheus page is beside it."""
    read: list[str] = []
    base = await serve({"/metrics": iterations(read), "/prometheus/metrics": answer(PAGE)})
    assert f"{base}/prometheus/metrics" == await discover(f"{base}/v1", metrics_paths())
    assert [] == read


async def test_iterations_only_when_asked_for(serve: Serve):
    """TensorRT-LLM JSON is a target where its whole address was given. Else it is read once, and the reason says so."""
    read: list[str] = []
    base = await serve({"/metrics": iterations(read)})
    failure = await discover(f"{base}/v1", metrics_paths())
    assert Missing(f"{base}/prometheus/metrics: HTTP 404; {base}/metrics: speaks something else: {JSON}") == failure
    assert ["/metrics"] == read
    assert f"{base}/metrics" == await discover(f"{base}/metrics", metrics_paths())
    assert ("", b'[{"iter": 1}]') == ((record := await once(f"{base}/metrics")).error, record.body)


@pytest.mark.parametrize("url", ["ftp://a/metrics", "localhost:8000", "", "http://[", "http://a:99999999"])
async def test_discovery_of_no_url(url: str):
    """What cannot be a URL is the reason, without a request."""
    assert Missing(f"{url} is not an http(s) URL") == await discover(url, metrics_paths())


async def test_a_page_in_json_quotes_is_a_page(serve: Serve, tmp_path: Path):
    """Some builds of llama.cpp send the exposition as one JSON string: it is found, scraped and read as its text."""
    page = "# TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred 5\n"
    base = await serve({"/metrics": answer(json.dumps(page), "application/json")})
    assert f"{base}/metrics" == await discover(f"{base}/v1", metrics_paths())
    record = await once(f"{base}/metrics")
    log = ScrapeLog(tmp_path / "scrapes.log")
    assert ("", "") == (record.error, log.append(record))
    log.close()
    (read,) = build(rows([record]))
    waiting = canonical(read.series, "llamacpp")["requests_waiting"]
    assert [5.0] == read.values[0, list(waiting.columns)].tolist()


@pytest.mark.parametrize(
    ("body", "kind"), [("It works!\n", "text/plain"), ('"ok"', "application/json"), ('""', "application/json")]
)
async def test_prose_is_not_a_page(serve: Serve, body: str, kind: str):
    """Nor is what stands in quotes, where it is not an exposition."""
    base = await serve({"/metrics": answer(body, kind)})
    assert isinstance(await discover(f"{base}/metrics", metrics_paths()), Missing)


@pytest.mark.parametrize("prefix", ["", "/model-a"])
async def test_iterations_asked_for_are_left_to_the_first_scrape(serve: Serve, prefix: str):
    """Their first reader empties them. TensorRT-LLM is known by the model list beside them, which nothing empties."""
    read: list[str] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": "tensorrt_llm"}]})

    base = await serve({f"{prefix}/metrics": iterations(read), f"{prefix}/v1/models": models})
    assert f"{base}{prefix}/metrics" == await discover(f"{base}{prefix}/metrics", metrics_paths())
    assert [] == read
    assert b'[{"iter": 1}]' == (await once(f"{base}{prefix}/metrics")).body
