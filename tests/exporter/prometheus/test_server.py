"""The two questions of a container's supervisor: does it run, and can it be sent traffic."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from certificates import Authority
from server_sent import listening
from waiting import BOUND_S

from sidelight.exporter.prometheus import server
from sidelight.exporter.prometheus.events import MOST_BROWSERS
from sidelight.exporter.prometheus.page import LivePage
from sidelight.exporter.prometheus.server import serving
from sidelight.rundir.access import Guard, basic


async def asked(url: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url.replace("/metrics", path)) as reply:
        return reply.status, await reply.text()


async def test_readiness_says_what_is_missing_until_nothing_is():
    """With 503; it runs all the same."""
    reasons = ["the receiver is down"]
    async with serving(LivePage(), "127.0.0.1", 0, unready=lambda: reasons[0]) as url:
        assert (503, "the receiver is down\n") == await asked(url, "/readyz")
        assert (200, "ok\n") == await asked(url, "/healthz")
        reasons[0] = ""
        assert (200, "ready\n") == await asked(url, "/readyz")


async def test_health_says_what_is_wrong():
    """With 503, so that a supervisor starts it again."""
    reasons = [""]
    async with serving(LivePage(), "127.0.0.1", 0, unhealthy=lambda: reasons[0]) as url:
        assert (200, "ok\n") == await asked(url, "/healthz")
        reasons[0] = "the logs have not been looked at for 11 s"
        assert (503, "the logs have not been looked at for 11 s\n") == await asked(url, "/healthz")
        assert (200, "ready\n") == await asked(url, "/readyz")


async def test_a_page_for_others_is_behind_tls_and_a_token(authority: Authority):
    """Prometheus states it as a bearer's, a browser as a password; supervisors need none."""
    guard = Guard(cert=authority.path("server.pem"), key=authority.path("server.key"), token="hush")
    trusting = ssl.create_default_context(cafile=authority.path("ca.pem"))
    page = LivePage()
    page.stream.end(lambda: b"event: final\ndata: {}\n\n")
    async with serving(page, "127.0.0.1", 0, guard=guard) as url, aiohttp.ClientSession() as session:
        assert url.startswith("https://127.0.0.1:")

        async def status(path: str, **headers: str) -> int:
            async with session.get(url.replace("/metrics", path), headers=headers, ssl=trusting) as reply:
                assert reply.status != 401 or reply.headers["WWW-Authenticate"].startswith("Basic ")
                return reply.status

        for path in ("/metrics", "/", "/live"):
            assert 401 == await status(path)
            assert 401 == await status(path, Authorization="Bearer hus")
            assert 401 == await status(path, Authorization="Basic !")
            assert 200 == await status(path, Authorization="Bearer hush")
            assert 200 == await status(path, Authorization=basic("anybody:hush"))
        assert 200 == await status("/healthz") == await status("/readyz")


async def test_a_page_may_ask_for_a_client_certificate(authority: Authority):
    """Of all but supervisors."""
    ca = authority.path("ca.pem")
    guard = Guard(cert=authority.path("server.pem"), key=authority.path("server.key"), ca=ca)
    unknown, known = ssl.create_default_context(cafile=ca), ssl.create_default_context(cafile=ca)
    known.load_cert_chain(authority.path("client.pem"), authority.path("client.key"))
    async with serving(LivePage(), "127.0.0.1", 0, guard=guard) as url:
        for context, path, status in ((unknown, "/metrics", 403), (unknown, "/healthz", 200), (known, "/metrics", 200)):
            async with (
                aiohttp.ClientSession() as session,
                session.get(url.replace("/metrics", path), ssl=context) as reply,
            ):
                assert status == reply.status


