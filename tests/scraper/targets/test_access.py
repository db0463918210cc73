"""Client identity: TLS both ways, credentials, and URLs without their secrets."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from certificates import Authority
from hypothesis import given
from hypothesis import strategies as st
from served import Serve

from sidelight.rundir.access import Access, UnusableFile, bare, basic, headers_for, masked, tls_context
from sidelight.scraper.engines.catalogue import metrics_paths
from sidelight.scraper.targets.fetch import FetchLimits, discover, open_session, scrape
from sidelight.scraper.targets.scrape import Scrape

PAGE = b"x 1\n"


@asynccontextmanager
async def https(context: ssl.SSLContext) -> AsyncIterator[str]:
    """Serve a page over TLS."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=PAGE)

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}/metrics"
    await runner.cleanup()


async def once(url: str, access: Access) -> Scrape:
    async with open_session(access) as session:
        return await scrape(session, url, tick_ns=0, clock_offset_ns=0, limits=FetchLimits(), access=access)


async def test_an_authority_of_ones_own(authority: Authority):
    """A certificate that our authority signed is good, and no other; unless any is taken."""
    async with https(authority.serving()) as url:
        assert PAGE == (await once(url, Access(ca=authority.path("ca.pem")))).body
        assert PAGE == (await once(url, Access(insecure=True))).body
        for access in (Access(), Access(ca=authority.path("unrelated.pem"))):
            assert "connect: TLS failed (CERTIFICATE_VERIFY_FAILED)" == (await once(url, access)).error
        assert url == await discover(url, metrics_paths(), access=Access(ca=authority.path("ca.pem")))


async def test_a_name_that_is_not_the_certificates(authority: Authority):
    """The right authority does not make up for the wrong host."""
    async with https(authority.serving()) as url:
        error = (await once(url.replace("127.0.0.1", "localhost"), Access(ca=authority.path("ca.pem")))).error
    assert error.startswith("connect: ")


@pytest.mark.parametrize(("cert", "key"), [("client.pem", "client.key"), ("both.pem", "")])
async def test_a_client_certificate(authority: Authority, cert: str, key: str):
    """A server that asks for one is shown it; the key may be in a file of its own."""
    ca = authority.path("ca.pem")
    async with https(authority.serving(ask_client="ca.pem")) as url:
        shown = Access(ca=ca, cert=authority.path(cert), key=authority.path(key) if key else "")
        assert PAGE == (await once(url, shown)).body
        assert (b"", True) == ((without := await once(url, Access(ca=ca))).body, bool(without.error))


@pytest.mark.parametrize(
    ("files", "which", "reason"),
    [
        ({"ca": "none.pem"}, "ca", "No such file or directory"),
        ({"ca": "client.key"}, "ca", "holds no certificate in PEM format"),
        ({"ca": "empty.pem"}, "ca", "holds no certificate in PEM format"),
        ({"cert": "none.pem", "key": "client.key"}, "cert", "No such file or directory"),
        ({"cert": "client.pem", "key": "none.key"}, "key", "No such file or directory"),
        ({"cert": "client.pem"}, "cert", "no certificate with its key in PEM format"),
        ({"cert": "client.pem", "key": "unrelated.key"}, "key", "is not the key of this certificate"),
        ({"cert": "locked.pem", "key": "locked.key"}, "key", "is encrypted with a password"),
    ],
)
def test_files_that_cannot_be_used(authority: Authority, files: dict[str, str], which: str, reason: str):
    """Which file it is, and why; no password is asked for."""
    with pytest.raises(UnusableFile) as caught:
        tls_context(Access(**{name: authority.path(file) for name, file in files.items()}))
    assert (which, reason) == (caught.value.which, caught.value.reason)


