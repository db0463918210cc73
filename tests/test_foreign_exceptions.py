"""What libraries raise is mapped once, where it comes in, and every one of their exceptions has a place in the map."""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import aiohttp
import grpc
import pytest
from aiohttp.client_reqrep import ConnectionKey
from grpc import aio
from yarl import URL

from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.transports.grpc import GrpcTransport
from sidelight.loadgen.transports.transport import Exchange
from sidelight.loadgen.transports.websocket import WebSocketTransport
from sidelight.recorded.errors import SidelightError
from sidelight.rundir.access import Access, connection_problem
from sidelight.scraper.spans.forward import CollectorConnection, Rejected, Unavailable
from sidelight.scraper.spans.spec import TRACES
from sidelight.scraper.targets import fetch
from sidelight.sidecar.run.preparation import target

KEY = ConnectionKey("host", 443, True, True, None, None, None)
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (111, "Connection refused"),
    (MagicMock(real_url=URL("http://host/")), ()),
    (KEY, OSError(111, "Connection refused")),
    (KEY, ssl.SSLCertVerificationError(1, "certificate")),
    ("/path", KEY, OSError(2, "No such file")),
    (b"expected", b"got", "host", 443),
    ("http://host/",),
    ("text",),
    (),
)


def below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """Give a class of exceptions and all below it."""
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


def instance(kind: type[BaseException]) -> BaseException:
    """Return one, with arguments that it takes and can be printed with."""
    for arguments in ARGUMENTS:
        try:
            error = kind(*arguments)
            str(error)
        except Exception:  # noqa: BLE001, S112  each class of aiohttp has a constructor of its own
            continue
        return error
    raise AssertionError(f"no arguments known for {kind}")


OF_AIOHTTP = sorted(set(below(aiohttp.ClientError)), key=lambda kind: kind.__qualname__)
OF_TLS = sorted(set(below(ssl.SSLError)), key=lambda kind: kind.__qualname__)
OF_SYSTEM = (OSError, ConnectionResetError, BrokenPipeError, TimeoutError, asyncio.TimeoutError)
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


@pytest.mark.parametrize("kind", [*OF_AIOHTTP, *OF_TLS, *OF_SYSTEM, zlib.error, UnicodeError, ValueError])
async def test_a_scrape_that_failed_is_a_reason(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch):
    """Of whatever aiohttp, TLS, the system or the codecs raise."""
    monkeypatch.setattr(fetch, "_fetch", raising(instance(kind)))
    reply, reason = await fetch._attempt(MagicMock(), "http://host/", Access(), fetch.LIMITS)
    assert reply is None
    assert ": " in reason
    assert "\n" not in reason


@pytest.mark.parametrize("kind", [*OF_AIOHTTP, *OF_TLS, *OF_SYSTEM])
async def test_a_collector_that_cannot_be_reached_is_unavailable(kind: type[BaseException]):
    """Spans are then kept for later."""
    async with CollectorConnection("http://127.0.0.1:9/v1/traces", Access()) as wire:
        await wire._session.close()
        wire._session = MagicMock(post=raising(instance(kind)))
        with pytest.raises(Unavailable, match=r"."):
            await wire.send(b"")


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_every_status_of_a_collector_is_for_later_or_final(code: grpc.StatusCode):
    """Over gRPC."""
    async with CollectorConnection("grpc://127.0.0.1:9", Access()) as wire:
        wire._calls = {TRACES: raising(aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "why"))}
        with pytest.raises((Unavailable, Rejected), match=f"{code.name}: why"):
            await wire.send(b"")


@pytest.mark.parametrize("kind", [*OF_AIOHTTP, *OF_TLS, *OF_SYSTEM])
def test_why_there_is_no_connection_is_one_line(kind: type[BaseException]):
    """Never empty."""
    text = str(connection_problem(instance(kind)))
    assert text.strip()
    assert "\n" not in text


@pytest.mark.parametrize("kind", OF_AIOHTTP)
async def test_a_probe_that_failed_is_one_of_our_errors(kind: type[BaseException]):
    """Which says what to do about it."""

    @asynccontextmanager
    async def session(_: float) -> AsyncIterator[Any]:
        yield MagicMock(get=raising(instance(kind)))

    contact: Any = MagicMock(session=session)
    with pytest.raises(SidelightError, match="host"):
        await target._get("http://host/v1/models", contact)


def exchange() -> Exchange:
    return Exchange(index=0, scheduled_ns=0, dispatch_ns=0)


@pytest.mark.parametrize("kind", [*OF_AIOHTTP, *OF_TLS, *OF_SYSTEM])
async def test_a_websocket_that_failed_is_a_failed_request(kind: type[BaseException]):
    """An error, or the status of a server that refused the handshake."""
    transport = MagicMock(
        _clock=MagicMock(now_ns=lambda: 1), _take_idle=AsyncMock(return_value=None), _connect=raising(instance(kind))
    )
    planned: Any = MagicMock(spec=PlannedRequest, url=0, path="/v1/chat")
    failed = exchange()
    await WebSocketTransport.perform(transport, failed, planned, timeout_s=1.0)
    assert failed.error or failed.body
    assert failed.end_ns >= 0


@pytest.mark.parametrize("status", [0, 200])
@pytest.mark.parametrize("connected_ns", [-1, 1])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_every_status_of_grpc_is_a_failed_request(code: grpc.StatusCode, connected_ns: int, status: int):
    """Before there is a connection, before the reply began, and in its midst."""
    failed = exchange()
    failed.connected_ns, failed.status = connected_ns, status
    error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "")
    GrpcTransport._failed(MagicMock(_clock=MagicMock(now_ns=lambda: 1)), failed, error)
    assert failed.error or failed.status >= 400
    assert failed.end_ns >= 0
