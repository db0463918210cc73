"""One request before any load: checks of the target's answer, and the fields that it refuses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from sidelight.loadgen.http1 import ProtocolError, parse_head
from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.reading.stream import EMPTY
from sidelight.loadgen.protocols.request import Prompt, RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest, plan_end, request_id, span_id, trace_id
from sidelight.loadgen.requests.table.rows import END_BYTES
from sidelight.loadgen.transports import open_transport
from sidelight.loadgen.transports.transport import Exchange, WorkerSpec
from sidelight.recorded.errors import TargetIncompatible, TargetUnreachable
from sidelight.rundir.clock import AnchoredClock
from sidelight.sidecar.run.preparation.target import NO_KEY, UNAUTHORIZED, Contact, TargetInfo, excerpt_of

PREFLIGHT = "preflight"  # the run of its requests, by which their traces are known
PREFLIGHT_TIMEOUT_S = 120.0  # a first request may compile kernels
CATCH_UP_S = 0.1
SOON_S = 5.0  # of waiting before a line says what for
# Extensions, or younger than many servers: one that refuses such a field is asked without it.
OPTIONAL_FIELDS = ("ignore_eos", "stream_options", "store")
MOST_ATTEMPTS = len(OPTIONAL_FIELDS) + 2  # without each of these, and once for more tokens
_REFUSALS = {400, 422}
# Lengths in the words of a server that refuses a request for so few tokens, and how many it is asked for then.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "min_tokens")
FEW_TOKENS = 16
LOG_SAYS = "the server's own log, or that of a proxy before it, says why"
_UNKNOWN_FIELD = re.compile(
    r"extra|unknown|unrecogni[sz]ed|unexpected|unsupported|additional|not permitted", re.IGNORECASE
)
TOO_MANY, SERVER_ERROR = 429, 500
_REASON_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    """A request of our own, for `tokens` tokens, and its reply.

    contact  how it was sent: without the optional fields that the server `refused`, each with what was said of it
    """

    url: str
    run_id: str
    tokens: int
    contact: Contact
    exchange: Exchange
    reply: Reply
    refused: Mapping[str, str]

    @property
    def trace_id(self) -> str:
        return trace_id(self.run_id, self.exchange.index)

    @property
    def span_id(self) -> str:
        return span_id(self.run_id, self.exchange.index)

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of its reply, their names in lower case; none where they cannot be read."""
        return _headers(self.exchange.head)

    @property
    def request_id(self) -> str:
        """Return its X-Request-Id."""
        return request_id(self.run_id, self.exchange.index)


async def preflight(
    served: TargetInfo, *, contact: Contact, ignore_eos: bool = False, say: Callable[[str], None] = lambda _: None
) -> Mapping[str, str]:
    """Send one request for one token, just as the load will be sent. A stream is required of each endpoint that can
    stream. Where the token does not come soon, `say` gets a line that it is waited for.

    Returns the optional fields that the server refuses, each with what it said of it. Raises TargetUnreachable, or
    TargetIncompatible with what came instead; for a model that is not listed, first why it is not.
    """
    waits = f"waiting for a token of {served.url}, up to {PREFLIGHT_TIMEOUT_S:g} s: a first request may compile kernels"
    notice = asyncio.get_running_loop().call_later(SOON_S, say, waits)
    try:
        answer = await ask(served, contact=contact, ignore_eos=ignore_eos)
    finally:
        notice.cancel()
    require_answer(answer, served, ignore_eos=ignore_eos)
    return answer.refused


