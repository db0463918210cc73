"""What carries requests: how a worker is told of its targets, and the one thing it asks of a transport."""

from __future__ import annotations

import ssl
from functools import cache
from typing import Annotated, Literal, Protocol, Self

import msgspec

from loadgen.records import PlannedRequest
from loadgen.transports.transport import Exchange


class TlsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How https:// targets are trusted, and who we are to them; paths of PEM files, "" where there is none.

    ca        authorities to trust instead of the system's
    cert      our certificate, with its key where `key` names no other file
    insecure  trust anybody
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    insecure: bool = False


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told once.

    urls       the servers' roots, with or without /v1; the plan's paths go behind the one that a request names
    protocol   the name in protocols.PROTOCOLS that reads the replies
    reuse      keep connections for further requests
    stderr     file that the worker's standard error goes to; "": where it goes already
    sessions   send the later turns of sessions too; without it, only the first ones
    """

    worker: int
    workers: int
    run_id: str
    clock_offset_ns: int
    headers: dict[str, str]
    out: str
    request_timeout_s: float
    urls: Annotated[list[str], msgspec.Meta(min_length=1)]
    transport: Literal["http", "websocket", "grpc"] = "http"
    protocol: str = "chat"
    tls: TlsSpec = TlsSpec()
    reuse: bool = True
    sessions: bool = False
    stderr: str = ""

    @property
    def roots(self) -> list[str]:
        """The URLs with nothing behind their last name, not even /v1: `PlannedRequest.path` begins with it."""
        return [url.rstrip("/").removesuffix("/v1") for url in self.urls]


class Link(Protocol):
    """Connections to a worker's targets; an async context manager that owns them all."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def perform(self, exchange: Exchange, planned: PlannedRequest, *, timeout_s: float) -> None:
        """Send a request and wait for the end of its reply; whatever happens stands in `exchange`.

        Raises nothing but CancelledError, when it has ended the stream or the connection; naming the reason in
        `exchange.error` is then the caller's.
        """


@cache
def tls_context(spec: TlsSpec) -> ssl.SSLContext:
    """The client side of TLS; made once, since reading the system's authorities takes some 30 ms.

    Raises OSError when a file cannot be read or is none of its kind.
    """
    context = ssl.create_default_context(cafile=spec.ca or None)
    if spec.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if spec.cert:
        context.load_cert_chain(spec.cert, spec.key or None)
    return context
