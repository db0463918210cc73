"""Exports over gRPC: what its library bounds, and reads, and what it leaves to us."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc import aio

from sidelight.rundir.access import server_context
from sidelight.scraper.spans.intake.admission import Admission
from sidelight.scraper.spans.intake.export import ExportRefusal, packing, too_large, turned_away, unpacked
from sidelight.scraper.spans.spec import SIGNALS, CannotListen, ReceiverSpec, most_connections

_GRACE_S = 1.0
_MOST_CALLS = 32  # of which the message is not whole yet
# A call is refused unread that waited longer for the loop (CANCELLED, to be sent again). Calls whose metadata gRPC
# refuses come to the loop, too, and hold it for 15 ms and more each: an export does not wait for a flood of them.
_MOST_WAIT_S = 5
# Beyond this multiple of it gRPC refuses a message by its length, unread. Up to there it is for us to refuse and to
# count: of one that gRPC refuses we learn no more than of one whose sender left.
_LIMITS_READ = 2
_BOUNDS = {
    "grpc.per_message_decompression": 0,  # not all versions of grpcio bound it
    "grpc.so_reuseport": 0,
    "grpc.http2.bdp_probe": 0,  # else each connection may have megabytes under way that are not asked for yet
    "grpc.server_handshake_timeout_ms": 5_000,
    "grpc.max_connection_idle_ms": 120_000,
    # Metadata is held before any token is seen: a byte of HPACK can stand for 4 kB of it, and gRPC's own limits of
    # metadata come too late. Calls are bounded for each connection, and in all while none was read.
    "grpc.max_concurrent_streams": 32,
    "grpc.server.max_pending_requests": 512,
    "grpc.server.max_pending_requests_hard_limit": 512,
    "grpc.http.tarpit": 0,  # a refused call would keep its metadata for up to a second
}


@asynccontextmanager
async def over_grpc(spec: ReceiverSpec, admission: Admission) -> AsyncIterator[int]:
    """Receive exports while the context is open, and yield the port. Raises CannotListen, UnusableFile."""
    bounds = {
        "grpc.max_receive_message_length": _LIMITS_READ * spec.limit_bytes,
        "grpc.max_allowed_incoming_connections": most_connections(),
        "grpc.server_max_unrequested_time_in_server": _MOST_WAIT_S,
        **_BOUNDS,
    }
    server, calls = aio.server(options=list(bounds.items())), _Calls(admission)
    # As a stream of one message: else grpcio reads it before we are asked, and we never hear of one it refuses.
    for signal, path in SIGNALS.items():
        service, _, method = path[1:].partition("/")
        rpc: Any = grpc.stream_unary_rpc_method_handler(partial(calls.answer, signal))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: rpc}),))
    try:
        port = _add_port(server, spec)
    except RuntimeError:
        raise CannotListen(f"cannot listen on {spec.grpc}: the address is in use, or not ours") from None
    await server.start()
    try:
        yield port
    finally:
        await server.stop(_GRACE_S)
        if calls.tasks:  # gRPC ends before they have counted what they did not get
            await asyncio.wait(calls.tasks, timeout=_GRACE_S)


def _add_port(server: Any, spec: ReceiverSpec) -> int:
    """Add the port to a gRPC server, with TLS where it is asked for. Raises RuntimeError, UnusableFile."""
    guard = spec.guard
    if not guard.cert:
        return int(server.add_insecure_port(spec.grpc))
    server_context(guard)  # says in our words what is wrong with a file
    pair = Path(guard.key or guard.cert).read_bytes(), Path(guard.cert).read_bytes()
    authority = Path(guard.ca).read_bytes() if guard.ca else None
    credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=bool(guard.ca))
    return int(server.add_secure_port(spec.grpc, credentials))


class _Calls:
    """Calls of a gRPC server, each with one export; `tasks` answer them."""

    def __init__(self, admission: Admission) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self._admission = admission
        self._read: dict[asyncio.Future[None], None] = {}  # calls without a whole message, the oldest first

    async def answer(self, signal: str, _requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Read an export, and answer its sender."""
        task = asyncio.current_task()
        if task is not None:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        stated = dict(context.invocation_metadata() or ()).get("authorization", "")
        try:
            return await self._admission.admit(signal, "grpc", str(stated), partial(self._body, context))
        except ExportRefusal as refusal:
            again = (("grpc-status-details-bin", refusal.details()),) if refusal.count == "no_memory" else ()
            await context.abort(refusal.grpc_code, refusal.text, again)
            raise  # abort has raised

    async def _body(self, context: Any) -> bytes:
        """Return an export, unpacked. Raises Refusal."""
        body = await self._message(context)
        if body is aio.EOF:
            raise self._admission.departure()
        limit = self._admission.limit_bytes
        if len(body) > limit:
            raise too_large(limit)
        packed = packing(body)
        return body if packed is None else await asyncio.to_thread(unpacked, body, limit, packed)

    async def _message(self, context: Any) -> Any:
        """Return the next message of a call, aio.EOF where there is none. Raises Refusal.

        Where the task that waits for a message is cancelled, grpcio (1.85) leaks a message that comes then. So another
        task waits, which ends as the call does.
        """
        reader = asyncio.ensure_future(context.read())
        reader.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
        place = asyncio.get_running_loop().create_future()
        self._read[place] = None
        if len(self._read) > _MOST_CALLS:
            oldest = next(iter(self._read))
            del self._read[oldest]
            oldest.set_result(None)
        try:
            await asyncio.wait((reader, place), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._read.pop(place, None)
        if not reader.done():
            raise turned_away("too many calls at once")
        return reader.result()
