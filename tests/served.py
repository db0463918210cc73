"""What stands at an address that is scraped, for the tests of who scrapes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[dict[str, Handler]], Awaitable[str]]  # the fixture `serve`: handlers by path in, base URL out

TEXT = "text/plain; version=0.0.4"


def answer(body: str | bytes = b"", kind: str = TEXT, status: int = 200, **headers: str) -> Handler:
    """Answer with this, whatever is asked."""

    async def handler(_: web.Request) -> web.Response:
        raw = body.encode() if isinstance(body, str) else body
        return web.Response(body=raw, status=status, headers={"Content-Type": kind, **headers})

    return handler
