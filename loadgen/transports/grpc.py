"""Requests over gRPC streams, a stream a request; grpcio does the wire.

Messages pass as bytes, so that nothing is decoded here: each is a read of the exchange, stamped when the event loop
hands it over. A status before the first message is the exchange's status, paired with HTTP's; a later one is its error.
Imported only where it is chosen, because grpcio is heavy.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

# Read on import; else each failed handshake is written to standard error, where the log tells of it already.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc import aio

from sidelight.loadgen.records import MOST_MESSAGE_BYTES, PlannedRequest, request_id, traceparent
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec, too_large, waiting_for
from sidelight.rundir.access import Tls
from sidelight.rundir.clock import AnchoredClock

# What HTTP/2 asks a server to allow at least; beyond a server's limit streams would wait in the client, unseen.
_STREAMS_PER_CONNECTION = 100
# No proxy: as over HTTP, what is measured is the target.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_MESSAGE_CHARS = 200
_TOO_LARGE = "CLIENT: Received message larger than max"  # grpcio's own word, as for the connection below
_TLS_REASON = re.compile(r"OPENSSL_internal:(\w+)")
# As google.rpc.Code pairs them with HTTP.
_HTTP = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(slots=True, eq=False)
class _Channel:
    """A connection and its number of streams."""

    channel: aio.Channel
    streams: int = 0


class GrpcTransport:
    """Connections to gRPC servers, a hundred streams each at most; owns them all."""

    def __init__(self, spec: WorkerSpec, clock: AnchoredClock) -> None:
        """Prepare TLS. Raises OSError when a certificate cannot be read, ValueError for TLS that grpcio cannot do."""
        self._spec = spec
        self._clock = clock
        self._credentials = _credentials(spec.tls) if any(_is_tls(url) for url in spec.roots) else None
        self._headers = tuple((name.lower(), value) for name, value in spec.headers.items())
        self._most_bytes = min(spec.max_reply_bytes, MOST_MESSAGE_BYTES)
        self._channels: dict[str, list[_Channel]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channels in self._channels.values():
            for channel in channels:
                await channel.channel.close()

    async def perform(self, exchange: Exchange, planned: PlannedRequest, *, timeout_s: float) -> None:
        """Send a request and wait for the end of its stream; whatever happens stands in `exchange`; see Transport."""
        url = self._spec.roots[planned.url]
        taken = self._take(url)
        taken.streams += 1
        call: Any = None
        try:
            async with asyncio.timeout(timeout_s):
                exchange.reused = taken.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY
                connected = await _connected(taken.channel)
                exchange.connected_ns = self._clock.now_ns() if connected else -1
                await self._talk(call := self._call(taken, planned), exchange)
        except TimeoutError:
            exchange.error = f"timeout: {waiting_for(exchange)} within {timeout_s:g} s"
        except aio.AioRpcError as error:
            self._failed(exchange, error)
        finally:
            taken.streams -= 1
            if call is not None:
                call.cancel()
            if not self._spec.reuse:
                self._channels[url].remove(taken)
                await taken.channel.close()
            exchange.end_ns = self._clock.now_ns() if exchange.end_ns < 0 else exchange.end_ns

    def _call(self, taken: _Channel, planned: PlannedRequest) -> Any:
        """Begin a call with its one message and half-close it: on the wire the same as a stream of one.

        Were the message written to a stream, and refused before it was read, then grpcio might keep its own "Internal
        error from Core" in the place of the server's status, which had come first.
        """
        own_id, parent = request_id(self._spec.run_id, planned.index), traceparent(self._spec.run_id, planned.index)
        begin: Any = taken.channel.unary_stream(planned.path)
        metadata = (*self._headers, ("x-request-id", own_id), ("traceparent", parent))
        return begin(_with_id(planned.body, own_id), metadata=metadata)

    async def _talk(self, call: Any, exchange: Exchange) -> None:
        """Read the call to its end. Raises AioRpcError unless it ends well."""
        await asyncio.sleep(0)  # grpcio's task hands the message to its core, whose transport sends it at once
        begun_ns = self._clock.now_ns()
        exchange.submit_ns = begun_ns if exchange.connected_ns >= 0 else -1
        while (message := await call.read()) is not aio.EOF:
            at_ns = self._clock.now_ns()
            if exchange.status == 0:
                exchange.status = 200
                exchange.connected_ns = begun_ns if exchange.connected_ns < 0 else exchange.connected_ns
                exchange.submit_ns = begun_ns
            if not message:
                continue  # says nothing, and would look like the end
            exchange.take(message, at_ns)
            if exchange.excess:
                exchange.end_ns, exchange.error = at_ns, exchange.excess
                return
        code, details = await call.code(), await call.details()
        if code is not grpc.StatusCode.OK:
            raise aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details)
        # A read of nothing is the call's end, with status OK.
        exchange.status = 200
        exchange.end_ns = self._clock.now_ns()
        exchange.take(b"", exchange.end_ns)

    def _failed(self, exchange: Exchange, error: aio.AioRpcError) -> None:
        code, details = error.code(), " ".join((error.details() or "").split())[:_MESSAGE_CHARS]
        if _TOO_LARGE in details:
            exchange.error = too_large(self._most_bytes)
        elif exchange.connected_ns < 0:
            exchange.error = f"connect: {_reason(error.details() or code.name)}"
        elif exchange.status == 200 and code is grpc.StatusCode.UNAVAILABLE:
            # grpcio's own word for a connection that broke.
            size = exchange.received_bytes
            exchange.error = f"reset: {details or 'the connection broke'} after {size} body bytes"
        elif exchange.status == 200:
            exchange.error = f"server: {details or code.name}"
        else:
            exchange.status = _HTTP.get(code, 500)
            exchange.body += (details or code.name).encode()
        exchange.end_ns = self._clock.now_ns()

    def _take(self, url: str) -> _Channel:
        channels = self._channels.setdefault(url, [])
        most = _STREAMS_PER_CONNECTION if self._spec.reuse else 1
        free = next((channel for channel in channels if channel.streams < most), None)
        if free is None:
            free = _Channel(self._open(url))
            channels.append(free)
        return free

    def _open(self, url: str) -> aio.Channel:
        address = urlsplit(url).netloc
        options = [*_OPTIONS, ("grpc.max_receive_message_length", self._most_bytes)]
        if self._credentials is not None and _is_tls(url):
            return aio.secure_channel(address, self._credentials, options=options)
        return aio.insecure_channel(address, options=options)


async def _connected(channel: aio.Channel) -> bool:
    """Wait until the channel is connected, True, or a try has failed, False."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return False
        await channel.wait_for_state_change(state)
    return True


def _reason(details: str) -> str:
    """Return the reason for a failed connection. It is without grpcio's own words and the addresses around it."""
    if tls_reason := _TLS_REASON.search(details):
        return f"tls: {tls_reason[1]}"
    unresolved = "lookup failed" in details or "DNS" in details
    reason = " ".join(details.rpartition(": ")[2].split()).strip(" ].")
    return f"{'name not resolved: ' if unresolved else ''}{reason}"[:_MESSAGE_CHARS]


def _with_id(body: bytes, request_id: str) -> bytes:
    """Return a serialized ModelInferRequest with an id: protobuf reads fields appended to a message as part of it."""
    text = request_id.encode()  # far below 128 bytes, so its length takes one
    return body + b"\x1a" + bytes([len(text)]) + text


def _is_tls(url: str) -> bool:
    return url.startswith(("https:", "grpcs:"))


def _credentials(spec: Tls) -> grpc.ChannelCredentials:
    if spec.insecure:
        raise ValueError("tls: grpcio cannot leave a server's certificate unchecked; name its authority instead")
    read = [Path(name).read_bytes() if name else None for name in (spec.ca, spec.key or spec.cert, spec.cert)]
    return grpc.ssl_channel_credentials(*read)
