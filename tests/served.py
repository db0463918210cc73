"""Servers that answer as a test says: pages that are scraped, and a collector of spans."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

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


@asynccontextmanager
async def collector(
    *answers: tuple[int, dict[str, str]], text: str = "", sock: socket.socket | None = None, path: str = "/v1/traces"
) -> AsyncIterator[tuple[str, list[tuple[Mapping[str, str], bytes]]]]:
    """Answer exports of spans over HTTP, each with the next status and headers; give the URL, headers and bodies.

    `sock` is bound already, where the address was to be known before.
    """
    exports: list[tuple[Mapping[str, str], bytes]] = []

    async def take(request: web.Request) -> web.Response:
        exports.append((request.headers, await request.read()))
        status, headers = answers[min(len(exports), len(answers)) - 1]
        return web.Response(status=status, headers=headers, text=text)

    app = web.Application()
    app.router.add_post(path, take)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    await (web.SockSite(runner, sock) if sock else web.TCPSite(runner, "127.0.0.1", 0)).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", exports
    finally:
        await runner.cleanup()
