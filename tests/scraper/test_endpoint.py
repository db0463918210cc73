"""One endpoint over HTTP: discovery, stamps, and what is no exposition."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from scraper.access import Access
from scraper.endpoint import Limits, Scrape, _connecting, discover, open_session, scrape
from scraper.engines import CanonicalSource, canonical
from scraper.log import ScrapeLog, rows
from scraper.missing import Missing
from scraper.series import build

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[dict[str, Handler]], Awaitable[str]]

PAGE = "# TYPE x gauge\nx 1\n"
JSON = "JSON; an engine that empties it at each read (trtllm-serve) has lost what was read, so it is not read again"
LIMITS = Limits(timeout_s=5, body_bytes=10_000)


def answer(text: str | bytes, content_type: str = "text/plain; version=0.0.4", status: int = 200) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        body = text.encode() if isinstance(text, str) else text
        return web.Response(body=body, headers={"Content-Type": content_type}, status=status)

    return handler


def redirect(target: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": target})

    return handler


def iterations(read: list[str]) -> Handler:
    """TensorRT-LLM's, and who has read them."""

    async def handler(request: web.Request) -> web.Response:
        read.append(request.path)
        return web.json_response([{"iter": 1}])

    return handler


async def once(url: str, limits: Limits = LIMITS) -> Scrape:
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
        (redirect("http://elsewhere.test/metrics"), "redirect: to another host (elsewhere.test)"),
        (redirect("/metrics"), "redirect: more than 3 in a row"),
    ],
)
async def test_what_is_no_page_is_a_record_with_a_reason(serve: Serve, handler: Handler, error: str):
    """A reply that is no exposition is data: a record with the reason, and no body."""
    base = await serve({"/metrics": handler})
    record = await once(f"{base}/metrics")
    assert (error, b"") == (record.error, record.body)


async def test_quoted_name_is_not_json(serve: Serve):
    """A page that begins with a quoted metric name (text 1.0.0) is no JSON."""
    base = await serve({"/metrics": answer('{"a.b"} 1\n')})
    assert "" == (await once(f"{base}/metrics")).error


async def test_redirect_on_the_same_host_is_followed(serve: Serve):
    """A redirect that stays on its host leads to the page."""
    base = await serve({"/metrics": redirect("/metrics/"), "/metrics/": answer(PAGE)})
    assert ("", 200) == ((record := await once(f"{base}/metrics")).error, record.status)


async def test_nothing_listens():
    """A refused connection is named as such."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert (await once(f"{url}/metrics")).error.startswith("connect: ")
        found = await discover(f"{url}/v1")
    assert isinstance(found, Missing)
    assert "connect: " in found.reason


async def test_tls_with_a_server_that_has_none(serve: Serve):
    """Plain HTTP behind an https URL is a failure of TLS, and not "Operation not permitted"."""
    base = await serve({"/metrics": answer(PAGE)})
    error = (await once(base.replace("http://", "https://") + "/metrics")).error
    assert error.startswith("connect: TLS failed (")
    assert "permitted" not in error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "no such host"),
        (ssl.SSLError(1, "[SSL] record layer failure"), "TLS failed"),
        (OSError("Multiple exceptions: one, another"), "Multiple exceptions: one, another"),
        (OSError(-2, "odd"), "[Errno -2] odd"),
        (OSError(), "OSError"),
    ],
)
def test_reasons_of_failed_connections(error: OSError, reason: str):
    """The number of an error is the system's only where the system said it."""
    assert reason == _connecting(error)


async def test_a_host_that_does_not_exist():
    """A name under `.invalid` has no address, wherever one asks."""
    assert "connect: no such host" == (await once("http://no-such-host.invalid/metrics")).error


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".test"])
async def test_a_host_name_that_is_none(host: str):
    """An empty or an overlong label is a reason, not an exception of the codec."""
    assert "protocol: not a host name" == (await once(f"http://{host}/metrics")).error
    found = await discover(f"http://{host}/metrics")
    assert Missing(f"http://{host}/metrics: protocol: not a host name") == found


