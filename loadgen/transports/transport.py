"""The common parts of every transport: specification, exchange and reasons of failures.

The specification is a worker's; an exchange has its stamps.

Nothing here needs numpy or aiohttp, so that a load worker starts fast.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, Self

import msgspec

from sidelight.loadgen.records import MOST_REPLY_BYTES, PlannedRequest
from sidelight.rundir.access import Tls, connection_problem, root_url
from sidelight.rundir.child import ChildSpec

# A reply's body goes to the log in parts of this many bytes: packing more at once would hold up the stamps of others.
PART_BYTES = 256 * 1024
_MESSAGE_CHARS = 200


class WorkerSpec(ChildSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's specification, sent once.

    header_sets  further headers of single requests, by `PlannedRequest.headers`; over HTTP only
    urls       the servers' roots, with or without /v1; the plan's paths go behind the one that a request names
    protocol   the name in protocols.PROTOCOLS that reads the replies
    reuse      keep connections for further requests
    sessions   send the later turns of sessions too; without it, only the first ones
    redact_bodies  write no text of a reply, but its length and a hash; a reply is then logged when it has ended
    stand_ins  what stands in the plan's bodies in place of secrets, each with what is sent
    """

    worker: int
    workers: int
    run_id: str
    clock_offset_ns: int
    headers: dict[str, str]
    header_sets: tuple[dict[str, str], ...] = ()
    out: str
    request_timeout_s: float
    max_reply_bytes: int = MOST_REPLY_BYTES
    urls: Annotated[list[str], msgspec.Meta(min_length=1)]
    transport: Literal["http", "websocket", "grpc"] = "http"
    protocol: str = "chat"
    tls: Tls = Tls()
    reuse: bool = True
    sessions: bool = False
    redact_bodies: bool = False
    stand_ins: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def roots(self) -> list[str]:
        """Return the URLs as `PlannedRequest.path` goes behind them."""
        return [root_url(url) for url in self.urls]


def _nothing() -> None:
    pass


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request and its reply so far. It is filled in place, since the hot path can afford no copy.

    Stamps are -1 until known. `retried` says that it was sent once more on a new connection. `held_ns` is for how long
    a cap held the request back. `reads_ns`, `read_ends` and `body` hold what has not been logged yet, as does `head`,
    which only HTTP has. Over WebSocket and gRPC a read is a message, and `status` what HTTP would have said.
    While the exchange is under way, they have all that came only after a call of `catch_up`, which may find its end.
    `flush` is called when they hold PART_BYTES. A body longer than `most_bytes` ends the exchange.
    A session's next turn needs them: where `kept_body` is there, the log leaves body, read ends and head in it,
    `kept_ends` and `kept_head`.
    """

    index: int
    scheduled_ns: int
    dispatch_ns: int
    held_ns: int = 0
    connected_ns: int = -1
    submit_ns: int = -1
    end_ns: int = -1
    reused: bool = False
    retried: bool = False
    status: int = 0
    head: bytes = b""
    reads_ns: array[int] = field(default_factory=lambda: array("q"))
    read_ends: array[int] = field(default_factory=lambda: array("q"))
    body: bytearray = field(default_factory=bytearray)
    body_bytes: int = 0
    most_bytes: int = MOST_REPLY_BYTES
    error: str = ""
    kept_body: bytearray | None = None
    kept_ends: array[int] = field(default_factory=lambda: array("q"))
    kept_head: bytes = b""
    catch_up: Callable[[], None] = _nothing
    flush: Callable[[], None] = _nothing

    @property
    def received_bytes(self) -> int:
        """Return the length of the body so far, including the logged part."""
        return self.body_bytes + len(self.body)

    @property
    def excess(self) -> str:
        """Return an error if the body is too large, else "". The exchange cannot go on then."""
        return too_large(self.most_bytes) if self.received_bytes > self.most_bytes else ""

    def take(self, message: bytes, at_ns: int) -> None:
        """Record a message as a read."""
        self.body += message
        self.reads_ns.append(at_ns)
        self.read_ends.append(len(self.body))
        if len(self.body) >= PART_BYTES:
            self.flush()

    def send_again(self) -> None:
        """Reset the results of the first sending, which got no byte of a reply."""
        self.connected_ns = self.submit_ns = self.end_ns = -1
        self.error, self.reused, self.retried = "", False, True


class Transport(Protocol):
    """Connections to a worker's targets; an async context manager that owns them all."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def perform(self, exchange: Exchange, planned: PlannedRequest, *, timeout_s: float) -> None:
        """Send a request and wait for the end of its reply; whatever happens stands in `exchange`.

        Raises nothing but CancelledError, when it has ended the stream or the connection; naming the reason in
        `exchange.error` is then the caller's.
        """


def too_large(most_bytes: int) -> str:
    """Return the error of a reply that is longer than it may be."""
    return f"too_large: more than {most_bytes} body bytes"


def waiting_for(exchange: Exchange) -> str:
    """Return the missing step of an exchange that took too long."""
    if exchange.connected_ns < 0:
        return "no connection"
    if exchange.submit_ns < 0:
        return "the request was not taken"
    return "no response" if not exchange.reads_ns and exchange.status == 0 else "no complete reply"


def one_line(error: BaseException) -> str:
    """Return an exception's message for a log: one line, at most 200 characters, TLS failures marked as such."""
    problem = connection_problem(error)
    text = problem.reason
    if problem.kind == "tls":
        text = f"tls: {problem.detail or problem.reason or error}"
    elif problem.kind == "name":
        text = f"name not resolved: {problem.detail}"
    return " ".join(text.split())[:_MESSAGE_CHARS]