async def test_a_scraper_that_gives_up_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It has closed the connection before there was an answer, and nothing is logged."""

    def closing(_: object) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            assert request.transport is not None
            request.transport.close()
            return web.Response(text="too late")

        return answer

    monkeypatch.setattr(server, "make_aiohttp_handler", closing)
    page = LivePage()
    async with serving(page, "127.0.0.1", 0) as url:
        with pytest.raises(aiohttp.ClientError):
            await asked(url, "/metrics")
    assert (False, []) == (page.scraped.is_set(), caplog.records)


async def test_a_page_without_a_readiness_check_is_ready():
    """A run's page is there from its start."""
    async with serving(LivePage(), "127.0.0.1", 0) as url:
        assert (200, "ready\n") == await asked(url, "/readyz")


@pytest.mark.parametrize("path", ["/", "/live"])
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("127.0.0.1", 200), ("localhost:9464", 200), ("[::1]:9464", 200), ("10.0.0.7", 200), ("a.localhost", 200),
        ("attacker.example", 403), ("127.0.0.1.attacker.example", 403), ("localhost.attacker.example:80", 403),
        ("[::1", 403), ("", 403),
    ],
)  # fmt: skip
async def test_the_live_page_answers_to_names_of_this_machine_alone(path: str, name: str, status: int):
    """A page of others whose name leads here cannot read it; Prometheus may use whatever name it has."""
    page = LivePage()
    page.stream.end(lambda: b"event: final\ndata: {}\n\n")
    async with serving(page, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        async with session.get(url.replace("/metrics", path), headers={"Host": name}) as reply:
            assert status == reply.status
            assert ("no-store", "nosniff") == (reply.headers["Cache-Control"], reply.headers["X-Content-Type-Options"])
            assert "Access-Control-Allow-Origin" not in reply.headers
        async with session.get(url, headers={"Host": "attacker.example"}) as reply:
            assert reply.status == 200
        for header in ("Accept-Language", "Sec-Fetch-Site", "Origin", "Referer"):
            async with session.get(url, headers={"Host": name, header: ""}) as reply:
                assert status == reply.status


async def test_browsers_are_sent_events_and_no_more_of_them_than_there_is_room_for():
    """One that comes back says which event it had last."""
    page = LivePage()
    for number in range(3):
        page.stream.publish(b'event: rows\ndata: {"number": %d}\n\n' % number, b"")
    async with serving(page, "127.0.0.1", 0) as url, AsyncExitStack() as stack:
        live = url.replace("/metrics", "/live")
        for last in range(MOST_BROWSERS):
            browser = await stack.enter_async_context(listening(live, **{"Last-Event-ID": str(last % 2)}))
            assert last % 2 + 1 == (await anext(browser)).data["number"]
        assert (503, "too many browsers show this page\n") == await asked(url, "/live")


async def test_a_browser_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch):
    """Once what it has not read fills the connection; it may come back."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.05)
    page = LivePage()
    async with serving(page, "127.0.0.1", 0) as url, asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].removesuffix("/metrics")))
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in await reader.readline()
        writer.transport.pause_reading()
        while page.stream.is_watched:
            page.stream.publish(b"event: rows\ndata: {}\n\n".ljust(2**20), b"")
            await asyncio.sleep(0)
        writer.close()


async def test_idle_connections_keep_no_scraper_and_no_browser_away(monkeypatch: pytest.MonkeyPatch):
    """The oldest give way to a scraper; a page that a browser shows goes on."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    page = LivePage()
    page.stream.publish(b'event: rows\ndata: {"number": 1}\n\n', b"")
    async with serving(page, "127.0.0.1", 0) as url, AsyncExitStack() as stack:
        browser = await stack.enter_async_context(listening(url.replace("/metrics", "/live")))
        assert 1 == (await anext(browser)).data["number"]
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].removesuffix("/metrics")))
            stack.callback(writer.close)
        assert (200, "ready\n") == await asked(url, "/readyz")
        page.stream.publish(b'event: rows\ndata: {"number": 2}\n\n', b"")
        assert 2 == (await anext(browser)).data["number"]
