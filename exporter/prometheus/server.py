"""Serve the live page over HTTP: / for browsers, /metrics for Prometheus, /healthz and /readyz for orchestration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from ipaddress import ip_address
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client.aiohttp import make_aiohttp_handler

from sidelight.exporter.prometheus.events import EventStream
from sidelight.exporter.prometheus.page import LivePage
from sidelight.rundir.access import Guard, server_context
from sidelight.scraper.spans.intake.connections import Connections

SHUTDOWN_TIMEOUT_S = 1.0
MOST_CONNECTIONS = 256
GIVEN_UP_S = 0.05  # in which the end of a connection is seen
KEEPS_OPEN = "X-Prometheus-Scrape-Timeout-Seconds"  # header of scrapers that close a connection only on giving up
WRITE_TIMEOUT_S = 30.0  # of a browser that reads nothing
ANYBODY = Guard()
# Headers that browsers send and scrapers do not. The first is in every request, and no script can leave it out; the
# others are not: Sec-Fetch-Site goes over TLS and to this machine alone, and a page may ask for no Referer.
_BROWSERS = ("Accept-Language", "Sec-Fetch-Site", "Origin", "Referer")
_PROBES = ("/healthz", "/readyz")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@asynccontextmanager
async def serving(
    page: LivePage,
    host: str,
    port: int,
    *,
    unready: Callable[[], str] = str,
    unhealthy: Callable[[], str] = str,
    guard: Guard = ANYBODY,
) -> AsyncIterator[str]:
    """Serve the page while the context is open and yield its URL, e.g. "http://127.0.0.1:9464/metrics".

    Port 0 takes a free one; the URL names the port that was taken. / is the live page, fed by `page.stream`, for
    browsers that ask for this machine by an address, localhost or `host`; scrapers may use any name.
    /metrics is Prometheus text 0.0.4, or
    OpenMetrics where the scraper's Accept header asks for it; /healthz answers "ok", and /readyz "ready", or 503 and
    what `unhealthy` and `unready` say while that is not empty. Leaving waits at most a second for
    a scrape that is under way. `guard` says who may see more than /healthz and /readyz, which a supervisor asks.

    Raises OSError: the address cannot be listened on (port in use, no such host); UnusableFile (a certificate).
    """
    tls = server_context(guard, is_client_optional=True)
    connections = Connections(MOST_CONNECTIONS)
    application = web.Application(middlewares=[connections.following, _guarded(guard)])
    application.router.add_get("/metrics", _for_known_names(host, _scrapes(page), others=_is_no_browser))
    application.router.add_get("/healthz", _probe("ok", unhealthy))
    application.router.add_get("/readyz", _probe("ready", unready))
    application.router.add_get("/", _for_known_names(host, _show_page))
    application.router.add_get("/live", _for_known_names(host, _sending(page.stream, connections)))
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        async with connections.listening(cast("web.Server", runner.server), host, port, tls=tls) as taken:
            yield f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{taken}/metrics"
    finally:
        await runner.cleanup()


def _scrapes(page: LivePage) -> Handler:
    """Return a handler that answers scrapes and sets the page's `scraped`. The last page is served until it has been
    scraped: who gave up while the report was made, or before all of the answer came, has not.
    """
    answer = make_aiohttp_handler(page.registry)

    async def scrape(request: web.Request) -> web.StreamResponse:
        is_last = page.latest is not None and page.latest.phase == "done"
        if is_last and await _gave_up(request):
            return web.Response(status=499)
        response = await answer(request)
        with suppress(ConnectionResetError):  # who gave up has closed it
            await response.prepare(request)
            await response.write_eof()
            if not (is_last and KEEPS_OPEN in request.headers and await _gave_up(request)):
                page.scraped.set()
        return response

    return scrape


async def _gave_up(request: web.Request) -> bool:
    await asyncio.sleep(GIVEN_UP_S)
    return request.transport is None


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _guarded(guard: Guard) -> Middleware:
    """Return a middleware that admits supervisors, and only those whom the guard admits."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _PROBES:
            return await handler(request)
        if guard.ca and not (request.transport and request.transport.get_extra_info("peercert")):
            return web.Response(text="a client certificate is asked for here\n", status=403, headers=_HEADERS)
        if not guard.admits(request.headers.get("Authorization", "")):
            asked = {**_HEADERS, "WWW-Authenticate": 'Basic realm="sidelight", charset="UTF-8"'}
            return web.Response(text="the token is asked for here, as a password\n", status=401, headers=asked)
        return await handler(request)

    return admit


def _probe(good: str, reason: Callable[[], str]) -> Handler:
    """Return a handler for the probes of a supervisor."""

    async def answer(_: web.Request) -> web.Response:
        why = reason()
        return web.Response(text=f"{why or good}\n", status=503 if why else 200)

    return answer


def _is_no_browser(request: web.Request) -> bool:
    return not any(name in request.headers for name in _BROWSERS)


def _for_known_names(host: str, answer: Handler, *, others: Callable[[web.Request], bool] = lambda _: False) -> Handler:
    """Return a handler that rejects requests by unknown host names. It answers those that name this machine by an
    address, a name of the loopback, or `host`, and those of `others`.

    Another name may be that of a page of others, made to lead here so that it can read ours (DNS rebinding).
    """

    async def checked(request: web.Request) -> web.StreamResponse:
        name = _name(request.host)
        if name in (host.lower(), "localhost") or name.endswith(".localhost") or _is_address(name) or others(request):
            return await answer(request)
        text = "this name is not known here: open the page by the address of this machine, or by http://localhost\n"
        return web.Response(text=text, status=403, headers=_HEADERS)

    return checked


def _name(host: str) -> str:
    """Return the name in a Host header, "" where it has none."""
    with suppress(ValueError):
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    return ""


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(name))
    return False


async def _show_page(_: web.Request) -> web.Response:
    from sidelight.exporter.html.page import live_page  # noqa: PLC0415  which the first request of a run need not wait for

    return web.Response(text=live_page(), content_type="text/html", headers=_HEADERS)


def _sending(stream: EventStream, connections: Connections) -> Handler:
    async def send(request: web.Request) -> web.StreamResponse:
        if stream.is_full:
            return web.Response(text="too many browsers show this page\n", status=503, headers=_HEADERS)
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        connections.note_answer(request)
        with suppress(ConnectionError, TimeoutError):
            async with aclosing(stream.events(request.headers.get("Last-Event-ID", ""))) as events:
                async for event in events:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.write(event)
                return response
        if request.transport is not None:
            request.transport.abort()
        return response

    return send