async def ask(
    served: TargetInfo,
    *,
    contact: Contact,
    ignore_eos: bool = False,
    run_id: str = PREFLIGHT,
    tokens: int = 1,
    clock: AnchoredClock = AnchoredClock(offset_ns=0),  # noqa: B008  it is frozen
) -> ProbeReply:
    """Send one request, stamped by a clock, and return its answer, also a failure.

    A server that refuses one of OPTIONAL_FIELDS by its name is asked again without it, as another request; one that
    refuses so few tokens, as beside `min_tokens`, is asked for more.
    """
    refused: dict[str, str] = {}
    attempt = 0
    while True:
        asked = without_fields(contact, refused)
        target = RequestTarget(model=served.model, endpoint=asked.endpoint, extra=asked.extra)
        protocol = PROTOCOLS[asked.endpoint]
        path, body = protocol.encode(target, Prompt(text="Hello"), tokens, 0.0, ignore_eos=ignore_eos)
        planned = msgspec.structs.replace(plan_end(run_id), index=attempt, path=path, body=body)
        exchange = await _exchanged(served.url, planned, run_id, asked, clock)
        reads_ns, ends = np.array(exchange.reads_ns, np.int64), np.array(exchange.read_ends, np.int64)
        reply = protocol.read_reply(exchange.status, exchange.head, bytes(exchange.body), reads_ns, ends)
        field = _refused_field(exchange, reply, body, contact)
        more = _more_tokens(exchange, contact, tokens)
        attempt += 1
        if field is not None:
            refused[field] = _said(exchange, reply)
        elif more > tokens:
            tokens = more
        else:
            return ProbeReply(
                url=f"{served.url}{path}",
                run_id=run_id,
                tokens=tokens,
                contact=asked,
                exchange=exchange,
                reply=reply,
                refused=refused,
            )


def without_fields(contact: Contact, fields: Iterable[str]) -> Contact:
    """Return contact with a server without the given fields of a body, which it refuses."""
    return replace(contact, extra={**contact.extra, **dict.fromkeys(fields)})


def refusal(url: str, field: str, said: str) -> str:
    """Return a note on a refused field of a request's body and its effect."""
    effects = {
        "ignore_eos": ": replies may end before their planned length",
        "stream_options": ": where the server then reports no usage, output tokens are estimated from the text",
    }
    reason = f"{said[:_REASON_CHARS]}..." if len(said) > _REASON_CHARS else said
    return f"{url} refuses the field {field} ({reason}), so requests are sent without it{effects.get(field, '')}"


def _refused_field(exchange: Exchange, reply: Reply, body: bytes, contact: Contact) -> str | None:
    """Return the optional field that the server refuses by its name, or None. A field that the user asked for does not
    count.
    """
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


def _more_tokens(exchange: Exchange, contact: Contact, tokens: int) -> int:
    """Return the number of tokens to ask for after a reply. It is larger where the server refuses so few, else the same
    as before.
    """
    if exchange.status not in _REFUSALS or not any(name.encode() in bytes(exchange.body) for name in _LENGTHS):
        return tokens
    least = contact.extra.get("min_tokens")
    return max(tokens, FEW_TOKENS, least if isinstance(least, int) else 0)


def _said(exchange: Exchange, reply: Reply) -> str:
    return reply.error.partition(": ")[2] or excerpt_of(bytes(exchange.body))


def require_answer(answer: ProbeReply, served: TargetInfo, *, ignore_eos: bool) -> None:
    """Require that the tokens came, and as a stream where there can be one. Raises TargetUnreachable or
    TargetIncompatible.

    Of a model that is not listed, the error says first why it is not.
    """
    try:
        _require_answer(answer, served.model, ignore_eos=ignore_eos)
    except TargetIncompatible as error:
        if served.unlisted is None:
            raise
        raise type(served.unlisted)(served.unlisted.code, f"{served.unlisted}; {error}") from error


