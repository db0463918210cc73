"""One request for one token before any load: whether the target answers as a load needs it, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from loadgen.http1 import ProtocolError, parse_head
from loadgen.protocols import PROTOCOLS
from loadgen.protocols.reading.failures import UNREADABLE
from loadgen.protocols.reading.reply import Reply
from loadgen.protocols.request import Prompt, Target
from loadgen.records import plan_end
from loadgen.transports import open_transport
from loadgen.transports.transport import Exchange, WorkerSpec
from rundir.clock import Clock
from sidecar.errors import TargetIncompatible, TargetUnreachable
from sidecar.run.target import NO_KEY, UNAUTHORIZED, Contact, Served, excerpt_of

PREFLIGHT_TIMEOUT_S = 120.0  # a first request may compile kernels
CATCH_UP_S = 0.1
# Extensions, or younger than many servers: one that refuses such a field is asked without it.
OPTIONAL_FIELDS = ("ignore_eos", "stream_options", "store")
_REFUSALS = {400, 422}
_REASON_CHARS = 100


async def preflight(served: Served, *, contact: Contact, ignore_eos: bool = False) -> dict[str, str]:
    """Send one request for one token, just as the load will be sent, and require a stream of what can be streamed.

    A server that refuses one of OPTIONAL_FIELDS by its name is asked again without it. Returns these fields, each with
    what the server said of it. Raises TargetUnreachable, or TargetIncompatible with what came instead; for a model that
    is not listed, first why it is not.
    """
    refused: dict[str, str] = {}
    while True:
        asked = without_fields(contact, refused)
        path, body = _one_token(served, asked, ignore_eos=ignore_eos)
        exchange, reply = await _answered(served.url, path, body, asked)
        field = _refused_field(exchange, reply, body, contact)
        if field is None:
            try:
                _require_answer(f"{served.url}{path}", exchange, reply, asked, ignore_eos=ignore_eos)
            except TargetIncompatible as error:
                if served.unlisted is None:
                    raise
                raise type(served.unlisted)(f"{served.unlisted}; {error}") from error
            return refused
        refused[field] = _said(exchange, reply)


def without_fields(contact: Contact, fields: Iterable[str]) -> Contact:
    """Return how to speak to a server that refuses these fields of a body."""
    return replace(contact, extra={**contact.extra, **dict.fromkeys(fields)})


def refusal(url: str, field: str, said: str) -> str:
    """Return what it means that a server refuses a field of a request's body."""
    effects = {
        "ignore_eos": ": replies may end before their planned length",
        "stream_options": ": where the server then reports no usage, output tokens are estimated from the text",
    }
    reason = f"{said[:_REASON_CHARS]}..." if len(said) > _REASON_CHARS else said
    return f"{url} refuses the field {field} ({reason}), so requests are sent without it{effects.get(field, '')}"


def _one_token(served: Served, contact: Contact, *, ignore_eos: bool) -> tuple[str, bytes]:
    target = Target(model=served.model, endpoint=contact.endpoint, extra=contact.extra)
    return PROTOCOLS[contact.endpoint].encode(target, Prompt(text="Hello"), 1, 0.0, ignore_eos=ignore_eos)


def _refused_field(exchange: Exchange, reply: Reply, body: bytes, contact: Contact) -> str | None:
    """Return which optional field of a body the server refuses by its name, unless the user asked for that field."""
    if exchange.status not in _REFUSALS:
        return None
    try:
        sent = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:  # gRPC's
        return None
    fields = [field for field in OPTIONAL_FIELDS if field in sent and field not in contact.extra]
    # A body may repeat the whole request: what its message names comes first.
    named = (
        field for text in (reply.error, exchange.body.decode(errors="replace")) for field in fields if field in text
    )
    return next(named, None)


def _said(exchange: Exchange, reply: Reply) -> str:
    return reply.error.partition(": ")[2] or excerpt_of(bytes(exchange.body))


