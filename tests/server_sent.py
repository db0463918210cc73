"""Server-sent events as a browser reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One event: its name, its id or "", and the JSON in it."""

    name: str
    identity: str
    data: dict[str, Any]


@asynccontextmanager
async def listening(url: str, **headers: str) -> AsyncIterator[AsyncIterator[Sent]]:
    """Connect as a browser does, and yield the events as they come."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=2**24) as session,
        session.get(url, headers=headers) as reply,
    ):
        assert ("text/event-stream", 200) == (reply.content_type, reply.status)
        yield _events(reply.content)


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Sent]:
    fields: dict[str, str] = {}
    while line := (await stream.readline()).decode():
        name, _, value = line.rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        else:
            yield Sent(name=fields["event"], identity=fields.get("id", ""), data=json.loads(fields["data"]))
            fields = {}