def _require_answer(answer: ProbeReply, model: str, *, ignore_eos: bool) -> None:
    url, exchange, reply, contact = answer.url, answer.exchange, answer.reply, answer.contact
    protocol = PROTOCOLS[contact.endpoint]
    tokens = "one token" if answer.tokens == 1 else f"{answer.tokens} tokens"
    if exchange.error.startswith("timeout"):
        took = f"took more than {PREFLIGHT_TIMEOUT_S:g} s; is the engine stuck?"
        open_ended = f"was announced as complete, but its response did not end within {PREFLIGHT_TIMEOUT_S:g} s"
        raise TargetUnreachable("target.no-token", f"{url}: {tokens} {open_ended if reply.done else took}")
    if exchange.status == 0:
        said = "the model list answered, a completion did not" if protocol.models is not None else "check --url"
        raise TargetUnreachable("target.no-token", f"{url}: {exchange.error}; {said}")
    if exchange.status != 200:
        said = _said(exchange, reply).rstrip(".")
        names_model = model and re.search(rf"(?<!\w){re.escape(model)}(?!\w)", said)
        if exchange.status == 404 and names_model:
            cure = "; choose a model that it serves with --model"
        else:
            cure = _cure_of_status(exchange.status, said, contact, ignore_eos=ignore_eos)
        raise TargetIncompatible(
            "target.refused", f"{url}: HTTP {exchange.status} to a request for {tokens}: {said}{cure}"
        )
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if is_streamed(contact) and kind in {"application/json", "text/html", "text/plain"}:
        raise TargetIncompatible(
            "target.not-streaming", f"{url}: answers {kind}, not a stream: {excerpt_of(bytes(exchange.body))}"
        )
    if reply.error or not reply.complete or (exchange.error and not reply.done):
        raise TargetIncompatible(
            "target.failed", f"{url}: a request for {tokens} failed: {_why_incomplete(exchange, reply)}"
        )


def is_streamed(contact: Contact) -> bool:
    """Return whether requests ask for streamed replies."""
    return PROTOCOLS[contact.endpoint].streams and contact.extra.get("stream") is not False


def _why_incomplete(exchange: Exchange, reply: Reply) -> str:
    if reply.error:
        return f"{reply.error}; {LOG_SAYS}"
    if exchange.error.startswith("reset"):
        return f"{exchange.error}; the server, or something before it, resets connections in the middle of replies"
    body = b"" if len(exchange.body) <= END_BYTES else bytes(exchange.body)
    ended = "the reply ended without a finish reason or [DONE]"
    return exchange.error or (f"{ended}: {excerpt_of(body)}" if body else f"empty: {EMPTY}; {LOG_SAYS}")


def _cure_of_status(status: int, said: str, contact: Contact, *, ignore_eos: bool) -> str:
    if status in UNAUTHORIZED:
        return f"; {NO_KEY}"
    if status in {404, 405}:
        return f"; it does not seem to offer --endpoint {contact.endpoint}: choose one that it has"
    if status == TOO_MANY:
        return "; the key, or the server, has a limit: wait, send fewer requests (--rate), or raise the key's quota"
    if status >= SERVER_ERROR:
        return f"; {LOG_SAYS}"
    if status in _REFUSALS and ignore_eos and "ignore_eos" not in contact.extra and _UNKNOWN_FIELD.search(said):
        return "; where it does not know ignore_eos, add --no-ignore-eos"
    return ""


async def _exchanged(
    url: str, planned: PlannedRequest, run_id: str, contact: Contact, clock: AnchoredClock
) -> Exchange:
    """Exchange one request over the load's own transport."""
    spec = WorkerSpec(
        worker=0,
        workers=1,
        run_id=run_id,
        clock_offset_ns=clock.offset_ns,
        headers=dict(contact.headers),
        out="",
        request_timeout_s=PREFLIGHT_TIMEOUT_S,
        urls=[url],
        transport=PROTOCOLS[contact.endpoint].transport,
        protocol=contact.endpoint,
        tls=contact.tls,
    )
    exchange = Exchange(index=planned.index, scheduled_ns=-1, dispatch_ns=clock.now_ns())
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


def _headers(head: bytes) -> Mapping[str, str]:
    try:
        return parse_head(head).headers
    except ProtocolError:
        return {}
