"""A receiver that others than this machine reach: spans come by TLS, from whom has the token or the certificate."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from certificates import Authority
from grpc import aio
from odd_exports import PROTOBUF, odd_export
from waiting import BOUND_S

from sidelight.rundir.access import Guard, UnusableFile
from sidelight.scraper.spans.log import ReceiverCounts
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import SIGNALS, ReceiverSpec

NOW_NS = 10**18


@asynccontextmanager
async def receiving(guard: Guard) -> AsyncIterator[Receiver]:
    offset_ns = NOW_NS - time.monotonic_ns()
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0", clock_offset_ns=offset_ns, guard=guard)
    async with Receiver(spec, log=None, say=print) as receiver:
        yield receiver


async def over_http(receiver: Receiver, authority: Authority | None, client: str, token: str) -> int:
    """The status of the answer; 0 where no connection is made."""
    context: ssl.SSLContext | bool = True
    if authority is not None:
        context = ssl.create_default_context(cafile=authority.path("ca.pem"))
        if client:
            context.load_cert_chain(authority.path(f"{client}.pem"), authority.path(f"{client}.key"))
    headers = {"Content-Type": PROTOBUF, **({"Authorization": token} if token else {})}
    url = f"{'http' if authority is None else 'https'}://127.0.0.1:{receiver.http_port}/v1/traces"
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=odd_export(NOW_NS), headers=headers, ssl=context) as response,
        ):
            return response.status
    except aiohttp.ClientError:
        return 0


def credentials_of(authority: Authority, client: str) -> grpc.ChannelCredentials:
    parts = [Path(authority.path(f"{client}.{part}")).read_bytes() for part in ("key", "pem")] if client else []
    return grpc.ssl_channel_credentials(Path(authority.path("ca.pem")).read_bytes(), *parts)


async def over_grpc(receiver: Receiver, authority: Authority | None, client: str, token: str) -> grpc.StatusCode:
    """The code of the answer."""
    address, options = f"127.0.0.1:{receiver.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
    channel = aio.insecure_channel(address, options=options)
    if authority is not None:
        channel = aio.secure_channel(address, credentials_of(authority, client), options=options)
    async with channel:
        metadata = (("authorization", token),) if token else ()
        call = channel.unary_unary(SIGNALS["traces"])(odd_export(NOW_NS), metadata=metadata, timeout=BOUND_S)
        return await call.code()


def guarded(authority: Authority, **more: str) -> Guard:
    return Guard(cert=authority.path("server.pem"), key=authority.path("server.key"), **more)


async def test_a_token_is_asked_for_over_tls(authority: Authority):
    """Who has none, or another, is refused before anything is read, and counted; without TLS there is no answer."""
    async with receiving(guarded(authority, token="hush")) as receiver:
        for token, status, code in (
            ("Bearer hush", 200, grpc.StatusCode.OK),
            ("", 401, grpc.StatusCode.UNAUTHENTICATED),
            ("Bearer hus", 401, grpc.StatusCode.UNAUTHENTICATED),
        ):
            assert status == await over_http(receiver, authority, "", token)
            assert code == await over_grpc(receiver, authority, "", token)
        assert receiver.counts() == ReceiverCounts(exports=2, spans=2, unauthorized=4)
        assert 0 == await over_http(receiver, None, "", "Bearer hush")
        assert grpc.StatusCode.UNAVAILABLE == await over_grpc(receiver, None, "", "Bearer hush")
        assert 2 == receiver.counts().exports


async def test_a_client_certificate_is_asked_for(authority: Authority):
    """One that the authority has signed; no other, and not none."""
    async with receiving(guarded(authority, ca=authority.path("ca.pem"))) as receiver:
        for client in ("", "unrelated"):
            assert 0 == await over_http(receiver, authority, client, "")
            assert grpc.StatusCode.UNAVAILABLE == await over_grpc(receiver, authority, client, "")
        assert 200 == await over_http(receiver, authority, "client", "")
        assert grpc.StatusCode.OK == await over_grpc(receiver, authority, "client", "")
        assert (2, 0) == (receiver.counts().exports, receiver.counts().unauthorized)


async def test_a_certificate_that_cannot_be_used_is_named(authority: Authority):
    """As where one is sent."""
    guard = Guard(cert=authority.path("server.pem"), key=authority.path("client.key"))
    with pytest.raises(UnusableFile, match="is not the key of this certificate"):
        async with receiving(guard):
            pass