async def test_untrusted_even_without_http(authority: Authority):
    """A certificate that cannot be verified is OpenSSL's reason, not the system's error of the same number."""

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=authority.serving())
    async with server:
        record = await once(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics", Access())
    assert "connect: TLS failed (CERTIFICATE_VERIFY_FAILED)" == record.error


USER = "Basic " + base64.b64encode(b"ann:p@ss:word").decode()


@pytest.mark.parametrize(
    ("url", "authorization"),
    [
        ("http://Engine:8000/metrics", "own"),
        ("http://engine:9400/metrics", "all"),
        ("http://ann:p%40ss%3Aword@engine:9400/metrics", USER),
        ("http://ann:p%40ss%3Aword@engine:8000/metrics", USER),
        ("http://ann@engine/metrics", "Basic " + base64.b64encode(b"ann:").decode()),
    ],
)
def test_whose_credentials(url: str, authorization: str):
    """The URL's own, else those of its host and port, else those for all."""
    access = Access(headers={"authorization": "all"}, host_headers={"engine:8000": {"Authorization": "own"}})
    sent = headers_for(access, url)
    assert authorization == (sent.get("Authorization") or sent["authorization"])
    assert 1 == len(sent)


def test_basic_authentication_is_utf_8():
    """As RFC 7617 has it where the server says nothing."""
    assert "ännchen:geheim" == base64.b64decode(basic("ännchen:geheim").removeprefix("Basic ")).decode()


async def test_credentials_in_the_url_are_sent_and_not_shown(serve: Serve):
    """They reach the server as basic authentication; the scrape and every reason have the URL without them."""
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        return web.Response(body=PAGE, status=200 if request.headers["Authorization"] == USER else 401)

    base = await serve({"/metrics": page})
    url = base.replace("http://", "http://ann:p%40ss%3Aword@") + "/metrics"
    scraped = await once(url, Access())
    assert (PAGE, [USER]) == (scraped.body, asked)
    shown = base.replace("http://", "http://***@")
    assert f"{shown}/metrics" == scraped.url
    assert url == await discover(url, metrics_paths())
    wrong = await discover(url.replace("word", "wort"), metrics_paths())
    assert f"Missing(reason='{shown}/metrics: HTTP 401')" == repr(wrong)


async def test_a_redirect_with_a_user_name_on_its_own_host(serve: Serve):
    """Our own credentials are sent on."""
    asked: list[str] = []

    async def here(request: web.Request) -> web.Response:
        location = f"http://bob:hush@{request.host}/there"
        return web.Response(status=302, headers={"Location": location})

    async def there(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        return web.Response(body=PAGE)

    base = await serve({"/metrics": here, "/there": there})
    assert PAGE == (await once(f"{base}/metrics", Access(headers={"Authorization": "Bearer t"}))).body
    assert ["Bearer t"] == asked


@pytest.mark.parametrize(
    ("url", "bare_url", "shown"),
    [
        ("http://h:1/m?x=1#f", "http://h:1/m?x=1#f", "http://h:1/m?x=1#f"),
        ("http://u:p@h:1/m?x=1", "http://h:1/m?x=1", "http://***@h:1/m?x=1"),
        ("http://u@[::1]/m", "http://[::1]/m", "http://***@[::1]/m"),
        ("http://u:p@[::1/m", "[::1/m", "***@[::1/m"),
        ("http:u:p@h/m", "h/m", "***@h/m"),
        ("u:p@h/m", "h/m", "***@h/m"),
        ("http://h/a@b", "http://h/a@b", "http://h/a@b"),
    ],
)
def test_urls_without_their_secrets(url: str, bare_url: str, shown: str):
    """To ask, and to show; also where a slip has made it invalid."""
    assert (bare_url, shown) == (bare(url), masked(url))


@given(st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=5).map(lambda text: f"{text}:s3cr3t-9x"))
def test_no_password_is_shown(userinfo: str):
    """Whatever stands before the @ of a URL, what is shown has nothing of it."""
    for url in (f"http://{userinfo}@host/metrics", f"https:{userinfo}@host", f"{userinfo}@host:1/metrics"):
        assert "s3cr3t-9x" not in masked(url)


def test_secrets_are_not_in_its_representation():
    """A log line or a traceback that shows it shows no header."""
    access = Access(headers={"Authorization": "hush"}, host_headers={"h": {"Authorization": "hush"}})
    assert "hush" not in repr(access)