def _require_answer(url: str, exchange: Exchange, reply: Reply, contact: Contact, *, ignore_eos: bool) -> None:
    """Raise TargetUnreachable or TargetIncompatible unless one token came, and as a stream where there can be one."""
    protocol = PROTOCOLS[contact.endpoint]
    if exchange.error.startswith("timeout"):
        took = f"took more than {PREFLIGHT_TIMEOUT_S:g} s; is the engine stuck?"
        open_ended = f"was announced as complete, but its response did not end within {PREFLIGHT_TIMEOUT_S:g} s"
        raise TargetUnreachable(f"{url}: one token {open_ended if reply.done else took}")
    if exchange.status == 0:
        said = "the model list answered, a completion did not" if protocol.models is not None else "check --url"
        raise TargetUnreachable(f"{url}: {exchange.error}; {said}")
    if exchange.status != 200:
        cure = _cure_of_status(exchange.status, contact, ignore_eos=ignore_eos)
        said = _said(exchange, reply)
        raise TargetIncompatible(f"{url}: HTTP {exchange.status} to a request for one token: {said}{cure}")
    excerpt = excerpt_of(bytes(exchange.body))
    kind = _content_type(exchange.head)
    if protocol.streams and kind in {"application/json", "text/html", "text/plain"}:
        raise TargetIncompatible(f"{url}: answers {kind}, not a stream: {excerpt}")
    if reply.error or not reply.complete:
        why = reply.error or f"the response is incomplete: {excerpt}"
        raise TargetIncompatible(f"{url}: a request for one token failed: {why}")


def _cure_of_status(status: int, contact: Contact, *, ignore_eos: bool) -> str:
    if status in UNAUTHORIZED:
        return f"; {NO_KEY}"
    if status in {404, 405}:
        return f"; it does not seem to offer --endpoint {contact.endpoint}: choose one that it has"
    if status in _REFUSALS and ignore_eos and "ignore_eos" not in contact.extra:
        return "; where it does not know ignore_eos, add --no-ignore-eos"
    return ""


async def _answered(url: str, path: str, body: bytes, contact: Contact) -> tuple[Exchange, Reply]:
    """Exchange one request, and read what came."""
    exchange = await _exchanged(url, path, body, contact)
    reads_ns, ends = np.array(exchange.reads_ns, np.int64), np.array(exchange.read_ends, np.int64)
    read_reply = PROTOCOLS[contact.endpoint].read_reply
    return exchange, read_reply(exchange.status, exchange.head, bytes(exchange.body), reads_ns, ends)


async def _exchanged(url: str, path: str, body: bytes, contact: Contact) -> Exchange:
    """Exchange one request over the load's own transport."""
    spec = WorkerSpec(
        worker=0,
        workers=1,
        run_id="preflight",
        clock_offset_ns=0,
        headers=dict(contact.headers),
        out="",
        request_timeout_s=PREFLIGHT_TIMEOUT_S,
        urls=[url],
        transport=PROTOCOLS[contact.endpoint].transport,
        protocol=contact.endpoint,
        tls=contact.tls,
        request_id=contact.request_id,
    )
    clock = Clock(offset_ns=0)
    exchange = Exchange(index=0, scheduled_ns=-1, dispatch_ns=clock.now_ns())
    planned = msgspec.structs.replace(plan_end("preflight"), index=0, path=path, body=body)
    async with open_transport(spec, clock) as transport:
        performed = asyncio.ensure_future(transport.perform(exchange, planned, timeout_s=PREFLIGHT_TIMEOUT_S))
        try:
            while not performed.done():
                # The end of a body that has bytes behind it shows only to who asks; in a load the recorder does.
                await asyncio.wait([performed], timeout=CATCH_UP_S)
                exchange.catch_up()
        finally:
            performed.cancel()
    return exchange


def _content_type(head: bytes) -> str:
    try:
        return parse_head(head).headers.get("content-type", "").partition(";")[0].strip().lower()
    except ProtocolError:
        return ""
