"""Meetings of two engines that share a request, as in SGLang's bootstrap rooms.

A router sends a request to both engines at once and names a room. They wait for each other there (the handshake); then
the decode engine waits until the prefill engine has computed and sent the prompt's KV cache. SGLang's engines meet at a
server of their own and move caches by RDMA; these meet by HTTP at the prefill engine, which says when a cache is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from sidelight.simulator.api.requests import Generation, RefusedError
from sidelight.simulator.api.service import SERVICE
from sidelight.simulator.engine.history import Meeting
from sidelight.simulator.settings import KV_TOKEN_BYTES

PATH = "/bootstrap_room/{number:[0-9]+}"
WAIT_S = 300.0  # for the other engine, as of SGLang's SGLANG_DISAGGREGATION_WAITING_TIMEOUT


@dataclass(slots=True)
class _Room:
    """The state of a room: which engines are there, and whether the KV cache is sent."""

    prefill: asyncio.Event = field(default_factory=asyncio.Event)
    decode: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Rooms:
    """The rooms at a prefill engine, and a decode engine's connections to them."""

    connections: ClientSession
    rooms: dict[int, _Room] = field(default_factory=dict)


ROOMS = web.AppKey("rooms", Rooms)


async def rooms_of(app: web.Application) -> AsyncIterator[None]:
    """Open the connections to rooms while an application runs."""
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=WAIT_S)) as connections:
        app[ROOMS] = Rooms(connections)
        yield


@asynccontextmanager
async def met(request: web.Request, generation: Generation) -> AsyncIterator[Meeting | None]:
    """Wait for the other engine of a request; the block's end sends a prefill engine's KV cache.

    None where an engine serves alone. Raises RefusedError for a request without a room, and where no other engine came.
    """
    service, room = request.app[SERVICE], generation.room
    settings, clock = service.settings.engine_settings, service.clock
    if not settings.kv_role or service.settings.engine != "sglang":
        yield None
        return
    if room is None:
        raise RefusedError(400, "Invalid request: Disaggregated request received without bootstrap room id.")
    here, begun_ns = request.app[ROOMS], clock()
    try:
        async with asyncio.timeout(WAIT_S):
            if settings.kv_role == "prefill":
                meeting = here.rooms.setdefault(room.number, _Room())
                meeting.prefill.set()
                await meeting.decode.wait()
            else:
                at = f"http://{room.host}:{room.port}{PATH.partition('{')[0]}{room.number}"
                async with here.connections.post(at) as reply:
                    opened_ns = clock()
                    await reply.read()
    except (ClientError, TimeoutError) as error:
        raise RefusedError(500, f"bootstrap room {room.number}: {error or 'no other engine came'}") from None
    if settings.kv_role == "decode":
        yield Meeting(number=room.number, begun_ns=begun_ns, opened_ns=opened_ns)
        return
    tokens = len(generation.prompt_token_ids)
    send_s = settings.kv_latency_s + tokens * KV_TOKEN_BYTES / settings.kv_bytes_per_s
    try:
        yield Meeting(number=room.number, begun_ns=begun_ns, opened_ns=clock(), send_ns=round(1e9 * send_s))
        await asyncio.sleep(send_s)
        meeting.sent.set()
    finally:
        del here.rooms[room.number]


async def wait_in_room(request: web.Request) -> web.StreamResponse:
    """Answer a decode engine: the head once both are there, the end once the KV cache is sent."""
    meeting = request.app[ROOMS].rooms.setdefault(int(request.match_info["number"]), _Room())
    meeting.decode.set()
    await meeting.prefill.wait()
    response = web.StreamResponse()
    with suppress(ConnectionResetError):
        await response.prepare(request)
        await response.write(b" ")
        await meeting.sent.wait()
        await response.write_eof()
    return response
