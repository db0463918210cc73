"""HTTP/1.1 requests: their heads, and which pool of connections carries them."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from typing import Self
from urllib.parse import urlsplit

from loadgen.records import PlannedRequest, request_id, traceparent
from loadgen.transports.lateness import ReceiveStamps
from loadgen.transports.link import WorkerSpec, tls_context
from loadgen.transports.pool import Pool, origin_of
from loadgen.transports.transport import Exchange
from rundir.clock import Clock

_RESOLVE_S = 2.0


class HttpLink:
    """One pool of connections an origin; owns them. Raises ValueError or OSError on an unusable specification."""

    def __init__(self, spec: WorkerSpec, clock: Clock, *, stamps: ReceiveStamps) -> None:
        self._run_id = spec.run_id
        origins = [origin_of(root) for root in spec.roots]
        tls = tls_context(spec.tls) if any(origin.tls for origin in origins) else None
        pools = {origin: Pool(origin, clock, tls=tls, reuse=spec.reuse, stamps=stamps) for origin in origins}
        # By a request's `url`: the pool, what stands before its path, and the lines that every request has.
        self._targets = [
            (pools[origin], urlsplit(root).path, _fixed_head(origin.authority, spec.headers, reuse=spec.reuse))
            for root, origin in zip(spec.roots, origins, strict=True)
        ]
        self._pools = tuple(pools.values())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for pool in self._pools:
            await self._stack.enter_async_context(pool)
            # A name that does not resolve is every request's own error.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_RESOLVE_S):
                    await pool.resolve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def perform(self, exchange: Exchange, planned: PlannedRequest, *, timeout_s: float) -> None:
        """Send a request to the URL that it names; see Pool.perform."""
        pool, prefix, fixed = self._targets[planned.url]
        run_id, index = self._run_id, planned.index
        head = (
            f"POST {prefix}{planned.path} HTTP/1.1\r\n{fixed}X-Request-Id: {request_id(run_id, index)}\r\n"
            f"traceparent: {traceparent(run_id, index)}\r\nContent-Length: {len(planned.body)}\r\n\r\n"
        )
        await pool.perform(exchange, head.encode() + planned.body, timeout_s=timeout_s)


def _fixed_head(authority: str, given: dict[str, str], *, reuse: bool) -> str:
    headers = {
        "Host": authority,
        "User-Agent": "sidelight",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
        "Connection": "keep-alive" if reuse else "close",
        "Content-Type": "application/json",
    }
    names = {name.lower() for name in given}
    lines = {name: value for name, value in headers.items() if name.lower() not in names} | given
    for name, value in lines.items():
        if not name or any(character in name + value for character in "\r\n\0"):
            raise ValueError(f"header {name!r} is empty or holds a line break")
        if not (name + value).isascii():
            raise ValueError(f"header {name!r} is not ASCII")
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items())
