"""Exports over HTTP: its server, and the body of a request within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from aiohttp import HttpVersion11, web

from sidelight.rundir.access import connection_problem, server_context
from sidelight.scraper.spans.intake.admission import Admission
from sidelight.scraper.spans.intake.connections import Connections
from sidelight.scraper.spans.intake.export import AGAIN_S, ExportRefusal, malformed, too_large, unpacked
from sidelight.scraper.spans.spec import PROTOBUF, SIGNALS, CannotListen, ReceiverSpec, host_and_port

_KEEP_ALIVE_S = 75.0
_BACKLOG = 1024  # the system keeps these until it is their turn
_SIGNALS_BY_PATH = {f"/v1/{signal}": signal for signal in SIGNALS}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@asynccontextmanager
async def over_http(spec: ReceiverSpec, admission: Admission, connections: Connections) -> AsyncIterator[int]:
    """Receive exports while the context is open, and yield the port. Raises CannotListen, UnusableFile."""
    logger = logging.Logger("spans", logging.WARNING)  # noqa: LOG001  its records go nowhere else
    logger.addFilter(partial(_noise, admission))
    # An application of aiohttp would take longer over each request than all our bounds. A bomb is ours to bound, so
    # aiohttp does not unpack. The rest of a refused body is read past for a moment: a sender that is cut off does
    # not see why.
    server = web.Server(
        partial(connections.following, handler=partial(_answer, admission)),
        access_log=None,
        logger=logger,
        auto_decompress=False,
        handler_cancellation=True,
        lingering_time=2,
        keepalive_timeout=_KEEP_ALIVE_S,
    )
    runner = web.ServerRunner(server, shutdown_timeout=1)
    tls = server_context(spec.guard)
    await runner.setup()
    try:
        async with AsyncExitStack() as stack:
            try:
                listening = connections.listening(server, *host_and_port(spec.http), tls=tls, backlog=_BACKLOG)
                port = await stack.enter_async_context(listening)
            except OSError as error:
                raise CannotListen(f"cannot listen on {spec.http}: {connection_problem(error)}") from error
            yield port
    finally:
        await runner.cleanup()


async def _answer(admission: Admission, request: web.BaseRequest) -> web.Response:
    signal = _SIGNALS_BY_PATH.get(request.path)
    if signal is None or request.method != "POST":
        elsewhere = web.Response(status=405, headers={"Allow": "POST"}) if signal else web.Response(status=404)
        elsewhere.force_close()  # its body, which may never come, would be taken for the next request
        return elsewhere
    if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(_CONTINUE)
    stated = request.headers.get("Authorization", "")
    try:
        reply = await admission.admit(signal, "http", stated, partial(_body, admission, request))
    except ExportRefusal as refusal:
        retry = {"Retry-After": str(AGAIN_S)} if refusal.http_status == 503 else {}
        refused = web.Response(body=refusal.status(), status=refusal.http_status, content_type=PROTOBUF, headers=retry)
        refused.force_close()
        return refused
    return web.Response(body=reply, content_type=PROTOBUF)


async def _body(admission: Admission, request: web.BaseRequest) -> bytes:
    """Return the body of a request, unpacked. Raises Refusal."""
    kind, encoding = request.content_type, request.headers.get("Content-Encoding", "identity").strip().lower()
    if kind != PROTOBUF:
        raise malformed(f"it is {kind}, not {PROTOBUF}", 415)
    if encoding not in ("", "identity", "gzip"):
        raise malformed(f"encoded as {encoding[:20]!r}", 415)
    limit, body = admission.limit_bytes, bytearray()
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise too_large(limit)
            admission.require_memory()
    except web.RequestPayloadError:
        raise malformed("its body is not framed as HTTP has it") from None
    return bytes(body) if encoding != "gzip" else await asyncio.to_thread(unpacked, bytes(body), limit)


def _noise(admission: Admission, record: logging.LogRecord) -> bool:
    """Filter aiohttp's log records: one line for a peer that does not speak HTTP, not a traceback each time."""
    error = record.exc_info[1] if record.exc_info else None
    admission.note_noise(" ".join(f"{record.getMessage()}: {error!r}".split())[:200])
    return False