@pytest.mark.parametrize(
    ("asked", "handlers", "found"),
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
async def test_discovery(serve: Serve, asked: str, handlers: dict[str, str], found: str):
    """The metrics are beside the API, at the root, where TensorRT-LLM has them, or where the user says."""
    base = await serve({path: answer(text) for path, text in handlers.items()})
    assert base + found == await discover(base + asked)


async def test_what_clears_on_read_is_not_read_in_passing(serve: Serve):
    """An engine whose /metrics is emptied by each reader keeps it, where its Prometheus page is beside it."""
    read: list[str] = []
    base = await serve({"/metrics": iterations(read), "/prometheus/metrics": answer(PAGE)})
    assert f"{base}/prometheus/metrics" == await discover(f"{base}/v1")
    assert [] == read


async def test_iterations_only_when_asked_for(serve: Serve):
    """TensorRT-LLM JSON is a target where its whole address was given. Else it is read once, and the reason says so."""
    read: list[str] = []
    base = await serve({"/metrics": iterations(read)})
    found = await discover(f"{base}/v1")
    assert Missing(f"{base}/prometheus/metrics: HTTP 404; {base}/metrics: speaks something else: {JSON}") == found
    assert ["/metrics"] == read
    assert f"{base}/metrics" == await discover(f"{base}/metrics")
    assert ("", b'[{"iter": 1}]') == ((record := await once(f"{base}/metrics")).error, record.body)


async def test_discovery_says_what_it_met(serve: Serve):
    """Where there are no metrics, the reason names each address and what it answered."""
    base = await serve({"/prometheus/metrics": answer("<html>", "text/html"), "/metrics": answer("{}")})
    expected = (
        f"{base}/prometheus/metrics: speaks something else: a web page (HTML); "
        f"{base}/metrics: speaks something else: {JSON}"
    )
    assert Missing(expected) == await discover(f"{base}/v1")


@pytest.mark.parametrize("url", ["ftp://a/metrics", "localhost:8000", "", "http://[", "http://a:99999999"])
async def test_discovery_of_no_url(url: str):
    """What is no URL is said so, without a request."""
    assert Missing(f"{url} is not an http(s) URL") == await discover(url)


async def test_prose_is_no_page(serve: Serve):
    """Plain text that is no exposition is not taken for metrics."""
    base = await serve({"/metrics": answer("It works!\n")})
    found = await discover(f"{base}/metrics")
    assert isinstance(found, Missing)
    assert "speaks something else: not a sample: no readable value (line 1, byte 0)" in found.reason


async def test_a_page_in_json_quotes_is_a_page(serve: Serve, tmp_path: Path):
    """Some builds of llama.cpp send the exposition as one JSON string: it is found, scraped and read as its text."""
    page = "# TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred 5\n"
    base = await serve({"/metrics": answer(json.dumps(page), "application/json")})
    assert f"{base}/metrics" == await discover(f"{base}/v1")
    record = await once(f"{base}/metrics")
    log = ScrapeLog(tmp_path / "scrapes.log")
    assert ("", "") == (record.error, log.append(record))
    log.close()
    (read,) = build(rows([record]))
    waiting = canonical(read.series, "llamacpp")["requests_waiting"]
    assert isinstance(waiting, CanonicalSource)
    assert [5.0] == read.values[0, list(waiting.columns)].tolist()


@pytest.mark.parametrize("text", ["ok", ""])
async def test_another_json_string_is_no_page(serve: Serve, text: str):
    """What stands in the quotes has to be an exposition."""
    base = await serve({"/metrics": answer(json.dumps(text), "application/json")})
    assert isinstance(await discover(f"{base}/metrics"), Missing)


@pytest.mark.parametrize("prefix", ["", "/model-a"])
async def test_iterations_asked_for_are_left_to_the_first_scrape(serve: Serve, prefix: str):
    """Their first reader empties them. TensorRT-LLM is known by the model list beside them, which nothing empties."""
    read: list[str] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": "tensorrt_llm"}]})

    base = await serve({f"{prefix}/metrics": iterations(read), f"{prefix}/v1/models": models})
    assert f"{base}{prefix}/metrics" == await discover(f"{base}{prefix}/metrics")
    assert [] == read
    assert b'[{"iter": 1}]' == (await once(f"{base}{prefix}/metrics")).body
