"""The two questions of a container's supervisor: does it run, and can it be sent traffic."""

from __future__ import annotations

import aiohttp

from exporter.prometheus.page import LivePage
from exporter.prometheus.server import serving


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


async def test_a_page_without_a_readiness_check_is_ready():
    """A run's page is there from its start."""
    async with serving(LivePage(), "127.0.0.1", 0) as url:
        assert (200, "ready\n") == await asked(url, "/readyz")
