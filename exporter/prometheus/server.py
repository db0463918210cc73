"""Serve the live page over HTTP: /metrics for Prometheus, /healthz and /readyz for container orchestration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from exporter.prometheus.page import LivePage

SHUTDOWN_TIMEOUT_S = 1.0


@asynccontextmanager
async def serving(page: LivePage, host: str, port: int, *, unready: Callable[[], str] = str) -> AsyncIterator[str]:
    """Serve the page while the context is open and yield its URL, e.g. "http://127.0.0.1:9464/metrics".

    Port 0 takes a free one; the URL names the port that was taken. /metrics is Prometheus text 0.0.4, or OpenMetrics
    where the scraper's Accept header asks for it; /healthz answers "ok" as long as the event loop runs; /readyz
    answers "ready", or 503 and what `unready` says while that is not empty. Leaving waits at most a second for a scrape
    that is under way.

    Raises OSError: the address cannot be listened on (port in use, no such host).
    """
    application = web.Application()
    application.router.add_get("/metrics", make_aiohttp_handler(page.registry))
    application.router.add_get("/healthz", _healthy)

    async def ready(_: web.Request) -> web.Response:
        not_ready = unready()
        return web.Response(text=f"{not_ready or 'ready'}\n", status=503 if not_ready else 200)

    application.router.add_get("/readyz", ready)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")
